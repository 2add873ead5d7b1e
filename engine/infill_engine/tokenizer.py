"""Tokenising by line, and healing the boundary at the gap.

A document is a list of *segments*, each a run of newlines and the line that follows it (`"\\n\\n    return x"`),
tokenised on its own. So an edit touches the tokens of its own line only, and everything above stays cached. Knows no
model, only a vocabulary of byte strings.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from infill_engine.core import ModelError

_SEGMENT = re.compile(r"\n+[^\n]*|[^\n]+")
_LINE = re.compile(r"[^\n]*\n+|[^\n]+")

#: A pre-token longer than this many bytes is not taken back into the gap whole: a pass a token to write a long literal
#: again would cost more than a perfect boundary is worth.
MAX_HEALED_BYTES = 24


#: Characters of a segment that are remembered: what is longer was hardly written by a person.
REMEMBERED = 4096


class Codec(Protocol):
    """What is wanted of a vocabulary."""

    @property
    def joins_newlines(self) -> bool:
        """Whether newlines may share a token with what stands before them, so that text is cut into lines behind them
        (`TrailingTokenizer`)."""

    @property
    def tokens(self) -> Sequence[bytes]:
        """The bytes of each id; empty for special ids, which never stand in text."""

    def encode(self, text: str) -> list[int]:
        """Ids of a text; a special token's name in it is plain text."""

    def last_piece(self, text: str) -> str:
        """The end of `text` whose tokens may change when more text follows; "" where none do."""


class Healed(NamedTuple):
    """The text before the gap, cut where any continuation would also have been cut."""

    #: Ids of the text before the boundary.
    tokens: list[int]
    #: The bytes from the boundary to the cursor, which the gap's first tokens have to write again.
    rest: bytes


class LineTokenizer:
    """A `Codec` applied by line, with caches by text."""

    def __init__(self, codec: Codec, cached_segments: int = 65536, heals: bool = True) -> None:
        """heals: whether text before a gap is to be taken back to a boundary."""
        self.codec = codec
        self._heals = heals
        self.encode_segment = lru_cache(cached_segments)(lambda text: tuple(codec.encode(text)))
        ordered = sorted((b, i) for i, b in enumerate(codec.tokens) if b)
        self._keys = [b for b, _ in ordered]
        self._in_order = torch.tensor([i for _, i in ordered])
        self._ids = dict(reversed(ordered))

    @staticmethod
    def segments(text: str) -> list[str]:
        """Splits LF text into segments whose concatenation is the text; trailing newlines are a segment too."""
        return _SEGMENT.findall(text)

    @staticmethod
    def cut(text: str) -> Iterator[str]:
        """The same one after the other, of a text that is too long to be split at once."""
        return (found[0] for found in _SEGMENT.finditer(text))

    def encode(self, text: str) -> list[int]:
        """The ids of a text, segment by segment."""
        return [token for segment in self.segments(text) for token in self.encode_segment(segment)]

    def beginning(self, text: str, least: int) -> list[int]:
        """The ids of a text's first segments, as many as have `least` ids together."""
        tokens: list[int] = []
        for segment in self.cut(text):
            if len(tokens) >= least:
                break
            tokens += self.encode_segment(segment)
        return tokens

    def heal(self, segment: str) -> Healed:
        """Tokenises the segment before the gap up to the last boundary that holds whatever follows.

        Measured on SmolLM2-135M: a completion's first token costs 1.2 to 2.1 nats at such boundaries and 8.0 where the
        text before the cursor is tokenised as it stands, because trailing space or half a word is no token that
        training text would have there.
        """
        piece = self.codec.last_piece(segment) if self._heals else ""
        if len(piece.encode(errors="replace")) <= MAX_HEALED_BYTES:
            return Healed(list(self.encode_segment(segment[: len(segment) - len(piece)])), piece.encode())
        tokens, rest = list(self.encode_segment(segment)), b""
        while tokens and len(rest) + len(self.codec.tokens[tokens[-1]]) <= MAX_HEALED_BYTES:
            rest = self.codec.tokens[tokens.pop()] + rest
        return Healed(tokens, rest)

    def continuation(self, segment: str, head: Healed, rest: str) -> list[int] | None:
        """The ids of `rest` as a gap behind the healed `segment` has them, what was taken back first; None where the
        text before the gap would then have other ids."""
        tokens, known = self.encode(segment + rest), len(head.tokens)
        return tokens[known:] if tokens[:known] == head.tokens else None

    def restricted(self, rest: bytes, tokens: Iterable[int]) -> Iterator[Tensor]:
        """bool [V], one for each slot from the gap's first on that is restricted while `rest` is written again by
        `tokens`, the last of them behind these: the ids that may stand there."""
        for token in chain(tokens, (None,)):
            if not rest:
                return
            yield self.allowed(rest)
            if token is not None:
                rest = rest[len(self.codec.tokens[token]) :]

    def allowed(self, rest: bytes) -> Tensor:
        """bool [V]: the ids that may come next while `rest` has still to be written: those that begin with it, and
        those that it begins with."""
        mask = torch.zeros(len(self.codec.tokens), dtype=torch.bool)
        first = bisect_left(self._keys, rest)
        end = bisect_right(self._keys, rest, lo=first, key=lambda token: token[: len(rest)])
        mask[self._in_order[first:end]] = True
        for end in range(1, len(rest)):
            token = self._ids.get(rest[:end])
            if token is not None:
                mask[token] = True
        return mask

    def beginning_otherwise(self, rest: bytes, texts: Iterable[bytes]) -> Tensor:
        """bool [V]: the ids that may begin a gap which shall begin otherwise than each of `texts`, whitespace aside; an
        id that first writes `rest` again counts by what it writes beyond. Ids that begin one of them may not."""
        mask = torch.ones(len(self.codec.tokens), dtype=torch.bool)
        for text in texts:
            start = text.lstrip()
            for end in range(1, min(len(start), self._longest) + 1):
                for i in self._by_word.get((rest + start[:end]).lstrip(), ()):
                    mask[i] &= not self.codec.tokens[i].startswith(rest)
        return mask

    def beginning_in_line(self, rest: bytes, allowed: Tensor) -> Tensor:
        """bool [V]: of the ids in `allowed` [V] those that may begin a text on a blank line, once `rest` is written
        again; all where none may. They write no newline, and a last space of the line together with what follows it: by
        itself it belongs to a line that stays blank."""
        if not rest:
            kept = allowed & self._in_line
        else:
            kept = allowed.clone()
            for i in allowed.nonzero().flatten().tolist():
                piece = self.codec.tokens[i]
                if b"\n" in piece[len(rest) :] or (piece == rest and rest.endswith(b" ")):
                    kept[i] = False
        return kept if kept.any() else allowed

    @cached_property
    def _in_line(self) -> Tensor:
        """bool [V]: the ids without a newline."""
        return torch.tensor([b"\n" not in piece for piece in self.codec.tokens])

    @cached_property
    def _by_word(self) -> dict[bytes, list[int]]:
        """The ids by their bytes without the whitespace at their beginning."""
        found: dict[bytes, list[int]] = {}
        for i, piece in enumerate(self.codec.tokens):
            found.setdefault(piece.lstrip(), []).append(i)
        return found

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self.codec.tokens))

    def text(self, tokens: Sequence[int]) -> bytes:
        """The bytes of ids; may end within a character."""
        return b"".join(self.codec.tokens[token] for token in tokens)


class TrailingTokenizer(LineTokenizer):
    """The same with segments that end with their newlines, for vocabularies in which `):` and a newline are one token:
    cut before the newline, nearly each line of code would end as none did when the model was trained."""

    @staticmethod
    def segments(text: str) -> list[str]:
        """Splits LF text into lines, each with the newlines behind it, whose concatenation is the text."""
        return _LINE.findall(text)

    @staticmethod
    def cut(text: str) -> Iterator[str]:
        return (found[0] for found in _LINE.finditer(text))


class Side:
    """The text on one side of a gap as segments, tokenised from the gap outwards as time allows. It hardly changes from
    one request to the next, and what did not is neither cut nor tokenised again: a key stroke costs a comparison."""

    def __init__(self, tokenizer: LineTokenizer, *, before: bool) -> None:
        """before: whether it is the text before the gap."""
        self._tokenizer = tokenizer
        self._before = before
        self._text = ""
        #: From the one that is farthest from the gap: segments, where each ends, counted from the far end, and the
        #: tokens where they are known.
        self._segments: list[str] = []
        self._ends: list[int] = []
        self._tokens: list[tuple[int, ...] | None] = []
        #: Of the last ones, next to the gap, the tokens are known from here on.
        self._known = 0

    def update(self, text: str) -> None:
        """Takes in the text as it is now."""
        if text == self._text:
            return
        # A segment stays where its text did and what stands on its near side, by which it is known to end there.
        kept = bisect_left(self._ends, self._common(text))
        at = self._ends[kept - 1] if kept else 0
        rest = self._tokenizer.segments(text[at:] if self._before else text[: len(text) - at])
        if not self._before:
            rest.reverse()
        self._text = text
        self._segments[kept:] = rest
        self._ends[kept:] = list(accumulate(map(len, rest), initial=at))[1:]
        self._tokens[kept:] = [None] * len(rest)
        self._known = len(self._tokens)

    def encode(self, most: int) -> bool:
        """Tokenises up to `most` characters more, and whatever segment is next; returns whether all is."""
        while self._known and most > 0:
            at = self._known - 1
            if self._tokens[at] is None:
                segment = self._segments[at][:REMEMBERED]
                self._tokens[at] = self._tokenizer.encode_segment(segment)
                most -= len(segment)
            self._known = at
        return self._known == 0

    @property
    def lines(self) -> list[tuple[int, ...]]:
        """The tokens of the segments next to the gap that are known, in the order of the text."""
        known = self._tokens[self._known :]
        return cast(list[tuple[int, ...]], known if self._before else known[::-1])

    def _common(self, text: str) -> int:
        """How many characters, counted from the far end, are the same as before."""
        old, shorter = self._text, min(len(text), len(self._text))
        if self._before:
            return bisect_left(range(shorter), True, key=lambda n: old[: n + 1] != text[: n + 1])
        return bisect_left(range(shorter), True, key=lambda n: old[len(old) - n - 1 :] != text[len(text) - n - 1 :])


class ByteCodec:
    """One id a byte, then the special ids; for tests and the fake model."""

    joins_newlines = False

    def __init__(self, specials: int = 3) -> None:
        self.tokens: list[bytes] = [bytes([i]) for i in range(256)] + [b""] * specials

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def last_piece(self, text: str) -> str:
        return ""


class BpeCodec:
    """Byte-level BPE in the GPT-2 form with digits split one by one, as SmolLM2 uses it.

    vocab: the printable form of each id, merges: pairs in order; specials: ids below this are control tokens. They are
    not declared as special to the tokenizer, so their names in a user's file are plain text.
    """

    joins_newlines = False

    def __init__(self, vocab: Sequence[str], merges: Sequence[tuple[str, str]], specials: int) -> None:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers

        self._split = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
        self._tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(vocab)}, list(merges)))
        self._tokenizer.pre_tokenizer = self._split
        self._tokenizer.decoder = decoders.ByteLevel()
        byte_of = _byte_of_char()
        self.tokens = [b"" if i < specials else bytes(byte_of[c] for c in piece) for i, piece in enumerate(vocab)]

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    def last_piece(self, text: str) -> str:
        pieces = self._split.pre_tokenize_str(text)
        if not pieces or text[-1].isnumeric():  # digits stand alone whatever follows
            return ""
        return text[pieces[-1][1][0] :]


class JsonCodec:
    """Byte-level BPE as a tokenizer.json describes it, with the way in which that cuts text into pieces.

    Added tokens, special or not, are never text: their names in a user's file are tokenised as they stand. Text is not
    normalised, since what tokens say has to be the file's own bytes.
    """

    def __init__(self, description: Mapping[str, Any], vocab: int = 0) -> None:
        """description: what the file says; vocab: ids that the model has, where those are more than the file names.

        Raises `ValueError` for what is no byte-level BPE.
        """
        if "ByteLevel" not in json.dumps(description.get("pre_tokenizer")):
            raise ValueError("it is no byte-level BPE, and no BPE with a byte for each character that it lacks")
        byte_of = _byte_of_char()
        self._take({**description, "normalizer": None}, vocab, lambda piece: bytes(byte_of[c] for c in piece))
        self._split = self._tokenizer.pre_tokenizer
        self._lone_digits = len(self._split.pre_tokenize_str("11")) == 2
        self.joins_newlines = len(self._split.pre_tokenize_str(");\n")) == 1

    def _take(
        self, description: Mapping[str, Any], vocab: int, said: Callable[[str], bytes], texts: Collection[str] = ()
    ) -> None:
        """said: the bytes of a piece; texts: the added tokens that are text."""
        from tokenizers import Tokenizer

        model, added = description["model"], list(description.get("added_tokens") or ())
        if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
            raise ValueError("it marks where words go on or end")  # of some such the library ends the process
        #: The ids by name of added tokens, but for those that are text.
        self.added: dict[str, int] = {one["content"]: one["id"] for one in added if one["content"] not in texts}
        #: The ids of special tokens by the names that a config.json has for them, where the folder says so.
        self.roles: dict[str, int] = {}
        kept = [one for one in added if one["content"] in texts]
        pieces: dict[str, int] = model["vocab"] | {one["content"]: one["id"] for one in kept}
        vocabulary = {piece: i for piece, i in pieces.items() if piece not in self.added}
        merges = [(left, right) for left, right in _merges(model) if {left, right, left + right} <= vocabulary.keys()]
        plain = {**description, "added_tokens": kept, "model": model | {"vocab": vocabulary, "merges": merges}}
        try:
            self._tokenizer = Tokenizer.from_str(
                json.dumps(plain | {"post_processor": None, "truncation": None, "padding": None})
            )
        except Exception as error:  # the library raises nothing more exact
            raise ValueError(str(error)) from None
        ids = set(self.added.values())
        self.tokens = [b""] * max(vocab, 1 + max([*pieces.values(), *ids], default=-1))
        for piece, i in vocabulary.items():
            if i not in ids:
                self.tokens[i] = said(piece)

    @classmethod
    def read(cls, folder: Path, vocab: int = 0) -> JsonCodec:
        """That of a model's folder: tokenizer.json, or vocab.json and merges.txt, which are cut as Qwen2's are, with
        what tokenizer_config.json says. Raises `ModelError` with one line that says what to do."""
        try:
            settings = _object(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").exists() else {}
            parts = not (folder / "tokenizer.json").exists() and (folder / "vocab.json").exists()
            description = _described(folder, settings) if parts else _object(folder / "tokenizer.json")
            model = description.get("model") or {}
            if model.get("type", "BPE") != "BPE":
                raise ValueError(f"it is {model['type']}, and only BPE is read")
            codec = (SentencePieceCodec if model.get("byte_fallback") else JsonCodec)(description, vocab)
        except FileNotFoundError as error:
            raise ModelError(f"{error.filename} is missing: download the whole model") from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            line = " ".join(str(error).split())
            raise ModelError(f"the tokenizer in {folder} cannot be read ({line}): download it again") from None
        for role in ("bos_token", "eos_token", "pad_token", "mask_token"):
            name = settings.get(role)
            name = name.get("content") if isinstance(name, dict) else name
            if name in codec.added:
                codec.roles[f"{role}_id"] = codec.added[name]
        return codec

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def last_piece(self, text: str) -> str:
        pieces = self._split.pre_tokenize_str(text)
        if not pieces or (self._lone_digits and text[-1].isnumeric()):
            return ""
        return text[pieces[-1][1][0] :]


#: What stands for a space in a SentencePiece vocabulary, and a byte's piece.
_SPACE, _BYTE = "\u2581", re.compile(r"<0x([0-9A-F]{2})>")
#: Where a text has to be cut lest that be read in it: what stands for a space is written in bytes.
_MISREAD = re.compile(f"({_SPACE})|(?<=<)(?=0x)")


class SentencePieceCodec(JsonCodec):
    """BPE over characters, with spaces written as U+2581 and a byte each for characters that the vocabulary lacks: a
    SentencePiece model as a tokenizer.json describes it, such as Gemma's.

    Of the file's normalisation only that of spaces is done, and nothing is put before a text, so that tokens say the
    file's own bytes. Text are the pieces that merges make, single characters, runs of whitespace, and of the added
    tokens that are not special those in pairs, as `<b>` and `</b>`. The others are reserved, whether they were added
    or nothing makes them.
    """

    def __init__(self, description: Mapping[str, Any], vocab: int = 0) -> None:
        """Raises `ValueError` for a vocabulary without all bytes, or of which it is not said how spaces are written."""
        model, added = description["model"], list(description.get("added_tokens") or ())
        pieces: dict[str, int] = model["vocab"]
        self._bytes = {int(found[1], 16): i for piece, i in pieces.items() if (found := _BYTE.fullmatch(piece))}
        if len(self._bytes) < 256:
            raise ValueError(f"it has only {len(self._bytes)} of 256 bytes")
        cut = _without_prefix(description.get("pre_tokenizer"))
        normalizer = _of_spaces(description.get("normalizer"))
        if normalizer is None and "Metaspace" not in json.dumps(cut):
            raise ValueError("it does not say how spaces are written")
        usual = {one["content"] for one in added if not one.get("special")}
        texts = {name for name in usual if _blank(name) or _counterpart(name) in usual}
        made = {left + right for left, right in _merges(model)} | texts
        known = {one["content"] for one in added}
        reserved = [
            {"content": piece, "id": i}
            for piece, i in pieces.items()
            if piece not in made and piece not in known and not (len(piece) == 1 or _blank(piece) or _BYTE.match(piece))
        ]
        own = {"added_tokens": added + reserved, "normalizer": normalizer, "pre_tokenizer": cut}
        self._take({**description, **own}, vocab, lambda piece: piece.replace(_SPACE, " ").encode(), texts)
        for byte, i in self._bytes.items():
            self.tokens[i] = bytes([byte])
        single = set(self._bytes.values())
        text = (piece.decode() for i, piece in enumerate(self.tokens) if i not in single)
        longer = {piece for piece in text if len(piece) > 1}
        self.joins_newlines = any("\n" in piece.lstrip("\n") for piece in longer)
        #: The pieces of more than one character, in order and as a set.
        self._ordered, self._longer = sorted(longer), longer

    def encode(self, text: str) -> list[int]:
        if _SPACE not in text and "<0x" not in text:
            return super().encode(text)
        ids: list[int] = []
        for part in filter(None, _MISREAD.split(text)):
            ids += [self._bytes[byte] for byte in part.encode()] if part == _SPACE else super().encode(part)
        return ids

    def last_piece(self, text: str) -> str:
        """What stands behind the last place that no piece of the vocabulary crosses, whatever follows."""
        first, end = max(0, len(text) - 2 * MAX_HEALED_BYTES), len(text)
        reach = [self._reach(text, start) for start in range(first, end)]
        furthest = list(accumulate(reach, max, initial=first))
        return text[next(at for at in range(end, first - 1, -1) if furthest[at - first] <= at) :]

    def _reach(self, text: str, start: int) -> int:
        """Where the longest piece ends that text from `start` on may be the beginning of; beyond the text where it may
        go on behind it."""
        rest = text[start:]
        longer = bisect_right(self._ordered, rest)
        if longer < len(self._ordered) and self._ordered[longer].startswith(rest):
            return len(text) + 1
        return next((start + size for size in range(len(rest), 1, -1) if rest[:size] in self._longer), start + 1)


def _merges(model: Mapping[str, Any]) -> Iterator[Sequence[str]]:
    """The pairs that a model joins, which older files have as one text each."""
    return (merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"])


def _blank(piece: str) -> bool:
    return not piece.replace(_SPACE, "").strip()


def _counterpart(tag: str) -> str:
    """`</b>` of `<b>`, and the reverse; "" of what is no tag."""
    if not (tag.startswith("<") and tag.endswith(">")):
        return ""
    return f"<{tag[2:]}" if tag.startswith("</") else f"</{tag[1:]}"


def _of_spaces(normalizer: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """What of a normaliser writes spaces as the vocabulary has them."""
    if normalizer is None:
        return None
    if normalizer["type"] == "Sequence":
        return next(filter(None, map(_of_spaces, normalizer["normalizers"])), None)
    replaces = normalizer["type"] == "Replace" and normalizer["pattern"] == {"String": " "}
    return normalizer if replaces and normalizer["content"] == _SPACE else None


def _without_prefix(cut: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """How text is cut into pieces, without the space that some put before the first."""
    if cut is None:
        return None
    if cut["type"] == "Sequence":
        return {**cut, "pretokenizers": [*map(_without_prefix, cut["pretokenizers"])]}
    if cut["type"] != "Metaspace":
        return cut
    return {**{k: v for k, v in cut.items() if k != "add_prefix_space"}, "prepend_scheme": "never"}


#: How Qwen2's tokenizer cuts text into pieces, as its tokenizer.json has it.
_QWEN2_PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _described(folder: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What a tokenizer.json would say to which vocab.json, merges.txt and the settings' added tokens amount."""
    lines = (folder / "merges.txt").read_text(encoding="utf-8").splitlines()
    merges = [line.split(" ") for line in lines if line and not line.startswith("#version")]
    added = [{"id": int(i), "content": one["content"]} for i, one in settings.get("added_tokens_decoder", {}).items()]
    return qwen2_description(_object(folder / "vocab.json"), merges, added)


def qwen2_description(
    vocab: Mapping[str, int], merges: Sequence[Sequence[str]], added: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """A tokenizer.json for a byte-level BPE that cuts text as Qwen2's does."""
    cut = [
        {"type": "Split", "pattern": {"Regex": _QWEN2_PIECES}, "behavior": "Isolated", "invert": False},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
    ]
    return {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": cut},
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        "model": {"type": "BPE", "vocab": vocab, "merges": merges},
    }


def _object(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ValueError(f"{path.name} holds no object")
    return found


def _byte_of_char() -> dict[str, int]:
    """The printable characters by which byte-level BPE vocabularies write bytes (GPT-2's table): printable Latin-1
    characters stand for themselves, the other bytes for the characters from U+0100 on, in order."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}
