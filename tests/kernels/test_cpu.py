"""The compiled CPU kernels against the references, at odd shapes and at their limits."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numba
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from infill_kernels import (
    PAGE,
    Head,
    KVPool,
    Part,
    Placed,
    Rope,
    canvas_attention,
    plan,
    rotate_and_store,
)
from infill_kernels.unmask import unmask as reference
from test_attention import tree

cpu = pytest.importorskip("infill_kernels.cpu", reason="numba is not installed")
pytestmark = pytest.mark.skipif(not cpu.available(), reason="this processor has no int8 kernels")

WIDTH, HEADS, KV_HEADS, SIZE, EPS = 51, 6, 2, 32, 1e-5
LAYERS = 2


@pytest.fixture(scope="module")
def team():
    return cpu.Team(2)


def dequantised(rounded, outs, ins):
    values = rounded.values.transpose(0, 2, 1, 3).reshape(len(rounded.scale), -1)
    return torch.from_numpy((values * rounded.scale[:, None])[:outs, :ins])


class Stack:
    """A random stack in int8, and the same spelled out in torch with the rounded weights."""

    def __init__(self, team, ffn, biased):
        random = torch.Generator().manual_seed(0)
        draw = lambda *size: torch.randn(*size, generator=random) / size[-1] ** 0.5
        norm = lambda: torch.rand(WIDTH, generator=random) + 0.5
        self.sizes = {
            "qkv": ((HEADS + 2 * KV_HEADS) * SIZE, WIDTH),
            "output": (WIDTH, HEADS * SIZE),
            "gate": (ffn, WIDTH),
            "up": (ffn, WIDTH),
            "down": (WIDTH, ffn),
        }
        layers = []
        for _ in range(LAYERS):
            matrices = {name: draw(*size) for name, size in self.sizes.items()}
            bias = torch.randn(self.sizes["qkv"][0], generator=random) if biased else None
            layers.append(cpu.Layer(attention_norm=norm(), ffn_norm=norm(), qkv_bias=bias, **matrices))
        self.biases = [layer.qkv_bias for layer in layers]
        self.weights = cpu.Weights.of(layers, LAYERS)
        self.run = cpu.Int8Stack(self.weights, ffn, HEADS, KV_HEADS, SIZE, EPS, team)
        self.rope = Rope(SIZE, 10_000.0, positions=4)

    def matrix(self, name, i):
        rounded = cpu.Int8Weight(getattr(self.weights, name)[i], getattr(self.weights, f"{name}_scale")[i])
        return dequantised(rounded, *self.sizes[name])

    def spelled_out(self, x, of_pass, pool):
        for i in range(LAYERS):
            norm = lambda name, i=i: torch.from_numpy(getattr(self.weights, name)[i])
            h = F.rms_norm(x, (WIDTH,), norm("attention_norm"), EPS)
            qkv = F.linear(h, self.matrix("qkv", i), self.biases[i]).view(len(x), -1, SIZE)
            q = rotate_and_store(qkv, pool.keys[i], pool.values[i], of_pass, self.rope)
            attended = canvas_attention(q, pool.keys[i], pool.values[i], of_pass, self.rope, scale=1.0)
            x = x + attended.reshape(len(x), -1) @ self.matrix("output", i).T
            h = F.rms_norm(x, (WIDTH,), norm("ffn_norm"), EPS)
            x = x + (F.silu(h @ self.matrix("gate", i).T) * (h @ self.matrix("up", i).T)) @ self.matrix("down", i).T
        return x


#: With a bias and a width of the FFN that is rounded in three segments, or without either.
@pytest.fixture(scope="module", params=[(71, False), (2 * cpu.SEGMENT + 3, True)], ids=["narrow", "wide"])
def stack(team, request):
    return Stack(team, *request.param)


def garbage_pool():
    pool = KVPool(LAYERS, KV_HEADS, SIZE, 40, torch.float16, transposed=True)
    pool.keys.fill_(torch.nan), pool.values.fill_(torch.nan)
    return pool


canvases = st.tuples(
    st.integers(2, 40),
    st.integers(0, 4),
    st.integers(0, 3),
    st.sampled_from([0, 5, 31]),
    st.lists(st.sampled_from([0, 1, 33, 64]), max_size=3),
)


@settings(max_examples=12, deadline=None)
@given(shapes=st.lists(canvases, min_size=1, max_size=3), seed=st.integers(0, 2**16))
def test_the_stack_agrees_with_the_references(stack, shapes, seed):
    random = torch.Generator().manual_seed(seed)
    pools = garbage_pool(), garbage_pool()
    parts = []
    for left, masks, branch, at, lengths in shapes:
        contexts = []
        for i, length in enumerate(lengths):
            pages = [pools[0].take() for _ in range(-(-length // PAGE))]
            contexts.append(Placed(pages, min(i, length), length, (0, -70, -9)[i], (0.0, 1.0, -0.5)[i], i > 0))
            for slot in range(length):
                k, v = torch.randn(2, LAYERS, KV_HEADS, SIZE, generator=random)
                for pool in pools:
                    pool.keys[:, pages[slot // PAGE], :, slot % PAGE] = k
                    pool.values[:, pages[slot // PAGE], :, slot % PAGE] = v
        positions, parents, classes = tree(100, left, masks, branch)
        pages = [pools[0].take() for _ in range(-(-(at + len(positions)) // PAGE))]
        parts.append(Part(positions, parents, classes, len(positions), pages, at, contexts))
    of_pass = plan(parts, -1.0)
    x = torch.randn(sum(part.queries for part in parts), WIDTH, generator=random)
    got = stack.run(x, of_pass, pools[0], stack.rope, 0, LAYERS)
    expected = stack.spelled_out(x, of_pass, pools[1])
    # Activations of 14 bits, and a pool of fp16 that both write.
    torch.testing.assert_close(got, expected, rtol=0.01, atol=0.03)
    half_way = stack.run(x, of_pass, pools[0], stack.rope, 0, 1)
    assert torch.equal(stack.run(half_way, of_pass, pools[0], stack.rope, 1, LAYERS), got)


@pytest.mark.parametrize(("rows", "vocab", "width"), [(1, 64, 40), (5, 1001, 71), (9, 193, 32)])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("scale", [1.0, 1000.0])
def test_the_head_agrees_with_the_reference(team, rows, vocab, width, softcap, scale):
    random = torch.Generator().manual_seed(rows)
    rounded = cpu.Int8Weight.of(torch.randn(vocab, width, generator=random))
    exact = dequantised(rounded, vocab, width)
    banned = torch.rand(vocab, generator=random) < 0.3
    served = Head(exact, softcap, banned, cpu.Int8Head(rounded, vocab, team))
    plain = Head(exact, softcap, banned)
    # Whole numbers that 14 bits hold exactly: what differs then is the arithmetic after the product.
    hidden = torch.randint(-8191, 8192, (rows, width), generator=random).float()
    hidden[:, 0] = 8191.0
    hidden *= scale / 8191
    only = torch.zeros(vocab, dtype=torch.bool)
    only[(~banned).nonzero()[-2:]] = True
    for allowed in (None, served.allow(rows, {0: only})):
        got = served.project.unmask(hidden, served, temperature=0.7, allowed=allowed)
        expected = reference(hidden.double(), plain, temperature=0.7, allowed=allowed)
        torch.testing.assert_close(got.lse, expected.lse, rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(got.prob, expected.prob, rtol=2e-2, atol=1e-5)
        torch.testing.assert_close(got.entropy, expected.entropy, rtol=2e-2, atol=1e-3)
        if softcap is None:  # under a cap ties are many
            assert torch.equal(got.token, expected.token)
        assert not banned[got.token].any()
    torch.testing.assert_close(served.project(hidden), hidden @ exact.T, rtol=1e-4, atol=1e-3 * scale)


def test_what_does_not_fit_together_is_refused(stack, team):
    """Compiled code would read beside what it is given."""
    positions, parents, classes = tree(100, 3, 0, 0)
    pool = garbage_pool()
    of_pass = plan([Part(positions, parents, classes, 3, [pool.take()], 0, [])])
    with pytest.raises(AssertionError, match="another pass"):
        stack.run(torch.zeros(4, WIDTH), of_pass, pool, stack.rope, 0, LAYERS)
    other = KVPool(LAYERS, KV_HEADS, 2 * SIZE, 4, torch.float16, transposed=True)
    with pytest.raises(AssertionError, match="another model"):
        stack.run(torch.zeros(3, WIDTH), of_pass, other, stack.rope, 0, LAYERS)
    weight = torch.ones(100, 32)
    head = Head(weight, project=cpu.Int8Head(cpu.Int8Weight.of(weight), 100, team))
    allowed = head.allow(2, {1: torch.ones(100, dtype=torch.bool)})
    with pytest.raises(AssertionError, match="other rows"):
        head.project.unmask(torch.ones(3, 32), head, temperature=1.0, allowed=allowed)


def test_of_equal_logits_the_lowest_id_wins(team):
    rounded = cpu.Int8Weight.of(torch.ones(1000, 32))
    head = Head(torch.ones(1000, 32), banned=torch.arange(1000) < 7, project=cpu.Int8Head(rounded, 1000, team))
    assert head.project.unmask(torch.ones(3, 32), head, temperature=1.0, allowed=None).token.tolist() == [7, 7, 7]


def test_rounding_keeps_the_largest_and_the_zeros():
    weight = torch.tensor([[0.0, 0.0, 0.0], [1.0, -2.0, 0.5]])
    rounded = cpu.Int8Weight.of(weight)
    assert rounded.values.shape == (1, 2, cpu.OUTS, 2)
    values = rounded.values.transpose(0, 2, 1, 3).reshape(cpu.OUTS, 4)
    assert values[:2].tolist() == [[0, 0, 0, 0], [64, -127, 32, 0]]
    assert not values[2:].any()


@pytest.mark.parametrize("ins", [2 * cpu.SEGMENT, 2 * cpu.SEGMENT + 2, 5001])
def test_sums_that_would_leave_32_bits_are_exact(team, ins):
    weight, x = torch.ones(40, ins), torch.ones(3, ins)
    x[2, -1] = 0.5
    product = cpu.Int8Head(cpu.Int8Weight.of(weight), 40, team)
    torch.testing.assert_close(product(x), x @ weight.T, rtol=1e-6, atol=0)


def test_an_outlier_coarsens_its_own_segment_only(team):
    ins = 2 * cpu.SEGMENT
    weight, x = torch.zeros(1, ins), torch.randn(1, ins, generator=torch.Generator().manual_seed(0))
    weight[0, cpu.SEGMENT :] = 1.0
    product = cpu.Int8Head(cpu.Int8Weight.of(weight), 1, team)
    alone = product(x)
    x[0, 0] = 1e4
    assert torch.equal(product(x), alone)


def test_a_matrix_is_rounded_alike_however_it_is_cut(monkeypatch):
    weight = torch.randn(3 * cpu.OUTS + 5, 7, generator=torch.Generator().manual_seed(0))
    whole = cpu.Int8Weight.of(weight)
    monkeypatch.setattr(cpu, "ROUNDED", cpu.OUTS)
    for part, same in zip(cpu.Int8Weight.of(weight), whole, strict=True):
        assert np.array_equal(part, same)


def test_a_team_does_not_wait_for_a_helper_that_is_late():
    """The helper comes, but loses its core before it takes anything; later it finds nothing to do."""
    team, entered, gate, left = cpu.Team(2), threading.Event(), threading.Event(), threading.Event()

    def work(sync, out):
        helper = threading.current_thread() is not threading.main_thread()
        if helper:
            entered.set()
            gate.wait(10)
        else:
            assert entered.wait(10)
        while (piece := int(sync[0])) < len(out):
            sync[0] += 1
            out[piece] += 1
        if helper:
            left.set()

    out = np.zeros(5)
    team.run(work, 1, out)
    assert out.tolist() == [1.0] * 5
    assert not left.is_set()
    gate.set()
    assert left.wait(10)
    assert out.tolist() == [1.0] * 5


def test_where_no_folder_can_be_written_to_they_are_compiled_all_the_same(tmp_path):
    package = tmp_path / "infill_kernels"
    shutil.copytree(Path(cpu.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "__pycache__").touch()
    nowhere = str(package / "__pycache__" / "home")
    script = """
import numpy as np
from infill_kernels import cpu
row = np.zeros(4, np.int16)
cpu._quantise(np.array([1.0, -2.0, 0.5], np.float32), row)
print(cpu.__file__, row.tolist())
"""
    told = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env=os.environ | {"HOME": nowhere, "XDG_CACHE_HOME": nowhere, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert told.stdout.split(maxsplit=1) == [str(package / "cpu.py"), "[4096, -8191, 2048, 0]\n"]


def test_the_threads_of_a_team_end_with_it():
    before = set(threading.enumerate())
    team = cpu.Team(3)
    helpers = set(threading.enumerate()) - before
    assert len(helpers) == 2
    del team
    for helper in helpers:
        helper.join(10)
        assert not helper.is_alive()


def test_a_helper_that_still_works_is_waited_for_at_the_end_of_the_process():
    """What is registered first is called last: by then it is done."""
    script = """
import atexit, threading, time
atexit.register(lambda: print([thread.name for thread in threading.enumerate()]))
from infill_kernels import cpu
came = threading.Event()
def work(sync):
    if threading.current_thread() is threading.main_thread():
        came.wait(10)
    else:
        came.set()
        time.sleep(0.5)
team = cpu.Team(2)
team.run(work, 1)
"""
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert told.stdout.strip() == "['MainThread']"


def test_where_numba_may_not_compile_these_kernels_are_not_there(monkeypatch):
    monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
    assert not cpu.available()
