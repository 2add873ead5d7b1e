"""Mean loss of the embedded model on Python: `python -m bench.loss [PACKAGE] [--bytes N]`. Proves the loader.

Reads the sources of an installed package, tokenised by line, in windows of 512 tokens that begin with the sink; each
token is predicted from those before it in its window. About 2 nats a token are right, 5 and more a wrong layout.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import time
from pathlib import Path

import torch
from infill_engine import models, smollm, weights
from infill_engine.core import Canvas, Contexts, complete
from infill_engine.fetch import ensure_weights
from infill_engine.tokenizer import LineTokenizer
from infill_kernels import logits
from rich.progress import track

WINDOW = 512


def source(package: str, size: int) -> str:
    """The first `size` characters of a package's modules, in order of their paths."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise SystemExit(f"{package} is not installed here: name another package")
    files = sorted(Path(spec.origin).parent.rglob("*.py"))
    return "".join(file.read_text(encoding="utf-8") for file in files)[:size]


@torch.inference_mode()
def total_loss(denoiser: smollm.SmolDenoiser, ids: list[int]) -> float:
    """Nats of all tokens, in one pass a window: all but the last are proposals, which are read as known."""
    nats = 0.0
    for at in track(range(0, len(ids), WINDOW), "encoding"):
        window = ids[at : at + WINDOW]
        canvas = Canvas(0, (smollm.SINK_ID,), len(window), proposal=tuple(window[:-1]))
        (hidden,), _ = denoiser.denoise([canvas], [Contexts(complete(denoiser.encode((), None)))], [None])
        scores = logits(hidden, denoiser.head).log_softmax(-1)
        nats -= scores[torch.arange(len(window)), torch.tensor(window)].sum().item()
    return nats


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.loss", description=__doc__)
    parser.add_argument("package", nargs="?", default="uvicorn")
    parser.add_argument("--bytes", type=int, default=100_000)
    arguments = parser.parse_args()
    path = ensure_weights(lambda message, progress: None)
    tensors, codec = weights.load(path, models.prepared(path, models.BASE))
    text = source(arguments.package, arguments.bytes)
    ids = LineTokenizer(codec).encode(text)
    size = len(text.encode())
    print(f"{arguments.package}: {size} bytes, {len(ids)} tokens\n")
    print("| type | nats/token | bits/byte | s |\n|---|---|---|---|")
    for dtype in smollm.cpu_dtypes():
        began = time.perf_counter()
        nats = total_loss(smollm.SmolDenoiser(tensors, dtype, "cpu", threads=2), ids)
        seconds = time.perf_counter() - began
        print(f"| {dtype} | {nats / len(ids):.3f} | {nats / size / math.log(2):.3f} | {seconds:.0f} |")


if __name__ == "__main__":
    main()
