"""The engine's speed: `python -m bench.engine [--device cuda] [--no-llama] [--json FILE]`.

Three tables from one run: tokens encoded a second; milliseconds a denoise step against the floor that this machine's
memory and arithmetic set; and the time to a line and to five, cold and warm, beside llama.cpp on the same base weights
(prefix only on both sides, greedy, the same gaps in turn). Medians throughout.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpcore
import torch
from infill_engine import models, protocol, smollm, weights
from infill_engine.core import Canvas, Contexts, complete
from infill_engine.fetch import ensure_weights
from infill_engine.models import MOST_THREADS, physical_cores
from infill_engine.protocol import Candidate, Final, InfillRequest
from infill_engine.tokenizer import LineTokenizer
from infill_kernels import unmask
from rich.progress import track

from bench.latency import Place, places
from bench.llama import Llama, as_q8, installed, running
from bench.plot import table
from bench.score import quantile

SLOTS, CONTEXTS = (1, 8, 16, 32, 64), (0, 512, 2048)
#: Characters of prefix that both engines get; some 600 tokens.
PREFIX_CHARS = 2000
#: Passes before a figure is taken, and passes that it is the median of.
WARM_UP, PASSES = 3, 30
#: Bytes read to measure the memory: far beyond any cache.
READ_BYTES = 512 << 20


@dataclass(frozen=True, slots=True)
class Machine:
    """What this machine can do, measured."""

    #: Bytes read a second, multiply-adds a second in the served type.
    bandwidth: float
    peak: float

    def floor_ms(self, read: float, multiplied: float) -> float:
        """The least time that reading so many bytes and so many multiply-adds can take."""
        return 1000 * max(read / self.bandwidth, multiplied / self.peak)


def median_ms(work: Callable[[], object], device: str, passes: int = PASSES) -> float:
    """The median time of `work` on a device, waited for, after some runs that do not count."""
    took = []
    for i in range(WARM_UP + passes):
        began = time.perf_counter()
        work()
        if device != "cpu":
            torch.cuda.synchronize()
        if i >= WARM_UP:
            took.append((time.perf_counter() - began) * 1000)
    return statistics.median(took)


def measured(dtype: str, device: str, passes: int = PASSES) -> Machine:
    """What this machine can do in a type, with as many threads as torch has."""
    words = torch.ones(READ_BYTES // 4, device=device)
    bandwidth = READ_BYTES / median_ms(words.sum, device, passes) * 1000
    if dtype == "int8":
        from infill_kernels import cpu

        # The product itself at so many rows that the weights hardly matter.
        rows, outs, ins = 64, 4096, 576
        team = cpu.Team(torch.get_num_threads())
        product = cpu.Int8Head(cpu.Int8Weight.of(torch.randn(outs, ins)), outs, team)
        x = torch.randn(rows, ins)
    else:
        rows = outs = ins = 1024 if device == "cpu" else 8192
        kind = torch.bfloat16 if dtype == "bf16" else torch.float32
        weight, x = (torch.randn(outs, ins, device=device, dtype=kind) for _ in range(2))
        product = weight.matmul  # type: ignore[assignment]
    return Machine(bandwidth, rows * outs * ins / median_ms(lambda: product(x), device, passes) * 1000)


class Bench:
    """A loaded model and a clock that waits for its device."""

    def __init__(self, dtype: str, device: str, threads: int, random: bool = False) -> None:
        self.dtype, self.device, self.shape = dtype, device, smollm.SMOLLM2
        if random:
            tensors = random_weights(self.shape)
            self.tokens = torch.randint(smollm.SPECIALS, self.shape.vocab, (4096,)).tolist()
        else:
            path = ensure_weights(lambda message, progress: None)
            tensors, codec = weights.load(path, models.prepared(path, models.BASE))
            text = "".join(place.text for place in places(8))
            self.tokens = [smollm.SINK_ID, *LineTokenizer(codec).encode(text)]
        self.denoiser = smollm.SmolDenoiser(tensors, dtype, device, threads=threads)

    def median_ms(self, work: Callable[[], object]) -> float:
        return median_ms(work, self.device)

    def context(self, length: int) -> Contexts:
        kv = complete(self.denoiser.encode((), None))
        for at in range(0, length, 64):
            kv = complete(self.denoiser.encode(self.tokens[at : min(at + 64, length)], kv))
        return Contexts(kv)

    def step_ms(self, slots: int, context: int) -> float:
        """A step that fills `slots` rows: what is known next and its proposals, through the head."""
        contexts, left = self.context(context), tuple(self.tokens[context : context + 4])
        _, states = self.denoiser.denoise([Canvas(context, left, 128)], [contexts], [None])
        canvas = Canvas(context, left, 128, proposal=tuple(self.tokens[context + 4 : context + 3 + slots]))

        def step() -> None:
            (hidden,), _ = self.denoiser.denoise([canvas], [contexts], states)
            unmask(hidden, self.denoiser.head)

        return self.median_ms(step)

    def floor_ms(self, machine: Machine, slots: int, context: int) -> float:
        s, size = self.shape, {"int8": 1, "bf16": 2, "fp32": 4}[self.dtype]
        heads = (s.heads + 2 * s.kv_heads) * s.head_size
        layer = s.width * (heads + s.heads * s.head_size + 3 * s.ffn)
        parameters = s.layers * layer + s.vocab * s.width
        cached = context * s.layers * 2 * s.kv_heads * s.head_size * (2 if self.dtype == "int8" else size)
        attention = slots * context * s.layers * 2 * s.heads * s.head_size
        return machine.floor_ms(parameters * size + cached, slots * parameters + attention)

    def encode_rate(self, length: int) -> float:
        took = []
        for _ in range(5):
            began = time.perf_counter()
            self.context(length)
            if self.device != "cpu":
                torch.cuda.synchronize()
            took.append(time.perf_counter() - began)
        return length / statistics.median(took)


def random_weights(shape: smollm.Shape) -> dict[str, torch.Tensor]:
    """Weights that say nothing, by their GGUF names: a step with them takes as long as with others."""
    q, kv = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    sizes = {"token_embd": (shape.vocab, shape.width), "output_norm": (shape.width,)}
    for i in range(shape.layers):
        sizes |= {f"blk.{i}.{name}": (shape.width,) for name in ("attn_norm", "ffn_norm")}
        sizes |= {f"blk.{i}.attn_{name}": (rows, shape.width) for name, rows in (("q", q), ("k", kv), ("v", kv))}
        sizes |= {f"blk.{i}.attn_output": (shape.width, q), f"blk.{i}.ffn_down": (shape.width, shape.ffn)}
        sizes |= {f"blk.{i}.ffn_{name}": (shape.ffn, shape.width) for name in ("gate", "up")}
    return {f"{name}.weight": torch.randn(*size) * size[-1] ** -0.5 for name, size in sizes.items()}


@dataclass(slots=True)
class Lines:
    """Times to a number of lines, of one engine."""

    name: str
    ms: list[float] = field(default_factory=list)
    characters: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def add(self, text: str, ms: float, final: Final | None = None) -> None:
        self.ms.append(ms)
        self.characters.append(len(text))
        if final is not None:
            self.steps.append(final.timing.steps)
            self.tokens.append(final.timing.committed)


class Own:
    """Our engine in a process of its own, over its socket."""

    def __init__(self) -> None:
        self._pool = httpcore.ConnectionPool(uds=str(protocol.socket_path("embedded")))
        self._asked = 0

    def request(self, prefix: str, lines: int, tokens: int, suffix: str = "") -> InfillRequest:
        """A document that was never seen before."""
        self._asked += 1
        at = prefix.rfind("\n") + 1
        return InfillRequest(
            client="bench",
            document=str(self._asked),
            prefix=prefix[:at],
            head=prefix[at:],
            suffix=suffix,
            max_lines=lines,
            max_tokens=tokens,
            deadline_ms=120_000,
            priority="explicit",
        )

    def complete(self, request: InfillRequest) -> tuple[str, float, Final]:
        began = time.perf_counter()
        answer = self._pool.request("POST", "http://engine/v1/infill", content=protocol.encode(request))
        ms = (time.perf_counter() - began) * 1000
        text = ""
        for line in answer.content.splitlines():
            event = protocol.decode_event(line)
            if isinstance(event, Candidate):
                text = event.text
            elif isinstance(event, Final):
                return text, ms, event
        raise SystemExit("the engine ended an answer without its last line")

    def prime(self, request: InfillRequest) -> None:
        self._pool.request("POST", "http://engine/v1/prime", content=protocol.encode(request))
        self.idle()

    def idle(self) -> None:
        """Waits until nothing is encoded ahead any more."""
        while True:
            status = protocol.decode_status(self._pool.request("GET", "http://engine/v1/status").content)
            if status.state == "error":
                raise SystemExit(status.message)
            if status.state == "ready" and not status.live and not status.background:
                return
            time.sleep(0.02)


@contextlib.contextmanager
def own_engine(dtype: str, threads: int) -> Iterator[Own]:
    """Our engine, from its start to its end, apart from any that runs already."""
    import subprocess
    import sys

    with tempfile.TemporaryDirectory(prefix="infill-") as folder:
        os.environ["INFILL_RUNTIME_DIR"] = folder
        command = [
            sys.executable,
            "-m",
            "infill_engine",
            "serve",
            "--model",
            "embedded",
            "--dtype",
            dtype,
            "--threads",
            str(threads),
        ]
        process = subprocess.Popen(command)
        try:
            while not protocol.socket_path("embedded").exists():
                if process.poll() is not None:
                    raise SystemExit("the engine did not start")
                time.sleep(0.05)
            own = Own()
            own.idle()
            yield own
        finally:
            process.terminate()
            process.wait(20)


def before(place: Place) -> tuple[str, str]:
    """The text before and after a place, cut at whole lines."""
    lines = place.text.split("\n")
    prefix = "\n".join([*lines[: place.line], lines[place.line][: place.character]])
    start = max(0, len(prefix) - PREFIX_CHARS)
    return prefix[prefix.find("\n", start) + 1 if start else 0 :], "\n" + "\n".join(lines[place.line + 1 :])


def side_by_side(own: Own, others: dict[str, Llama], gaps: int) -> dict[tuple[int, str], list[Lines]]:
    """Every engine at every place in turn: {(lines, "cold" or "warm"): [ours, ours with the suffix, the others...]}."""
    names = ["infill-engine", "infill-engine with suffix", *others]
    table = {(lines, state): [Lines(name) for name in names] for lines in (1, 5) for state in ("cold", "warm")}
    for place in track(places(gaps), "side by side"):
        prefix, suffix = before(place)
        for lines, tokens in ((1, 48), (5, 160)):
            for i, after in enumerate(("", suffix)):
                text, ms, final = own.complete(own.request(prefix, lines, tokens, after))
                table[lines, "cold"][i].add(text, ms, final)
                own.idle()
                request = own.request(prefix, lines, tokens, after)
                own.prime(request)
                table[lines, "warm"][i].add(*own.complete(request))
                own.idle()
            for i, llama in enumerate(others.values()):
                table[lines, "cold"][2 + i].add(*llama.complete(prefix, lines, tokens, cached=False))
                llama.encode(prefix)
                table[lines, "warm"][2 + i].add(*llama.complete(prefix, lines, tokens, cached=True))
    return table


def rows_of(table: dict[tuple[int, str], list[Lines]]) -> list[list[str]]:
    """The table's cells; the ratio is against the first row of its kind."""
    rows = []
    for (lines, state), engines in table.items():
        ours = statistics.median(engines[0].ms)
        for of in engines:
            passed = f"{sum(of.tokens) / max(1, sum(of.steps)):.2f}" if of.steps else ""
            median = statistics.median(of.ms)
            rows.append(
                [
                    f"{lines} {'line' if lines == 1 else 'lines'}, {state}",
                    of.name,
                    f"{median:.0f}",
                    f"{quantile(of.ms, 0.95):.0f}",
                    f"{median / ours:.2f}",
                    f"{statistics.fmean(of.characters):.0f}",
                    passed,
                ]
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.engine", description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", help="fp32, bf16 or int8 (default: int8 on a CPU, bf16 elsewhere)")
    parser.add_argument("--threads", type=int, default=min(physical_cores(), MOST_THREADS))
    parser.add_argument("--gaps", type=int, default=30, help="places at which the engines are compared")
    parser.add_argument("--no-llama", action="store_true", help="leave the comparison with llama.cpp out")
    parser.add_argument("--random-weights", action="store_true", help="measure steps alone, with weights of no meaning")
    parser.add_argument("--json", type=Path, help="write the tables there, too")
    arguments = parser.parse_args()
    dtype = arguments.dtype or (smollm.cpu_dtypes()[-1] if arguments.device == "cpu" else "bf16")
    torch.set_num_threads(arguments.threads)
    tables: dict[str, list[list[str]]] = {}
    with torch.inference_mode():
        bench = Bench(dtype, arguments.device, arguments.threads, arguments.random_weights)
        machine = measured(dtype, arguments.device)
        if dtype == "int8":
            torch.set_num_threads(1)  # as the engine does: its kernels have a team of their own
        where = platform.processor() or platform.machine()
        if arguments.device != "cpu":
            where = torch.cuda.get_device_name()
        print(f"\n{where}, {os.cpu_count()} cores, {arguments.threads} threads, {dtype}, torch {torch.__version__}")
        print(f"memory {machine.bandwidth / 1e9:.1f} GB/s, arithmetic {machine.peak / 1e9:.0f} G multiply-adds/s")
        print(f"encoding 512 tokens: {bench.encode_rate(512):.0f} tokens/s\n")
        tables["steps"] = []
        for context in CONTEXTS:
            for slots in SLOTS:
                ms, floor = bench.step_ms(slots, context), bench.floor_ms(machine, slots, context)
                tables["steps"].append([str(context), str(slots), f"{ms:.2f}", f"{floor:.2f}", f"{ms / floor:.2f}"])
    print(table(["context", "slots", "ms a step", "floor ms", "ratio"], tables["steps"]), end="\n\n")
    del bench
    if not arguments.no_llama and not arguments.random_weights and arguments.device == "cpu":
        path, folder = ensure_weights(lambda message, progress: None), protocol.cache_dir() / "bench"
        folder.mkdir(parents=True, exist_ok=True)
        binary, q8 = installed(folder / "llama"), as_q8(path, folder / f"{path.stem}.Q8_0.gguf")
        with (
            own_engine(dtype, arguments.threads) as own,
            running(binary, path, arguments.threads, folder / "q4.log") as q4_server,
            running(binary, q8, arguments.threads, folder / "q8.log") as q8_server,
        ):
            others = {"llama-server Q4_1": q4_server, "llama-server Q8_0": q8_server}
            tables["lines"] = rows_of(side_by_side(own, others, arguments.gaps))
        print(
            table(["gap", "engine", "median ms", "p95 ms", "ratio", "characters", "tokens a pass"], tables["lines"]),
            end="\n\n",
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(tables, indent=1))


if __name__ == "__main__":
    main()
