"""The real embedded model on the CPU: that it was read right, and that the served type costs nothing that shows."""

from __future__ import annotations

import inspect
import time

import pygls.server
import pytest
import torch
from infill_engine import smollm, weights
from infill_engine.config import EngineConfig
from infill_engine.core import Canvas, Contexts, complete
from infill_engine.engine import Engine
from infill_engine.fetch import ensure_weights
from infill_engine.memory import Memory
from infill_engine.models import physical_cores
from infill_engine.protocol import Candidate, InfillRequest
from infill_engine.tokenizer import LineTokenizer
from infill_kernels import logits

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    torch.set_num_threads(physical_cores())
    path = ensure_weights(lambda message, progress: None)
    return path, tmp_path_factory.mktemp("prepared") / "weights.safetensors"


@pytest.fixture(scope="module")
def loaded(files):
    return weights.load(*files)


@pytest.fixture(scope="module")
def engine(loaded) -> Engine:
    tensors, codec = loaded
    dtype = smollm.cpu_dtypes()[-1]
    denoiser = smollm.SmolDenoiser(tensors, dtype, "cpu", threads=physical_cores())
    return Engine("embedded", denoiser, codec, EngineConfig(), dtype=dtype)


def loss(denoiser: smollm.SmolDenoiser, ids: list[int]) -> float:
    """Mean nats a token when each is predicted from all before it, in one pass of proposals."""
    canvas = Canvas(0, (smollm.SINK_ID,), len(ids), proposal=tuple(ids[:-1]))
    with torch.inference_mode():
        (hidden,), _ = denoiser.denoise([canvas], [Contexts(complete(denoiser.encode((), None)))], [None])
        scores = logits(hidden, denoiser.head).log_softmax(-1)
    return -scores[torch.arange(len(ids)), torch.tensor(ids)].mean().item()


def test_the_weights_are_read_right(loaded):
    """Mean loss on Python that the model may or may not have seen: about 2 is right, 5 and more a wrong layout."""
    tensors, codec = loaded
    ids = LineTokenizer(codec).encode(inspect.getsource(pygls.server))[:700]
    exact = loss(smollm.SmolDenoiser(tensors, "fp32", "cpu"), ids)
    assert 1.0 < exact < 2.6
    if "int8" in smollm.cpu_dtypes():
        assert loss(smollm.SmolDenoiser(tensors, "int8", "cpu", threads=2), ids) == pytest.approx(exact, abs=0.01)


def test_a_second_start_reads_the_prepared_file(files, loaded):
    path, prepared = files
    assert prepared.exists()
    again, codec = weights.load(path, prepared)
    assert all(torch.equal(again[name], tensor) for name, tensor in loaded[0].items())
    assert codec.encode("def f(x):\n") == loaded[1].encode("def f(x):\n")


def test_a_prepared_file_that_was_cut_short_is_made_again(files, loaded):
    path, prepared = files
    whole = prepared.read_bytes()
    prepared.write_bytes(whole[: len(whole) // 2])
    again, _ = weights.load(path, prepared)
    assert torch.equal(again["output_norm.weight"], loaded[0]["output_norm.weight"])
    assert prepared.stat().st_size == len(whole)


def ask(engine: Engine, **fields) -> str:
    request = InfillRequest(client="test", document="test", deadline_ms=60_000, **fields)
    candidates = [e for e in engine.events(request, time.monotonic()) if isinstance(e, Candidate)]
    return candidates[-1].text


PREFIX = "import math\n\n\nclass Circle:\n    def __init__(self, radius):\n        self.radius = radius\n\n"
SUFFIX = "\n\n    def diameter(self):\n        return 2 * self.radius\n"


def test_it_fills_a_line(engine):
    text = ask(engine, prefix=PREFIX + "    def area(self):\n", head="        return math.", suffix=SUFFIX)
    assert text.startswith("pi * ")
    assert "self.radius" in text


@pytest.mark.parametrize("head", ["        ", "        ret", "        return"])
def test_a_half_written_word_is_finished(engine, head):
    text = ask(engine, prefix=PREFIX + "    def area(self):\n", head=head, suffix=SUFFIX)
    assert (head + text).startswith("        return ")


def test_a_body_ends_where_the_next_function_begins(engine):
    text = ask(engine, prefix=PREFIX, head="    def area(self):", suffix=SUFFIX, max_lines=8, min_indent=5)
    assert text.startswith("\n        ")
    assert "def diameter" not in text


@pytest.mark.parametrize("remembers", [False, True])
def test_proposals_change_the_passes_but_no_text(loaded, remembers):
    """The real model in its serving type, at places of a real file: what look-up or the memory and masks propose,
    however little they are sure of, against no proposals at all."""
    tensors, codec = loaded
    lines = inspect.getsource(pygls.server).splitlines()
    dtype = smollm.cpu_dtypes()[-1]
    told = []
    for proposals, masks in ((0, 0), (8, 0), (0, 3), (8, 3)):
        denoiser = smollm.SmolDenoiser(tensors, dtype, "cpu", threads=physical_cores())
        config = EngineConfig(proposal_tokens=proposals, masks=masks, mask_groups=3, mask_prob=0.0)
        memory = Memory(len(codec.tokens)) if remembers else None
        engine = Engine("embedded", denoiser, codec, config, dtype=dtype, memory=memory)
        texts, steps = [], 0
        for row in (60, 95, 130, 170):
            indent = len(lines[row]) - len(lines[row].lstrip())
            request = InfillRequest(
                client="test",
                document=str(row),
                prefix="\n".join(lines[row - 40 : row]) + "\n",
                head=lines[row][: indent + 2],
                suffix="\n" + "\n".join(lines[row + 1 : row + 12]),
                max_lines=4,
                max_tokens=48,
                deadline_ms=60_000,
            )
            *_, candidate, final = engine.events(request, time.monotonic())
            texts.append(candidate.text)
            steps += final.timing.steps
        told.append((texts, steps))
    (sequential, most), *proposing = told
    assert [texts for texts, _ in proposing] == [sequential] * len(proposing)
    assert all(steps <= most for _, steps in proposing)
    assert proposing[0][1] < most
