"""Where settings come from, and which hold for a folder and a document."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from infill_lsp.cli import main
from infill_lsp.settings import Settings, fields
from infill_lsp.sources import MAX_BYTES, Sources, user_file


@pytest.fixture(autouse=True)
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "config"
    folder.mkdir()
    monkeypatch.setenv("INFILL_CONFIG_DIR", str(folder))
    return folder / "infill.toml"


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    folder = tmp_path / "my shop"
    folder.mkdir()
    return folder


def loaded(*folders: Path) -> Sources:
    sources = Sources()
    load(sources, folders)
    return sources


def load(sources: Sources, folders: Sequence[Path]) -> bool:
    return sources.take(sources.look([folder.as_uri() for folder in folders]))


def test_without_files_the_defaults_hold(shop: Path) -> None:
    sources = loaded(shop)
    assert sources.general == sources.for_document((shop / "a.py").as_uri()) == Settings()
    assert sources.problems == []


def test_the_persons_file_lies_where_the_system_keeps_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("INFILL_CONFIG_DIR")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert user_file() == tmp_path / "infill-lsp" / "infill.toml"


def test_the_editor_holds_over_the_persons_file(config: Path, shop: Path) -> None:
    config.write_text('max_lines = 8\ndebounce = 10\nmodel = "m"\n')
    sources = loaded(shop)
    assert sources.general == Settings(max_lines=8, debounce=10, model="m")
    sources.initialize({"infill": {"maxLines": 9, "debounce": 20}})
    sources.push({"debounce": 30})
    assert sources.general == Settings(max_lines=9, debounce=30, model="m")
    sources.push({})  # All that it says unasked, each time.
    assert sources.general == Settings(max_lines=9, debounce=20, model="m")
    sources.pull({"": {"debounce": 40}, shop.as_uri(): {"debounce": 50}})
    assert sources.general.debounce == 40
    assert sources.for_document((shop / "a.py").as_uri()).debounce == 50


def test_where_the_editor_has_no_answer_what_it_said_unasked_holds() -> None:
    sources = loaded()
    sources.push({"maxLines": 3})
    sources.pull({"": None})
    assert sources.general.max_lines == 3


@pytest.mark.parametrize("name", [".infill.toml", "pyproject.toml"])
def test_a_workspaces_file_restricts_its_own_documents(name: str, shop: Path, tmp_path: Path) -> None:
    table = "[tool.infill]\n" if name == "pyproject.toml" else ""
    (shop / name).write_text(f'{table}max_lines = 4\nmodel = "evil"\n')
    other = tmp_path / "other"
    sources = loaded(shop, other)
    sources.initialize({"maxLines": 20, "model": "mine"})
    assert sources.for_document((shop / "src" / "a.py").as_uri()) == Settings(max_lines=4, model="mine")
    for elsewhere in (other / "a.py", tmp_path / "my shop 2" / "a.py"):
        assert sources.for_document(elsewhere.as_uri()) == Settings(max_lines=20, model="mine")
    assert sources.general.max_lines == 20
    assert sources.problems == [f'{name} of my shop: model: a workspace cannot set this; "mine" stays']
    assert sources.effective(shop.as_uri()).sources["max_lines",] == f"{name} of my shop"


def test_other_tables_of_pyproject_are_not_ours(shop: Path) -> None:
    (shop / "pyproject.toml").write_text("[tool.ruff]\nline-length = 3\n[project]\nname = 3\n")
    assert loaded(shop).problems == []
    (shop / "pyproject.toml").write_text("tool = 3\n")
    assert loaded(shop).problems == []


def test_the_innermost_folder_decides(shop: Path) -> None:
    inner = shop / "inner"
    inner.mkdir()
    (shop / ".infill.toml").write_text("max_lines = 4")
    (inner / ".infill.toml").write_text("debounce = 7")
    sources = loaded(shop, inner)
    assert sources.for_document((inner / "a.py").as_uri()) == Settings(debounce=7)


@pytest.mark.parametrize(
    "uri", ["vscode-notebook-cell:{}/a.ipynb#W0", "untitled:{}/new.py", "vscode-remote://host{}/a.py"]
)
def test_a_document_of_another_scheme_belongs_to_the_folder_of_its_path(uri: str, shop: Path) -> None:
    (shop / ".infill.toml").write_text("enabled = false")
    sources = loaded(shop)
    assert sources.silence(uri.format(str(shop).replace(" ", "%20")), "python", "invoked") is not None
    assert sources.silence("untitled:Untitled-1", "python", "invoked") is None


def test_excluded_documents_are_matched_from_the_folders_top(shop: Path) -> None:
    (shop / ".infill.toml").write_text('exclude = ["gen/", "/top.py", "*.md"]')
    sources = loaded(shop)

    def excluded(path: str) -> bool:
        return sources.silence((shop / path).as_uri(), "python", "invoked") is not None

    assert [excluded(path) for path in ("a/gen/b/c.py", "top.py", "x/a.md", "x/top.py", "gen.py", "a.py")] == [
        True,
        True,
        True,
        False,
        False,
        False,
    ]


def test_edits_of_the_files_are_noticed(config: Path, shop: Path) -> None:
    sources = loaded(shop)
    assert not load(sources, [shop])
    config.write_text("max_lines = 5")
    assert load(sources, [shop])
    assert sources.general.max_lines == 5
    (shop / ".infill.toml").write_text("max_lines = 2")
    assert load(sources, [shop])
    assert sources.for_document((shop / "a").as_uri()).max_lines == 2
    config.unlink()
    (shop / ".infill.toml").unlink()
    assert load(sources, [shop])
    assert sources.for_document((shop / "a").as_uri()) == Settings()


def test_half_an_edit_leaves_what_held_and_is_told(config: Path, shop: Path) -> None:
    (shop / ".infill.toml").write_text("enabled = false")
    sources = loaded(shop)
    (shop / ".infill.toml").write_text("enabled = fal")
    assert load(sources, [shop])
    assert not sources.for_document((shop / "a").as_uri()).enabled
    (problem,) = sources.problems
    assert problem.startswith(".infill.toml of my shop: cannot be read (")
    assert "\n" not in problem


@pytest.mark.parametrize("content", [b"\xff\xfe", b"#" * (MAX_BYTES + 1), b"a = [", None])
def test_a_file_that_cannot_be_read_is_named(content: bytes | None, config: Path) -> None:
    if content is None:
        config.mkdir()
    else:
        config.write_bytes(content)
    sources = loaded()
    assert sources.general == Settings()
    (problem,) = sources.problems
    assert f"{config}: cannot be read (" in problem
    assert len(problem.splitlines()) == 1


def test_the_command_says_what_holds_in_a_folder_and_why(
    config: Path, shop: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config.write_text("debounce = 30")
    (shop / ".infill.toml").write_text('max_lines = 4\nmodel = "evil"')
    assert main(["settings", str(shop)]) == 1
    out, err = capsys.readouterr()
    rows = [line.split(maxsplit=2) for line in out.splitlines()]
    assert [".".join(key) for key in fields()] == [name for name, *_ in rows]
    assert ["debounce", "30", str(config)] in rows
    assert ["max_lines", "4", ".infill.toml of my shop"] in rows
    assert ["model", '"auto"', "default"] in rows
    assert err == '! .infill.toml of my shop: model: a workspace cannot set this; "auto" stays\n'
    (shop / ".infill.toml").unlink()
    assert main(["settings", str(shop)]) == 0
    assert main(["settings", str(shop / "nowhere")]) == 2
