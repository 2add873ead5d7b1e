"""The embedded model's forward pass on tiny random weights, against a plain causal transformer written out here."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from infill_engine.core import Canvas, Contexts, ModelError, complete
from infill_engine.smollm import (
    BLOCK_GATE,
    END_ID,
    MASK_ID,
    RIGHT_GATE,
    SINK_ID,
    Shape,
    SmolDenoiser,
    int8_available,
    quantised,
    serving_dtype,
)
from infill_kernels import unmask

SHAPE = Shape(layers=3, width=24, heads=6, kv_heads=2, head_size=4, ffn=40, vocab=64)


def random_weights(s: Shape, seed: int = 0) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    draw = lambda *size: torch.randn(*size, generator=random) / math.sqrt(size[-1])
    queries, kv = s.heads * s.head_size, s.kv_heads * s.head_size
    weights = {"token_embd.weight": draw(s.vocab, s.width) * 5, "output_norm.weight": torch.rand(s.width) + 0.5}
    for i in range(s.layers):
        sizes = {
            "attn_q": (queries, s.width),
            "attn_k": (kv, s.width),
            "attn_v": (kv, s.width),
            "attn_output": (s.width, queries),
            "ffn_gate": (s.ffn, s.width),
            "ffn_up": (s.ffn, s.width),
            "ffn_down": (s.width, s.ffn),
        }
        weights |= {f"blk.{i}.{name}.weight": draw(*size) for name, size in sizes.items()}
        weights |= {f"blk.{i}.{name}.weight": torch.rand(s.width) + 0.5 for name in ("attn_norm", "ffn_norm")}
    return weights


WEIGHTS = random_weights(SHAPE)


def transformer(tokens, positions, sees, bias=0.0, gated=None) -> torch.Tensor:
    """Hidden states [N, width] of one stack over all tokens at once. sees: bool [N, N]; gated: bool [N] keys whose
    scores get `bias`."""
    s = SHAPE
    w = {name: tensor.double() for name, tensor in WEIGHTS.items()}
    norm = lambda x, weight: x * (x.pow(2).mean(-1, keepdim=True) + s.eps).rsqrt() * weight
    inverse = s.rope_base ** (-torch.arange(0, s.head_size, 2).double() / s.head_size)
    angle = torch.tensor(positions).double()[:, None] * inverse
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]

    def rope(x):
        a, b = x[..., : s.head_size // 2], x[..., s.head_size // 2 :]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    embedding = w["token_embd.weight"].clone()
    embedding[END_ID] = embedding[SINK_ID]
    x, n = embedding[torch.tensor(tokens)], len(tokens)
    for i in range(s.layers):
        layer = lambda name, i=i: w[f"blk.{i}.{name}.weight"]
        h = norm(x, layer("attn_norm"))
        q = rope((h @ layer("attn_q").T).view(n, s.heads, s.head_size))
        k = rope((h @ layer("attn_k").T).view(n, s.kv_heads, s.head_size))
        v = (h @ layer("attn_v").T).view(n, s.kv_heads, s.head_size)
        k, v = (t.repeat_interleave(s.heads // s.kv_heads, 1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(s.head_size)
        if gated is not None:
            scores = scores + bias * gated.double()
        scores = scores.masked_fill(~sees, -math.inf)
        out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
        x = x + out.reshape(n, s.width) @ layer("attn_output").T
        h = norm(x, layer("ffn_norm"))
        x = x + (F.silu(h @ layer("ffn_gate").T) * (h @ layer("ffn_up").T)) @ layer("ffn_down").T
    return norm(x, w["output_norm.weight"])


@pytest.fixture(scope="module")
def model() -> SmolDenoiser:
    return SmolDenoiser(WEIGHTS, "fp32", "cpu", SHAPE)


def encode(model, tokens, chunk=64):
    kv = complete(model.encode((), None))
    for at in range(0, len(tokens), chunk):
        kv = complete(model.encode(tokens[at : at + chunk], kv))
    return kv


def close(actual, expected):
    torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-4)


TEXT = [SINK_ID, *range(20, 50), 21, 23, 29, 31]


@pytest.mark.parametrize("origin", [0, 1, 17, 34])
@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_prefix_and_canvas_together_are_the_plain_causal_model(model, origin, chunk):
    prefix = encode(model, TEXT[:origin], chunk)
    (hidden,), _ = model.denoise([Canvas(origin, tuple(TEXT[origin:]), 16)], [Contexts(prefix)], [None])
    n = len(TEXT)
    expected = transformer(TEXT, list(range(n)), torch.ones(n, n).tril().bool())
    close(hidden, expected[-1:])


def test_a_block_stands_before_the_prefix_without_its_sink(model):
    suffix = [40, 41, 42, 43, 44]
    prefix, block = encode(model, TEXT[:20]), encode(model, [SINK_ID, *suffix])
    (hidden,), _ = model.denoise([Canvas(20, tuple(TEXT[20:]), 16)], [Contexts(prefix, (block,))], [None])
    # One stack over sink, suffix, text: the block is causal in itself, the prefix does not see it, the canvas does.
    b, n = len(suffix) + 1, len(TEXT)
    sees = torch.ones(b + n, b + n).tril().bool()
    sees[b : b + 20, :b] = False
    sees[b + 20 :, 0] = False
    gated = torch.zeros(b + n, dtype=torch.bool)
    gated[1:b] = True
    only_canvas = torch.zeros(b + n, b + n)
    only_canvas[b + 20 :] = gated.double()
    expected = transformer([SINK_ID, *suffix, *TEXT], list(range(-b, n)), sees, BLOCK_GATE, only_canvas)
    close(hidden, expected[-1:])


def test_what_is_kept_from_pass_to_pass_changes_nothing(model):
    """Tokens committed one by one, with proposals right and wrong between, end where one pass over all of them ends."""
    prefix = encode(model, TEXT[:20])
    contexts = [Contexts(prefix, (encode(model, [SINK_ID, 40, 41]),))]
    canvas, state = Canvas(20, tuple(TEXT[20:25]), 16), [None]
    for token, proposal in zip(TEXT[25:], [(), (9, 9), (TEXT[27], TEXT[28]), (), (8,)] * 2, strict=False):
        hidden, state = model.denoise([Canvas(20, canvas.left, 16, canvas.committed, proposal)], contexts, state)
        assert len(hidden[0]) == 1 + len(proposal)
        canvas = canvas.commit([token])
    (stepwise,), _ = model.denoise([canvas], contexts, state)
    (at_once,), _ = model.denoise([canvas], contexts, [None])
    torch.testing.assert_close(stepwise, at_once, rtol=1e-4, atol=1e-4)


def test_proposals_predict_as_if_they_were_known(model):
    prefix = encode(model, TEXT[:20])
    canvas = Canvas(20, tuple(TEXT[20:25]), 16, proposal=tuple(TEXT[25:30]))
    (hidden,), _ = model.denoise([canvas], [Contexts(prefix)], [None])
    n = 30
    expected = transformer(TEXT[:n], list(range(n)), torch.ones(n, n).tril().bool())
    close(hidden, expected[24:30])


def test_masks_and_branches_do_not_touch_what_is_known(model):
    contexts = [Contexts(encode(model, TEXT[:20]))]
    plain = Canvas(20, tuple(TEXT[20:25]), 16, committed=(30, 31), proposal=(32,))
    (hidden,), _ = model.denoise([replace(plain, masks=(3, 4), branches=((1, (30, 33, 34)),))], contexts, [None])
    (expected,), _ = model.denoise([plain], contexts, [None])
    assert len(hidden) == 2 + 3 + 4 + 3
    torch.testing.assert_close(hidden[:2], expected, rtol=1e-4, atol=1e-4)


def test_a_group_of_masks_sees_the_text_it_stands_behind_and_itself_alone(model):
    """Whatever is proposed, and whatever else hangs there: each group as if the text before it were all there is."""
    contexts = [Contexts(encode(model, TEXT[:20]))]
    proposal = tuple(TEXT[25:29])
    canvas = Canvas(20, tuple(TEXT[20:25]), 16, proposal=proposal, masks=(2, 0, 3, 1), branches=((0, (TEXT[24], 33)),))
    (hidden,), _ = model.denoise([canvas], contexts, [None])
    for proposed, masks in enumerate(canvas.masks):
        alone = Canvas(20, canvas.left, 16, committed=proposal[:proposed], masks=(masks,))
        (expected,), _ = model.denoise([alone], contexts, [None])
        torch.testing.assert_close(hidden[canvas.group(proposed)], expected[1:], rtol=1e-4, atol=1e-4)
        tokens = [*TEXT[: 25 + proposed], *[MASK_ID] * masks]
        n = len(tokens)
        sees = torch.ones(n, n).tril().bool()
        sees[n - masks :] = True
        gated = torch.ones(n, n).triu(1)
        close(expected[1:], transformer(tokens, list(range(n)), sees, RIGHT_GATE, gated)[n - masks :])


def test_a_branch_reads_as_if_the_gap_had_ended_there_and_no_suffix_were_known(model):
    prefix = encode(model, TEXT[:20])
    block = encode(model, [SINK_ID, 50, 51])
    left = tuple(TEXT[20:25])
    branch = (31, 40, 41)
    canvas = Canvas(20, left, 16, committed=(30, 31, 32), branches=((1, branch),))
    (hidden,), _ = model.denoise([canvas], [Contexts(prefix, (block,))], [None])
    b, tokens = 3, [*TEXT[:25], 30, *branch]
    n = len(tokens)
    sees = torch.ones(b + n, b + n).tril().bool()
    sees[b : b + 20, :b] = False
    sees[b + 20 :, 0] = False
    sees[b + 26 :, :b] = False  # the branch does not see the block; what it follows does
    only_canvas = torch.zeros(b + n, b + n)
    only_canvas[b + 20 : b + 26, 1:b] = 1.0
    expected = transformer([SINK_ID, 50, 51, *tokens], list(range(-b, n)), sees, BLOCK_GATE, only_canvas)
    close(hidden[1:], expected[-3:])


def test_a_batch_is_each_canvas_alone(model):
    canvases = [Canvas(origin, tuple(TEXT[origin:end]), 16) for origin, end in ((0, 9), (20, 24), (12, 33))]
    contexts = [Contexts(encode(model, TEXT[: canvas.origin])) for canvas in canvases]
    together, _ = model.denoise(canvases, contexts, [None] * 3)
    for canvas, context, rows in zip(canvases, contexts, together, strict=True):
        (alone,), _ = model.denoise([canvas], [context], [None])
        torch.testing.assert_close(rows, alone, rtol=1e-4, atol=1e-4)


def test_truncating_a_context_is_never_having_encoded_the_rest(model):
    kv = encode(model, TEXT)
    kv.truncate(10)
    assert kv.length == 10
    kv = complete(model.encode(TEXT[10:20], kv))
    (again,), _ = model.denoise([Canvas(20, tuple(TEXT[20:]), 16)], [Contexts(kv)], [None])
    (fresh,), _ = model.denoise([Canvas(20, tuple(TEXT[20:]), 16)], [Contexts(encode(model, TEXT[:20]))], [None])
    torch.testing.assert_close(again, fresh, rtol=1e-5, atol=1e-5)


def test_control_tokens_are_banned_but_end(model):
    out = unmask(torch.randn(200, SHAPE.width, generator=torch.Generator().manual_seed(1)) * 9, model.head)
    produced = set(out.token.tolist())
    assert not produced & (set(range(17)) - {END_ID})
    assert END_ID in produced


WIDE = Shape(layers=3, width=96, heads=6, kv_heads=2, head_size=32, ffn=160, vocab=64)


@pytest.fixture(scope="module")
def models() -> tuple[SmolDenoiser, SmolDenoiser]:
    """One model in int8 and in fp32."""
    weights = random_weights(WIDE)
    weights |= quantised(weights, WIDE)
    return SmolDenoiser(weights, "int8", "cpu", WIDE, threads=2), SmolDenoiser(weights, "fp32", "cpu", WIDE)


@pytest.mark.skipif(not int8_available(), reason="this processor has no int8 kernels")
class TestInt8:
    """The same passes in int8: close to fp32, and bit for bit the same however they are cut."""

    @staticmethod
    def canvas(model, chunk, **more) -> tuple[Canvas, Contexts]:
        block = encode(model, [SINK_ID, 40, 41, 42], chunk)
        return Canvas(20, tuple(TEXT[20:25]), 16, **more), Contexts(encode(model, TEXT[:20], chunk), (block,))

    def test_is_close_to_fp32(self, models):
        rows = []
        for model in models:
            canvas, contexts = self.canvas(model, 64, proposal=tuple(TEXT[25:30]), branches=((0, (30, 33)),))
            (hidden,), _ = model.denoise([canvas], [contexts], [None])
            rows.append(hidden)
        assert (rows[0] - rows[1]).norm() < 0.05 * rows[
            1
        ].norm()  # a weight is off by 0.5% of the row's largest or less

    def test_no_row_depends_on_the_batch_nor_on_how_the_pass_is_cut(self, models):
        model, _ = models
        proposal = tuple(TEXT[25:30])
        canvas, contexts = self.canvas(model, 64, proposal=proposal)
        (at_once,), _ = model.denoise([canvas], [contexts], [None])
        masked = replace(canvas, masks=(3, 0, 2), branches=((0, (30, 33)),))
        (rows,), _ = model.denoise([masked], [contexts], [None])
        assert torch.equal(rows[: len(at_once)], at_once)
        other, beside = self.canvas(model, 7)
        both, _ = model.denoise([other, canvas], [beside, self.canvas(model, 3)[1]], [None, None])
        assert torch.equal(both[1], at_once)
        states = [None]
        for i in range(len(proposal) + 1):
            (row,), states = model.denoise([Canvas(20, canvas.left, 16, proposal[:i])], [contexts], states)
            assert torch.equal(row[0], at_once[i])

    def test_the_head_is_close_to_fp32(self, models):
        model, exact = models
        hidden = torch.randn(40, WIDE.width, generator=torch.Generator().manual_seed(1)) * 3
        out, expected = unmask(hidden, model.head), unmask(hidden, exact.head)
        torch.testing.assert_close(out.lse, expected.lse, rtol=0.01, atol=0.1)
        assert (out.token == expected.token).float().mean() > 0.9
        assert out.token.min() >= END_ID


@pytest.mark.parametrize(("dtype", "device"), [("float8", "cpu"), ("int8", "cuda"), ("", "cpu")])
def test_a_type_that_cannot_be_served_is_refused(dtype, device):
    with pytest.raises(ModelError, match="cannot be served"):
        serving_dtype(dtype, device)


def test_what_a_refusal_offers_can_be_served():
    with pytest.raises(ModelError) as refused:
        serving_dtype("bfloat16", "cpu")
    offered = str(refused.value).partition("use one of ")[2].split(", ")
    assert {"auto", "fp32"} <= set(offered)
    assert [serving_dtype(dtype, "cpu") for dtype in offered] == offered
