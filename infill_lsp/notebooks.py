"""The cells of open notebooks, in order, and what its neighbours say to who writes in one of them.

A notebook is one program: cells of the same language are read as they are. What is explained between them is read as a
comment; in an explanation, code is read as a fenced block. Code of another language is another program, and left out.

It knows the order of cells and whose they are; their texts are documents like any other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from lsprotocol import types

from infill_lsp import languages
from infill_lsp.documents import Document
from infill_lsp.extraction import MAX_PREFIX, MAX_SUFFIX


class Notebooks:
    """Of one editor. `documents` are those that are open, by URI, the cells' among them."""

    def __init__(self, documents: Mapping[str, Document]) -> None:
        self._documents = documents
        self._cells: dict[str, list[types.NotebookCell]] = {}
        #: The notebook of each cell.
        self._notebook: dict[str, str] = {}

    def open(self, notebook: types.NotebookDocument) -> None:
        """A notebook is open, with these cells."""
        self._cells[notebook.uri] = []
        self.splice(notebook.uri, 0, 0, notebook.cells)

    def splice(self, uri: str, start: int, removed: int, cells: Sequence[types.NotebookCell]) -> None:
        """Cells take the place of others; one that moves is taken out and put in again."""
        of = self._cells.get(uri)
        if of is None:
            return
        for cell in of[start : start + removed]:
            self._notebook.pop(cell.document, None)
        of[start : start + removed] = cells
        self._notebook |= {cell.document: uri for cell in of}

    def update(self, uri: str, cells: Iterable[types.NotebookCell]) -> None:
        """What is known of cells is another now, such as their kind."""
        new = {cell.document: cell for cell in cells}
        of = self._cells.get(uri, [])
        of[:] = [new.get(cell.document, cell) for cell in of]

    def close(self, uri: str) -> list[str]:
        """A notebook is no longer open; returns the documents of its cells."""
        cells = [cell.document for cell in self._cells.pop(uri, [])]
        for cell in cells:
            self._notebook.pop(cell, None)
        return cells

    def of(self, cell: str) -> str | None:
        """The notebook that a document is a cell of."""
        return self._notebook.get(cell)

    def around(self, cell: str) -> tuple[str, str]:
        """What stands before and after a cell in its notebook, LF only: whole lines, and lines each with a newline
        before it, as in `Gap`. Of much, what is next to the cell."""
        cells = self._cells.get(self._notebook.get(cell, ""), [])
        at = next((i for i, one in enumerate(cells) if one.document == cell), None)
        if at is None or (own := self._documents.get(cell)) is None:
            return "", ""
        before = _up_to(MAX_PREFIX, self._seen(reversed(cells[:at]), own.language, cells[at].kind))
        after = _up_to(MAX_SUFFIX, self._seen(cells[at + 1 :], own.language, cells[at].kind))
        return "".join(f"{text}\n\n" for text in reversed(before)), "".join(f"\n\n{text}" for text in after)

    def _seen(self, cells: Iterable[types.NotebookCell], language: str, kind: types.NotebookCellKind) -> Iterable[str]:
        """What the cells say to who writes in a cell of a language and kind; nothing of those that say nothing."""
        for cell in cells:
            document = self._documents.get(cell.document)
            if document is None or not (text := "\n".join(document.lines).strip("\n")).strip():
                continue
            if document.language == language:
                yield text
            elif kind == types.NotebookCellKind.Markup:
                yield f"```{document.language}\n{text}\n```"
            elif cell.kind == types.NotebookCellKind.Markup and (mark := languages.of(language).line_comment):
                yield "\n".join(f"{mark} {line}".rstrip() for line in text.split("\n"))


def _up_to(most: int, texts: Iterable[str]) -> list[str]:
    """The first of the texts, as many as have no more than `most` characters together."""
    found: list[str] = []
    for text in texts:
        most -= len(text) + 2
        if most < 0:
            break
        found.append(text)
    return found
