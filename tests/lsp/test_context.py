"""`infill-lsp context`: what is used for a place and why, with the ids of the engine's log."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
from editor import Editor, fake_model, ready, until
from infill_engine import process, protocol
from infill_engine.protocol import InfillRequest, Snippet
from infill_engine.top import Reading

from infill_lsp import cli, context, documents, priming
from infill_lsp.client import EngineClient
from infill_lsp.context import ContextError, Place, explain, folder_of
from infill_lsp.suggestions import document_name

SHAPE = "def area_of(width):\n    return width * width\n"


@pytest.fixture
def folder(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(priming, "BUDGET_S", 20.0)
    monkeypatch.setenv("INFILL_CONFIG_DIR", str(tmp_path / "config"))
    (tmp_path / "config").mkdir()
    project = tmp_path / "project"
    project.mkdir()
    (project / "pyproject.toml").write_text("")
    (project / "shape.py").write_text(SHAPE)
    (project / "main.py").write_text("from shape import area_of\n\nx = area_of(\ny = 2\n")
    return project


@pytest.mark.parametrize("text", ["", "a.py", "a.py:1", "a.py:x:1", "a.py:0:1", "a.py:1:0", ":1:1", "a.py:1:-1"])
def test_what_is_no_place_is_refused(text: str) -> None:
    with pytest.raises(ContextError, match="give FILE:LINE:COL"):
        Place.parse(text)


def test_a_place_counts_from_one() -> None:
    assert Place.parse("/a:b.py:3:4") == Place("/a:b.py", 2, 3)


@pytest.mark.parametrize("place", [("missing.py", 0, 0), ("main.py", 90, 0), ("main.py", 0, 90)])
def test_a_place_that_is_not_there_is_told(folder: Path, place: tuple[str, int, int]) -> None:
    name, row, column = place
    with pytest.raises(ContextError, match=r"cannot be read|has no line"):
        explain(Place(str(folder / name), row, column))


def test_the_folder_is_the_nearest_project(folder: Path) -> None:
    (folder / "inner").mkdir()
    assert folder_of(str(folder / "inner" / "a.py")) == str(folder)


def test_without_an_engine_the_snippets_are_told(folder: Path) -> None:
    said = explain(Place(str(folder / "main.py"), 2, 12))
    assert "the engine is not running yet" in said
    assert "index     ready, 3 files with text" in said
    text = SHAPE.rstrip("\n")
    assert f"snippet   {Snippet(text).id}  shape.py:1-2, score 1000.0: area_of is imported, and used here" in said


def test_where_nothing_is_offered_that_is_told(folder: Path) -> None:
    (folder / "id_rsa").write_text("key\n")
    assert "nothing is offered there" in explain(Place(str(folder / "id_rsa"), 0, 0))


@pytest.mark.parametrize(
    ("name", "text", "place", "setting"),
    [
        ("note.py", '"""Say\n\nmore\n"""\n', (2, 4), "comments = false"),
        ("note.md", "```python\nx = 1\n```\n", (1, 4), "languages.markdown = false"),
        ("note.vue", "<script>\nx = 1\n</script>\n", (1, 4), "languages.vue = false"),
    ],
)
def test_what_is_switched_off_is_so_there_too(
    folder: Path, name: str, text: str, place: tuple[int, int], setting: str
) -> None:
    (folder / name).write_text(text)
    (folder / ".infill.toml").write_text(f"{setting}\n")
    assert "switched off" in explain(Place(str(folder / name), *place))


def test_columns_are_those_of_an_editor(folder: Path) -> None:
    (folder / "bom.py").write_bytes(b"\xef\xbb\xbfx = 1\r\ny = 2\r\n")
    snapshot = Place(str(folder / "bom.py"), 0, 5).snapshot()
    assert (snapshot.head, snapshot.tail) == ("x = 1", "")


def test_a_long_file_is_read_whole(folder: Path) -> None:
    (folder / "long.py").write_text("def f(a):\n    return a\n" * 20_000 + '"""\nhere\n')
    assert Place(str(folder / "long.py"), 40_001, 0).snapshot().tree is not None


def test_a_folder_that_is_switched_off_has_no_snippets(folder: Path) -> None:
    (folder / ".infill.toml").write_text("priming.enabled = false\n")
    said = explain(Place(str(folder / "main.py"), 2, 12))
    assert "priming.enabled is off" in said
    assert "shape.py" not in said


@pytest.mark.parametrize(
    ("name", "text", "settings"),
    [
        ("a.py", "x = 1  # see above\n", "comments = false"),
        ("a.py", "x = 1; y = 'see above'\n", "strings = false"),
        ("a.sh", "echo one; echo two\n", "languages = {shellscript = false}"),
        ("a.vue", "<script>\nlet x = 1\n</script>\n", "languages = {vue = false}"),
    ],
)
def test_what_is_switched_off_is_told(folder: Path, name: str, text: str, settings: str) -> None:
    place = Place(str(folder / name), 1 if name == "a.vue" else 0, 9 if name == "a.vue" else 18)
    (folder / name).write_text(text)
    assert "nothing is offered there" not in explain(place)
    (folder / ".infill.toml").write_text(settings)
    assert "nothing is offered there: completions are switched off" in explain(place)


def test_a_place_is_read_as_an_editor_has_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a BOM, and with the tree however long its parse takes."""
    monkeypatch.setattr(documents, "FIRST_PARSE_S", 0.0)
    (folder / "main.py").write_bytes(b"\xef\xbb\xbfx = (1)\r\ny = 2\r\n")
    snapshot = Place(str(folder / "main.py"), 0, 7).snapshot()
    assert snapshot.lines == ("x = (1)", "y = 2", "")
    assert snapshot.tree is not None


@pytest.mark.process
def test_the_ids_are_those_of_the_engines_log(folder: Path, home: Path) -> None:
    """An editor asks, with the file as it is; then the command says what that was made from."""
    model = fake_model(home, "quick", {"area_of(": "3)"})
    (folder.parent / "config" / "infill.toml").write_text(f'model = "{model}"\n')
    place = Place(str(folder / "main.py"), 2, 12)

    async def answered() -> None:
        await ready(model)
        engine = EngineClient(model)
        request = InfillRequest(
            client="editor",
            document=document_name(Path(place.path).as_uri()),
            prefix="from shape import area_of\n\n",
            head="x = area_of(",
            suffix="\ny = 2\n",
            snippets=(Snippet(SHAPE.rstrip("\n"), "shape.py"),),
            deadline_ms=60_000,
        )
        assert [event async for event in engine.infill(request)]
        await engine.aclose()

    asyncio.run(answered())
    said = explain(place)
    (log,) = (home / "cache").glob("engine-*.log")
    line = next(line for line in log.read_text().split("\n") if "filled from" in line)
    told = dict(re.findall(r"^(\w+) +([0-9a-f]{12})", said, re.MULTILINE))
    assert told["document"] in line
    for kind in ("prefix", "suffix", "snippet"):
        assert f"{kind} {told[kind]}" in line
    assert "used; shape.py:1-2" in said
    assert protocol.content_id(SHAPE.rstrip("\n")) == told["snippet"]
    assert not any(word in line for word in ("area", "shape", "main"))


@pytest.mark.process
async def test_a_key_stroke_encodes_its_own_tokens_alone(editor: Editor, folder: Path, home: Path) -> None:
    """Opened and at rest, what the next request needs is encoded; the metrics tell."""
    model = await ready(fake_model(home, "typing", {"x = ": "area_of(3)"}))
    await editor.start(options={"model": model, "deadline": {"invoked": 60_000}}, folders=[folder])
    editor.uri = (folder / "main.py").as_uri()
    text = "from shape import area_of\n\n" + "# a comment that is long enough to be a context of some tokens\n" * 5
    editor.open(f"{text}x = \ny = area_of(2)\n")

    encoded = lambda: read(model).total("infill_encoded_tokens_total")
    await until(lambda: encoded() >= len(text))
    assert (await editor.item(7, 4)).insert_text == "area_of(3)"
    await until(lambda: encoded() >= len(text) + len(SHAPE))  # the snippet, too
    before = read(model)
    for at, key in enumerate("area"):
        editor.edit((7, 4 + at), (7, 4 + at), key)
        assert await editor.complete(7, 5 + at)
    after = read(model)
    tokens = {source: after.by(CONTEXT, "source")[source] - before.by(CONTEXT, "source")[source] for source in SOURCES}
    assert tokens["encoded"] <= 4
    assert tokens["reused"] > 4 * len(text)
    assert after.by("infill_snippets_total", "state")["used"] >= 4


CONTEXT, SOURCES = "infill_context_tokens_total", ("encoded", "reused")


def read(model: str) -> Reading:
    exposition = process.metrics(model)
    assert exposition is not None
    return Reading.parse(exposition)


def test_the_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["context", f"{folder}/main.py:3:13", "--folder", str(folder)]) == 0
    assert "shape.py:1-2" in capsys.readouterr().out
    assert cli.main(["context", "nowhere.py:1:1"]) == 1
    assert cli.main(["context", "nowhere.py"]) == 1
    err = capsys.readouterr().err
    assert "cannot be read" in err
    assert "give FILE:LINE:COL" in err


def test_texts_stand_on_one_line() -> None:
    assert context._quoted('a\n\t\\"') == '"a\\n\\t\\\\""'
    assert context._quoted("x" * 100) == f'"…{"x" * context.SHOWN}"'
