"""The doctor finds what is wrong, and says how to cure it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from editor import fake_model
from msgspec.structs import replace

from infill_lsp.doctor import PACKAGES, _Report, _suiting
from infill_lsp.settings import Settings

pytestmark = pytest.mark.process


def doctor(*arguments: str, **environment: str) -> tuple[int, str]:
    """Exit code and output."""
    command = [sys.executable, "-m", "infill_lsp", "doctor", *arguments]
    result = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, encoding="utf-8", timeout=120
    )
    assert result.stderr == ""
    return result.returncode, result.stdout


def test_where_all_is_well_a_completion_is_shown_with_its_time(home: Path) -> None:
    code, output = doctor("--model", fake_model(home, "quick", {"return ": "a + b"}))
    assert code == 0, output
    assert "✗" not in output
    last = output.splitlines()[-2]
    assert "[a + b] in " in last
    assert last.endswith(" ms")


def test_a_model_that_says_nothing_is_not_well(home: Path) -> None:
    code, output = doctor("--model", fake_model(home, "mute", {}))
    assert code == 1
    assert "✗ completion: no text" in output


def test_every_fault_comes_with_a_cure(home: Path) -> None:
    python = home / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E "$@"\n')  # A Python without any package.
    python.chmod(0o700)
    (home / "cache").write_text("a file where the folder should be")
    code, output = doctor("--python", str(python), "--model", fake_model(home, "quick", {}))
    lines = output.splitlines()
    faults = [index for index, line in enumerate(lines) if line.startswith("✗")]
    assert code == 1
    assert [lines[index].split()[1] for index in faults] == ["torch", "not", str(home / "cache"), "engine:"]
    assert all(lines[index + 1].startswith("  cure: ") for index in faults)
    assert "pip install" in output
    assert "No module named infill_engine" in output


def test_a_python_that_is_none_is_named(home: Path) -> None:
    code, output = doctor("--python", "/nowhere/python", "--model", "m")
    assert code == 1
    assert "✗ Python of the engine: no program /nowhere/python" in output


@pytest.mark.parametrize("version", ["2.10.1", "2.14.0+cpu", "unknown"])
def test_a_torch_that_does_not_fit_is_a_fault(home: Path, version: str) -> None:
    python = home / "python"
    versions = json.dumps(dict.fromkeys(PACKAGES, "1.0") | {"torch": version})
    python.write_text(f"#!/bin/sh\necho '{versions}'\n[ \"$1\" = -c ]\n")
    python.chmod(0o700)
    code, output = doctor("--python", str(python), "--model", "m")
    assert code == 1
    assert f"✗ torch {version} in {python} does not fit torch>=2.11,<2.14\n  cure: {python} -m pip install" in output
    assert '"torch>=2.11,<2.14"' in output


def test_it_looks_for_all_that_the_engine_needs() -> None:
    project = tomllib.loads(Path(__file__).parents[2].joinpath("pyproject.toml").read_text())["project"]
    needed = {re.match(r"[\w-]+", one)[0] for one in project["optional-dependencies"]["engine"]}
    assert {"torch", "pip", *PACKAGES} == needed


def test_a_fault_of_the_socket_is_told_once(home: Path) -> None:
    (home / "run").mkdir(mode=0o755)
    code, output = doctor("--model", "m")
    assert code == 1
    assert output.count("mode 0700") == 1
    assert output.count("✗") == 2  # The other is in the last line.


def test_a_terminal_without_check_marks_is_served(home: Path) -> None:
    code, output = doctor("--python", "/nowhere/python", "--model", "m", PYTHONIOENCODING="ascii")
    assert code == 1
    assert output.startswith("? infill-lsp ")


def test_what_the_persons_file_says_is_examined(home: Path) -> None:
    (home / "config").mkdir()
    (home / "config" / "infill.toml").write_text('model = "m"\nengine.python = "/nowhere/python"\nmax_lines = 0\n')
    code, output = doctor()
    assert code == 1
    assert "max_lines: got 0, takes a whole number from 1 to 256" in output
    assert "no program /nowhere/python" in output


def test_of_an_engine_elsewhere_only_that_it_answers_is_examined(home: Path) -> None:
    (home / "config").mkdir()
    (home / "token").write_text("0123456789abcdef")
    (home / "config" / "infill.toml").write_text(
        f'engine.address = "http://127.0.0.1:9"\nengine.token_file = "{home}/token"\n'
    )
    code, output = doctor()
    assert code == 1
    assert "no engine answers at http://127.0.0.1:9" in output
    assert "torch" not in output


def test_it_says_which_languages_have_a_grammar_and_which_do_not(home: Path) -> None:
    """One that is not installed is no fault; one that does not load is."""
    hooks = home / "hooks"
    hooks.mkdir()
    (hooks / "tree_sitter_go.py").write_text("raise ImportError")
    (hooks / "sitecustomize.py").write_text(
        "from dataclasses import replace\n"
        "from infill_lsp.languages import LANGUAGES\n"
        "LANGUAGES['rust'] = replace(LANGUAGES['rust'], package='tree-sitter-no-such-grammar')\n"
    )
    code, output = doctor("--model", fake_model(home, "quick", {"return ": "a + b"}), PYTHONPATH=str(hooks))
    lines = output.splitlines()
    found = next(line for line in lines if line.startswith("✓ grammars: "))
    missing = next(index for index, line in enumerate(lines) if line.startswith("- no grammar"))
    assert code == 1
    assert re.search(r"\bpython \d", found)
    assert not re.search(r"\b(go|rust) \d", found)
    assert "rust" in lines[missing]
    assert "infill-lsp[grammars]" in lines[missing + 1]
    assert [line.split(":")[0].split()[1:3] for line in lines if line.startswith("✗")] == [["grammar", "go"]]


def listing(home: Path, recommended: str, chosen: str) -> str:
    """A Python whose engine lists models so."""
    found = {
        "machine": {"line": "a GPU, 24.0 GB of memory, 23.0 GB free"},
        "recommended": recommended,
        "chosen": chosen,
        "models": [{"name": "dreamon", "title": "DreamOn 7B"}, {"name": "embedded", "title": "SmolLM2 135M"}],
    }
    (home / "models.json").write_text(json.dumps(found))
    python = home / "python"
    python.write_text(
        f'#!/bin/sh\nif [ "$3" = models ]; then cat {home}/models.json; else exec {sys.executable} "$@"; fi\n'
    )
    python.chmod(0o700)
    return str(python)


@pytest.mark.parametrize(
    ("recommended", "chosen", "model", "says", "cure"),
    [
        ("dreamon", "dreamon:bf16", "auto", "✓ model: dreamon:bf16 suits this machine (a GPU, 24.0 GB of memory", ""),
        ("dreamon:Q4", "embedded", "auto", "- model: embedded; this machine (a GPU", "infill_engine use dreamon:Q4"),
        (
            "dreamon",
            "embedded",
            "mine",
            "could run DreamOn 7B, which fills gaps better",
            "set infill.model to auto, then ",
        ),
    ],
)
def test_a_model_is_recommended_for_the_machine(
    home: Path, capsys: pytest.CaptureFixture[str], recommended: str, chosen: str, model: str, says: str, cure: str
) -> None:
    settings = replace(
        Settings(), model=model, engine=replace(Settings().engine, python=listing(home, recommended, chosen))
    )
    report = _Report()
    _suiting(report, settings)
    said = capsys.readouterr().out
    assert says in said
    assert cure in said
    assert report.well


def test_a_list_that_cannot_be_had_is_no_fault(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    python = home / "python"
    python.write_text("#!/bin/sh\necho 'infill-engine: no memory' >&2\nexit 1\n")
    python.chmod(0o700)
    report = _Report()
    _suiting(report, replace(Settings(), engine=replace(Settings().engine, python=str(python))))
    assert capsys.readouterr().out.startswith("- models: not listed (infill-engine: no memory)\n")
    assert report.well
