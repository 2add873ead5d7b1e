"""Filling gaps with several decoders, on a fake model over bytes."""

from __future__ import annotations

import gzip
import json
from argparse import Namespace
from collections import Counter
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from infill_engine.config import EngineConfig
from infill_engine.engine import Engine
from infill_engine.fake import FakeDenoiser
from infill_engine.tokenizer import ByteCodec
from infill_engine.training.corpus import Document

from bench import quality
from bench.filling import (
    DECK,
    KINDS,
    LANGUAGES,
    Case,
    Forced,
    Model,
    Row,
    Runner,
    held_out,
    suffix_as_text,
    with_suffix,
    without_suffix,
)
from bench.humaneval import FILES, Problem
from infill_lsp.gaps import Authored

ASKS = (with_suffix, without_suffix, suffix_as_text)
BEFORE, AFTER = "def add(a, b):\n    total = ", "\n    return total\n"


def case(truth: str = "a + b", before: str = BEFORE, after: str = AFTER) -> Case:
    missing = Authored("rest", len(before), len(before + truth))
    found = Case.of(0, Document("package", "python", "a.py", before + truth + after), missing)
    assert found is not None
    return found


def model(table: dict[str, str], lookahead: int = 0) -> Model:
    config = EngineConfig(model="fake", prefix_tokens=400, suffix_tokens=32)
    return Model(Engine("fake", FakeDenoiser(table, lookahead=lookahead), ByteCodec(), config))


class Fakes(Runner):
    """A runner of models that are there already."""

    def __init__(self, folder: Path, **fakes: Model) -> None:
        super().__init__({name: EngineConfig() for name in fakes}, folder, folder / "corpus")
        self.fakes = fakes

    def model(self, name: str) -> Model:
        return self.fakes[name]


#: How a function begins in languages with braces.
HEADERS = {
    "typescript": "function run(first, second)",
    "javascript": "function run(first, second)",
    "go": "func run(first int, second int)",
    "java": "class Run { void run(int first, int second)",
    "rust": "fn run(first: i32, second: i32)",
    "c": "void run(int first, int second)",
    "cpp": "void run(int first, int second)",
}


def written(language: str) -> str:
    """A document with places for gaps of all kinds, as the language's grammar reads it."""
    if header := HEADERS.get(language):
        body = "".join(
            f"    value_{i} = compute(value_{i - 1}, first, second);\n    if (value_{i}) {{\n"
            f"        call(first, {i});\n    }}\n\n"
            for i in range(1, 25)
        )
        return f"// What it does.\n{header} {{\n    value_0 = first;\n{body}}}\n{'}' if 'class' in header else ''}\n"
    body = "".join(
        f"    value_{i} = compute(value_{i - 1}, [first, second])\n    if value_{i}:\n        return [{i}]\n\n"
        for i in range(1, 25)
    )
    return f"# What it does.\ndef run(first, second):\n    value_0 = first\n{body}\n\ndef other():\n    pass\n"


def corpus(folder: Path) -> Path:
    with gzip.open(folder / "held.jsonl.gz", "wb") as file:
        for package in ("small", "large"):
            for language in LANGUAGES:
                file.write(msgspec.json.encode(Document(package, language, "a", written(language))) + b"\n")
    return folder


def test_decks_are_whole():
    assert sum(KINDS.values()) == sum(LANGUAGES.values()) == DECK
    assert KINDS["nothing"] / DECK == pytest.approx(0.06)


def test_gaps_are_drawn_by_seed_and_number_alone_in_the_shares_wanted(tmp_path):
    draw, again, other = (held_out(corpus(tmp_path), seed) for seed in (1, 1, 2))
    cases = [draw(i) for i in range(DECK)]
    assert [again(i).gap for i in (31, 3)] == [cases[31].gap, cases[3].gap]
    assert [other(i).gap for i in range(5)] != [of.gap for of in cases[:5]]
    assert Counter(of.made for of in cases) == KINDS
    assert Counter(of.snapshot.language for of in cases) == LANGUAGES


@pytest.mark.parametrize("ask", ASKS)
def test_nothing_of_the_truth_is_asked_with(ask):
    of = model({})
    for other in ("", "x", "\n".join("abcdefghijkl")):
        assert ask(case(other), of) == ask(case(), of)


def test_the_suffix_as_text_stands_above_the_prefix_and_both_fit_the_window():
    before = "".join(f"x{i} = {i}\n" for i in range(100)) + "y = "
    request = suffix_as_text(case(before=before, after=")\nlast\n" + 40 * "more\n"), model({}))
    assert request.prefix.startswith(")\nlast\n")
    assert "\n\nx" in request.prefix
    assert request.prefix.endswith("x99 = 99\n")
    assert len(request.prefix) <= 400
    assert len(request.prefix) > 380
    assert (request.head, request.tail, request.suffix) == ("y = ", "", "")
    assert suffix_as_text(case(after="\n"), model({})) == without_suffix(case(after="\n"), model({}))


def test_a_right_text_is_exact_and_a_wrong_one_is_not(tmp_path):
    runner = Fakes(tmp_path, right=model({"total = ": "a + b"}), wrong=model({"total = ": "a - b"}))
    right, wrong = (runner.fill(Row("", name, with_suffix), case()) for name in ("right", "wrong"))
    assert right.exact
    assert right.exact_model
    assert right.similarity == 1
    assert not wrong.exact
    assert wrong.similarity == pytest.approx(0.8)
    assert right.tokens == right.steps - 1 == len("a + b")  # the last step is for the end


def test_a_closer_that_is_written_again_is_none_of_the_text(tmp_path):
    runner = Fakes(tmp_path, fake=model({"f(": "a)"}))
    of = runner.fill(Row("", "fake", with_suffix), case("a", "f(", ")\n"))
    assert (of.shown, of.rest, of.exact) == ("a", ")", True)


def test_masks_and_lookup_change_no_text_but_the_passes(tmp_path):
    table = {"total = ": "first_value + second_value + first_value"}
    runner = Fakes(tmp_path, fake=model(table, lookahead=4))
    slow, masks, lookup = (
        runner.fill(Row("", "fake", with_suffix, **how), case()) for how in ({}, {"masks": True}, {"proposals": 4})
    )
    assert slow.shown == masks.shown == lookup.shown == table["total = "]
    assert slow.steps == slow.tokens + 1
    assert masks.steps < slow.steps
    assert lookup.steps < slow.steps


def test_no_decoder_profits_from_what_another_wrote_there(tmp_path):
    runner = Fakes(tmp_path, fake=model({"total = ": "a + b"}))
    for ask in (with_suffix, without_suffix):
        of = runner.fill(Row("", "fake", ask), case())
        assert of.steps == of.tokens + 1


def test_other_files_of_the_package_are_remembered_where_a_row_asks_for_it(tmp_path):
    text = "def area(width, height):\n    total = width * height + margin\n    return total\n"
    with gzip.open(tmp_path / "held.jsonl.gz", "wb") as file:
        for package, path, written in (("package", "a.py", ""), ("package", "b.py", text), ("other", "b.py", "")):
            file.write(msgspec.json.encode(Document(package, "python", path, written)) + b"\n")
    runner = Fakes(tmp_path, fake=model({"total = ": "width * height + margin"}))
    runner._corpus = tmp_path
    without = runner.fill(Row("", "fake", with_suffix, proposals=4), case())
    remembered = runner.fill(Row("", "fake", with_suffix, proposals=4, memory=True), case())
    elsewhere = runner.fill(Row("", "fake", with_suffix, proposals=4, memory=True), replace(case(), package="other"))
    assert without.shown == remembered.shown == elsewhere.shown == "width * height + margin"
    assert remembered.steps < without.steps == elsewhere.steps


@pytest.mark.parametrize(
    ("said", "truth", "ended"),
    [
        ("a + b", "a + b", True),
        ("a + b * c", "a + b", False),
        ("a - b", "a + b", True),
        ("a", "a + b", False),
        ("a\nb", "a + b", False),
        ("a + b\nc", "a + b", True),
    ],
)
def test_an_end_is_judged_with_the_truth_before_it(tmp_path, said, truth, ended):
    """A model that writes another operator goes on as if it had not, and ends there or too late."""
    table = {"total = ": said, "total = a +": " b"} if said == "a - b" else {"total = ": said}
    runner = Fakes(tmp_path, fake=model(table))
    of = runner.fill(Row("", "fake", with_suffix, forced=True), case(truth))
    assert of.ended is ended
    assert of.agreed is not None
    assert of.forced is not None
    assert of.agreed == of.forced - (said in ("a", "a - b", "a\nb"))


def test_the_truth_is_written_over_several_lines(tmp_path):
    truth = "a\n    total += b"
    runner = Fakes(tmp_path, fake=model({"x": "", "total = ": truth, "+= b": ""}))
    of = runner.fill(Row("", "fake", without_suffix, forced=True), case(truth, "def f(a, b):\n    total = "))
    assert of.forced == of.agreed
    assert of.chosen == "a"  # the product asks for one line there, so its end cannot be right
    assert of.ended is False


def test_a_forced_policy_begins_anew_with_each_gap(tmp_path):
    runner = Fakes(tmp_path, fake=model({"total = ": "a + b"}))
    row = Row("", "fake", with_suffix, forced=True)
    first = runner.fill(row, case())
    second = runner.fill(row, case())
    assert (first.forced, first.agreed) == (second.forced, second.agreed) == (5, 5)
    assert Forced(model({}).codec, 1).truth == ()


def test_a_run_goes_on_where_it_was_broken_off(tmp_path):
    rows = [
        Row("a", "fake", with_suffix),
        Row("the same", "fake", with_suffix),
        Row("b", "fake", without_suffix),
    ]
    drawn: list[int] = []

    def draw(index: int) -> Case:
        drawn.append(index)
        return replace(case(), index=index)

    def run(count: int) -> Fakes:
        runner = Fakes(tmp_path, fake=model({"total = ": "a + b"}))
        assert list(runner.run(rows, "suite", range(count), draw)) == list(range(1, count + 1))
        return runner

    run(3)
    files = sorted(tmp_path.iterdir())
    assert len(files) == 2  # rows that differ in name only are one
    torn = files[0].read_bytes()
    files[0].write_bytes(torn[:-20])
    assert drawn == [0, 1, 2]
    runner = run(4)
    assert drawn == [0, 1, 2, 2, 3]
    store = runner.store(rows[0], "suite")
    assert len(store.filled) == 4
    assert len(store.path.read_bytes().splitlines()) == 5  # the torn one is left where it is
    run(4)
    assert drawn == [0, 1, 2, 2, 3]


def test_other_weights_and_other_gaps_have_other_files(tmp_path):
    one, same, other = model({}), model({}), model({})
    head = other.engine._denoiser.head
    other.engine._denoiser.head = replace(head, weight=0.9 * head.weight)
    assert one.fingerprint == same.fingerprint != other.fingerprint
    runner = Fakes(tmp_path, one=one, same=same, other=other)
    paths = {
        (name, suite): runner.store(Row("", name, with_suffix), suite).path
        for name in ("one", "same", "other")
        for suite in ("a", "b")
    }
    assert paths["one", "a"] == paths["same", "a"]
    assert len(set(paths.values())) == 4


def test_the_whole_command_writes_its_page_its_plot_and_its_gate(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("INFILL_CACHE_DIR", str(tmp_path / "cache"))
    table = tmp_path / "table.json"
    table.write_text(
        json.dumps({"value_1 = ": "compute(value_0, [first, second])", "return ": "x", "double(x):\n": "    y = 2 * x"})
    )
    fake = EngineConfig(model=f"fake:{table}", device="cpu")
    problem = Problem(
        "t/0",
        "double",
        "def double(x):\n",
        "\n    return y\n",
        "    y = 2 * x\n",
        "def check(f):\n    assert f(2) == 4\n",
    )
    data = tmp_path / "human-eval-infilling"
    data.mkdir()
    for name in FILES.values():
        with gzip.open(data / name, "wb") as file:
            file.write(msgspec.json.encode(problem) + b"\n")
    monkeypatch.setattr(quality, "configs", lambda model, dtype, threads: {"base": fake, "ours": fake})
    for name in ("PAGE", "PLOT", "FITTED"):
        monkeypatch.setattr(quality, name, tmp_path / name)
    of = {"model": "fake", "dtype": "fp32", "threads": 0, "corpus": corpus(tmp_path), "data": tmp_path}
    shared = Namespace(**of, gaps=12, problems=None, seed=1, jobs=2)
    for job, expected in enumerate((6, 12)):
        quality.run(shared, job)
        files = list((tmp_path / "cache" / "bench" / "quality").glob("gaps-1_*"))
        assert {len(file.read_bytes().splitlines()) for file in files} == {expected}
    assert not list(files[0].parent.glob("timed-*"))  # that is for one that has the machine to itself
    options = ["quality", "--gaps", "12", "--corpus", str(of["corpus"]), "--data", str(tmp_path), "--write"]
    monkeypatch.setattr("sys.argv", options)
    quality.main()
    assert {len(file.read_bytes().splitlines()) for file in files} == {12}
    printed = capsys.readouterr().out
    page = (tmp_path / "PAGE").read_text()
    assert page in printed
    assert "| single-line | 1 | base, prefix only | 100.0%" in page
    assert "12 gaps, drawn by seed 1" in page
    assert (tmp_path / "PLOT").read_text().startswith("<svg")
    assert json.loads((tmp_path / "FITTED").read_text())["thresholds"]["balanced"] > 0
    monkeypatch.setattr("sys.argv", ["quality", "--cached"])
    monkeypatch.setattr(quality, "configs", lambda model, dtype, threads: {})
    quality.main()
    assert capsys.readouterr().out.strip() == page.strip()


def test_rows_of_different_gaps_are_not_compared(tmp_path):
    runner = Fakes(tmp_path, fake=model({"total = ": "a + b"}))
    rows = [Row("one", "fake", with_suffix), Row("two", "fake", without_suffix)]
    for row, truth in zip(rows, ("a + b", "b + a"), strict=True):
        list(runner.run([row], "suite", range(1), lambda index, truth=truth: case(truth)))
    files = {"decoders": {row.name: (runner.store(row, "suite").path.name, 1) for row in rows}}
    with pytest.raises(ValueError, match="--fresh"):
        quality.read(files, tmp_path, 1)


def test_a_missing_corpus_is_one_line_that_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("INFILL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("sys.argv", ["quality", "--corpus", str(tmp_path)])
    with pytest.raises(SystemExit, match="infill-engine corpus"):
        quality.main()
