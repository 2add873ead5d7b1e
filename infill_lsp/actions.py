"""Fill as editors ask for it: the request `infill/fill`, the command `infill.server.fill`, and the code actions for it.

The request answers with edits for whoever applies them; the command has them applied by the editor. A code action only
carries the command. Translates, and watches whether the document moves under a fill: what is a place to fill, and what
belongs there, is decided elsewhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from lsprotocol import types
from msgspec import Meta, Struct
from pygls.exceptions import JsonRpcContentModified, JsonRpcInvalidParams

from infill_lsp.core import Filled, Gap, Site, Snapshot, Span
from infill_lsp.status import Progress

if TYPE_CHECKING:
    from infill_engine.protocol import Snippet

    from infill_lsp.server import InfillServer

FILL = "infill.server.fill"

START = types.Position(0, 0)
#: Rows that are looked through for holes before somebody asks to fill them: of 2,000 it takes 16 ms.
MOST_ROWS = 2_000
MOVED = "the document changed where it was to be filled: ask again"

Count = Annotated[int, Meta(ge=0)]
Mode = Literal["selection", "holes"]


class Position(Struct, frozen=True):
    """A place in the editor's units."""

    line: Count
    character: Count


class Range(Struct, frozen=True):
    """From one place to another."""

    start: Position
    end: Position


class Order(Struct, frozen=True):
    """What is to be filled: the argument of the command."""

    uri: str
    version: int | None = None
    ranges: tuple[Range, ...] = ()
    mode: Mode = "selection"
    keep: tuple[Range, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """Edits of the document as `snapshot` has it, and why there are none."""

    snapshot: Snapshot
    filled: Sequence[Filled]
    words: str = ""


async def requested(ls: InfillServer, params: Any) -> dict[str, Any]:
    """`infill/fill`: the edits, and the version of the document that they are for."""
    plain = _plain(params)
    document = plain.get("textDocument") if isinstance(plain, dict) else None
    if not isinstance(document, dict):
        raise JsonRpcInvalidParams("infill/fill takes {textDocument: {uri, version}, ranges, mode, keep?}")
    names = ("ranges", "mode", "keep")
    order = _order({**document, **{name: plain[name] for name in names if plain.get(name) is not None}})
    answer = await _fill(ls, order, plain.get("workDoneToken"))
    if answer.words:
        _say(ls, answer.words)
    edits = [
        {"range": _plain_range(edit.range), "newText": edit.new_text, "sure": round(filled.sure, 4)}
        for edit, filled in zip(_edits(ls, answer), answer.filled, strict=True)
    ]
    return {"version": answer.snapshot.version, "edits": edits}


async def commanded(ls: InfillServer, *arguments: Any) -> None:
    """The command `infill.server.fill` [{uri, version?, ranges, mode, keep?}]: the editor applies the edits."""
    order = _order(_plain(arguments[0]) if arguments else None)
    try:
        answer = await _fill(ls, order, None)
    except JsonRpcContentModified as error:
        _say(ls, error.message)
        return
    if answer.words:
        _say(ls, answer.words)
    if answer.filled:
        result = await ls.workspace_apply_edit_async(
            types.ApplyWorkspaceEditParams(_workspace_edit(ls, answer), label="Infill: fill")
        )
        if not result.applied:
            _say(ls, MOVED)


def offered(ls: InfillServer, params: types.CodeActionParams) -> list[types.CodeAction]:
    """The code actions for a selection, and for a hole that the cursor is in or the selection holds."""
    from infill_lsp import extraction, languages
    from infill_lsp.documents import spans
    from infill_lsp.holes import holes

    kind = types.CodeActionKind.RefactorRewrite
    snapshot = ls.snapshot(params.text_document.uri, params.range.start)
    wanted = params.context.only
    if snapshot is None or (wanted is not None and not any(_includes(one, kind) for one in wanted)):
        return []
    if ls.silence_of(snapshot.uri, snapshot.language, "invoked") or extraction.silence(snapshot):
        return []
    actions = []

    def add(title: str, mode: Mode, ranges: Sequence[types.Range]) -> None:
        argument = {
            "uri": snapshot.uri,
            "version": snapshot.version,
            "ranges": [_plain_range(one) for one in ranges],
            "mode": mode,
        }
        actions.append(types.CodeAction(title, kind, command=types.Command(title, FILL, arguments=[argument])))

    (span,) = spans(snapshot.lines, [params.range], ls.encoding)
    markers = ls.settings_of(snapshot.uri).holes.markers
    if snapshot.text(span).strip():
        add("Infill: write the selection anew", "selection", [params.range])
    last = span.start[0] + MOST_ROWS - 1
    cut = span.end[0] > last
    here = holes(snapshot, [span._replace(end=(last, 0)) if cut else span], markers)
    if here:
        counted = "Infill: fill this hole" if len(here) == 1 else f"Infill: fill {len(here)} holes"
        add("Infill: fill the holes of the selection" if cut else counted, "holes", [params.range])
        document = ls.documents[snapshot.uri]
        # All of it is not read before somebody asks for it, where that takes long.
        uncounted = bool(languages.of(document.language).injections) or len(snapshot.lines) > MOST_ROWS
        everywhere = 0 if uncounted else len(holes(snapshot, (), markers))
        if uncounted:
            add("Infill: fill all holes of the document", "holes", [])
        elif everywhere > len(here):
            add(f"Infill: fill all {everywhere} holes of the document", "holes", [])
    return actions


async def _fill(ls: InfillServer, order: Order, token: int | str | None) -> Answer:
    """What belongs there, or in words why nothing does. Raises `JsonRpcContentModified` where the document is another
    than the one that was meant, or becomes so at the places to fill."""
    from infill_engine.protocol import InfillRequest

    from infill_lsp import extraction
    from infill_lsp.fill import MAX_SITES, FillError, Superseded, fill
    from infill_lsp.suggestions import document_name

    snapshot = ls.snapshot(order.uri, START)
    if snapshot is None:
        raise JsonRpcInvalidParams("the document is not open")
    if order.version is not None and order.version != snapshot.version:
        raise JsonRpcContentModified(MOVED)
    silence = ls.silence_of(snapshot.uri, snapshot.language, "invoked") or extraction.silence(snapshot)
    if silence is not None:
        return Answer(snapshot, (), silence.reason)
    sites = await asyncio.to_thread(_sites, ls, snapshot, order)
    if not sites:
        return Answer(snapshot, (), f"there is nothing to fill: no {'hole' if order.mode == 'holes' else 'text'} here")
    watched = _Watched(ls, snapshot, sites)
    workspace, path = ls.place(order.uri)
    ask = InfillRequest(
        client=ls.client_id,
        document=document_name(order.uri, purpose=order.uri),  # Cells are filled apart, also at the same time.
        version=snapshot.version,
        language=snapshot.language,
        workspace=workspace,
        path=path,
        snippets=await _snippets(ls, snapshot, sites[0]),
        priority="explicit",
        deadline_ms=ls.settings_of(snapshot.uri).deadline.invoked,
    )
    task = asyncio.current_task()
    bar = Progress(ls, token, "Infill: fill", cancel=task.cancel if task is not None else None)

    async def told(done: float, words: str) -> None:
        watched.now()
        await bar.report(words, done)

    ls.follow_engine()
    try:
        await told(0.0, "")
        with ls.busy():
            filled = await fill(snapshot, sites, ls.engine, ask, told, ls.settings_of(snapshot.uri).parse_check)
    except Superseded as error:
        raise JsonRpcContentModified(str(error)) from None
    except FillError as error:
        return Answer(snapshot, (), str(error))
    finally:
        bar.end()
    now, by_site = watched.now()
    here = [replace(one, span=by_site[one.span]) for one in filled]
    if not here:
        return Answer(now, (), "the model has nothing to write here")
    left = len(sites) - MAX_SITES
    return Answer(now, here, f"{MAX_SITES} places were filled, {left} are left: ask again" if left > 0 else "")


class _Watched:
    """Places of a document that may change meanwhile."""

    def __init__(self, ls: InfillServer, snapshot: Snapshot, sites: Sequence[Site]) -> None:
        self._ls = ls
        self._asked = snapshot
        self._spans = [site.span for site in sites]
        self._now = snapshot
        self._here = {span: span for span in self._spans}

    def now(self) -> tuple[Snapshot, dict[Span, Span]]:
        """The document as it is now, and where the places are in it. Raises `JsonRpcContentModified` where one of them
        is not apart from what changed."""
        from infill_lsp.fill import moved

        document = self._ls.documents.get(self._asked.uri)
        if document is None:
            raise JsonRpcContentModified(MOVED)
        if document.version != self._now.version:
            snapshot = self._ls.snapshot(self._asked.uri, START)
            spans = moved(self._spans, self._asked.lines, snapshot.lines) if snapshot is not None else None
            if snapshot is None or spans is None:
                raise JsonRpcContentModified(MOVED)
            self._now, self._here = snapshot, dict(zip(self._spans, spans, strict=True))
        return self._now, self._here


def _sites(ls: InfillServer, snapshot: Snapshot, order: Order) -> list[Site]:
    """The places that are meant."""
    from infill_lsp.documents import Document, spans
    from infill_lsp.fill import selected
    from infill_lsp.holes import holes

    ranges, keep = (
        spans(snapshot.lines, [types.Range(_position(one.start), _position(one.end)) for one in of], ls.encoding)
        for of in (order.ranges, order.keep)
    )
    if order.mode == "selection":
        return selected(snapshot, ranges, keep)
    own = Document(snapshot.uri, snapshot.language, snapshot.version, "\n".join(snapshot.lines))
    if snapshot.tree is None:  # Its parse is late, or it has none.
        snapshot = replace(snapshot, tree=own.snapshot(0, 0, "utf-32", wait=True).tree)
    return holes(snapshot, ranges, ls.settings_of(snapshot.uri).holes.markers, own)


async def _snippets(ls: InfillServer, snapshot: Snapshot, first: Site) -> tuple[Snippet, ...]:
    """What of other files may help: the same for all places, for the engine encodes it once."""
    from infill_lsp.extraction import cut

    row, column = first.span.start
    snapshot = replace(snapshot, row=row, column=column)
    gap = cut(snapshot, "invoked")
    return await ls.snippets(snapshot, gap) if isinstance(gap, Gap) else ()


def _edits(ls: InfillServer, answer: Answer) -> list[types.TextEdit]:
    """The texts in the editor's units and line ends."""
    snapshot, dialect = answer.snapshot, ls.dialect
    edits = []
    for filled in answer.filled:
        start, end = (dialect.position(snapshot, row, column) for row, column in filled.span)
        edits.append(types.TextEdit(types.Range(start, end), filled.text.replace("\n", dialect.eol(snapshot))))
    return edits


def _workspace_edit(ls: InfillServer, answer: Answer) -> types.WorkspaceEdit:
    """The edits of that version of the document alone, where the editor can tell."""
    workspace = ls.client_capabilities.workspace
    capable = workspace.workspace_edit if workspace is not None else None
    edits, snapshot = _edits(ls, answer), answer.snapshot
    if capable is None or not capable.document_changes:
        return types.WorkspaceEdit(changes={snapshot.uri: edits})
    document = types.OptionalVersionedTextDocumentIdentifier(snapshot.uri, snapshot.version)
    return types.WorkspaceEdit(document_changes=[types.TextDocumentEdit(document, edits)])


def _say(ls: InfillServer, words: str) -> None:
    """Somebody asked by hand, and is told each time."""
    ls.window_show_message(types.ShowMessageParams(types.MessageType.Info, f"Infill: {words}"))


def _order(value: Any) -> Order:
    try:
        return msgspec.convert(value, Order)
    except msgspec.ValidationError as error:
        raise JsonRpcInvalidParams(f"what is to be filled is not understood: {error}") from None


def _includes(wanted: str, kind: str) -> bool:
    """Whether a kind of code actions is among those wanted."""
    return not wanted or kind == wanted or kind.startswith(wanted + ".")


def _position(place: Position) -> types.Position:
    return types.Position(place.line, place.character)


def _plain_range(range_: types.Range) -> dict[str, Any]:
    start, end = ({"line": place.line, "character": place.character} for place in (range_.start, range_.end))
    return {"start": start, "end": end}


def _plain(value: Any) -> Any:
    """A message of ours as dictionaries and lists, which pygls makes named tuples of."""
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value
