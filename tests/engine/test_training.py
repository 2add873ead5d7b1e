"""Training: that the model that learns is the one that serves, what rows are made of, and that a run can be ended."""

from __future__ import annotations

import gzip
import json
import math
import random
import re
import signal
from dataclasses import asdict, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from infill_engine import adapter
from infill_engine.core import Canvas, Contexts, ModelError, complete
from infill_engine.smollm import END_ID, MASK_ID, SINK_ID, SPECIALS, Shape, SmolDenoiser
from infill_engine.tokenizer import LineTokenizer
from infill_engine.training import share as training_share
from infill_engine.training.model import Row, Trainee, Window, _Matrix
from infill_engine.training.rows import GapRecord, Mix, WindowRecord, window
from infill_engine.training.train import Run, TrainConfig

SHAPE = Shape(layers=2, width=24, heads=6, kv_heads=2, head_size=4, ffn=40, vocab=256 + SPECIALS)


class Bytes:
    """A vocabulary of single bytes behind the special ids; a line's last word may go on."""

    tokens = [b""] * SPECIALS + [bytes([i]) for i in range(256)]
    joins_newlines = False

    def encode(self, text: str) -> list[int]:
        return [b + SPECIALS for b in text.encode()]

    def last_piece(self, text: str) -> str:
        return text[len(text.rstrip("abcdefghijklmnopqrstuvwxyz")) :]


TOKENIZER = LineTokenizer(Bytes())


def random_weights(s: Shape = SHAPE, seed: int = 0) -> dict[str, torch.Tensor]:
    chance = torch.Generator().manual_seed(seed)
    draw = lambda *size: torch.randn(*size, generator=chance) / math.sqrt(size[-1])
    queries, kv = s.heads * s.head_size, s.kv_heads * s.head_size
    sizes = {
        "attn_q": (queries, s.width),
        "attn_k": (kv, s.width),
        "attn_v": (kv, s.width),
        "attn_output": (s.width, queries),
        "ffn_gate": (s.ffn, s.width),
        "ffn_up": (s.ffn, s.width),
        "ffn_down": (s.width, s.ffn),
    }
    weights = {"token_embd.weight": draw(s.vocab, s.width) * 5, "output_norm.weight": torch.rand(s.width) + 0.5}
    for i in range(s.layers):
        weights |= {f"blk.{i}.{name}.weight": draw(*size) for name, size in sizes.items()}
        weights |= {f"blk.{i}.{name}.weight": torch.rand(s.width) + 0.5 for name in ("attn_norm", "ffn_norm")}
    return weights


WEIGHTS = random_weights()


def trainee(seed: int = 0, spread: float = 0.0) -> Trainee:
    """In fp32; with `spread` the updates are not nothing."""
    made = Trainee(WEIGHTS, 3, seed, dtype=torch.float32, shape=SHAPE)
    chance = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter += torch.randn(parameter.shape, generator=chance) * spread
    made.merge()
    return made


TEXT = """\
def area(width, height):
    # of a rectangle
    return width * height


def sides(width, height):
    total = width + height
    return 2 * total


print(area(3, 4), sides(3, 4))
"""
GAPS = [
    GapRecord("rest", TEXT.index("th * height"), TEXT.index("\n\n\ndef sides")),
    GapRecord("lines", TEXT.index("total = "), TEXT.index("\n\n\nprint")),
    GapRecord("nothing", TEXT.index("\n    return 2"), TEXT.index("\n    return 2")),
    GapRecord("inner", TEXT.index("3, 4), s"), TEXT.index("), sides(3")),
]
RECORD = WindowRecord("p", "python", "a.py", TEXT, "def other():\n    return 1\n", GAPS)


def still(record: WindowRecord = RECORD) -> Window:
    made = window(record, TOKENIZER, random.Random(0), Mix(), still=True)
    assert made is not None
    return made


def served(model: SmolDenoiser, of: Window, row: Row) -> torch.Tensor:
    """What serving predicts for a row: the rows from its first prediction on."""
    encode = lambda tokens: complete(model.encode(tokens, complete(model.encode((), None))))
    prefix = encode(list(of.stream[: row.origin]))
    blocks = [encode(list(block)) for block in (row.block, of.snippet if row.snippet else ()) if block]
    left = next(i for i, target in enumerate(row.targets) if target >= 0) + 1
    middle = tuple(row.tokens[left : row.known])
    sizes = {seen - left: row.groups.count(g) for g, seen in enumerate(row.seen)}
    masks = tuple(sizes.get(at, 0) for at in range(len(middle) + 1))
    canvas = Canvas(row.origin, tuple(row.tokens[:left]), 256, proposal=middle, masks=masks)
    (hidden,), _ = model.denoise([canvas], [Contexts(prefix, tuple(blocks))], [None])
    return hidden


@pytest.mark.parametrize("spread", [0.0, 0.1])
def test_what_learns_predicts_as_what_serves(spread):
    learns, of = trainee(spread=spread), still()
    weights = {name: tensor.clone() for name, tensor in WEIGHTS.items()}
    adapter.merge(weights, learns.adapter(), MASK_ID, END_ID)
    serves = SmolDenoiser(weights, "fp32", "cpu", SHAPE)
    with torch.no_grad():
        hidden, index = learns(of)
    predicted = dict(zip(index.tolist(), hidden, strict=True))
    start = 0
    for row in of.rows:
        own = [predicted[start + i] for i, target in enumerate(row.targets) if target >= 0]
        torch.testing.assert_close(torch.stack(own), served(serves, of, row), rtol=1e-4, atol=1e-4)
        start += len(row.tokens)


def test_a_gradient_is_that_of_the_sum():
    x, w = torch.randn(5, 4, requires_grad=True), torch.randn(3, 4)
    a, b = torch.randn(2, 4, requires_grad=True), torch.randn(3, 2, requires_grad=True)
    with torch.no_grad():
        merged = w + b @ a
    grads = torch.autograd.grad(_Matrix.apply(x, merged, a, b).square().sum(), (x, a, b))
    plain = torch.autograd.grad((x @ (w + b @ a).T).square().sum(), (x, a, b))
    for one, other in zip(grads, plain, strict=True):
        torch.testing.assert_close(one, other)


def test_the_gradient_of_a_window_is_the_slope_of_its_loss():
    learns, of = trainee(spread=0.1), still()
    weighted = lambda: sum(
        float(w * n)
        for w, n in zip(
            [w for row in of.rows for w, t in zip(row.weights, row.targets, strict=True) if t >= 0],
            learns.loss(of, learns(of)).nats.tolist(),
            strict=True,
        )
    )
    learns.learn(of, 1.0)
    slopes = []
    for parameter in (learns.factors["blk_1_attn_qkv_a"], learns.factors["blk_0_ffn_down_b"], learns.mask_row):
        # Along the gradient the slope is far above what fp32 rounds; along a random line it may be near 0.
        direction, step = parameter.grad / parameter.grad.norm(), 3e-3
        # Contexts are cached when serving and carry no gradient, so their share of the slope is taken out: layer 0's
        # updates reach them too.
        expected = float((parameter.grad * direction).sum())
        with torch.no_grad():
            kept = learns._contexts(of)
            learns._contexts = lambda _, kept=kept: kept  # type: ignore[method-assign]
            parameter += step * direction
            learns.merge()
            above = weighted()
            parameter -= 2 * step * direction
            learns.merge()
            below = weighted()
            parameter += step * direction
            learns.merge()
            del learns._contexts
        slopes.append((expected, (above - below) / (2 * step)))
    for expected, measured in slopes:
        assert measured == pytest.approx(expected, rel=0.05, abs=2e-3)


def test_end_learns_its_row():
    learns, of = trainee(), still()
    learns.learn(of, 1.0)
    assert learns.end_row.grad is not None
    before = learns.loss(of, learns(of))
    with torch.no_grad():
        learns.end_row -= 0.05 * learns.end_row.grad
    after = learns.loss(of, learns(of))
    ends = before.targets == END_ID
    assert after.nats[ends].mean() < before.nats[ends].mean()


def test_rows_hold_the_truth_and_nothing_beyond_it():
    of = still()
    assert len(of.rows) == len(GAPS)
    for row, gap in zip(of.rows, GAPS, strict=True):
        answers = [t for t, ahead in zip(row.targets, row.ahead, strict=True) if t >= 0 and not ahead]
        text = TOKENIZER.text(answers[:-1]).decode()
        before = TOKENIZER.text([*of.stream[1 : row.origin], *row.tokens[: row.known - len(answers) + 1]]).decode()
        assert answers[-1] == END_ID
        assert before + text == TEXT[: gap.end]
        after = TOKENIZER.text(list(row.block)[1:]).decode()
        assert TEXT[gap.end :].startswith(after)
        assert row.block[0] == SINK_ID


def test_masks_predict_what_stands_behind_theirs():
    for row in still().rows:
        left = next(i for i, target in enumerate(row.targets) if target >= 0) + 1
        answers = [*row.tokens[left : row.known], END_ID]
        for i in range(row.known, len(row.tokens)):
            known = row.seen[row.groups[i]] - left
            assert row.tokens[i] == MASK_ID
            assert row.targets[i] == answers[known + row.ahead[i]]
            assert row.positions[i] == row.origin + left + known + row.ahead[i] - 1


def test_healed_rows_are_restricted_to_what_the_cursor_line_holds():
    row = still().rows[0]  # within a word
    (first, *_) = sorted(row.allowed)
    assert row.targets[first] == TOKENIZER.codec.tokens.index(b"w")
    assert row.allowed[first].sum() == 1


@given(st.integers(0, 10**6))
def test_any_draw_gives_rows_whose_weights_share_out_the_loss(seed):
    of = window(RECORD, TOKENIZER, random.Random(seed), Mix())
    assert of is not None
    shares = [0.0, 0.0]
    for row in of.rows:
        for ahead, weight, target in zip(row.ahead, row.weights, row.targets, strict=True):
            shares[ahead > 0] += weight
            assert target >= 0 or weight == 0
    assert shares == pytest.approx([Mix().dense, 1 - Mix().dense])


def test_an_adapter_survives_its_file(tmp_path):
    path = tmp_path / "adapter.safetensors"
    tensors = trainee(spread=0.1).adapter()
    adapter.save(tensors, {"step": "3"}, path)
    for name, tensor in adapter.load(path).items():
        torch.testing.assert_close(tensor, tensors[name], rtol=1e-2, atol=1e-3)


def test_training_goes_on_from_an_adapter():
    learned, again = trainee(spread=0.1), trainee(seed=5)
    again.start(learned.adapter())
    of = still()
    torch.testing.assert_close(again(of)[0], learned(of)[0])
    with pytest.raises(ModelError, match="same rank"):
        Trainee(WEIGHTS, 4, dtype=torch.float32, shape=SHAPE).start(learned.adapter())


def test_a_share_of_an_adapter_stands_between_the_base_and_all_of_it(tmp_path, monkeypatch):
    whole, none, half = (tmp_path / f"{name}.safetensors" for name in ("whole", "none", "half"))
    adapter.save(trainee(spread=0.1).adapter(), {"step": "3"}, whole)
    for share, out in (("0", none), ("0.5", half)):
        monkeypatch.setattr("sys.argv", ["share", str(whole), share, "--out", str(out)])
        training_share.main()
    assert adapter.card(half) == {"step": "3", "share": "0.5"}
    merged = {}
    for path in (whole, none, half):
        merged[path] = {name: tensor.clone() for name, tensor in WEIGHTS.items()}
        adapter.merge(merged[path], adapter.load(path), MASK_ID, END_ID)
    for name, tensor in WEIGHTS.items():
        if name != "token_embd.weight":
            torch.testing.assert_close(merged[none][name], tensor)
            between = (merged[whole][name] + tensor) / 2
            torch.testing.assert_close(merged[half][name], between, rtol=1e-2, atol=1e-3)
        else:
            torch.testing.assert_close(merged[half][name], merged[whole][name])
    monkeypatch.setattr("sys.argv", ["share", str(whole), "1.5", "--out", str(half)])
    with pytest.raises(SystemExit):
        training_share.main()


@pytest.mark.parametrize("content", [b"", b"nothing of that kind"])
def test_a_file_that_is_no_adapter_is_refused(tmp_path, content):
    path = tmp_path / "adapter.safetensors"
    path.write_bytes(content)
    with pytest.raises(ModelError, match="no adapter"):
        adapter.load(path)


def test_an_adapter_that_training_has_lost_is_refused(tmp_path):
    path = tmp_path / "adapter.safetensors"
    tensors = trainee(spread=0.1).adapter()
    name = next(name for name in tensors if name.endswith(".b"))
    tensors[name][0, 0] = float("nan")
    adapter.save(tensors, {}, path)
    with pytest.raises(ModelError, match=f"NaN or infinity in {re.escape(name)}"):
        adapter.load(path)


def test_an_adapter_of_another_base_is_refused():
    tensors = Trainee(random_weights(wide := replace(SHAPE, width=32)), 3, dtype=torch.float32, shape=wide).adapter()
    with pytest.raises(ModelError, match="does not fit"):
        adapter.merge({n: t.clone() for n, t in WEIGHTS.items()}, tensors, MASK_ID, END_ID)


@pytest.fixture
def gaps(tmp_path):
    path = tmp_path / "gaps.jsonl.gz"
    record = {**{f: getattr(RECORD, f) for f in ("package", "language", "path", "text", "snippet")}}
    line = json.dumps({**record, "gaps": [{"made": g.made, "start": g.start, "end": g.end} for g in GAPS]})
    with gzip.open(path, "wt") as file:
        file.write(f"{line}\n" * 3)
    return path


class Clock:
    """Each look at it is a second later than the last."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        self.seconds += 1.0
        return self.seconds


def train(gaps, folder, monkeypatch, steps, stop_at=None) -> Trainee:
    """Trains for `steps` seconds, a step a second, or until a signal comes after `stop_at` of them."""
    config = TrainConfig(steps / 60, warmup_steps=2, measured=1, lr=1e-2)
    learns = trainee()
    told = []
    run = Run(learns, TOKENIZER, gaps, gaps, folder, config, told.append)
    monkeypatch.setattr("infill_engine.training.train.time.monotonic", Clock())
    if stop_at is not None:
        step = run._step

        def stopping():
            done = step()
            if run._progress.step == stop_at:
                signal.raise_signal(signal.SIGTERM)
            return done

        monkeypatch.setattr(run, "_step", stopping)
    run.train()
    return learns


def test_a_run_that_is_ended_and_taken_up_again_gives_what_it_would_have_given(gaps, tmp_path, monkeypatch):
    whole = train(gaps, tmp_path / "whole", monkeypatch, 6)
    train(gaps, tmp_path / "parts", monkeypatch, 6, stop_at=3)
    assert not [line for line in (tmp_path / "parts" / "log.jsonl").read_text().splitlines() if '"step": 6' in line]
    parts = train(gaps, tmp_path / "parts", monkeypatch, 6)
    for (name, one), (_, other) in zip(whole.named_parameters(), parts.named_parameters(), strict=True):
        torch.testing.assert_close(one, other, msg=name)


def test_training_lowers_the_loss(gaps, tmp_path, monkeypatch):
    train(gaps, tmp_path / "run", monkeypatch, 40)
    facts = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    first, *_, last = (one for one in facts if one["what"] == "held")
    assert last["dense"] < first["dense"] - 0.5
    assert last["mask1"] < first["mask1"] - 0.5
    assert last["end"] < first["end"] - 0.5


def test_the_log_says_what_was_asked(gaps, tmp_path, monkeypatch):
    train(gaps, tmp_path / "run", monkeypatch, 2)
    start = json.loads((tmp_path / "run" / "log.jsonl").read_text().splitlines()[0])
    assert start["config"] == json.loads(json.dumps(asdict(TrainConfig(2 / 60, warmup_steps=2, measured=1, lr=1e-2))))


@pytest.mark.parametrize("wrong", [{"minutes": 0}, {"minutes": 1, "decay_minutes": 2}, {"minutes": 1, "rank": 0}])
def test_a_run_that_makes_no_sense_is_refused(wrong):
    with pytest.raises(ValueError, match="must be"):
        TrainConfig(**wrong)
