"""What the engine measures of itself, in Prometheus' terms. Counts and times only: no text and no document's name.

Holds a registry of its own, so that two engines in one process do not share figures.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from infill_engine.protocol import ANSWERED, Final, InfillRequest, Remembered

#: Upper bounds in seconds, from a cached step on a GPU to the longest deadline anybody sets.
_SECONDS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.02,
    0.03,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.6,
    0.8,
    1.0,
    1.5,
    2,
    3,
    5,
    10,
)
_TOKENS_A_PASS = (1, 1.25, 1.5, 1.75, 2, 2.5, 3, 4, 6, 8, 16)
_CANVASES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
NOTHING = Remembered()


class Metrics:
    """An `Observer` of the scheduler; safe to call from any thread."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)

        def seconds(name: str, what: str) -> Histogram:
            return Histogram(f"infill_{name}_seconds", what, buckets=_SECONDS, registry=registry)

        self._queue = seconds("queue", "Time of an answered request that went to others' work.")
        self._encode = seconds("encode", "Time of an answered request that encoding its contexts took.")
        self._total = seconds("total", "Time from an answered request's receipt to its end.")
        self._step = seconds("step", "Time of one denoise pass over all its canvases.")
        self._pace = Histogram(
            "infill_tokens_per_pass",
            "Tokens that an answered request committed a denoise pass, on average.",
            buckets=_TOKENS_A_PASS,
            registry=registry,
        )
        self._canvases = Histogram(
            "infill_pass_canvases", "Canvases of one denoise pass.", buckets=_CANVASES, registry=registry
        )
        self._rows = Histogram("infill_pass_rows", "Rows of one denoise pass.", buckets=_ROWS, registry=registry)
        self._requests = Counter(
            "infill_requests", "Requests, by the reason for which they ended.", ["reason"], registry=registry
        )
        self._committed = Counter("infill_committed_tokens", "Tokens committed in answers.", registry=registry)
        self._passes = Counter("infill_request_passes", "Denoise passes that answers took.", registry=registry)
        self._context = Counter(
            "infill_context_tokens",
            "Tokens of context that answers needed: encoded for them, or reused from the cache.",
            ["source"],
            registry=registry,
        )
        self._snippets = Counter(
            "infill_snippets",
            "Snippets of answers: used, or late since they were not encoded yet.",
            ["state"],
            registry=registry,
        )
        self._proposed = Counter(
            "infill_proposed_tokens", "Tokens fed as proposals, by who proposed them.", ["source"], registry=registry
        )
        self._accepted = Counter(
            "infill_accepted_tokens", "Of those the ones that proved right.", ["source"], registry=registry
        )
        self._encoded = Counter(
            "infill_encoded_tokens", "Tokens of context encoded, ahead of need too.", registry=registry
        )
        self._encoding = Counter(
            "infill_encoding_seconds", "Time spent on encoding contexts, ahead of need too.", registry=registry
        )
        self._live = Gauge("infill_live_requests", "Requests that are being answered.", registry=registry)
        self._background = Gauge("infill_background", "Documents to be encoded ahead of need.", registry=registry)
        self._cache = Gauge("infill_cache_bytes", "Memory held by encoded contexts.", registry=registry)
        memory = {
            "tokens": "Tokens remembered of open workspaces.",
            "files": "Documents remembered of open workspaces.",
            "disk_bytes": "What is remembered of open workspaces takes on disk.",
            "waiting": "Documents that wait to be remembered.",
        }
        self._memory = {name: Gauge(f"infill_memory_{name}", what, registry=registry) for name, what in memory.items()}

    def finished(self, request: InfillRequest, final: Final) -> None:
        """A request ended. What was not answered counts by its reason alone: it tells no times."""
        self._requests.labels(final.reason).inc()
        if final.reason not in ANSWERED:
            return
        timing = final.timing
        self._queue.observe(timing.queue_ms / 1000)
        self._encode.observe(timing.encode_ms / 1000)
        self._total.observe((timing.queue_ms + timing.encode_ms + timing.denoise_ms) / 1000)
        self._committed.inc(timing.committed)
        self._passes.inc(timing.steps)
        self._context.labels("encoded").inc(timing.encoded)
        self._context.labels("reused").inc(timing.reused)
        self._snippets.labels("used").inc(timing.snippets)
        self._snippets.labels("late").inc(timing.late_snippets)
        for source in timing.proposed.__struct_fields__:
            self._proposed.labels(source).inc(getattr(timing.proposed, source))
            self._accepted.labels(source).inc(getattr(timing.accepted, source))
        if timing.steps:
            self._pace.observe(timing.committed / timing.steps)

    def stepped(self, canvases: int, rows: int, seconds: float) -> None:
        """One denoise pass."""
        self._step.observe(seconds)
        self._canvases.observe(canvases)
        self._rows.observe(rows)

    def encoded(self, tokens: int, seconds: float) -> None:
        """One step of encoding, which completed so many tokens."""
        self._encoded.inc(tokens)
        self._encoding.inc(seconds)

    def exposition(self, *, live: int, background: int, cache_bytes: int, memory: Remembered = NOTHING) -> bytes:
        """Everything in Prometheus' text format, with the gauges as they are now."""
        self._live.set(live)
        self._background.set(background)
        self._cache.set(cache_bytes)
        for name, gauge in self._memory.items():
            gauge.set(getattr(memory, name))
        return generate_latest(self._registry)
