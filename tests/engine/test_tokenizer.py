"""Segments, healing and the allowed set, on a small byte-level BPE vocabulary and on bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from infill_engine import core
from infill_engine.core import ModelError
from infill_engine.tokenizer import (
    MAX_HEALED_BYTES,
    REMEMBERED,
    BpeCodec,
    ByteCodec,
    Healed,
    JsonCodec,
    LineTokenizer,
    SentencePieceCodec,
    Side,
    TrailingTokenizer,
    _byte_of_char,
)
from small_tokenizer import ADDED_TEXT, CONTROLS, RESERVED, description, sentencepiece

SPECIALS = 2


def small_codec() -> BpeCodec:
    """Specials, all bytes, and the pieces of a few words."""
    char_of = {b: c for c, b in _byte_of_char().items()}
    vocab = ["<end>", "<mask>", *(char_of[b] for b in range(256))]
    merges = []
    for word in (" return", " re", "\n    ", "((", "return"):
        pieces = [char_of[b] for b in word.encode()]
        while len(pieces) > 1:
            merges.append((pieces[0], pieces[1]))
            vocab.append(pieces[0] + pieces[1])
            pieces[:2] = [pieces[0] + pieces[1]]
    unique = list(dict.fromkeys(vocab))
    return BpeCodec(unique, list(dict.fromkeys(merges)), SPECIALS)


@pytest.fixture(scope="module")
def tokenizer() -> LineTokenizer:
    return LineTokenizer(small_codec())


@given(st.text(st.characters(codec="utf-8"), max_size=60))
def test_segments_are_the_text(text):
    parts = LineTokenizer.segments(text)
    assert "".join(parts) == text
    assert all("\n" not in part.lstrip("\n") for part in parts)


def test_a_segment_is_a_run_of_newlines_and_its_line():
    assert LineTokenizer.segments("a\n\n  b\nc\n") == ["a", "\n\n  b", "\nc", "\n"]


@given(st.text(st.characters(codec="utf-8"), max_size=60))
def test_tokens_say_the_text_again(text):
    tokenizer = LineTokenizer(small_codec())
    assert tokenizer.text(tokenizer.encode(text)).decode() == text


def test_a_special_tokens_name_in_a_file_is_plain_text(tokenizer):
    ids = tokenizer.encode("x = '<end><mask>'")
    assert min(ids) >= SPECIALS
    assert tokenizer.text(ids) == b"x = '<end><mask>'"


@pytest.mark.parametrize(
    ("segment", "rest"),
    [
        ("\n    ", "\n    "),  # trailing space joins what follows
        ("\n    ret", " ret"),
        ("\n    return", " return"),
        ("\n    return ", " "),
        ("\n    foo(", "("),
        ("\n    x = 5", ""),  # digits stand alone
        ("\n", "\n"),
        ("", ""),
        ("\n    é", " é"),
    ],
)
def test_healing_takes_back_the_last_piece(tokenizer, segment, rest):
    healed = tokenizer.heal(segment)
    assert healed.rest.decode() == rest
    assert tokenizer.text(healed.tokens) + healed.rest == segment.encode()


def test_healing_takes_back_no_long_literal(tokenizer):
    segment = "x = '" + "a" * 500
    healed = tokenizer.heal(segment)
    assert len(healed.rest) <= MAX_HEALED_BYTES
    assert tokenizer.text(healed.tokens) + healed.rest == segment.encode()


@given(st.text(alphabet="\n (retunx5é", min_size=1, max_size=12), st.text(alphabet="\n (retunx5é", max_size=8))
def test_the_prefix_before_the_boundary_is_tokenised_as_in_the_whole_line(head, continuation):
    """What healing promises: the tokens kept are those that the finished segment would begin with."""
    tokenizer = LineTokenizer(small_codec())
    segment = "\n" + head.replace("\n", "")
    healed = tokenizer.heal(segment)
    whole = tokenizer.codec.encode(segment + continuation.replace("\n", ""))
    assert whole[: len(healed.tokens)] == healed.tokens


@given(st.binary(min_size=1, max_size=9))
def test_allowed_is_what_its_definition_says(rest):
    tokenizer = LineTokenizer(small_codec())
    allowed = tokenizer.allowed(rest)
    for token, piece in enumerate(tokenizer.codec.tokens):
        expected = bool(piece) and (piece.startswith(rest) or rest.startswith(piece))
        assert bool(allowed[token]) == expected, piece


def test_every_byte_can_be_written():
    tokenizer = LineTokenizer(ByteCodec())
    text = "".join(map(chr, range(1, 0x180)))
    assert tokenizer.text(tokenizer.encode(text)).decode() == text


lines = st.lists(st.sampled_from(["", "a", "bb", "  cc", "d" * 9]), max_size=12).map("\n".join)


@given(st.lists(st.tuples(lines, st.integers(0, 12)), max_size=6), st.booleans())
def test_a_side_of_a_gap_is_known_from_the_gap_outwards_whatever_it_was_before(steps, before):
    encoder = LineTokenizer(ByteCodec())
    side = Side(encoder, before=before)
    for text, most in steps:
        side.update(text)
        whole = side.encode(most)
        segments = encoder.segments(text)
        known = [bytes(line).decode() for line in side.lines]
        assert known == (segments[len(segments) - len(known) :] if before else segments[: len(known)])
        assert whole == (len(known) == len(segments))
        assert whole or sum(map(len, known)) >= most
    side.update(steps[-1][0] if steps else "")
    assert side.encode(1000)


def test_of_a_side_only_what_changed_is_tokenised_again():
    seen: list[str] = []
    codec = ByteCodec()
    codec.encode = lambda text: seen.append(text) or list(text.encode())  # type: ignore[func-returns-value]
    for before in (True, False):
        side = Side(LineTokenizer(codec, cached_segments=1), before=before)
        text = "".join(f"\nline {i}" for i in range(50))
        side.update(text)
        assert side.encode(10_000)
        seen.clear()
        side.update(text + "\nnew" if before else "new" + text)
        assert side.encode(10_000)
        assert len(seen) <= 2
        seen.clear()
        side.update(text.replace("line 30", "line x"))
        assert side.encode(10_000)
        assert any("line x" in segment for segment in seen)


def test_of_a_line_that_nobody_wrote_the_beginning_is_remembered():
    side = Side(LineTokenizer(ByteCodec()), before=True)
    side.update("a\n" + "x" * 100_000 + "\nb")
    assert side.encode(10_000)
    assert [len(line) for line in side.lines] == [1, REMEMBERED, 2]


@given(st.text(st.sampled_from("return (\n  x9é"), max_size=40), st.integers(1, 30))
def test_a_beginning_has_whole_segments_and_no_more_than_it_needs(text, least):
    tokenizer = LineTokenizer(small_codec())
    tokens = tokenizer.beginning(text, least)
    assert text.startswith(tokenizer.text(tokens).decode())
    ends = [len(tokenizer.encode("".join(tokenizer.segments(text)[:n]))) for n in range(len(text) + 1)]
    assert len(tokens) == min((end for end in ends if end >= least), default=ends[-1])


@given(st.text(st.sampled_from("return (x9 "), max_size=12), st.text(st.sampled_from("return (\n  x9"), max_size=12))
def test_a_continuation_writes_what_was_taken_back_and_the_rest(segment, rest):
    tokenizer = LineTokenizer(small_codec())
    head = tokenizer.heal(segment)
    tokens = tokenizer.continuation(segment, head, rest)
    if tokens is not None:
        assert tokenizer.text(tokens) == head.rest + rest.encode()
        assert [*head.tokens, *tokens] == tokenizer.encode(segment + rest)


def test_a_continuation_that_changes_the_tokens_before_it_is_none(tokenizer):
    assert tokenizer.continuation("(", Healed(tokenizer.encode("("), b""), "(") is None


def test_slots_are_restricted_until_what_was_taken_back_is_written(tokenizer):
    r, e = tokenizer.encode("r")[0], tokenizer.encode("e")[0]
    sets = list(tokenizer.restricted(b"re", [r, e, r]))
    assert len(sets) == 2
    assert torch.equal(sets[0], tokenizer.allowed(b"re"))
    assert torch.equal(sets[1], tokenizer.allowed(b"e"))
    assert [bool(torch.equal(one, tokenizer.allowed(b"re"))) for one in tokenizer.restricted(b"re", [])] == [True]
    assert not list(tokenizer.restricted(b"", [r]))


def test_what_begins_in_its_line_is_neither_a_newline_nor_the_end_of_its_indentation(tokenizer):
    pieces = tokenizer.codec.tokens

    def begins(rest: bytes) -> set[bytes]:
        allowed = tokenizer.allowed(rest) if rest else torch.ones(len(pieces), dtype=torch.bool)
        kept = tokenizer.beginning_in_line(rest, allowed)
        return {pieces[i] for i in kept.nonzero().flatten().tolist()}

    assert begins(b"\n    ") == {b"\n", b"\n ", b"\n  ", b"\n   "}
    assert begins(b" ") == {b" r", b" re", b" ret", b" retu", b" retur", b" return"}
    assert b"\n" not in begins(b"")
    assert {b"((", b"re"} <= begins(b"")
    assert begins(b"\t") == {b"\t"}  # A tab is written by itself.
    assert begins(b"  ") == {b" "}


# A checkpoint's own tokenizer.json.


SOURCE = Path(core.__file__).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def written() -> dict[str, Any]:
    return json.loads(description(added={"<end>": 500, "<mask>": 501}))


def test_a_tokenizer_in_a_file_is_cut_behind_newlines_where_its_tokens_join_them(written):
    """Line by line that gives the tokens of the whole; cut before newlines it would give others."""
    from tokenizers import Tokenizer

    whole = Tokenizer.from_str(json.dumps(written)).encode(SOURCE).ids
    codec = JsonCodec(written)
    assert codec.joins_newlines
    assert TrailingTokenizer(codec).encode(SOURCE) == whole != LineTokenizer(codec).encode(SOURCE)
    assert TrailingTokenizer(codec).text(whole).decode() == SOURCE


@given(st.text(max_size=60))
def test_lines_with_their_newlines_are_the_text(text):
    text = text.replace("\r", "")
    parts = TrailingTokenizer.segments(text)
    assert "".join(parts) == text
    assert all("\n" not in part.rstrip("\n") for part in parts)
    assert list(TrailingTokenizer.cut(text)) == parts


@pytest.mark.parametrize(
    ("segment", "rest"),
    [
        ("def f():\n", "():\n"),
        ("    retur", " retur"),
        ("x = ", " "),
        ("f(12", ""),
        ("f(x)", ")"),
        ("if x:\n    ", "    "),
    ],
)
def test_a_tokenizer_in_a_file_heals_where_more_text_may_change_its_tokens(written, segment, rest):
    codec = JsonCodec(written)
    healed = TrailingTokenizer(codec).heal(segment)
    assert healed.rest.decode() == rest
    for more in ("x", "\n", " y", ")", "3"):
        assert codec.encode(segment + more)[: len(healed.tokens)] == healed.tokens


def test_a_tokenizer_in_parts_is_the_whole_one(written, tmp_path):
    """vocab.json and merges.txt, with added tokens and who is who in tokenizer_config.json."""
    model = written["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *map(" ".join, model["merges"])]))
    names = {"500": {"content": "<end>"}, "501": {"content": "<mask>"}}
    settings = {"added_tokens_decoder": names, "eos_token": "<end>", "mask_token": {"content": "<mask>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"bos_token": None, "pad_token": "<none>"}))
    parts, expected = JsonCodec.read(tmp_path), JsonCodec(written)
    assert parts.tokens == expected.tokens
    assert parts.encode(SOURCE) == expected.encode(SOURCE)
    assert parts.last_piece("f():\n") == expected.last_piece("f():\n")
    assert parts.roles == {"eos_token_id": 500, "mask_token_id": 501}


def test_names_of_added_tokens_are_plain_text_and_no_text_is_normalised(written):
    codec = JsonCodec(written, vocab=512)
    assert codec.added == {"<end>": 500, "<mask>": 501}
    assert len(codec.tokens) == 512
    assert codec.tokens[500] == codec.tokens[511] == b""
    for text in ("a <mask> b", "e\u0301", "\u00e9"):
        ids = codec.encode(text)
        assert not {500, 501} & set(ids)
        assert b"".join(codec.tokens[i] for i in ids).decode() == text


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "is missing: download the whole model"),
        ("{", "cannot be read"),
        ('{"model": {"type": "Unigram", "vocab": []}}', "it is Unigram, and only BPE is read"),
        ('{"model": {"type": "BPE", "vocab": {}}, "pre_tokenizer": null}', "no byte-level BPE"),
    ],
)
def test_what_is_wrong_with_a_tokenizers_file_is_said_in_a_line(tmp_path, text, told):
    if text is not None:
        (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ModelError, match=told) as error:
        JsonCodec.read(tmp_path)
    assert "\n" not in str(error.value)


# One over characters, such as Gemma's.


@pytest.fixture(scope="module")
def pieces() -> dict[str, Any]:
    return json.loads(sentencepiece())


@pytest.fixture(scope="module")
def codec(pieces) -> SentencePieceCodec:
    return SentencePieceCodec(pieces, vocab=700)


@pytest.fixture(scope="module")
def library(pieces):
    from tokenizers import Tokenizer

    return Tokenizer.from_str(json.dumps(pieces))


#: Text with everything that such a vocabulary is about: runs of space, words, what it lacks.
WORDS = ["return", " ", "  ", "\n", "\n\n", "def", "(", "é", "漢", "\t", "\r", "<b>", "x1"]
CODE = st.lists(st.sampled_from(WORDS), max_size=30).map("".join)


def test_the_librarys_tokens_are_given_line_by_line(codec, library):
    whole = library.encode(SOURCE, add_special_tokens=False).ids
    assert codec.encode(SOURCE) == whole == LineTokenizer(codec).encode(SOURCE)
    assert not codec.joins_newlines
    assert any(codec.tokens[i].startswith(b"  ") for i in whole)


@given(text=CODE)
def test_any_code_has_the_tokens_that_the_library_gives_it(codec, library, text):
    assert codec.encode(text) == library.encode(text, add_special_tokens=False).ids


#: What a vocabulary would take for something else.
MISREAD = ["\u2581", "<0x41>", "<<0x0A>", "<eos>", "<mask>", "<unused0>", RESERVED, "<|turn>", "<b>", " ", "a"]


@given(text=st.one_of(st.text(max_size=40), st.lists(st.sampled_from(MISREAD), max_size=8).map("".join)))
def test_over_characters_too_tokens_say_the_text_again(codec, text):
    ids = codec.encode(text)
    assert b"".join(codec.tokens[i] for i in ids).decode() == text
    assert all(codec.tokens[i] for i in ids)


def test_of_added_tokens_whitespace_and_pairs_of_tags_are_text(codec, pieces):
    ids = pieces["model"]["vocab"]
    assert [codec.tokens[ids[name]] for name in ADDED_TEXT] == [name.encode() for name in ADDED_TEXT]
    assert not any(codec.tokens[ids[name]] for name in (*CONTROLS, RESERVED))
    assert codec.encode("<b>\n\n</b>") == [ids["<b>"], ids["\n\n"], ids["</b>"]]
    assert {ids[name] for name in CONTROLS} <= set(codec.added.values())
    assert len(codec.tokens) == 700
    assert codec.tokens[ids["<0x0A>"]] == b"\n"


@given(head=CODE, more=CODE)
def test_over_characters_too_what_healing_leaves_is_tokenised_so_whatever_follows(codec, head, more):
    kept = head[: len(head) - len(codec.last_piece(head))]
    known = codec.encode(kept)
    assert codec.encode(head + more)[: len(known)] == known


@pytest.mark.parametrize(
    ("segment", "rest"), [("\nx = (retu", "retu"), ("\n    ", "    "), ("x)", ""), ("", ""), ("a\n", "\n")]
)
def test_over_characters_healing_takes_back_what_a_piece_may_cross(codec, segment, rest):
    assert codec.last_piece(segment) == rest
    head = LineTokenizer(codec).heal(segment)
    assert head.rest == rest.encode()
    assert LineTokenizer(codec).text(head.tokens) + head.rest == segment.encode()


def test_no_space_is_put_before_a_text(pieces):
    """As other vocabularies of this kind do with a text's first word: a line of code is no text by itself."""
    cut = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": False}
    prepended = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "\u2581"}, pieces["normalizer"]]}
    expected = SentencePieceCodec(pieces).encode("return x  # <b>")
    for changed in ({"normalizer": None, "pre_tokenizer": cut}, {"normalizer": prepended}):
        assert SentencePieceCodec({**pieces, **changed}).encode("return x  # <b>") == expected


def test_a_folder_has_either_kind(pieces, tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps(pieces))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<bos>", "mask_token": "<mask>"}))
    read = JsonCodec.read(tmp_path, 700)
    assert isinstance(read, SentencePieceCodec)
    assert read.roles == {"bos_token_id": 2, "mask_token_id": 4}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda found: found["model"]["vocab"].pop("<0x41>"), "it has only 255 of 256 bytes"),
        (lambda found: found.update(normalizer=None), "does not say how spaces are written"),
        (lambda found: found["model"].update(continuing_subword_prefix="x"), "it marks where words go on or end"),
        (lambda found: found.update(decoder={"type": "none"}), "cannot be read"),
    ],
)
def test_what_is_wrong_with_a_vocabulary_over_characters_is_said_in_a_line(pieces, tmp_path, change, told):
    found = json.loads(json.dumps(pieces))
    change(found)
    (tmp_path / "tokenizer.json").write_text(json.dumps(found))
    with pytest.raises(ModelError, match=told):
        JsonCodec.read(tmp_path)
