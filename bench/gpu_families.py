"""A family at full size on a GPU: `python -m bench.gpu_families {diffusion-gemma,dream} {bf16,fp8} [--json FILE]`.

Random weights, made on the device. Of denoise steps behind 1,024 tokens of prefix the median, until the host has the
tokens; DiffusionGemma fills its whole canvas of 256, Dream one of 64 with 96 tokens of suffix behind it, exactly (all
keys and values in each pass) and with its dual cache. Beside them the least that a step can take on this device, whose
bandwidth and rate of products are measured on the spot; and in bf16 transformers' model with the same weights in the
same process, if it is installed and knows the architecture. Of that one the most probable tokens are read, and nothing
else: no probability, no entropy, no expected embedding, which ours makes too.

Tokens a second are those of a canvas by the passes that its authors' sampler takes: DiffusionGemma's at most 48, and
about 11 where reports have it stop by itself; Dream's one a token. With `--tiny --device cpu` small models show that
this works.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from infill_engine.core import Contexts, OpenCanvas, OpenDenoiser, SelfConditioned, complete
from infill_engine.families.masked import EXACT, KEPT, Caching
from infill_kernels import logits, unmask
from torch import Tensor

from bench.plot import table
from bench.random_models import BYTES, DIFFUSION_GEMMA, DREAM, Model, RandomCheckpoint, tiny

PREFIX, SLOTS, SUFFIX = 1024, 64, 96
BATCHES = (1, 4, 16)
#: Steps before one counts, and steps that a figure is the median of.
WARM_UP, STEPS = 3, 10
#: Passes a canvas.
GEMMA_PASSES, GEMMA_STOPS = 48, 11
HEADER = ("model", "type", "by", "batch", "ms a step", "floor ms", "ratio", "tokens/s", "peak GiB", "off")


@dataclass(slots=True)
class Row:
    """One line of the table."""

    model: str
    dtype: str
    by: str
    batch: int
    ms: float
    floor: float
    #: By the passes of the published sampler; the second, if there is one, where it stops by itself.
    tokens_s: list[float]
    peak_gib: float
    #: How far transformers' logits are from ours, relative; None: not compared. In bf16 rows of a mixture of experts
    #: with random weights are moved as a whole where rounding makes the router choose others.
    off: float | None = None

    @property
    def cells(self) -> list[str]:
        """Of the table."""
        per_s = " / ".join(f"{rate:,.0f}" for rate in self.tokens_s)
        off = "" if self.off is None else f"{self.off:.3f}"
        times = [f"{self.ms:.2f}", f"{self.floor:.2f}", f"{self.ms / self.floor:.2f}"]
        return [self.model, self.dtype, self.by, str(self.batch), *times, per_s, f"{self.peak_gib:.1f}", off]


@dataclass(slots=True)
class Device:
    """Where it runs, and what that can do: bytes a second, multiply-adds a second in the served type."""

    name: str
    dtype: str
    #: Of which a figure is the median.
    steps: int = STEPS
    bandwidth: float = field(init=False)
    rate: float = field(init=False)

    def __post_init__(self) -> None:
        size = (1 << 30) if self.on_gpu else (1 << 22)
        words, copied = (torch.zeros(size, dtype=torch.uint8, device=self.name) for _ in range(2))
        self.bandwidth = 2000 * size / self.ms(lambda: copied.copy_(words))
        side = 8192 if self.on_gpu else 256
        kind = torch.float32 if self.dtype == "fp32" else torch.bfloat16
        a = torch.ones(side, side, dtype=kind, device=self.name)
        self.rate = 1000 * side**3 / self.ms(lambda: a @ a)
        if self.dtype == "fp8" and self.on_gpu:
            e, scale = a.to(torch.float8_e4m3fn), torch.ones(side, 1, device=self.name)
            turned = e.T
            product = lambda: torch._scaled_mm(e, turned, scale, scale.T, out_dtype=torch.bfloat16)  # noqa: E731
            self.rate = 1000 * side**3 / self.ms(product)

    @property
    def on_gpu(self) -> bool:
        return self.name != "cpu"

    @property
    def said(self) -> str:
        """In words."""
        name = torch.cuda.get_device_name(self.name) if self.on_gpu else "CPU"
        rates = f"{self.bandwidth / 1e12:.2f} TB/s copied, {2 * self.rate / 1e12:.0f} TFLOP/s in {self.dtype}"
        return f"{name}, torch {torch.__version__}: {rates}"

    def ms(self, work: Callable[[], object]) -> float:
        """The median of a step, waited for."""
        took = []
        for i in range(WARM_UP + self.steps):
            self.wait()
            began = time.perf_counter()
            work()
            self.wait()
            if i >= WARM_UP:
                took.append(1000 * (time.perf_counter() - began))
        return statistics.median(took)

    def wait(self) -> None:
        """Until all is done that it was given."""
        if self.on_gpu:
            torch.cuda.synchronize(self.name)

    def empty(self) -> float:
        """Lets go what nobody holds, begins a new peak, and returns the bytes held."""
        gc.collect()
        if not self.on_gpu:
            return 0.0
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.name)
        return torch.cuda.memory_allocated(self.name)

    def peak_gib(self, before: float) -> float:
        """The most that was held since, beyond what was held before."""
        return (torch.cuda.max_memory_allocated(self.name) - before) / 2**30 if self.on_gpu else 0.0

    def floor_ms(self, bytes_read: float, products: float) -> float:
        """The least that a step can take."""
        return 1000 * max(bytes_read / self.bandwidth, products / self.rate)


@dataclass(slots=True)
class Sizes:
    """Of the documents, in tokens."""

    prefix: int
    slots: int
    suffix: int


def ids(count: int, seed: int) -> list[int]:
    """Some ids that every vocabulary has, of one canvas others than of the next."""
    return [20 + (7 * i + 31 * seed) % 200 for i in range(count)]


class Canvases:
    """A batch of canvases that are denoised again and again, all of their slots open."""

    def __init__(self, denoiser: OpenDenoiser, sizes: Sizes, batch: int) -> None:
        self._denoiser = denoiser
        facts = denoiser.facts
        self._soft = facts.open is not None and facts.open.soft
        self._contexts = [Contexts(complete(denoiser.encode(ids(sizes.prefix, i), None))) for i in range(batch)]
        noise = [
            [facts.mask_id] * sizes.slots if facts.mask_id is not None else ids(sizes.slots, i) for i in range(batch)
        ]
        self.canvases = [OpenCanvas.of(sizes.prefix, (), some, ids(sizes.suffix, i)) for i, some in enumerate(noise)]
        self._states: list[Any] = [None] * batch

    def hidden(self) -> list[Tensor]:
        """The rows of each canvas in a pass."""
        rows, self._states = self._denoiser.denoise(self.canvases, self._contexts, self._states)
        return rows

    def step(self) -> list[int]:
        """A pass, until the host has the tokens."""
        rows = self.hidden()
        said = unmask(torch.cat(rows), self._denoiser.head, soft=self._soft)
        if said.soft is not None:
            family, parts = cast(SelfConditioned, self._denoiser), torch.split(said.soft, [len(x) for x in rows])
            self._states = [family.condition(*pair) for pair in zip(self._states, parts, strict=True)]
        tokens: list[int] = said.token.tolist()
        return tokens


class Theirs:
    """transformers' model with the same weights."""

    def __init__(self, model: Model, device: str, dtype: torch.dtype) -> None:
        """Raises `ImportError` where it is not installed, or does not know the architecture."""
        transformers: Any = importlib.import_module("transformers")
        self._gemma = model.kind == "gemma"
        if self._gemma:
            small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
            vision = transformers.Gemma4VisionConfig(**small, num_key_value_heads=2, head_dim=8, patch_size=4)
            text = transformers.DiffusionGemmaTextConfig(
                **model.config["text_config"], use_bidirectional_attention="vision",
                pad_token_id=0, eos_token_id=1, bos_token_id=2,
            )  # fmt: skip
            config = transformers.DiffusionGemmaConfig(
                text_config=text, vision_config=vision, canvas_length=model.config["canvas_length"]
            )
            kind = transformers.DiffusionGemmaForBlockDiffusion
        else:
            config, kind = transformers.Qwen2Config(**model.config), transformers.Qwen2ForCausalLM
        default = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with torch.device(device):
                self._model = kind(config).eval()
        finally:
            torch.set_default_dtype(default)
        checkpoint, there = RandomCheckpoint(model, device, dtype), self._model.state_dict()
        lacking = set(checkpoint.names) - set(there)
        if lacking:
            raise ImportError(f"transformers {transformers.__version__} has other tensors: no {min(lacking)}")
        for name in checkpoint.names:
            there[name].copy_(checkpoint.read(name).values)
        experts = getattr(self._model.config, "_experts_implementation", None)
        self.name = f"transformers {transformers.__version__}" + (f", {experts}" if self._gemma and experts else "")

    def begin(self, canvases: Sequence[OpenCanvas]) -> None:
        """The same documents."""
        device = self._model.device
        self._prefix = torch.tensor([ids(c.origin, i) for i, c in enumerate(canvases)], device=device)
        self._canvas = torch.tensor([c.tokens for c in canvases], device=device)
        self._slots = canvases[0].size
        self._cache = self._said = None
        size = self._prefix.shape[1] + self._canvas.shape[1]
        self._mask = None
        if not self._gemma:
            self._mask = torch.zeros(len(canvases), 1, size, size, dtype=self._model.dtype, device=device)

    def logits(self) -> Tensor:
        """[B, slots, V] of a pass."""
        if not self._gemma:
            first = self._prefix.shape[1] - 1  # a token predicts the one to its right
            rows = torch.arange(first, first + self._slots, device=self._prefix.device)
            tokens = torch.cat([self._prefix, self._canvas], 1)
            said: Tensor = self._model(tokens, attention_mask=self._mask, use_cache=False, logits_to_keep=rows).logits
            return said
        given = {"input_ids": self._prefix} if self._cache is None else {"cache": self._cache}
        out = self._model(**given, decoder_input_ids=self._canvas, self_conditioning_logits=self._said)
        self._cache, self._said = out.cache, out.logits
        return cast(Tensor, out.logits)

    def step(self) -> list[int]:
        """A pass, until the host has the tokens."""
        tokens: list[int] = self.logits().argmax(-1).flatten().tolist()
        return tokens


def off(ours: Canvases, denoiser: OpenDenoiser, theirs: Theirs) -> float:
    """How far logits of the first pass are from ours, of the first rows of each canvas: ||a - b|| / ||b||."""
    found = torch.stack([logits(rows[:8], denoiser.head) for rows in ours.hidden()])
    theirs.begin(ours.canvases)
    wanted = theirs.logits()[:, :8].float()
    return float((found - wanted).norm() / wanted.norm())


class Bench:
    """One model in one type."""

    def __init__(self, model: Model, dtype: str, device: Device, sizes: Sizes, batches: Sequence[int]) -> None:
        self._model, self._dtype, self._device = model, dtype, device
        self._sizes, self._batches = sizes, batches
        self._floating = torch.float32 if dtype == "fp32" else torch.bfloat16
        self.rows: list[Row] = []

    def run(self, caching: Caching, by: str, theirs: bool) -> None:
        """Ours, and transformers' beside it."""
        before = self._device.empty()
        largest, tokens = max(self._batches), self._sizes.prefix + self._sizes.slots + self._sizes.suffix
        room = 4 * largest * (tokens + 64) * 2 * self._model.kept
        denoiser = self._model.build(
            self._device.name,
            self._floating,
            "fp8" if self._dtype == "fp8" else "stored",
            caching=caching,
            cache_bytes=room,
        )
        for batch in self._batches:
            canvases = Canvases(denoiser, self._sizes, batch)
            ms = self._device.ms(canvases.step)
            self._add(by, batch, ms, self._device.peak_gib(before), caching)
            del canvases
        if theirs:
            self._beside(denoiser)

    def _beside(self, denoiser: OpenDenoiser) -> None:
        before = self._device.empty()
        try:
            theirs = Theirs(self._model, self._device.name, self._floating)
        except (ImportError, AttributeError) as error:
            print(f"transformers is not compared with: {error}")
            return
        for batch in self._batches:
            difference = off(Canvases(denoiser, self._sizes, batch), denoiser, theirs) if batch == 1 else None
            try:
                theirs.begin(Canvases(denoiser, self._sizes, batch).canvases)
                ms = self._device.ms(theirs.step)
            except torch.OutOfMemoryError:
                print(f"{theirs.name} has no room for a batch of {batch}")
                break
            self._add(theirs.name, batch, ms, self._device.peak_gib(before), EXACT, difference)

    def _add(
        self, by: str, batch: int, ms: float, peak: float, caching: Caching, difference: float | None = None
    ) -> None:
        sizes, gemma = self._sizes, self._model.kind == "gemma"
        said, behind = batch * sizes.slots, sizes.prefix + sizes.suffix
        if gemma:
            step = self._model.step(said, said, sizes.prefix, batch)
        elif caching.dual:
            step = self._model.step(said + batch, said, behind, batch)
        else:
            step = self._model.step(batch * (behind + sizes.slots), said, 0, batch)
        floor = self._device.floor_ms(step.bytes(*BYTES[self._dtype]), step.products)
        passes = [GEMMA_PASSES, GEMMA_STOPS] if gemma else [sizes.slots]
        rates = [1000 * said / (count * ms) for count in passes]
        row = Row(self._model.name, self._dtype, by, batch, ms, floor, rates, peak, difference)
        self.rows.append(row)
        print(f"| {' | '.join(row.cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_families", description=__doc__)
    parser.add_argument("family", choices=("diffusion-gemma", "dream"))
    parser.add_argument("dtype", choices=("bf16", "fp8", "fp32"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a small model and short documents, to see that this works")
    parser.add_argument("--json", type=Path, help="write what was measured there, too")
    arguments = parser.parse_args()
    if arguments.device != "cpu" and not torch.cuda.is_available():
        raise SystemExit("torch finds no GPU: use --tiny --device cpu to see that this works")
    gemma = arguments.family == "diffusion-gemma"
    model = Model("DiffusionGemma 26B-A4B", DIFFUSION_GEMMA) if gemma else Model("Dream 7B", DREAM)
    sizes = Sizes(PREFIX, DIFFUSION_GEMMA["canvas_length"] if gemma else SLOTS, 0 if gemma else SUFFIX)
    batches: tuple[int, ...] = BATCHES
    if arguments.tiny:
        model, batches = tiny(model), (1, 2)
        sizes = Sizes(40, 32 if gemma else 8, 0 if gemma else 8)
    with torch.inference_mode():
        device = Device(arguments.device, arguments.dtype, 2 if arguments.tiny else STEPS)
        print(f"{device.said}\n", flush=True)
        bench = Bench(model, arguments.dtype, device, sizes, batches)
        bench.run(EXACT, "infill-engine", arguments.dtype != "fp8")
        if not gemma:
            bench.run(replace(KEPT, across=False), "infill-engine, dual cache", False)
    print(f"\n{table(HEADER, [row.cells for row in bench.rows])}")
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"device": device.said, "rows": [asdict(row) for row in bench.rows]}, indent=1)
        )


if __name__ == "__main__":
    main()
