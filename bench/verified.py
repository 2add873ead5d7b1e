"""What proposals bring, and that they change no text: `python -m bench.verified [--gaps N] [--dtype T ...]`.

Each place of the standard library is filled without proposals, which is the sequential decode, and with look-up of up
to so many tokens; then again by a person who typed three of the characters that were offered, whom the rest of the last
text serves. The texts are compared byte by byte.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field

import torch
from infill_engine import models, smollm, weights
from infill_engine.config import EngineConfig
from infill_engine.engine import Engine
from infill_engine.fetch import ensure_weights
from infill_engine.models import MOST_THREADS, physical_cores
from infill_engine.protocol import Candidate, Final, InfillRequest
from msgspec.structs import replace
from rich.progress import track

from bench.engine import before
from bench.latency import places
from bench.plot import table

LINES, TOKENS, TYPED = 4, 64, 3


@dataclass(slots=True)
class Way:
    """One way to decode, over all places."""

    name: str
    texts: list[str] = field(default_factory=list)
    ms: list[float] = field(default_factory=list)
    steps: int = 0
    tokens: int = 0
    proposed: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)

    def fill(self, engine: Engine, request: InfillRequest) -> str:
        for _ in engine.prime(request):
            pass
        began, text = time.perf_counter(), ""
        for event in engine.events(request, time.monotonic()):
            if isinstance(event, Candidate):
                text = event.text
            elif isinstance(event, Final):
                timing = event.timing
        self.ms.append((time.perf_counter() - began) * 1000)
        self.texts.append(text)
        self.steps += timing.steps
        self.tokens += timing.committed
        for source in ("mask", "lookup", "last"):
            self.proposed[source] += getattr(timing.proposed, source)
            self.accepted[source] += getattr(timing.accepted, source)
        return text

    def cells(self, sequential: Way | None) -> list[str]:
        different = (
            "" if sequential is None else f"{sum(a != b for a, b in zip(self.texts, sequential.texts, strict=True))}"
        )
        right = [
            f"{source} {self.accepted[source] / self.proposed[source]:.0%}"
            for source in self.proposed
            if self.proposed[source]
        ]
        passes = f"{self.tokens / max(1, self.steps):.2f}"
        return [self.name, f"{statistics.median(self.ms):.0f}", passes, ", ".join(right), different]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.verified", description=__doc__)
    parser.add_argument("--gaps", type=int, default=30)
    parser.add_argument("--dtype", nargs="+", default=[smollm.cpu_dtypes()[-1]])
    parser.add_argument("--proposals", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--threads", type=int, default=min(physical_cores(), MOST_THREADS))
    arguments = parser.parse_args()
    path = ensure_weights(lambda message, progress: None)
    tensors, codec = weights.load(path, models.prepared(path, models.BASE))
    rows = []
    for dtype in arguments.dtype:
        torch.set_num_threads(1 if dtype == "int8" else arguments.threads)
        denoiser = smollm.SmolDenoiser(tensors, dtype, "cpu", threads=arguments.threads)
        engines = {
            count: Engine("embedded", denoiser, codec, EngineConfig(proposal_tokens=count), dtype=dtype)
            for count in (0, *arguments.proposals)
        }
        ways = {count: Way(f"{dtype}, look-up of {count}" if count else f"{dtype}, sequential") for count in engines}
        again, alone = Way(f"{dtype}, typed {TYPED} on"), Way("")
        for i, place in enumerate(track(places(arguments.gaps), dtype)):
            prefix, suffix = before(place)
            at = prefix.rfind("\n") + 1
            request = InfillRequest(
                client="bench",
                document=str(i),
                prefix=prefix[:at],
                head=prefix[at:],
                suffix=suffix,
                max_lines=LINES,
                max_tokens=TOKENS,
                deadline_ms=120_000,
            )
            for count, engine in engines.items():
                text = ways[count].fill(engine, request)
            typed = text.split("\n")[0][:TYPED]
            if typed:  # a place where nothing was written has nothing to type on into
                further = replace(request, head=request.head + typed)
                again.fill(engine, further)
                alone.fill(engines[0], replace(further, document=f"{i} alone"))
        rows += [way.cells(ways[0] if count else None) for count, way in ways.items()]
        rows.append(again.cells(alone))
    print()
    print(table(["decode", "median ms", "tokens a pass", "proposals right", "texts that differ"], rows))


if __name__ == "__main__":
    main()
