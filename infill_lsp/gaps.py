"""Gaps as people make them, cut out of finished documents, to train a model on and to measure it with.

`author` chooses gaps of one text; `snapshot` is the document as it was before somebody filled one. `windows` draws
pieces of the corpus's documents with their gaps, and `write` puts them into a file, one JSON object a line:

    {"package", "language", "path", "text", "snippet", "gaps": [{"made", "start", "end"}]}

`text` is a run of whole lines, and begins with a newline where it is not the file's start; `start` and `end` count its
code points; `snippet` is a chunk of another file of the package that a person may have open beside it, or "".

How a gap is made:

- rest: a line was begun, and its end is missing; a third of them stop inside a word
- line: a line is missing, the cursor stands after its indentation
- lines: 2 to 12 lines are missing: a body, a statement, the end of a block, what stands between brackets
- inner: something before what stays is missing: arguments, an index, a string's contents, a condition
- above: a line, or its rest, where code below is there already: before definitions, at the top of blocks, comments
- selection: lines or an expression were selected, to be replaced
- nothing: nothing is missing (an empty gap), and the right answer is to stop at once
- edited: as rest, line or lines, and the gap holds a name that the code below uses and the code above does not

Everything drawn comes from the `Random` given, so the same seed gives the same gaps. It knows nothing of models.
"""

from __future__ import annotations

import gzip
import keyword
import os
import re
from array import array
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import log
from pathlib import Path
from random import Random
from typing import Generic, Literal, TypeVar
from urllib.parse import quote

import msgspec
from tree_sitter import Node

from infill_lsp.core import Snapshot
from infill_lsp.documents import Document

Made = Literal["rest", "line", "lines", "inner", "above", "selection", "nothing", "edited"]
Split = Literal["train", "held"]
T = TypeVar("T")

#: Shares of the kinds.
WEIGHTS: dict[Made, float] = {
    "rest": 0.26,
    "line": 0.17,
    "lines": 0.25,
    "inner": 0.10,
    "above": 0.05,
    "selection": 0.05,
    "nothing": 0.06,
    "edited": 0.06,
}
#: Shares of the languages; those that a corpus does not have leave theirs to the others.
LANGUAGES: dict[str, float] = {
    "python": 0.42,
    "typescript": 0.14,
    "javascript": 0.08,
    "go": 0.08,
    "rust": 0.06,
    "java": 0.06,
    "c": 0.05,
    "cpp": 0.05,
    "shell": 0.02,
    "sql": 0.02,
    "yaml": 0.006,
    "toml": 0.004,
    "markdown": 0.01,
}
#: Limits of a gap.
MAX_CHARS, MAX_LINES, MIN_SOLID = 600, 12, 2
#: Characters of a window, and those at its cut ends that no gap touches. Windows of at most 2,800 left what was learned
#: from them worse behind the long prefixes of serving than half of it would have been.
WINDOW, MARGIN = (1_500, 6_000), 150
#: A long file weighs as much as one of this many characters, and a package as this many at most.
FILE_CAP, PACKAGE_CAP = 20_000, 500_000
#: Lines of a snippet, and chunks that an index has at most.
CHUNK_LINES, MAX_CHUNKS = 25, 3_000

Span = tuple[int, int]

_WORD = re.compile(r"[^\W\d]\w*")
_PAIRS = {"(": ")", "[": "]", "{": "}", "string_start": "string_end", '"': '"', "'": "'", "`": "`"}
#: The same on one line of a text without a tree: what stands between the innermost brackets, or quotes.
_PAIR = re.compile(r"\(([^()\n]+)\)|\[([^\[\]\n]+)\]|\{([^{}\n]+)\}|\"([^\"\n]+)\"")
_DEFINITION = re.compile(
    r"\s*(@|#\[|export\b|pub\b|public\b|private\b|protected\b|static\b|abstract\b|async\b|def\b|class\b|func(tion)?\b|fn\b"
    r"|impl\b|struct\b|enum\b|trait\b|interface\b|type\b|const\b|template\b|namespace\b|typedef\b|create\b|CREATE\b)"
)
#: A line's end after which more must come.
_OPEN_END = re.compile(r"([(\[{,\\=+\-*/&|<>.:?]|\b(and|or|not|in|is|return|else|do|then))$")
_KEYWORDS = {
    *keyword.kwlist,
    "abstract", "any", "auto", "begin", "bool", "boolean", "byte", "case", "catch", "chan", "char", "const",
    "constexpr", "default", "defer", "delete", "done", "double", "elseif", "end", "enum", "export", "extends",
    "extern", "false", "final", "float", "fmt", "func", "function", "goto", "impl", "implements", "int",
    "interface", "let", "long", "loop", "map", "match", "mod", "mut", "namespace", "new", "nil", "null", "number",
    "object", "operator", "override", "package", "private", "protected", "pub", "public", "ref", "register",
    "select", "self", "short", "signed", "sizeof", "static", "std", "str", "string", "struct", "super", "switch",
    "template", "then", "this", "throw", "throws", "trait", "true", "type", "typedef", "typename", "typeof",
    "undefined", "union", "unsigned", "use", "using", "var", "virtual", "void", "volatile", "where",
}  # fmt: skip
#: How comments to the line's end begin, where that is not "//".
_LINE_COMMENT = {"python": "#", "shell": "#", "yaml": "#", "toml": "#", "sql": "--", "markdown": "<!--"}
_LICENCE = re.compile(r"licen[cs]e|copyright", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Authored:
    """A gap in a text: `text[start:end]`, in code points, is what is missing."""

    made: Made
    start: int
    end: int


def author(text: str, language: str, random: Random, count: int, within: Span | None = None) -> list[Authored]:
    """At most `count` different gaps of the text, inside `within` where that is given; fewer where it has no more.

    Lines of the text end with "\\n" alone. Gaps may overlap: each is an example of its own.
    """
    page = _Page(text, language, within or (0, len(text)))
    found: dict[Span, Authored] = {}
    for _ in range(4 * count):
        if len(found) == count:
            break
        (made,) = random.choices(list(WEIGHTS), list(WEIGHTS.values()))
        for _ in range(24 if made == "edited" else 8):
            span = _MAKERS[made](page, random)
            if span and span not in found and page.fits(span, made):
                found[span] = Authored(made, *span)
                break
    return list(found.values())


def snapshot(text: str, language: str, gap: Authored, path: str = "") -> Snapshot:
    """The document without the gap's text, the cursor where that is missing."""
    before = text[: gap.start]
    row = before.count("\n")
    column = len(before) - (before.rfind("\n") + 1)
    document = Document(f"file:///{quote(path)}", language, 1, before + text[gap.end :])
    return document.snapshot(row, column, "utf-32", wait=True)


class _Page:
    """A text, its lines, and the spans in it that its syntax suggests."""

    def __init__(self, text: str, language: str, within: Span) -> None:
        self.text = text
        self.lines = text.split("\n")
        self.starts = [0, *accumulate(len(line) + 1 for line in self.lines[:-1])]
        comment = _LINE_COMMENT.get(language, "//")
        self._comments = (comment, "/*", "* ", "*/") if comment == "//" else (comment,)
        self.low, self.high = max(within[0], _after_licence(text, comment)), within[1]
        first, last = (bisect_right(self.starts, at) - 1 for at in (self.low, self.high))
        #: Rows to take lines from: neither blank nor with spaces at their end, which nobody types.
        self.rows = [row for row in range(first, last + 1) if self.lines[row] and not self.lines[row][-1].isspace()]
        self.blank = [row for row in range(first, last + 1) if not self.lines[row]]
        #: Rows of comments, and of strings of several lines.
        self.prose = {row for row in self.rows if self.is_comment(row)}
        #: Spans of whole lines: bodies and what stands between brackets; single nodes; the ends of blocks.
        self.bodies: list[Span] = []
        self.statements: list[Span] = []
        self.runs: list[Span] = []
        #: Spans inside lines: before something that stays; expressions.
        self.inner: list[Span] = []
        self.expressions: list[Span] = []
        tree = Document("", language, 1, text).snapshot(0, 0, "utf-32", wait=True).tree
        if tree:
            self._read_tree(tree.root_node, first, last)
        else:
            self._read_lines(first, last)

    def indent(self, row: int) -> int:
        """Characters of the line's indentation."""
        return _indent(self.lines[row])

    def start(self, row: int) -> int:
        """Where the line's first character after its indentation stands."""
        return self.starts[row] + self.indent(row)

    def end(self, row: int) -> int:
        """Where the line ends, without its newline."""
        return self.starts[row] + len(self.lines[row])

    def whole(self, first: int, last: int) -> Span:
        """The gap of whole lines, from the first one's indentation to the last one's end."""
        return self.start(first), self.end(last)

    def is_comment(self, row: int) -> bool:
        """Whether the line looks like one of a comment; only those with a star, of one of several lines."""
        return self.lines[row].lstrip().startswith(self._comments)

    def below(self, row: int) -> int | None:
        """The next row that is not blank."""
        return next((at for at in range(row + 1, len(self.lines)) if self.lines[at].strip()), None)

    def above(self, row: int) -> int | None:
        """The last row before that is not blank."""
        return next((at for at in range(row - 1, -1, -1) if self.lines[at].strip()), None)

    def fits(self, span: Span, made: Made) -> bool:
        """Whether the span is one that a gap may have."""
        start, end = span
        if not self.low <= start <= end <= self.high:
            return False
        if made == "nothing":
            return True
        gap = self.text[start:end]
        solid = len("".join(gap.split()))
        short = len(gap) <= MAX_CHARS and gap.count("\n") < MAX_LINES
        return short and solid >= MIN_SOLID and not gap[-1].isspace()

    def is_announced(self, span: Span) -> bool:
        """Whether the gap holds a name that the 40 lines below it use and the 60 above it do not."""
        start, end = span
        row, last = (bisect_right(self.starts, at) - 1 for at in span)
        names = {name for name in _WORD.findall(self.text[start:end]) if len(name) > 2} - _KEYWORDS
        if not names:
            return False
        stop = self.starts[last + 41] if last + 41 < len(self.lines) else len(self.text)
        names &= set(_WORD.findall(self.text[end : min(stop, self.high)]))
        return bool(names - set(_WORD.findall(self.text[self.starts[max(0, row - 60)] : start])))

    def _at(self, point: tuple[int, int]) -> int:
        """The code point of a row and a column of bytes."""
        row, column = point
        line = self.lines[row]
        return self.starts[row] + (column if line.isascii() else len(line.encode()[:column].decode(errors="ignore")))

    def _read_tree(self, root: Node, top: int, bottom: int) -> None:
        nodes = [root]
        while nodes:
            node = nodes.pop()
            children = node.children
            nodes.extend(child for child in children if child.end_point.row >= top and child.start_point.row <= bottom)
            if not node.is_named:
                continue
            first, last = node.start_point.row, node.end_point.row
            span = self._at(node.start_point), self._at(node.end_point)
            if self.text[span[0] : span[1]].endswith("\n"):
                last -= 1
            if last > first:
                self._read_run(children)
                if "string" in node.type or "comment" in node.type:
                    self.prose.update(range(first, last + 1))
                if last - first < MAX_LINES and self._fills(span, first, last):
                    is_body = node.type.endswith(("block", "body")) and self.text[span[0]] != "{"
                    (self.bodies if is_body else self.statements).append(self.whole(first, last))
            elif children:
                self.expressions.append(span)
            self._read_pair(children)
            condition = node.child_by_field_name("condition")
            if condition and condition.start_point.row == condition.end_point.row:
                start, end = self._at(condition.start_point), self._at(condition.end_point)
                if self.text[start] != "(":  # What stands between those is there already.
                    self.inner.append((start, end))

    def _fills(self, span: Span, first: int, last: int) -> bool:
        """Whether nothing but a separator stands on the span's lines beside it."""
        after = self.text[span[1] : self.end(last)].strip()
        return span[0] == self.start(first) and after in ("", ",", ";")

    def _read_run(self, children: Sequence[Node]) -> None:
        """The ends of a block: from one of its parts, each with lines of its own, to its last."""
        parts = [
            child
            for child in children
            if child.is_named and self._at(child.start_point) == self.start(child.start_point.row)
        ]
        if len(parts) < 2 or len({self.indent(part.start_point.row) for part in parts}) > 1:
            return
        last = parts[-1].end_point.row - (parts[-1].end_point.column == 0)
        self.runs.extend(
            self.whole(part.start_point.row, last)
            for part in parts[-MAX_LINES:]
            if 0 < last - part.start_point.row < MAX_LINES
        )

    def _read_pair(self, children: Sequence[Node]) -> None:
        """What stands between brackets or quotes."""
        opener = next((at for at, child in enumerate(children) if child.type in _PAIRS), None)
        if opener is None:
            return
        closer = next(
            (child for child in reversed(children[opener + 1 :]) if child.type == _PAIRS[children[opener].type]), None
        )
        if closer is None:
            return
        start, end = self._at(children[opener].end_point), self._at(closer.start_point)
        first, last = children[opener].end_point.row, closer.start_point.row
        if last - first > 2 and start == self.end(first) and end == self.start(last):
            self.bodies.append(self.whole(first + 1, last - 1))
        if last - first < 3:
            self.inner.append((start, end))
            for child in children[opener + 1 : -1]:
                if child.is_named:
                    at = self._at(child.start_point)
                    self.inner.extend([(at, end), (at, self._at(child.end_point))])

    def _read_lines(self, first: int, last: int) -> None:
        """The same by indentation and brackets, for a language without a grammar."""
        for row in range(first, last):
            if not self.lines[row].strip():
                continue
            self.inner.extend(
                (self.starts[row] + match.start(match.lastindex), self.starts[row] + match.end(match.lastindex))
                for match in _PAIR.finditer(self.lines[row])
                if match.lastindex
            )
            block = self._block(row + 1)
            if block and self.indent(block[0]) > self.indent(row):
                (self.bodies if len(block) > 1 else self.statements).append(self.whole(block[0], block[-1]))
                level = self.indent(block[0])
                self.runs.extend(
                    self.whole(at, block[-1]) for at in block[1:-1] if self.indent(at) == level and self._opens(at)
                )
            elif block and (row == 0 or not self.lines[row - 1].strip()):
                self.statements.append(self.whole(row, block[-1]))

    def _block(self, row: int) -> list[int]:
        """The rows from `row` on that belong together by indentation, without blank ones; none where they are many."""
        rows: list[int] = []
        for at in range(row, len(self.lines)):
            if at - row > MAX_LINES:
                return []
            if not self.lines[at].strip():
                continue
            if rows and self.indent(at) < self.indent(rows[0]):
                break
            rows.append(at)
        return rows

    def _opens(self, row: int) -> bool:
        """Whether a statement may begin there: not with a closing bracket."""
        return self.lines[row].lstrip()[0] not in ")]}"


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _after_licence(text: str, comment: str) -> int:
    """Where the comments at the top of the text end, if they hold a licence, else 0."""
    top = re.match(rf"(\s*(/\*(?s:.*?)\*/|<!--(?s:.*?)-->|{re.escape(comment)}.*))*\n?", text)
    return top.end() if top and _LICENCE.search(top[0]) else 0


def _pick_row(page: _Page, random: Random) -> int | None:
    """A row with text; prose counts for less than code, and brackets alone, which editors put, for least."""
    for _ in range(4 if page.rows else 0):
        row = random.choice(page.rows)
        share = 0.4 if row in page.prose else 1 if _WORD.search(page.lines[row]) else 0.15
        if random.random() < share:
            return row
    return None


def _rest(page: _Page, random: Random) -> Span | None:
    row = _pick_row(page, random)
    return _end(page, random, row) if row is not None else None


def _end(page: _Page, random: Random, row: int) -> Span | None:
    """A line's end, from where somebody stopped to type: inside a word, after a sign or a space, or anywhere."""
    line, base, indent = page.lines[row], page.starts[row], page.indent(row)
    draw = random.random()
    if draw < 1 / 3:
        places = [at for match in _WORD.finditer(line) for at in range(match.start() + 1, match.end())]
    elif draw < 5 / 6:
        places = [at for at in range(indent + 1, len(line)) if line[at - 1] in "([{=.,: " and line[at] != " "]
    else:
        places = [at for at in range(indent + 1, len(line)) if not (line[at - 1] == " " and line[at] == " ")]
    return (base + random.choice(places), page.end(row)) if places else None


def _line(page: _Page, random: Random) -> Span | None:
    row = _pick_row(page, random)
    return page.whole(row, row) if row is not None else None


def _lines(page: _Page, random: Random) -> Span | None:
    sources = [(spans, share) for spans, share in ((page.bodies, 4), (page.statements, 2), (page.runs, 4)) if spans]
    if not sources:
        return None
    (spans,) = random.choices(*zip(*sources, strict=True))
    span = random.choice(spans)
    return span if "\n" in page.text[span[0] : span[1]] else None


def _inner(page: _Page, random: Random) -> Span | None:
    if not page.inner:
        return None
    start, end = random.choice(page.inner)
    inside = page.text[start:end]
    return start + len(inside) - len(inside.lstrip()), start + len(inside.rstrip())


def _above(page: _Page, random: Random) -> Span | None:
    row = _pick_row(page, random)
    if row is None:
        return None
    above, below = page.above(row), page.below(row)
    opens = above is not None and page.indent(above) < page.indent(row)
    leads = below is not None and bool(_DEFINITION.match(page.lines[below]))
    if not (opens or leads or page.is_comment(row)):
        return None
    return page.whole(row, row) if random.random() < 0.5 else _end(page, random, row)


def _selection(page: _Page, random: Random) -> Span | None:
    draw = random.random()
    if draw < 0.4 and page.expressions:
        return random.choice(page.expressions)
    if draw < 0.7 and page.statements:
        return random.choice(page.statements)
    row = _pick_row(page, random)
    if row is None:
        return None
    last = row
    for at in range(row, min(row + 1 + random.randrange(8), len(page.lines))):
        if page.lines[at].strip():
            if page.indent(at) < page.indent(row):
                break
            last = at
    return page.whole(row, last)


def _nothing(page: _Page, random: Random) -> Span | None:
    draw = random.random()
    if draw < 0.25 and page.blank:
        at = page.starts[random.choice(page.blank)]
        return at, at
    row = _pick_row(page, random)
    if row is None:
        return None
    line = page.lines[row]
    if draw < 0.5:
        places = [at for at in range(1, len(line)) if line[at] in ")]" and line[at - 1] not in "([{, "]
        if not places:
            return None
        at = page.starts[row] + random.choice(places)
        return at, at
    below = page.below(row)
    if _OPEN_END.search(line) or (below is not None and page.indent(below) > page.indent(row)):
        return None
    return page.end(row), page.end(row)


def _edited(page: _Page, random: Random) -> Span | None:
    make = random.choice([_rest, _line, _lines])
    span = make(page, random)
    return span if span and page.is_announced(span) else None


_MAKERS: dict[Made, Callable[[_Page, Random], Span | None]] = {
    "rest": _rest,
    "line": _line,
    "lines": _lines,
    "inner": _inner,
    "above": _above,
    "selection": _selection,
    "nothing": _nothing,
    "edited": _edited,
}


class Source(msgspec.Struct, frozen=True):
    """A document of the corpus."""

    package: str
    language: str
    path: str
    text: str


class Window(msgspec.Struct, frozen=True):
    """A piece of a document with its gaps, one line of the file that `write` writes."""

    package: str
    language: str
    path: str
    text: str
    snippet: str
    gaps: list[Authored]


class GapsError(ValueError):
    """A corpus that gives no windows; the text is one line that says what to do."""


class Corpus:
    """The documents of a split, by language and package."""

    def __init__(self, folder: Path, split: Split) -> None:
        """Raises `GapsError` where the corpus is missing or empty."""
        path = folder / f"{split}.jsonl.gz"
        decode = msgspec.json.Decoder(Source).decode
        documents: dict[str, dict[str, list[Source]]] = {}
        try:
            with gzip.open(path, "rb") as file:
                for line in file:
                    source = decode(line)
                    if source.language in LANGUAGES:
                        documents.setdefault(source.language, {}).setdefault(source.package, []).append(source)
        except FileNotFoundError:
            raise GapsError(f"{path} does not exist: build it with `infill-engine corpus --out {folder}`") from None
        except (OSError, EOFError, msgspec.MsgspecError) as error:
            raise GapsError(f"{path} is no corpus ({error}): build it with `infill-engine corpus`") from None
        if not documents:
            raise GapsError(f"{path} has no documents: build it with `infill-engine corpus --out {folder}`")
        self._documents = documents
        self._languages = [language for language in LANGUAGES if language in documents]
        self._packages = {
            language: _Urn(
                list(packages),
                [min(PACKAGE_CAP, sum(map(_weight, sources))) for sources in packages.values()],
            )
            for language, packages in documents.items()
        }
        self._sources = {
            (language, package): _Urn(sources, [_weight(source) for source in sources])
            for language, packages in documents.items()
            for package, sources in packages.items()
        }
        self._indexes: dict[tuple[str, str], _Index] = {}

    def draw(self, random: Random) -> Source:
        """A document, by language, then package, then file."""
        (language,) = random.choices(self._languages, [LANGUAGES[language] for language in self._languages])
        package = self._packages[language].draw(random)
        return self._sources[language, package].draw(random)

    def snippet(self, source: Source, text: str) -> str:
        """The chunk of another file of the package, in its language, that has most to do with the text; or ""."""
        key = source.language, source.package
        if key not in self._indexes:
            self._indexes[key] = _Index(self._documents[source.language][source.package])
        return self._indexes[key].best(source, text)


class _Urn(Generic[T]):
    """Things to draw from, with weights."""

    def __init__(self, things: list[T], weights: list[int]) -> None:
        self._things = things
        self._sums = list(accumulate(weights))

    def draw(self, random: Random) -> T:
        (thing,) = random.choices(self._things, cum_weights=self._sums)
        return thing


def _weight(source: Source) -> int:
    return min(len(source.text), FILE_CAP)


class _Index:
    """Chunks of one package's files in one language, ranked by BM25 (Robertson and Zaragoza 2009, equation 3.15)."""

    K1, B = 1.2, 0.75

    def __init__(self, sources: Sequence[Source]) -> None:
        chunks = [
            (number, first)
            for number, source in enumerate(sources)
            for first in range(0, source.text.count("\n") + 1, CHUNK_LINES)
        ]
        if len(chunks) > MAX_CHUNKS:
            chunks = sorted(Random(sources[0].package).sample(chunks, MAX_CHUNKS))
        self._sources = sources
        self._chunks = chunks
        self._sizes = array("I")
        #: Term -> the chunks that have it, and how often.
        self._postings: dict[str, tuple[array[int], array[int]]] = defaultdict(lambda: (array("H"), array("H")))
        lines: list[str] = []
        current = -1
        for at, (number, first) in enumerate(chunks):
            if number != current:
                lines, current = sources[number].text.split("\n"), number
            terms = Counter(_terms("\n".join(lines[first : first + CHUNK_LINES])))
            self._sizes.append(terms.total())
            for term, times in terms.items():
                where, how_often = self._postings[term]
                where.append(at)
                how_often.append(min(times, 65_535))
        self._mean = max(1.0, sum(self._sizes) / max(1, len(chunks)))

    def best(self, source: Source, text: str) -> str:
        scores: dict[int, float] = defaultdict(float)
        for term in sorted(set(_terms(text))):
            if term not in self._postings:
                continue
            where, how_often = self._postings[term]
            if 4 * len(where) > len(self._chunks) + 4:  # Says little about a chunk, and costs the most.
                continue
            rarity = log(1 + (len(self._chunks) - len(where) + 0.5) / (len(where) + 0.5))
            for at, times in zip(where, how_often, strict=True):
                norm = self.K1 * (1 - self.B + self.B * self._sizes[at] / self._mean)
                scores[at] += rarity * times * (self.K1 + 1) / (times + norm)
        others = (at for at in scores if self._sources[self._chunks[at][0]] is not source)
        best = max(others, key=lambda at: (scores[at], -at), default=None)
        if best is None:
            return ""
        number, first = self._chunks[best]
        return "\n".join(self._sources[number].text.split("\n")[first : first + CHUNK_LINES])


_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


def _terms(text: str) -> list[str]:
    """The parts of the text's identifiers, lower-cased: of `snake_case` and `camelCase` two each."""
    return [part.lower() for part in _PART.findall(text) if len(part) > 1]


def windows(corpus: Corpus, random: Random, count: int, gaps: int = 12, snippets: float = 0.3) -> Iterator[Window]:
    """`count` pieces of documents with about `gaps` gaps each, a share of `snippets` with a snippet.

    Raises `GapsError` where the corpus has no documents that are long enough.
    """
    failures = 0
    while count:
        source = corpus.draw(random)
        start, end = _cut(source.text, random)
        low = start + MARGIN if start else 0
        high = end - MARGIN if end < len(source.text) else end
        found = author(source.text, source.language, random, gaps, (low, high))
        if 2 * len(found) < gaps:
            failures += 1
            if failures == 1_000:
                raise GapsError(f"no document of the corpus has {gaps} gaps: ask for fewer (--gaps)")
            continue
        failures = 0
        count -= 1
        top = start - 1 if start else 0  # The newline before it says that it is not the file's start.
        text = source.text[top:end]
        snippet = corpus.snippet(source, text) if random.random() < snippets else ""
        moved = [Authored(gap.made, gap.start - top, gap.end - top) for gap in found]
        yield Window(source.package, source.language, source.path, text, snippet, moved)


def write(path: Path, windows: Iterator[Window]) -> None:
    """Writes gzipped JSON lines; the same windows give the same bytes, and a broken run leaves no file."""
    part = path.with_name(f"{path.name}.part")
    try:
        with open(part, "wb") as raw, gzip.GzipFile("", "wb", 6, raw, mtime=0) as file:
            encode = msgspec.json.Encoder().encode
            for window in windows:
                file.write(encode(window) + b"\n")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _cut(text: str, random: Random) -> Span:
    """A run of whole lines; a third of them at the file's start, a third where a definition or a section begins."""
    lines = text.split("\n")
    starts = [0, *accumulate(len(line) + 1 for line in lines)]
    starts[-1] = len(text)
    low, high = WINDOW
    size = random.randint(low, high)
    rows = [row for row in range(1, len(lines)) if starts[row] + low <= len(text)]
    first = 0
    draw = random.random()
    if draw >= 0.3 and rows:
        heads = [row for row in rows if _begins(lines, row)] if draw < 0.65 else []
        first = random.choice(heads or rows)
    last = bisect_right(starts, starts[first] + size) - 1
    return starts[first], starts[max(last, first + 1)]


def _begins(lines: Sequence[str], row: int) -> bool:
    """Whether a definition begins there, or a section: after a blank line, indented no more than what is above."""
    if _DEFINITION.match(lines[row]):
        return True
    if not lines[row].strip() or lines[row - 1].strip():
        return False
    above = next((lines[at] for at in range(row - 1, -1, -1) if lines[at].strip()), "")
    return _indent(lines[row]) <= _indent(above)
