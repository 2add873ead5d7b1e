"""What VS Code's manifest says beyond the server's settings, which are made from their definition."""

from __future__ import annotations

import json
import re

from journeys import REPOSITORY

EXTENSION = REPOSITORY / "editors" / "vscode"
MANIFEST = json.loads((EXTENSION / "package.json").read_text())


def test_what_starts_a_program_or_opens_an_address_is_for_the_machine_and_needs_trust() -> None:
    restricted = MANIFEST["capabilities"]["untrustedWorkspaces"]["restrictedConfigurations"]
    sections = MANIFEST["contributes"]["configuration"]
    properties = {name: known for section in sections for name, known in section["properties"].items()}
    programs = {"infill.server.path", "infill.engine.python", "infill.engine.address", "infill.engine.tokenFile"}
    assert programs | {"infill.model", "infill.device", "infill.install.torchIndex"} <= set(restricted)
    assert set(restricted) >= {name for name, known in properties.items() if known["scope"] == "machine"}
    assert set(restricted) >= set(sections[0]["properties"]), "to set one again may be to widen what is read"


def test_it_runs_where_the_files_are_and_says_what_it_does_not_support() -> None:
    assert MANIFEST["extensionKind"] == ["workspace"]
    assert MANIFEST["capabilities"]["untrustedWorkspaces"]["supported"] == "limited"
    assert MANIFEST["capabilities"]["virtualWorkspaces"] is False
    assert "enabledApiProposals" not in MANIFEST


def test_the_readme_shows_a_session_that_moves_and_loads_fast() -> None:
    pictures = re.findall(r"!\[[^\]]+\]\((media/[^)]+)\)", (EXTENSION / "README.md").read_text())
    assert pictures
    for picture in pictures:
        data = (EXTENSION / picture).read_bytes()
        assert b"acTL" in data
        assert len(data) < 2**20


def test_commands_are_registered_and_none_is_the_servers() -> None:
    source = (EXTENSION / "src" / "extension.ts").read_text()
    contributed = {command["command"] for command in MANIFEST["contributes"]["commands"]}
    assert not [name for name in contributed if f"'{name}':" not in source]
    assert not [name for name in contributed if name.startswith("infill.server.")], "equal ids break activation"


def test_keys_menus_and_the_walkthrough_name_what_there_is() -> None:
    contributes = MANIFEST["contributes"]
    contributed = {command["command"] for command in contributes["commands"]}
    used = [*contributes["keybindings"], *(item for menu in contributes["menus"].values() for item in menu)]
    assert {item["command"] for item in used} <= contributed
    steps = [step for walkthrough in contributes["walkthroughs"] for step in walkthrough["steps"]]
    assert all((EXTENSION / step["media"]["markdown"]).exists() for step in steps)
    assert {event.partition(":")[2] for step in steps for event in step["completionEvents"]} <= contributed


def test_keys_are_taken_only_while_a_suggestion_is_shown() -> None:
    for binding in MANIFEST["contributes"]["keybindings"]:
        assert "inlineSuggestionVisible" in binding["when"]
