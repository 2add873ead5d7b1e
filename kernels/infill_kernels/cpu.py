"""A decoder stack and its head on the CPU, each as one compiled call: int8 weights, 14-bit activations, fp16 KV.

Knows tensors, nothing of models or text. At a few rows a pass is bound by reading the weights once, so all layers run
in one call without an interpreter between them, and a team of threads shares each product by small pieces.

    y = W x:   y_ro = s_r t_o sum_k X_rk W_ok        W int8, a scale t_o an output; X integers up to `LEVELS`, s_r a row

Products of int8 with int16 accumulate in int32 exactly (127 * 8191 * 2048 < 2^31), so no row depends on what else is
in its batch, nor on how a pass is cut: bit for bit. A longer row is rounded in segments of `SEGMENT`, each with a step
of its own, and their sums are added in fp32, in order. Eight-bit activations would be twice as fast at many rows and
cost 0.13 nats a token on code (1.80); these cost 0.002, and at few rows both wait for the weights.

The loops are written as portable LLVM vectors: x86 turns the pairwise sums into `vpdpwssd` (VNNI) or `vpmaddwd`, others
into what they have. Compiled at the first use on a machine (some seconds), then kept on disk by numba.

Sources: RMSNorm (Zhang and Sennrich 2019, arXiv 1910.07467); SwiGLU (Shazeer 2020, arXiv 2002.05202); the attention is
that of `infill_kernels.attention`; dynamic quantisation a row as in LLM.int8 (arXiv 2208.07339, section 2.1).
"""

# What is compiled here is typed by numba, whose integers and floats are not Python's.
# mypy: disable-error-code="untyped-decorator,no-any-return,arg-type,return-value"

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import llvmlite.binding as llvm
import numba
import numpy as np
import numpy.typing as npt
import torch
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic
from torch import Tensor

from infill_kernels.attention import PAGE, KVPool, Plan, Rope
from infill_kernels.unmask import Allowed, Head, Unmasked, check_temperature

#: The largest integer of a quantised activation.
LEVELS = 8191
#: Inputs of a product that are rounded and summed together: as many as 32 bits hold the sum of.
SEGMENT = 2048
#: Outputs of a matrix that are rounded at a time, lest a large one lie in memory several times over.
ROUNDED = 2048
#: Outputs a tile of a weight; a piece of a product is a tile, of the head `HEAD_CHUNK` outputs.
OUTS, HEAD_CHUNK = 32, 192
#: What the size of a head is a multiple of.
HEAD_SIZES = 32
#: Bytes of a weight that are asked for ahead of their use.
AHEAD = 1024
#: Rows up to which one thread reads the head: two were 0.2 ms faster at one row (of 1.3), and took 36 to 64 ms beside
#: two busy processes on two cores, as one of them then waits for the other's turn.
ALONE = 8
#: Rows that share one read of keys and values in attention, and values of a head that are mixed at a time: twice as
#: many where there are twice as many registers to hold them.
_MANY = bool(llvm.get_host_cpu_features().get("avx512f"))
TILE, SPAN = 8, 32 if _MANY else 16

Array = npt.NDArray[Any]


def available() -> bool:
    """Whether this processor's vectors suit: x86 needs AVX2 and F16C, 64-bit ARM has all; and numba may compile."""
    if numba.config.DISABLE_JIT:  # type: ignore[attr-defined]  # numba sets its names at run time
        return False
    triple, features = llvm.get_process_triple(), llvm.get_host_cpu_features()
    return triple.startswith(("aarch64", "arm64")) or bool(features.get("avx2") and features.get("f16c"))


class Int8Weight(NamedTuple):
    """A matrix [O, K] as served; numba reads it as it is."""

    #: int8 [O' / OUTS, K' / 2, OUTS, 2]: tiles of outputs, in the order in which they are read; padded with zeros.
    values: Array
    #: float32 [O'], what one step of a row is worth.
    scale: Array

    @property
    def ins(self) -> int:
        """K'."""
        return 2 * int(self.values.shape[1])

    @staticmethod
    def of(weight: Tensor) -> Int8Weight:
        """Rounds a matrix [O, K] of any floating type, a scale a row."""
        outs, ins = weight.shape
        tiles, pairs = -(-outs // OUTS), -(-ins // 2)
        values, scale = np.zeros((tiles, pairs, OUTS, 2), np.int8), np.zeros(tiles * OUTS, np.float32)
        for first in range(0, outs, ROUNDED):
            exact = weight[first : first + ROUNDED].float().numpy()
            end = first + len(exact)
            scale[first:end] = np.maximum(np.abs(exact).max(1) / 127, 1e-12)
            rounded = np.zeros((-(-len(exact) // OUTS), OUTS, pairs, 2), np.int8)
            rounded.reshape(-1, 2 * pairs)[: len(exact), :ins] = np.rint(exact / scale[first:end, None])
            values[first // OUTS : -(-end // OUTS)] = rounded.transpose(0, 2, 1, 3)
        return Int8Weight(values, scale)


def rounding(weight: Tensor) -> float:
    """The relative error, in the Frobenius norm, that `Int8Weight.of` makes in a matrix [O, K]."""
    exact = weight.float()
    scale = (exact.abs().amax(1, keepdim=True) / 127).clamp(min=1e-12)
    wrong = (exact / scale).round() * scale - exact
    return float(wrong.norm() / exact.norm().clamp(min=1e-12))


# Vectors. Each primitive takes raw addresses; `rows` rows share one read of the other operand.


#: numba adds the builder's arguments itself, which its annotations do not say.
_intrinsic = cast(Any, intrinsic)


def _codegen(emit: Callable[..., Any]) -> Callable[..., Any]:
    """numba's code generator from a function that writes LLVM: integers arrive as int64."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        wide = [
            context.cast(builder, value, kind, types.int64) if isinstance(kind, types.Integer) else value
            for value, kind in zip(values, signature.args, strict=True)
        ]
        result = emit(builder, *wide)
        return context.get_dummy_value() if result is None else result

    return codegen


_I8, _I16, _I32, _I64, _F16, _F32 = (
    ir.IntType(8),
    ir.IntType(16),
    ir.IntType(32),
    ir.IntType(64),
    ir.HalfType(),
    ir.FloatType(),
)
_V16 = ir.VectorType(_F32, 16)


def _i64(value: int) -> Any:
    return ir.Constant(_I64, value)


def _splat(b: Any, value: Any, lanes: int = 16) -> Any:
    vector = ir.VectorType(value.type, lanes)
    one = b.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(_I32, 0))
    return b.shuffle_vector(one, one, ir.Constant(ir.VectorType(_I32, lanes), [0] * lanes))


def _floats(value: float) -> Any:
    return ir.Constant(_V16, [ir.Constant(_F32, value)] * 16)


def _load(b: Any, kind: Any, lanes: int, address: Any, index: Any) -> Any:
    pointer = b.gep(b.inttoptr(address, kind.as_pointer()), [index])
    size = {_I8: 1, _I16: 2, _F16: 2, _F32: 4}[kind]
    return b.load(b.bitcast(pointer, ir.VectorType(kind, lanes).as_pointer()), align=size)


def _store(b: Any, kind: Any, lanes: int, value: Any, address: Any, index: Any) -> None:
    pointer = b.gep(b.inttoptr(address, kind.as_pointer()), [index])
    b.store(value, b.bitcast(pointer, ir.VectorType(kind, lanes).as_pointer()), align=2 if kind is _F16 else 4)


def _call(b: Any, name: str, result: Any, *values: Any) -> Any:
    kind = ir.FunctionType(result, [value.type for value in values])
    return b.call(b.module.declare_intrinsic(name, (), kind), values)


def _fma(b: Any, x: Any, y: Any, z: Any) -> Any:
    return _call(b, "llvm.fma.v16f32", _V16, x, y, z)


def _loop(b: Any, count: Any, step: int, starts: list[Any], body: Callable[[Any, list[Any]], list[Any]]) -> list[Any]:
    """`for i in range(0, count, step)` with carried values, at least once around; returns them."""
    entry, loop, done = b.block, b.append_basic_block("loop"), b.append_basic_block("done")
    b.branch(loop)
    b.position_at_end(loop)
    i = b.phi(_I64)
    i.add_incoming(_i64(0), entry)
    carried = [b.phi(start.type) for start in starts]
    for phi, start in zip(carried, starts, strict=True):
        phi.add_incoming(start, entry)
    after = body(i, carried)
    following = b.add(i, _i64(step))
    for phi, value in zip((i, *carried), (following, *after), strict=True):
        phi.add_incoming(value, b.block)
    b.cbranch(b.icmp_signed("<", following, count), loop, done)
    b.position_at_end(done)
    return after


def _tile(rows: int, outs: int) -> Any:
    """out fp32 [rows, OUTS] = steps [rows, 1] scale [OUTS] (x int16 [rows, k] W^T), of the first `outs` outputs.

    w is one tile of a weight: [k / 2, OUTS, 2]. A pair of inputs is multiplied with a pair of weights of 16 outputs at
    a time, so nothing has to be summed across lanes, and the weights are read as they lie: 34 GB/s on one core where
    rows of weights that lie one behind the other came at 15, both in one run.
    """
    parts = range(0, outs, 16)
    even, odd = ([2 * i + first for i in range(16)] for first in (0, 1))
    pick = [ir.Constant(ir.VectorType(_I32, 16), lanes) for lanes in (even, odd)]
    wide, sums = ir.VectorType(_I32, 32), ir.VectorType(_I32, 16)

    def emit(b: Any, x: Any, x_stride: Any, w: Any, k: Any, scale: Any, steps: Any, out: Any) -> None:
        def body(i: Any, carried: list[Any]) -> list[Any]:
            at = b.mul(i, _i64(OUTS))
            _prefetch(b, b.add(w, b.add(at, _i64(AHEAD))))
            column = [b.sext(_load(b, _I8, 32, w, b.add(at, _i64(2 * part))), wide) for part in parts]
            after = []
            for r in range(rows):
                where = b.add(x, b.mul(b.add(b.mul(x_stride, _i64(r)), i), _i64(2)))
                pair = _splat(b, b.load(b.inttoptr(where, _I32.as_pointer()), align=2))
                row = b.sext(b.bitcast(pair, ir.VectorType(_I16, 32)), wide)
                for j, part in enumerate(column):
                    products = b.mul(row, part)
                    pairs = b.add(*(b.shuffle_vector(products, products, lanes) for lanes in pick))
                    after.append(b.add(carried[r * len(parts) + j], pairs))
            return after

        totals = iter(_loop(b, k, 2, [ir.Constant(sums, [0] * 16)] * (rows * len(parts)), body))
        for r in range(rows):
            step = _splat(b, b.load(b.gep(b.inttoptr(steps, _F32.as_pointer()), [_i64(r)])))
            for part in parts:
                worth = b.fmul(step, _load(b, _F32, 16, scale, _i64(part)))
                value = b.fmul(b.sitofp(next(totals), _V16), worth)
                _store(b, _F32, 16, value, out, _i64(r * OUTS + part))

    @_intrinsic
    def tile(_: Any, x: Any, x_stride: Any, w: Any, k: Any, scale: Any, steps: Any, out: Any) -> Any:
        return types.void(x, x_stride, w, k, scale, steps, out), _codegen(emit)

    return tile


def _prefetch(b: Any, address: Any) -> None:
    pointer = b.inttoptr(address, _I8.as_pointer())
    kind = ir.FunctionType(ir.VoidType(), [pointer.type, _I32, _I32, _I32])
    fetch = b.module.declare_intrinsic("llvm.prefetch", [pointer.type], kind)
    b.call(fetch, [pointer, *(ir.Constant(_I32, value) for value in (0, 3, 1))])


def _scores(rows: int) -> Any:
    """out fp32 [rows, PAGE] = bias + q fp32 [rows, size] keys fp16 [size, PAGE]."""

    def emit(b: Any, q: Any, q_stride: Any, keys: Any, size: Any, bias: Any, out: Any, out_stride: Any) -> None:
        def body(i: Any, carried: list[Any]) -> list[Any]:
            halves = [b.fpext(_load(b, _F16, 16, keys, b.add(b.mul(i, _i64(PAGE)), _i64(at))), _V16) for at in (0, 16)]
            after = []
            for r in range(rows):
                value = b.load(b.gep(b.inttoptr(q, _F32.as_pointer()), [b.add(b.mul(q_stride, _i64(r)), i)]))
                one = _splat(b, value)
                after += [_fma(b, one, half, carried[2 * r + h]) for h, half in enumerate(halves)]
            return after

        totals = _loop(b, size, 1, [_splat(b, bias)] * (2 * rows), body)
        for r in range(rows):
            for h in range(2):
                _store(b, _F32, 16, totals[2 * r + h], out, b.add(b.mul(out_stride, _i64(r)), _i64(16 * h)))

    @_intrinsic
    def scores(_: Any, q: Any, q_stride: Any, keys: Any, size: Any, bias: Any, out: Any, out_stride: Any) -> Any:
        return types.void(q, q_stride, keys, size, types.float32, out, out_stride), _codegen(emit)

    return scores


def _mix(rows: int) -> Any:
    """out fp32 [rows, SPAN] += p fp32 [rows, n] v fp16 [n, SPAN]; n >= 1."""
    parts = range(0, SPAN, 16)

    def emit(b: Any, p: Any, p_stride: Any, v: Any, v_stride: Any, n: Any, out: Any, out_stride: Any) -> None:
        weights = b.inttoptr(p, _F32.as_pointer())

        def body(i: Any, carried: list[Any]) -> list[Any]:
            value = [b.fpext(_load(b, _F16, 16, v, b.add(b.mul(v_stride, i), _i64(at))), _V16) for at in parts]
            after = []
            for r in range(rows):
                weight = _splat(b, b.load(b.gep(weights, [b.add(b.mul(p_stride, _i64(r)), i)])))
                after += [_fma(b, weight, part, carried[r * len(parts) + j]) for j, part in enumerate(value)]
            return after

        where = [b.add(b.mul(out_stride, _i64(r)), _i64(at)) for r in range(rows) for at in parts]
        starts = [_load(b, _F32, 16, out, at) for at in where]
        for at, total in zip(where, _loop(b, n, 1, starts, body), strict=True):
            _store(b, _F32, 16, total, out, at)

    @_intrinsic
    def mix(_: Any, p: Any, p_stride: Any, v: Any, v_stride: Any, n: Any, out: Any, out_stride: Any) -> Any:
        return types.void(p, p_stride, v, v_stride, n, out, out_stride), _codegen(emit)

    return mix


@_intrinsic
def _exp(_: Any, x: Any, n: Any, top: Any) -> Any:
    """exp in place of n fp32 (a multiple of 16) less `top`, at most e^88; minus infinity gives exactly 0. Returns the
    sum."""
    return types.float32(x, n, types.float32), _codegen(_emit_exp)


def _emit_exp(b: Any, x: Any, n: Any, top: Any) -> Any:
    shift = _splat(b, top)
    # exp(x) = 2^k e^f, |f| <= ln 2 / 2; Taylor to the sixth power is off by 1e-7 there.
    coefficients = [1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0, 1.0]

    def body(i: Any, carried: list[Any]) -> list[Any]:
        y = b.fsub(_load(b, _F32, 16, x, i), shift)
        inside = b.fcmp_ordered(">", y, _floats(-87.0))
        y = b.select(inside, y, _floats(-87.0))
        y = b.select(b.fcmp_ordered("<", y, _floats(88.0)), y, _floats(88.0))
        k = _call(b, "llvm.rint.v16f32", _V16, b.fmul(y, _floats(math.log2(math.e))))
        f = _fma(b, k, _floats(-0.693359375), y)
        f = _fma(b, k, _floats(0.693359375 - math.log(2)), f)
        power = _floats(coefficients[0])
        for coefficient in coefficients[1:]:
            power = _fma(b, power, f, _floats(coefficient))
        whole = b.fptosi(k, ir.VectorType(_I32, 16))
        bits = b.shl(b.add(whole, _ints(127)), _ints(23))
        value = b.select(inside, b.fmul(power, b.bitcast(bits, _V16)), _floats(0.0))
        _store(b, _F32, 16, value, x, i)
        return [b.fadd(carried[0], value)]

    (total,) = _loop(b, n, 16, [_floats(0.0)], body)
    return _call(b, "llvm.vector.reduce.fadd.v16f32", _F32, ir.Constant(_F32, 0.0), total)


def _ints(value: int) -> Any:
    return ir.Constant(ir.VectorType(_I32, 16), [value] * 16)


@_intrinsic
def _max(_: Any, x: Any, n: Any) -> Any:
    """The largest of n fp32, a multiple of 16."""

    def emit(b: Any, at: Any, count: Any) -> Any:
        def body(i: Any, carried: list[Any]) -> list[Any]:
            value = _load(b, _F32, 16, at, i)
            return [b.select(b.fcmp_ordered(">", value, carried[0]), value, carried[0])]

        (top,) = _loop(b, count, 16, [_floats(-math.inf)], body)
        return _call(b, "llvm.vector.reduce.fmax.v16f32", _F32, top)

    return types.float32(x, n), _codegen(emit)


@_intrinsic
def _half(_: Any, x: Any, out: Any, out_stride: Any, n: Any) -> Any:
    """Rounds n fp32 to fp16, `out_stride` apart."""
    return types.void(x, out, out_stride, n), _codegen(_emit_half)


def _emit_half(b: Any, x: Any, out: Any, out_stride: Any, n: Any) -> None:
    def body(i: Any, _: list[Any]) -> list[Any]:
        value = b.load(b.gep(b.inttoptr(x, _F32.as_pointer()), [i]))
        b.store(b.fptrunc(value, _F16), b.gep(b.inttoptr(out, _F16.as_pointer()), [b.mul(i, out_stride)]))
        return []

    _loop(b, n, 1, [], body)


@_intrinsic
def _atomic_add(_: Any, address: Any, value: Any) -> Any:
    """Adds to an int64 and returns what was there."""

    def emit(b: Any, at: Any, by: Any) -> Any:
        return b.atomic_rmw("add", b.inttoptr(at, _I64.as_pointer()), by, "seq_cst")

    return types.int64(address, value), _codegen(emit)


@_intrinsic
def _pause(_: Any) -> Any:
    """Tells the core that this is a wait, so that another thread on it gets more."""

    def emit(b: Any) -> None:
        if llvm.get_process_triple().startswith("x86"):
            b.call(b.module.declare_intrinsic("llvm.x86.sse2.pause", (), ir.FunctionType(ir.VoidType(), [])), [])

    return types.void(), _codegen(emit)


@_intrinsic
def _atomic_read(_: Any, address: Any) -> Any:
    """An int64 that others change."""

    def emit(b: Any, at: Any) -> Any:
        return b.load_atomic(b.inttoptr(at, _I64.as_pointer()), "seq_cst", 8)

    return types.int64(address), _codegen(emit)


#: Rows at a time, and outputs at a time: what the registers hold.
MOST_ROWS, AT_ONCE = (8, 32) if _MANY else (4, 16)
_tile_most, _tile4, _tile2, _tile1 = (_tile(rows, AT_ONCE) for rows in (MOST_ROWS, 4, 2, 1))
_scores4, _scores2, _scores1 = (_scores(rows) for rows in (4, 2, 1))
_mix4, _mix2, _mix1 = (_mix(rows) for rows in (4, 2, 1))
_sleep_us: Any = types.ExternalFunction("usleep", types.int32(types.uint32))

# What follows is compiled by numba. `nnan` but not `ninf`: masked scores are minus infinity.
_OPTIONS: dict[str, Any] = {
    "nogil": True,
    "fastmath": {"contract", "reassoc", "nsz", "nnan"},
    "error_model": "numpy",
}


def _compiled(function: Callable[..., Any]) -> Any:
    """Compiles at the first call, and keeps what was compiled on disk where there is a folder for it."""
    try:
        return njit(**_OPTIONS, cache=True)(function)
    except RuntimeError:  # neither the package's own folder nor the user's cache can be written to
        return njit(**_OPTIONS)(function)


#: Phases of one layer in `_layers`.
_PHASES = 10
#: Looks at the end of a stage before a thread sleeps between them: its core is then free for the one it waits for.
_SPINS = 20_000


@_compiled
def _next(sync: Array, phase: int) -> int:
    """The next piece of a phase's work that nobody has."""
    return _atomic_add(sync.ctypes.data + 16 * phase, 1)


@_compiled
def _finish(sync: Array, phase: int) -> None:
    """Says that a piece is done."""
    _atomic_add(sync.ctypes.data + 16 * phase + 8, 1)


@_compiled
def _wait(sync: Array, phase: int, pieces: int) -> None:
    """Waits until all pieces of a phase are done, whoever has them."""
    spins = 0
    while _atomic_read(sync.ctypes.data + 16 * phase + 8) < pieces:
        spins += 1
        _pause()
        if spins > _SPINS:
            _sleep_us(np.uint32(20))


@_compiled
def _quantise(y: Array, x: Array) -> float:
    """Rounds a row y [K] to integers x int16 [K' >= K]; returns what one step is worth."""
    top = np.float32(1e-12)
    for i in range(len(y)):
        top = max(top, abs(y[i]))
    inverse = np.float32(LEVELS) / top
    for i in range(len(y)):
        x[i] = np.int16(math.floor(y[i] * inverse + np.float32(0.5)))
    for i in range(len(y), len(x)):
        x[i] = 0
    return top / np.float32(LEVELS)


@_compiled
def _segments(ins: int) -> int:
    """How many steps a row of so many inputs has."""
    return (ins + SEGMENT - 1) // SEGMENT


@_compiled
def _quantise_row(y: Array, x: Array, steps: Array, r: int) -> None:
    """Rounds a row y [K] to integers x [K'], segment by segment; steps[:, r] are what a step of each is worth."""
    for s in range(_segments(len(x))):
        first = s * SEGMENT
        steps[s, r] = _quantise(y[first : first + SEGMENT], x[first : first + SEGMENT])


@_compiled
def _normed(x: Array, weight: Array, eps: float, y: Array) -> None:
    """y = RMSNorm(x) * weight of one row."""
    squares = np.float32(0.0)
    for i in range(len(x)):
        squares += x[i] * x[i]
    factor = np.float32(1.0) / np.float32(math.sqrt(squares / np.float32(len(x)) + np.float32(eps)))
    for i in range(len(x)):
        y[i] = x[i] * factor * weight[i]


@_compiled
def _room() -> Array:
    """What `_product` needs, once a thread and stage."""
    return np.empty((2 * MOST_ROWS, OUTS), np.float32)


@_compiled
def _tile_rows(rows: int, x: int, stride: int, w: int, ins: int, scale: int, steps: int, out: int) -> None:
    """`_tile` of so many rows, all outputs; addresses."""
    for part in range(0, OUTS, AT_ONCE):
        w_at, scale_at, out_at = w + 2 * part, scale + 4 * part, out + 4 * part
        if rows == MOST_ROWS:
            _tile_most(x, stride, w_at, ins, scale_at, steps, out_at)
        elif rows == 4:
            _tile4(x, stride, w_at, ins, scale_at, steps, out_at)
        elif rows == 2:
            _tile2(x, stride, w_at, ins, scale_at, steps, out_at)
        else:
            _tile1(x, stride, w_at, ins, scale_at, steps, out_at)


@_compiled
def _product(
    x: Array, steps: Array, w: Array, scale: Array, tile: int, room: Array, out: Array, at: int, add: bool
) -> None:
    """One tile of the columns of x W^T, written (or added) to out[:, at:] as far as that goes. steps: [S, N]."""
    n, k = x.shape
    count, segments = min(OUTS, out.shape[1] - at), _segments(k)
    w_at, scale_at = w.ctypes.data + tile * k * OUTS, scale.ctypes.data + 4 * tile * OUTS
    room_at = room.ctypes.data
    row = 0
    while row < n:
        left = n - row
        rows = MOST_ROWS if left >= MOST_ROWS else 4 if left >= 4 else 2 if left >= 2 else 1
        x_at, steps_at = x.ctypes.data + 2 * row * k, steps.ctypes.data + 4 * row
        _tile_rows(rows, x_at, k, w_at, min(SEGMENT, k), scale_at, steps_at, room_at)
        for s in range(1, segments):
            first = s * SEGMENT
            _tile_rows(
                rows, x_at + 2 * first, k, w_at + first * OUTS, min(SEGMENT, k - first), scale_at,
                steps_at + 4 * s * n, room_at + 4 * MOST_ROWS * OUTS,
            )  # fmt: skip
            for r in range(rows):
                for i in range(OUTS):
                    room[r, i] += room[MOST_ROWS + r, i]
        for r in range(rows):
            if add:
                for i in range(count):
                    out[row + r, at + i] += room[r, i]
            else:
                for i in range(count):
                    out[row + r, at + i] = room[r, i]
        row += rows


@_compiled
def _turn(source: Array, out: Array, heads: int, size: int, table: Array, position: int) -> None:
    """Rotates `heads` heads of a row to a position; source and out may be the same."""
    half = size // 2
    for h in range(heads):
        for i in range(half):
            cos, sin = table[0, position, i], table[1, position, i]
            a, b = source[h * size + i], source[h * size + half + i]
            out[h * size + i] = a * cos - b * sin
            out[h * size + half + i] = b * cos + a * sin


@_compiled
def _keys_of_page(q: Array, count: int, size: int, keys: int, bias: float, scores: Array, column: int) -> None:
    """scores[:count, column : column + PAGE], with a bias, of the first `count` rows of q and one page's keys."""
    stride, row = scores.shape[1], 0
    while row < count:
        q_at = q.ctypes.data + 4 * row * size
        out = scores.ctypes.data + 4 * (row * stride + column)
        if row + 4 <= count:
            _scores4(q_at, size, keys, size, bias, out, stride)
            row += 4
        elif row + 2 <= count:
            _scores2(q_at, size, keys, size, bias, out, stride)
            row += 2
        else:
            _scores1(q_at, size, keys, size, bias, out, stride)
            row += 1


@_compiled
def _values_of_page(scores: Array, column: int, n: int, count: int, size: int, values: int, out: Array) -> None:
    """out[:count] += scores[:count, column : column + n] times n rows of values [n, size]."""
    stride, row = scores.shape[1], 0
    while row < count:
        rows = 4 if row + 4 <= count else 2 if row + 2 <= count else 1
        p = scores.ctypes.data + 4 * (row * stride + column)
        for at in range(0, size, SPAN):
            to = out.ctypes.data + 4 * (row * size + at)
            if rows == 4:
                _mix4(p, stride, values + 2 * at, size, n, to, size)
            elif rows == 2:
                _mix2(p, stride, values + 2 * at, size, n, to, size)
            else:
                _mix1(p, stride, values + 2 * at, size, n, to, size)
        row += rows


@_compiled
def _columns(p: Any, canvas: int) -> int:
    """Columns of scores that a canvas needs: whole pages of its contexts and of itself."""
    count = 0
    for s in range(p.context_start[canvas], p.context_start[canvas + 1]):
        if p.context_end[s] > p.context_first[s]:
            count += (p.context_end[s] - 1) // PAGE - p.context_first[s] // PAGE + 1
    first = p.own_at[canvas]
    end = first + p.token_start[canvas + 1] - p.token_start[canvas]
    return PAGE * (count + (end - 1) // PAGE - first // PAGE + 1)


@_compiled
def _attend(
    p: Any,
    canvas: int,
    first_row: int,
    rows: int,
    group: int,
    size: int,
    q: Array,
    keys: int,
    values: int,
    page_stride: int,
    table: Array,
    bias_right: float,
    here: Array,
    turned: Array,
    scores: Array,
    gates: Array,
    totals: Array,
    mixed: Array,
) -> None:
    """Attention of `rows` queries of a canvas and the `group` query heads of one key head, into `mixed`
    [rows * group, size]. q: [rows, group * size]; keys, values: addresses of the key head in page 0; page_stride:
    bytes from page to page."""
    count = rows * group
    for r in range(rows):
        for h in range(group):
            here[r * group + h, :size] = q[r, h * size : (h + 1) * size]
    column = 0
    for s in range(p.context_start[canvas], p.context_start[canvas + 1]):
        first, end, back = p.context_first[s], p.context_end[s], p.context_back[s]
        if end <= first:
            continue
        queries = here
        if back > 0:
            for r in range(count):
                _turn(here[r], turned[r], 1, size, table, back)
            queries = turned
        began = column
        for tile in range(first // PAGE, (end - 1) // PAGE + 1):
            page = np.int64(p.pages[p.context_page[s] + tile])
            _keys_of_page(queries, count, size, keys + page * page_stride, p.context_bias[s], scores, column)
            column += PAGE
        low, high = began + first % PAGE, column - (PAGE - 1 - (end - 1) % PAGE)
        for r in range(rows):
            hidden = p.context_block[s] != 0 and p.branch[p.query_token[first_row + r]] != 0
            for h in range(r * group, (r + 1) * group):
                scores[h, began : column if hidden else low] = -np.inf
                scores[h, high:column] = -np.inf
    token, end = p.token_start[canvas], p.token_start[canvas + 1]
    own = p.own_at[canvas]
    began = column
    for tile in range(own // PAGE, (own + end - token - 1) // PAGE + 1):
        page = np.int64(p.pages[p.own_page[canvas] + tile])
        _keys_of_page(here, count, size, keys + page * page_stride, np.float32(0.0), scores, column)
        column += PAGE
    outside = token - own % PAGE
    unseen = -np.float32(np.inf)
    for r in range(rows):
        i = p.query_token[first_row + r]
        place, here_group, position = p.enter[i], p.group[i], p.position[i]
        gates[began:column] = unseen
        for t in range(token, end):
            sees = (p.enter[t] <= place) & (place < p.leave[t]) | (here_group > 0) & (p.group[t] == here_group)
            gate = np.float32(bias_right) if p.position[t] > position else np.float32(0.0)
            gates[began + t - outside] = gate if sees else unseen
        for h in range(r * group, (r + 1) * group):
            for j in range(began, column):  # what is not seen may be anything
                scores[h, j] = scores[h, j] + gates[j] if gates[j] > unseen else unseen
    for h in range(count):
        row = scores.ctypes.data + 4 * h * scores.shape[1]
        totals[h] = _exp(row, column, _max(row, column))
        mixed[h, :size] = np.float32(0.0)
    column = 0
    for s in range(p.context_start[canvas], p.context_start[canvas + 1]):
        first, end = p.context_first[s], p.context_end[s]
        if end <= first:
            continue
        for tile in range(first // PAGE, (end - 1) // PAGE + 1):
            low, high = max(first - tile * PAGE, 0), min(end - tile * PAGE, PAGE)
            at = values + np.int64(p.pages[p.context_page[s] + tile]) * page_stride + 2 * low * size
            _values_of_page(scores, column + low, high - low, count, size, at, mixed)
            column += PAGE
    first, end = own, own + p.token_start[canvas + 1] - token
    for tile in range(first // PAGE, (end - 1) // PAGE + 1):
        low, high = max(first - tile * PAGE, 0), min(end - tile * PAGE, PAGE)
        at = values + np.int64(p.pages[p.own_page[canvas] + tile]) * page_stride + 2 * low * size
        _values_of_page(scores, column + low, high - low, count, size, at, mixed)
        column += PAGE
    for h in range(count):
        inverse = np.float32(1.0) / totals[h]
        for i in range(size):
            mixed[h, i] *= inverse


# A stage is one phase, whose pieces the threads share. It ends when its work is done, not when all threads have come:
# one that starts late, or lost its core, joins where the others are, and who begins alone does not wait for it. With
# barriers of all threads instead, a pass took 2 to 4 times as long beside two busy processes on two cores.


@_compiled
def _quantise_rows(sync: Array, phase: int, y: Array, x: Array, steps: Array) -> None:
    """x, steps = y as integers."""
    r = _next(sync, phase)
    while r < len(y):
        _quantise_row(y[r], x[r], steps, r)
        _finish(sync, phase)
        r = _next(sync, phase)
    _wait(sync, phase, len(y))


@_compiled
def _normed_rows(
    sync: Array, phase: int, x: Array, weight: Array, eps: float, row: Array, out: Array, steps: Array
) -> None:
    """out, steps = RMSNorm(x) as integers; `row` is room for one."""
    r = _next(sync, phase)
    while r < len(x):
        _normed(x[r], weight, eps, row)
        _quantise_row(row, out[r], steps, r)
        _finish(sync, phase)
        r = _next(sync, phase)
    _wait(sync, phase, len(x))


@_compiled
def _product_columns(
    sync: Array, phase: int, x: Array, steps: Array, w: Array, scale: Array, out: Array, add: bool
) -> None:
    """out = x W^T, or out += x W^T."""
    room = _room()
    tile = _next(sync, phase)
    while tile < len(w):
        _product(x, steps, w, scale, tile, room, out, tile * OUTS, add)
        _finish(sync, phase)
        tile = _next(sync, phase)
    _wait(sync, phase, len(w))


@_compiled
def _gated_columns(
    sync: Array,
    phase: int,
    x: Array,
    steps: Array,
    gate_w: Array,
    gate_scale: Array,
    up_w: Array,
    up_scale: Array,
    gate: Array,
    up: Array,
) -> None:
    """gate = silu(x W_gate^T) * (x W_up^T)."""
    n, ffn = gate.shape
    room, e = _room(), np.zeros(OUTS, np.float32)
    tile = _next(sync, phase)
    while tile < len(gate_w):
        first = tile * OUTS
        count = min(OUTS, ffn - first)
        _product(x, steps, gate_w, gate_scale, tile, room, gate, first, False)
        _product(x, steps, up_w, up_scale, tile, room, up, first, False)
        for r in range(n):
            for i in range(count):
                e[i] = -gate[r, first + i]
            _exp(e.ctypes.data, OUTS, np.float32(0.0))
            for i in range(count):
                gate[r, first + i] = gate[r, first + i] / (np.float32(1.0) + e[i]) * up[r, first + i]
        _finish(sync, phase)
        tile = _next(sync, phase)
    _wait(sync, phase, len(gate_w))


@_compiled
def _store_rows(
    sync: Array,
    phase: int,
    p: Any,
    qkv: Array,
    bias: Array,
    heads: int,
    kv_heads: int,
    size: int,
    table: Array,
    keys: int,
    values: int,
    page_bytes: int,
) -> None:
    """Adds a bias, rotates queries and keys, and writes keys and values as fp16 into the layer's pages at `keys` and
    `values`."""
    r = _next(sync, phase)
    while r < len(qkv):
        for i in range(len(bias)):
            qkv[r, i] += bias[i]
        _turn(qkv[r], qkv[r], heads + kv_heads, size, table, p.position[p.query_token[r]])
        slot = np.int64(p.query_slot[r])
        for g in range(kv_heads):
            at = slot // PAGE * page_bytes + 2 * g * size * PAGE
            k = qkv.ctypes.data + 4 * (r * qkv.shape[1] + (heads + g) * size)
            _half(k, keys + at + 2 * (slot % PAGE), PAGE, size)
            _half(k + 4 * kv_heads * size, values + at + 2 * (slot % PAGE) * size, 1, size)
        _finish(sync, phase)
        r = _next(sync, phase)
    _wait(sync, phase, len(qkv))


@_compiled
def _row_tiles(p: Any, canvas: int) -> int:
    """Tiles of a canvas's rows."""
    return (p.query_start[canvas + 1] - p.query_start[canvas] + TILE - 1) // TILE


@_compiled
def _attend_tiles(
    sync: Array,
    phase: int,
    p: Any,
    qkv: Array,
    heads: int,
    kv_heads: int,
    size: int,
    table: Array,
    keys: int,
    values: int,
    page_bytes: int,
    bias_right: float,
    room: Array,
    scores: Array,
    attended: Array,
) -> None:
    """attended [N, heads * size]: a task is a tile of rows of one canvas and one key head."""
    group = heads // kv_heads
    canvases = len(p.own_at)
    totals, gates = np.empty(TILE * group, np.float32), np.empty(scores.shape[1], np.float32)
    tiles = 0
    for c in range(canvases):
        tiles += _row_tiles(p, c)
    task = _next(sync, phase)
    while task < tiles * kv_heads:
        g, tile, c = task % kv_heads, task // kv_heads, 0
        while tile >= _row_tiles(p, c):
            tile -= _row_tiles(p, c)
            c += 1
        r = p.query_start[c] + tile * TILE
        rows = min(TILE, p.query_start[c + 1] - r)
        q = qkv[r : r + rows, g * group * size : (g + 1) * group * size]
        at = 2 * g * size * PAGE
        _attend(
            p, c, r, rows, group, size, q, keys + at, values + at, page_bytes, table, bias_right,
            room[0], room[1], scores, gates, totals, room[2],
        )  # fmt: skip
        for i in range(rows):
            for h in range(group):
                first = (g * group + h) * size
                attended[r + i, first : first + size] = room[2, i * group + h]
        _finish(sync, phase)
        task = _next(sync, phase)
    _wait(sync, phase, tiles * kv_heads)


@_compiled
def _layers(
    sync: Array,
    x: Array,
    w: Any,
    p: Any,
    first: int,
    end: int,
    keys: int,
    values: int,
    page_bytes: int,
    pages: int,
    table: Array,
    bias_right: float,
    heads: int,
    kv_heads: int,
    size: int,
    eps: float,
    rooms: Any,
) -> None:
    """Layers [first, end) of the stack, in every thread of the team. x [N, width] is the residual stream, in place.

    keys, values: addresses of the pool; page_bytes: one page of one layer; rooms: `_Rooms` for N rows.
    """
    most = PAGE
    for c in range(len(p.own_at)):
        most = max(most, _columns(p, c))
    tile = TILE * (heads // kv_heads)
    room, scores = np.empty((3, tile, size), np.float32), np.empty((tile, most), np.float32)
    row = np.empty(x.shape[1], np.float32)
    narrow, mixed, wide, steps, qkv = rooms.narrow, rooms.mixed, rooms.wide, rooms.steps, rooms.qkv
    for i in range(first, end):
        phase, at = _PHASES * (i - first), i * pages * page_bytes
        k, v = keys + at, values + at
        _normed_rows(sync, phase, x, w.attention_norm[i], eps, row, narrow, steps)
        _product_columns(sync, phase + 1, narrow, steps, w.qkv[i], w.qkv_scale[i], qkv, False)
        _store_rows(sync, phase + 2, p, qkv, w.qkv_bias[i], heads, kv_heads, size, table, k, v, page_bytes)
        _attend_tiles(
            sync, phase + 3, p, qkv, heads, kv_heads, size, table, k, v, page_bytes, bias_right,
            room, scores, rooms.attended,
        )  # fmt: skip
        _quantise_rows(sync, phase + 4, rooms.attended, mixed, steps)
        _product_columns(sync, phase + 5, mixed, steps, w.output[i], w.output_scale[i], x, True)
        _normed_rows(sync, phase + 6, x, w.ffn_norm[i], eps, row, narrow, steps)
        _gated_columns(
            sync, phase + 7, narrow, steps, w.gate[i], w.gate_scale[i], w.up[i], w.up_scale[i],
            rooms.gate, rooms.up,
        )  # fmt: skip
        _quantise_rows(sync, phase + 8, rooms.gate, wide, steps)
        _product_columns(sync, phase + 9, wide, steps, w.down[i], w.down_scale[i], x, True)


@_compiled
def _head(
    sync: Array,
    hidden: Array,
    w: Array,
    scale: Array,
    bias: Array,
    allowed: Array,
    which: Array,
    inverse_temperature: float,
    softcap: float,
    x: Array,
    steps: Array,
    out: Array,
) -> None:
    """`unmask` in every thread of the team: out fp64 [pieces, N, 4] gets for each `HEAD_CHUNK` of the vocabulary the
    top logit y, its id, the sum of exp(y - top) and of exp(y - top) (y - top). bias [V]: minus infinity where an id is
    banned, else 0; which [N]: a row's set in `allowed`, or -1."""
    n = len(hidden)
    _quantise_rows(sync, 0, hidden, x, steps)
    room, y, e = _room(), np.empty((n, HEAD_CHUNK), np.float32), np.empty(HEAD_CHUNK, np.float32)
    piece = _next(sync, 1)
    while piece < len(out):
        first = piece * HEAD_CHUNK
        for tile in range(first // OUTS, min((first + HEAD_CHUNK) // OUTS, len(w))):
            _product(x, steps, w, scale, tile, room, y, tile * OUTS - first, False)
        count = min(HEAD_CHUNK, len(bias) - first)
        for r in range(n):
            if softcap > 0:
                for i in range(count):
                    y[r, i] = np.float32(softcap) * np.float32(math.tanh(y[r, i] / np.float32(softcap)))
            for i in range(count):
                y[r, i] = y[r, i] * np.float32(inverse_temperature) + bias[first + i]
            if which[r] >= 0:
                for i in range(count):
                    if not allowed[which[r], first + i]:
                        y[r, i] = -np.inf
            y[r, count:] = -np.inf
            at = y.ctypes.data + 4 * r * HEAD_CHUNK
            top = _max(at, HEAD_CHUNK)
            out[piece, r, 0], out[piece, r, 1], out[piece, r, 2], out[piece, r, 3] = top, 0.0, 0.0, 0.0
            if top > -np.inf:
                i = 0
                while y[r, i] != top:
                    i += 1
                out[piece, r, 1] = first + i
                e[:] = y[r]
                out[piece, r, 2] = _exp(e.ctypes.data, HEAD_CHUNK, top)
                mean = np.float32(0.0)
                for i in range(count):
                    mean += e[i] * max(y[r, i] - top, np.float32(-1e4))
                out[piece, r, 3] = mean
        _finish(sync, 1)
        piece = _next(sync, 1)
    _wait(sync, 1, len(out))


@_compiled
def _logits(sync: Array, hidden: Array, w: Array, scale: Array, x: Array, steps: Array, out: Array) -> None:
    """out fp32 [N, V] = hidden W^T, in every thread of the team."""
    _quantise_rows(sync, 0, hidden, x, steps)
    _product_columns(sync, 1, x, steps, w, scale, out, False)


class Layer(NamedTuple):
    """One layer in any floating type: matrices [O, K]."""

    attention_norm: Tensor
    #: Of queries, keys and values, one behind the other; the queries' with the scale of the scores in it.
    qkv: Tensor
    output: Tensor
    ffn_norm: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    #: Added to qkv's product: [O].
    qkv_bias: Tensor | None = None


class Weights(NamedTuple):
    """All layers of a stack, [L, ...] each; numba reads it as it is. Products are `Int8Weight`s, the rest is fp32."""

    attention_norm: Array
    qkv: Array
    qkv_scale: Array
    #: [L, 0] where there is none.
    qkv_bias: Array
    output: Array
    output_scale: Array
    ffn_norm: Array
    gate: Array
    gate_scale: Array
    up: Array
    up_scale: Array
    down: Array
    down_scale: Array

    @classmethod
    def of(cls, layers: Iterable[Layer], count: int) -> Weights:
        """Rounds `count` layers, one at a time."""
        parts: dict[str, Array] = {}
        for i, layer in enumerate(layers):
            for name, part in _rounded(layer).items():
                if name not in parts:
                    parts[name] = np.empty((count, *part.shape), part.dtype)
                parts[name][i] = part
        return cls(**parts)


def _rounded(layer: Layer) -> dict[str, Array]:
    """A layer's share of each of `Weights`."""
    bias = layer.qkv_bias if layer.qkv_bias is not None else torch.empty(0)
    parts = {"attention_norm": layer.attention_norm, "ffn_norm": layer.ffn_norm, "qkv_bias": bias}
    arrays: dict[str, Array] = {name: part.float().numpy() for name, part in parts.items()}
    for name in ("qkv", "output", "gate", "up", "down"):
        arrays[name], arrays[f"{name}_scale"] = Int8Weight.of(getattr(layer, name))
    return arrays


class _Rooms(NamedTuple):
    """Where N rows lie between the stages of a layer."""

    qkv: Array
    attended: Array
    gate: Array
    up: Array
    #: The inputs of the products as integers: of the width, of the heads, of the ffn, padded; and their steps.
    narrow: Array
    mixed: Array
    wide: Array
    #: [S, N], for as many segments as the widest of them has.
    steps: Array


class _PlanArrays(NamedTuple):
    """A `Plan` as numba reads it."""

    query_start: Array
    token_start: Array
    context_start: Array
    own_page: Array
    own_at: Array
    query_token: Array
    query_slot: Array
    position: Array
    enter: Array
    leave: Array
    group: Array
    branch: Array
    context_page: Array
    context_first: Array
    context_end: Array
    context_back: Array
    context_block: Array
    context_bias: Array
    pages: Array


class Team:
    """Threads that work on one compiled function together, the caller among them; they sleep in between, and end with
    the team."""

    def __init__(self, threads: int) -> None:
        self._shared = _Shared()
        helpers = [
            threading.Thread(target=_help, args=(self._shared,), name="infill-cpu", daemon=True)
            for _ in range(threads - 1)
        ]
        for helper in helpers:
            helper.start()
        self._helpers = len(helpers)
        # At the end of the process, too: a thread that came back from compiled code after the interpreter had gone
        # would end the process with an abort.
        weakref.finalize(self, self._shared.end, helpers)

    def run(self, function: Callable[..., None], phases: int, *arguments: Any, alone: bool = False) -> None:
        """Runs function(sync, *arguments) with the team; sync counts, for so many phases, the pieces of work that are
        taken and those that are done. Returns when all are done; a helper that comes later finds nothing to do.

        alone: without helpers, for what is so short that one that loses its core would cost more than it gives.
        """
        shared, work = self._shared, (np.zeros(2 * phases, np.int64), *arguments)
        with shared.running:
            if self._helpers and not alone:
                shared.work = (function, work)
                shared.start.release(self._helpers)
            function(*work)
            shared.work = None  # what it holds may go


class _Shared:
    """What a team's threads know of it."""

    def __init__(self) -> None:
        self.start = threading.Semaphore(0)
        self.running = threading.Lock()
        self.work: tuple[Callable[..., None], tuple[Any, ...]] | None = None
        self.ended = False

    def end(self, helpers: Sequence[threading.Thread]) -> None:
        """Ends the helpers and waits for them, and for the work that is going on; no other begins."""
        self.ended = True
        self.running.acquire(timeout=5)
        for _ in helpers:
            self.start.release()
        for helper in helpers:
            if helper is not threading.current_thread():
                helper.join(5)


def _help(shared: _Shared) -> None:
    while True:
        shared.start.acquire()
        if shared.ended:
            return
        if work := shared.work:
            work[0](*work[1])


@dataclass(frozen=True, slots=True)
class Int8Stack:
    """Decoder layers in int8 on the CPU. Bit for bit the same rows, whatever else is in the batch."""

    weights: Weights
    ffn: int
    heads: int
    kv_heads: int
    head_size: int
    eps: float
    team: Team

    def __call__(self, x: Tensor, plan: Plan, pool: KVPool, rope: Rope, first: int, end: int) -> Tensor:
        """The residual stream fp32 [N, width] after layers `first` to `end` - 1; keys and values go into the pool,
        which is fp16 with `transposed` keys. The scale of the scores is expected to be in the query weights."""
        n, w, ffn = len(x), self.weights, self.ffn
        # What is compiled takes addresses and checks nothing.
        assert pool.keys.dtype == torch.float16, "the pool is fp16"
        assert pool.keys.stride(-2) == 1, "the pool's keys are transposed"
        assert pool.keys.shape[2:] == (self.kv_heads, PAGE, self.head_size), "the pool is of another model"
        assert n == len(plan.query_token) == int(plan.query_start[-1]), "the plan is of another pass"
        assert self.head_size % HEAD_SIZES == 0
        rope.reserve(plan.positions)
        x = x.clone(memory_format=torch.contiguous_format)
        outs = (self.heads + 2 * self.kv_heads) * self.head_size
        self.team.run(
            _layers,
            _PHASES * (end - first),
            x.numpy(),
            w,
            _PlanArrays(*(getattr(plan, name).numpy() for name in _PlanArrays._fields)),
            first,
            end,
            pool.keys.data_ptr(),
            pool.values.data_ptr(),
            2 * self.kv_heads * PAGE * self.head_size,
            pool.keys.shape[1],
            rope.table.numpy(),
            plan.bias_right,
            self.heads,
            self.kv_heads,
            self.head_size,
            self.eps,
            _Rooms(
                qkv=np.empty((n, outs), np.float32),
                attended=np.empty((n, self.heads * self.head_size), np.float32),
                gate=np.empty((n, ffn), np.float32),
                up=np.empty((n, ffn), np.float32),
                narrow=np.empty((n, 2 * w.qkv.shape[2]), np.int16),
                mixed=np.empty((n, 2 * w.output.shape[2]), np.int16),
                wide=np.empty((n, 2 * w.down.shape[2]), np.int16),
                steps=np.empty((_segments(2 * max(w.qkv.shape[2], w.output.shape[2], w.down.shape[2])), n), np.float32),
            ),
        )
        return x


class Int8Head:
    """The product with a tied embedding in int8, and `unmask` fused with it: the logits are never written."""

    def __init__(self, weight: Int8Weight, vocab: int, team: Team) -> None:
        self._weight, self._vocab, self._team = weight, vocab, team

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden [N, D] -> fp32 logits [N, V]."""
        x = hidden.float().contiguous()
        out = torch.empty(len(x), self._vocab)
        w, scale = self._weight
        self._team.run(_logits, 2, x.numpy(), w, scale, *self._room(len(x)), out.numpy())
        return out

    def _room(self, rows: int) -> tuple[Array, Array]:
        """For rows as integers, and their steps."""
        ins = self._weight.ins
        return np.empty((rows, ins), np.int16), np.empty((_segments(ins), rows), np.float32)

    def unmask(self, hidden: Tensor, head: Head, *, temperature: float, allowed: Allowed | None) -> Unmasked:
        """`infill_kernels.unmask` without noise and soft embedding."""
        check_temperature(temperature)
        x = hidden.float().contiguous()
        n = len(x)
        w, scale = self._weight
        bias = torch.zeros(self._vocab).masked_fill_(~head.free, -torch.inf)
        if allowed is None:
            every = torch.ones(1, self._vocab, dtype=torch.bool)
            allowed = Allowed(every, torch.full((n,), -1, dtype=torch.int32))
        assert len(allowed.row) == n, "the sets are of other rows"
        assert allowed.mask.shape[1] == self._vocab, "the sets are of another vocabulary"
        out = np.empty((-(-self._vocab // HEAD_CHUNK), n, 4))
        self._team.run(
            _head,
            2,
            x.numpy(),
            w,
            scale,
            bias.numpy(),
            allowed.mask.numpy(),
            allowed.row.numpy(),
            1 / temperature,
            head.softcap or 0.0,
            *self._room(n),
            out,
            alone=n <= ALONE,
        )
        # The pieces become one: exp(y - best) = exp(y - top) exp(top - best). Of equal tops the lowest id wins.
        tops, tokens, sums, means = out.transpose(2, 0, 1)
        top = tops.max(0)
        token = np.where(tops == top, tokens, np.inf).min(0)
        lower = np.maximum(tops - top, -1e4)
        share = np.exp(lower)
        total = (share * sums).sum(0)
        mean = (share * (means + lower * sums)).sum(0) / total
        ids = torch.from_numpy(token.astype(np.int64))
        floats = np.stack([1 / total, top + np.log(total), np.maximum(np.log(total) - mean, 0.0)])
        prob, lse, entropy = torch.from_numpy(floats.astype(np.float32))
        return Unmasked(token=ids, sample=ids, prob=prob, lse=lse, entropy=entropy)
