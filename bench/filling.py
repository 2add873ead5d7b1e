"""Fills the same gaps with several decoders in turn, in this process, and keeps what came of it on disk.

A decoder is a row: a model, how a gap is put to it, and how it decodes. Of a gap every decoder is given what the
product cuts out of the document around the cursor, and nothing of what stood there. A run that was broken off goes on
where it was: each row has a file, named by all that its texts depend on but the code.
"""

from __future__ import annotations

import dataclasses
import random
import tempfile
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Generic, Protocol, TypeVar, cast

import msgspec
import torch
from infill_engine import catalogue, models
from infill_engine.config import EngineConfig
from infill_engine.core import Canvas, CommitPolicy, Contexts, Denoiser, Rows, complete
from infill_engine.engine import Engine
from infill_engine.memory import Memory
from infill_engine.policy import VerifiedPolicy
from infill_engine.protocol import Candidate, Final, InfillRequest
from infill_engine.tokenizer import Codec, Healed, LineTokenizer
from infill_engine.training.corpus import Document, documents
from infill_engine.workspace import Workspace
from infill_engine.workspaces import Workspaces
from infill_kernels import logits
from msgspec.structs import replace

from bench.score import Filled, similarity
from infill_lsp.core import Gap, Silence, Snapshot, Trigger
from infill_lsp.extraction import cut
from infill_lsp.gaps import Authored, Made, author, snapshot
from infill_lsp.postprocess import edit, tidied, to_end
from infill_lsp.settings import Settings

T = TypeVar("T")

#: How many of each kind are in every fifty gaps, and how many in each language, in a random order.
KINDS: dict[Made, int] = {"rest": 14, "line": 8, "above": 5, "inner": 4, "lines": 16, "nothing": 3}
LANGUAGES = {
    "python": 25,
    "typescript": 5,
    "javascript": 4,
    "go": 4,
    "java": 3,
    "rust": 3,
    "c": 2,
    "cpp": 2,
    "shell": 1,
    "markdown": 1,
}
DECK = 50
#: A package weighs as much as one of so many files at most.
MOST_FILES = 50
#: Gaps of one document among which one of the wanted kind is looked for, and how many documents are tried.
AUTHORED, TRIES = 24, 40
#: No decoder is hurried: what it writes does not depend on the machine.
DEADLINE_MS = 600_000
#: Characters of a package that are remembered.
PROJECT = 400_000
#: Tokens of each part of the pass that tells one set of weights from another.
PROBE = 64


@dataclass(frozen=True)
class Case:
    """A gap to fill."""

    index: int
    package: str
    #: Of its document in the package; "" where it is of none.
    path: str
    made: str
    snapshot: Snapshot
    gap: Gap
    truth: str
    #: Whether the filled document is right, where that can be tried.
    passes: Callable[[str], bool] | None = None

    @classmethod
    def of(
        cls,
        index: int,
        document: Document,
        missing: Authored,
        trigger: Trigger = "automatic",
        passes: Callable[[str], bool] | None = None,
    ) -> Case | None:
        """The case of a document without its part that is missing; None where the product asks for nothing."""
        text = document.text
        at = snapshot(text, document.language, missing, "gap")
        gap = cut(at, trigger)
        if isinstance(gap, Silence):
            return None
        truth = text[missing.start : missing.end]
        return cls(index, document.package, document.path, missing.made, at, gap, truth, passes)

    def filled(self, text: str, replaced: int = 0) -> str:
        """The document with `text` in place of the first `replaced` characters after the cursor."""
        lines, row = self.snapshot.lines, self.snapshot.row
        line = self.snapshot.head + text + self.snapshot.tail[replaced:]
        return "\n".join([*lines[:row], line, *lines[row + 1 :]])


def held_out(folder: Path, seed: int) -> Callable[[int], Case]:
    """From a number to a gap of the held-out documents, always the same one. It is drawn by language, package and
    document. Raises `FileNotFoundError` where the corpus has not been built."""
    shelves: dict[str, dict[str, list[Document]]] = {}
    for document in documents(folder, "held"):
        shelves.setdefault(document.language, {}).setdefault(document.package, []).append(document)

    def draw(index: int) -> Case:
        made, language = _dealt(f"{seed} kind", KINDS, index), _dealt(f"{seed} language", LANGUAGES, index)
        choose = random.Random(f"{seed} {index}")
        for _ in range(TRIES):
            shelf = shelves.get(language) or shelves["python"]
            (package,) = choose.choices(list(shelf), [min(len(files), MOST_FILES) for files in shelf.values()])
            document = choose.choice(shelf[package])
            for of in author(document.text, document.language, choose, AUTHORED):
                if of.made == made and (case := Case.of(index, document, of)):
                    return case
        raise ValueError(f"no gap of the kind {made} was found in {language}: choose another --seed")

    return draw


def _dealt(seed: str, deck: Mapping[T, int], index: int) -> T:
    """The card at a place in one shuffled deck after another."""
    cards = [name for name, count in deck.items() for _ in range(count)]
    assert len(cards) == DECK
    random.Random(f"{seed} {index // DECK}").shuffle(cards)
    return cards[index % DECK]


@dataclass(frozen=True)
class Model:
    """Loaded weights, and what tells them from others."""

    engine: Engine
    #: Of torch, which loading the model has chosen for all of the process.
    threads: int = 1

    @classmethod
    def load(cls, config: EngineConfig) -> Model:
        if config.model == catalogue.AUTO:  # whichever a person has chosen is none of ours
            config = dataclasses.replace(config, model=catalogue.EMBEDDED)
        engine = models.load(config, lambda message, progress: None)
        return cls(engine, torch.get_num_threads())

    @property
    def codec(self) -> Codec:
        return self.engine._tokenizer.codec

    @cached_property
    def tokenizer(self) -> LineTokenizer:
        return LineTokenizer(self.codec)

    @property
    def has_masks(self) -> bool:
        return self.engine._denoiser.facts.lookahead > 0

    @cached_property
    def fingerprint(self) -> str:
        """The type and the mean of the log-probabilities that the weights give to tokens without sense, behind a prefix
        and a block; four digits of it, which no two sets of weights share but by accident."""
        denoiser = cast(Denoiser, self.engine._denoiser)
        vocab = len(self.codec.tokens)
        ids = [vocab // 8 + i * 7919 % (vocab // 2) for i in range(3 * PROBE)]
        facts = denoiser.facts
        with torch.inference_mode():
            prefix, block = (
                complete(denoiser.encode([*facts.opening, *ids[i * PROBE : (i + 1) * PROBE]], None)) for i in range(2)
            )
            masks = (facts.lookahead,) if facts.lookahead else ()
            canvas = Canvas(prefix.length, (ids[-1],), 2 * PROBE, proposal=tuple(ids[2 * PROBE :]), masks=masks)
            (hidden,), _ = denoiser.denoise([canvas], [Contexts(prefix, (block,))], [None])
            scores = logits(hidden, denoiser.head).log_softmax(-1)
            nats = -scores[:, ids[0 : len(scores)]].diagonal().mean().item()
        return f"{self.engine.dtype}-{nats:.4f}"

    def decoder(
        self,
        proposals: int,
        masks: bool,
        policy: CommitPolicy | None,
        healing: bool = True,
        workspaces: Workspaces | None = None,
    ) -> Engine:
        """An engine of the same weights that decodes in another way. What it encoded it shares with the others.
        workspaces: of what is remembered; None: nothing is, of the open file neither."""
        engine = self.engine
        config = EngineConfig(
            model=engine.name,
            prefix_tokens=engine._config.prefix_tokens,
            suffix_tokens=engine._config.suffix_tokens,
            proposal_tokens=proposals,
            masks=None if masks else 0,
        )
        memory = Memory(len(self.codec.tokens)) if workspaces is not None else None
        rest = policy, engine.device, engine.dtype, memory, workspaces
        other = Engine(engine.name, engine._denoiser, self.codec, config, *rest)
        other._cache = engine._cache
        if not healing:
            other._tokenizer = _Unhealed(self.codec)
        return other


class _Unhealed(LineTokenizer):
    """Tokenises the text before the gap as it stands."""

    def heal(self, segment: str) -> Healed:
        return Healed(list(self.encode_segment(segment)), b"")


class Forced:
    """A `CommitPolicy` that writes the truth, as long as the model would not end there, and then what the model
    says. A gap of one line ends with END and with a line break."""

    def __init__(self, codec: Codec, end_id: int) -> None:
        self._end_id = end_id
        self._breaks = {i for i, piece in enumerate(codec.tokens) if piece.startswith(b"\n")}
        self._ends: Container[int] = ()
        self.truth: Sequence[int] = ()
        #: Tokens of the truth that were written, and those of them that the model would have written.
        self.forced = self.agreed = 0

    def begin(self, truth: Sequence[int], one_line: bool) -> None:
        self.truth, self.forced, self.agreed = truth, 0, 0
        self._ends = {self._end_id} | (self._breaks if one_line else set())

    def step(self, canvas: Canvas, rows: Rows) -> Canvas:
        said = rows.token[0]
        if canvas.frontier >= len(self.truth):
            return canvas.commit([said])
        self.forced += 1
        wanted = self.truth[canvas.frontier]
        self.agreed += said == wanted
        return canvas.commit([said if said in self._ends and wanted not in self._ends else wanted])


#: How a gap is put to a model.
Ask = Callable[[Case, Model], InfillRequest]


def with_suffix(case: Case, model: Model) -> InfillRequest:
    """As the product asks."""
    gap = case.gap
    return InfillRequest(
        client="bench",
        document=f"{case.package} {case.index}",
        language=case.snapshot.language,
        prefix=gap.prefix,
        head=gap.head,
        tail=gap.tail,
        suffix=gap.suffix,
        max_lines=min(gap.max_lines, Settings().max_lines),
        open_lines=gap.open_lines,
        min_indent=gap.min_indent,
        deadline_ms=DEADLINE_MS,
    )


def without_suffix(case: Case, model: Model) -> InfillRequest:
    """The text before the gap alone, as a model is asked to go on with."""
    return replace(with_suffix(case, model), tail="", suffix="")


def suffix_as_text(case: Case, model: Model) -> InfillRequest:
    """The text after the gap as plain text above the text before it, one causal stream: the tail and suffix, a blank
    line, the prefix and head. The model has no tokens that say what it is.

    Of the suffix it gets the lines that fit into the product's block; of the prefix those that fit beside them into the
    product's prefix.
    """
    request, config, size = with_suffix(case, model), model.engine._config, model.tokenizer.encode_segment
    after, room = "", config.suffix_tokens
    for segment in model.tokenizer.segments(request.tail + request.suffix):
        room -= len(size(segment))
        if room < 0 and after:
            break
        after += segment
    if not after.strip():
        return without_suffix(case, model)
    after = after.strip("\n") + "\n\n"
    room = config.prefix_tokens - sum(len(size(segment)) for segment in model.tokenizer.segments(after))
    lines = request.prefix.splitlines(keepends=True)
    first = len(lines)
    while first and room >= len(size(lines[first - 1])):
        first -= 1
        room -= len(size(lines[first]))
    document = f"{request.document} with its suffix"
    return replace(request, document=document, prefix=after + "".join(lines[first:]), tail="", suffix="")


@dataclass(frozen=True)
class Row:
    """One decoder of a table."""

    name: str
    #: Which of the models.
    model: str
    ask: Ask
    #: Tokens that look-up proposes at most, and whether masks propose, too.
    proposals: int = 0
    masks: bool = False
    #: Whether the truth is written for the model, so that only where it ends is its own.
    forced: bool = False
    healing: bool = True
    #: Whether the open file and the other files of its package are remembered.
    memory: bool = False
    #: How probable a text has to be to be written on.
    min_prob: float = 0.0


class Indexed(Protocol):
    """What was made of a gap."""

    @property
    def index(self) -> int: ...


R = TypeVar("R", bound=Indexed)


class Store(Generic[R]):
    """The file of one row. Others may add to it at the same time."""

    def __init__(self, path: Path, kind: type[R]) -> None:
        self.path = path
        self.filled: dict[int, R] = {}
        decode = msgspec.json.Decoder(kind).decode
        data = path.read_bytes() if path.exists() else b""
        for line in data.splitlines():
            try:
                filled = decode(line)
            except msgspec.MsgspecError:  # cut short when a run was broken off
                continue
            self.filled[filled.index] = filled
        self._broken = bool(data) and not data.endswith(b"\n")

    def add(self, filled: R) -> None:
        self.filled[filled.index] = filled
        line = msgspec.json.encode(filled) + b"\n"
        with open(self.path, "ab", buffering=0) as file:
            file.write(b"\n" + line if self._broken else line)
        self._broken = False


def remembered(corpus: Path, package: str) -> Iterator[Document]:
    """Files of a held-out package, up to so many characters, in an order that does not depend on them."""
    files, room = [document for document in documents(corpus, "held") if document.package == package], PROJECT
    random.Random(package).shuffle(files)
    for document in files:
        if len(document.text) <= room:
            room -= len(document.text)
            yield document


class Projects(Workspaces):
    """The packages of held-out documents as workspaces, each remembered when a gap of it first comes up."""

    def __init__(self, corpus: Path, codec: Codec) -> None:
        self._home = tempfile.TemporaryDirectory(prefix="infill-")
        super().__init__(Path(self._home.name), codec)
        self._corpus, self._filled = corpus, set[str]()

    def of(self, name: str) -> Workspace:
        """The workspace of a package, with what is remembered of it."""
        workspace = super().of(name)
        if name not in self._filled:
            self._filled.add(name)
            tokenizer = LineTokenizer(self._codec)
            for document in remembered(self._corpus, name):
                workspace.put(document.path, "", tokenizer.encode(document.text))
            workspace.merge()
        return workspace


class Runner:
    """Loads models when they are needed, and fills gaps with rows of them."""

    def __init__(self, configs: dict[str, EngineConfig], folder: Path, corpus: Path) -> None:
        """folder: of the files; corpus: where gaps come from, for what is remembered of their packages."""
        self._configs = configs
        self._folder = folder
        self._corpus = corpus
        self._projects: dict[str, Projects] = {}
        self._models: dict[EngineConfig, Model] = {}
        self._decoders: dict[Row, tuple[Engine, Forced | None]] = {}
        self._stores: dict[Path, Store[Filled]] = {}

    def model(self, name: str) -> Model:
        config = self._configs[name]
        if config not in self._models:
            self._models[config] = Model.load(config)
        return self._models[config]

    def serves(self, row: Row) -> bool:
        """Whether the row's model can do what the row wants."""
        return row.model in self._configs and (not row.masks or self.model(row.model).has_masks)

    def store(self, row: Row, suite: str) -> Store[Filled]:
        """What is there of a row over a suite of gaps. Rows that differ in name only share it."""
        parts = [suite, self.model(row.model).fingerprint, row.ask.__name__, f"proposals-{row.proposals}"]
        marks = (
            ("masks", row.masks),
            ("forced", row.forced),
            ("unhealed", not row.healing),
            ("memory", row.memory),
            (f"from-{row.min_prob}", row.min_prob > 0),
        )
        path = self._folder / ("_".join([*parts, *(mark for mark, on in marks if on)]) + ".jsonl")
        if path not in self._stores:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._stores[path] = Store(path, Filled)
        return self._stores[path]

    def run(
        self, rows: Sequence[Row], suite: str, indices: Sequence[int], case_of: Callable[[int], Case]
    ) -> Iterator[int]:
        """Fills gaps with all rows, each gap with one row after the other; yields how many are done. A gap that all
        rows have filled before is not even drawn. Others may fill further gaps of the suite at the same time."""
        for done, index in enumerate(indices, 1):
            case: Case | None = None
            for row in rows:
                store = self.store(row, suite)
                if index not in store.filled:
                    case = case or case_of(index)
                    store.add(self.fill(row, case))
            yield done

    def fill(self, row: Row, case: Case) -> Filled:
        """One gap, its context encoded before the clock runs."""
        model = self.model(row.model)
        engine, forced = self._decoder(row)
        request = replace(row.ask(case, model), min_prob=row.min_prob)
        if row.memory:
            request = replace(request, workspace=case.package, path=case.path)
        torch.set_num_threads(model.threads)
        if forced:
            forced.begin(tokens_of(case.truth, request, engine._tokenizer), request.max_lines == 1)
        complete(engine.prime(request))
        began = time.perf_counter()
        written, final = answer(engine, request)
        ms = (time.perf_counter() - began) * 1000
        candidate = tidied(case.snapshot, case.gap, written)
        shown, rest, replaced = edited(case, candidate)
        tail = case.gap.tail
        return Filled(
            index=case.index,
            package=case.package,
            language=case.snapshot.language,
            made=case.made,
            kind=case.gap.kind,
            truth=case.truth,
            tail=tail,
            candidate=candidate,
            chosen=to_end(case.snapshot, case.gap, candidate),
            shown=shown,
            rest=rest,
            similarity=similarity(shown, case.truth + tail[: len(tail) - len(rest)]),
            ms=ms,
            steps=final.timing.steps,
            tokens=final.timing.committed,
            reason=final.reason,
            agreed=forced.agreed if forced else None,
            forced=forced.forced if forced else None,
            passed=case.passes(case.filled(shown, replaced)) if case.passes and not forced else None,
        )

    def _decoder(self, row: Row) -> tuple[Engine, Forced | None]:
        # An engine of its own, which remembers no other decoder's text.
        if row not in self._decoders:
            model = self.model(row.model)
            forced = Forced(model.codec, model.engine._denoiser.facts.end_id) if row.forced else None
            policy = forced or VerifiedPolicy(model.engine._config.mask_prob)
            if row.memory and row.model not in self._projects:
                self._projects[row.model] = Projects(self._corpus, model.codec)
            projects = self._projects[row.model] if row.memory else None
            self._decoders[row] = model.decoder(row.proposals, row.masks, policy, row.healing, projects), forced
        return self._decoders[row]


def edited(case: Case, candidate: Candidate) -> tuple[str, str, int]:
    """What the product's edit inserts, what stays of the tail behind it, and how much of the tail it replaces. Where
    the text ends with what it replaces, as in `a)` for `)`, that counts as what stays."""
    of = edit(case.snapshot, case.gap, candidate)
    if isinstance(of, Silence):
        return "", case.gap.tail, 0
    tail, replaced = case.snapshot.tail, of.end - of.start
    if replaced and of.text.endswith(tail[:replaced]):
        return of.text[: len(of.text) - replaced], tail, 0
    return of.text, tail[replaced:], replaced


def answer(engine: Engine, request: InfillRequest) -> tuple[Candidate, Final]:
    """The last text of a request and how it ended."""
    *events, final = engine.events(request, time.monotonic())
    assert isinstance(final, Final)
    return next((event for event in reversed(events) if isinstance(event, Candidate)), Candidate("")), final


def tokens_of(truth: str, request: InfillRequest, tokenizer: LineTokenizer) -> list[int]:
    """The tokens that write the truth into the gap of a request, what healing took back before it."""
    segment = (tokenizer.segments(request.prefix + request.head) or [""])[-1]
    head = tokenizer.heal(segment)
    tokens = tokenizer.continuation(segment, head, truth)
    return tokenizer.encode(head.rest.decode() + truth) if tokens is None else tokens
