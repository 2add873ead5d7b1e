"""Time of each kernel against torch's own and against what the GPU could do: `python -m bench.kernels [--json FILE]`.

What the GPU can do is measured on the spot: bytes a second of a large copy, operations a second of a large product in
bf16. A kernel's bound is the larger of its bytes and its operations at these rates, each input read and each output
written once. Times are medians between CUDA events, every run after one that fills the L2 cache with something else;
memory is what a run takes on top of its inputs. Without a GPU, `--interpret` runs tiny sizes to show that this works.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from infill_kernels import LEFT, PAGE, CanvasState, EntropyBound, Head, KVPool, Part, Placed, Rope, pointwise
from infill_kernels.attention import canvas_attention, plan, rotate_and_store
from infill_kernels.commit import commit
from infill_kernels.unmask import Unmasked, unmask
from torch import Tensor

#: Rows or queries a pass.
ROWS = (1, 8, 16, 32, 64)
#: (width, vocabulary) of the embedded model, of a 7B model, of DiffusionGemma.
HEADS = ((576, 49152), (3584, 152064), (2816, 262144))
#: (key heads, query heads a key head, head size) of the embedded model, of a 7B model, of DiffusionGemma's two kinds.
ATTENTION = ((3, 3, 64), (4, 7, 128), (8, 2, 256), (2, 8, 512))
CONTEXTS = (0, 512, 2048, 8192)
#: (width, width of the gated part).
POINTWISE = ((576, 1536), (2816, 2112))


@dataclass(slots=True)
class Case:
    """One kernel at one size, and who computes it; "triton" is ours, "torch" the reference."""

    kernel: str
    size: str
    #: Bytes moved and operations done at least.
    bytes: int
    flop: int
    runs: Mapping[str, Callable[[], Any]]
    #: What of their results is compared; None where nothing is.
    compared: Callable[[Any], Tensor] | None = None


class Machine:
    """Takes times on a GPU, or on the CPU where kernels are interpreted and times mean nothing."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.gpu = device == "cuda"
        self.name = torch.cuda.get_device_name() if self.gpu else "interpreted on the CPU"
        self._flush = torch.empty(512 << 20 if self.gpu else 1, dtype=torch.int8, device=device)
        size = 8192 if self.gpu else 64
        large = torch.empty(size * size * 8, dtype=torch.bfloat16, device=device)
        a, b, out = (torch.randn(size, size, device=device).bfloat16() for _ in range(3))
        target = torch.empty_like(large)
        #: Bytes and operations a second.
        self.bandwidth = 2 * large.nbytes / self.seconds(lambda: target.copy_(large))
        self.flops = 2 * size**3 / self.seconds(lambda: torch.matmul(a, b, out=out))

    def seconds(self, run: Callable[[], object], warm_up: int = 3, budget: float = 0.15) -> float:
        """The median of as many runs as the budget of seconds has room for, 5 to 50."""
        if not self.gpu:
            start = time.perf_counter()
            run()
            return time.perf_counter() - start
        for _ in range(warm_up):
            run()
        torch.cuda.synchronize()
        start = time.monotonic()
        times: list[float] = []
        while len(times) < 5 or (len(times) < 50 and time.monotonic() - start < budget):
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            self._flush.zero_()  # while this runs, the host gets ahead with the launches that are timed
            before.record()
            run()
            after.record()
            after.synchronize()
            times.append(before.elapsed_time(after) / 1e3)
        return statistics.median(times)

    def memory(self, run: Callable[[], object]) -> int:
        """Bytes that a run takes at its peak; 0 where nobody counts."""
        if not self.gpu:
            return 0
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - held


def unmask_cases(device: str, heads: Sequence[tuple[int, int]], rows: Sequence[int]) -> Iterator[Case]:
    """Arg max, probability, log-sum-exp and entropy of bf16 hidden states; compared by log-sum-exp."""
    from infill_kernels.unmask_triton import unmask as fused

    for width, vocab in heads:
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        head = Head((torch.randn(vocab, width, device=device) * width**-0.5).to(dtype))
        compiled = torch.compile(unmask, dynamic=True)
        for n in rows:
            hidden = torch.randn(n, width, device=device).to(dtype)
            runs: dict[str, Callable[[], Any]] = {
                "triton": partial(fused, hidden, head),
                "torch": partial(unmask, hidden, head),
                "product alone": partial(torch.matmul, hidden, head.weight.T),
            }
            if device == "cuda":
                runs["compiled"] = partial(compiled, hidden, head)
            moved, done, size = head.weight.nbytes + hidden.nbytes, 2 * n * width * vocab, f"{n} x {width} x {vocab}"
            yield Case("unmask", size, moved, done, runs, attrgetter("lse"))
        runs = {"triton": partial(fused, hidden, head, soft=True), "torch": partial(unmask, hidden, head, soft=True)}
        yield Case("unmask, soft", size, 2 * moved, 3 * done, runs, attrgetter("soft"))


def attention_cases(
    device: str, shapes: Sequence[tuple[int, int, int]], rows: Sequence[int], contexts: Sequence[int]
) -> Iterator[Case]:
    """One canvas of n known tokens behind a prefix."""
    from infill_kernels import attention_triton as fused

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    for kv_heads, group, size in shapes:
        context_pages, own = -(-max(contexts) // PAGE), -(-max(rows) // PAGE)
        pool = KVPool(1, kv_heads, size, context_pages + own, dtype, device)
        keys, values = pool.keys[0].normal_(), pool.values[0].normal_()
        rope = Rope(size, 10_000.0, device)
        pages = torch.randperm(context_pages + own).tolist()
        for context in contexts:
            for n in rows:
                positions = list(range(context, context + n))
                placed = [Placed(pages[own:], 0, context)]
                part = Part(positions, list(range(-1, n - 1)), [LEFT] * n, n, pages[:own], 0, placed)
                of_pass, scale = plan([part], device=device), size**-0.5
                qkv = torch.randn(n, (group + 2) * kv_heads, size, device=device).to(dtype)
                q = rotate_and_store(qkv, keys, values, of_pass, rope)
                arguments = (q, keys, values, of_pass, rope)
                runs: dict[str, Callable[[], Any]] = {
                    "triton": partial(fused.canvas_attention, *arguments, scale=scale),
                    "torch": partial(canvas_attention, *arguments, scale=scale),
                    "SDPA, dense": dense_attention(q, keys, values, pages[own:], pages[:own], context),
                }
                moved = 2 * (context + n) * kv_heads * size * q.element_size() + 2 * q.nbytes
                name = f"{n} queries, {context} keys, {group * kv_heads}/{kv_heads} x {size}"
                yield Case(
                    "attention", name, moved, 4 * n * (context + n) * group * kv_heads * size, runs, Tensor.float
                )
        stored = {
            "triton": partial(fused.rotate_and_store, qkv, keys, values, of_pass, rope),
            "torch": partial(rotate_and_store, qkv, keys, values, of_pass, rope),
        }
        yield Case("rotate_and_store", f"{n} x {qkv.shape[1]} x {size}", 2 * qkv.nbytes, 0, stored, Tensor.float)


def dense_attention(
    q: Tensor, keys: Tensor, values: Tensor, context_pages: list[int], own_pages: list[int], context: int
) -> Callable[[], Tensor]:
    """torch's attention of copies without pages, the query heads of a key head as further rows."""
    n, heads, size = q.shape
    kv_heads = keys.shape[1]

    def dense(pool: Tensor) -> Tensor:
        runs = ((context_pages, context), (own_pages, n))
        return torch.cat([pool[ids].transpose(0, 1).reshape(kv_heads, -1, size)[:, :end] for ids, end in runs], 1)[None]

    k, v = dense(keys).contiguous(), dense(values).contiguous()
    row = torch.arange(n, device=q.device).repeat(heads // kv_heads)
    mask = torch.arange(context + n, device=q.device) <= context + row[:, None]
    mask = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill(~mask, -torch.inf)
    packed = q.view(n, kv_heads, -1, size).permute(1, 2, 0, 3).reshape(1, kv_heads, -1, size)

    def run() -> Tensor:
        out = F.scaled_dot_product_attention(packed, k, v, mask, scale=size**-0.5)
        return out.view(kv_heads, -1, n, size).permute(2, 0, 1, 3).reshape(n, heads, size)

    return run


def commit_cases(device: str, canvases: Sequence[int], slots: int) -> Iterator[Case]:
    """`EntropyBound` far from settling, so that every run finds the same work."""
    from infill_kernels.commit_triton import commit as fused

    for c in canvases:
        rows = torch.full((c,), slots, dtype=torch.int32, device=device)
        first = torch.arange(c, dtype=torch.int32, device=device) * slots
        token, ends = torch.arange(c * slots, device=device), torch.full((1,), -1, device=device)
        number = torch.rand(c * slots, device=device)
        outputs = Unmasked(token, token, number, number, number + 1)
        noise = torch.zeros(c, slots, dtype=torch.int64, device=device)

        state, rest = CanvasState.new(c, slots, slots, device), (outputs, first, rows, ends, EntropyBound(), noise)
        runs = {"triton": partial(fused, state, *rest), "torch": partial(commit, state, *rest)}
        yield Case("commit", f"{c} x {slots}", c * slots * 64, 0, runs)


def pointwise_cases(device: str, widths: Sequence[tuple[int, int]], rows: Sequence[int]) -> Iterator[Case]:
    """What decides whether the fused ones serve."""
    from infill_kernels import pointwise_triton as fused

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    compiled = torch.compile(pointwise.add_rmsnorm, dynamic=True), torch.compile(pointwise.gated, dynamic=True)
    for width, ffn in widths:
        for n in rows:
            x, weight = torch.randn(n, width, device=device).to(dtype), torch.ones(width, device=device, dtype=dtype)
            both = torch.randn(n, 2 * ffn, device=device).to(dtype)
            norm = (x, torch.randn_like(x), weight, 1e-5)
            norms = {"triton": partial(fused.add_rmsnorm, *norm), "torch": partial(pointwise.add_rmsnorm, *norm)}
            gates = {"triton": partial(fused.gated, both, "silu"), "torch": partial(pointwise.gated, both, "silu")}
            if device == "cuda":
                norms["compiled"], gates["compiled"] = partial(compiled[0], *norm), partial(compiled[1], both, "silu")
            yield Case("add_rmsnorm", f"{n} x {width}", 4 * x.nbytes + weight.nbytes, 0, norms, itemgetter(1))
            yield Case("gated", f"{n} x {ffn}", both.nbytes * 3 // 2, 0, gates, Tensor.float)


def measure(case: Case, machine: Machine) -> dict[str, Any]:
    """One row of the table. What fails is told in it and loses no other row."""
    row: dict[str, Any] = {"kernel": case.kernel, "size": case.size, "bytes": case.bytes, "flop": case.flop}
    row["bound_us"] = 1e6 * max(case.bytes / machine.bandwidth, case.flop / machine.flops)
    row |= {"us": {}, "peak_mib": {}, "difference": {}, "failed": {}}
    expected = None
    for name in sorted(case.runs, key="torch".__ne__):
        run = case.runs[name]
        try:
            result = run()
            if case.compared and name != "product alone":
                compared = case.compared(result).float()
                expected = compared if expected is None else expected
                row["difference"][name] = float((compared - expected).abs().max())
            row["peak_mib"][name] = machine.memory(run) / 2**20
            row["us"][name] = 1e6 * machine.seconds(run)
        except Exception as error:
            row["failed"][name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    return row


def line(row: dict[str, Any]) -> str:
    """A row of the text table: times in microseconds, and what part of the bound is reached."""
    ours = row["us"].get("triton")
    times = "  ".join(f"{name} {us:.1f}" for name, us in sorted(row["us"].items()) if name != "triton")
    failed = "".join(f"  {name} FAILED {why}" for name, why in row["failed"].items())
    reached = f"{ours:9.1f} {100 * row['bound_us'] / ours:6.1f}%" if ours else f"{'-':>9} {'-':>7}"
    memory = f"{row['peak_mib'].get('triton', 0):8.1f}"
    return f"{row['kernel']:17} {row['size']:36} {row['bound_us']:8.2f} {reached} {memory}  {times}{failed}"


def main() -> None:
    """Measures and prints; exits with 1 where one of our kernels fails."""
    parser = argparse.ArgumentParser(prog="python -m bench.kernels", description=main.__doc__)
    parser.add_argument("--json", type=Path, help="write the rows there, too")
    parser.add_argument("--interpret", action="store_true", help="tiny sizes, interpreted on the CPU")
    parser.add_argument("--seconds", type=float, default=170.0, help="begin no further case after this time")
    options = parser.parse_args()
    if options.interpret:
        os.environ["TRITON_INTERPRET"] = "1"
        device = "cpu"
        cases = [
            unmask_cases(device, [(48, 300)], [3]),
            attention_cases(device, [(1, 2, 16)], [3], [40]),
            commit_cases(device, [2], 8),
            pointwise_cases(device, [(40, 24)], [2]),
        ]
    elif torch.cuda.is_available():
        device = "cuda"
        cases = [
            attention_cases(device, ATTENTION[:1], ROWS, CONTEXTS),
            attention_cases(device, ATTENTION[1:], (8, 64), (512, 2048)),
            commit_cases(device, (1, 16), 256),
            unmask_cases(device, HEADS, ROWS),
            pointwise_cases(device, POINTWISE, (8, 64)),
        ]
    else:
        sys.exit("bench.kernels: no GPU here, so there is nothing to measure; --interpret shows that it works")
    started = time.monotonic()
    torch.manual_seed(0)
    machine = Machine(device)
    print(f"{machine.name}: {machine.bandwidth / 1e9:.0f} GB/s copied, {machine.flops / 1e12:.1f} TFLOP/s in bf16")
    print(f"{'kernel':17} {'size':36} {'bound us':>8} {'triton us':>9} {'reached':>7} {'peak MiB':>8}  others, us")
    rows, skipped = [], False
    for case in (case for group in cases for case in group):
        if skipped := time.monotonic() - started > options.seconds:
            print(f"the rest was left out after {options.seconds:.0f} s")
            break
        rows.append(measure(case, machine))
        print(line(rows[-1]), flush=True)
    if options.json:
        about = {"device": machine.name, "bytes_per_s": machine.bandwidth, "flop_per_s": machine.flops}
        about |= {"torch": torch.__version__, "complete": not skipped}
        options.json.write_text(json.dumps({**about, "rows": rows}, indent=1))
    if any("triton" in row["failed"] for row in rows):
        sys.exit("a kernel failed")


if __name__ == "__main__":
    main()
