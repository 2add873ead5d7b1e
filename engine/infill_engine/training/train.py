"""The training run: windows in, an adapter out; killed and resumed without loss of more than a few minutes.

The schedule is warm-up, constant, and a decay to nothing at the end of the time that was given (Hu et al., MiniCPM,
2024, section 4: WSD), so that a run can be taken up again and go on for longer. An average of the parameters over the
last steps is what is measured and kept. Which windows a step sees, and what is drawn for them, follows from the seed
and the step alone.
"""

from __future__ import annotations

import json
import math
import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from infill_engine import adapter, models, weights
from infill_engine.smollm import END_ID, INT8
from infill_engine.tokenizer import LineTokenizer
from infill_engine.training.model import Loss, Trainee, Window
from infill_engine.training.rows import Mix, WindowRecord, records, window

#: Told what happens: a line for people.
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """What a run is made of. Times are of training itself, measuring and saving left out."""

    minutes: float
    #: Minutes at the end in which the learning rate goes to 0.
    decay_minutes: float = 0.0
    rank: int = 32
    lr: float = 4e-4
    #: Of the two rows of the embedding.
    row_lr: float = 8e-4
    warmup_steps: int = 40
    #: Windows a step.
    windows: int = 2
    clip: float = 1.0
    #: How much of the average of the parameters stays in a step.
    average: float = 0.995
    seed: int = 1
    #: Windows of the held-out file that are measured, and how often.
    measured: int = 40
    measure_minutes: float = 15.0
    save_minutes: float = 4.0
    mix: Mix = field(default_factory=Mix)

    def __post_init__(self) -> None:
        if self.minutes <= 0 or not 0 <= self.decay_minutes <= self.minutes:
            raise ValueError("the minutes must be more than 0, and those of the decay no more than they")
        if self.rank < 1 or self.windows < 1 or not 0 <= self.average < 1:
            raise ValueError("the rank, the windows a step and the steps of the average must be at least 1")

    def rate(self, step: int, minute: float) -> float:
        """The learning rate at a step, as a share of the full one."""
        left = self.minutes - minute
        decay = min(1.0, max(0.0, left / self.decay_minutes)) if self.decay_minutes else 1.0
        return min(1.0, (step + 1) / self.warmup_steps) * decay


@dataclass(slots=True)
class _Progress:
    """What a checkpoint knows beside tensors."""

    step: int = 0
    #: Of training.
    seconds: float = 0.0
    #: Predictions that were learned from, canvas tokens and context tokens, so far.
    predictions: int = 0
    canvas_tokens: int = 0
    context_tokens: int = 0
    #: The learning rate of the last step, as a share of the full one.
    rate: float = 0.0


class Run:
    """A training run in a folder, which holds its checkpoint, its log and the adapter so far. A run that is given more
    time than it had goes on from before its decay."""

    def __init__(
        self,
        trainee: Trainee,
        tokenizer: LineTokenizer,
        gaps: Path,
        held: Path,
        folder: Path,
        config: TrainConfig,
        tell: Tell,
    ) -> None:
        """gaps, held: files of gaps to learn from and to measure with."""
        self._trainee, self._tokenizer, self._config, self._tell = trainee, tokenizer, config, tell
        self._folder = folder
        self._windows = list(records(gaps))
        if not self._windows:
            raise ValueError(f"{gaps} holds no windows: write it with `infill-lsp gaps`")
        chance = random.Random(0)
        held_windows = (self._made(r, chance, still=True) for r in _first(records(held), config.measured))
        self._held = [one for one in held_windows if one is not None]
        self._learning = dict(trainee.named_parameters())
        factors = [p for n, p in self._learning.items() if n.startswith("factors.")]
        rows = [p for n, p in self._learning.items() if not n.startswith("factors.")]
        self._optimizer = torch.optim.AdamW(
            [{"params": factors, "full": config.lr}, {"params": rows, "full": config.row_lr}],
            lr=config.lr,
            betas=(0.9, 0.98),
            weight_decay=0.0,
        )
        self._average = {n: p.detach().clone() for n, p in self._learning.items()}
        self._progress = _Progress()
        self._stopped = False
        folder.mkdir(parents=True, exist_ok=True)
        if self._checkpoint.exists():
            self._restore()

    def train(self) -> None:
        """Goes on until the time is over, or a signal to end comes; then all is saved."""
        before = {s: signal.signal(s, self._stop) for s in (signal.SIGTERM, signal.SIGINT)}
        try:
            self._train()
        finally:
            for which, handler in before.items():
                signal.signal(which, handler)

    def _train(self) -> None:
        config, progress = self._config, self._progress
        if progress.step == 0:
            self._log("start", config=asdict(config), windows=len(self._windows))
            self._measure()
        saved = measured = progress.seconds
        told, recent = 0.0, _Recent()
        while progress.seconds < config.minutes * 60 and not self._stopped:
            began = time.monotonic()
            if progress.rate == 1.0 and config.rate(progress.step, progress.seconds / 60) < 1.0:
                self._save(self._stable)
            recent.add(self._step())
            progress.seconds += time.monotonic() - began
            if progress.seconds - told >= 60 or progress.step == 1:
                told = progress.seconds
                self._log("train", **asdict(progress), **recent.means())
                recent = _Recent()
            if progress.seconds - saved >= config.save_minutes * 60:
                saved = progress.seconds
                self._save()
            if progress.seconds - measured >= config.measure_minutes * 60:
                measured = progress.seconds
                self._measure()
        self._save()
        if not self._stopped:
            self._measure()

    def _step(self) -> list[Loss]:
        """One update."""
        config, progress, losses = self._config, self._progress, []
        for i in range(config.windows):
            index = progress.step * config.windows + i
            chance = random.Random(f"{config.seed} {index}")
            made = self._made(self._windows[index % len(self._windows)], chance)
            if made is None:
                continue
            losses.append(self._trainee.learn(made, 1.0 / config.windows))
            progress.predictions += len(losses[-1].nats)
            progress.canvas_tokens += sum(len(row.tokens) for row in made.rows)
            progress.context_tokens += len(made.stream) + len(made.snippet) + sum(len(row.block) for row in made.rows)
        progress.rate = config.rate(progress.step, progress.seconds / 60)
        for group in self._optimizer.param_groups:
            group["lr"] = group["full"] * progress.rate
        torch.nn.utils.clip_grad_norm_(list(self._learning.values()), config.clip)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        progress.step += 1
        stays = min(config.average, progress.step / (progress.step + 10))
        with torch.no_grad():
            torch._foreach_lerp_(list(self._average.values()), [p.detach() for p in self._learning.values()], 1 - stays)
        self._trainee.merge()
        return losses

    @torch.no_grad()
    def _measure(self) -> None:
        """Measures the average on the held-out gaps, logs it, and writes it as an adapter."""
        own = {n: p.detach().clone() for n, p in self._learning.items()}
        self._put(self._average)
        recent = _Recent()
        began = time.monotonic()
        for made in self._held:
            recent.add([self._trainee.loss(made, self._trainee(made))])
        means = recent.means()
        self._log("held", **asdict(self._progress), took=time.monotonic() - began, **means)
        card = {"step": str(self._progress.step), "predictions": str(self._progress.predictions)}
        adapter.save(self._trainee.adapter(), card, self._folder / "adapter.safetensors")
        self._put(own)

    def _put(self, values: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self._learning.items():
                parameter.copy_(values[name])
        self._trainee.merge()

    def _made(self, record: WindowRecord, chance: random.Random, still: bool = False) -> Window | None:
        return window(record, self._tokenizer, chance, self._config.mix, still)

    @property
    def _checkpoint(self) -> Path:
        return self._folder / "checkpoint.pt"

    @property
    def _stable(self) -> Path:
        """The checkpoint of when the decay began."""
        return self._folder / "stable.pt"

    def _save(self, path: Path | None = None) -> None:
        path = path or self._checkpoint
        part = path.with_suffix(".part")
        state = {
            "minutes": self._config.minutes,
            "progress": asdict(self._progress),
            "parameters": {n: p.detach() for n, p in self._learning.items()},
            "average": self._average,
            "optimizer": self._optimizer.state_dict(),
        }
        torch.save(state, part)
        part.replace(path)

    def _restore(self) -> None:
        state = torch.load(self._checkpoint, map_location=self._trainee.device, weights_only=True)
        if self._config.minutes > state["minutes"] and self._stable.exists():
            state = torch.load(self._stable, map_location=self._trainee.device, weights_only=True)
        self._put(state["parameters"])
        self._average = state["average"]
        self._optimizer.load_state_dict(state["optimizer"])
        for group, full in zip(self._optimizer.param_groups, (self._config.lr, self._config.row_lr), strict=True):
            group["full"] = full
        self._progress = _Progress(**state["progress"])
        self._tell(f"going on from step {self._progress.step}, minute {self._progress.seconds / 60:.1f}")

    def _log(self, what: str, **facts: Any) -> None:
        rounded = {k: round(v, 5) if isinstance(v, float) else v for k, v in facts.items()}
        with open(self._folder / "log.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps({"what": what, "time": round(time.time()), **rounded}) + "\n")
        minute = self._progress.seconds / 60
        shown = ("dense", "dense_right", "first_right", "end_right", "wrong_end", "mask1", "mask1_right", "run")
        words = " ".join(f"{k} {rounded[k]:.3f}" for k in shown if k in rounded)
        self._tell(f"{what} {minute:.1f} min, step {self._progress.step}: {words}")

    def _stop(self, _signal: int, _frame: FrameType | None) -> None:
        self._stopped = True


class _Recent:
    """Means over the predictions of some windows."""

    def __init__(self) -> None:
        self._losses: list[Loss] = []

    def add(self, losses: Sequence[Loss]) -> None:
        self._losses += losses

    def means(self) -> dict[str, float]:
        """Nats and shares right: of known tokens (dense), of the gap's first, of END where a gap ends; how often END
        is the most probable where it does not end (wrong_end), of each mask, and how many masks of a group are right
        in a row (run)."""
        if not self._losses:
            return {}
        joined = [torch.cat([getattr(loss, f) for loss in self._losses]) for f in ("nats", "right", "stop", "targets")]
        nats, right, stop, targets = joined
        ahead, first = (torch.cat([getattr(loss, f) for loss in self._losses]) for f in ("ahead", "first"))
        known = ahead == 0
        text = known & (targets != END_ID)
        end = known & (targets == END_ID)
        sorts = {"dense": text, "first": first & text, "end": end, **{f"mask{j}": ahead == j for j in (1, 2, 3, 4)}}
        means: dict[str, float] = {}
        for name, which in sorts.items():
            if which.any():
                means[name] = nats[which].mean().item()
                means[f"{name}_right"] = right[which].float().mean().item()
        if text.any():
            means["wrong_end"] = (stop[text] > 0.5).float().mean().item()
        runs, alive, groups = 0, False, 0
        for j, good in zip(ahead.tolist(), right.tolist(), strict=True):
            if j == 1:
                groups, alive = groups + 1, True
            if j:
                alive = alive and good
                runs += alive
        if groups:
            means["run"] = runs / groups
        return means


def _first(windows: Iterator[WindowRecord], count: int) -> Iterator[WindowRecord]:
    for _, one in zip(range(count), windows, strict=False):
        yield one


def run(
    base_file: Path,
    gaps: Path,
    held: Path,
    folder: Path,
    config: TrainConfig,
    device: str = "auto",
    threads: int = 0,
    start: Path | None = None,
    share: float = 1.0,
) -> None:
    """Trains in `folder`, or goes on where a run there was ended. Prints what happens, a line a minute.
    start: an adapter from which a new run goes on; share: of its updates.

    Raises `ModelError` for a device that is not there, `ValueError` or `OSError` for files of gaps that are none.
    """
    device = models.device(device)
    keep_freed_memory()
    torch.set_num_threads(threads or models.physical_cores())
    tensors, tokenizer = base(base_file)
    trainee = Trainee(tensors, config.rank, config.seed, device)
    if start is not None:
        trainee.start(adapter.scaled(adapter.load(start), share))
    Run(trainee, tokenizer, gaps, held, folder, config, lambda line: print(line, flush=True)).train()


def base(path: Path) -> tuple[dict[str, Tensor], LineTokenizer]:
    """The base's weights, fp32, and its tokenizer. Raises `ModelError`."""
    tensors, codec = weights.load(path, models.prepared(path, models.BASE))
    return {n: t.float() for n, t in tensors.items() if not n.startswith(INT8)}, LineTokenizer(codec)


def keep_freed_memory() -> None:
    """Lets the C library keep what is freed: tensors of megabytes come and go, and each would be mapped, cleared and
    unmapped. Copies took 682 ms a window so, and 132 ms with the memory kept. Does nothing where it is not glibc."""
    import ctypes

    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return
    top_pad, trim_threshold, mmap_max = -2, -1, -4
    for option, value in ((mmap_max, 0), (trim_threshold, math.floor(2**31 - 1)), (top_pad, 256 << 20)):
        mallopt(option, value)
