"""What a GPU adds to a pass: CUDA graphs, a stream for work ahead of need, and steps that the host does not wait for.

Knows plans and rows of a pass, no model by name, no text, no requests. A family hands over one function, `Compute`,
from token ids and a plan, both on the device, to the rows of the final norm; here it is recorded and replayed.

A pass of few rows is hundreds of small kernels, which a host cannot launch as fast as a GPU runs them; a graph launches
them as one. A graph has fixed sizes and addresses. So sizes go by buckets (`Bucket`), and the integers of a pass lie in
one buffer on the device with a fixed place for each list, into which they are copied at once. Rows and canvases that
fill up a bucket have no part in attention and write no keys.

In a graph are: the embedding's look-up, all layers and the final norm. Not in it are: copying the integers, `unmask`
and reading back; passes over some layers only, by which contexts are encoded; passes that fit no bucket.
"""

# torch's streams and events have no types.
# mypy: allow-untyped-calls

from __future__ import annotations

import contextlib
import itertools
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from infill_kernels import PAGE, Plan, Rope, moved
from torch import Tensor

log = logging.getLogger(__name__)

#: (ids [N] of an integer type, plan) -> rows [N, D], all on one device.
Compute = Callable[[Tensor, Plan], Tensor]

#: Query rows, canvases and keys of a graph. More keys than the last are no matter: they only decide how attention is
#: split.
ROWS = (1, 2, 4, 8, 16, 32, 64)
CANVASES = (1, 2, 4, 8, 16)
KEYS = (512, 2048, 8192)
#: Room for each canvas in a graph's lists: its tokens, what it is conditioned on, and pages of both.
TOKENS, CONTEXTS, PAGES = 384, 8, 128

#: Graphs kept; of more the one that was not used for longest goes.
MOST_GRAPHS = 48

_STARTS = ("query_start", "token_start", "context_start")
_LISTS = tuple(field.name for field in fields(Plan) if field.type == "Tensor")


class Bucket(NamedTuple):
    """The sizes of a graph."""

    rows: int
    canvases: int
    keys: int

    @classmethod
    def of(cls, tokens: Tensor, of_pass: Plan) -> Bucket | None:
        """The least bucket that a pass fits into; None where it fits into none."""
        rows, canvases = _least(ROWS, len(tokens)), _least(CANVASES, len(of_pass.own_at))
        if rows is None or canvases is None:
            return None
        bucket = cls(rows, canvases, _least(KEYS, of_pass.most_keys) or KEYS[-1])
        sizes, used = bucket.sizes, _sizes(tokens, of_pass)
        return bucket if all(used[name] <= size for name, size in sizes.items()) else None

    @property
    def sizes(self) -> Mapping[str, int]:
        """Numbers of each list, in the order in which they lie in a buffer."""
        return self._sizes_and_starts()[0]

    @cache  # noqa: B019 - there are some dozens
    def _sizes_and_starts(self) -> tuple[Mapping[str, int], Mapping[str, int]]:
        of_tokens, of_contexts = self.canvases * TOKENS, self.canvases * CONTEXTS
        queries = dict.fromkeys(("tokens", "query_token", "query_slot"), self.rows)
        own = dict.fromkeys(("own_page", "own_at"), self.canvases)
        kept = dict.fromkeys(("position", "enter", "leave", "group", "branch"), of_tokens)
        placed = {name: of_contexts for name in _LISTS if name.startswith("context_")}
        starts = dict.fromkeys(_STARTS, self.canvases + 1)
        sizes = queries | own | kept | placed | starts | {"pages": self.canvases * PAGES}
        return sizes, _starts(sizes)

    def pack(self, buffer: Tensor, tokens: Tensor, of_pass: Plan) -> None:
        """Writes a pass into a host's buffer, int32 [at least sum of sizes]. Canvases that it does not have have no
        queries, and rows that it does not have are no canvas's: the kernels leave both alone."""
        (sizes, starts), numbers = self._sizes_and_starts(), buffer.numpy()
        _copy(numbers, starts, tokens, of_pass)
        first = starts["tokens"]
        numbers[first + len(tokens) : first + self.rows] = 0  # they are looked up all the same
        for name in _STARTS:
            first, last = starts[name], len(getattr(of_pass, name)) - 1
            numbers[first + last : first + sizes[name]] = numbers[first + last]

    def unpack(self, buffer: Tensor, bias_right: float, positions: int) -> tuple[Tensor, Plan]:
        """The pass that lies in a buffer, as views of it. What the host has to know of it is the bucket's."""
        views = _views(buffer, self.sizes)
        return views["tokens"], _plan(views, _Host(bias_right, self.rows, self.sizes["position"], self.keys, positions))


class _Host(NamedTuple):
    """What the host knows of a plan."""

    bias_right: float
    most_queries: int
    most_tokens: int
    most_keys: int
    positions: int


def _least(sizes: Sequence[int], least: int) -> int | None:
    return next((size for size in sizes if size >= least), None)


def _sizes(tokens: Tensor, of_pass: Plan) -> dict[str, int]:
    return {"tokens": len(tokens)} | {name: len(getattr(of_pass, name)) for name in _LISTS}


def _views(buffer: Tensor, sizes: Mapping[str, int]) -> dict[str, Tensor]:
    return dict(zip(sizes, torch.split(buffer[: sum(sizes.values())], list(sizes.values())), strict=True))


def _plan(views: Mapping[str, Tensor], host: _Host) -> Plan:
    known: dict[str, Any] = {name: views[name] for name in _LISTS} | host._asdict()
    known["context_bias"] = known["context_bias"].view(torch.float32)
    return Plan(**known)


def _starts(sizes: Mapping[str, int]) -> Mapping[str, int]:
    """Where each list begins."""
    return dict(zip(sizes, itertools.accumulate(sizes.values(), initial=0), strict=False))


def _copy(numbers: npt.NDArray[Any], starts: Mapping[str, int], tokens: Tensor, of_pass: Plan) -> None:
    for name in ("tokens", *_LISTS):
        of_list = (tokens if name == "tokens" else getattr(of_pass, name)).numpy()
        first = starts[name]
        bits = of_list if of_list.dtype != np.float32 else of_list.view(np.int32)
        numbers[first : first + len(bits)] = bits


def on_device(tokens: Tensor, of_pass: Plan, device: torch.device) -> tuple[Tensor, Plan]:
    """A host's pass on the device as it is, by one copy that the host does not wait for."""
    sizes = _sizes(tokens, of_pass)
    buffer = torch.empty(sum(sizes.values()), dtype=torch.int32)
    _copy(buffer.numpy(), _starts(sizes), tokens, of_pass)
    views = _views(moved(buffer, device), sizes)
    return views["tokens"], _plan(views, _Host(*(getattr(of_pass, name) for name in _Host._fields)))


@dataclass(frozen=True, slots=True)
class Loaded:
    """A pass whose integers lie where it runs. It may be run again after they were changed in place."""

    #: The ids, [at least N], and the plan.
    tokens: Tensor
    plan: Plan
    #: The rows [N, D]; they are there until the next run of any pass.
    run: Callable[[], Tensor]


#: Makes a run again of what is run: for `Graphed`, by recording it.
Record = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]


class Recorder:
    """Records CUDA graphs, all of which share their memory: they never run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._memory = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Runs `compute` and records it; returns what replays it on the current stream. Raises `RuntimeError` where it
        does what cannot be recorded, such as waiting for the device."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            compute()  # compiles kernels and sets libraries up, which is not possible while recording
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, self._memory, self._stream, capture_error_mode="thread_local"):
            rows = compute()

        def replay() -> Tensor:
            graph.replay()
            return rows

        return replay


class Graphed:
    """A `Compute` that is recorded and replayed where a pass fits a bucket, and called where it does not.

    For one thread and one stream. A bucket is recorded when it is first met. Where that fails, passes run as they
    would without graphs, and the log says so once.
    """

    def __init__(self, compute: Compute, rope: Rope, device: torch.device, record: Record | None = None) -> None:
        """rope: the tables that `compute` reads; what else it reads has to stay where it is. record: a `Recorder` by
        default."""
        self._compute, self._rope, self._device = compute, rope, device
        self._record = record or Recorder(device)
        largest = Bucket(ROWS[-1], CANVASES[-1], KEYS[-1])
        self._numbers = torch.zeros(sum(largest.sizes.values()), dtype=torch.int32, device=device)
        self._recorded: OrderedDict[tuple[Bucket, float], Loaded] = OrderedDict()
        self._table = rope.table
        self._works = True

    @torch.inference_mode()
    def prepare(self, bias_right: float) -> None:
        """Records the buckets of a single canvas ahead of need; compiles what they launch, which may take seconds."""
        self._numbers.zero_()  # rows of no canvas
        for rows, keys in itertools.product(ROWS, KEYS[:2]):
            if self._works:
                self._of(Bucket(rows, 1, keys), bias_right)

    def load(self, tokens: Tensor, of_pass: Plan) -> Loaded:
        """Sends a host's pass to the device, which the host does not wait for. What was loaded before may no longer be
        run."""
        self._rope.reserve(of_pass.positions)
        bucket = Bucket.of(tokens, of_pass)
        if bucket is None or not self._works:
            there = on_device(tokens, of_pass, self._device)
            return Loaded(*there, partial(self._compute, *there))
        # torch lends pinned memory again only when the copies out of it are done.
        pinned = self._device.type == "cuda"
        buffer = torch.empty(sum(bucket.sizes.values()), dtype=torch.int32, pin_memory=pinned)
        bucket.pack(buffer, tokens, of_pass)
        self._numbers[: len(buffer)].copy_(buffer, non_blocking=True)
        recorded, n = self._of(bucket, of_pass.bias_right), len(tokens)
        return Loaded(recorded.tokens, recorded.plan, lambda: recorded.run()[:n])

    def _of(self, bucket: Bucket, bias_right: float) -> Loaded:
        """A bucket's pass, of which the first has been sent."""
        if self._table is not self._rope.table:  # it has grown, and the graphs read the old one
            self._recorded.clear()
            self._table = self._rope.table
        key = bucket, bias_right
        if key not in self._recorded:
            there = bucket.unpack(self._numbers, bias_right, self._rope.table.shape[1])
            compute = partial(self._compute, *there)
            try:
                self._recorded[key] = Loaded(*there, self._record(compute))
            except RuntimeError as error:
                self._works = False
                log.warning("passes run without CUDA graphs: recording one failed with %s", type(error).__name__)
                return Loaded(*there, compute)
            if len(self._recorded) > MOST_GRAPHS:
                self._recorded.popitem(last=False)
        self._recorded.move_to_end(key)
        return self._recorded[key]


class Behind:
    """A stream for what no request waits for. Work on it begins after what the current stream has been given so far,
    so it may write wherever that one has read; the other way round, who needs its results waits for the event."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device, priority=0)  # the lowest there is

    @contextlib.contextmanager
    def work(self) -> Iterator[torch.cuda.Event]:
        """What is launched within goes to this stream; gives the event that follows it."""
        done = torch.cuda.Event()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            try:
                yield done
            finally:
                done.record()


def in_front(device: torch.device) -> None:
    """Gives the calling thread a stream of high priority: what it launches goes before any `Behind`."""
    stream = torch.cuda.Stream(device, priority=-1)
    stream.wait_stream(torch.cuda.current_stream(device))
    torch.cuda.set_stream(stream)


def advance(of_pass: Plan, canvases: int) -> None:
    """Moves each of the first `canvases` canvases on by one token, in place and without the host.

    Each has one token, which is computed and stands in the slot behind its last context's end; with it that context
    becomes a token longer. So the lists keep their lengths, and the plan becomes the one that would be made anew.
    """
    own = of_pass.context_start[1 : canvases + 1].long() - 1
    of_pass.context_end[own] += 1
    of_pass.position[:canvases] += 1
    at = of_pass.own_at[:canvases]
    at += 1
    page = of_pass.pages[(of_pass.own_page[:canvases] + at // PAGE).long()]
    of_pass.query_slot[:canvases] = page * PAGE + at % PAGE


def write(loaded: Loaded, first: Tensor, steps: int, read: Callable[[Tensor], Tensor]) -> Tensor:
    """Takes `steps` more tokens a canvas one after the other, and nothing back to the host in between.

    loaded: a pass as `advance` wants it; first: [F, C], what was read of the rows that predict its tokens, their ids in
    the first line; read: says the same of rows [C, D]. Returns [1 + steps, F, C], `first` included.
    """
    canvases = first.shape[1]
    said = [first]
    for step in range(steps):
        if step:
            advance(loaded.plan, canvases)
        loaded.tokens[:canvases] = said[-1][0]
        said.append(read(loaded.run()))
    return torch.stack(said)
