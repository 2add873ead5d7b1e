"""From a cursor to what is offered there, or to why nothing is.

`Suggestions.ask` is one request's path: what is known already, else gap -> engine -> edit. Behind an answer more is
prepared, as long as nobody types: what the deadline cut short, and what may follow once the suggestion is accepted.

It does not know LSP, how documents change, nor how the engine is kept running. Where a gap lies, and what of a text is
worth showing, is decided elsewhere.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, aclosing
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from infill_engine.protocol import ANSWERED, Candidate, Final, Frame, InfillRequest, Priority, Snippet

from infill_lsp.cache import Cache, Suggestion
from infill_lsp.client import EngineClient
from infill_lsp.confidence import SHORTEST, fitted, visible_in
from infill_lsp.core import Edit, Gap, Silence, Snapshot, Trigger
from infill_lsp.documents import reparsed
from infill_lsp.extraction import cut
from infill_lsp.postprocess import edit
from infill_lsp.settings import Settings

log = logging.getLogger(__name__)

#: Suggestions for one cursor where they are asked for by hand, and milliseconds that each beyond the first may take.
SEVERAL, ANOTHER_MS = 3, 1_000
#: Milliseconds that what nobody waits for may take.
AHEAD_MS = 3_000


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """What belongs at the cursor of the snapshot?"""

    snapshot: Snapshot
    trigger: Trigger
    #: When it came, in seconds of the monotonic clock. The deadline runs from here.
    asked: float
    #: The document as it is, without its tree, where the snapshot is of it with an entry of a menu accepted.
    own: Snapshot | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What is offered, the best first, and in words a person understands why that or nothing."""

    suggestions: tuple[Suggestion, ...]
    reason: str
    #: Nobody had to be asked.
    known: bool = False
    #: The deadline cut it short, or the engine was not there yet: a better one may come.
    unfinished: bool = False


class Written(NamedTuple):
    """The last candidate of an engine's answer, None without one, and how the answer ended."""

    candidate: Candidate | None
    final: Final


class Host(Protocol):
    """What suggestions need of the editor's session."""

    client_id: str
    wants_canvas: bool
    wants_refresh: bool

    @property
    def engine(self) -> EngineClient: ...

    async def settled(self) -> None:
        """Waits until the settings are known."""

    def settings_of(self, uri: str) -> Settings:
        """What holds for a document."""

    def silence_of(self, uri: str, language: str, trigger: Trigger) -> Silence | None:
        """Why the settings let nothing be offered in a document; None where they do."""

    def place(self, uri: str) -> tuple[str, str]:
        """The workspace of a document and its path there, as the engine knows them, for a completion that is asked for
        now."""

    async def snippets(self, snapshot: Snapshot, gap: Gap) -> tuple[Snippet, ...]:
        """Pieces of other files that may help, the best first; in a few milliseconds."""

    def busy(self) -> AbstractContextManager[None]:
        """Somebody waits for the engine."""

    def heard(self, event: Frame | Final, snapshot: Snapshot) -> None:
        """The engine said so to somebody who waits."""

    def improved(self, question: Question) -> None:
        """Whoever asks this again gets a better answer."""


class Suggestions:
    """Of one editor. All methods belong to one event loop."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._cache = Cache()
        #: Of each document, until it changes, the newest question, and the answer to it.
        self._newest: dict[str, Question] = {}
        self._answers: dict[str, Answer] = {}
        #: What is being prepared behind an answer, by document: to the engine, too, the cells of a notebook are one,
        #: and what is prepared behind one would supersede what somebody waits for in another.
        self._ahead: dict[str, asyncio.Task[None]] = {}

    async def ask(self, question: Question) -> Answer | None:
        """None where the document was edited, closed or asked about again before there was an answer."""
        uri = question.snapshot.uri
        self.changed(uri)
        self._newest[uri] = question
        await self._host.settled()
        silence = self._host.silence_of(uri, question.snapshot.language, question.trigger)
        known = [] if silence is not None else self._cache.find(question.snapshot)
        if known and question.trigger == "automatic":
            answer = Answer((known[0],), "the rest of what was offered before", known=True)
        else:
            with self._host.busy():
                answer = await self._fill(question, known)
        if not self.is_current(question):
            return None
        for suggestion in reversed(answer.suggestions):
            self._cache.use(suggestion)
        self._answers[uri] = answer
        if not answer.unfinished:  # Of many open documents the trees would take hundreds of megabytes.
            self._newest[uri] = replace(question, snapshot=replace(question.snapshot, tree=None))
        self._prepare(question, answer)
        return answer

    async def why(self, snapshot: Snapshot) -> Answer:
        """What is offered at a cursor while typing, or why nothing is. Whoever waits for an answer is not disturbed."""
        last, answer = self._newest.get(snapshot.uri), self._answers.get(snapshot.uri)
        if last is not None and answer is not None and last.snapshot == replace(snapshot, tree=last.snapshot.tree):
            return answer
        question = Question(snapshot, "automatic", time.monotonic())
        return await self._fill(question, self._cache.find(snapshot), purpose="why")

    def is_current(self, question: Question) -> bool:
        """Whether no newer question, no edit and no close came after it."""
        return self._newest.get(question.snapshot.uri) is question

    def changed(self, uri: str) -> None:
        """A document was edited: what was asked about it is out of date."""
        self._newest.pop(uri, None)
        self._answers.pop(uri, None)
        if (task := self._ahead.pop(_document(uri), None)) is not None:
            task.cancel()

    async def warm(self, snapshot: Snapshot) -> None:
        """Lets the engine encode what a question at a cursor would need. Raises `EngineError`."""
        await self._host.settled()
        gap = self._gap(snapshot, "invoked")
        if not isinstance(gap, Silence):
            snippets = await self._host.snippets(snapshot, gap)
            await self._host.engine.prime(self._request(snapshot, gap, "speculation", AHEAD_MS, snippets))

    def closed(self, uri: str) -> None:
        """A document is no longer open."""
        self.changed(uri)
        self._cache.drop(uri)

    def ready(self) -> None:
        """The engine has become ready: who was given nothing for want of it gets an answer now."""
        for uri, answer in list(self._answers.items()):
            if answer.unfinished and not answer.suggestions:
                self._prepare(self._newest[uri], answer)

    def forget(self) -> None:
        """The settings are others, or the model is: what was offered counts no more. Whoever waits is answered."""
        for task in self._ahead.values():
            task.cancel()
        self._ahead.clear()
        self._answers.clear()
        self._cache.drop()

    async def aclose(self) -> None:
        tasks = list(self._ahead.values())
        self.forget()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _fill(self, question: Question, known: Sequence[Suggestion], purpose: str = "") -> Answer:
        """What is known and what the engine writes beside it. `purpose` keeps requests for one document apart."""
        snapshot, invoked = question.snapshot, question.trigger == "invoked"
        gap = self._gap(snapshot, question.trigger)
        if isinstance(gap, Silence):
            return Answer((), gap.reason)
        wanted: Callable[[], bool] = (lambda: True) if purpose else (lambda: self.is_current(question))
        settings = self._host.settings_of(snapshot.uri)
        wait_s = 0.0 if invoked else settings.debounce / 1000
        if wait_s:
            await asyncio.sleep(wait_s)
        snippets = await self._host.snippets(snapshot, gap) if wanted() else ()
        deadline_ms = settings.deadline.invoked if invoked else settings.deadline.automatic
        until = question.asked + wait_s + deadline_ms / 1000
        found, reason, unfinished = list(known), "what was offered before", False
        while wanted() and len(found) < (SEVERAL if invoked else 1):
            left_ms = round(1000 * (until - time.monotonic()))
            if found and left_ms < 1:
                break
            avoid = [one.edit.text.replace(snapshot.eol, "\n") for one in found]
            request = self._request(
                snapshot,
                gap,
                "explicit" if invoked else "typed",
                min(left_ms, ANOTHER_MS) if found else left_ms,
                snippets,
                avoid,
                purpose,
            )
            written = await self._write(request, snapshot, wanted, heard=not found and not purpose)
            result = self._edit(snapshot, gap, written, question.trigger)
            if not found:
                # What is not worth showing so far will hardly be with more behind it, once there is enough to judge by.
                text = written.candidate.text if written.candidate is not None else ""
                silent = isinstance(result, Silence) and visible_in(text) >= SHORTEST
                unfinished = written.final.reason in ("deadline", "starting") and not silent
                reason = result.reason if isinstance(result, Silence) else _sure(written)
            if isinstance(result, Silence) or any(_alike(result.text, text) for text in avoid):
                break
            found.append(self._cache.put(snapshot, result))
        return Answer(tuple(found), reason, unfinished=unfinished)

    def _gap(self, snapshot: Snapshot, trigger: Trigger) -> Gap | Silence:
        """The gap at the cursor, or why nothing is offered there."""
        gap = self._host.silence_of(snapshot.uri, snapshot.language, trigger) or cut(snapshot, trigger)
        if isinstance(gap, Silence):
            return gap
        return self._host.settings_of(snapshot.uri).silence_inside(gap.kind) or gap

    def _request(
        self,
        snapshot: Snapshot,
        gap: Gap,
        priority: Priority,
        deadline_ms: int,
        snippets: tuple[Snippet, ...],
        avoid: Sequence[str] = (),
        purpose: str = "",
    ) -> InfillRequest:
        workspace, path = self._host.place(snapshot.uri)
        most_lines = self._host.settings_of(snapshot.uri).max_lines
        return InfillRequest(
            client=self._host.client_id,
            document=document_name(snapshot.uri, purpose),
            version=snapshot.version,
            language=snapshot.language,
            prefix=gap.prefix,
            head=gap.head,
            tail=gap.tail,
            suffix=gap.suffix,
            workspace=workspace,
            path=path,
            snippets=snippets,
            max_lines=min(gap.max_lines, most_lines),
            open_lines=min(gap.open_lines, most_lines),
            min_indent=gap.min_indent,
            min_prob=fitted().floor,
            priority=priority,
            deadline_ms=max(1, deadline_ms),
            avoid=tuple(avoid),
            frames=self._host.wants_canvas and priority != "speculation",
        )

    async def _write(
        self, request: InfillRequest, snapshot: Snapshot, wanted: Callable[[], bool] = lambda: True, heard: bool = False
    ) -> Written:
        """The engine's answer, cut off as soon as it is not `wanted`. An engine that fails leaves the best text so far,
        as the deadline does. `heard`: whoever waits is told how it goes."""
        best, final = None, Final("cancelled")
        async with aclosing(self._host.engine.infill(request)) as events:
            async for event in events:
                if not wanted():
                    return Written(None, Final("superseded"))
                if isinstance(event, Candidate):
                    best = event
                    continue
                if heard:
                    self._host.heard(event, snapshot)
                if isinstance(event, Final):
                    final = event
        kept = final.reason in (*ANSWERED, "error", "starting")
        return Written(best if kept else None, final)

    def _edit(self, snapshot: Snapshot, gap: Gap, written: Written, trigger: Trigger) -> Edit | Silence:
        """What of a text is worth showing, or why nothing is."""
        if written.candidate is None:
            return Silence(written.final.message or "the model wrote nothing")
        settings = self._host.settings_of(snapshot.uri)
        aggressiveness = "eager" if trigger == "invoked" else settings.aggressiveness
        return edit(snapshot, gap, written.candidate, fitted(), aggressiveness, settings.parse_check)

    def _prepare(self, question: Question, answer: Answer) -> None:
        """Begins what nobody waits for; it ends with the next key."""
        uri = _document(question.snapshot.uri)
        # Of an entry that is selected in a menu nothing follows before it is accepted.
        if uri in self._ahead or not (answer.unfinished or (answer.suggestions and question.own is None)):
            return
        task = self._ahead[uri] = asyncio.create_task(self._go_ahead(question, answer))
        task.add_done_callback(lambda task: self._ended(uri, task))

    def _ended(self, uri: str, task: asyncio.Task[None]) -> None:
        if self._ahead.get(uri) is task:
            del self._ahead[uri]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("nothing was prepared: %s", type(error).__name__)  # its text may quote the document

    async def _go_ahead(self, question: Question, answer: Answer) -> None:
        """First the better answer, where this one was cut short, then what follows once it is accepted."""
        snapshot, offered = question.snapshot, answer.suggestions[:1]
        if answer.unfinished:
            better = await self._ahead_of(snapshot, question.trigger)
            if better is not None and self._is_better(better, offered):
                offered = (self._cache.put(snapshot, better),)
                self._answers[snapshot.uri] = Answer(offered, "there was more time for it", known=True)
                self._host.improved(question)
        for suggestion in offered if question.own is None else ():
            following = accepted(snapshot, suggestion.edit)
            if not self._cache.find(following):  # It is while the suggestion is typed: no parse then.
                tree = snapshot.tree and reparsed(snapshot.tree, snapshot.lines, following.lines)
                more = await self._ahead_of(replace(following, tree=tree), "automatic")
                if more is not None:
                    self._cache.put(following, more)
                    self._cache.use(suggestion)

    async def _ahead_of(self, snapshot: Snapshot, trigger: Trigger) -> Edit | None:
        gap = self._gap(snapshot, trigger)
        if isinstance(gap, Silence):
            return None
        snippets = await self._host.snippets(snapshot, gap)
        written = await self._write(self._request(snapshot, gap, "speculation", AHEAD_MS, snippets), snapshot)
        result = self._edit(snapshot, gap, written, trigger)
        return result if isinstance(result, Edit) else None

    def _is_better(self, edit: Edit, offered: Sequence[Suggestion]) -> bool:
        """Whether it says more than what is offered. What an editor shows and will not ask for again may only grow,
        lest another text appear under somebody's fingers."""
        if not offered:
            return True
        shown = offered[0].edit.text
        return not _alike(edit.text, shown) and (self._host.wants_refresh or edit.text.startswith(shown))


def accepted(snapshot: Snapshot, edit: Edit) -> Snapshot:
    """The document with an edit made, and the cursor behind its text; without a syntax tree."""
    line = snapshot.lines[edit.row]
    first, *middle = (line[: edit.start] + edit.text.replace(snapshot.eol, "\n")).split("\n")
    lines = [first, *middle]
    column = len(lines[-1])
    lines[-1] += line[edit.end :]
    whole = (*snapshot.lines[: edit.row], *lines, *snapshot.lines[edit.row + 1 :])
    return replace(
        snapshot,
        lines=whole,
        row=edit.row + len(middle),
        column=column,
        characters=snapshot.characters + sum(map(len, lines)) - len(line),
        tree=None,
        within=snapshot.within and (snapshot.within[0], snapshot.within[1] + len(middle)),
    )


def document_name(uri: str, purpose: str = "") -> str:
    """What the engine knows a document by: all cells of a notebook are one, so that what is encoded of the others
    serves each. `purpose` keeps its requests apart: each supersedes only those of the same one."""
    return hashlib.sha256((_document(uri) + purpose).encode(errors="replace")).hexdigest()


def _document(uri: str) -> str:
    """What is one document to the engine: of a cell its notebook."""
    return uri.partition("#")[0]


def _alike(one: str, other: str) -> bool:
    """Whether two texts differ in nothing but space."""
    return "".join(one.split()) == "".join(other.split())


def _sure(written: Written) -> str:
    probs = written.candidate.probs if written.candidate is not None else ()
    return f"the model is sure of each token by {min(probs):.0%} or more" if probs else "the model wrote this"
