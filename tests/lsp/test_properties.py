"""What holds of any document, any edits and any text of a model, through a real server and a strict editor."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Coroutine, Iterator
from contextlib import AsyncExitStack
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import tree_sitter_python
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from strict import ScriptedEngine, StrictEditor, meeting, scripted
from tree_sitter import Language, Parser

#: Line ends and what looks like some, a BOM, tabs, characters of one to four bytes, some without width, some that are
#: written to the left; and what code is made of.
_ALPHABET = [
    *("\n", "\r\n", "\r", "\x0c", "\x0b", "\x85", "\u2028", "\u2029", "\ufeff", "\t", "    "),
    *("é", "漢", "😀", "𝔘", "e\u0301", "\u200b", "\u200d", "א", "ش", "\u202b"),
    *(
        "a",
        "def ",
        "if ",
        "return ",
        "x",
        " = ",
        "(",
        ")",
        "[",
        "]",
        "{",
        "}",
        '"',
        "'",
        '"""',
        ":",
        ",",
        "#",
        "\\",
        "1",
    ),
]
TEXT = st.lists(st.sampled_from(_ALPHABET), max_size=30).map("".join)
#: What models write: mostly code of few lines.
SAID = st.lists(st.sampled_from([*_ALPHABET[-20:], "\n", "\n    ", "b", " + "]), max_size=16).map("".join)
#: Where (as a share of the text), how much is replaced, by what; None: the whole text.
EDITS = st.lists(
    st.tuples(st.floats(0, 1), st.integers(0, 6), TEXT) | st.tuples(st.none(), st.none(), TEXT), max_size=5
)


class Bench:
    """One server and one engine for many examples."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._stack = AsyncExitStack()
        self.engine = ScriptedEngine()
        self.editor: StrictEditor
        self._names = count()

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        self._runner.run(work)

    async def open(self, encoding: str) -> None:
        await self._stack.enter_async_context(scripted(self.engine))
        self.editor = await self._stack.enter_async_context(meeting())
        deadline = {"automatic": 60_000, "invoked": 60_000}
        await self.editor.start({"model": "m", "deadline": deadline}, encodings=[encoding])

    def close(self) -> None:
        self._runner.run(self._stack.aclose())
        self._runner.close()

    def document(self, text: str) -> None:
        """A document that was never open before."""
        self.editor.open(text, uri=f"file:///project/{next(self._names)}.py", mark="\0")

    def edit(self, share: float | None, size: int | None, text: str) -> None:
        editor, buffer = self.editor, self.editor.buffer
        if share is None or size is None:
            buffer.text = text
            buffer.version += 1
            document = {"uri": buffer.uri, "version": buffer.version}
            editor.notify("textDocument/didChange", {"textDocument": document, "contentChanges": [{"text": text}]})
            return
        start = between(buffer.text, round(share * len(buffer.text)))
        end = between(buffer.text, min(start + size, len(buffer.text)))
        editor.edit(buffer.place(start), buffer.place(max(start, end)), text)

    async def settled(self) -> str:
        """The server's text, once it has read all that was sent."""
        await self.editor.request("infill/status", {})
        return self.editor.server.documents[self.editor.buffer.uri].text


@pytest.fixture(scope="module", params=["utf-8", "utf-16", "utf-32"])
def bench(shared_home: Path, request: pytest.FixtureRequest) -> Iterator[Bench]:
    bench = Bench()
    bench.run(bench.open(request.param))
    assert bench.editor.encoding == request.param
    yield bench
    bench.close()


def between(text: str, offset: int) -> int:
    """The offset, or the one before where it is inside of a line end."""
    return offset - (text[offset - 1 : offset + 1] == "\r\n")


_QUICK = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@_QUICK
@given(text=TEXT, edits=EDITS)
def test_the_mirror_is_the_editors_text(bench: Bench, text: str, edits: list[tuple[Any, Any, str]]) -> None:
    async def example() -> None:
        bench.document(text)
        for edit in edits:
            bench.edit(*edit)
        assert await bench.settled() == bench.editor.buffer.text
        bench.editor.shut()

    bench.run(example())


PYTHON = Parser(Language(tree_sitter_python.language()))


@_QUICK
@given(before=TEXT, after=TEXT, said=SAID, edits=EDITS, share=st.floats(0, 1), invoked=st.booleans())
@example(before="é", after="é", said='""', edits=[], share=0.25, invoked=True)  # What is missing there has no name.
def test_an_accepted_item_changes_nothing_but_its_gap(
    bench: Bench, before: str, after: str, said: str, edits: list[tuple[Any, Any, str]], share: float, invoked: bool
) -> None:
    async def example() -> None:
        editor = bench.editor
        bench.engine.script = said
        bench.document(before + "\nx = \n" + after)
        for edit in edits:
            bench.edit(*edit)
        old = editor.buffer.text
        at = between(old, round(share * len(old))) if invoked else between(old, min(len(old), len(before) + 5))
        editor.cursor = editor.buffer.place(at)
        items = await editor.complete(invoked)  # Checks each as the editor does that draws it.
        assert items is not None
        for item in items[:1]:
            editor.accept(item)
            new = editor.buffer.text
            kept = len(new) - editor.buffer.offset(editor.cursor)
            assert new.startswith(old[:at])
            assert old[len(old) - kept :] == new[len(new) - kept :]
            gone = old[at : len(old) - kept]
            assert not re.search("[\r\n]", gone), "nothing of another line is replaced"
            ends = re.findall("\r\n|\n|\r", item["insertText"])
            own = re.findall("\r\n|\n|\r", old) or ["\n"]
            assert all(own.count(end) == max(map(own.count, own)) for end in ends)
            assert await bench.settled() == new
            if parses(old):
                assert parses(new)
        editor.shut()

    bench.run(example())


def parses(text: str) -> bool:
    """As the language says where lines end."""
    source = re.sub("\r\n|\r", "\n", text).encode()
    return not PYTHON.parse(source).root_node.has_error
