"""The settings that VS Code offers are those that the server takes; the extension's README lists them all."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
from journeys import REPOSITORY

from infill_lsp.settings import Settings, parse

EXTENSION = REPOSITORY / "editors" / "vscode"
MANIFEST = json.loads((EXTENSION / "package.json").read_text())
PROPERTIES: dict[str, dict[str, Any]] = MANIFEST["contributes"]["configuration"]["properties"]

#: The extension's own, and one whose default is the server's Python, which no manifest can know.
OURS = {"infill.server.path"}
COMPUTED = {"infill.engine.python"}


def flat(settings: dict[str, Any], path: str) -> dict[str, Any]:
    """`{"a": {"b": 1}}` as `{"a.b": 1}`."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        name = f"{path}.{key}"
        found |= flat(value, name) if isinstance(value, dict) else {name: value}
    return found


def nested(name: str, value: object) -> object:
    """`a.b` and 1 as `{"a": {"b": 1}}`, without the first part of the name."""
    for part in reversed(name.split(".")[1:]):
        value = {part: value}
    return value


def test_names_and_defaults_are_the_servers() -> None:
    offered = {name: p["default"] for name, p in PROPERTIES.items() if name not in OURS | COMPUTED}
    taken = flat(json.loads(msgspec.json.encode(Settings())), "infill")
    assert offered == {name: value for name, value in taken.items() if name not in COMPUTED}
    assert taken.keys() >= COMPUTED


def test_bounds_and_choices_are_the_servers() -> None:
    for name, offered in PROPERTIES.items():
        if name in OURS:
            continue
        for allowed in [*offered.get("enum", []), *(offered[b] for b in ("minimum", "maximum") if b in offered)]:
            assert parse(nested(name, allowed))[1] == [], f"{name}: {allowed!r} must be taken"
        for bound, step in (("minimum", -1), ("maximum", 1)):
            if bound in offered:
                assert parse(nested(name, offered[bound] + step))[1], f"{name}: beyond its {bound}"


def test_what_starts_a_program_is_for_the_machine_and_needs_trust() -> None:
    restricted = MANIFEST["capabilities"]["untrustedWorkspaces"]["restrictedConfigurations"]
    for name in ("infill.server.path", "infill.engine.python"):
        assert PROPERTIES[name]["scope"] == "machine"
        assert name in restricted


def test_the_readme_lists_every_setting_with_its_default() -> None:
    rows = re.findall(r"^\| `(infill\.[\w.]+)` \| (\S+) \|", (EXTENSION / "README.md").read_text(), re.MULTILINE)

    def shown(value: object) -> str:
        return "empty" if value == "" else f"`{value if isinstance(value, str) else json.dumps(value)}`"

    assert rows == [(name, shown(p["default"])) for name, p in PROPERTIES.items()]
