"""What the language server and the engine say to each other, and where they meet.

Imports neither torch nor an HTTP library, so the light server can import it. It does not know how a request is
answered. A request is one JSON document; the answer is newline-delimited JSON: any number of `Frame` (asked for) and
`Candidate` lines, each candidate better than the one before, then exactly one `Final` line.

All text is LF-only Unicode. Offsets count Unicode code points in the text they are offsets of.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import socket
import stat
import struct
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec
import platformdirs

#: Raised whenever a request or an answer changes its meaning. A newer client replaces an older engine.
PROTOCOL = 2

#: The longest path a Unix socket may have on the strictest system we run on (macOS: 104 bytes with the NUL).
MAX_SOCKET_PATH = 103


class ProtocolError(ValueError):
    """A message that does not fit the protocol; its text says which field and why."""


#: Snippets of a request, and characters of each, at most.
MAX_SNIPPETS, MAX_SNIPPET = 8, 8192


def content_id(content: str | bytes) -> str:
    """A short name of a piece of context, by its content alone: 12 hexadecimal digits."""
    data = content if isinstance(content, bytes) else content.encode(errors="replace")
    return hashlib.blake2b(data, digest_size=6).hexdigest()


class Snippet(msgspec.Struct, frozen=True):
    """A piece of another file that may help to fill a gap."""

    text: str
    #: Where it is from, for people.
    path: str = ""

    @property
    def id(self) -> str:
        """Its `content_id`: wherever the same text comes from, it is the same piece of context."""
        return content_id(self.text)


#: From the most urgent to the least; within one the earliest deadline goes first.
Priority = Literal["typed", "explicit", "speculation"]


class InfillRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One gap to fill, as text cut around the cursor.

    `prefix + head` is everything the model sees before the gap, `tail + suffix` everything after it:
    `prefix` holds whole lines, each ended by a newline; `head` is the cursor line before the gap; `tail` what stands on
    the gap's last line after it; `suffix` begins with a newline or is empty.
    """

    protocol: int = PROTOCOL
    #: One editor process. A newer request of the same (client, document) supersedes an older one.
    client: str
    #: Opaque name of the document, stable while it is open.
    document: str
    version: int = 0
    language: str = ""
    prefix: str = ""
    head: str = ""
    tail: str = ""
    suffix: str = ""
    #: The workspace that the document belongs to, and its path there: what is remembered of the workspace's other
    #: documents counts. "": of none.
    workspace: str = ""
    path: str = ""
    #: Pieces of other files, the most helpful first. As many are used as the engine is set to, and of these only those
    #: that are encoded, or would be in no time: the others are encoded after the answer, for the next request.
    snippets: tuple[Snippet, ...] = ()
    #: Lines the gap may have at most: 1 means that it ends at the first newline.
    max_lines: int = 1
    #: A gap of one line goes on if that line opens what it does not close, up to where that is closed again, with so
    #: many lines at most: one statement, or one entry of a list. 0: it never does.
    open_lines: int = 0
    max_tokens: int = 128
    #: The text breaks off behind the first token with which the product of its tokens' probabilities is less than this:
    #: for who shows no part of a text that is less sure. 0: it does not.
    min_prob: float = 0.0
    #: A later line indented by less than this many columns (tab = 8) does not belong to the gap; None: no such rule.
    min_indent: int | None = None
    #: Texts that are known for this gap: the answer shall begin otherwise than each of them, whitespace aside. With ""
    #: among them it shall not be empty.
    avoid: tuple[str, ...] = ()
    #: What goes first: what somebody waits for while typing, what they asked for by hand, what they may want next.
    priority: Priority = "typed"
    #: Milliseconds from receipt after which the best text so far is returned.
    deadline_ms: int = 400
    #: Stream a `Frame` after each denoise step.
    frames: bool = False


class End(msgspec.Struct, frozen=True):
    """A place where the gap may end."""

    #: Offset in the candidate's text: the gap is `text[:offset]`.
    offset: int
    #: Mean log-probability (nats a token) of the suffix's first tokens, put there; None without a suffix.
    suffix_logprob: float | None
    #: The model's own probability of END there.
    end_prob: float
    #: Whether the text up to there has opened what it does not close, or breaks off in the middle of an expression.
    open: bool = False


#: What makes an end's score: the log-odds of END, the suffix's mean log-probability there, by how much it is more than
#: at the best end before, and what an open end loses. Fitted by `bench.ends`.
END_WEIGHT, SUFFIX_WEIGHT, GAIN_WEIGHT, OPEN_WEIGHT = 0.52, 1.83, 0.93, 1.34


def end_scores(ends: Sequence[End]) -> list[float]:
    """How probable it is at each end that the gap is over there: a softmax over the ends of one gap makes these
    probabilities.

    The suffix is likely or not by its own words; what its likelihood gains at a line end says more of the end. On 267
    held-out gaps of one to twelve lines, of all line ends up to three lines beyond, the best by this score is the true
    one in 68%; by the suffix's likelihood alone in 65%, by END alone in 40%, by chance in 20%.
    """
    scores: list[float] = []
    best: float | None = None
    for end in ends:
        prob = min(max(end.end_prob, 1e-6), 1 - 1e-6)
        score = END_WEIGHT * math.log(prob / (1 - prob)) - OPEN_WEIGHT * end.open
        if (suffix := end.suffix_logprob) is not None:
            score += SUFFIX_WEIGHT * suffix + (GAIN_WEIGHT * (suffix - best) if best is not None else 0.0)
            best = suffix if best is None else max(best, suffix)
        scores.append(score)
    return scores


def best_end(ends: Sequence[End]) -> End | None:
    """Where the gap ends: the end with the best score, the first of equals; the last one where no suffix tells them
    apart, and None where there are none."""
    if all(end.suffix_logprob is None for end in ends):
        return ends[-1] if ends else None
    scores = end_scores(ends)
    return ends[scores.index(max(scores))]


def is_open(text: str) -> bool:
    """Whether a gap that ends with `text` would leave something open: more brackets than it closes, those in strings of
    one line left out, a string of several lines, or an opener or operator at its end."""
    if any(text.count(quotes) % 2 for quotes in ('"""', "'''")):
        return True
    code = _STRING.sub('""', text).rstrip()
    unclosed = sum(map(code.count, "([{")) > sum(map(code.count, ")]}"))
    return unclosed or code.endswith(_UNFINISHED)


_STRING = re.compile(r""" "(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])*' """, re.VERBOSE)
_UNFINISHED = ("(", "[", "{", ":", "=", "+", "|", "&", "\\", "->", "=>")


class Candidate(msgspec.Struct, frozen=True, tag="candidate"):
    """The best text of the gap so far. It never contains `head`, `tail` or a special token."""

    text: str
    #: Probability of each committed token, left to right, and the offset in `text` at which that token ends.
    probs: tuple[float, ...] = ()
    offsets: tuple[int, ...] = ()
    ends: tuple[End, ...] = ()


class Slot(msgspec.Struct, frozen=True):
    """One slot of a recorded canvas: what stands in it (or is predicted there), how sure, and in which state."""

    text: str
    prob: float
    state: Literal["head", "committed", "proposed", "mask"]


class Frame(msgspec.Struct, frozen=True, tag="frame"):
    """The canvas after a denoise step, as the engine had it; nothing here is invented for display."""

    step: int
    #: Milliseconds since the engine received the request.
    ms: float
    slots: tuple[Slot, ...]


#: How a request ends that was answered: with whatever was worth showing in the candidates before.
Answered = Literal["end", "limit", "unsure", "deadline"]
ANSWERED: tuple[Answered, ...] = ("end", "limit", "unsure", "deadline")
#: Why a request ended.
Reason = Literal[Answered, "cancelled", "superseded", "starting", "busy", "error"]


class Proposals(msgspec.Struct, frozen=True):
    """Tokens by who proposed them: the model's own masks, what followed the same tokens nearby, what was written at
    this place before."""

    mask: int = 0
    lookup: int = 0
    last: int = 0


class Timing(msgspec.Struct, frozen=True):
    """Where the time of a request went. A pass that several requests shared counts whole for each."""

    queue_ms: float = 0.0
    encode_ms: float = 0.0
    denoise_ms: float = 0.0
    steps: int = 0
    #: Tokens committed, context tokens encoded for this request, context tokens found in the cache.
    committed: int = 0
    encoded: int = 0
    reused: int = 0
    #: Snippets that the canvas saw, and how many more it had room for that were sent but not encoded yet.
    snippets: int = 0
    late_snippets: int = 0
    #: Tokens fed as proposals, and of those the ones that proved right.
    proposed: Proposals = Proposals()
    accepted: Proposals = Proposals()


class Final(msgspec.Struct, frozen=True, tag="final"):
    """The last line of every answer."""

    reason: Reason
    #: For "starting", "busy" and "error": one line that says what is going on or what to do.
    message: str = ""
    timing: Timing = Timing()


Event = Candidate | Frame | Final


class Piece(msgspec.Struct, frozen=True):
    """A piece of context of a request."""

    kind: Literal["prefix", "suffix", "snippet"]
    #: Its `content_id`: of the text as it is encoded, of a snippet's as it was sent. The engine's log has the same.
    id: str
    tokens: int
    #: How many of its tokens are encoded already.
    encoded: int
    #: Whether the canvas sees it.
    used: bool
    path: str = ""


class Recalled(msgspec.Struct, frozen=True):
    """What the memory knows of the place."""

    source: Literal["file", "workspace"]
    #: The text before the gap that also stands elsewhere, in tokens, and how often it does.
    tokens: int
    times: int
    text: str
    #: What most often follows it there, with its share.
    followers: tuple[tuple[str, float], ...]


class Explanation(msgspec.Struct, frozen=True):
    """What a request is answered from."""

    #: The document as the engine's log names it.
    document: str

    pieces: tuple[Piece, ...]
    memory: tuple[Recalled, ...] = ()


class Document(msgspec.Struct, frozen=True):
    """A document of a workspace, to be remembered."""

    #: Names it within its workspace.
    path: str
    #: Of its text; any text that tells contents apart.
    hash: str
    text: str


class Manifest(msgspec.Struct, frozen=True, tag="manifest"):
    """All documents that a workspace has now: path -> hash."""

    documents: dict[str, str]


class Documents(msgspec.Struct, frozen=True, tag="documents"):
    """Some of a workspace's documents, with their text."""

    documents: tuple[Document, ...]


class Paths(msgspec.Struct, frozen=True):
    """Some documents of a workspace: those whose text is wanted, those that were not taken in, or those to forget."""

    paths: tuple[str, ...]


class Remembered(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine remembers of workspaces."""

    tokens: int = 0
    files: int = 0
    disk_bytes: int = 0
    #: Documents that wait to be taken in.
    waiting: int = 0


class Choice(msgspec.Struct, frozen=True):
    """The model that is to answer from now on."""

    model: str


State = Literal["starting", "fetching", "ready", "error"]


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """What `GET /v1/status` answers."""

    protocol: int = PROTOCOL
    version: str
    pid: int
    state: State
    #: 0..1 while a model is fetched, None where unknown.
    progress: float | None = None
    #: One line for people; with state "error" it says what to do.
    message: str = ""
    #: The model that answers, or will once it is loaded.
    model: str
    #: The one that is being loaded to take its place, of which `message` and `progress` tell then; "": none.
    next: str = ""
    device: str = ""
    dtype: str = ""
    #: Which kernels run on the device; "" where it is not known.
    kernels: str = ""
    uptime_s: float = 0.0
    requests: int = 0
    #: Requests being answered, and documents whose context is being encoded ahead of need.
    live: int = 0
    background: int = 0
    #: Memory of encoded contexts, and of the whole process.
    cache_bytes: int = 0
    rss_bytes: int = 0
    memory: Remembered = Remembered()


_encoder = msgspec.json.Encoder()
_request_decoder = msgspec.json.Decoder(InfillRequest)
_event_decoder = msgspec.json.Decoder(Event)
_status_decoder = msgspec.json.Decoder(Status)
_explanation_decoder = msgspec.json.Decoder(Explanation)
_documents_decoder = msgspec.json.Decoder(Manifest | Documents)
_paths_decoder = msgspec.json.Decoder(Paths)
_choice_decoder = msgspec.json.Decoder(Choice)
#: What decoding raises on bytes that are no such message; `RecursionError` on absurdly nested ones.
_MALFORMED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def encode(message: msgspec.Struct) -> bytes:
    """One JSON document without a newline."""
    return _encoder.encode(message)


def decode_request(data: bytes) -> InfillRequest:
    """Raises `ProtocolError` for anything that is not a request this engine can serve."""
    try:
        request = _request_decoder.decode(data)
    except _MALFORMED as error:
        raise ProtocolError(f"not an infill request: {error}") from None
    if request.protocol > PROTOCOL:
        raise ProtocolError(
            f"the client speaks protocol {request.protocol}, this engine {PROTOCOL}: "
            "restart it with `infill-engine stop`"
        )
    if request.max_lines < 1 or request.max_tokens < 1 or request.deadline_ms < 1:
        raise ProtocolError("max_lines, max_tokens and deadline_ms must be at least 1")
    if not 0 <= request.min_prob <= 1:
        raise ProtocolError("min_prob is a probability: 0 to 1")
    if "\n" in request.head or "\n" in request.tail:
        raise ProtocolError("head and tail are parts of one line and hold no newline")
    if request.prefix and not request.prefix.endswith("\n"):
        raise ProtocolError("prefix holds whole lines and ends with a newline")
    if request.suffix and not request.suffix.startswith("\n"):
        raise ProtocolError("suffix begins with the newline that ends the gap's last line")
    if len(request.snippets) > MAX_SNIPPETS or any(len(one.text) > MAX_SNIPPET for one in request.snippets):
        raise ProtocolError(f"a request has at most {MAX_SNIPPETS} snippets of {MAX_SNIPPET} characters each")
    return request


def decode_event(line: bytes) -> Event:
    """One line of an answer; raises `ProtocolError`."""
    try:
        return _event_decoder.decode(line)
    except _MALFORMED as error:
        raise ProtocolError(f"not an event: {error}") from None


def decode_status(data: bytes) -> Status:
    """Raises `ProtocolError`."""
    try:
        return _status_decoder.decode(data)
    except _MALFORMED as error:
        raise ProtocolError(f"not a status: {error}") from None


def decode_explanation(data: bytes) -> Explanation:
    """Raises `ProtocolError`."""
    try:
        return _explanation_decoder.decode(data)
    except _MALFORMED as error:
        raise ProtocolError(f"not an explanation: {error}") from None


def decode_documents(data: bytes) -> Manifest | Documents:
    """Raises `ProtocolError`."""
    try:
        return _documents_decoder.decode(data)
    except _MALFORMED as error:
        raise ProtocolError(f"neither a manifest nor documents: {error}") from None


def decode_paths(data: bytes) -> Paths:
    """Raises `ProtocolError`."""
    try:
        return _paths_decoder.decode(data)
    except _MALFORMED as error:
        raise ProtocolError(f"no list of paths: {error}") from None


def decode_choice(data: bytes) -> Choice:
    """Raises `ProtocolError`."""
    try:
        return _choice_decoder.decode(data)
    except _MALFORMED as error:
        raise ProtocolError(f"no choice of a model: {error}") from None


def cache_dir() -> Path:
    """Where weights, prepared files and logs lie; not created here. `INFILL_CACHE_DIR` overrides it."""
    override = os.environ.get("INFILL_CACHE_DIR")
    return Path(override) if override else Path(platformdirs.user_cache_dir("infill-lsp"))


def runtime_dir() -> Path:
    """The 0700 folder, owned by this user, that holds sockets and locks; created on demand.

    `INFILL_RUNTIME_DIR` overrides it. Raises `PermissionError` if the folder exists and is not ours alone: a folder
    that somebody else can write to could hold somebody else's socket.
    """
    override = os.environ.get("INFILL_RUNTIME_DIR")
    if override:
        folder = Path(override)
    elif os.environ.get("XDG_RUNTIME_DIR"):
        folder = Path(os.environ["XDG_RUNTIME_DIR"]) / "infill-lsp"
    else:
        folder = Path(tempfile.gettempdir()) / f"infill-lsp-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise PermissionError(
            f"cannot create {folder} ({error.strerror}): set INFILL_RUNTIME_DIR to a folder of your own"
        ) from None
    info = folder.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o077:
        raise PermissionError(
            f"{folder} must be a folder of your own with mode 0700: remove it, or set INFILL_RUNTIME_DIR"
        )
    return folder


def socket_path(model: str) -> Path:
    """The engine's socket: one per user and model. Raises `OSError` if the path is too long for a socket."""
    name = hashlib.sha256(model.encode()).hexdigest()[:8]
    path = runtime_dir() / f"{name}.sock"
    if len(os.fsencode(path)) > MAX_SOCKET_PATH:
        raise OSError(f"{path} is too long for a Unix socket: set INFILL_RUNTIME_DIR to a shorter folder")
    return path


def peer_uid(connection: socket.socket) -> int:
    """The uid of the process at the other end of a Unix socket, as the kernel tells it. Raises `OSError`."""
    if hasattr(socket, "SO_PEERCRED"):
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        return int(struct.unpack("3i", raw)[1])
    if hasattr(connection, "getpeereid"):  # pragma: no cover - BSD and macOS, where Python offers it
        return int(connection.getpeereid()[0])
    # LOCAL_PEERCRED on macOS: struct xucred {u_int version; uid_t uid; ...}.
    raw = connection.getsockopt(0, 0x001, 76)  # pragma: no cover
    return int(struct.unpack_from("2I", raw)[1])  # pragma: no cover
