"""What training adds to the embedded model's base: low-rank updates of its matrices, and two rows of its embedding.

Each fused matrix W [O, I] of a layer gets an update b a, with a [R, I] and b [O, R] (Hu et al., LoRA, 2021, equation 3,
with the scale in the factors). MASK gets a row to be read by, END one to be written by. All is added to the dequantised
base in fp32 and rounded once, to the serving type, so serving knows nothing of an adapter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from infill_engine.core import ModelError

#: The fused matrices that are updated, each with the base's matrices whose rows it is made of, in order.
FUSED: Mapping[str, tuple[str, ...]] = {
    "attn_qkv": ("attn_q", "attn_k", "attn_v"),
    "attn_output": ("attn_output",),
    "ffn_gate_up": ("ffn_gate", "ffn_up"),
    "ffn_down": ("ffn_down",),
}

#: Names of the two rows [width] in the file.
MASK_ROW, END_ROW = "mask", "end"

#: The trained adapter that is installed with the engine.
EMBEDDED = Path(__file__).with_name("adapter.safetensors")


def factors(layer: int, name: str) -> tuple[str, str]:
    """The names in the file of a [R, I] and b [O, R] of a fused matrix."""
    return f"blk.{layer}.{name}.a", f"blk.{layer}.{name}.b"


def digest(path: Path) -> str:
    """Names the adapter's content; "" for one that is not there."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.exists() else ""


def load(path: Path) -> dict[str, Tensor]:
    """The tensors of an adapter, fp32. Raises `ModelError` for a file that is none."""
    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118 - not a dict
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path} is no adapter ({error}): reinstall infill-lsp") from None
    if MASK_ROW not in tensors or END_ROW not in tensors:
        raise ModelError(f"{path} is no adapter of the embedded model: reinstall infill-lsp")
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise ModelError(f"{path} holds NaN or infinity in {name}: train it again, or reinstall infill-lsp")
    return tensors


def card(path: Path) -> dict[str, str]:
    """What the file of an adapter says of how it came about. Raises `OSError` and `SafetensorError`."""
    with safe_open(path, "pt") as file:
        return dict(file.metadata() or {})


def save(tensors: Mapping[str, Tensor], card: Mapping[str, str], path: Path) -> None:
    """Writes an adapter in bf16; `card` says how it came about."""
    part = path.with_suffix(".part")
    save_file({name: tensor.to(torch.bfloat16).contiguous() for name, tensor in tensors.items()}, part, dict(card))
    part.replace(path)


def scaled(adapter: Mapping[str, Tensor], share: float) -> dict[str, Tensor]:
    """The adapter with a share of its updates, from 0 (the base, but for the two rows) to 1: between what was learned
    and what the base knew may lie what does better than either (Wortsman et al., WiSE-FT, 2022, section 3).
    Raises `ValueError` for any other share."""
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"the share of an adapter must be from 0 to 1, not {share}")
    return {name: tensor * share if name.endswith(".b") else tensor for name, tensor in adapter.items()}


def merge(weights: dict[str, Tensor], adapter: Mapping[str, Tensor], mask_id: int, end_id: int) -> None:
    """Adds an adapter to the base's weights, fp32 by their GGUF names, in place. Raises `ModelError` if it is not one
    of this base."""
    try:
        embedding = weights["token_embd.weight"]
        embedding[mask_id], embedding[end_id] = adapter[MASK_ROW], adapter[END_ROW]
        for key, a in adapter.items():
            if not key.endswith(".a"):
                continue
            blk, layer, name, _ = key.split(".")
            update, first = adapter[f"{key[:-1]}b"] @ a, 0
            for member in FUSED[name]:
                matrix = weights[f"{blk}.{layer}.{member}.weight"]
                matrix += update[first : first + len(matrix)]
                first += len(matrix)
    except (KeyError, ValueError, RuntimeError) as error:
        raise ModelError(f"the adapter does not fit the embedded model ({error}): reinstall infill-lsp") from None
