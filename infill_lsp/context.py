"""`infill-lsp context FILE:LINE:COL`: what a completion at that place is made from, and why.

Cuts the gap and looks for snippets as the server does for an editor, with the file as it is on disk, and asks a running
engine what it has of that. Starts no engine. What is printed stands on one line a piece, with the ids of the engine's
log.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from infill_engine.protocol import Explanation, InfillRequest, Piece, Recalled

from infill_lsp.chunks import language_id
from infill_lsp.client import EngineError
from infill_lsp.core import Gap, Silence, Snapshot, Snippet
from infill_lsp.documents import Document
from infill_lsp.extraction import cut
from infill_lsp.folders import SNIPPETS, workspace_name
from infill_lsp.index import Index
from infill_lsp.priming import retrieve, sent
from infill_lsp.remote import engine_of
from infill_lsp.settings import Settings
from infill_lsp.sources import Sources
from infill_lsp.suggestions import document_name

#: Seconds that the index may take to be filled.
PATIENCE_S = 120.0
#: What makes a folder one that an editor opens.
MARKERS = (".git", ".hg", "pyproject.toml", "package.json", "Cargo.toml", "go.mod", "pom.xml", ".infill.toml")
#: Characters of a text that are shown.
SHOWN = 60


class ContextError(ValueError):
    """A place that there is nothing to say of; its text says which and why in one line."""


@dataclass(frozen=True, slots=True)
class Place:
    """A cursor in a file; row and column count from 0, columns in code points."""

    path: str
    row: int
    column: int

    @classmethod
    def parse(cls, text: str) -> Place:
        """Of `FILE:LINE:COL`, from 1 as editors show them. Raises `ContextError`."""
        path, line, column = ["", "", "", *text.rsplit(":", 2)][-3:]
        if not path or not (line.isdecimal() and column.isdecimal() and int(line) and int(column)):
            raise ContextError(f"{text} is no place: give FILE:LINE:COL, such as app.py:12:5")
        return cls(os.path.abspath(path), int(line) - 1, int(column) - 1)

    @property
    def language(self) -> str:
        """The file's own."""
        return language_id(self.path)

    def snapshot(self) -> Snapshot:
        """The file with the cursor there. Raises `ContextError`."""
        try:
            text = Path(self.path).read_text(encoding="utf-8-sig", errors="replace")  # Editors count no BOM.
        except OSError as error:
            raise ContextError(f"{self.path} cannot be read: {error.strerror}") from None
        document = Document(Path(self.path).as_uri(), self.language, 0, text)
        snapshot = document.snapshot(self.row, self.column, "utf-32", wait=True)
        if (snapshot.row, snapshot.column) != (self.row, self.column):
            raise ContextError(f"{self.path} has no line {self.row + 1} with {self.column} characters")
        return snapshot


def folder_of(path: str) -> str:
    """The folder that an editor has probably opened for a file: the nearest one around it that begins a project."""
    around = list(Path(path).parents)
    marked = (folder for folder in around if any((folder / marker).exists() for marker in MARKERS))
    return str(next(marked, around[0]))


def explain(place: Place, folder: str | None = None) -> str:
    """What is used at a place, as lines for people. Raises `ContextError`."""
    snapshot, root = place.snapshot(), os.path.realpath(folder or folder_of(place.path))
    settings, silence = _settings(snapshot, place.language, Path(root).as_uri())
    gap = silence or cut(snapshot, "invoked")
    if isinstance(gap, Gap):
        gap = settings.silence_inside(gap.kind) or gap
    if isinstance(gap, Silence):
        return f"nothing is offered there: {gap.reason}"
    index = Index(root, exclude=settings.priming.exclude)
    path = index.relative(snapshot.uri) if settings.priming.enabled else None
    snippets: list[Snippet] = []
    if path is not None:
        indexed = _fill(index)
        snippets = retrieve(index, snapshot, gap, SNIPPETS)
        index.stop()
    else:
        indexed = "none: " + ("the file is not of the folder" if settings.priming.enabled else "priming.enabled is off")
    request = InfillRequest(
        client="context",
        document=document_name(snapshot.uri),
        language=snapshot.language,
        prefix=gap.prefix,
        head=gap.head,
        tail=gap.tail,
        suffix=gap.suffix,
        workspace=workspace_name(root) if path is not None else "",
        path=path or "",
        snippets=tuple(map(sent, snippets)),
        deadline_ms=settings.deadline.automatic,
    )
    lines = [f"{place.path}:{place.row + 1}:{place.column + 1} in {root}", f"index     {indexed}"]
    return "\n".join([*lines, *_said(request, snippets, asyncio.run(_asked(request, settings)))])


async def _asked(request: InfillRequest, settings: Settings) -> Explanation | str:
    """What the engine says, or why it says nothing."""
    engine = engine_of(settings)
    try:
        return await engine.explain(request)
    except EngineError as error:
        return f"{error}: what it has encoded and remembers is not known"
    finally:
        await engine.aclose()


def _settings(snapshot: Snapshot, around: str, folder: str) -> tuple[Settings, Silence | None]:
    """What files say for the folder, and why nothing is offered in the document."""
    sources = Sources.of_files(folder)
    return sources.effective(folder).settings, sources.silence(snapshot.uri, snapshot.language, "invoked", around)


def _fill(index: Index) -> str:
    index.start()
    index.settle(PATIENCE_S)
    status = index.status
    said = f"{status.state}, {status.files:,} files with text, {status.chunks:,} chunks"
    return f"{said}; {status.message}" if status.message else said


def _said(request: InfillRequest, snippets: Sequence[Snippet], explained: Explanation | str) -> Iterator[str]:
    if isinstance(explained, str):
        yield f"engine    {explained}"
        for sent_one, snippet in zip(request.snippets, snippets, strict=True):
            yield f"snippet   {sent_one.id}  {_place(snippet)}"
        return
    yield f"document  {explained.document}"
    places = iter(map(_place, snippets))
    for piece in explained.pieces:
        line = f"{piece.kind:<9} {piece.id}  {_tokens(piece)}"
        yield f"{line}, {_use(piece)}; {next(places)}" if piece.kind == "snippet" else line
    if not snippets:
        yield "snippet   none: no other file has the rare words near the cursor, or defines what is imported and used"
    for recalled in explained.memory:
        yield f"memory    {_recalled(recalled)}"
    if not explained.memory:
        yield "memory    nothing: what stands before the cursor stands nowhere else"


def _tokens(piece: Piece) -> str:
    encoded = "all" if piece.encoded == piece.tokens else f"{piece.encoded:,}"
    return f"{piece.tokens:,} tokens, {encoded} of them encoded"


def _use(piece: Piece) -> str:
    if piece.used:
        return "used"
    return "not used: a better one is" if piece.encoded == piece.tokens else "not used: it is not encoded yet"


def _place(snippet: Snippet) -> str:
    rows = f"{snippet.first_line + 1}-{snippet.last_line + 1}"
    return f"{snippet.path}:{rows}, score {snippet.score:.1f}: {snippet.why()}"


def _recalled(one: Recalled) -> str:
    where = "this file" if one.source == "file" else "other files"
    followers = ", ".join(f"{_quoted(text)} {share:.0%}" for text, share in one.followers)
    times = "once" if one.times == 1 else f"{one.times} times"
    return f"{one.tokens} tokens, {_quoted(one.text)}, stand {times} in {where}; then come {followers}"


def _quoted(text: str) -> str:
    """The text on one line, its end where it is long."""
    shown = text if len(text) <= SHOWN else "…" + text[-SHOWN:]
    return '"' + shown.replace("\\", "\\\\").replace("\n", "\\n").replace("\t", "\\t") + '"'
