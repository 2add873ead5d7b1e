"""What VS Code's manifest says beyond the server's settings, which are made from their definition."""

from __future__ import annotations

import json

from journeys import REPOSITORY

EXTENSION = REPOSITORY / "editors" / "vscode"
MANIFEST = json.loads((EXTENSION / "package.json").read_text())


def test_what_starts_a_program_or_opens_an_address_is_for_the_machine_and_needs_trust() -> None:
    restricted = MANIFEST["capabilities"]["untrustedWorkspaces"]["restrictedConfigurations"]
    sections = MANIFEST["contributes"]["configuration"]
    properties = {name: known for section in sections for name, known in section["properties"].items()}
    for name in ("infill.server.path", "infill.engine.python", "infill.engine.address"):
        assert properties[name]["scope"] == "machine"
        assert name in restricted
