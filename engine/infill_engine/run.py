"""A request on its way through the engine, whatever kind of canvas it fills: its text, its time, and what it took.

Knows neither canvas nor model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar, cast

from infill_engine.context import Lease
from infill_engine.core import ContextKV, Contexts, Outcome, Pass
from infill_engine.gap import GapText
from infill_engine.protocol import Event, Final, InfillRequest, Proposals, Reason, Timing
from infill_engine.tokenizer import Healed

T = TypeVar("T")
#: Who proposed tokens that a pass checks.
Source = Literal["mask", "lookup", "last"]

#: A candidate is sent when a line is finished, and when this many tokens have come since the last one.
STREAMED_TOKENS = 8


@dataclass(slots=True, kw_only=True)
class Run:
    """One request on its way. What does not change from pass to pass is made once."""

    request: InfillRequest
    started: float
    lease: Lease
    #: The segments before the gap and their tokens, but for the cursor line.
    segments: list[str]
    lines: list[tuple[int, ...]]
    #: The cursor line before the gap.
    head: Healed
    #: The tokens after the gap; none where only blank lines follow.
    after: list[int]
    text: GapText
    contexts: Contexts = field(init=False)
    state: Any = None
    #: Tokens by who proposed them, and those of them that proved right.
    proposed: dict[Source, int] = field(default_factory=dict)
    accepted: dict[Source, int] = field(default_factory=dict)
    #: Tokens in the last candidate that was sent.
    sent: int = 0
    encode_ms: float = 0.0
    denoise_ms: float = 0.0
    steps: int = 0
    #: Of the tokens after the gap those that the canvas sees.
    suffix: Sequence[int] = ()
    #: The lines that the prefix stream holds.
    window: tuple[tuple[int, ...], ...] = ()
    #: Of each snippet the tokens, and whether the canvas sees it.
    offered: Sequence[tuple[list[int], bool]] = ()
    #: Snippets that the canvas had room for and does not see since they are not encoded.
    late_snippets: int = 0

    @property
    def document(self) -> tuple[str, str]:
        return self.request.client, self.request.document

    @property
    def before(self) -> str:
        """The whole text before the gap."""
        return self.request.prefix + self.request.head

    @property
    def snippets(self) -> int:
        """How many the canvas sees."""
        return sum(used for _, used in self.offered)

    @property
    def left_s(self) -> float:
        """Seconds until the deadline."""
        return self.started + self.request.deadline_ms / 1000 - time.monotonic()

    @property
    def late(self) -> bool:
        return self.left_s <= 0

    def took(self, outcome: Outcome) -> None:
        """Notes a pass."""
        self.state = outcome.state
        self.steps += outcome.steps
        self.denoise_ms += outcome.seconds * 1000

    def news(self, finished_line: bool) -> list[Event]:
        """The text so far, where a line was just finished or enough has come since it was last sent."""
        if not finished_line and self.text.tokens - self.sent < STREAMED_TOKENS:
            return []
        self.sent = self.text.tokens
        return [self.text.candidate(whole_words=not finished_line)]

    def final(self, reason: Reason) -> Final:
        timing = Timing(
            encode_ms=self.encode_ms,
            denoise_ms=self.denoise_ms,
            steps=self.steps,
            committed=self.text.tokens,
            encoded=self.lease.encoded,
            reused=self.lease.reused,
            snippets=self.snippets,
            late_snippets=self.late_snippets,
            proposed=Proposals(**self.proposed),
            accepted=Proposals(**self.accepted),
        )
        return Final(reason, timing=timing)


def _stays(run: Any) -> Generator[None, None, Reason | None]:
    """Of a canvas that is followed by none."""
    yield from ()
    return None


class Filling(NamedTuple):
    """How a gap is filled: what differs between kinds of canvas. Each takes the `Run` that `begin` makes."""

    begin: Callable[[InfillRequest, float, Lease], Any]
    #: Encodes the contexts and lays out the canvas; "deadline" if that came first.
    prepare: Callable[[Any], Generator[None, None, Reason | None]]
    next_pass: Callable[[Any], Pass]
    #: What a pass brings: why to stop, if so, and what there is to tell.
    step: Callable[[Any, Outcome], tuple[Reason | None, list[Event]]]
    #: Closes the text when it ended for a reason.
    close: Callable[[Any, Reason], None]
    #: Lays out another canvas behind one that is full, where the text goes on; "deadline" if that came first.
    go_on: Callable[[Any], Generator[None, None, Reason | None]] = _stays


def in_time(run: Run, work: Generator[None, None, T]) -> Generator[None, None, T | None]:
    """Passes on what `work` asks for and returns its value, or None as soon as the deadline has come."""
    while True:
        began = time.perf_counter()
        try:
            next(work)
        except StopIteration as done:
            return cast(T, done.value)
        finally:
            run.encode_ms += (time.perf_counter() - began) * 1000
        yield None
        if run.late:
            work.close()
            return None


def see(run: Run, blocks: Iterable[Generator[None, None, ContextKV]]) -> Generator[None, None, bool]:
    """Encodes blocks, which the canvas sees then, too; returns whether there was time for all."""
    for work in blocks:
        block = yield from in_time(run, work)
        if block is None:
            return False
        run.contexts = run.contexts._replace(blocks=(*run.contexts.blocks, block))
    return True
