"""Every family on this machine's CPU: `python -m bench.families [--large] [--repeat N] [--threads N] [--json FILE]`.

Random weights in the shapes of the published models, so that nothing has to be downloaded; each in a process of its
own, whose memory is then its own. A gap stands behind 1,024 tokens of prefix and before 96 of suffix, and a canvas of
16 slots (32 for DiffusionGemma, which is known to do badly with fewer) is filled in as many passes as the family's
authors take, or for the embedded model as its look-up leaves of 16 tokens. *Cold*: nothing of the prefix is encoded
yet; *warm*: as in typing, it is but for the last token. Models with a mask token keep keys and values from pass to pass
(a dual cache) and from request to request, as the engine has it on a CPU; exactly, each pass costs what the cold
context does.

Below stand, on paper, what a step of the full models cannot be faster than on an H200, at any quality of code: its
bytes at 4.8 TB/s or its multiply-adds at 989 TFLOP/s in bf16 and 1,979 in FP8, whichever is longer.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import torch
from infill_engine import smollm
from infill_engine.checkpoint import Form, needed_bytes
from infill_engine.config import EngineConfig
from infill_engine.core import Canvas, Contexts, Facts, OpenCanvas, OpenDenoiser, SelfConditioned, complete
from infill_engine.families.masked import KEPT
from infill_engine.models import MOST_THREADS, physical_cores
from infill_engine.serving import give_back
from infill_kernels import Unmasked, unmask

from bench import engine
from bench.plot import table
from bench.random_models import BYTES, DIFFUSION_GEMMA, DREAM, LLADA, OPEN_DCODER, Model, RandomCheckpoint, Step, tiny

PREFIX, SUFFIX, CHUNK = 1024, 96, 64
SLOTS, GEMMA_SLOTS = 16, 32
#: Tokens that the embedded model is proposed and commits a pass, the latter as measured by `bench.engine`.
PROPOSED, COMMITTED = EngineConfig().proposal_tokens, 1.31
#: Passes of DiffusionGemma's published sampler, at most.
GEMMA_PASSES = 48
LARGE_GIB = 24
#: H200: bytes a second, and multiply-adds a second in bf16 and FP8.
H200_BYTES, H200_BF16, H200_FP8 = 4.8e12, 989e12 / 2, 1979e12 / 2

_open_dcoder, _dream, _llada = (
    Model("Open-dCoder 0.5B", OPEN_DCODER),
    Model("Dream 7B", DREAM),
    Model("LLaDA 8B", LLADA),
)
_gemma = Model("DiffusionGemma 26B-A4B", DIFFUSION_GEMMA)
_small_llada = _llada.scaled("LLaDA, small", d_model=768, n_layers=12, n_heads=12, n_kv_heads=12, mlp_hidden_size=2304)
_small_gemma = _gemma.scaled(
    "DiffusionGemma, small", hidden_size=768, num_hidden_layers=12, num_attention_heads=8, num_key_value_heads=4,
    head_dim=64, intermediate_size=576, num_experts=32, top_k_experts=4, moe_intermediate_size=192, vocab_size=65536,
)  # fmt: skip

_smol = smollm.SMOLLM2
#: The embedded model; only its sizes count here.
_embedded = _open_dcoder.scaled(
    "embedded", hidden_size=_smol.width, num_hidden_layers=_smol.layers, num_attention_heads=_smol.heads,
    num_key_value_heads=_smol.kv_heads, intermediate_size=_smol.ffn, vocab_size=_smol.vocab,
)  # fmt: skip

#: What is measured: a model, and the type that it is served in.
SMALL: tuple[tuple[Model, str], ...] = (
    (_embedded, "int8"),
    (_open_dcoder, "int8"),
    (_open_dcoder, "bf16"),
    (_small_llada, "int8"),
    (_small_llada, "bf16"),
    (_small_gemma, "bf16"),
)
TINY = tuple((tiny(model), "fp32") for model in (_open_dcoder, _llada, _gemma))


HEADER = (
    "model", "type", "parameters", "memory", "peak", "context", "first pass", "pass", "floor", "passes",
    "line, cold", "line, warm",
)  # fmt: skip


@dataclass(slots=True)
class Row:
    """What was measured of one model."""

    model: str
    dtype: str
    #: Of the whole, in millions.
    parameters: float
    #: Milliseconds: the prefix, or a pass over all; the first pass of a request whose prefix is there; each after it.
    context: float
    first: float
    each: float
    #: Passes that fill the canvas, and what that takes.
    passes: int
    cold: float
    warm: float
    #: The least that `each` can take.
    floor: float
    #: MiB held afterwards, and at most on the way.
    held: float
    peak: float

    @property
    def cells(self) -> list[str]:
        """Of the table."""
        return [
            self.model, self.dtype, f"{self.parameters:,.0f}", f"{self.held:,.0f}", f"{self.peak:,.0f}",
            *(f"{ms:,.1f}" for ms in (self.context, self.first, self.each, self.floor)),
            f"{self.passes}", f"{self.cold:,.0f}", f"{self.warm:,.0f}",
        ]  # fmt: skip


@dataclass
class OpenFilling:
    """By a family that sees both sides."""

    denoiser: OpenDenoiser
    slots: int
    passes: int
    prefix: int = PREFIX
    suffix: int = SUFFIX
    _contexts: Contexts = field(init=False)
    _canvas: OpenCanvas = field(init=False)
    _state: Any = field(init=False, default=None)
    _left: int = field(init=False, default=0)

    @property
    def _facts(self) -> Facts:
        return self.denoiser.facts

    def begin(self, warm: bool) -> None:
        """Encodes the prefix anew, or all of it but what a key stroke adds."""
        self._contexts = _encoded(self.denoiser, self.prefix, self.prefix, self._contexts if warm else None)
        blank = self._facts.mask_id if self._facts.mask_id is not None else 7
        self._canvas = OpenCanvas.of(self.prefix, (), [blank] * self.slots, _ids(self.suffix))
        self._state, self._left = None, self.passes

    def least(self, model: Model) -> Step:
        """What a pass has to do, with half of the slots open."""
        if model.kind == "gemma":
            return model.step(self.slots + self.suffix, self.slots, self.prefix)
        return model.step(self.slots + 1, self.slots // 2, self.prefix + self.suffix)

    def step(self) -> bool:
        """A pass; returns whether the gap is filled."""
        (hidden,), (self._state,) = self.denoiser.denoise([self._canvas], [self._contexts], [self._state])
        soft = self._facts.open is not None and self._facts.open.soft
        said: Unmasked = unmask(hidden, self.denoiser.head, soft=soft)
        if said.soft is not None:
            self._state = cast(SelfConditioned, self.denoiser).condition(self._state, said.soft)
        still, tokens = self._canvas.open, said.token.tolist()
        if soft:  # it may change its mind about every slot until the last pass
            self._canvas = self._canvas.refill(dict(zip(still, tokens, strict=True)))
        else:
            count = -(-len(still) // self._left)
            self._canvas = self._canvas.pin({slot: (tokens[i], 1.0) for i, slot in enumerate(still[:count])})
        self._left -= 1
        return self._left == 0


@dataclass
class LeftFilling:
    """By the embedded model, from the left, each pass with proposals."""

    denoiser: smollm.SmolDenoiser
    slots: int
    prefix: int = PREFIX
    _contexts: Contexts = field(init=False)
    _canvas: Canvas = field(init=False)
    _state: Any = field(init=False, default=None)

    @property
    def passes(self) -> int:
        """That it takes."""
        return -int(-self.slots // COMMITTED)

    def begin(self, warm: bool) -> None:
        self._contexts = _encoded(self.denoiser, self.prefix, CHUNK, self._contexts if warm else None)
        self._canvas, self._state = Canvas(self.prefix, tuple(_ids(4)), 2 * self.slots), None

    def least(self, model: Model) -> Step:
        """What a pass has to do."""
        return model.step(1 + PROPOSED, 1 + PROPOSED, self.prefix + self.slots // 2)

    def step(self) -> bool:
        """A pass; returns whether the gap is filled."""
        committed = self._canvas.committed
        asked = replace(self._canvas, proposal=tuple(_ids(PROPOSED)))
        (hidden,), (self._state,) = self.denoiser.denoise([asked], [self._contexts], [self._state])
        said = unmask(hidden, self.denoiser.head).token.tolist()
        count = int(COMMITTED * (len(committed) + 1)) - int(COMMITTED * len(committed))
        self._canvas = replace(self._canvas, committed=(*committed, *said[:count]))
        return len(self._canvas.committed) >= self.slots


def _encoded(denoiser: OpenDenoiser | smollm.SmolDenoiser, prefix: int, chunk: int, kept: Contexts | None) -> Contexts:
    """A prefix of so many tokens, encoded in chunks; all but its last token is `kept`, if that is there."""
    ids, kv, first = _ids(prefix), None, 0
    if kept is not None:
        kv, first = kept.prefix, prefix - 1
        kv.truncate(first)
    for at in range(first, prefix, chunk):
        kv = complete(denoiser.encode(ids[at : at + chunk], kv))
    assert kv is not None
    return Contexts(kv)


def _ids(count: int) -> list[int]:
    """Some ids that every vocabulary has."""
    return [20 + 7 * i % 200 for i in range(count)]


def filling(model: Model, dtype: str, threads: int, prefix: int) -> OpenFilling | LeftFilling:
    """A loaded model with a gap to fill."""
    team = None
    if dtype == "int8":
        from infill_kernels import cpu

        team = cpu.Team(threads)
        torch.set_num_threads(1)  # as the engine does
    if model == _embedded:
        tensors = engine.random_weights(smollm.SMOLLM2)
        tensors |= smollm.quantised(tensors)
        return LeftFilling(smollm.SmolDenoiser(tensors, dtype, "cpu", threads=threads), SLOTS, prefix)
    kind = torch.float32 if dtype == "fp32" else torch.bfloat16
    denoiser = model.build("cpu", kind, caching=KEPT, team=team)
    slots, passes = (GEMMA_SLOTS, GEMMA_PASSES) if model.kind == "gemma" else (SLOTS, SLOTS)
    return OpenFilling(denoiser, slots, passes, prefix)


def measured(model: Model, dtype: str, threads: int, repeat: int, prefix: int = PREFIX) -> Row:
    """One model, in this process."""
    torch.set_num_threads(threads)
    gap = filling(model, dtype, threads, prefix)
    give_back()  # what loading took
    # A family whose context hangs on the canvas computes both in its first pass.
    whole = isinstance(gap, OpenFilling) and gap.denoiser.facts.mask_id is not None
    gap.begin(False)
    gap.step()  # compiles
    times: dict[str, list[float]] = {name: [] for name in ("context", "first", "each", "cold", "warm")}
    for _ in range(repeat):
        for warm in (False, True):
            marks = [time.perf_counter()]
            gap.begin(warm)
            encoded = time.perf_counter()
            done = False
            while not done:
                done = gap.step()
                marks.append(time.perf_counter())
            times["warm" if warm else "cold"].append(marks[-1] - marks[0])
            times["each"] += [after - before for before, after in pairwise(marks[1:])]
            if warm:
                times["first"].append(marks[1] - (marks[0] if whole else encoded))
            else:
                times["context"].append((marks[1] if whole else encoded) - marks[0])
    ms = {name: 1000 * statistics.median(some) for name, some in times.items()}
    held, peak = _held_mib(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    step, passes = gap.least(model), gap.passes
    del gap
    torch.set_num_threads(threads)
    floor = engine.measured(dtype, "cpu", repeat).floor_ms(step.bytes(*BYTES[dtype]), step.products)
    return Row(model.name, dtype, model.parameters / 1e6, **ms, passes=passes, floor=floor, held=held, peak=peak)


def _held_mib() -> float:
    """Memory of this process now; where the system does not say, at most."""
    pages = Path("/proc/self/statm")
    if not pages.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return int(pages.read_text().split()[1]) * resource.getpagesize() / 2**20


def on_paper(model: Model, dtype: str) -> list[str]:
    """A full model's floor on an H200, as a row of the table: the same gap, or a whole canvas of DiffusionGemma."""
    gemma = model.kind == "gemma"
    rows = model.config["canvas_length"] if gemma else SLOTS + 1
    step = model.step(rows, rows if gemma else SLOTS, PREFIX + (0 if gemma else SUFFIX))
    peak = H200_FP8 if dtype == "fp8" else H200_BF16
    ms = 1000 * max(step.bytes(*BYTES[dtype]) / H200_BYTES, step.products / peak)
    passes = GEMMA_PASSES if gemma else SLOTS
    held = model.parameters * BYTES[dtype][0] / 2**20
    name = f"{model.name}, H200 on paper"
    cells = [name, dtype, f"{model.parameters / 1e6:,.0f}", f"{held:,.0f}", "", "", "", "", f"{ms:,.1f}"]
    return [*cells, f"{passes}", "", f"{passes * ms:,.0f}"]


def largest(model: Model, form: Form, itemsize: int, room: int) -> Model | None:
    """A model with as many of its layers as fit; of DiffusionGemma whole groups of five sliding and a full one."""
    layers = model.config.get("text_config", model.config)["num_hidden_layers"]
    unit = 6 if model.kind == "gemma" else 1
    for count in range(layers, 0, -unit):
        name = model.name if count == layers else f"{model.name}, {count} of {layers} layers"
        some = model.scaled(name, num_hidden_layers=count)
        if needed_bytes(RandomCheckpoint(some, "cpu", torch.bfloat16), form, itemsize) <= room:
            return some
    return None


def apart(model: Model, dtype: str, arguments: argparse.Namespace) -> Row:
    """One model, in a process of its own."""
    command = [sys.executable, "-m", "bench.families", "--threads", str(arguments.threads)]
    command += [
        "--repeat",
        str(arguments.repeat),
        "--prefix",
        str(arguments.prefix),
        "--one",
        json.dumps([asdict(model), dtype]),
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{model.name} in {dtype} ended with {done.returncode}")
    return Row(**json.loads(done.stdout.splitlines()[-1]))


def chosen(arguments: argparse.Namespace) -> Iterator[tuple[Model, str]]:
    """What is to be measured."""
    if arguments.tiny:
        yield from TINY
        return
    yield from SMALL
    if arguments.large:
        # The rest of the machine, what a pass needs, and rounding take a share.
        room = int(0.75 * (LARGE_GIB << 30))
        for model, dtype, form in ((_dream, "int8", "int8"), (_dream, "bf16", "stored"), (_gemma, "bf16", "stored")):
            some = largest(model, cast(Form, form), 2, room)
            if some is not None:
                yield some, dtype


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.families", description=__doc__)
    parser.add_argument("--threads", type=int, default=min(physical_cores(), MOST_THREADS))
    parser.add_argument("--repeat", type=int, default=5, help="gaps that a figure is the median of")
    parser.add_argument("--prefix", type=int, default=PREFIX, help="tokens before the gap")
    parser.add_argument("--large", action="store_true", help=f"also what fills {LARGE_GIB} GiB")
    parser.add_argument("--tiny", action="store_true", help="only tiny models, to see that this works")
    parser.add_argument("--json", type=Path, help="write what was measured there, too")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        model, dtype = json.loads(arguments.one)
        with torch.inference_mode():
            row = measured(Model(**model), dtype, arguments.threads, arguments.repeat, arguments.prefix)
        print(json.dumps(asdict(row)))
        return
    rows: list[Row] = []
    for model, dtype in chosen(arguments):
        rows.append(apart(model, dtype, arguments))
        # The large ones take a quarter of an hour each: what is there stays there.
        print(" | ".join(rows[-1].cells), file=sys.stderr)
        if arguments.json:
            arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    print(f"\n{arguments.threads} threads, torch {torch.__version__}; ms, MiB, and millions of parameters\n")
    paper = [on_paper(model, dtype) for model in (_dream, _llada, _gemma) for dtype in ("bf16", "fp8")]
    print(table(HEADER, [*(row.cells for row in rows), *paper]))


if __name__ == "__main__":
    main()
