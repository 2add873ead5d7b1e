"""Takes text out of the small project in `shop/`, asks the real server for it, and shows what comes back.

Run it with `python examples/demo.py`. It is an editor as far as the server can tell: it speaks LSP over stdio, opens
documents (the files on disk stay as they are) and asks at a few places as if by a key. The server starts the engine,
which on the first run ever fetches its weights. What is shown is what was received: the canvas after each denoise
step, the text that was offered, right or wrong, beside what the author wrote, and the time it took.

It knows the protocol of the server, and neither the engine nor how a gap is filled.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import logging
import os
import re
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from types import TracebackType
from typing import Any, Self

from lsprotocol import types
from pygls.exceptions import JsonRpcException
from pygls.lsp.client import LanguageClient
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

EXAMPLES = Path(__file__).parent
PROJECT = EXAMPLES / "shop"

#: Milliseconds an answer may take. An editor waits less; here a slow machine shall show what it can do too.
DEADLINE_MS = 10_000
#: Seconds between two looks at an engine that is not ready, and those that the server has to end in.
POLL_S = 0.2
END_S = 3.0

#: Lines of code shown before and after the gap, and canvases shown of all that came.
ABOVE, BELOW = 4, 3
FILM = 4
#: Columns of the picture, and where there is no terminal: there lines are not wrapped.
PICTURE, UNWRAPPED = 100, 10_000

#: Colours of our own have both sides set, so that they can be read on light and dark terminals.
GHOST = "italic grey74 on grey27"
PROPOSED = "italic grey74 on grey35"
HEAD = "grey50"
MASK = "grey50"
UNSURE, SURE = (78, 78, 78), (0, 120, 70)

STAYS = "The engine stays for the next editor and ends by itself when idle; `infill-engine stop{}` ends it now."


class DemoError(Exception):
    """Why the demo cannot go on: one line that says what to do."""


@dataclass(frozen=True)
class Place:
    """A part of a file that is taken out: what stands from `after`, which occurs once, to the next `before`."""

    title: str
    file: str
    after: str
    before: str


PLACES = (
    Place("the rest of a line", "pricing.py", after="return cart.subtotal * ", before="\n"),
    Place("a condition inside a line", "catalog.py", after="for product in self if ", before="]"),
    Place("arguments of a call", "catalog.py", after="return sorted(", before=")\n"),
    Place("a whole line", "receipt.py", after="    if cost.shipping:\n        ", before="\n"),
    Place("lines inside a call", "catalog.py", after='code=row["code"],\n                ', before="\n            )"),
    Place("the body of a function", "catalog.py", after='Raises `UnknownProduct`."""\n        ', before="\n\n"),
)


@dataclass(frozen=True)
class Gap:
    """A document with a part taken out. Rows, columns and offsets count code points and start at 0."""

    place: Place
    text: str
    offset: int
    #: What the author wrote there.
    author: str

    @classmethod
    def at(cls, place: Place) -> Gap:
        whole = (PROJECT / place.file).read_text(encoding="utf-8")
        start = whole.index(place.after) + len(place.after)
        end = whole.index(place.before, start)
        return cls(place, whole[:start] + whole[end:], start, whole[start:end])

    @property
    def uri(self) -> str:
        return (PROJECT / self.place.file).as_uri()

    @property
    def row(self) -> int:
        return self.text.count("\n", 0, self.offset)

    @property
    def column(self) -> int:
        return self.offset - (self.text.rfind("\n", 0, self.offset) + 1)


@dataclass(frozen=True)
class Frame:
    """The canvas after a denoise step, as the server told it; a slot has a text, a prob and a state."""

    step: int
    ms: float
    slots: tuple[Any, ...]


@dataclass(frozen=True)
class Answer:
    """What the server said about a gap, and how long that took."""

    gap: Gap
    #: The text offered in place of `[start, end)` of the gap's document, None where nothing is offered.
    text: str | None
    start: int
    end: int
    frames: tuple[Frame, ...]
    #: The engine's account of its time.
    timing: Any
    #: Milliseconds from the request to the response, as an editor sees them.
    ms: float

    @property
    def document(self) -> str:
        """The document with the text accepted."""
        return self.gap.text[: self.start] + (self.text or "") + self.gap.text[self.end :]

    @property
    def same(self) -> bool:
        """Whether the document is the author's again, to the letter."""
        gap = self.gap
        return self.document == gap.text[: gap.offset] + gap.author + gap.text[gap.offset :]

    @property
    def begun(self) -> bool:
        """Whether the text is how the author's begins: what the model was sure of is offered, and no more."""
        gap = self.gap
        inserted = self.start == self.end == gap.offset
        return inserted and bool(self.text) and gap.author.startswith(self.text or "") and not self.same


class Editor(LanguageClient):
    """An editor that asks for inline completions and wants to see the canvas. A context manager: inside, the server
    runs."""

    def __init__(self, model: str) -> None:
        super().__init__("infill-demo", "1")
        self._model = model
        self._version = 0
        self._frames: list[Frame] = []
        self._timing: Any = None
        self._on_frame: Callable[[Frame], None] = lambda frame: None
        #: What the server would have shown to a person, the newest one.
        self._shown: str | None = None

        def canvas(params: Any) -> None:
            frame = Frame(params.step, params.ms, tuple(params.slots))
            self._frames.append(frame)
            self._on_frame(frame)

        def timing(params: Any) -> None:
            self._timing = params

        def show(params: types.ShowMessageParams) -> None:
            self._shown = params.message

        self.feature("infill/canvas")(canvas)
        self.feature("infill/timing")(timing)
        self.feature(types.WINDOW_SHOW_MESSAGE)(show)

    async def __aenter__(self) -> Self:
        # A session of its own: Ctrl-C is for the demo, which then ends the server in order.
        await self.start_io(sys.executable, "-m", "infill_lsp", cwd=EXAMPLES, start_new_session=True)
        try:
            await self._initialize()
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._end()

    async def statuses(self) -> AsyncIterator[Any]:
        """What the engine says of itself, until it is ready. Raises `DemoError` where it cannot be."""
        while True:
            status = await self._ask(self.protocol.send_request_async("infill/status", None))
            yield status
            if status.state == "ready":
                return
            if status.state == "error" or self._shown is not None:
                raise DemoError(self._shown or status.message)
            await asyncio.sleep(POLL_S)

    async def complete(self, gap: Gap, on_frame: Callable[[Frame], None]) -> Answer:
        """Opens the gap's document and asks as if by a key. Raises `DemoError` where that has no answer."""
        self._version += 1
        self._frames, self._timing, self._on_frame = [], None, on_frame
        document = types.TextDocumentIdentifier(gap.uri)
        self.text_document_did_open(
            types.DidOpenTextDocumentParams(types.TextDocumentItem(gap.uri, "python", self._version, gap.text))
        )
        params = types.InlineCompletionParams(
            types.InlineCompletionContext(types.InlineCompletionTriggerKind.Invoked),
            document,
            types.Position(gap.row, gap.column),
        )
        began = time.perf_counter()
        result = await self._ask(self.text_document_inline_completion_async(params))
        ms = (time.perf_counter() - began) * 1000
        self.text_document_did_close(types.DidCloseTextDocumentParams(document))
        if self._timing is None:
            raise DemoError(self._shown or "the engine went away before it answered: run `infill-lsp doctor`")
        text, start, end = None, gap.offset, gap.offset
        if result.items:
            item = result.items[0]
            text = item.insert_text
            start += item.range.start.character - gap.column
            end += item.range.end.character - gap.column
        return Answer(gap, text, start, end, tuple(self._frames), self._timing, ms)

    async def _initialize(self) -> None:
        capabilities = types.ClientCapabilities(
            # Offsets are then those of Python's strings.
            general=types.GeneralClientCapabilities(position_encodings=[types.PositionEncodingKind.Utf32]),
            experimental={"infill": {"canvas": True, "timing": True}},
        )
        params = types.InitializeParams(
            capabilities,
            process_id=os.getpid(),
            workspace_folders=[types.WorkspaceFolder(PROJECT.as_uri(), PROJECT.name)],
            initialization_options={"infill": {"model": self._model, "deadline": {"invoked": DEADLINE_MS}}},
        )
        await self._ask(self.initialize_async(params))
        self.initialized(types.InitializedParams())

    async def _ask(self, answer: Any) -> Any:
        """What the server answers. Raises `DemoError` where it ends instead, or refuses."""
        try:
            return await answer
        except JsonRpcException as error:
            raise DemoError(f"infill-lsp: {error.message}") from None
        except RuntimeError:
            raise DemoError(f"infill-lsp ended: {await self._last_words()}") from None

    async def _last_words(self) -> str:
        assert self._server is not None
        assert self._server.stderr is not None
        said = (await self._server.stderr.read()).decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(said) if line.strip()), "it said nothing")

    async def _end(self) -> None:
        """Ends the server as the protocol has it, or by force where it does not follow."""
        assert self._server is not None
        if self._server.returncode is None:
            try:
                async with asyncio.timeout(END_S):
                    await self.shutdown_async(None)
                    self.exit(None)
                    await self._server.wait()
            except (TimeoutError, JsonRpcException, RuntimeError):
                with contextlib.suppress(ProcessLookupError):
                    self._server.kill()
        await self.stop()  # type: ignore[no-untyped-call]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the demo and returns its exit code: 0 done, 1 something is missing (one line on stderr), 130 Ctrl-C."""
    options = _parser().parse_args(arguments)
    # What pygls logs of a server that is gone is told in one line here.
    logging.getLogger("pygls").addHandler(logging.NullHandler())
    plain = options.plain or not sys.stdout.isatty()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # Not every terminal can show a ░.
    console = Console(
        force_terminal=False if plain else None, width=UNWRAPPED if plain else None, highlight=False, markup=False
    )
    stays = STAYS.format("" if options.model == "auto" else f" --model {options.model}")
    places = [PLACES[options.place - 1]] if options.place else PLACES
    try:
        answers = asyncio.run(_ask_everywhere(console, options.model, places))
        console.print(_summary(answers))
        if options.svg:
            _save(options.svg, _view(answers[-1].gap, answers[-1].frames, answers[-1], marks=False))
    except KeyboardInterrupt:
        console.print(f"\nStopped. {stays}")
        return 130
    except (DemoError, OSError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    console.print(stays)
    if all(answer.text is None for answer in answers):
        print("demo: nothing was offered at any place: run `infill-lsp doctor`", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Ask the real server for text taken out of a small project.")
    parser.add_argument("--plain", action="store_true", help="no colours, nothing that moves; as without a terminal")
    parser.add_argument("--model", default="embedded", help="as the setting infill.model (default: %(default)s)")
    parser.add_argument(
        "--place",
        type=int,
        choices=range(1, len(PLACES) + 1),
        metavar="N",
        help=f"only the place of this number, 1 to {len(PLACES)}",
    )
    parser.add_argument("--svg", type=Path, metavar="FILE", help="also save the picture of the last place")
    return parser


async def _ask_everywhere(console: Console, model: str, places: Sequence[Place]) -> list[Answer]:
    """Shows each place while its answer comes, and then with it."""
    answers = []
    async with Editor(model) as editor:
        await _until_ready(console, editor)
        for place in places:
            gap = Gap.at(place)
            with _moving(console, gap) as show:
                answer = await editor.complete(gap, show)
            console.print(_view(gap, answer.frames, answer, marks=not console.is_terminal))
            answers.append(answer)
    return answers


async def _until_ready(console: Console, editor: Editor) -> None:
    """Shows how far the engine is: on a terminal in one line that changes, else in a line for each state."""
    began, told = time.monotonic(), ""
    with console.status("starting the server") if console.is_terminal else contextlib.nullcontext() as spinner:
        async for status in editor.statuses():
            line = status.message or "the engine is starting"
            if spinner is not None:
                done = "" if status.progress is None else f", {status.progress:.0%} of about 93 MB, once"
                spinner.update(Text(line + done))
            elif line != told and status.state not in ("ready", "error"):
                console.print(line)
                told = line
    console.print(f"The model {status.model} on {status.device}, ready in {time.monotonic() - began:.1f} s.")
    console.print(
        Text.assemble(
            "The canvas after a step: ░ a mask, ",
            ("committed", _shade(0.0)),
            " ",
            ("and surer", _shade(1.0)),
            ", ",
            ("proposed", PROPOSED),
            ", ",
            ("written before the cursor", HEAD),
            ". The text offered may end before it.\n",
        )
    )


@contextlib.contextmanager
def _moving(console: Console, gap: Gap) -> Iterator[Callable[[Frame], None]]:
    """On a terminal, draws each frame over the one before and wipes the last away in the end."""
    if not console.is_terminal:
        yield lambda frame: None
        return
    with Live(_view(gap), console=console, auto_refresh=False, transient=True) as live:
        yield lambda frame: live.update(_view(gap, [frame]), refresh=True)


def _view(gap: Gap, frames: Sequence[Frame] = (), answer: Answer | None = None, marks: bool = False) -> RenderableType:
    """A place: its code, canvases, and once there is an answer the text offered, the time, and the author's text.

    `marks` shows without colours and frames what else they show.
    """
    number = f"{PLACES.index(gap.place) + 1}/{len(PLACES)}  {gap.place.title}"
    where = f"shop/{gap.place.file}, line {gap.row + 1}"
    parts: list[RenderableType] = [_code(gap, answer, marks), Text(), _film(frames, marks)]
    if answer is not None:
        parts += [Text(), _facts(answer)]
    if marks:
        return Group(f"{number}: {where}", *parts, Text())
    return Panel(Group(*parts), title=number, title_align="left", subtitle=where, subtitle_align="right")


def _code(gap: Gap, answer: Answer | None, marks: bool) -> RenderableType:
    """The lines around the cursor: with the offered text in them, else with the cursor."""
    if answer is not None and answer.text is not None:
        text = _python(answer.document)
        start, end = answer.start, answer.start + len(answer.text)
        for part in re.finditer(r"\S.*", answer.text):
            text.stylize(GHOST, start + part.start(), start + part.end())
        opening, closing = ("‹", "›") if marks else ("", "")
    else:
        text, start, end = _python(gap.text), gap.offset, gap.offset
        opening, closing = "▏", ""
    last_row = text.plain.count("\n", 0, end)
    before, ghost, after = text.divide([start, end])
    lines = Text.assemble(before, opening, ghost, closing, after).split("\n", allow_blank=True)
    first = max(0, gap.row - ABOVE)
    shown = Table.grid(padding=(0, 1))
    shown.add_column(style="grey50", justify="right")
    shown.add_column(no_wrap=True, overflow="ellipsis")
    for row, line in enumerate(lines[first : last_row + 1 + BELOW], first):
        shown.add_row(str(row + 1), line)
    return shown


def _film(frames: Sequence[Frame], marks: bool) -> RenderableType:
    """A few of the canvases, the first and the last among them. With `marks` only the last."""
    count = min(1 if marks else FILM, len(frames))
    chosen = [frames[round((len(frames) - 1) * i / (count - 1))] for i in range(count)] if count > 1 else frames[-1:]
    film = Table.grid(padding=(0, 1))
    film.add_column(style="grey50", justify="right", no_wrap=True)
    film.add_column(style="grey50", justify="right", no_wrap=True)
    film.add_column()
    for frame in chosen:
        film.add_row(f"step {frame.step}", f"{frame.ms:.0f} ms", _canvas(frame, "|" if marks else " "))
    return film


def _canvas(frame: Frame, gap: str) -> Text:
    """The slots as cells: the surer a committed one, the greener."""
    canvas = Text()
    for slot in frame.slots:
        if slot.state == "mask":
            canvas.append("░", MASK)
            continue
        style = {"head": HEAD, "proposed": PROPOSED}.get(slot.state) or _shade(slot.prob)
        canvas.append(slot.text.replace("\n", "⏎"), style)
        canvas.append(gap)
    return canvas


def _facts(answer: Answer) -> RenderableType:
    """Time and steps, whether it is what the author wrote, and that where it is not."""
    timing, gap = answer.timing, answer.gap
    facts = Table.grid(padding=(0, 1))
    facts.add_column(style="grey50", no_wrap=True)
    facts.add_column()
    facts.add_row(
        "time",
        f"{answer.ms:.0f} ms: {timing.steps} denoise steps {timing.denoiseMs:.0f} ms, encoding the context "
        f"{timing.encodeMs:.0f} ms ({timing.encoded} tokens, {timing.reused} cached)",
    )
    if timing.reason == "deadline":
        facts.add_row("", f"cut off at the deadline of {DEADLINE_MS / 1000:.0f} s")
    if answer.same:
        facts.add_row("author", Text("wrote the same", "green"))
    elif answer.begun:
        facts.add_row("author", Text("wrote this and more", "green"))
        facts.add_row("", _python(dedent(" " * gap.column + gap.author)))
    else:
        offered = "nothing offered; the author wrote" if answer.text is None else "wrote something else"
        facts.add_row("author", Text(offered, "yellow"))
        facts.add_row("", _python(dedent(" " * gap.column + gap.author)))
    return facts


def _summary(answers: Sequence[Answer]) -> RenderableType:
    table = Table(title="What was offered", title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("place", no_wrap=True)
    table.add_column("text", no_wrap=True, overflow="ellipsis")
    table.add_column("ms", justify="right")
    table.add_column("steps", justify="right")
    table.add_column("the author's?")
    for answer in answers:
        first, *more = (answer.text or "").strip().split("\n")
        text = Text("nothing", "italic") if answer.text is None else Text(first + (f" (+{len(more)})" if more else ""))
        cut_off = ", cut off" if answer.timing.reason == "deadline" else ""
        right = "yes" if answer.same else "as far as it goes" if answer.begun else ""
        same = Text(right, "green") if right else Text("no" + cut_off, "yellow")
        table.add_row(answer.gap.place.title, text, f"{answer.ms:.0f}", str(answer.timing.steps), same)
    return table


def _save(file: Path, picture: RenderableType) -> None:
    """The picture as SVG, in a font of the reader's own: rich would have one fetched from the web."""
    console = Console(record=True, width=PICTURE, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(picture)
    svg = console.export_svg(title="infill-lsp")
    file.write_text(re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL), encoding="utf-8")


def _python(code: str) -> Text:
    """Highlighted in the terminal's own colours."""
    text = Syntax("", "python", theme="ansi_dark", background_color="default").highlight(code)
    if not code.endswith("\n"):  # Which is given one.
        text.right_crop()
    return text


def _shade(prob: float) -> str:
    red, green, blue = (round(low + (high - low) * prob) for low, high in zip(UNSURE, SURE, strict=True))
    return f"rgb(255,255,255) on rgb({red},{green},{blue})"


if __name__ == "__main__":
    raise SystemExit(main())
