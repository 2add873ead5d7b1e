"""Which type to serve in on a CPU: measured on the machine at the first start, and remembered.

A type is taken for its speed only where it says the same as fp32. Knows denoisers and tokens, no model by name.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import statistics
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import torch
from infill_kernels import logits

from infill_engine.core import Canvas, Contexts, Denoiser, complete

#: Nats a token that a type may cost, and the share of places at which it may prefer another token.
MOST_NATS, MOST_OTHER = 0.02, 0.08
#: Rows of the pass that is timed: what is known next and three proposals. Passes timed, of which the median counts.
ROWS, PASSES = 4, 7
#: Tokens of context while it is timed, and tokens that are read to compare.
CONTEXT, READ = 256, 256


class Measured(msgspec.Struct, frozen=True):
    """What was measured of one type."""

    #: Milliseconds of a pass of `ROWS` rows.
    ms: float
    #: Mean nats a token above fp32's, and the share of places where its most probable token is another.
    nats: float = 0.0
    other: float = 0.0

    @property
    def good(self) -> bool:
        return self.nats <= MOST_NATS and self.other <= MOST_OTHER


class _Remembered(msgspec.Struct):
    machine: str
    measured: dict[str, Measured]


def choose(
    dtypes: Sequence[str], build: Callable[[str], Denoiser], tokens: Sequence[int], model: str, path: Path
) -> tuple[str, dict[str, Measured]]:
    """The fastest of `dtypes` that says the same as fp32, which is among them; and what was measured.

    build: makes the denoiser in a type; tokens: real text, at least `CONTEXT` + `READ` of them; model: what else the
    result depends on; path: where it is remembered, as long as neither model nor machine change.
    """
    machine = " ".join((model, platform.machine(), _processor(), str(os.cpu_count()), torch.__version__, *dtypes))
    measured = _recall(path, machine)
    if measured is None:
        measured = _measure(dtypes, build, tokens)
        with contextlib.suppress(OSError):  # a full disk or a read-only cache costs seconds a start only
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(msgspec.json.encode(_Remembered(machine, measured)))
    good = [dtype for dtype in dtypes if measured[dtype].good]
    return min(good, key=lambda dtype: measured[dtype].ms), measured


def _recall(path: Path, machine: str) -> dict[str, Measured] | None:
    try:
        known = msgspec.json.decode(path.read_bytes(), type=_Remembered)
    except (OSError, msgspec.MsgspecError):
        return None
    return known.measured if known.machine == machine else None


@torch.inference_mode()
def _measure(dtypes: Sequence[str], build: Callable[[str], Denoiser], tokens: Sequence[int]) -> dict[str, Measured]:
    measured: dict[str, Measured] = {}
    exact, following = torch.empty(0), torch.tensor(tokens[1 : READ + 1])
    for dtype in sorted(dtypes, key=lambda dtype: dtype != "fp32"):  # what the others are compared with comes first
        denoiser = build(dtype)
        scores = _scores(denoiser, tokens[: READ + 1])
        if dtype == "fp32":
            exact = scores
        nats = (exact - scores).gather(-1, following[:, None]).mean().item()
        other = (scores.argmax(-1) != exact.argmax(-1)).float().mean().item()
        measured[dtype] = Measured(_pass_ms(denoiser, tokens), nats, other)
        del denoiser
        give_back()
    return measured


def give_back() -> None:
    """Returns freed memory to the system: glibc would keep hundreds of megabytes of the type that was tried last."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _scores(denoiser: Denoiser, tokens: Sequence[int]) -> torch.Tensor:
    """Log-probabilities [N - 1, V] of what follows each token but the last, in one pass of proposals."""
    canvas = Canvas(0, (tokens[0],), len(tokens), proposal=tuple(tokens[1:-1]))
    (hidden,), _ = denoiser.denoise([canvas], [Contexts(complete(denoiser.encode((), None)))], [None])
    return logits(hidden, denoiser.head).log_softmax(-1)


def _pass_ms(denoiser: Denoiser, tokens: Sequence[int]) -> float:
    context = Contexts(complete(denoiser.encode(tokens[:CONTEXT], None)))
    left, proposal = tuple(tokens[CONTEXT : CONTEXT + 4]), tuple(tokens[CONTEXT + 4 : CONTEXT + 3 + ROWS])
    _, states = denoiser.denoise([Canvas(CONTEXT, left, 16)], [context], [None])
    took = []
    for _ in range(PASSES + 1):  # the first one makes ready
        began = time.perf_counter()
        (hidden,), _ = denoiser.denoise([Canvas(CONTEXT, left, 16, proposal=proposal)], [context], states)
        logits(hidden[:1], denoiser.head)
        took.append((time.perf_counter() - began) * 1000)
    return statistics.median(took[1:])


def _processor() -> str:
    """Something that changes with the processor and what it can do: a virtual machine may have either at its start."""
    with contextlib.suppress(OSError):
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
        steady = [line for line in first if line.startswith(("model", "flags", "Features", "CPU"))]
        return f"{zlib.crc32(chr(10).join(steady).encode()):08x}"
    return platform.processor()
