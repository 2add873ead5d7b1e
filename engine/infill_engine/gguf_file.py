"""A GGUF file, mapped: what it says of itself, and its matrices as groups of integers. Knows the format, no model.

The `gguf` package reads a vocabulary string by string through numpy, 8 s for 49,152 tokens and their merges; this reads
it in one pass. A quantised tensor keeps its integers: each block of the file is one or several groups with a scale and
perhaps an offset, so nothing is rounded but the scales, to fp16.

    Q4_0  q s - 8 s,  Q5_0  (q - 16) s,  Q8_0  q s                 32 to a group
    Q4_1, Q5_1  q s + m                                            32 to a group
    Q4_K, Q5_K  q (d a) - (e b), a and b of 6 bits                 32 to a group, 256 to a block
    Q6_K  (q - 32) (d a), a of 8 bits                              16 to a group, 256 to a block

Source: the GGUF specification and ggml's block layouts (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from infill_kernels.stored import Dense, Grouped, Stored, relative_error
from torch import Tensor

from infill_engine.core import ModelError

Array = npt.NDArray[Any]

#: struct's letters of the metadata's scalar types, by their numbers; 8 is a string, 9 an array.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
#: Dimensions that a tensor may have, and bytes of a string: what is beyond is no GGUF file.
_MOST_DIMENSIONS, _MOST_BYTES = 4, 1 << 28


class _Layout(NamedTuple):
    """How a type of tensors lies in the file."""

    name: str
    #: Numbers and bytes of a block.
    numbers: int
    bytes: int


_FLOATS = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
_LAYOUTS = {
    0: _Layout("F32", 1, 4),
    1: _Layout("F16", 1, 2),
    2: _Layout("Q4_0", 32, 18),
    3: _Layout("Q4_1", 32, 20),
    6: _Layout("Q5_0", 32, 22),
    7: _Layout("Q5_1", 32, 24),
    8: _Layout("Q8_0", 32, 34),
    12: _Layout("Q4_K", 256, 144),
    13: _Layout("Q5_K", 256, 176),
    14: _Layout("Q6_K", 256, 210),
    30: _Layout("BF16", 1, 2),
}


class Entry(NamedTuple):
    """A tensor of the file."""

    #: The outermost dimension first, as torch has it.
    shape: tuple[int, ...]
    kind: int
    #: Bytes from the beginning of the file, and how many.
    start: int
    size: int


class GgufFile:
    """One file. Its tensors are views of the mapped file."""

    def __init__(self, path: Path) -> None:
        """Raises `ModelError` for a file that is none, is cut short, or holds types that are not read."""
        self.path = path
        try:
            with open(path, "rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise ModelError(f"{path} cannot be read: {error}") from None
        self._at = 0
        try:
            self.facts, self.tensors = self._header()
        except (struct.error, UnicodeDecodeError, IndexError, OverflowError, ValueError) as error:
            raise ModelError(f"{path} is no whole GGUF file ({error}): download it again") from None
        for name, entry in self.tensors.items():
            if entry.start + entry.size > len(self._map):
                raise ModelError(
                    f"{path} is cut short: {name} ends at byte {entry.start + entry.size} of {len(self._map)}: "
                    "download it again"
                )

    def tensor(self, name: str) -> Stored:
        """A tensor in its own form, on the host; floating ones as they lie in the file."""
        entry = self.tensors[name]
        if entry.kind in _FLOATS:
            if not entry.size:
                return Dense(torch.empty(entry.shape, dtype=_FLOATS[entry.kind]))
            flat = torch.frombuffer(self._map, dtype=torch.uint8, count=entry.size, offset=entry.start)
            return Dense(flat.view(_FLOATS[entry.kind]).view(entry.shape))
        layout = _LAYOUTS[entry.kind]
        raw = np.frombuffer(self._map, np.uint8, entry.size, entry.start)
        return _kept(_GROUPED[layout.name](raw.reshape(-1, layout.bytes), entry.shape))

    def rounding(self, name: str, rows: int) -> float:
        """The relative error of `tensor` in its first rows: of a quantised one the scales are rounded, to fp16."""
        entry = self.tensors[name]
        if entry.kind in _FLOATS or not entry.size:
            return 0.0
        layout, ins = _LAYOUTS[entry.kind], entry.shape[-1]
        count = min(rows, entry.size // layout.bytes * layout.numbers // ins)
        raw = np.frombuffer(self._map, np.uint8, count * ins // layout.numbers * layout.bytes, entry.start)
        exact = _GROUPED[layout.name](raw.reshape(-1, layout.bytes), (count, ins))
        return relative_error(_kept(exact), exact.rows(0, count, torch.float32))

    def served_bytes(self, name: str) -> int:
        """What `tensor` of it takes."""
        entry = self.tensors[name]
        return _served(_LAYOUTS[entry.kind].name, int(np.prod(entry.shape, dtype=np.int64)), entry.size)

    def kind(self, name: str) -> str:
        """The name of its type, such as Q4_K."""
        return _LAYOUTS[self.tensors[name].kind].name

    def release(self, name: str) -> None:
        """Lets go of the memory in which the system holds what was read of a tensor."""
        entry = self.tensors[name]
        release(self._map, entry.start, entry.size)

    def _header(self) -> tuple[dict[str, Any], dict[str, Entry]]:
        magic, version = self._read("<4sI")
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError("it does not begin as one")
        count, facts_count = self._read("<QQ")
        facts = {}
        for _ in range(facts_count):
            name = self._string()
            (kind,) = self._read("<I")
            facts[name] = self._value(kind)
        infos = [self._info() for _ in range(count)]
        align = int(facts.get("general.alignment", 32))
        base = -(-self._at // align) * align
        tensors = {}
        for name, shape, kind, offset in infos:
            layout = _LAYOUTS.get(kind)
            if layout is None:
                known = ", ".join(one.name for one in _LAYOUTS.values())
                raise ModelError(f"{self.path}: {name} is of type {kind}, which is not read: use a file of {known}")
            numbers = int(np.prod(shape, dtype=np.int64))
            if shape and shape[-1] % layout.numbers:
                raise ValueError(f"{name} has rows of {shape[-1]} in blocks of {layout.numbers}")
            tensors[name] = Entry(shape, kind, base + offset, numbers // layout.numbers * layout.bytes)
        return facts, tensors

    def _info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        (dimensions,) = self._read("<I")
        if dimensions > _MOST_DIMENSIONS:
            raise ValueError(f"{name} has {dimensions} dimensions")
        shape = self._read(f"<{dimensions}Q")
        kind, offset = self._read("<IQ")
        return name, shape[::-1], kind, offset

    def _read(self, form: str) -> tuple[Any, ...]:
        values = struct.unpack_from(form, self._map, self._at)
        self._at += struct.calcsize(form)
        return values

    def _string(self) -> str:
        (size,) = self._read("<Q")
        if size > _MOST_BYTES or self._at + size > len(self._map):
            raise ValueError("a string is longer than the file")
        self._at += size
        return self._map[self._at - size : self._at].decode()

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            inner, count = self._read("<IQ")
            if count > len(self._map):
                raise ValueError("a list is longer than the file")
            if inner in _SCALARS:
                return list(self._read(f"<{count}{_SCALARS[inner]}"))
            return [self._value(inner) for _ in range(count)]
        if kind not in _SCALARS:
            raise ValueError(f"metadata of type {kind}")
        return self._read(f"<{_SCALARS[kind]}")[0]


def release(mapped: mmap.mmap, start: int, size: int) -> None:
    """Lets the system forget the whole pages of a part of a mapped file; they are read again where they are needed."""
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (start + size) // mmap.PAGESIZE * mmap.PAGESIZE - first
    if length > 0 and hasattr(mmap, "MADV_DONTNEED"):
        mapped.madvise(mmap.MADV_DONTNEED, first, length)


def _served(kind: str, numbers: int, size: int) -> int:
    """Bytes of the groups that a quantised tensor becomes: integers, and two bytes a scale and an offset."""
    per_group = {
        "Q4_0": (4, 32, 2), "Q4_1": (4, 32, 2), "Q5_0": (8, 32, 1), "Q5_1": (8, 32, 2), "Q8_0": (8, 32, 1),
        "Q4_K": (4, 32, 2), "Q5_K": (8, 32, 2), "Q6_K": (8, 16, 1),
    }  # fmt: skip
    if kind not in per_group:
        return size
    bits, group, numbers_a_group = per_group[kind]
    return numbers * bits // 8 + 2 * numbers_a_group * (numbers // group)


def _halves(raw: Array, first: int, count: int = 1) -> Array:
    """fp16 numbers [blocks, count] at byte `first` of each block, as fp32."""
    return np.ascontiguousarray(raw[:, first : first + 2 * count]).view(np.float16).astype(np.float32)


def _put(shape: tuple[int, ...], codes: Array, scale: Array, offset: Array | None, bits: int) -> Grouped:
    """codes [blocks, numbers], scale and offset fp32 [blocks, groups], in the order of the numbers."""

    def shaped(x: Array) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(x)).view(*shape[:-1], -1)

    if bits == 4:
        packed = codes[:, ::2] | codes[:, 1::2] << 4
        values = shaped(packed)
    else:
        values = shaped(codes.view(np.int8))
    return Grouped(values, shaped(scale), None if offset is None else shaped(offset))


def _kept(exact: Grouped) -> Grouped:
    """With scales in fp16, as they are served."""
    return replace(exact, scale=exact.scale.half(), offset=None if exact.offset is None else exact.offset.half())


def _low_high(bytes_: Array) -> Array:
    """[blocks, n] -> [blocks, 2 n]: the lower halves of the bytes, then the upper ones."""
    return np.concatenate([bytes_ & 15, bytes_ >> 4], 1)


def _q4_0(raw: Array, shape: tuple[int, ...]) -> Grouped:
    scale = _halves(raw, 0)
    return _put(shape, _low_high(raw[:, 2:]), scale, -8 * scale, 4)


def _q4_1(raw: Array, shape: tuple[int, ...]) -> Grouped:
    return _put(shape, _low_high(raw[:, 4:]), _halves(raw, 0), _halves(raw, 2), 4)


def _five_bits(high: Array, low: Array) -> Array:
    """Codes [blocks, 32] of their lowest four bits, [blocks, 16], and the fifth ones, a bit each in 4 bytes."""
    codes: Array = _low_high(low) | np.unpackbits(high, axis=1, bitorder="little") << 4
    return codes


def _q5_0(raw: Array, shape: tuple[int, ...]) -> Grouped:
    codes = _five_bits(raw[:, 2:6], raw[:, 6:]).view(np.int8) - np.int8(16)
    return _put(shape, codes.view(np.uint8), _halves(raw, 0), None, 8)


def _q5_1(raw: Array, shape: tuple[int, ...]) -> Grouped:
    return _put(shape, _five_bits(raw[:, 4:8], raw[:, 8:]), _halves(raw, 0), _halves(raw, 2), 8)


def _q8_0(raw: Array, shape: tuple[int, ...]) -> Grouped:
    return _put(shape, raw[:, 2:], _halves(raw, 0), None, 8)


def _six_bits(raw: Array) -> tuple[Array, Array]:
    """Scales and minima [blocks, 8] of Q4_K and Q5_K: 6 bits each in 12 bytes."""
    low, middle, high = raw[:, :4], raw[:, 4:8], raw[:, 8:12]
    scales = np.concatenate([low & 63, (high & 15) | (low >> 2 & 48)], 1)
    minima = np.concatenate([middle & 63, (high >> 4) | (middle >> 2 & 48)], 1)
    return scales.astype(np.float32), minima.astype(np.float32)


def _runs(bytes_: Array) -> Array:
    """[blocks, 128] -> [blocks, 256]: of each 32 bytes the lower halves, then the upper ones."""
    runs = bytes_.reshape(len(bytes_), 4, 1, 32)
    return np.concatenate([runs & 15, runs >> 4], 2).reshape(len(bytes_), 256)


def _q4_k(raw: Array, shape: tuple[int, ...]) -> Grouped:
    scales, minima = _six_bits(raw[:, 4:16])
    return _put(shape, _runs(raw[:, 16:]), _halves(raw, 0) * scales, -_halves(raw, 2) * minima, 4)


def _q5_k(raw: Array, shape: tuple[int, ...]) -> Grouped:
    scales, minima = _six_bits(raw[:, 4:16])
    fifth = raw[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    codes = _runs(raw[:, 48:]) | fifth.reshape(len(raw), 256) << 4
    return _put(shape, codes, _halves(raw, 0) * scales, -_halves(raw, 2) * minima, 8)


def _q6_k(raw: Array, shape: tuple[int, ...]) -> Grouped:
    halves = raw[:, :128].reshape(len(raw), 2, 1, 64)
    low = np.concatenate([halves & 15, halves >> 4], 2).reshape(len(raw), 256)
    high = raw[:, 128:192].reshape(len(raw), 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    codes = (low | high.reshape(len(raw), 256) << 4).view(np.int8) - np.int8(32)
    scales = np.ascontiguousarray(raw[:, 192:208]).view(np.int8).astype(np.float32)
    return _put(shape, codes.view(np.uint8), _halves(raw, 208) * scales, None, 8)


#: Blocks [blocks, bytes] and the tensor's shape, read exactly.
_GROUPED: dict[str, Callable[[Array, tuple[int, ...]], Grouped]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
