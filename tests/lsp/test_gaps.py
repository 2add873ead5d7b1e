"""Gaps cut out of finished documents: they are of their kind, inside their bounds, and the same for the same seed."""

from __future__ import annotations

import ast
import gzip
import json
import re
import textwrap
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

import infill_lsp
from infill_lsp.cli import main
from infill_lsp.gaps import MARGIN, MAX_CHARS, MAX_LINES, WEIGHTS, Authored, Made, author, snapshot

#: Documents that people wrote.
SOURCES = {path.name: path.read_text() for path in sorted(Path(infill_lsp.__file__).parent.glob("*.py"))}
SERVER = SOURCES["server.py"]

PYTHON = '''\
"""Reads the settings."""

import json


def load(path, default=None):
    """The settings of a file."""
    if not path.exists():
        return default
    with path.open() as file:
        settings = json.load(file)
    check(settings)
    return settings


def check(settings):
    for name in sorted(settings):
        if name not in KNOWN:
            raise ValueError(name)


KNOWN = {
    "colour": str,
    "größe": int,
    "weight": float,
}
'''

#: A language that has no grammar here, and never will.
BRACES = """\
proc load(path) {
    if (!exists(path)) {
        return nothing;
    }
    value = read(path);
    check(value);
    return value;
}

proc check(value) {
    for (name in value) {
        fail(name);
    }
}
"""


def many(text: str, language: str = "python", count: int = 1000, seed: int = 0) -> list[Authored]:
    """Nearly all gaps there are of a short text."""
    return [gap for part in range(count // 20) for gap in author(text, language, Random(seed + part), 20)]


def missing(text: str, made: Made, language: str = "python") -> set[str]:
    return {text[gap.start : gap.end] for gap in many(text, language) if gap.made == made}


def line_before(text: str, at: int) -> str:
    return text[text.rfind("\n", 0, at) + 1 : at]


def line_after(text: str, at: int) -> str:
    return text[at:].partition("\n")[0]


@given(
    st.lists(st.sampled_from([*PYTHON.split("\n"), *BRACES.split("\n"), "  ", "\t# é", 'x = """', "("]), max_size=25),
    st.sampled_from(["python", "c", "sql", "markdown", "none"]),
    st.tuples(st.integers(0, 900), st.integers(0, 900)).map(sorted),
    st.integers(0, 9),
)
def test_gaps_of_any_text_keep_their_bounds(lines: list[str], language: str, within: list[int], seed: int) -> None:
    text = "\n".join(lines)
    low, high = (min(at, len(text)) for at in within)
    gaps = author(text, language, Random(seed), 12, (low, high))
    assert gaps == author(text, language, Random(seed), 12, (low, high))
    assert len({(gap.start, gap.end) for gap in gaps}) == len(gaps) <= 12
    for gap in gaps:
        truth = text[gap.start : gap.end]
        assert low <= gap.start <= gap.end <= high
        assert (truth == "") == (gap.made == "nothing")
        assert truth == "" or len("".join(truth.split())) >= 2
        assert len(truth) <= MAX_CHARS
        assert truth.count("\n") < MAX_LINES


@pytest.mark.parametrize("name", SOURCES)
def test_the_snapshot_is_the_document_without_the_gap(name: str) -> None:
    text = SOURCES[name]
    for gap in author(text, "python", Random(name), 12):
        before = snapshot(text, "python", gap, f"infill_lsp/{name}")
        rows = [*before.lines]
        rows[before.row] = before.head + text[gap.start : gap.end] + before.tail
        assert "\n".join(rows) == text
        assert before.uri.endswith(name)
        assert before.tree is not None


def test_kinds_end_and_begin_where_they_should() -> None:
    seen = Counter[str]()
    for number, text in enumerate(SOURCES.values()):
        for gap in author(text, "python", Random(number), 60):
            truth, before, after = text[gap.start : gap.end], line_before(text, gap.start), line_after(text, gap.end)
            seen[gap.made] += 1
            if gap.made in ("rest", "line", "above"):
                assert after == ""
                assert "\n" not in truth
            if gap.made == "rest":
                assert before.strip()
            if gap.made in ("line", "lines"):
                assert not before.strip()
                assert not truth[0].isspace()
            if gap.made == "lines":
                assert after in ("", ",", ";")
                assert "\n" in truth
            if gap.made == "inner":
                assert after or text[gap.end :].lstrip()[0] in ")]}"  # On a line of its own.
    assert set(seen) == set(get_args(Made))


def test_kinds_have_their_shares() -> None:
    gaps = [gap for number in range(6) for gap in author(SERVER, "python", Random(number), 150)]
    seen = Counter(gap.made for gap in gaps)
    for made, share in WEIGHTS.items():
        assert seen[made] / len(gaps) == pytest.approx(share, abs=0.06), made


def test_rests_begin_inside_words_and_at_natural_places() -> None:
    gaps = [gap for number in range(6) for gap in author(SERVER, "python", Random(number), 150) if gap.made == "rest"]
    inside = [gap for gap in gaps if re.fullmatch(r"\w\w", SERVER[gap.start - 1 : gap.start + 1])]
    natural = [gap for gap in gaps if SERVER[gap.start - 1] in "([{=.,: "]
    assert 0.3 < len(inside) / len(gaps) < 0.56  # A third of them, and of those anywhere some more; of 240 within 0.1.
    assert 0.45 < len(natural) / len(gaps) < 0.7


def test_several_lines_are_bodies_statements_ends_of_blocks_and_what_brackets_hold() -> None:
    found = missing(PYTHON, "lines")
    assert "check(settings)\n    return settings" in found
    assert "if name not in KNOWN:\n            raise ValueError(name)" in found
    assert '"colour": str,\n    "größe": int,\n    "weight": float,' in found
    assert PYTHON.partition("default=None):\n    ")[2].partition("\n\n\n")[0] in found
    for gap in found:
        start = PYTHON.index(gap)
        if not gap.startswith('"') or not gap.endswith(","):
            ast.parse(textwrap.dedent(line_before(PYTHON, start) + gap))


def test_without_a_grammar_indentation_says_what_a_body_is() -> None:
    found = missing(BRACES, "lines", "none")
    assert "for (name in value) {\n        fail(name);\n    }" in found
    assert "check(value);\n    return value;" in found
    assert not any(gap.startswith("}") for gap in found)
    assert "name in value" in missing(BRACES, "inner", "none")


def test_what_is_missing_inside_a_line_is_an_argument_a_condition_or_a_string() -> None:
    found = missing(PYTHON, "inner")
    assert {"path, default=None", "name not in KNOWN", "größe", "settings"} <= found


def test_nothing_is_missing_after_statements_on_blank_lines_and_before_brackets() -> None:
    gaps = [gap for gap in many(PYTHON) if gap.made == "nothing"]
    assert gaps
    for gap in gaps:
        before, after = line_before(PYTHON, gap.start), line_after(PYTHON, gap.end)
        assert after[:1] in ("", ")", "]")
        assert not before.endswith(("(", "[", "{", ",", ":", "="))


def test_an_edit_brings_a_name_that_only_the_code_below_uses() -> None:
    gaps = [gap for gap in many(PYTHON) if gap.made == "edited"]
    names = re.compile(r"[^\W\d]\w{2,}")
    assert gaps
    for gap in gaps:
        new = set(names.findall(PYTHON[gap.start : gap.end])) & set(names.findall(PYTHON[gap.end :]))
        assert new - set(re.findall(r"\w+", PYTHON[: gap.start]))
    assert not any(gap.made == "edited" for gap in many("alpha = 1\nbeta = 2\ngamma = 3\n"))


@pytest.mark.parametrize(
    ("language", "licence"),
    [
        ("python", "#!/usr/bin/env python\n# Copyright Somebody\n#\n# All rights given.\n\n"),
        ("c", "/* Copyright Somebody\n   All rights given. */\n\n"),
        ("java", "// Licensed to everybody\n// and nobody.\n"),
        ("markdown", "<!--\nLicensed to everybody\n-->\n"),
        ("sql", "-- Licensed to everybody\n\n-- Really.\n"),
    ],
)
def test_nobody_types_a_licence(language: str, licence: str) -> None:
    gaps = many(licence + BRACES, language, 100)
    assert gaps
    assert min(gap.start for gap in gaps) >= len(licence)


def test_a_text_without_gaps_has_none() -> None:
    assert author("", "python", Random(0), 5) in ([], [Authored("nothing", 0, 0)])
    assert author(PYTHON, "python", Random(0), 0) == []


# The command.


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three packages of one split: this one, one in another language, and one in a language that is not drawn."""
    folder = tmp_path_factory.mktemp("corpus")
    documents = [
        *({"package": "here", "language": "python", "path": name, "text": text} for name, text in SOURCES.items()),
        {"package": "other", "language": "javascript", "path": "other.js", "text": BRACES * 20},
        {"package": "unknown", "language": "cobol", "path": "x.cob", "text": BRACES * 20},
    ]
    with gzip.open(folder / "train.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(document) + "\n" for document in documents)
    return folder


def command(corpus: Path, out: Path, *more: str) -> int:
    return main(["gaps", "--corpus", str(corpus), "--split=train", "--out", str(out), *more])


def windows(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt") as file:
        return [json.loads(line) for line in file]


def test_windows_are_whole_lines_with_gaps_away_from_their_cuts(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "gaps.jsonl.gz"
    assert command(corpus, out, "--windows=60", "--seed=3", "--snippets=1") == 0
    found = windows(out)
    assert len(found) == 60
    assert {window["language"] for window in found} == {"python", "javascript"}
    starts = snippets = 0
    for window in found:
        text, whole = window["text"], SOURCES.get(window["path"], BRACES * 20)
        assert set(window) == {"package", "language", "path", "text", "snippet", "gaps"}
        assert text in whole
        assert len(text) <= 6_001
        at_start, at_end = whole.startswith(text), whole.endswith(text)
        assert at_start or text.startswith("\n")
        assert at_end or text.endswith("\n")
        assert 6 <= len(window["gaps"]) <= 12
        for gap in window["gaps"]:
            assert gap["start"] >= (0 if at_start else MARGIN)
            assert gap["end"] <= len(text) - (0 if at_end else MARGIN)
        starts += at_start
        if window["snippet"]:
            snippets += 1
            assert window["snippet"] not in whole
            assert any(window["snippet"] in text for name, text in SOURCES.items() if name != window["path"])
    assert 5 < starts < 40
    assert snippets == sum(window["package"] == "here" for window in found)
    assert [file.name for file in tmp_path.iterdir()] == [out.name]


def test_a_snippet_is_about_the_same(tmp_path: Path) -> None:
    def about(word: str, file: int) -> str:
        return "".join(
            f"def {word}Thing{row}(value_{file}):\n    return value.make_{word}(row)\n\n" for row in range(30)
        )

    texts = {
        f"{word}{file}.py": about(word, file)
        for word in ("apple", "cherry", "fig", "lemon", "mango", "pear", "plum")
        for file in (1, 2)
    }
    with gzip.open(tmp_path / "train.jsonl.gz", "wt") as file:
        for name, text in texts.items():
            file.write(json.dumps({"package": "p", "language": "python", "path": name, "text": text}) + "\n")
    assert command(tmp_path, tmp_path / "out", "--windows=10", "--seed=0", "--snippets=1") == 0
    for window in windows(tmp_path / "out"):
        assert f"make_{window['path'][:-4]}" in window["snippet"]


def test_a_seed_gives_the_same_bytes(corpus: Path, tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert command(corpus, tmp_path / name, "--windows=10", f"--seed={seed}") == 0
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes() != (tmp_path / "c").read_bytes()


def test_no_snippets_when_none_are_wanted(corpus: Path, tmp_path: Path) -> None:
    assert command(corpus, tmp_path / "out", "--windows=10", "--seed=0", "--snippets=0", "--gaps=3") == 0
    assert all(window["snippet"] == "" and len(window["gaps"]) <= 3 for window in windows(tmp_path / "out"))


def test_faults_are_one_line_that_says_what_to_do(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fault(folder: Path, out: Path, *more: str) -> str:
        assert command(folder, out, "--windows=5", "--seed=0", *more) == 1
        words = capsys.readouterr().err
        assert words.count("\n") == 1
        return words

    assert "infill-engine corpus" in fault(tmp_path / "none", tmp_path / "out")
    (tmp_path / "train.jsonl.gz").write_bytes(b"no gzip")
    assert "infill-engine corpus" in fault(tmp_path, tmp_path / "out")
    with gzip.open(tmp_path / "train.jsonl.gz", "wt") as file:
        file.write(json.dumps({"package": "p", "language": "python", "path": "a.py", "text": "x = 1\n"}) + "\n")
    assert "--gaps" in fault(tmp_path, tmp_path / "out")
    assert "--out" in fault(corpus, tmp_path / "no folder" / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("wrong", ["--windows=0", "--windows=many", "--snippets=2", "--snippets=some", "--gaps=0"])
def test_wrong_usage_exits_with_2(corpus: Path, tmp_path: Path, wrong: str) -> None:
    with pytest.raises(SystemExit) as exit:
        command(corpus, tmp_path / "out", "--windows=5", "--seed=0", wrong)
    assert exit.value.code == 2
