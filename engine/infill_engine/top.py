"""`infill-engine top`: what a running engine does, once a second, from what it tells of itself.

Everything shown is read from `/v1/status` and `/metrics`. Knows nothing else of the engine.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta

from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from infill_engine import process
from infill_engine.protocol import Status

#: Seconds between two frames, and seconds that a frame looks back.
REFRESH_S, WINDOW_S = 1.0, 60.0

_MIB = 2**20
_PERIODS = {
    "queue": "infill_queue_seconds",
    "encode": "infill_encode_seconds",
    "step": "infill_step_seconds",
    "total": "infill_total_seconds",
}

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Reading:
    """The figures of a scrape. The difference of two counts what came between; gauges mean nothing in it."""

    samples: Mapping[tuple[str, Labels], float]

    @classmethod
    def parse(cls, exposition: str) -> Reading:
        """Raises `ValueError` for what is not Prometheus' text format."""
        families = text_string_to_metric_families(exposition)
        samples = (sample for family in families for sample in family.samples)
        return cls({(sample.name, tuple(sorted(sample.labels.items()))): sample.value for sample in samples})

    def __sub__(self, earlier: Reading) -> Reading:
        return Reading({key: value - earlier.samples.get(key, 0.0) for key, value in self.samples.items()})

    def by(self, name: str, label: str) -> dict[str, float]:
        """A figure's values by one of its labels."""
        return {dict(labels)[label]: value for (found, labels), value in self.samples.items() if found == name}

    def total(self, name: str) -> float:
        """A figure, summed over its labels."""
        return sum(value for (found, _), value in self.samples.items() if found == name)

    def quantile(self, name: str, q: float) -> float | None:
        """A quantile of a histogram, by linear interpolation in its bucket as `histogram_quantile` of Prometheus; the
        last bound where it lies beyond. None without observations."""
        buckets = sorted((float(bound), count) for bound, count in self.by(f"{name}_bucket", "le").items())
        if not buckets or not buckets[-1][1]:
            return None
        rank, lower, below = q * buckets[-1][1], 0.0, 0.0
        for bound, count in buckets:
            if count >= rank:
                return lower if math.isinf(bound) else lower + (bound - lower) * (rank - below) / (count - below)
            lower, below = bound, count
        return lower


@dataclass(frozen=True, slots=True)
class Scrape:
    """What an engine told at one moment."""

    at: float
    status: Status
    reading: Reading


def scrape(model: str) -> Scrape | None:
    """None where no engine serves `model`. Raises `process.EngineError`."""
    status, exposition = process.status(model), process.metrics(model)
    if status is None or exposition is None:
        return None
    return Scrape(time.monotonic(), status, Reading.parse(exposition))


def watch(model: str, console: Console, *, once: bool = False, scrape: Callable[[str], Scrape | None] = scrape) -> int:
    """Shows frames until Ctrl-C, or one where there is nobody to look at more; an exit code. Where the engine is gone,
    says so and waits for it. Raises `process.EngineError` where only one frame is wanted."""
    if once or not console.is_terminal:
        found = scrape(model)
        console.print(frame(found) if found else f"no engine serves {model}")
        return 0 if found else 1
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            for shown in _frames(model, scrape):
                live.update(shown, refresh=True)
                time.sleep(REFRESH_S)
    except KeyboardInterrupt:
        pass
    return 0


def _frames(model: str, scrape: Callable[[str], Scrape | None]) -> Iterator[RenderableType]:
    window: deque[Scrape] = deque()
    while True:
        try:
            found = scrape(model)
        except process.EngineError as error:
            yield Text(f"{error}")
            continue
        if found is None:
            yield Text(f"no engine serves {model}: waiting for one")
            continue
        if window and window[-1].status.pid != found.status.pid:
            window.clear()
        window.append(found)
        while found.at - window[0].at > WINDOW_S:
            window.popleft()
        yield frame(found, window[0] if len(window) > 1 else None)


def frame(now: Scrape, before: Scrape | None = None) -> RenderableType:
    """What happened since `before`, or since the engine's start."""
    status = now.status
    done = now.reading - before.reading if before else now.reading
    seconds = now.at - before.at if before else status.uptime_s
    state = status.state if status.progress is None else f"{status.state} ({status.progress:.0%})"

    rows = Table.grid(padding=(0, 2))
    rows.add_row("model", f"{status.model}  {status.device} {status.dtype} {status.kernels}".rstrip())
    rows.add_row("state", f"{state}: {status.message}" if status.message else state)
    rows.add_row("process", f"{status.pid}, up {timedelta(seconds=round(status.uptime_s))}")
    rows.add_row("memory", f"{status.rss_bytes / _MIB:.0f} MiB, {status.cache_bytes / _MIB:.0f} MiB of them contexts")
    rows.add_row("now", f"{status.live} live, {status.background} to be encoded ahead")

    since = f"the last {seconds:.0f} s" if before else "its start"
    asked, reused = done.total("infill_requests_total"), done.by("infill_context_tokens_total", "source")
    committed, passes = done.total("infill_committed_tokens_total"), done.total("infill_request_passes_total")
    canvases, steps = done.total("infill_pass_canvases_sum"), done.total("infill_pass_canvases_count")
    proposed, accepted = done.total("infill_proposed_tokens_total"), done.total("infill_accepted_tokens_total")
    rates = Table.grid(padding=(0, 2))
    rates.add_row("requests", f"{asked / seconds:.2f}/s" if seconds > 0 else "-", _ends(done))
    rates.add_row("tokens a pass", _ratio(committed, passes), f"{_share(accepted, proposed)} of proposals right")
    rates.add_row("canvases a pass", _ratio(canvases, steps), "")
    rates.add_row("cache hits", _share(reused.get("reused", 0.0), sum(reused.values())), "of context tokens")

    times = Table("", "p50", "p95", box=None, padding=(0, 2, 0, 0), header_style="")
    for name, histogram in _PERIODS.items():
        times.add_row(name, *(_ms(done.quantile(histogram, q)) for q in (0.5, 0.95)))
    return Group(rows, Text(f"\nsince {since}"), rates, Text(), times)


def _ends(done: Reading) -> str:
    """How requests ended, the most frequent first: `12 end, 3 cancelled`."""
    ends = sorted(done.by("infill_requests_total", "reason").items(), key=lambda item: -item[1])
    return ", ".join(f"{count:.0f} {reason}" for reason, count in ends if count)


def _ratio(part: float, whole: float) -> str:
    return f"{part / whole:.2f}" if whole else "-"


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "-"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.1f} ms"
