"""When the engine is told to encode ahead, and for which place."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from editor import until
from lsprotocol import types

from infill_lsp import warming
from infill_lsp.client import EngineAway
from infill_lsp.core import Snapshot
from infill_lsp.documents import Document
from infill_lsp.warming import READ, Hint, Warmer, cursor


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warming, "REST_S", 0.05)
    monkeypatch.setattr(warming, "OPENED_S", 0.0)


class Warmed:
    """What was warmed; `error` is raised instead."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Hint]] = []
        self.error: Exception | None = None

    async def __call__(self, uri: str, hint: Hint) -> None:
        self.calls.append((uri, hint))
        if self.error is not None:
            raise self.error


def change(row: int, column: int, end: tuple[int, int], text: str) -> types.TextDocumentContentChangePartial:
    return types.TextDocumentContentChangePartial(
        types.Range(types.Position(row, column), types.Position(*end)), text=text
    )


async def test_a_document_is_warmed_once_it_is_opened_and_when_the_cursor_rests() -> None:
    warmed = Warmed()
    warmer = Warmer(warmed)
    warmer.opened("a")
    await until(lambda: warmed.calls == [("a", None)])
    for column in range(20):
        warmer.changed("a", types.Position(0, column))
        await asyncio.sleep(0)
    await until(lambda: len(warmed.calls) == 2)
    assert warmed.calls[1] == ("a", types.Position(0, 19))
    await warmer.aclose()


async def test_what_is_closed_is_not_warmed() -> None:
    warmed = Warmed()
    warmer = Warmer(warmed)
    warmer.changed("a", types.Position(0, 0))
    warmer.closed("a")
    warmer.closed("never open")
    await asyncio.sleep(0.1)
    assert warmed.calls == []
    warmer.changed("b", types.Position(0, 0))
    await warmer.aclose()
    await asyncio.sleep(0.1)
    assert warmed.calls == []


async def test_an_engine_that_was_away_is_told_once_it_is_ready() -> None:
    warmed = Warmed()
    warmed.error = EngineAway("the engine is not running yet")
    warmer = Warmer(warmed)
    for number in range(warming.MOST + 2):
        warmer.opened(str(number))
    await until(lambda: len(warmed.calls) == warming.MOST + 2)
    warmed.error = None
    warmed.calls.clear()
    warmer.ready()
    await until(lambda: len(warmed.calls) == warming.MOST)
    assert {uri for uri, _ in warmed.calls} == {str(number) for number in range(2, warming.MOST + 2)}
    await warmer.aclose()


def place(text: str, hint: Any) -> tuple[int, int]:
    document = Document("file:///a.py", "python", 0, text)

    def at(position: types.Position) -> Snapshot | None:
        return document.snapshot(position.line, position.character, "utf-16")

    snapshot = cursor(at, hint)
    assert snapshot is not None
    return snapshot.row, snapshot.column


def test_the_cursor_is_where_a_question_was_asked() -> None:
    assert place("a\nbcd\n", types.Position(1, 2)) == (1, 2)


@pytest.mark.parametrize(
    ("text", "made", "at"),
    [
        ("x = 1\n", change(0, 4, (0, 4), "1"), (0, 5)),
        ("a\nb\nc\n", change(0, 1, (0, 1), "\nb\nc"), (2, 1)),
        ("a\r\nb\r\n", change(0, 1, (0, 1), "\r\nb"), (1, 1)),
        ("é𝔘x\n", change(0, 3, (0, 3), "x"), (0, 3)),
        ("a\n", change(0, 1, (0, 4), ""), (0, 1)),
        ("a", change(0, 0, (0, 0), "much more than there is\nany more"), (0, 1)),
    ],
)
def test_the_cursor_is_behind_the_last_change(text: str, made: Any, at: tuple[int, int]) -> None:
    assert place(text, made) == at


def test_of_a_file_that_was_only_opened_the_beginning_is_prepared() -> None:
    assert place("a = 1\nb = 2", None) == (1, 5)
    assert place("a = 1\nb = 2", types.TextDocumentContentChangeWholeDocument("a = 1\nb = 2")) == (1, 5)
    row, _ = place("x = 12345\n" * 2_000, None)
    assert READ <= 10 * row <= READ + 10


def test_what_is_not_open_has_no_cursor() -> None:
    for hint in (None, types.Position(0, 0), change(0, 0, (0, 0), "x")):
        assert cursor(lambda _: None, hint) is None
