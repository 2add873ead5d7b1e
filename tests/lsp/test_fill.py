"""Filling several places jointly, with an engine whose texts a test writes."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from infill_engine.protocol import Candidate, End, Event, Final, InfillRequest
from marked import at

from infill_lsp.core import Filled, Site, Snapshot, Span
from infill_lsp.documents import Document
from infill_lsp.fill import AT_ONCE, FillError, Superseded, fill, moved, selected
from infill_lsp.holes import holes

ASK = InfillRequest(client="c", document="d", priority="explicit", deadline_ms=1000)


@dataclass
class Scripted:
    """An engine that writes what a function of the request says, and remembers what it was asked."""

    write: Callable[[InfillRequest], str]
    finals: Callable[[InfillRequest], Final] = lambda request: Final("end")
    asked: list[InfillRequest] = field(default_factory=list)
    live: set[str] = field(default_factory=set)
    most: int = 0
    #: Requests wait for it, where there is one.
    gate: asyncio.Event | None = None

    async def infill(self, request: InfillRequest) -> AsyncGenerator[Event, None]:
        self.asked.append(request)
        assert request.document not in self.live, "it would supersede its own request"
        self.live.add(request.document)
        self.most = max(self.most, len(self.live))
        try:
            await asyncio.sleep(0)
            if self.gate is not None:
                await self.gate.wait()
            text = self.write(request)
            yield Candidate(text, (0.9,) if text else (), (len(text),) if text else (), (End(len(text), None, 0.9),))
            yield self.finals(request)
        finally:
            self.live.discard(request.document)


async def untold(done: float, words: str) -> None:
    assert 0 <= done <= 1


def applied(snapshot: Snapshot, filled: Sequence[Filled]) -> str:
    lines = list(snapshot.lines)
    for (first, start), (last, end), text in ((*one.span, one.text) for one in reversed(filled)):
        lines[first : last + 1] = (lines[first][:start] + text + lines[last][end:]).split("\n")
    return "\n".join(lines)


def spans_of(source: str) -> tuple[Snapshot, list[Span], list[Span]]:
    """The document without its marks, and what stands between « and » and what between ‹ and ›."""
    text, places, opened = "", {"»": list[Span](), "›": list[Span]()}, dict[str, tuple[int, int]]()
    for piece in re.split("([«»‹›])", source):
        here = (text.count("\n"), len(text) - text.rfind("\n") - 1)
        if piece in ("«", "‹"):
            opened[{"«": "»", "‹": "›"}[piece]] = here
        elif piece in places:
            places[piece].append(Span(opened[piece], here))
        else:
            text += piece
    return Document("file:///project/a.py", "python", 1, text).snapshot(0, 0, "utf-32"), *places.values()


def shown(source: str) -> str:
    """The document with @ in each place to be written."""
    snapshot, spans, keep = spans_of(source)
    return applied(snapshot, [Filled(site.span, "@", 1.0) for site in selected(snapshot, spans, keep)])


# What of a selection is written.


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def f():\n    «a = 1\n    b = 2»\n    return a\n", "def f():\n    @\n    return a\n"),
        # Whole lines: their indentation and the last line's end stay.
        ("def f():\n«    a = 1\n    b = 2\n»    return a\n", "def f():\n    @\n    return a\n"),
        ("«\n\n  a = 1  \n\n»b\n", "\n\n  @  \n\nb\n"),
        ("f(«a, b»)\n", "f(@)\n"),
        # Cursors.
        ("a = «»\nb = «»\n", "a = @\nb = @\n"),
        ("a = «»«»\n", "a = @\n"),
        ("«a»«»\n", "@\n"),
        # Nothing but space.
        ("def f():\n«    »\n", "def f():\n    @\n"),
        ("a = 1«\n\n\n»b\n", "a = 1\n@\n\nb\n"),
        ("a =«  »b\n", "a =@  b\n"),
        # What is kept, and nothing where only space is left.
        ("«a = 1\n‹b = 2\n›c = 3»\n", "@\nb = 2\n@\n"),
        ("«‹a = 1\n›b = 2\n‹c = 3›»\n", "a = 1\n@\nc = 3\n"),
        ("«‹a = 1›»\n", "a = 1\n"),
        ("«a, ‹b›, c»\n", "@ b@\n"),
        ("«a»\n‹b›\n", "@\nb\n"),
    ],
)
def test_what_is_selected_and_not_kept_is_written(source: str, expected: str) -> None:
    assert shown(source) == expected


@pytest.mark.parametrize(
    ("source", "lines", "min_indent"),
    [
        ("def f():\n    «a = 1\n    b = 2»\n", 8, 4),
        ("def f():\n    «if a:\n        b\n    c»\n", 10, 4),
        ("def f():\n    if a:\n        «b\n    c»\n", 8, 4),
        ("def f():\n\t«a»\n", 6, 8),
        ("x = f(«a,\n    b»)\n", 8, 4),
        ("x = «a»\n", None, None),
        ("«a» = b\n", None, None),
        ("x = «»\n", None, None),
    ],
)
def test_a_selection_has_room_within_its_block(source: str, lines: int | None, min_indent: int | None) -> None:
    snapshot, spans, _ = spans_of(source)
    (site,) = selected(snapshot, spans)
    assert (site.lines, site.min_indent) == (lines, min_indent)


async def test_the_engine_sees_a_selection_as_its_gap() -> None:
    snapshot, spans, _ = spans_of("def f():\n    «a = 1\n    b = 2»\n    return b\n")
    engine = Scripted(lambda request: "b = 3")
    (filled,) = await fill(snapshot, selected(snapshot, spans), engine, ASK, untold)
    (request,) = engine.asked
    assert (request.prefix, request.head, request.tail, request.suffix) == (
        "def f():\n",
        "    ",
        "",
        "\n    return b\n",
    )
    assert (request.max_lines, request.min_indent, request.deadline_ms) == (8, 4, 1000)
    assert filled.text == "b = 3"
    assert 0 < filled.sure < 1


async def test_each_place_is_asked_for_in_the_language_that_stands_there() -> None:
    text = "<p>a</p>\n<script>\nlet b = 1;\n</script>\n<style>\na { color: red }\n</style>\n"
    snapshot = Document("file:///project/a.vue", "vue", 1, text).snapshot(0, 0, "utf-32")
    spans = [Span((row, start), (row, end)) for row, start, end in ((0, 3, 4), (2, 8, 9), (5, 11, 14))]
    engine = Scripted(lambda request: "2")
    await fill(snapshot, selected(snapshot, spans), engine, ASK, untold)
    assert {request.head[:3]: request.language for request in engine.asked} == {
        "<p>": "vue",
        "let": "javascript",
        "a {": "css",
    }


async def test_a_fill_does_not_run_out_of_its_block() -> None:
    snapshot, spans, _ = spans_of("def f():\n    «a = 1»\n\n\nx = 1\n")
    engine = Scripted(lambda request: "a = 2\n    b = 3\n\n\ndef g():\n    pass")
    assert applied(snapshot, await fill(snapshot, selected(snapshot, spans), engine, ASK, untold)) == (
        "def f():\n    a = 2\n    b = 3\n\n\nx = 1\n"
    )


async def test_a_text_takes_no_part_of_the_line_behind_it() -> None:
    """An inline completion may bring the closers behind the cursor again, and replace them."""
    snapshot, spans, _ = spans_of("x = f(«a»)\n")
    filled = await fill(snapshot, selected(snapshot, spans), Scripted(lambda request: "b) + c"), ASK, untold)
    assert applied(snapshot, filled) == "x = f(b)\n"


# Several places.

CHAIN = "def f():\n    ...\n\n\ndef g():\n    ...\n\n\ndef h():\n    ...\n"


def counting(request: InfillRequest) -> str:
    """Each place says how many `return`s of a number it sees above, and what the last one was."""
    numbers = re.findall(r"return (\d+)", request.prefix)
    return f"return {len(numbers)}{numbers[-1] if numbers else ''}"


async def one_after_the_other(snapshot: Snapshot, sites: Sequence[Site], engine: Scripted) -> str:
    """The document filled place by place, those that are not filled yet empty."""
    text, starts = "\n".join(snapshot.lines), [0]
    for line in snapshot.lines:
        starts.append(starts[-1] + len(line) + 1)
    spans = [[starts[row] + column for row, column in site.span] for site in sites]
    after = [text[end:start] for (_, end), (start, _) in pairwise([*spans, [len(text), len(text)]])]
    before = text[: spans[0][0]] if spans else text
    for number, site in enumerate(sites):
        now = Document(snapshot.uri, snapshot.language, 1, before + "".join(after[number:]))
        row, column = before.count("\n"), len(before) - before.rfind("\n") - 1
        here = replace(site, span=Span((row, column), (row, column)))
        filled = await fill(now.snapshot(0, 0, "utf-32"), [here], engine, ASK, untold)
        before += "".join(one.text for one in filled) + after[number]
    return before


async def test_holes_are_asked_at_once_and_end_as_one_after_the_other() -> None:
    snapshot = at(CHAIN)
    engine = Scripted(counting)
    text = applied(snapshot, await fill(snapshot, holes(snapshot), engine, ASK, untold))
    assert re.findall(r"return (\d+)", text) == ["0", "10", "210"]
    assert text == await one_after_the_other(snapshot, holes(snapshot), Scripted(counting))
    assert engine.most == 3
    assert len({request.document for request in engine.asked}) == 3
    assert [request.document[-1] for request in engine.asked] == [*"012", *"12", "2"]


async def test_what_does_not_depend_on_the_others_is_asked_twice_at_most() -> None:
    snapshot = at(CHAIN * 4)
    engine = Scripted(lambda request: "return 1")
    await fill(snapshot, holes(snapshot), engine, ASK, untold)
    assert engine.most == AT_ONCE
    assert max(engine.asked.count(request) for request in engine.asked) == 1
    asked = [request.document for request in engine.asked]
    assert max(map(asked.count, asked)) == 2


@settings(max_examples=40, deadline=None)
@given(st.data())
async def test_the_fixed_point_is_that_of_one_after_the_other(data: st.DataObject) -> None:
    kinds = st.sampled_from(["def f():\n    ...\n", "x = ???\n", "def g():\n    # TODO: a\n", "y = 1\n"])
    snapshot = at("".join(data.draw(st.lists(kinds, min_size=1, max_size=8))))
    modulus = data.draw(st.integers(1, 5))

    def write(request: InfillRequest) -> str:
        seen = sum(map(ord, request.prefix + request.head))
        return f"v{seen % modulus}" + "\n    w" * (seen % 2) * (request.max_lines > 1)

    jointly = applied(snapshot, await fill(snapshot, holes(snapshot), Scripted(write), ASK, untold))
    assert jointly == await one_after_the_other(snapshot, holes(snapshot), Scripted(write))


async def test_a_place_below_is_seen_as_nothing() -> None:
    snapshot = at("a = ???\nb = ???\n")
    engine = Scripted(lambda request: "1")
    await fill(snapshot, holes(snapshot), engine, ASK, untold)
    assert [(request.prefix, request.suffix) for request in engine.asked] == [
        ("", "\nb = \n"),
        ("a = \n", "\n"),
        ("a = 1\n", "\n"),
    ]
    assert {request.avoid for request in engine.asked} == {("",)}
    snapshot, spans, keep = spans_of("«a = 1\n‹b = 2\n›c = 3»\n")
    engine = Scripted(lambda request: "d = 4")
    await fill(snapshot, selected(snapshot, spans, keep), engine, ASK, untold)
    assert [(request.prefix, request.suffix) for request in engine.asked] == [
        ("", "\nb = 2\n\n"),
        ("\nb = 2\n", "\n"),
        ("d = 4\nb = 2\n", "\n"),
    ]


async def test_a_remark_is_seen_above_its_code_and_stays() -> None:
    snapshot = at("def f():\n    pass  # TODO: sum them\n")
    engine = Scripted(lambda request: "return sum(a)")
    filled = await fill(snapshot, holes(snapshot), engine, ASK, untold)
    assert engine.asked[0].prefix == "def f():\n    # TODO: sum them\n"
    assert applied(snapshot, filled) == "def f():\n    # TODO: sum them\n    return sum(a)\n"


# What does not come, or not whole.


async def test_a_place_without_a_text_is_left_as_it_is() -> None:
    snapshot = at("a = ???\nb = ???\nc = ...\n")
    engine = Scripted(lambda request: "" if "a" in request.head else "1")
    assert applied(snapshot, await fill(snapshot, holes(snapshot), engine, ASK, untold)) == "a = ???\nb = 1\nc = ...\n"


async def test_a_text_that_stands_there_is_no_change() -> None:
    snapshot = at("def f():\n    ...\n")
    assert await fill(snapshot, holes(snapshot), Scripted(lambda request: "..."), ASK, untold) == []


async def test_a_text_that_was_cut_short_or_refused_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infill_lsp.fill.RETRY_S", 0.0)
    snapshot = at("a = ???\n")
    finals = iter(
        [Final("starting", "the model loads"), Final("busy"), Final("cancelled"), Final("deadline"), Final("end")]
    )
    engine = Scripted(lambda request: str(len(engine.asked)), lambda request: next(finals))
    words = []

    async def told(done: float, said: str) -> None:
        words.append(said)

    assert applied(snapshot, await fill(snapshot, holes(snapshot), engine, ASK, told)) == "a = 5\n"
    assert "the model loads" in words


async def test_time_is_bounded_and_the_text_so_far_is_taken() -> None:
    snapshot = at("a = ???\n")
    engine = Scripted(lambda request: "1", lambda request: Final("deadline"))
    ask = InfillRequest(client="c", document="d", deadline_ms=10)
    assert applied(snapshot, await fill(snapshot, holes(snapshot), engine, ask, untold)) == "a = 1\n"
    assert all(request.deadline_ms <= 10 for request in engine.asked)


async def test_an_engine_that_does_not_come_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infill_lsp.fill.STARTING_S", 0.0)
    snapshot = at("a = ???\n")
    engine = Scripted(lambda request: "1", lambda request: Final("starting", "fetching weights, 10%"))
    with pytest.raises(FillError, match="fetching weights, 10%"):
        await fill(snapshot, holes(snapshot), engine, ASK, untold)


@pytest.mark.parametrize(
    ("final", "kind"), [(Final("error", "no such model"), FillError), (Final("superseded"), Superseded)]
)
async def test_a_fault_in_one_place_ends_all_requests(final: Final, kind: type[FillError]) -> None:
    snapshot = at(CHAIN)
    engine = Scripted(lambda request: "1", lambda request: final)
    with pytest.raises(kind):
        await fill(snapshot, holes(snapshot), engine, ASK, untold)
    assert not engine.live


async def test_where_nothing_is_offered_it_is_said_why() -> None:
    snapshot = at("a = ???\n", uri="file:///project/.env")
    with pytest.raises(FillError, match=r"\.env may hold secrets"):
        await fill(snapshot, holes(snapshot), Scripted(lambda request: "1"), ASK, untold)


async def test_cancelling_ends_the_requests() -> None:
    snapshot = at(CHAIN)
    engine = Scripted(lambda request: "1", gate=asyncio.Event())
    task = asyncio.create_task(fill(snapshot, holes(snapshot), engine, ASK, untold))
    while len(engine.live) < 3:  # noqa: ASYNC110 - the engine tells nobody
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not engine.live


async def test_what_is_told_never_goes_back_and_its_faults_end_the_fill() -> None:
    snapshot = at(CHAIN)
    told: list[float] = []

    async def tell(done: float, words: str) -> None:
        told.append(done)

    await fill(snapshot, holes(snapshot), Scripted(counting), ASK, tell)
    assert told == sorted(told)
    assert told[-1] == 1.0

    async def refuse(done: float, words: str) -> None:
        raise FillError("the document moved")

    with pytest.raises(FillError, match="the document moved"):
        await fill(snapshot, holes(snapshot), Scripted(counting), ASK, refuse)


# Where the places are in a document that moved.


def test_spans_move_with_lines_that_changed_elsewhere() -> None:
    old = ["a", "b", "c", "d"]
    span = [Span((2, 0), (2, 1))]
    assert moved(span, old, old) == span
    assert moved(span, old, ["x", "y", "a", "b", "c", "d"]) == [Span((4, 0), (4, 1))]
    assert moved(span, old, ["b", "c", "d"]) == [Span((1, 0), (1, 1))]
    assert moved(span, old, ["a", "b", "c", "x"]) == span
    assert moved(span, old, ["a", "b", "x", "d"]) is None
    assert moved(span, old, ["x", "b", "c", "x"]) is None
    assert moved([Span((1, 0), (2, 1))], old, ["a", "b", "x", "c", "d"]) is None


LINES = st.lists(st.sampled_from(["a", "b", "    ...", ""]), min_size=1, max_size=8)


@given(LINES, LINES, LINES, LINES)
def test_a_span_that_moves_holds_the_same_text(
    above: list[str], own: list[str], below: list[str], new: list[str]
) -> None:
    old = [*above, *own, *below]
    span = Span((len(above), 0), (len(above) + len(own) - 1, len(own[-1])))
    for changed in ([*new, *own, *below], [*above, *own, *new], [*new, *own, *new], [*above, *new, *below]):
        found = moved([span], old, changed)
        if found is not None:
            (first, _), (last, _) = found[0]
            assert changed[first : last + 1] == own


# All but the places stays.

PIECES = [
    "a",
    "b",
    "é",
    "𝔘",
    "(",
    ")",
    "'",
    '"',
    "#",
    ".",
    "?",
    ":",
    " ",
    "\t",
    "    ",
    "...",
    "???",
    "# TODO",
    "pass  # ",
]
LINE_ENDS = ["\n", "\r\n", "\r", "\x0c", "\u2028", "\u200b"]
TEXT = st.lists(st.sampled_from(PIECES + LINE_ENDS), max_size=40).map("".join)


@settings(max_examples=50, deadline=None)
@given(TEXT, TEXT, st.data())
async def test_all_but_the_places_stays_as_it_was(text: str, written: str, data: st.DataObject) -> None:
    snapshot = Document("file:///project/a.py", "python", 1, text).snapshot(0, 0, "utf-32")
    row = st.integers(0, len(snapshot.lines) - 1)

    def place() -> tuple[int, int]:
        at_row = data.draw(row)
        return at_row, data.draw(st.integers(0, len(snapshot.lines[at_row])))

    spans = [Span(*sorted((place(), place()))) for _ in range(data.draw(st.integers(0, 3)))]
    keep = [Span(*sorted((place(), place()))) for _ in range(data.draw(st.integers(0, 2)))]
    sites = selected(snapshot, spans, keep) if spans else holes(snapshot)
    ends = [at for site in sites for at in site.span]
    assert ends == sorted(ends)
    engine = Scripted(lambda request: written)
    filled = await fill(snapshot, sites, engine, ASK, untold) if sites else []
    assert {one.span for one in filled} <= {site.span for site in sites}
    for one in filled:
        assert "\r" not in one.text
        (site,) = (site for site in sites if site.span == one.span)
        reached = site.span.start  # Selections that overlap are one.
        for span in sorted(spans):
            reached = max(reached, span.end) if span.start <= reached else reached
        assert not spans or (any(span.start <= site.span.start for span in spans) and site.span.end <= reached)
