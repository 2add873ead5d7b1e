"""The nouns of the engine: canvas, contexts, and what every model family implements.

There are two kinds of canvas, by how a family sees text. A `Canvas` grows from the left and is verified: what a family
sees of the suffix stands in its contexts. An `OpenCanvas` is one sequence with pinned text on both sides, of which any
slot may be filled at any time. All that lies between a request and a forward pass (`Pass`, `Outcome`) is the same.

Knows no model by name, no editor and no wire format. Positions and lengths count tokens.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeVar, cast

import torch
from infill_kernels import BRANCH, LEFT, OPEN, Head
from torch import Tensor

if TYPE_CHECKING:
    from infill_engine.memory import Candidates

T = TypeVar("T")


@contextlib.contextmanager
def device_memory() -> Iterator[None]:
    """What a device says where its memory is full becomes a `MemoryError`, as whoever makes room expects it."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise MemoryError("the device has no room for so many tokens at once") from None


class ModelError(RuntimeError):
    """A model that cannot be loaded or run; its text is one line that says what to do."""


class Tree(NamedTuple):
    """A canvas as integers, parents before children: what a forward pass needs of it."""

    tokens: list[int]
    #: Absolute positions; the prefix stream's first token stands at 0.
    positions: list[int]
    #: Index of the token each one continues, -1 for the root.
    parents: list[int]
    #: LEFT, OPEN or BRANCH of `infill_kernels`.
    classes: list[int]
    #: Index of the token whose forward row predicts slot `frontier`.
    frontier: int


@dataclass(frozen=True, slots=True)
class Canvas:
    """The gap while it is filled: `left | committed | proposal`, with groups of masks and branches hung onto it.

    `left` is pinned. `committed` slots are final, contiguous from the left. `proposal` stands in the slots after them
    and is checked by the next pass. The other slots, up to `size`, are open. A group of masks continues the text that
    would be there if so many of the proposed tokens proved right: whatever the pass confirms, something is predicted
    behind it. A branch `(slot, tokens)` continues the text before `slot` with other tokens, to score them. Neither
    enters the text. Slots count from the gap's start, so a branch may also begin within `left`, at a negative slot.
    """

    #: Absolute position of left[0]: how many tokens of the prefix stream stand before the canvas.
    origin: int
    left: tuple[int, ...]
    size: int
    committed: tuple[int, ...] = ()
    proposal: tuple[int, ...] = ()
    #: How many masks are in the group behind the committed text and the first j proposed tokens, for j = 0, 1, ...
    masks: tuple[int, ...] = ()
    branches: tuple[tuple[int, tuple[int, ...]], ...] = ()

    def __post_init__(self) -> None:
        assert self.left, "slot 0 is predicted from the token to its left"
        assert len(self.committed) + len(self.proposal) <= self.size
        assert len(self.masks) <= 1 + len(self.proposal)
        assert all(-len(self.left) < slot <= len(self.committed) for slot, _ in self.branches)

    @property
    def rows(self) -> int:
        """How many rows of a pass predict slots: the frontier, those behind proposed tokens, the masks'."""
        return 1 + len(self.proposal) + sum(self.masks)

    @property
    def frontier(self) -> int:
        """The leftmost slot that is not committed."""
        return len(self.committed)

    @property
    def full(self) -> bool:
        """Whether every slot is committed."""
        return self.frontier == self.size

    def commit(self, tokens: Sequence[int]) -> Canvas:
        """Commits the next slots. Proposals, masks and branches are of one pass and are dropped."""
        return replace(self, committed=(*self.committed, *tokens), proposal=(), masks=(), branches=())

    def grow(self, size: int) -> Canvas:
        """The same canvas with more slots."""
        assert size >= self.size
        return replace(self, size=size)

    def group(self, proposed: int) -> slice:
        """Which rows of a pass are those of the masks behind the committed text and the first `proposed` tokens of the
        proposal: the i-th of them predicts slot frontier + proposed + 1 + i."""
        first = 1 + len(self.proposal) + sum(self.masks[:proposed])
        return slice(first, first + sum(self.masks[proposed : proposed + 1]))

    def tree(self, mask_id: int) -> Tree:
        """The tokens of the next pass. A mask's parent is the token that its group stands behind."""
        chain = [*self.left, *self.committed, *self.proposal]
        tokens, parents = list(chain), list(range(-1, len(chain) - 1))
        positions = list(range(self.origin, self.origin + len(chain)))
        classes = [LEFT] * len(chain)
        frontier = len(self.left) + self.frontier - 1
        for parent, masks in enumerate(self.masks, frontier):
            tokens += [mask_id] * masks
            parents += [parent] * masks
            positions += range(self.origin + parent + 1, self.origin + parent + 1 + masks)
            classes += [OPEN] * masks
        for slot, branch in self.branches:
            parent = len(self.left) + slot - 1
            for i, token in enumerate(branch):
                tokens.append(token)
                parents.append(parent if i == 0 else len(tokens) - 2)
                positions.append(self.origin + len(self.left) + slot + i)
                classes.append(BRANCH)
        return Tree(tokens, positions, parents, classes, frontier)


@dataclass(frozen=True, slots=True)
class OpenCanvas:
    """The gap while it is filled by a family that sees both sides: `left | slots | right` is one sequence behind the
    prefix stream. `left` and `right` are pinned, and so are slots whose token is final; the others are open and hold
    what the family reads there: its MASK, or noise. The canvas may also grow and shrink within.
    """

    #: Absolute position of left[0], or of slot 0 without one: the tokens of the prefix stream before the canvas.
    origin: int
    left: tuple[int, ...]
    #: What stands in each slot.
    slots: tuple[int, ...]
    #: The first tokens of the suffix.
    right: tuple[int, ...]
    #: A slot: whether its token is final. A pinned slot is never rewritten.
    pinned: tuple[bool, ...]
    #: A slot: the token that it has or that the last pass predicted (-1 before the first), and its probability then.
    predicted: tuple[int, ...]
    prob: tuple[float, ...]
    #: Passes that led here, and slots that were added on the way.
    step: int = 0
    grown: int = 0

    def __post_init__(self) -> None:
        assert len(self.slots) == len(self.pinned) == len(self.predicted) == len(self.prob)

    @classmethod
    def of(cls, origin: int, left: Sequence[int], slots: Sequence[int], right: Sequence[int]) -> OpenCanvas:
        """A canvas whose slots are all open; slots: masks, or noise."""
        count = len(slots)
        return cls(origin, (*left,), (*slots,), (*right,), (False,) * count, (-1,) * count, (0.0,) * count)

    @property
    def size(self) -> int:
        """How many slots there are."""
        return len(self.slots)

    @property
    def open(self) -> list[int]:
        """The slots that are not pinned, from the left: those that a pass predicts, a row each."""
        return [i for i, pinned in enumerate(self.pinned) if not pinned]

    @property
    def rows(self) -> int:
        """How many rows of a pass predict slots."""
        return self.pinned.count(False)

    @property
    def frontier(self) -> int:
        """The leftmost open slot: all before it are final."""
        return next((i for i, pinned in enumerate(self.pinned) if not pinned), self.size)

    @property
    def full(self) -> bool:
        """Whether every slot is final."""
        return all(self.pinned)

    @property
    def tokens(self) -> tuple[int, ...]:
        """The whole sequence of the canvas: left, slots, right."""
        return (*self.left, *self.slots, *self.right)

    def seen(self, rows: Rows) -> OpenCanvas:
        """One step further, with what the rows of its open slots predict noted; nothing is pinned."""
        predicted, prob = list(self.predicted), list(self.prob)
        for slot, token, sure in zip(self.open, rows.token, rows.prob, strict=True):
            predicted[slot], prob[slot] = token, sure
        return replace(self, predicted=tuple(predicted), prob=tuple(prob), step=self.step + 1)

    def pin(self, tokens: Mapping[int, tuple[int, float]]) -> OpenCanvas:
        """Makes slots final: slot -> its token and the probability of that."""
        slots, pinned = list(self.slots), list(self.pinned)
        predicted, prob = list(self.predicted), list(self.prob)
        for slot, (token, sure) in tokens.items():
            assert not pinned[slot], "a pinned slot is never rewritten"
            slots[slot] = predicted[slot] = token
            prob[slot], pinned[slot] = sure, True
        return replace(self, slots=tuple(slots), pinned=tuple(pinned), predicted=tuple(predicted), prob=tuple(prob))

    def refill(self, tokens: Mapping[int, int]) -> OpenCanvas:
        """Puts other tokens into open slots, for the next pass to read."""
        slots = list(self.slots)
        for slot, token in tokens.items():
            assert not self.pinned[slot], "a pinned slot is never rewritten"
            slots[slot] = token
        return replace(self, slots=tuple(slots))

    def splice(self, slot: int, fresh: Sequence[int]) -> OpenCanvas:
        """With open slots that hold `fresh` in place of one slot: none removes it, two grow the canvas by one."""
        count = len(fresh)

        def put(values: tuple[T, ...], instead: Sequence[T]) -> tuple[T, ...]:
            return (*values[:slot], *instead, *values[slot + 1 :])

        return replace(
            self,
            slots=put(self.slots, fresh),
            pinned=put(self.pinned, (False,) * count),
            predicted=put(self.predicted, (-1,) * count),
            prob=put(self.prob, (0.0,) * count),
            grown=self.grown + max(0, count - 1),
        )


class ContextKV(Protocol):
    """An encoded run of tokens; what is in it only its family knows. Families whose contexts depend on the canvas keep
    the tokens here, and the keys and values that they last had."""

    @property
    def length(self) -> int:
        """Tokens encoded."""

    @property
    def nbytes(self) -> int:
        """Memory held."""

    def truncate(self, length: int) -> None:
        """Forgets the tokens from `length` on."""


class Contexts(NamedTuple):
    """What a canvas is conditioned on beside itself."""

    #: The tokens before the canvas.
    prefix: ContextKV
    #: Pieces encoded alone, the suffix among them unless it is on the canvas; each begins with the family's opening.
    blocks: tuple[ContextKV, ...] = ()


@dataclass(frozen=True, slots=True)
class OpenFacts:
    """What the engine must know of a family that fills an `OpenCanvas`."""

    #: Decides what a pass makes final: the family's published default, but that it takes the most probable tokens.
    policy: OpenPolicy
    #: Slots that a canvas may begin with, ascending.
    lengths: tuple[int, ...]
    #: How the gap's length is found. "end": it is cut at the first END of a canvas with room to spare. "elastic": the
    #: policy grows and shrinks it. "calibrated": among `lengths` by what the first pass says of each; where nothing
    #: stands behind the gap, a family that `goes_on` needs no length: there it is as with "end".
    length: Literal["end", "elastic", "calibrated"]
    #: Ids that end the gap where they stand in a slot, `Facts.end_id` among them: the text is cut there.
    ends: frozenset[int]
    #: "calibrated": the mean top probability that a first pass has by its canvas's length alone: (a, b, c, d, e) of
    #: B(n) = a exp(-b n) + c exp(-d n) + e (CAL, appendix A); (0, 0, 0, 0, 1) corrects nothing.
    bias: tuple[float, float, float, float, float] = (0.0, 0.0, 0.0, 0.0, 1.0)
    #: Slots and suffix together at least: a smaller canvas is known to be filled badly.
    least: int = 0
    #: The most slots that the policy may grow a canvas to.
    most: int = 64
    #: The most tokens that prefix, canvas and suffix may have together; None: as many as there are.
    positions: int | None = None
    #: The most tokens that slots and suffix may have together; None: any number. The suffix is cut to it.
    canvas: int | None = None
    #: Whether a canvas that is full, without an end and with nothing behind it, is encoded behind the prefix and
    #: followed by another one.
    goes_on: bool = False
    #: Whether text before the gap is healed: taken back to a boundary, and written again by the first slots.
    heals: bool = True
    #: Stands behind the suffix where that is all there is.
    closing: tuple[int, ...] = ()
    #: Whether it reads blocks, pieces of other files, which it sees in front of the prefix.
    blocks: bool = False
    #: Whether the family is `SelfConditioned`.
    soft: bool = False
    #: With which its authors draw tokens instead: temperature, and `Reading.top_p`. (0, 1): they do not.
    sampling: tuple[float, float] = (0.0, 1.0)


@dataclass(frozen=True, slots=True)
class Facts:
    """What the engine must know of a family."""

    #: What stands in an open slot; None where that is noise, a token drawn uniformly.
    mask_id: int | None
    end_id: int
    #: Begins the prefix stream and each context encoded alone; a sink's key is what attention rests on.
    opening: tuple[int, ...]
    #: How many masks a group should have; 0 where masks predict nothing yet.
    lookahead: int
    #: Known tokens before the gap to encode on the canvas, where they see the blocks: at least, and at most.
    left: tuple[int, int]
    #: How many groups of masks a pass should have at most: one behind the committed text, the others behind the first
    #: proposed tokens.
    groups: int = 1
    #: Tokens that `Writer.write` should write at once; 1 where the family is none.
    steps: int = 1
    #: Of a family that sees both sides at once and is an `OpenDenoiser`; `left` is then what it wants on the canvas of
    #: the tokens before the gap, and nothing else of the above but the ids counts.
    open: OpenFacts | None = None


class Family(Protocol):
    """What all model families have."""

    @property
    def facts(self) -> Facts: ...

    @property
    def head(self) -> Head: ...

    def encode(
        self, tokens: Sequence[int], kv: ContextKV | None, ahead: bool = False
    ) -> Generator[None, None, ContextKV]:
        """Extends a context, in place, or begins one. Causal: what was encoded before stays as it is.

        Each `next` is a bounded piece of work, and yields; no tokens are no work. The context's length changes with the
        last one only, so a generator that is closed before leaves it as it was. Raises `MemoryError` where there is no
        room for more keys and values; that, too, leaves it as it was.

        ahead: no request waits for it, so that a device may do it behind other work.
        """


class Denoiser(Family, Protocol):
    """A model family whose text grows from the left."""

    def denoise(
        self, canvases: Sequence[Canvas], contexts: Sequence[Contexts], states: Sequence[Any]
    ) -> tuple[list[Tensor], list[Any]]:
        """One forward pass over a batch of canvases, each with its contexts and its last pass's state (None at first).

        Returns for each canvas the hidden rows [R, D], final norm applied, and the new state. The first rows predict
        the slots from the frontier on: one row for the frontier, one for each slot behind a proposed token. Then come
        the masks' rows, group by group (`Canvas.group`), then the branches', one for each branch token, which predicts
        what follows it. Raises `MemoryError` where there is no room; the same call may then be made again.
        """


class OpenDenoiser(Family, Protocol):
    """A model family that sees both sides of the gap at once. Its `encode` may keep no more than the tokens."""

    def denoise(
        self, canvases: Sequence[OpenCanvas], contexts: Sequence[Contexts], states: Sequence[Any]
    ) -> tuple[list[Tensor], list[Any]]:
        """One forward pass over a batch of canvases, each with its contexts and its last pass's state (None at first).

        Returns for each canvas the hidden rows [R, D], final norm applied, and the new state. Row i predicts the i-th
        open slot, whatever shift the family has. Raises `MemoryError` as `Denoiser.denoise` does.
        """


class SelfConditioned(OpenDenoiser, Protocol):
    """A family that reads what it said in the pass before."""

    def condition(self, state: Any, soft: Tensor) -> Any:
        """The state of a pass, with the expected embedding of each of its rows in it: softmax(z) E, [R, D], z being the
        logits as they were read (tempered)."""


class Writer(Denoiser, Protocol):
    """A family that writes several tokens one after the other before the host looks at them."""

    def write(
        self,
        canvases: Sequence[Canvas],
        contexts: Sequence[Contexts],
        states: Sequence[Any],
        steps: int,
        read: Callable[[Tensor], Tensor],
    ) -> tuple[Tensor, list[Any]]:
        """As `denoise` of canvases with neither proposals nor masks nor branches, made `steps` times: each time with
        the tokens that `read` took from the rows before.

        read: from hidden rows [C, D], one a canvas, what is to be known of them, float64 [F, C] on their device, ids in
        the first line. Returns all of that, [steps, F, C] on the host, and the states, in which all tokens but the last
        are known. Raises `MemoryError` as `denoise` does.
        """


@dataclass(frozen=True, slots=True)
class Pass:
    """What a request needs of the next forward pass; passes of several requests are run as one."""

    canvas: Canvas | OpenCanvas
    contexts: Contexts
    #: Of the canvas's last pass; None at first.
    state: Any = None
    #: Rows that are restricted, each to its ids: bool [V] on the host.
    allowed: Mapping[int, Tensor] = field(default_factory=dict)
    #: One a branch row: the id whose log-probability is wanted there.
    targets: tuple[int, ...] = ()
    #: What is remembered of the first rows: that of the frontier, and those behind proposed tokens.
    memory: Candidates | None = None
    #: How the rows of an open canvas are read, and what with; that of another is read as it is.
    reading: Reading | None = None
    noise: Noise | None = None

    @property
    def rows(self) -> int:
        """How many rows it has: those of `Denoiser.denoise`."""
        return self.canvas.rows + len(self.targets)


class Noise(Protocol):
    """Where a request's chance comes from: an input, so that a trace can be replayed."""

    def gumbel(self, rows: int, vocab: int, device: torch.device) -> Tensor:
        """fp32 [rows, vocab], independent standard Gumbel draws, made where they are wanted: for 128 rows of a large
        vocabulary they are 134 MB."""

    def ids(self, count: int, vocab: int) -> list[int]:
        """Ids drawn uniformly from [0, vocab)."""


class Reading(NamedTuple):
    """How a policy wants the rows of the next pass read."""

    #: Logits are divided by it.
    temperature: float = 1.0
    #: What standard Gumbel noise is multiplied by before it is added to the tempered logits, of which the sample is the
    #: greatest; 0: the sample is the most probable token.
    noise: float = 0.0
    #: Ids that no row may produce this time.
    refused: tuple[int, ...] = ()
    #: Of each row only the fewest most probable ids count that have together more than this probability (nucleus
    #: sampling, arXiv 1904.09751); 1: all.
    top_p: float = 1.0


@dataclass(frozen=True, slots=True)
class Rows:
    """What a pass says of a canvas, on the host: an entry a row in each list."""

    #: The most probable id that is admitted, and its probability.
    token: list[int]
    prob: list[float]
    #: In nats.
    entropy: list[float]
    #: The probability of END.
    end_prob: list[float]
    #: The log-probability of the row's target; of END where it has none.
    target_logprob: list[float]
    #: Of an open canvas: the id drawn, and its probability. Those of `token` where nothing was drawn; else empty.
    sample: list[int] = field(default_factory=list)
    sample_prob: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, said: Tensor) -> Rows:
        """From a tensor [5, N] or, with what was drawn, [7, N], of the fields in their order.

        Raises `ModelError` for NaN: such a model would write the same id for ever.
        """
        token, prob, entropy, end_prob, target, *drawn = said.tolist()
        if any(map(math.isnan, prob)):
            raise ModelError("the model says NaN: its weights are damaged, or do not suit its type")
        sample, sample_prob = drawn or ([], [])
        return cls([int(t) for t in token], prob, entropy, end_prob, target, [int(t) for t in sample], sample_prob)

    def __len__(self) -> int:
        return len(self.token)

    def __getitem__(self, rows: slice) -> Rows:
        """The same of some rows."""
        return Rows(
            self.token[rows],
            self.prob[rows],
            self.entropy[rows],
            self.end_prob[rows],
            self.target_logprob[rows],
            self.sample[rows],
            self.sample_prob[rows],
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a `Pass`."""

    rows: Rows
    state: Any
    #: What the pass took for all that were in it.
    seconds: float
    #: More than one where tokens were written one after the other: row i then predicts slot frontier + i from what the
    #: rows before it predict.
    steps: int = 1


class OpenPolicy(Protocol):
    """Decides what stands in an open canvas after a pass. It is shared between requests and keeps nothing of them."""

    def reading(self, canvas: OpenCanvas) -> Reading:
        """How the rows of the canvas's next pass are to be read."""

    def step(self, canvas: OpenCanvas, rows: Rows, noise: Noise) -> OpenCanvas:
        """rows: one an open slot. May pin open slots, rewrite, remove or add some, but leaves pinned ones as they are.
        Comes to a full canvas after some steps, which is done: `canvas.step` counts them (`OpenCanvas.seen`)."""


class CommitPolicy(Protocol):
    """Decides what a pass makes final."""

    def step(self, canvas: Canvas, rows: Rows) -> Canvas:
        """rows: those of `Denoiser.denoise`, but the branches'. Commits at least one slot, and proposes for those after
        it."""


def agreement(a: Sequence[object], b: Sequence[object]) -> int:
    """Length of the longest common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def complete(steps: Generator[Any, None, T]) -> T:
    """Takes all steps at once and returns the generator's value."""
    while True:
        try:
            next(steps)
        except StopIteration as done:
            return cast(T, done.value)
