"""Matrices as checkpoints keep them, and products with them: floating, groups of integers, FP8 with scales a block.

Knows tensors, nothing of files or models. What is kept in fewer bits is never widened as a whole: where torch has an
operator for the form on the device at hand, that multiplies; elsewhere `blocked` widens `BLOCK` outputs at a time.

    Grouped   w_ok = s_o,k/g c(q_ok) + t_o,k/g     q of 4 or 8 bits, c the identity or a table of 16 numbers
    Scaled    w_ok = s_o/b,k/d q_ok                q in e4m3, a scale for each b x d

Sources: groups of integers as in llama.cpp's K-quants (https://github.com/ggml-org/llama.cpp/pull/1684) and GPTQ (arXiv
2210.17323); FP8 in blocks of 128 x 128 as in DeepSeek-V3 (arXiv 2412.19437, section 3.3.2); the table of e2m1 from
OCP Microscaling 1.0, section 5.3.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from infill_kernels.fp8 import MULTIPLE, Fp8Linear, has_products

#: Outputs that are widened at a time where a device has no product for a form.
BLOCK = 1024
#: What the codes of NVFP4 stand for: e2m1, the sign in the highest bit.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
#: Sizes of groups that torch's products of 4 bits take.
INT4_GROUPS = (32, 64, 128, 256)


class Stored(Protocol):
    """A matrix [O, K], or several of one shape [E, O, K], in whatever form."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def nbytes(self) -> int:
        """Memory held."""

    def __getitem__(self, index: int) -> Stored:
        """One of several."""

    def rows(self, first: int, end: int, dtype: torch.dtype) -> Tensor:
        """The outputs `first` to `end` - 1 of one matrix, widened: [end - first, K]."""

    def to(self, device: torch.device | str) -> Stored: ...


class Linear(Protocol):
    """y = x W^T + b."""

    @property
    def nbytes(self) -> int:
        """Memory held."""

    def __call__(self, x: Tensor) -> Tensor:
        """x [N, K] -> [N, O] in x's dtype."""


@dataclass(frozen=True, slots=True)
class Dense:
    """Floating numbers as they are."""

    values: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    def __getitem__(self, index: int) -> Dense:
        return Dense(self.values[index])

    def rows(self, first: int, end: int, dtype: torch.dtype) -> Tensor:
        return self.values[first:end].to(dtype)

    def to(self, device: torch.device | str) -> Dense:
        return Dense(self.values.to(device))


@dataclass(frozen=True, slots=True)
class Grouped:
    """Integers with a scale, and perhaps an offset, for each group of neighbouring inputs."""

    #: int8 [..., O, K], or uint8 [..., O, K / 2] with two codes a byte, the first in the lower half.
    values: Tensor
    #: [..., O, K / g], any floating dtype.
    scale: Tensor
    #: Of the same shape; None: none.
    offset: Tensor | None = None
    #: fp32 [16], what the codes stand for; None: themselves.
    table: Tensor | None = None

    @property
    def bits(self) -> int:
        """Bits a number."""
        return 4 if self.values.dtype == torch.uint8 else 8

    @property
    def shape(self) -> tuple[int, ...]:
        *most, ins = self.values.shape
        return (*most, ins * 8 // self.bits)

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return self.shape[-1] // self.scale.shape[-1]

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scale.nbytes + (self.offset.nbytes if self.offset is not None else 0)

    def __getitem__(self, index: int) -> Grouped:
        offset = None if self.offset is None else self.offset[index]
        return replace(self, values=self.values[index], scale=self.scale[index], offset=offset)

    def to(self, device: torch.device | str) -> Grouped:
        moved = (None if x is None else x.to(device) for x in (self.values, self.scale, self.offset, self.table))
        return Grouped(*moved)  # type: ignore[arg-type]  # the first two are never None

    def codes(self, first: int = 0, end: int | None = None) -> Tensor:
        """Integers [..., O, K] of some outputs."""
        values = self.values[..., first:end, :]
        return unpack4(values) if self.bits == 4 else values

    def rows(self, first: int, end: int, dtype: torch.dtype) -> Tensor:
        scale = self.scale[..., first:end, :, None].float()
        codes = self.codes(first, end)
        numbers = codes.float() if self.table is None else self.table[codes.long()]
        wide = numbers.view(*numbers.shape[:-1], -1, self.group) * scale
        if self.offset is not None:
            wide += self.offset[..., first:end, :, None].float()
        flat: Tensor = wide.flatten(-2).to(dtype)
        return flat

    @classmethod
    def of(cls, weight: Tensor, bits: int, group: int) -> Grouped:
        """Rounds [..., O, K] to integers of 4 or 8 bits, symmetric about zero; group: inputs that share a scale, which
        divides K."""
        most = 127 if bits == 8 else 7
        exact = weight.float().reshape(*weight.shape[:-1], -1, group)
        scale = (exact.abs().amax(-1, keepdim=True) / most).clamp(min=1e-12)
        codes = (exact / scale).round().flatten(-2)
        if bits == 8:
            return cls(codes.to(torch.int8), scale.squeeze(-1))
        return cls(pack4((codes + 8).to(torch.uint8)), scale.squeeze(-1), -8 * scale.squeeze(-1))


@dataclass(frozen=True, slots=True)
class Scaled:
    """e4m3 with a scale for each block; one for all, or one an output, are blocks too."""

    #: e4m3 [..., O, K].
    values: Tensor
    #: fp32 [..., O', K'], a scale for each O / O' x K / K', the last ones perhaps for fewer.
    scale: Tensor
    #: Outputs and inputs of a block.
    block: tuple[int, int]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scale.nbytes

    def __getitem__(self, index: int) -> Scaled:
        return replace(self, values=self.values[index], scale=self.scale[index])

    def to(self, device: torch.device | str) -> Scaled:
        return replace(self, values=self.values.to(device), scale=self.scale.to(device))

    def rows(self, first: int, end: int, dtype: torch.dtype) -> Tensor:
        values = self.values[..., first:end, :]
        outs, ins = self.block
        scale = self.scale[..., first // outs : -(-end // outs), :]
        scale = scale.repeat_interleave(outs, -2)[..., first % outs : first % outs + values.shape[-2], :]
        scale = scale.repeat_interleave(ins, -1)[..., : values.shape[-1]]
        return (values.float() * scale).to(dtype)


def pack4(codes: Tensor) -> Tensor:
    """uint8 [..., K] below 16 -> uint8 [..., K / 2], the first of two in the lower half."""
    return codes[..., ::2] | codes[..., 1::2] << 4


def unpack4(packed: Tensor) -> Tensor:
    """The reverse of `pack4`."""
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)


def concatenated(parts: Sequence[Stored]) -> Stored | None:
    """Several matrices [O_i, K] as one, so that one product serves all; None where their forms do not go together."""
    if len(parts) == 1:
        return parts[0]
    first = parts[0]
    if isinstance(first, Dense):
        dense = [part.values for part in parts if isinstance(part, Dense)]
        return Dense(torch.cat(dense)) if len(dense) == len(parts) else None
    if isinstance(first, Grouped):
        alike = [
            part
            for part in parts
            if isinstance(part, Grouped)
            and (part.bits, part.group, part.offset is None, part.table is None)
            == (first.bits, first.group, first.offset is None, first.table is None)
        ]
        if len(alike) < len(parts):
            return None
        offsets = [part.offset for part in alike if part.offset is not None]
        return Grouped(
            torch.cat([part.values for part in alike]),
            torch.cat([part.scale for part in alike]),
            torch.cat(offsets) if offsets else None,
            first.table,
        )
    if isinstance(first, Scaled):
        if all(isinstance(part, Scaled) and part.scale.shape[-1] == 1 for part in parts):
            parts = [_an_output(part) for part in parts if isinstance(part, Scaled)]
            first = replace(first, block=(1, first.shape[-1]))
        blocks = [part for part in parts if isinstance(part, Scaled) and part.block == first.block]
        if len(blocks) < len(parts) or any(part.shape[0] % part.block[0] for part in blocks):
            return None
        return replace(
            first, values=torch.cat([part.values for part in blocks]), scale=torch.cat([part.scale for part in blocks])
        )
    return None


def _an_output(weight: Scaled) -> Scaled:
    """A matrix whose blocks are as wide as itself with a scale for each output: those of several, each with a scale of
    its own, go together so, and a GPU still multiplies them."""
    scale = weight.scale.repeat_interleave(weight.block[0], -2)[..., : weight.shape[-2], :]
    return replace(weight, scale=scale, block=(1, weight.shape[-1]))


def together(parts: Sequence[Stored]) -> Stored | None:
    """Several matrices of one shape [O, K] as [E, O, K]; None where their forms do not go together."""
    first = parts[0]
    if isinstance(first, Dense):
        dense = [part.values for part in parts if isinstance(part, Dense)]
        return Dense(torch.stack(dense)) if len(dense) == len(parts) else None
    if isinstance(first, Scaled):
        alike = [part for part in parts if isinstance(part, Scaled) and part.block == first.block]
        if len(alike) == len(parts):
            values, scale = (torch.stack(some) for some in zip(*((p.values, p.scale) for p in alike), strict=True))
            return replace(first, values=values, scale=scale)
    return None


def blocked(x: Tensor, weight: Stored) -> Tensor:
    """y = x W^T with `BLOCK` outputs of W widened to x's dtype at a time. x [N, K] -> [N, O]."""
    outs = weight.shape[0]
    y = x.new_empty(len(x), outs)
    for first in range(0, outs, BLOCK):
        end = min(first + BLOCK, outs)
        torch.mm(x, weight.rows(first, end, x.dtype).T, out=y[:, first:end])
    return y


def linear(weight: Stored, bias: Tensor | None = None) -> Linear:
    """The product with a matrix on its device, by torch's operator for its form where there is one. What is not needed
    for that is let go."""
    if isinstance(weight, Dense):
        return DenseLinear(weight.values, bias)
    product: Linear
    if isinstance(weight, Grouped) and Int4Linear.serves(weight):
        product = Int4Linear(weight)
    elif isinstance(weight, Scaled) and _multiplied(weight):
        product = Fp8Linear.kept(weight.values, weight.scale.expand(weight.shape[0], 1))
    else:
        return BlockedLinear(weight, bias)
    return product if bias is None else Biased(product, bias)


def stacked(weights: Sequence[Stored], bias: Tensor | None = None) -> Linear:
    """The product with several matrices [O_i, K], outputs side by side; one product where their forms allow it."""
    together = concatenated(weights)
    if together is not None:
        return linear(together, bias)
    product = SideBySide(tuple(map(linear, weights)))
    return product if bias is None else Biased(product, bias)


def _multiplied(weight: Scaled) -> bool:
    """Whether a GPU multiplies this in e4m3: with a scale an output, or one for all. On a CPU that rounds the rows of x
    and gains nothing."""
    outs, ins = weight.shape
    device = weight.values.device
    whole = weight.scale.shape[-1] == 1 and weight.scale.shape[-2] in (1, outs)
    return whole and outs % MULTIPLE == ins % MULTIPLE == 0 and device.type == "cuda" and has_products(device)


@dataclass(frozen=True, slots=True)
class DenseLinear:
    """`Linear` of floating numbers."""

    weight: Tensor
    bias: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class BlockedLinear:
    """`Linear` of any form, widened block by block."""

    weight: Stored
    bias: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        y = blocked(x, self.weight)
        return y if self.bias is None else y + self.bias


@dataclass(frozen=True, slots=True)
class SideBySide:
    """Several `Linear`s of the same rows, their outputs one after the other."""

    products: tuple[Linear, ...]

    @property
    def nbytes(self) -> int:
        return sum(product.nbytes for product in self.products)

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([product(x) for product in self.products], -1)


@dataclass(frozen=True, slots=True)
class Biased:
    """A `Linear` with something added."""

    product: Linear
    bias: Tensor

    @property
    def nbytes(self) -> int:
        return self.product.nbytes + self.bias.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return self.product(x) + self.bias


class Int4Linear:
    """`Linear` of 4 bits by torch's own product, whose formula is w = s (q - 8) + z."""

    def __init__(self, weight: Grouped) -> None:
        """Raises `ValueError` for what `serves` does not."""
        if not self.serves(weight):
            raise ValueError("torch has no product for this form of 4 bits")
        self._group = weight.group
        self._packed: Tensor
        self._both: Tensor
        zero = 8 * weight.scale + (weight.offset if weight.offset is not None else 0.0)
        both = torch.stack([weight.scale.float().T, zero.float().T], -1).contiguous()
        if weight.values.device.type == "cuda":
            high_first = (weight.values << 4) | (weight.values >> 4)
            self._packed = torch.ops.aten._convert_weight_to_int4pack(high_first, 8)
            self._both = both.bfloat16()
        else:
            self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(weight.codes().int(), 1)
            self._both = both

    @staticmethod
    def serves(weight: Grouped) -> bool:
        """Whether torch multiplies this on its device."""
        if weight.bits != 4 or weight.table is not None or weight.group not in INT4_GROUPS or len(weight.shape) != 2:
            return False
        outs, ins = weight.shape
        device = weight.values.device.type
        if device == "cuda":
            return outs % 8 == 0 and ins % 128 == 0 and torch.cuda.get_device_capability(weight.values.device) >= (8, 0)
        return device == "cpu" and outs % 16 == 0 and hasattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu")

    @property
    def nbytes(self) -> int:
        return self._packed.nbytes + self._both.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        if x.device.type == "cuda":
            y: Tensor = torch.ops.aten._weight_int4pack_mm(x.bfloat16(), self._packed, self._group, self._both)
        else:  # in fp32 the scales lose nothing; the product of bf16 rounds them
            y = torch.ops.aten._weight_int4pack_mm_for_cpu(x.float(), self._packed, self._group, self._both)
        return y.to(x.dtype)


def relative_error(weight: Stored, exact: Tensor) -> float:
    """||W - exact|| / ||exact|| in the Frobenius norm, of the first outputs of one matrix [O, K], or of several
    [E, O, K]; a block at a time."""
    matrices = [(weight, exact)] if exact.dim() == 2 else [(weight[i], exact[i]) for i in range(len(exact))]
    wrong = whole = 0.0
    for stored, true in matrices:
        for first in range(0, len(true), BLOCK):
            wanted = true[first : first + BLOCK].float()
            found = stored.rows(first, min(first + BLOCK, len(true)), torch.float32)
            wrong += float((found - wanted).square().sum())
            whole += float(wanted.square().sum())
    return (wrong / whole) ** 0.5 if whole else 0.0
