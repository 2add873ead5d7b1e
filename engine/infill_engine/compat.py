"""Endpoints that plugins of other engines already speak: llama.cpp's `/infill`, OpenAI's `/v1/completions` with a
suffix, and Mistral's `/v1/fim/completions`.

Each dialect is thin: it turns its body into an `Ask`, and the answer into its own shape. Everything between is the
same for all: where the gap lies, where its text ends, what of it may be streamed, and when the job is over. There is no
parser here: `infill_lsp` knows better where a gap ends, and these plugins have rules of their own.

Decoding is greedy whatever temperature is asked for, and only the text that is shown is counted.
"""

from __future__ import annotations

import contextlib
import re
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Generic, Literal, NamedTuple, Protocol, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from infill_engine import gap
from infill_engine.endpoints import EVENT_STREAM, JSON, Endpoint, Refusal, answer, events, read, unless_gone
from infill_engine.protocol import (
    ANSWERED,
    MAX_SNIPPET,
    MAX_SNIPPETS,
    Answered,
    Candidate,
    Final,
    InfillRequest,
    Snippet,
    Timing,
    best_end,
)
from infill_engine.scheduler import Scheduler

#: What a client gets that does not say: tokens, and milliseconds from receipt to the answer.
DEFAULT_TOKENS, DEFAULT_DEADLINE_MS = 128, 3000
#: The most that any client gets.
MOST_TOKENS, MOST_LINES, MOST_DEADLINE_MS = 256, 32, 60_000
#: Documents told apart at a time: these requests name none.
DOCUMENTS = 8

Tokens = Annotated[int, Meta(ge=1)]
One = Annotated[int, Meta(ge=1, le=1)]
Stops = Annotated[list[str], Meta(max_length=64)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What every dialect's body comes down to."""

    #: All text before and after the cursor, with any line ends.
    before: str
    after: str
    max_tokens: int
    #: The text ends before the first of these.
    stops: tuple[str, ...]
    deadline_ms: int = DEFAULT_DEADLINE_MS
    #: Characters of whitespace that a later line of the gap has to begin with; None: as many as the cursor's line.
    n_indent: int | None = None
    #: Pieces of other files, the most helpful first.
    snippets: tuple[Snippet, ...] = ()

    @property
    def eol(self) -> str:
        """The line end to answer with."""
        return "\r\n" if "\r\n" in self.before or "\r\n" in self.after else "\n"

    def request(self, document: str) -> InfillRequest:
        """The gap between the last newline before the cursor and the first one after it, LF only.

        Where code follows in the line, or a newline is to stop it, the gap has one line.
        """
        before, after = _lf(self.before), _lf(self.after)
        at, end = before.rfind("\n") + 1, after.find("\n")
        tail = after if end < 0 else after[:end]
        return InfillRequest(
            client="http",
            document=document,
            prefix=before[:at],
            head=before[at:],
            tail=tail,
            suffix=after[len(tail) :],
            max_lines=1 if tail.strip() or "\n" in map(_lf, self.stops) else MOST_LINES,
            max_tokens=max(1, min(self.max_tokens, MOST_TOKENS)),
            min_indent=self._min_indent(before) or None,
            deadline_ms=min(self.deadline_ms, MOST_DEADLINE_MS),
            snippets=self.snippets,
            priority="explicit",  # nobody says which document it is, so no later key takes its place
        )

    def _min_indent(self, before: str) -> int:
        """`n_indent` in columns, as the nearest line that is indented so far is; as blanks if there is none."""
        lines = before.split("\n")
        size = len(_indentation(lines[-1])) if self.n_indent is None else self.n_indent
        deep = (own[:size] for own in map(_indentation, reversed(lines)) if len(own) >= size)
        return gap.columns(next(deep, " " * size).encode())


class Outcome(NamedTuple):
    """How an answer came to its end."""

    #: "stop": a stop string, which is `stop`. The others are the engine's own.
    reason: Literal["stop", Answered]
    #: Tokens of the text.
    tokens: int
    #: Zero where a stop string ended the job early.
    timing: Timing
    stop: str = ""

    @property
    def finish(self) -> Literal["stop", "length"]:
        return "stop" if self.reason in ("stop", "end") else "length"


class Part(NamedTuple):
    """A piece of the answer's text, in order; the last one has the outcome."""

    text: str
    outcome: Outcome | None = None


class Reply:
    """The text of an answer as its candidates come in: what may be told already, and what it is in the end.

    A candidate grows or is cut at its end, so of a text of several lines only the lines up to the best place to end
    so far may be told, and of those only what no rule of the gap can cut off and no stop string can begin in.
    """

    def __init__(self, stops: Sequence[str], max_lines: int) -> None:
        self._stops = [stop for stop in map(_lf, stops) if stop]
        self._max_lines = max_lines
        self._candidate = Candidate("")
        self._told = 0
        #: The stop string that ended the text.
        self.stop = ""

    def grow(self, candidate: Candidate) -> str:
        """Takes the next candidate and returns what may be told now; `stop` is set where that was all."""
        self._candidate = candidate
        sure, longest = self._sure_end(), max(map(len, self._stops), default=1)
        at, stop = self._first_stop(candidate.text) or (len(candidate.text) - longest + 1, "")
        if stop and at + longest - 1 <= sure:  # None can begin before it, whatever follows.
            self.stop = stop
        return self._tell(min(sure, at))

    def close(self) -> str:
        """What is still to be told once no candidate follows."""
        text = self._candidate.text[: self._end()].rstrip("\n")
        at, self.stop = self._first_stop(text) or (len(text), "")
        return self._tell(at)

    @property
    def tokens(self) -> int:
        """Tokens of what was told."""
        return sum(offset <= self._told for offset in self._candidate.offsets)

    def _tell(self, end: int) -> str:
        told, self._told = self._told, max(self._told, end)
        return self._candidate.text[told : self._told]

    def _end(self) -> int:
        """Where the text ends: with its line if it may have only one, else where the gap is most probably over."""
        text = self._candidate.text
        return len(text.partition("\n")[0]) if self._max_lines == 1 else self._best(len(text))

    def _sure_end(self) -> int:
        """A place that is never after `_end`, whatever candidates follow."""
        if self._max_lines == 1:
            return 0
        text = self._candidate.text.encode()
        for end in reversed(self._candidate.ends):
            if gap.stays(text, len(self._candidate.text[: end.offset].encode())):
                best = self._best(end.offset)
                return len(self._candidate.text[:best].rstrip("\n"))
        return 0

    def _best(self, last: int) -> int:
        """The best of the ends up to `last`."""
        end = best_end([end for end in self._candidate.ends if end.offset <= last])
        return end.offset if end is not None else last

    def _first_stop(self, text: str) -> tuple[int, str] | None:
        found = [(text.find(stop), stop) for stop in self._stops if stop in text]
        return min(found, default=None)


class _Documents:
    """Names for requests that come without one, so that those of one place find what is encoded of it, and none that
    overlap supersede each other."""

    def __init__(self) -> None:
        self._free: list[tuple[str, frozenset[str]]] = [(str(i), frozenset()) for i in range(DOCUMENTS)]
        self._names = DOCUMENTS

    @contextlib.contextmanager
    def name(self, before: str) -> Iterator[str]:
        """The free name whose last text shares most lines with `before`, if it is most of them; else the one that was
        not used for longest."""
        lines = frozenset(before.split("\n"))
        if not self._free:
            self._free.append((str(self._names), frozenset()))
            self._names += 1
        shared = [len(lines & known) for _, known in self._free]
        best = max(range(len(shared)), key=shared.__getitem__)
        name, _ = self._free.pop(best if 2 * shared[best] > len(lines) else 0)
        try:
            yield name
        finally:
            self._free.append((name, lines))


class LlamaError(Struct, frozen=True):
    """How llama.cpp's server refuses."""

    class Detail(Struct, frozen=True):
        code: int
        message: str
        type: str

    error: Detail

    @classmethod
    def of(cls, status: int, message: str) -> LlamaError:
        kinds = {401: "authentication_error", 403: "permission_error", 500: "server_error", 503: "unavailable_error"}
        return cls(cls.Detail(status, message, kinds.get(status, "invalid_request_error")))


class OpenAIError(Struct, frozen=True):
    """How OpenAI's API refuses."""

    class Detail(Struct, frozen=True):
        message: str
        type: str
        #: The field that does not fit.
        param: str | None
        code: str | None

    error: Detail

    @classmethod
    def of(cls, status: int, message: str) -> OpenAIError:
        field = re.search(r"`\$\.(\w+)", message)
        kind = "server_error" if status >= 500 else "invalid_request_error"
        code = "invalid_api_key" if status == 401 else None
        return cls(cls.Detail(message, kind, field[1] if field else None, code))


class MistralError(Struct, frozen=True):
    """How Mistral's API refuses."""

    message: str
    type: str
    object: Literal["error"] = "error"
    param: str | None = None
    code: str | None = None

    @classmethod
    def of(cls, status: int, message: str) -> MistralError:
        return cls(message, "internal_error" if status >= 500 else "invalid_request_error")


class Usage(Struct, frozen=True):
    """Tokens read and written."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int

    @classmethod
    def of(cls, outcome: Outcome) -> Usage:
        read = outcome.timing.encoded + outcome.timing.reused
        return cls(read, outcome.tokens, read + outcome.tokens)


class Envelope(NamedTuple):
    """What the parts of one answer have in common."""

    id: str
    created: int
    model: str
    context: int


class Body(Protocol):
    """What the bodies of the dialects have in common. Fields that they do not name are ignored."""

    __struct_fields__: ClassVar[tuple[str, ...]]

    @property
    def stream(self) -> bool | None: ...

    def ask(self) -> Ask: ...


B = TypeVar("B", bound=Body)


class LlamaExtra(Struct, frozen=True):
    text: str
    filename: str | None = None


class LlamaBody(Struct, frozen=True, kw_only=True):
    """https://github.com/ggml-org/llama.cpp/tree/master/tools/server, `POST /infill`."""

    input_prefix: str
    input_suffix: str
    #: Pieces of other files, the most helpful last: next to the code in llama.cpp's prompt.
    input_extra: list[LlamaExtra] | None = None
    #: Text of the cursor's line before the cursor.
    prompt: str = ""
    #: Tokens of the answer at most; 0: only encode what is sent; -1: as many as there may be.
    n_predict: int | None = None
    n_indent: Annotated[int, Meta(ge=0, le=1000)] | None = None
    #: Milliseconds, together counted from receipt.
    t_max_prompt_ms: int | None = None
    t_max_predict_ms: int | None = None
    stop: Stops | None = None
    stream: bool | None = None
    #: Names of what is to be answered, `timings/prompt_n` for what is inside; all if there are none.
    response_fields: list[str] | None = None

    def ask(self) -> Ask:
        predict_ms = max(self.t_max_predict_ms or 0, 0)
        deadline_ms = predict_ms + max(self.t_max_prompt_ms or 0, 0) if predict_ms else DEFAULT_DEADLINE_MS
        tokens = DEFAULT_TOKENS if self.n_predict is None else self.n_predict
        return Ask(
            before=self.input_prefix + self.prompt,
            after=self.input_suffix,
            max_tokens=MOST_TOKENS if tokens < 0 else tokens,
            stops=tuple(self.stop or ()),
            deadline_ms=deadline_ms,
            n_indent=self.n_indent,
            snippets=tuple(
                Snippet(_lf(extra.text)[:MAX_SNIPPET], extra.filename or "")
                for extra in reversed((self.input_extra or [])[-MAX_SNIPPETS:])
            ),
        )


class LlamaTimings(Struct, frozen=True):
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float

    @classmethod
    def of(cls, outcome: Outcome) -> LlamaTimings:
        def rates(tokens: int, ms: float) -> tuple[int, float, float, float]:
            return tokens, ms, ms / tokens if tokens else 0.0, 1000 * tokens / ms if ms else 0.0

        timing = outcome.timing
        return cls(*rates(timing.encoded, timing.encode_ms), *rates(outcome.tokens, timing.denoise_ms))


class LlamaSettings(Struct, frozen=True):
    n_ctx: int
    n_predict: int
    temperature: float = 0.0


class LlamaAnswer(Struct, frozen=True, kw_only=True):
    """The whole answer, or one part of a stream (`stop` false, all after it missing)."""

    index: int | UnsetType = UNSET
    content: str | UnsetType = UNSET
    stop: bool | UnsetType = UNSET
    id_slot: int | UnsetType = UNSET
    model: str | UnsetType = UNSET
    #: Tokens of the text; of what was read; of those, what was encoded before.
    tokens_predicted: int | UnsetType = UNSET
    tokens_evaluated: int | UnsetType = UNSET
    tokens_cached: int | UnsetType = UNSET
    truncated: bool | UnsetType = UNSET
    stop_type: Literal["none", "eos", "limit", "word"] | UnsetType = UNSET
    stopping_word: str | UnsetType = UNSET
    stopped_eos: bool | UnsetType = UNSET
    stopped_limit: bool | UnsetType = UNSET
    stopped_word: bool | UnsetType = UNSET
    timings: LlamaTimings | UnsetType = UNSET
    generation_settings: LlamaSettings | UnsetType = UNSET


def _llama(envelope: Envelope, body: LlamaBody, text: str, outcome: Outcome) -> Any:
    timing, reason = outcome.timing, outcome.reason
    kinds: dict[str, Literal["eos", "limit", "word"]] = {"end": "eos", "stop": "word"}
    whole = LlamaAnswer(
        index=0,
        content=text,
        stop=True,
        id_slot=0,
        model=envelope.model,
        tokens_predicted=outcome.tokens,
        tokens_evaluated=timing.encoded + timing.reused,
        tokens_cached=timing.reused,
        truncated=False,
        stop_type=kinds.get(reason, "limit"),
        stopping_word=outcome.stop,
        stopped_eos=reason == "end",
        stopped_limit=outcome.finish == "length",
        stopped_word=reason == "stop",
        timings=LlamaTimings.of(outcome),
        generation_settings=LlamaSettings(n_ctx=envelope.context, n_predict=body.ask().max_tokens),
    )
    return _chosen(msgspec.to_builtins(whole), body.response_fields) if body.response_fields else whole


def _llama_part(envelope: Envelope, body: LlamaBody, part: Part) -> list[Any]:
    if part.outcome:
        return [_llama(envelope, body, part.text, part.outcome)]
    return [LlamaAnswer(index=0, content=part.text, stop=False)]


def _chosen(whole: Any, fields: Sequence[str]) -> dict[str, Any]:
    """What the paths name, each under its path: `{"timings/prompt_n": 3}`."""
    chosen = {}
    for path in fields:
        value = whole
        for name in path.split("/"):
            value = value.get(name) if isinstance(value, dict) else None
        if value is not None:
            chosen[path] = value
    return chosen


class StreamOptions(Struct, frozen=True):
    include_usage: bool | None = None


class PlainBody(Struct, frozen=True, kw_only=True):
    """What OpenAI's and Mistral's bodies have in common."""

    prompt: str
    suffix: str | None = None
    #: Any name: there is one model.
    model: str | None = None
    max_tokens: Tokens | None = None
    stop: str | Stops | None = None
    stream: bool | None = None
    #: Without effect: decoding is greedy.
    temperature: float | None = None

    def ask(self) -> Ask:
        before, after = (self.prompt, self.suffix) if self.suffix is not None else self._parts()
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return Ask(before=before, after=after, max_tokens=self.max_tokens or DEFAULT_TOKENS, stops=stops)

    def _parts(self) -> tuple[str, str]:
        """Text before and after the cursor where no suffix is given."""
        return self.prompt, ""


class OpenAIBody(PlainBody, frozen=True, kw_only=True):
    """https://platform.openai.com/docs/api-reference/completions/create, with one prompt and one choice.

    Where no suffix is given, the prompt may hold both sides between `<|fim_prefix|>`, `<|fim_suffix|>` and
    `<|fim_middle|>`, with or without bars.
    """

    stream_options: StreamOptions | None = None
    n: One | None = None
    best_of: One | None = None
    echo: Literal[False] | None = None
    logprobs: None = None

    def _parts(self) -> tuple[str, str]:
        for bar in ("|", ""):
            prefix, suffix, middle = (f"<{bar}fim_{part}{bar}>" for part in ("prefix", "suffix", "middle"))
            if self.prompt.startswith(prefix) and self.prompt.endswith(middle):
                before, _, after = self.prompt[len(prefix) : -len(middle)].partition(suffix)
                return before, after
        return self.prompt, ""


class OpenAIChoice(Struct, frozen=True):
    text: str
    finish_reason: Literal["stop", "length"] | None = None
    index: int = 0
    logprobs: None = None


class OpenAIAnswer(Struct, frozen=True, kw_only=True):
    """The whole answer, or one part of a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[OpenAIChoice]
    usage: Usage | UnsetType = UNSET


def _openai(envelope: Envelope, body: OpenAIBody, text: str, outcome: Outcome) -> OpenAIAnswer:
    usage, choice = Usage.of(outcome), OpenAIChoice(text, outcome.finish)
    return OpenAIAnswer(id=envelope.id, created=envelope.created, model=envelope.model, choices=[choice], usage=usage)


def _openai_part(envelope: Envelope, body: OpenAIBody, part: Part) -> list[Any]:
    choice = OpenAIChoice(part.text, part.outcome.finish if part.outcome else None)
    one = OpenAIAnswer(id=envelope.id, created=envelope.created, model=envelope.model, choices=[choice])
    if part.outcome and body.stream_options and body.stream_options.include_usage:
        return [one, msgspec.structs.replace(one, choices=[], usage=Usage.of(part.outcome))]
    return [one]


class MistralBody(PlainBody, frozen=True, kw_only=True):
    """https://docs.mistral.ai/api/#tag/fim."""

    #: Without effect: decoding is greedy, and ends where the gap does.
    random_seed: int | None = None
    min_tokens: int | None = None


class MistralMessage(Struct, frozen=True):
    content: str
    role: Literal["assistant"] = "assistant"


class MistralChoice(Struct, frozen=True):
    #: `message` in a whole answer, `delta` in a part of a stream.
    message: MistralMessage | UnsetType = UNSET
    delta: MistralMessage | UnsetType = UNSET
    finish_reason: Literal["stop", "length"] | None = None
    index: int = 0


class MistralAnswer(Struct, frozen=True, kw_only=True):
    """The whole answer, or one part of a stream."""

    id: str
    object: Literal["chat.completion", "chat.completion.chunk"] = "chat.completion"
    created: int
    model: str
    choices: list[MistralChoice]
    usage: Usage | UnsetType = UNSET


def _mistral(envelope: Envelope, body: MistralBody, text: str, outcome: Outcome) -> MistralAnswer:
    choice, usage = MistralChoice(message=MistralMessage(text), finish_reason=outcome.finish), Usage.of(outcome)
    return MistralAnswer(id=envelope.id, created=envelope.created, model=envelope.model, choices=[choice], usage=usage)


def _mistral_part(envelope: Envelope, body: MistralBody, part: Part) -> list[Any]:
    finish, usage = (part.outcome.finish, Usage.of(part.outcome)) if part.outcome else (None, UNSET)
    choice = MistralChoice(delta=MistralMessage(part.text), finish_reason=finish)
    return [
        MistralAnswer(
            id=envelope.id,
            object="chat.completion.chunk",
            created=envelope.created,
            model=envelope.model,
            choices=[choice],
            usage=usage,
        )
    ]


class Health(Struct, frozen=True):
    status: Literal["ok"] = "ok"


class Props(Struct, frozen=True, kw_only=True):
    """What llama.cpp's clients ask for about a server."""

    default_generation_settings: LlamaSettings
    total_slots: int
    model_path: str


class Model(Struct, frozen=True, kw_only=True):
    id: str
    name: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "infill-lsp"
    context_length: int


class Models(Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Model]


@dataclass(frozen=True, slots=True)
class _Dialect(Generic[B]):
    """How one API asks, answers and refuses."""

    path: str
    name: str
    body: type[B]
    answers: type[Struct]
    refusal: type[Refusal]
    #: The whole answer, and the messages of a stream that tell one part of it.
    whole: Callable[[Envelope, B, str, Outcome], Any]
    part: Callable[[Envelope, B, Part], list[Any]]
    #: What a stream ends with.
    closing: bytes = b"data: [DONE]\n\n"


_DIALECTS: tuple[_Dialect[Any], ...] = (
    _Dialect("/infill", "llama.cpp", LlamaBody, LlamaAnswer, LlamaError, _llama, _llama_part, closing=b""),
    _Dialect("/v1/completions", "OpenAI", OpenAIBody, OpenAIAnswer, OpenAIError, _openai, _openai_part),
    _Dialect("/v1/fim/completions", "Mistral", MistralBody, MistralAnswer, MistralError, _mistral, _mistral_part),
)


class Gateway:
    """The endpoints of all dialects, in front of one scheduler."""

    def __init__(self, scheduler: Scheduler, model: Callable[[], str], context: int) -> None:
        """model: tells the name to answer with; context: tokens that the model reads at most."""
        self._scheduler = scheduler
        self._model, self._context = model, context
        self._documents = _Documents()
        self._born = int(time.time())

    def endpoints(self) -> list[Endpoint]:
        return [
            *map(self._infill, _DIALECTS),
            Endpoint(
                method="GET",
                path="/health",
                summary="Whether the model is ready",
                handle=self._health,
                answers={JSON: Health},
                refusal=LlamaError,
                refuses=(503,),
                public=True,
            ),
            Endpoint(
                method="GET",
                path="/props",
                summary="What llama.cpp's clients ask for about a server",
                handle=self._props,
                answers={JSON: Props},
                refusal=LlamaError,
            ),
            Endpoint(
                method="GET",
                path="/v1/models",
                summary="The model that is served",
                handle=self._models,
                answers={JSON: Models},
                refusal=OpenAIError,
            ),
        ]

    def _infill(self, dialect: _Dialect[Any]) -> Endpoint:
        async def handle(request: Request) -> Response:
            started = time.monotonic()
            body = await read(request, dialect.body)
            ask = body.ask()
            envelope = Envelope(f"cmpl-{uuid.uuid4().hex}", int(time.time()), self._model(), self._context)
            if ask.max_tokens == 0:
                self._prime(ask)
                return answer(dialect.whole(envelope, body, "", Outcome("limit", 0, Timing())))
            parts = self._fill(ask, started)
            if not body.stream:
                return answer(dialect.whole(envelope, body, *await unless_gone(request, _whole(parts))))
            # A refusal comes first if it comes at all: as long as nothing is sent, the status can tell it.
            first = await unless_gone(request, _first(parts))

            async def stream() -> AsyncIterator[bytes]:
                async with aclosing(parts):
                    try:
                        part = first
                        while True:
                            for message in dialect.part(envelope, body, part):
                                yield _event(message)
                            if part.outcome:
                                yield dialect.closing
                                return
                            part = await anext(parts)
                    except HTTPException as error:
                        yield _event(dialect.refusal.of(error.status_code, error.detail))

            return StreamingResponse(stream(), media_type=EVENT_STREAM)

        return Endpoint(
            method="POST",
            path=dialect.path,
            summary=f"Fills the gap between a prefix and a suffix, as {dialect.name}'s API does",
            handle=handle,
            body=dialect.body,
            answers={JSON: dialect.answers, EVENT_STREAM: dialect.answers},
            refusal=dialect.refusal,
            refuses=(500, 503),
        )

    async def _fill(self, ask: Ask, started: float) -> AsyncGenerator[Part, None]:
        """The answer's text in pieces. Raises `HTTPException` 500 or 503; closing it cancels the job."""
        with self._documents.name(ask.before) as document:
            request = ask.request(document)
            reply = Reply(ask.stops, request.max_lines)
            async with aclosing(events(self._scheduler, request, started)) as stream:
                async for event in stream:
                    if isinstance(event, Candidate):
                        told = reply.grow(event).replace("\n", ask.eol)
                        if reply.stop:
                            yield Part(told, Outcome("stop", reply.tokens, Timing(), reply.stop))
                            return
                        if told:
                            yield Part(told)
                    elif isinstance(event, Final):
                        if event.reason not in ANSWERED:
                            status = 500 if event.reason == "error" else 503
                            raise HTTPException(status, event.message or f"the request was {event.reason}")
                        told = reply.close().replace("\n", ask.eol)
                        reason = "stop" if reply.stop else event.reason
                        yield Part(told, Outcome(reason, reply.tokens, event.timing, reply.stop))

    def _prime(self, ask: Ask) -> None:
        """Encodes ahead of need; nothing where there is nothing to encode."""
        if ask.before or ask.after:
            with self._documents.name(ask.before) as document:
                self._scheduler.prime(ask.request(document))

    async def _health(self, _: Request) -> Response:
        if self._scheduler.phase.state != "ready":
            raise HTTPException(503, self._scheduler.phase.line)
        return answer(Health())

    async def _props(self, _: Request) -> Response:
        settings = LlamaSettings(n_ctx=self._context, n_predict=DEFAULT_TOKENS)
        return answer(Props(default_generation_settings=settings, total_slots=DOCUMENTS, model_path=self._model()))

    async def _models(self, _: Request) -> Response:
        name = self._model()
        one = Model(id=name, name=name, created=self._born, context_length=self._context)
        return answer(Models(data=[one]))


async def _first(parts: AsyncGenerator[Part, None]) -> Part:
    return await anext(parts)


async def _whole(parts: AsyncGenerator[Part, None]) -> tuple[str, Outcome]:
    text = ""
    async with aclosing(parts):
        while True:
            part = await anext(parts)
            text += part.text
            if part.outcome:
                return text, part.outcome


def _event(message: Any) -> bytes:
    """A server-sent event (https://html.spec.whatwg.org/multipage/server-sent-events.html)."""
    return b"data: " + msgspec.json.encode(message) + b"\n\n"


def _indentation(line: str) -> str:
    return line[: len(line) - len(line.lstrip(" \t"))]


def _lf(text: str) -> str:
    return text.replace("\r\n", "\n")
