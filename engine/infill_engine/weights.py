"""The embedded model's files: a GGUF and an adapter in, tensors and a vocabulary out. Knows formats, no forward pass.

Reading the GGUF takes several seconds, most of it for a hundred thousand strings one by one. So what was read is kept
as one prepared safetensors file, which is mapped into memory: 0.2 s instead of 7.7 s, measured in one run.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from infill_engine import adapter
from infill_engine.core import ModelError
from infill_engine.smollm import (
    END_ID,
    INT8,
    MASK_ID,
    SINK_ID,
    SMOLLM2,
    SPECIALS,
    Shape,
    int8_available,
    quantised,
)
from infill_engine.tokenizer import BpeCodec

#: Raised when what stands in a prepared file changes.
_FORMAT = "5"


def load(path: Path, prepared: Path, trained: Path | None = None) -> tuple[dict[str, Tensor], BpeCodec]:
    """The weights by name, and the vocabulary: from `prepared` if it was made from the GGUF at `path` and the adapter
    at `trained`, otherwise from these, and then `prepared` is written where it can be. The weights are fp16 and, where
    this processor has the kernels, also those that are served in int8; they are mapped, so what a model does not use
    costs no memory. Without an adapter END is the base's own end of text, which the base puts where a file is over.

    Raises `ModelError` for a file that is not this model, or no adapter of it.
    """
    info = path.stat()
    digest = adapter.digest(trained) if trained else "none"
    source = f"{_FORMAT} {info.st_size} {info.st_mtime_ns} {int8_available()} {digest}"
    # Missing, cut short, or of another version: then it is made again.
    with contextlib.suppress(OSError, SafetensorError, KeyError, ValueError), safe_open(prepared, "pt") as file:
        facts = file.metadata()
        if facts["source"] == source:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
            return tensors, BpeCodec(json.loads(facts["vocab"]), _pairs(json.loads(facts["merges"])), SPECIALS)
    tensors, vocab, merges = read_gguf(path)
    if trained:
        adapter.merge(tensors, adapter.load(trained), MASK_ID, END_ID)
    else:
        tensors["token_embd.weight"][END_ID] = tensors["token_embd.weight"][SINK_ID]
    if int8_available():
        tensors |= quantised(tensors)
    tensors = {name: tensor if name.startswith(INT8) else tensor.half() for name, tensor in tensors.items()}
    facts = {"source": source, "vocab": json.dumps(vocab), "merges": json.dumps(merges)}
    with contextlib.suppress(OSError, SafetensorError):  # a full disk or a read-only cache costs seconds a start only
        _save(tensors, facts, prepared)
    return tensors, BpeCodec(vocab, _pairs(merges), SPECIALS)


def read_gguf(path: Path, shape: Shape = SMOLLM2) -> tuple[dict[str, Tensor], list[str], list[str]]:
    """The weights by name, the vocabulary, and the merges as "left right".

    They are the 4-bit weights dequantised, fp32. llama.cpp stores the rows of q and k in pairs (0, 1), (2, 3),
    ... of each head for its rotary layout; they are put back into halves here. A wrong order costs 3 nats a token.
    Raises `ModelError` for a file that is not this model.
    """
    try:
        reader = gguf.GGUFReader(path)
        tensors = {
            t.name: torch.from_numpy(np.array(gguf.dequantize(t.data, t.tensor_type), dtype=np.float32))
            for t in reader.tensors
        }
        for i in range(shape.layers):
            for name, heads in (("attn_q", shape.heads), ("attn_k", shape.kv_heads)):
                key = f"blk.{i}.{name}.weight"
                pairs = tensors[key].view(heads, shape.head_size // 2, 2, shape.width)
                tensors[key] = pairs.transpose(1, 2).reshape(heads * shape.head_size, shape.width)
        vocab = reader.fields["tokenizer.ggml.tokens"].contents()
        merges = reader.fields["tokenizer.ggml.merges"].contents()
        known = tensors["token_embd.weight"].shape == (shape.vocab, shape.width) and len(vocab) == shape.vocab
    except (OSError, ValueError, KeyError, IndexError, RuntimeError) as error:
        raise _wrong(path, f" ({error})") from None
    if not known:
        raise _wrong(path, "")
    return tensors, vocab, merges


def _wrong(path: Path, detail: str) -> ModelError:
    return ModelError(f"{path} is not the embedded model{detail}: delete it and run `infill-engine fetch`")


def _pairs(merges: list[str]) -> list[tuple[str, str]]:
    return [(left, right) for left, right in (merge.split(" ") for merge in merges)]


def _save(tensors: Mapping[str, Tensor], facts: dict[str, str], prepared: Path) -> None:
    prepared.parent.mkdir(parents=True, exist_ok=True)
    _sweep(prepared.parent)
    part = prepared.with_name(f"{prepared.name}.{os.getpid()}.part")
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, part, facts)
        part.replace(prepared)
    finally:
        part.unlink(missing_ok=True)


def _sweep(folder: Path) -> None:
    """Removes what processes that were killed while they saved have left: hundreds of megabytes each."""
    for part in folder.glob("*.part"):
        process = part.stem.rpartition(".")[2]
        try:
            os.kill(int(process), 0)
        except ProcessLookupError:
            part.unlink(missing_ok=True)
        except (ValueError, OverflowError, PermissionError):  # None of ours, or of a process that lives.
            continue
