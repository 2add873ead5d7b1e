"""`infill-lsp fill FILE`: fills a file as it is on disk, and shows what changes as a unified diff, or writes it.

Goes by the settings that files give for the folder, and starts the engine where none runs. All that is not filled stays
byte for byte as it was. It does not know how places are found, nor how they are filled.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import unified_diff
from pathlib import Path

import msgspec
from infill_engine.protocol import InfillRequest
from lsprotocol import types

from infill_lsp.chunks import language_id
from infill_lsp.client import EngineClient, EngineError
from infill_lsp.context import folder_of
from infill_lsp.core import Filled, Site, Snapshot, Span
from infill_lsp.documents import Document
from infill_lsp.fill import FillError, fill, selected
from infill_lsp.folders import workspace_name
from infill_lsp.holes import holes
from infill_lsp.index import Index
from infill_lsp.remote import engine_of
from infill_lsp.settings import Settings
from infill_lsp.sources import Sources
from infill_lsp.suggestions import document_name

#: What some programs put at the beginning of a file, and editors take away.
BOM = b"\xef\xbb\xbf"


class PatchError(Exception):
    """Why a file is not filled: one line for people."""


@dataclass(frozen=True, slots=True)
class Patch:
    """A file before and after."""

    path: Path
    old: bytes
    new: bytes

    @property
    def diff(self) -> bytes:
        """As `patch` takes it; empty where nothing changes."""
        old, new = (re.findall(r"[^\n]*\n|[^\n]+", text.decode()) for text in (self.old, self.new))
        name = str(self.path).lstrip("/")
        hunks = unified_diff(old, new, f"a/{name}", f"b/{name}")
        return "".join(
            line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in hunks
        ).encode()

    def write(self) -> None:
        """Puts the file in place of the old one. Raises `PatchError` where that is another one by now."""
        target = self.path.resolve()  # A link stays one.
        try:
            if target.read_bytes() != self.old:
                raise PatchError(f"{self.path} has changed meanwhile: nothing was written, run it again")
            handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(self.new)
                shutil.copymode(target, name)
                os.replace(name, target)
            except OSError:
                with suppress(OSError):
                    os.unlink(name)
                raise
        except OSError as error:
            raise PatchError(f"{self.path} cannot be written: {error.strerror}") from None


def patched(path: Path, rows: tuple[int, int] | None, model: str | None, said: Callable[[str], None]) -> Patch:
    """The file with rows `rows` (both included) written anew; with its holes filled where there are none.

    `said` hears how it goes. Raises `PatchError`.
    """
    old, document = _read(path)
    root = folder_of(str(path.resolve()))
    snapshot, settings = document.snapshot(0, 0, "utf-32", wait=True), _settings(document, root)
    sites = _sites(document, snapshot, rows, settings)
    if not sites:
        said(f"there is nothing to fill in {path}: no {'hole' if rows is None else 'text'}")
        return Patch(path, old, old)
    engine = engine_of(settings if model is None else msgspec.structs.replace(settings, model=model))
    ask = _ask(document, root, settings)
    filled = asyncio.run(_filled(snapshot, sites, engine, ask, settings.parse_check, said))
    if not filled:
        said("the model has nothing to write here")
    new = _applied(document, snapshot.eol, filled)
    return Patch(path, old, (BOM if old.startswith(BOM) else b"") + new.encode())


async def _filled(
    snapshot: Snapshot,
    sites: Sequence[Site],
    engine: EngineClient,
    ask: InfillRequest,
    parse_check: bool,
    said: Callable[[str], None],
) -> list[Filled]:
    """What belongs at the places, once the engine is up."""

    async def told(done: float, words: str) -> None:
        said(f"filled {words + ', ' if words else ''}{done:.0%}")

    try:
        async for status in engine.bring_up():
            if status.state == "error":
                raise PatchError(status.message)
            if status.state != "ready":
                said(status.message)
        return await fill(snapshot, sites, engine, ask, told, parse_check)
    except (EngineError, FillError) as error:
        raise PatchError(str(error)) from None
    finally:
        await engine.aclose()


def _read(path: Path) -> tuple[bytes, Document]:
    try:
        raw = path.read_bytes()
        text = raw.removeprefix(BOM).decode()
    except OSError as error:
        raise PatchError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise PatchError(f"{path} is not UTF-8") from None
    return raw, Document(path.resolve().as_uri(), language_id(path.name), 0, text)


def _settings(document: Document, root: str) -> Settings:
    """What files say for the folder. Raises `PatchError` where nothing is to be offered in the document."""
    folder = Path(root).as_uri()
    sources = Sources.of_files(folder)
    if (silence := sources.silence(document.uri, document.language, "invoked")) is not None:
        raise PatchError(silence.reason)
    return sources.effective(folder).settings


def _sites(document: Document, snapshot: Snapshot, rows: tuple[int, int] | None, settings: Settings) -> list[Site]:
    if rows is None:
        return holes(snapshot, (), settings.holes.markers, document)
    first, last = rows
    if not first <= last < len(snapshot.lines):
        raise PatchError(f"there are no lines {first + 1} to {last + 1}: the file has {len(snapshot.lines)}")
    return selected(snapshot, [Span((first, 0), (last, len(snapshot.lines[last])))])


def _ask(document: Document, root: str, settings: Settings) -> InfillRequest:
    """A request without a gap, for which counts what the engine remembers of the folder."""
    place = Index(root, exclude=settings.priming.exclude).relative(document.uri) if settings.priming.enabled else None
    return InfillRequest(
        client=f"fill-{os.getpid()}",
        document=document_name(document.uri),
        language=document.language,
        workspace=workspace_name(root) if place is not None else "",
        path=place or "",
        priority="explicit",
        deadline_ms=settings.deadline.invoked,
    )


def _applied(document: Document, eol: str, filled: list[Filled]) -> str:
    """The document's text with the places filled."""
    for one in reversed(filled):
        start, end = (types.Position(*place) for place in one.span)
        change = types.TextDocumentContentChangePartial(types.Range(start, end), one.text.replace("\n", eol))
        document.change([change], 0, "utf-32")
    return document.text
