"""Faults that people report of completion servers, each its whole kind, in the order of the list they were gathered in.

The server is a real one that an editor of its own is connected to; the engine is a script.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from editor import until
from infill_engine.protocol import Candidate, End, Final
from strict import Buffer, Refused, ScriptedEngine, StrictEditor, meeting, scripted, span, written

#: Starts an editor, with settings beside the model's, at a server whose engine writes that.
Meet = Callable[..., Awaitable[StrictEditor]]


@pytest.fixture
async def engine(home: Path) -> AsyncIterator[ScriptedEngine]:
    engine = ScriptedEngine()
    async with scripted(engine):
        yield engine


@pytest.fixture
async def meet(engine: ScriptedEngine) -> AsyncIterator[Meet]:
    async with AsyncExitStack() as editors:

        async def start(script: Any = "", settings: dict[str, Any] | None = None, **hello: Any) -> StrictEditor:
            engine.script = script
            editor = await editors.enter_async_context(meeting())
            # Beside a test that starves this process an engine of milliseconds may be late.
            patience = {"automatic": 60_000, "invoked": 60_000}
            options = {"model": "m", "deadline": patience, "priming": {"enabled": False}, **(settings or {})}
            editor.configuration = options
            await editor.start(options, **hello)
            return editor

        yield start
    engine.let_go.set()


# 1. Line ends.


@pytest.mark.parametrize("eol", ["\n", "\r\n", "\r"])
async def test_01_the_model_sees_lf_and_the_document_keeps_its_own_line_ends(
    meet: Meet, engine: ScriptedEngine, eol: str
) -> None:
    editor = await meet("a = 1\n    return a")
    editor.open(eol.join(["def f():", "    |", "", "x = 2", ""]))
    assert await editor.accepted() == eol.join(["def f():", "    a = 1", "    return a", "", "x = 2", ""])
    (request, *_) = engine.asked
    assert "\r" not in request.prefix + request.suffix
    assert (request.prefix, request.suffix) == ("def f():\n", "\n\nx = 2\n")


async def test_01_of_mixed_line_ends_the_most_frequent_is_used(meet: Meet) -> None:
    editor = await meet("a = 1\n    return a")
    editor.open("import os\r\nimport re\r\ndef f():\n    |\r\n\r\nx = 1\n")
    assert (await editor.item())["insertText"] == "a = 1\r\n    return a"


async def test_01_an_editor_that_holds_lf_in_every_buffer_is_given_lf(meet: Meet) -> None:
    editor = await meet("a = 1\n    return a", name="Neovim")
    editor.open("def f():\r\n    |\r\n")
    assert (await editor.item())["insertText"] == "a = 1\n    return a"


# 2. Tabs.


@pytest.mark.parametrize(
    ("language", "text", "said", "expected"),
    [
        ("python", "def f(x):\n\tif x:\n\t\t|\n", "y()\n\t\tz()", "def f(x):\n\tif x:\n\t\ty()\n\t\tz()\n"),
        ("python", "def f(x):\n\tif x:\n\t\t|\n", "y()\n        z()", "def f(x):\n\tif x:\n\t\ty()\n\t\tz()\n"),
        ("python", "def f(x):\n\t|\n", "if x:\n      y()\n    z()", None),
        ("python", "def f(x):\n    |\n", "a = x\n\treturn a", "def f(x):\n    a = x\n    return a\n"),
        ("python", "def f(x):\n  y = x\n  |\n", "if x:\n\t\ty()", "def f(x):\n  y = x\n  if x:\n    y()\n"),
        ("go", "func f() {\n\t|\n}\n", "if a {\n        b()\n    }", "func f() {\n\tif a {\n\t\tb()\n\t}\n}\n"),
        ("makefile", "all: a\n\tcc a\n\t|\n", "cc b\n\tcc c", "all: a\n\tcc a\n\tcc b\n\tcc c\n"),
        ("python", "x = {\n\t'a':\t1,\n\t|\n}\n", "'b':\t2,", "x = {\n\t'a':\t1,\n\t'b':\t2,\n}\n"),
    ],
)
async def test_02_lines_are_indented_as_the_document_is(
    meet: Meet, engine: ScriptedEngine, language: str, text: str, said: str, expected: str | None
) -> None:
    editor = await meet(said)
    editor.open(text, language)
    found = await editor.accepted(invoked=True)
    if expected is not None:
        assert found == expected
    indented = re.findall(r"^[ \t]+", editor.buffer.text, re.MULTILINE)
    assert len({margin[0] for margin in indented}) <= 1, "tabs and spaces are not mixed"
    assert ("\t" in text) == ("\t" in engine.asked[0].prefix + engine.asked[0].head)


# 3. A line of nothing but spaces.


@pytest.mark.parametrize(
    ("text", "said", "expected"),
    [
        ("def f():\n    x = 1\n    |\n", "    return x", "def f():\n    x = 1\n    return x\n"),
        ("def f():\n    |\n", "    return 1", "def f():\n    return 1\n"),
        ("def f():\n    |\n", "return 1", "def f():\n    return 1\n"),
        ("def f():\n|\n", "    return 1", "def f():\n    return 1\n"),
        ("def f():\n  |\n", "  return 1", "def f():\n  return 1\n"),
        ("def f():\n    x = 1\n  |\n", "  return x", "def f():\n    x = 1\n    return x\n"),
        ("def f():\n    |\n", "\n    return 1", "def f():\n    return 1\n"),
        ("def f():\n\tx = 1\n\t|\n", "\treturn x", "def f():\n\tx = 1\n\treturn x\n"),
        ("def f(x):\n    if x:\n        |\n", "        y()\n        z()", None),
    ],
)
async def test_03_indentation_counts_once(meet: Meet, text: str, said: str, expected: str | None) -> None:
    editor = await meet(said)
    editor.open(text)
    assert await editor.accepted() == (expected or "def f(x):\n    if x:\n        y()\n        z()\n")


# 4. Brackets and quotes that are there already.

_PAIRS = ["()", "[]", "{}", '""', "''"]


@pytest.mark.parametrize("pair", _PAIRS)
@pytest.mark.parametrize("language", ["python", "javascript", "plaintext"])
async def test_04_no_pair_is_closed_twice(meet: Meet, engine: ScriptedEngine, pair: str, language: str) -> None:
    opening, closing = pair
    editor = await meet()
    for number, more in enumerate(["", closing, 2 * closing, closing + ")", closing + ";"]):
        engine.script = "a" + more
        editor.open(f"x = {opening}|{closing}\n", language, f"file:///project/{number}")
        found = await editor.accepted(invoked=True)
        assert found in (f"x = {opening}a{closing}\n", f"x = {opening}a{closing};\n")


@pytest.mark.parametrize(
    ("text", "said", "expected"),
    [
        ("f(g(|))\n", "x))", "f(g(x))\n"),
        ("f(g(|)\n", "x))", "f(g(x))\n"),
        ("x = array[f(|)]\n", "1, 2)]", "x = array[f(1, 2)]\n"),
        ('print(f"{|}")\n', 'x}")', 'print(f"{x}")\n'),
        ('x = """|"""\n', 'hi"""', 'x = """hi"""\n'),
        ("f(|)\n", "a) + 1", "f(a) + 1\n"),
        ("def f(|):\n    pass\n", "self, x) -> int:", "def f(self, x) -> int:\n    pass\n"),
        ("x = ')' + f(|)\n", "')' + a)", "x = ')' + f(')' + a)\n"),
        ("# it's (\nf(|)\n", "a))", "# it's (\nf(a)\n"),
        ("x = 1  # (\ny = |\n", "f(a))", "x = 1  # (\ny = f(a)\n"),
        ("f(|\n", "\n    a,\n    b,\n)\ng(c)\nh(d)", "f(\n    a,\n    b,\n)\n"),
    ],
)
async def test_04_what_closes_is_told_from_what_looks_like_it(meet: Meet, text: str, said: str, expected: str) -> None:
    editor = await meet(said)
    editor.open(text)
    assert await editor.accepted(invoked=True) == expected


# 5. Common last lines.


@pytest.mark.parametrize(
    ("language", "text", "said"),
    [
        ("javascript", "function f() {\n  |\n}\n", "if (a) {\n    b();\n  }"),
        ("javascript", "function f() {\n  |\n}\n", "g({\n    a,\n  });\n  h({\n    b,\n  });"),
        ("c", "int f(int a) {\n    |\n}\n", "if (a) {\n        return 1;\n    }\n    return 0;"),
        ("python", "def f(x):\n    for y in x:\n        |\n    return x\n", "if y:\n            return x"),
        ("go", "func f() {\n\t|\n}\n\nfunc g() {\n}\n", "if a {\n\t\tb()\n\t}"),
        ("ruby", "def f(a)\n  |\nend\n", "if a\n    b\n  end"),
        ("lua", "function f(a)\n  |\nend\n", "if a then\n    b()\n  end"),
    ],
)
async def test_05_a_body_that_ends_as_its_surroundings_do_stays_whole(
    meet: Meet, language: str, text: str, said: str
) -> None:
    editor = await meet(said)
    editor.open(text, language)
    assert await editor.accepted(invoked=True) == text.replace("|", said)


# 6. The lines that follow.


@pytest.mark.parametrize(
    ("language", "text", "said", "expected"),
    [
        ("python", "a = 1\n|\nc = 3\nd = 4\n", "b = 2\nc = 3", "a = 1\nb = 2\nc = 3\nd = 4\n"),
        ("python", "a = 1\n|\n\nc = 3\nd = 4\n", "b = 2\n\nc = 3\nd = 4\n", "a = 1\nb = 2\n\nc = 3\nd = 4\n"),
        (
            "python",
            "def f(y):\n    for x in y:\n        |\n    return z\n\nz = 1\n",
            "z = x\n        return z",
            "def f(y):\n    for x in y:\n        z = x\n    return z\n\nz = 1\n",
        ),
        (
            "python",
            "def f():\n    |\n\ndef g():\n    pass\n",
            "x = 1\n\n    def g():\n    pass",
            "def f():\n    x = 1\n\ndef g():\n    pass\n",
        ),
        ("javascript", "function f() {\n  |\n}\n", "b();\n}", "function f() {\n  b();\n}\n"),
        ("javascript", "function f() {\n\t|\n}\n", "b();\n    }", "function f() {\n\tb();\n}\n"),
        ("python", "def f():\n    |\n\nclass Long:\n    pass\n", "x = 1\n    class Lo", None),
        ("python", "|\nimport os\n", "import os", ""),
        (
            "python",
            "def f():\n    |\n\n\nx = 1\ny = 2\n",
            "a = 1\n    b = 2\n    x = 1\n    y = 2\n    z = 3",
            "def f():\n    a = 1\n    b = 2\n\n\nx = 1\ny = 2\n",
        ),
        (
            "python",
            "def f(a):\n    |\n    total = 3\n",
            "if a:\n        b = 2\n    total =",
            "def f(a):\n    if a:\n        b = 2\n    total = 3\n",
        ),
        (
            "python",
            "def f(a):\n    |\n",
            "\n    ".join(["x = 1", "y = 2"] * 4),
            "def f(a):\n    x = 1\n    y = 2\n",
        ),
        ("python", "def f(a):\n    a += 1\n    |\n    return a\n", "return a", ""),
        ("python", "x = f(a, |, c)\n", "b, c)", "x = f(a, b, c)\n"),
        ("python", "x = | + b\n", "a +", "x = a + b\n"),
    ],
)
async def test_06_what_follows_is_not_written_again(
    meet: Meet, language: str, text: str, said: str, expected: str | None
) -> None:
    editor = await meet(said)
    editor.open(text, language)
    if expected is None:
        expected = "def f():\n    x = 1\n\nclass Long:\n    pass\n"
    assert (await editor.accepted(invoked=True) or "") == expected


# 7. Inside a word.


@pytest.mark.parametrize("said", ["tion", "tion()", "tion():", "tional", "tion_name(x)", "ny", "ction"])
@pytest.mark.parametrize("invoked", [True, False])
async def test_07_the_rest_of_a_word_is_not_doubled(meet: Meet, said: str, invoked: bool) -> None:
    editor = await meet(said)
    editor.open("def func|tion():\n    pass\n")
    found = await editor.accepted(invoked)
    assert found in (None, "def function():\n    pass\n")


async def test_07_a_word_behind_the_cursor_is_not_run_into(meet: Meet) -> None:
    editor = await meet("read_data")
    editor.open("x = |data + 1\n")
    assert await editor.accepted(invoked=True) is None


# 8. Noise.


@pytest.mark.parametrize("text", ["x = f(a|\n", "x = |\n", "def f():\n    |\n", "x = {\n    |\n}\n"])
async def test_08_closers_alone_are_not_offered(meet: Meet, engine: ScriptedEngine, text: str) -> None:
    editor = await meet()
    noise = ["})", ")", "]);", "}", ";", ":", ",", '"', "')", "\n", "   ", "\n}\n", "`", "\n    )"]
    for number, said in enumerate(noise):
        engine.script = said
        editor.open(text, uri=f"file:///project/{number}.py")
        assert await editor.complete(invoked=True) == []


async def test_08_what_saves_no_key_is_not_offered_unasked(meet: Meet) -> None:
    editor = await meet("ab")
    editor.open("x = |\n")
    assert await editor.complete() == []
    assert await editor.accepted(invoked=True) == "x = ab\n"


async def test_08_what_is_not_sure_enough_is_not_offered_and_says_so(meet: Meet) -> None:
    editor = await meet(lambda _: Candidate("name", (0.03,), (4,)))
    editor.open("x = |\n")
    assert await editor.complete() == []
    why = await editor.request(
        "infill/why",
        {"textDocument": {"uri": editor.buffer.uri}, "position": {"line": 0, "character": 4}},
    )
    assert re.fullmatch(r"the text is right with \d+%, balanced shows from \d+%", why["reason"])
    assert why["shown"] is False


# 9. Units.


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "utf-32"])
@pytest.mark.parametrize("before", ["¿", "漢字", "😀", "e\u0301", "א", "𝔘\u200d𝔘", "\u2028", "\x0c", "\ufeff"])
async def test_09_columns_are_in_the_units_agreed_on(meet: Meet, encoding: str, before: str) -> None:
    editor = await meet("abc) + b", encodings=[encoding])
    assert editor.encoding == encoding
    line = f"'{before}' + f(|) # {before}\n"
    editor.open(f"x = 1  # {before}\n{line}")
    editor.edit((0, 0), (0, 0), before + "\n")
    editor.edit((1, 0), (1, 1), f"'{before}'")  # The document is edited in units, too.
    text = editor.buffer.text
    editor.cursor = editor.buffer.place(text.index("f(") + 2)
    assert await editor.accepted() == text.replace("f()", "f(abc)")


async def test_09_without_a_choice_units_are_utf_16(meet: Meet) -> None:
    editor = await meet("name")
    assert editor.encoding == "utf-16"
    editor.open("'😀漢' + |\n")
    assert await editor.accepted() == "'😀漢' + name\n"


# 10. Ranges.


@pytest.mark.parametrize(
    ("text", "said"),
    [("x = |\n", "1"), ("def f():\n    |\n", "a = 1\n    return a"), ("f(|)\n", "a) + 1"), ("|", "import os")],
)
async def test_10_every_item_has_a_range(meet: Meet, text: str, said: str) -> None:
    editor = await meet(said)
    editor.open(text)
    for invoked in (True, False):
        items = await editor.complete(invoked)
        assert items
        assert all(set(item["range"]) == {"start", "end"} for item in items)


# 11. Typing on while a text is shown.


async def test_11_what_is_typed_of_a_suggestion_leaves_the_rest_of_it(meet: Meet, engine: ScriptedEngine) -> None:
    editor = await meet("total + 1")
    editor.open("x = |\n")
    assert (await editor.item())["insertText"] == "total + 1"
    asked = len(engine.asked)
    for typed in ("t", "ot", "al"):
        editor.type(typed)
        item = await editor.item()
        assert editor.buffer.text[4:-1] + item["insertText"] == "total + 1"
    editor.accept(item)
    assert editor.buffer.text == "x = total + 1\n"
    assert len(engine.asked) == asked


async def test_11_what_was_typed_otherwise_asks_anew(meet: Meet) -> None:
    editor = await meet("total + 1")
    editor.open("x = |\n")
    assert await editor.item()
    editor.type("s")
    assert (await editor.item())["insertText"] == "total + 1"  # The script's text, for the new place.
    assert editor.buffer.text == "x = s\n"


async def test_11_after_a_partial_accept_the_rest_is_the_same(meet: Meet) -> None:
    said = "a = 1\n    b = 2\n    return a + b"
    editor = await meet(said)
    editor.open("def f():\n    |\n")
    item = await editor.item()
    assert item["insertText"] == said
    for part in ("a = ", "1\n    ", "b"):
        editor.edit(editor.cursor, editor.cursor, part)
        said = said.removeprefix(part)
        assert (await editor.item())["insertText"] == said


# 12. Requests and edits in a race.


async def test_12_an_answer_is_for_the_newest_text_or_null(meet: Meet, engine: ScriptedEngine) -> None:
    editor = await meet(lambda request: "old" if "def" in request.prefix + request.head else "new")
    editor.open("def f():\n    return |\n")
    _, first = editor.begin()
    editor.edit((0, 0), (1, 11), "x = ")
    _, second = editor.begin()
    assert await first is None
    assert [item["insertText"] for item in (await second)["items"]] == ["new"]


async def test_12_an_edit_in_the_same_packet_is_not_read_before_the_question(
    meet: Meet, engine: ScriptedEngine
) -> None:
    editor = await meet("name")
    editor.open("x = |\n")
    await editor.request("infill/status", {})  # Nothing is on its way any more.
    _, answer = editor.begin()
    editor.edit((0, 0), (0, 4), "")
    assert await answer is None


async def test_12_each_of_many_edits_makes_the_answers_before_it_stale(meet: Meet, engine: ScriptedEngine) -> None:
    editor = await meet("name")
    editor.open("x = |\n")
    answers = []
    for key in "abcdefghij":
        answers.append(editor.begin()[1])
        editor.type(key)
    last = editor.begin()[1]
    assert [await answer for answer in answers] == [None] * 10
    assert (await last)["items"]


async def test_12_a_newer_question_makes_the_older_one_null(meet: Meet, engine: ScriptedEngine) -> None:
    editor = await meet("name")
    engine.let_go.clear()
    editor.open("x = |\n")
    older = editor.begin()[1]
    await until(lambda: engine.live == 1)
    newer = editor.begin()[1]
    assert await older is None
    engine.let_go.set()
    assert (await newer)["items"]


# 13. What a suggestion was made for.


@pytest.mark.parametrize(
    "change",
    [((1, 0), (1, 0), "z = 1\n"), ((1, 4), (1, 5), "9"), ((0, 6), (0, 6), ")"), ((2, 0), (2, 0), "w = 4\n")],
)
async def test_13_a_change_behind_the_cursor_asks_anew(
    meet: Meet, engine: ScriptedEngine, change: tuple[tuple[int, int], tuple[int, int], str]
) -> None:
    editor = await meet("total")
    editor.open("x = f(|\ny = 2\nz = 3\n")
    assert await editor.item()
    seen = len(engine.asked)
    cursor = editor.cursor
    editor.edit(*change)
    editor.cursor = cursor
    await editor.complete()
    assert len(engine.asked) > seen
    line, suffix = engine.asked[-1].tail, engine.asked[-1].suffix
    assert editor.buffer.text.endswith(line + suffix)


# 14. Work that nobody waits for.


async def test_14_a_cancel_ends_the_work_and_no_other(meet: Meet, engine: ScriptedEngine) -> None:
    editor = await meet("name")
    engine.let_go.clear()
    editor.open("x = |\n")
    number, answer = editor.begin()
    await until(lambda: engine.live == 1)
    editor.notify("$/cancelRequest", {"id": number})
    with pytest.raises(Refused) as refused:
        await answer
    assert refused.value.code == -32800
    await until(lambda: engine.live == 0)
    assert engine.dropped == 1
    engine.let_go.set()
    assert (await editor.item())["insertText"] == "name"


@pytest.mark.parametrize("by", ["edit", "question", "close"])
async def test_14_what_supersedes_a_question_ends_its_work(meet: Meet, engine: ScriptedEngine, by: str) -> None:
    editor = await meet("name")
    engine.let_go.clear()
    editor.open("x = |\n")
    answer = editor.begin()[1]
    await until(lambda: engine.live == 1)
    if by == "edit":
        editor.type("y")
    elif by == "question":
        editor.begin()
    else:
        editor.shut()
    async with asyncio.timeout(20):
        assert await answer is None
    await until(lambda: engine.live == (by == "question"))
    engine.let_go.set()


async def test_14_a_storm_of_cancels_hurts_no_later_request(meet: Meet, engine: ScriptedEngine) -> None:
    editor = await meet("name")
    engine.let_go.clear()
    editor.open("x = |\n")
    for _ in range(50):
        number, answer = editor.begin()
        editor.notify("$/cancelRequest", {"id": number})
        with pytest.raises(Refused):
            await answer
    editor.notify("$/cancelRequest", {"id": 987654})
    engine.let_go.set()
    assert (await editor.item())["insertText"] == "name"
    await until(lambda: engine.live == 0)
    assert not [told for told in editor.told if told[0] == "window/showMessage"]


# 15. Special tokens.


@pytest.mark.parametrize(
    "token", ["<|endoftext|>", "<|fim_middle|>", "<fim_suffix>", "<file_sep>", "</s>", "<｜end▁of▁sentence｜>"]
)
async def test_15_special_tokens_are_no_text(meet: Meet, token: str) -> None:
    editor = await meet(f"name{token} and more")
    editor.open("x = |\n")
    assert await editor.accepted() == "x = name\n"


@pytest.mark.parametrize("theirs", ["<fim_prefix>", "<|im_end|>", "[MASK]", "<mask>", "// =======", "<<<<<<< ours"])
async def test_15_what_looks_special_in_a_document_is_plain_text(
    meet: Meet, engine: ScriptedEngine, theirs: str
) -> None:
    editor = await meet(f"'{theirs}'")
    text = f"A = '{theirs}'  # {theirs}\nx = "
    editor.open(f"{text}^\n", mark="^")
    assert await editor.accepted() == f"{text}'{theirs}'\n"
    assert engine.asked[0].prefix == f"A = '{theirs}'  # {theirs}\n"


# 16. Where nobody writes code.


@pytest.mark.parametrize(
    "scheme", ["vscode-chat-code-block", "output", "git", "vscode-scm", "comment", "walkThrough", "vscode"]
)
async def test_16_nothing_is_offered_in_chats_panels_and_boxes(meet: Meet, engine: ScriptedEngine, scheme: str) -> None:
    editor = await meet("name")
    editor.open("x = |\n", uri=f"{scheme}:/project/module.py")
    assert await editor.complete(invoked=True) == []
    assert engine.requests == []


@pytest.mark.parametrize(
    "uri", ["file:///project/module.py", "untitled:Untitled-1", "vscode-remote://ssh-remote%2Bbox/project/module.py"]
)
async def test_16_files_drafts_and_files_elsewhere_are_completed(meet: Meet, uri: str) -> None:
    editor = await meet("name")
    editor.open("x = |\n", uri=uri)
    assert await editor.accepted() == "x = name\n"


# 17. Notebooks.


async def test_17_what_is_told_of_notebooks_is_served_and_other_cells_are_context(
    meet: Meet, engine: ScriptedEngine
) -> None:
    editor = await meet("total", capabilities={"notebookDocument": {"synchronization": {}}})
    assert editor.capabilities["notebookDocumentSync"]["notebookSelector"]
    cells = {"a": "import os\ntotal = 1\n", "b": "x = ", "c": "print(x)\n", "d": "SELECT 1"}
    uris = {name: f"vscode-notebook-cell:/project/book.ipynb#{name}" for name in cells}
    languages = {name: "sql" if name == "d" else "python" for name in cells}
    notebook = {
        "uri": "file:///project/book.ipynb",
        "notebookType": "jupyter-notebook",
        "version": 1,
        "cells": [{"kind": 2, "document": uri} for uri in uris.values()],
    }
    documents = [
        {"uri": uris[name], "languageId": languages[name], "version": 1, "text": text} for name, text in cells.items()
    ]
    editor.notify("notebookDocument/didOpen", {"notebookDocument": notebook, "cellTextDocuments": documents})
    editor.buffer = Buffer(uris["b"], "python", cells["b"], editor.encoding)
    editor.cursor = (0, 4)
    assert (await editor.item())["range"] == span((0, 4), (0, 4))
    request = engine.asked[-1]
    assert "total = 1" in request.prefix
    assert "print(x)" in request.suffix
    assert "SELECT" not in request.prefix + request.suffix

    moved = {"array": {"start": 0, "deleteCount": 1, "cells": []}, "didClose": [{"uri": uris["a"]}]}
    change = {"cells": {"structure": moved}}
    identifier = {"version": 2, "uri": notebook["uri"]}
    editor.notify("notebookDocument/didChange", {"notebookDocument": identifier, "change": change})
    await editor.complete()
    assert engine.asked[-1].prefix == ""


# 18. Secrets and ignored files.


@pytest.mark.parametrize(
    "name", [".env", ".env.local", "id_rsa", "server.pem", "private.key", "ca.crt", "secrets.yml", ".netrc"]
)
async def test_18_nothing_is_offered_where_secrets_are(meet: Meet, engine: ScriptedEngine, name: str) -> None:
    editor = await meet("name")
    editor.open("x = |\n", uri=f"file:///project/{name}")
    assert await editor.complete(invoked=True) == []
    assert engine.requests == []


async def test_18_ignored_files_are_not_completed(meet: Meet, engine: ScriptedEngine, tmp_path: Path) -> None:
    (tmp_path / ".gitignore").write_text("build/\nlocal.py\n")
    (tmp_path / "build").mkdir()
    editor = await meet("name", {"priming": {"enabled": True}}, folders=[tmp_path])
    for ignored in ("local.py", "build/deep/out.py"):
        uri = (tmp_path / ignored).as_uri()
        editor.open("x = |\n", uri=uri)

        async with asyncio.timeout(20):
            while await editor.complete(invoked=True):  # noqa: ASYNC110 - the folder was not looked at yet
                await asyncio.sleep(0.05)
        place = {"uri": uri, "position": {"line": 0, "character": 4}}
        why = {"command": "infill.server.why", "arguments": [place]}
        said = await editor.request("workspace/executeCommand", why)
        assert said == "the file is ignored (.gitignore, .ignore)"
    editor.open("x = |\n", uri=(tmp_path / "tracked.py").as_uri())
    assert await editor.item()
    (tmp_path / ".ignore").write_text("!local.py\n")  # Who wants it there all the same says so.
    editor.open("x = |\n", uri=(tmp_path / "local.py").as_uri())
    async with asyncio.timeout(20):
        while not await editor.complete(invoked=True):  # noqa: ASYNC110 - nor again
            await asyncio.sleep(0.05)


async def test_18_secrets_and_ignored_files_are_no_context(meet: Meet, engine: ScriptedEngine, tmp_path: Path) -> None:
    for name, text in {
        "a.py": "public = 1\n",
        ".env": "KEY=secret\n",
        "id_rsa": "secret\n",
        "build/out.py": "secret = 1\n",
        ".gitignore": "build/\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    editor = await meet("name", {"priming": {"enabled": True}}, folders=[tmp_path])
    editor.open("x = |\n", uri=(tmp_path / "b.py").as_uri())
    assert await editor.item()
    editor.open("KEY=hunter2\n", "properties", uri=(tmp_path / ".env").as_uri())
    editor.open("hunter2 = 1\n", uri=(tmp_path / "build/more.py").as_uri())
    (tmp_path / "notes.txt").symlink_to(tmp_path / "id_rsa")
    (tmp_path / "link.py").symlink_to(tmp_path / "a.py")
    editor.open("hunter2\n", "plaintext", uri=(tmp_path / "notes.txt").as_uri())
    editor.open("hunter2 = 1\n", uri=(tmp_path / "link.py").as_uri())
    await until(lambda: any("a.py" in texts for texts in engine.texts.values()))
    (texts,) = (texts for texts in engine.texts.values() if texts)
    assert set(texts) <= {"a.py", "b.py", ".gitignore"}
    assert "secret" not in json.dumps(engine.texts)
    assert "hunter2" not in json.dumps(engine.texts)


# 19. Switches.


async def test_19_a_language_is_switched_off_by_its_id(meet: Meet, engine: ScriptedEngine) -> None:
    editor = await meet("name", {"languages": {"python": False}})
    editor.open("x = |\n")
    assert await editor.complete(invoked=True) == []
    assert engine.requests == []
    editor.open("x = |\n", "javascript", "file:///project/a.js")
    assert await editor.item()


@pytest.mark.parametrize(
    ("language", "text"),
    [("vue", "<script>\nlet x = |\n</script>\n"), ("markdown", "```js\nlet x = |\n```\n")],
)
@pytest.mark.parametrize("off", [0, 1])
async def test_19_a_document_is_switched_off_with_what_is_embedded_in_it(
    meet: Meet, engine: ScriptedEngine, language: str, text: str, off: int
) -> None:
    editor = await meet("name", {"languages": {(language, "javascript")[off]: False}})
    editor.open(text, language)
    assert await editor.complete(invoked=True) == []
    assert engine.requests == []
    other = ("javascript", "html")[off]
    editor.open("let x = |\n", other, "file:///project/other")
    assert await editor.item()


@pytest.mark.parametrize(
    ("switch", "text"),
    [
        ("comments", "x = 1  # to do |\n"),
        ("comments", 'def f():\n    """Returns |\n    """\n'),
        ("strings", "x = 'see |'\n"),
    ],
)
async def test_19_comments_and_strings_are_switched_off(
    meet: Meet, engine: ScriptedEngine, switch: str, text: str
) -> None:
    editor = await meet("something", {switch: False})
    editor.open(text)
    assert await editor.complete(invoked=True) == []
    assert engine.requests == []
    editor.open("x = |\n", uri="file:///project/other.py")
    assert await editor.item()


# 20. Huge documents.


@pytest.mark.parametrize(
    "text",
    [
        "x = [" + "1, " * 700_000 + "|]",
        "x = " + "1" * 2_000_000 + "|\n",
        ("a = 1;" * 100 + "\n") * 4_000 + "x = |\n",
        "x = [" + "1, " * 700 + "|]\n",
        "x = ['" + "é😀" * 500_000 + "|']\n",
    ],
    ids=["an array in a line", "a number", "many lines", "a long line", "a line of many words"],
)
async def test_20_nothing_is_asked_in_a_huge_document(meet: Meet, engine: ScriptedEngine, text: str) -> None:
    editor = await meet("name")
    editor.open(text)
    assert await editor.complete(invoked=True) == []
    editor.type("2")
    assert await editor.complete() == []
    assert engine.requests == []


# 21. Ends of documents.


@pytest.mark.parametrize(
    ("text", "said", "expected"),
    [
        ("|", "import os", "import os"),
        ("|\n", "import os", "import os\n"),
        ("x = |", "1", "x = 1"),
        ("|x = 1", "import os\n", None),
        ("import os\n|", "import re", "import os\nimport re"),
        ("def f():\n    |", "return 1", "def f():\n    return 1"),
        ("def f():|", "\n    return 1", "def f():\n    return 1"),
        ("\n\n|", "import os", "\n\nimport os"),
        ("# x\n|\n", "y = 1", "# x\ny = 1\n"),
    ],
)
async def test_21_there_is_no_edge_to_fall_off(meet: Meet, text: str, said: str, expected: str | None) -> None:
    editor = await meet(said)
    editor.open(text)
    assert await editor.accepted(invoked=True) == expected


@pytest.mark.parametrize("place", [(0, 99), (99, 0), (99, 99)])
async def test_21_a_place_outside_of_the_text_is_its_nearest(meet: Meet, place: tuple[int, int]) -> None:
    editor = await meet("name")
    editor.open("x = ")
    params = {
        "textDocument": {"uri": editor.buffer.uri},
        "position": {"line": place[0], "character": place[1]},
        "context": {"triggerKind": 2},
    }
    result = await editor.request("textDocument/inlineCompletion", params)
    assert result["items"][0]["range"] == span((0, 4), (0, 4))


# 22. The status.


@pytest.mark.parametrize("fault", ["error", "broken", "cancelled", "superseded"])
async def test_22_the_status_is_not_busy_for_ever(meet: Meet, engine: ScriptedEngine, fault: str) -> None:
    editor = await meet("name", experimental={"status": True})
    await until(lambda: states(editor)[-1:] == ["ready"])
    editor.open("x = |\n")
    engine.let_go.clear()
    if fault == "error":
        engine.final = Final("error", "out of order")
    elif fault == "broken":
        engine.script = lambda _: Candidate("name", (0.5,), (4, 9))  # No such candidate: reading it fails.
    number, answer = editor.begin()
    await until(lambda: "busy" in states(editor))
    if fault == "cancelled":
        editor.notify("$/cancelRequest", {"id": number})
    elif fault == "superseded":
        editor.type("y")
    engine.let_go.set()
    try:
        await answer
    except Refused:
        assert fault == "cancelled"
    await until(lambda: states(editor)[-1] != "busy")


def states(editor: StrictEditor) -> list[str]:
    return [params["state"] for method, params in editor.told if method == "infill/status"]


# 23. The cursor.


@pytest.mark.parametrize(
    ("text", "said", "expected"),
    [
        ("x = |\n", "f(a)", "x = f(a)|\n"),
        ("f(|)\n", "abc", "f(abc|)\n"),
        ("def f(|):\n    pass\n", "a) -> int:", "def f(a) -> int:|\n    pass\n"),
        ("def f():\n    |\n", "a = 1\n    return a", "def f():\n    a = 1\n    return a|\n"),
        ("x = |\n", "'$1 ${2:a} \\\\n $0'", "x = '$1 ${2:a} \\\\n $0'|\n"),
        ("'😀' + |\n", "'😀'", "'😀' + '😀'|\n"),
    ],
)
async def test_23_the_cursor_comes_to_stand_behind_the_text(meet: Meet, text: str, said: str, expected: str) -> None:
    editor = await meet(said)
    editor.open(text)
    found = await editor.accepted()
    at = editor.buffer.offset(editor.cursor)
    assert found is not None
    assert found[:at] + "|" + found[at:] == expected


# 24. The completion menu.


async def test_24_a_selected_entry_is_gone_on_from(meet: Meet, engine: ScriptedEngine) -> None:
    editor = await meet(lambda request: "a + b" if request.head.endswith("return ") else "wrong")
    editor.open("def f(a, b):\n    re|\n")
    selected = {"range": span((1, 4), (1, 6)), "text": "return "}
    item = await editor.item(selected=selected)
    assert item["insertText"] == "return a + b"
    editor.accept(item)
    assert editor.buffer.text == "def f(a, b):\n    return a + b\n"


async def test_24_another_entry_is_another_question(meet: Meet, engine: ScriptedEngine) -> None:
    editor = await meet(lambda request: f"{len(request.head)}")
    editor.open("re|\n")
    for entry in ("return ", "read_one", "re"):
        selected = {"range": span((0, 0), (0, 2)), "text": entry}
        items = await editor.complete(selected=selected)
        assert items is not None
        assert all(item["insertText"].startswith(entry) for item in items)


@pytest.mark.parametrize(
    ("language", "text"),
    [
        ("python", 'def f():\n    """What it does.\n\n    Gives the re|\n    """\n'),
        ("javascript", "/*\n * Gives the re|\n */\nf();\n"),
        ("vue", "<script>\n/*\n * Gives the re|\n */\nf();\n</script>\n"),
    ],
)
async def test_24_where_the_entry_stands_decides_what_belongs_there(
    meet: Meet, engine: ScriptedEngine, language: str, text: str
) -> None:
    editor = await meet("of it", {"comments": False})
    editor.open(text, language)
    line, column = editor.cursor
    selected = {"range": span((line, column - 2), (line, column)), "text": "result"}
    assert await editor.complete(selected=selected) == []
    assert engine.requests == []


async def test_24_a_selection_in_visual_mode_is_tolerated(meet: Meet, engine: ScriptedEngine) -> None:
    editor = await meet("c = 3")
    editor.open("a = 1\nb = 2\n|\n")
    selected = {"range": span((0, 0), (1, 5)), "text": "a = 1\nb = 2"}
    (item,) = (await editor.begin(selected=selected)[1])["items"]
    assert (item["insertText"], item["range"]) == ("c = 3", span((2, 0), (2, 0)))


# 25. Folders.


async def test_25_folders_stand_beside_each_other(meet: Meet, engine: ScriptedEngine, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        folder.mkdir()
        (folder / f"{folder.name}.py").write_text(f"{folder.name} = 1\n")
    editor = await meet("name", {"priming": {"enabled": True}}, folders=[one])

    async def workspace(uri: str) -> str:
        editor.open("x = |\n", uri=uri)
        await editor.complete()
        return engine.asked[-1].workspace

    await workspace((one / "a.py").as_uri())
    await until(lambda: any("one.py" in texts for texts in engine.texts.values()))
    first = await workspace((one / "a.py").as_uri())
    assert first
    event = {"added": [{"uri": two.as_uri(), "name": "two"}], "removed": []}
    editor.notify("workspace/didChangeWorkspaceFolders", {"event": event})
    await until(lambda: any("two.py" in texts for texts in engine.texts.values()))
    assert await workspace((two / "a.py").as_uri()) not in ("", first)
    assert await workspace((one / "b.py").as_uri()) == first
    event = {"added": [], "removed": [{"uri": two.as_uri(), "name": "two"}]}
    editor.notify("workspace/didChangeWorkspaceFolders", {"event": event})
    async with asyncio.timeout(20):
        while await workspace((two / "c.py").as_uri()):  # The server may have to ask for settings first.
            editor.type("y")
    assert await workspace((one / "c.py").as_uri()) == first


# 26. What an index may do.


async def test_26_a_folder_is_indexed_behind_the_editors_back_and_within_limits(
    meet: Meet, engine: ScriptedEngine, tmp_path: Path
) -> None:
    for number in range(200):
        (tmp_path / f"f{number}.py").write_text(f"def f{number}(x):\n    return x\n")
    (tmp_path / "huge.py").write_text("x = 1\n" * 500_000)
    (tmp_path / "blob.py").write_bytes(b"\0" * 1000)
    editor = await meet("name", {"priming": {"enabled": True}}, folders=[tmp_path])
    editor.open("x = |\n", uri=(tmp_path / "own.py").as_uri())
    assert await editor.item(), "nobody waits for the index"
    await until(lambda: any(len(texts) > 200 for texts in engine.texts.values()))
    (texts,) = (texts for texts in engine.texts.values() if texts)
    assert not {"huge.py", "blob.py"} & set(texts)
    assert max(engine.batches) <= 64
    methods = {method for method, _ in editor.asked}
    assert methods <= {"workspace/configuration", "client/registerCapability", "window/workDoneProgress/create"}, (
        "the editor is not made to open files"
    )


def test_the_script_writes_as_an_engine_does() -> None:
    assert written("a = 1\n  b") == Candidate(
        "a = 1\n  b", (0.999,) * 4, (1, 3, 5, 9), (End(5, -1.0, 0.001), End(9, -1.0, 0.9))
    )


async def test_the_editor_is_strict(engine: ScriptedEngine) -> None:
    async with meeting() as editor:
        await editor.start({"model": "m"})
        editor.open("f(|)\n")
        good = {"insertText": "a)", "range": span((0, 2), (0, 3))}
        editor.check(good)
        for bad in (
            {"insertText": "a"},
            {"insertText": "a", "range": span((0, 2), (0, 3))},
            {"insertText": "xf(a)", "range": span((0, 0), (0, 3))},
            {"insertText": "a)", "range": span((0, 2), (1, 0))},
            {"insertText": {"kind": "snippet", "value": "a"}, "range": span((0, 2), (0, 2))},
            {"insertText": " ", "range": span((0, 2), (0, 2))},
            {"insertText": "a", "range": span((0, 3), (0, 3))},
            {**good, "insertTextFormat": 1},
        ):
            with pytest.raises((AssertionError, KeyError)):
                editor.check(bad)
    await asyncio.sleep(0)
