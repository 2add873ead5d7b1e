"""The mirror of a document: it must hold what the client holds, in every encoding and after every edit."""

import re
import sys
from time import sleep, thread_time

import pytest
import tree_sitter_python
from hypothesis import given, settings
from hypothesis import strategies as st
from lsprotocol import types
from tree_sitter import Language, Parser

from infill_lsp import languages
from infill_lsp.core import MAX_CHARACTERS
from infill_lsp.documents import FIRST_PARSE_S, PARSE_S, Document, Trees, position

ENCODINGS = ("utf-8", "utf-16", "utf-32")
CODECS = {"utf-8": ("utf-8", 1), "utf-16": ("utf-16-le", 2), "utf-32": ("utf-32-le", 4)}
#: Characters that other line splitters end lines at, of every width in UTF-8 and UTF-16, and half a pair.
TEXT = st.text(st.sampled_from("ab \t\n\r\f\v\x85\u2028(:'¿é漢😀\ud83d"), max_size=30)


def units(text: str, encoding: str) -> int:
    """How long a client that counts in `encoding` takes the text to be."""
    codec, size = CODECS[encoding]
    return len(text.encode(codec, "surrogatepass")) // size


def partial(start: tuple[int, int], end: tuple[int, int], text: str) -> types.TextDocumentContentChangePartial:
    return types.TextDocumentContentChangePartial(
        range=types.Range(types.Position(*start), types.Position(*end)), text=text
    )


def fresh_tree(document: Document) -> str:
    source = "\n".join(re.split("\r\n|\n|\r", document.text)).encode("utf-8", "surrogatepass")
    return str(Parser(Language(tree_sitter_python.language())).parse(source).root_node)


@pytest.mark.parametrize(
    ("text", "lines", "eol"),
    [
        ("", ("",), "\n"),
        ("a", ("a",), "\n"),
        ("a\n", ("a", ""), "\n"),
        ("a\r\nb\r\n", ("a", "b", ""), "\r\n"),
        ("a\rb\rc\n", ("a", "b", "c", ""), "\r"),
        ("a\nb\r\nc\r\n", ("a", "b", "c", ""), "\r\n"),
        ("a\fb\vc\x85d\u2028e\u2029f\x1cg", ("a\fb\vc\x85d\u2028e\u2029f\x1cg",), "\n"),
    ],
)
def test_only_lsp_line_ends_end_a_line(text: str, lines: tuple[str, ...], eol: str) -> None:
    document = Document("file:///a.py", "python", 1, text)
    snapshot = document.snapshot(0, 0, "utf-16")
    assert (document.text, snapshot.lines, snapshot.eol) == (text, lines, eol)


@given(
    text=TEXT,
    ends=st.tuples(st.integers(0, 30), st.integers(0, 30)),
    new=TEXT,
    encoding=st.sampled_from(ENCODINGS),
)
def test_an_edit_leaves_the_text_that_the_client_has(text: str, ends: tuple[int, int], new: str, encoding: str) -> None:
    # A client cannot address the place inside "\r\n"; take its start.
    start, end = (at - (text[at - 1 : at + 1] == "\r\n") for at in sorted(min(end, len(text)) for end in ends))

    def place(offset: int) -> tuple[int, int]:
        lines = re.split("\r\n|\n|\r", text[:offset])
        return len(lines) - 1, units(lines[-1], encoding)

    document = Document("file:///a.py", "python", 1, text)
    document.snapshot(0, 0, encoding)
    document.change([partial(place(start), place(end), new)], 2, encoding)
    assert document.text == text[:start] + new + text[end:]
    snapshot = document.snapshot(0, 0, encoding)
    assert snapshot.lines == tuple(re.split("\r\n|\n|\r", document.text))
    assert snapshot.characters == document.characters == sum(map(len, snapshot.lines))
    assert snapshot.version == 2


@given(line=st.text(st.sampled_from("ab¿é漢😀\ud83d"), max_size=12), encoding=st.sampled_from(ENCODINGS))
def test_a_cursor_survives_the_way_to_the_client_and_back(line: str, encoding: str) -> None:
    document = Document("file:///a.py", "python", 1, "x\n" + line)
    for column in range(len(line) + 1):
        sent = position(("x", line), 1, column, encoding)
        assert sent == types.Position(1, units(line[:column], encoding))
        snapshot = document.snapshot(sent.line, sent.character, encoding)
        assert (snapshot.row, snapshot.column) == (1, column)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize(
    ("line", "character", "place"),
    [(0, 99, (0, 3)), (1, 99, (1, 2)), (2, 5, (2, 0)), (3, 0, (2, 0)), (99, 99, (2, 0))],
)
def test_a_position_outside_the_text_is_its_nearest_place(
    line: int, character: int, place: tuple[int, int], encoding: str
) -> None:
    snapshot = Document("file:///a.py", "python", 1, "abc\r\n¿😀\n").snapshot(line, character, encoding)
    assert (snapshot.row, snapshot.column) == place


def test_a_position_inside_a_character_is_before_it() -> None:
    document = Document("file:///a.py", "python", 1, "a😀b")
    assert [document.snapshot(0, unit, "utf-16").column for unit in range(5)] == [0, 1, 1, 2, 3]
    assert [document.snapshot(0, unit, "utf-8").column for unit in range(7)] == [0, 1, 1, 1, 1, 2, 3]


def test_changes_of_one_notification_apply_in_order_and_a_whole_text_replaces_all() -> None:
    document = Document("file:///a.py", "python", 1, "one\r\ntwo\r\n")
    document.change([partial((0, 0), (0, 0), "zero\n"), partial((1, 0), (2, 3), "x")], 2, "utf-16")
    assert document.text == "zero\nx\r\n"
    document.change([types.TextDocumentContentChangeWholeDocument("new\r")], 3, "utf-16")
    assert (document.text, document.version) == ("new\r", 3)
    assert document.snapshot(0, 0, "utf-16").eol == "\r"


def test_a_reversed_range_is_the_same_range() -> None:
    document = Document("file:///a.py", "python", 1, "abcd")
    document.change([partial((0, 3), (0, 1), "-")], 2, "utf-16")
    assert document.text == "a-d"


@pytest.mark.parametrize(("before", "after", "lines"), [("a\rb", "a\r\nb", 2), ("a\nb", "a\r\nb", 2)])
def test_line_ends_that_meet_become_one(before: str, after: str, lines: int) -> None:
    document = Document("file:///a.py", "python", 1, before)
    place, end = ((1, 0), "\n") if "\r" in before else ((0, 1), "\r")
    document.change([partial(place, place, end)], 2, "utf-16")
    assert document.text == after
    assert len(document.snapshot(0, 0, "utf-16").lines) == lines


SOURCE = """import os


def first(a, b):
    return [a, b]


class Second:
    x = {'k': 1}

    def m(self):
        for item in self.x:
            total = call(item, [1, 2, 3], key="value")
        return {"total": total}
"""


@settings(deadline=None)
@given(
    edits=st.lists(
        st.tuples(
            st.tuples(st.integers(0, 15), st.integers(0, 20)),
            st.tuples(st.integers(0, 15), st.integers(0, 20)),
            st.sampled_from(["", "(", ")", '"""', "\n", "\r\n", "    x = 1\n", ":", "é😀", "\ud83d", "def g():\n"]),
        ),
        max_size=6,
    ),
    every=st.booleans(),
)
def test_the_kept_tree_is_the_tree_of_the_text(
    edits: list[tuple[tuple[int, int], tuple[int, int], str]], every: bool
) -> None:
    document = Document("file:///a.py", "python", 1, SOURCE)
    document.snapshot(0, 0, "utf-16")
    for start, end, text in edits:
        document.change([partial(start, end, text)], 2, "utf-16")
        if every:
            document.snapshot(0, 0, "utf-16")
    tree = document.snapshot(0, 0, "utf-16").tree
    assert tree is not None
    source = "\n".join(document.snapshot(0, 0, "utf-16").lines).encode("utf-8", "surrogatepass")
    assert tree.root_node.end_byte == len(source)
    if not tree.root_node.has_error:  # How an error is repaired may depend on what was parsed before.
        assert str(tree.root_node) == fresh_tree(document)


def test_a_snapshot_does_not_change_with_its_document() -> None:
    document = Document("file:///a.py", "python", 1, SOURCE)
    snapshot = document.snapshot(3, 0, "utf-16")
    assert snapshot.tree is not None
    lines, tree = snapshot.lines, str(snapshot.tree.root_node)
    document.change([partial((0, 0), (5, 0), "x")], 2, "utf-16")
    assert document.snapshot(0, 0, "utf-16").lines != lines
    assert (snapshot.lines, str(snapshot.tree.root_node)) == (lines, tree)
    assert not snapshot.tree.root_node.has_changes


def test_a_language_without_a_grammar_has_no_tree() -> None:
    assert Document("file:///a.txt", "plaintext", 1, "x").snapshot(0, 0, "utf-16").tree is None


FUNCTION = "def f(a, b):\n    for c in a:\n        d = b(c, [1, 2])\n    return {'d': d}\n\n"


def test_a_parse_that_takes_too_long_goes_on_aside_and_is_there_later() -> None:
    document = Document("file:///a.py", "python", 1, FUNCTION * 1_000)
    assert document.snapshot(0, 0, "utf-16", wait=True).tree is not None
    document.change([partial((0, 0), (0, 0), "x = {\n")], 2, "utf-16")
    start = thread_time()
    assert document.snapshot(0, 0, "utf-16").tree is None
    assert thread_time() - start < 10 * PARSE_S
    document.change([partial((0, 0), (1, 0), "")], 3, "utf-16")
    tree = document.snapshot(0, 0, "utf-16", wait=True).tree
    assert tree is not None
    assert str(tree.root_node) == fresh_tree(document)


def test_the_first_parse_of_a_big_file_does_not_hold_up_the_snapshot() -> None:
    document = Document("file:///a.py", "python", 1, FUNCTION * 4_000)
    start = thread_time()
    assert document.snapshot(0, 0, "utf-16").tree is None
    assert thread_time() - start < 10 * FIRST_PARSE_S
    tree = None
    for _ in range(1_000):  # Without waiting for it, as a server asks.
        if tree := document.snapshot(0, 0, "utf-16").tree:
            break
        sleep(0.02)
    assert tree is not None
    assert tree.root_node.end_point.row == 20_000


EMBEDDED = [
    ("markdown", "# T\n\n```python\nx = ¦1\n```\n", "python", (3, 3)),
    ("markdown", "```sh\nls ¦\n```\n", "shellscript", (1, 1)),
    ("markdown", "```{.rust}\n¦\n```\n", "rust", (1, 1)),
    ("markdown", "- a\n\n  ``` ts\n  let x¦\n  ```\n", "typescript", (3, 3)),
    ("markdown", "~~~js\nlet x\n¦", "javascript", (1, 2)),
    ("markdown", "```brainfuck\n+¦\n```\n", "brainfuck", (1, 1)),
    ("markdown", "```\n+¦\n```\n", "plaintext", (1, 1)),
    ("markdown", "---\na: ¦\n---\n\n# T\n", "yaml", (1, 1)),
    ("markdown", "```py¦thon\nx\n```\n", "markdown", None),
    ("markdown", "```python\n¦```\n", "markdown", None),
    ("markdown", "```python\nx\n```\n¦\n", "markdown", None),
    ("html", "<p>¦</p>\n<script>\nf();\n</script>\n", "html", None),
    ("html", "<script>\nf(¦);\n</script>\n", "javascript", (1, 1)),
    ("html", "<script>\n¦\n</script>\n", "javascript", (1, 1)),
    ("html", "<script>let é = ¦</script>\n", "javascript", (0, 0)),
    ("html", '<script type="text/typescript">\n  f(¦)\n</script>\n', "typescript", (1, 1)),
    ("html", '<script type="application/json">{"a": ¦}</script>\n', "json", (0, 0)),
    ("html", '<script type="application/ld+json">\n{"a": ¦}\n</script>\n', "json", (1, 1)),
    ("html", '<script type="text/x-template">\n<p>¦</p>\n</script>\n', "html", (1, 1)),
    ("html", "<style>\na { ¦ }\n</style>\n", "css", (1, 1)),
    ("html", "<p>é</p>\n<script>\nfunction f() {\n  ¦", "javascript", (2, 3)),
    ("html", "é <script>let x = ¦", "javascript", (0, 0)),
    ("html", "<style>\na { ¦\n", "css", (1, 2)),
    ("vue", '<p/>\n<script lang="ts">\nlet x = 1\n¦\n\n<style>\n</style>\n', "typescript", (2, 7)),
    ("vue", '<script type="module" lang="ts">\nf(¦);\n</script>\n', "typescript", (1, 1)),
    ("vue", '<script\n  type="module"\n  lang="ts"\n>\nf(¦);\n</script>\n', "typescript", (4, 4)),
    ("vue", '<script data-type="x" my-lang="y" lang="ts">\nf(¦);\n</script>\n', "typescript", (1, 1)),
    ("markdown", "> ```python\n> x = ¦1\n> ```\n", "python", (1, 2)),
    ("markdown", "- ```python\n  x = ¦1\n  ```\n", "python", (1, 1)),
    ("vue", '<template>\n<p/>\n</template>\n<script setup lang="ts">\nlet x: ¦\n</script>\n', "typescript", (4, 4)),
    ("svelte", "<script>\n  let x = ¦;\n</script>\n\n<p>{x}</p>\n", "javascript", (1, 1)),
]


@pytest.mark.parametrize(("outer", "source", "inner", "within"), EMBEDDED)
def test_in_a_piece_of_another_language_the_snapshot_is_of_that(
    outer: str, source: str, inner: str, within: tuple[int, int] | None
) -> None:
    before, _, after = source.partition("¦")
    row, column = before.count("\n"), len(before.rpartition("\n")[2])
    document = Document("file:///a", outer, 1, before + after)
    snapshot = document.snapshot(row, column, "utf-32")
    assert (snapshot.language, snapshot.within) == (inner, within)
    assert (snapshot.tree is not None) == (languages.grammar(inner) is not None)
    if within and snapshot.tree is not None:
        piece = "\n".join(snapshot.lines[within[0] : within[1] + 1]).encode()
        assert (snapshot.tree.root_node.text or b"").strip() in piece


def test_the_tree_of_a_piece_follows_edits_in_it_and_above_it() -> None:
    document = Document("file:///a.md", "markdown", 1, "# T\n\n```python\ndef f():\n    pass\n```\n")
    assert document.snapshot(3, 0, "utf-32").tree
    document.change([partial((4, 8), (4, 8), "\n    return [1]")], 2, "utf-32")
    document.change([partial((0, 0), (0, 0), "More\n\n")], 3, "utf-32")
    snapshot = document.snapshot(7, 4, "utf-32")
    assert snapshot.tree is not None
    assert not snapshot.tree.root_node.has_error
    assert snapshot.within == (5, 7)
    assert [node.type for node in snapshot.tree.root_node.children] == ["function_definition"]
    assert snapshot.tree.root_node.children[0].end_point.row == 7


def test_of_many_documents_those_used_last_keep_their_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infill_lsp.documents.MOST_PARSED", 3 * len(FUNCTION.replace("\n", "")))
    trees = Trees()
    opened = [Document(f"file:///{number}.py", "python", 1, FUNCTION) for number in range(200)]
    for document in [*opened, opened[-3]]:
        assert document.snapshot(0, 0, "utf-16", wait=True).tree is not None
        trees.use(document)
    kept = [document for document in opened if document._syntaxes]
    assert kept == opened[-3:]
    trees.drop(opened[-1])
    opened[0].snapshot(0, 0, "utf-16", wait=True)
    trees.use(opened[0])
    assert opened[-2]._syntaxes, "a document that is closed leaves its place"
    assert opened[0].snapshot(0, 0, "utf-16", wait=True).tree is not None


def test_a_document_in_which_nothing_is_offered_is_not_parsed() -> None:
    document = Document("file:///a.py", "python", 1, "x = 1\n" * (MAX_CHARACTERS // 6 + 1))
    assert document.snapshot(0, 0, "utf-16", wait=True).tree is None
    document.change([types.TextDocumentContentChangeWholeDocument("x = 1\n")], 2, "utf-16")
    assert document.snapshot(0, 0, "utf-16", wait=True).tree is not None


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "utf-32"])
def test_no_character_of_a_long_line_is_looked_at_by_itself(encoding: str) -> None:
    """An editor sends the place of each key, and a file of a megabyte may be one line."""
    document = Document("file:///a.json", "json", 1, '["' + "é😀" * 100_000 + '"]\n')
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    sys.setprofile(count)
    try:
        at = types.Position(0, 150_000)
        document.change([types.TextDocumentContentChangePartial(types.Range(at, at), "x")], 2, encoding)
        document.snapshot(0, 150_001, encoding)
    finally:
        sys.setprofile(None)
    assert "x" in document.text
    assert calls < 5_000
