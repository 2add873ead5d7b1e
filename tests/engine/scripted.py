"""Small engines made of given steps, and small requests."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing

from infill_engine.protocol import Candidate, Explanation, Final, Frame, InfillRequest

Steps = Generator[Candidate | Frame | Final | None, None, None]


class ScriptedEngine:
    """An engine whose steps are a generator function of the test; records its turns."""

    name = "scripted"
    device = "cpu"
    dtype = "float32"
    kernels = "torch"
    cache_bytes = 12_345
    workspaces = None
    encoded_tokens = 0

    def __init__(self, script: Callable[[InfillRequest], Steps]) -> None:
        self.script = script
        #: One entry a step, in the order in which they ran: ("infill" or "prime", document).
        self.turns: list[tuple[str, str]] = []
        #: What was begun to be encoded ahead.
        self.primed: list[InfillRequest] = []
        self.closed = threading.Event()

    def infill(self, request: InfillRequest, started: float) -> Steps:
        try:
            with closing(self.script(request)) as steps:
                for event in steps:
                    self.turns.append(("infill", request.document))
                    yield event
        finally:
            self.closed.set()

    def prime(self, request: InfillRequest) -> Generator[None, None, None]:
        self.primed.append(request)
        for _ in range(3):
            self.turns.append(("prime", request.document))
            yield

    def close(self) -> None:
        """Nothing is to be kept."""

    def explain(self, request: InfillRequest) -> Explanation:
        return Explanation(request.document, ())

    def denoise(self, passes: Sequence[object]) -> Sequence[object]:
        raise AssertionError("no script asks for a pass")


def endless(request: InfillRequest) -> Steps:
    """A script that has one candidate and goes on encoding."""
    yield Candidate("first")
    while True:
        time.sleep(0.001)
        yield None


def ask(
    document: str = "d", *, client: str = "c", version: int = 0, deadline_ms: int = 400, head: str = "x = "
) -> InfillRequest:
    """A small request."""
    return InfillRequest(client=client, document=document, version=version, deadline_ms=deadline_ms, head=head)


def wait_for(condition: Callable[[], bool], timeout: float = 5.0) -> None:
    """Waits until something another thread or process does is seen; fails after `timeout` seconds."""
    give_up = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < give_up, f"waited for {timeout} s"
        time.sleep(0.002)
