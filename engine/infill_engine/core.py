"""The nouns of the engine: canvas, contexts, and what every model family implements.

Knows no model by name, no editor and no wire format. Positions and lengths count tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar, cast

from infill_kernels import BRANCH, LEFT, OPEN, Head
from torch import Tensor

if TYPE_CHECKING:
    from infill_engine.memory import Candidates

T = TypeVar("T")


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


class ContextKV(Protocol):
    """An encoded run of tokens; what is in it only its family knows."""

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
    #: Pieces encoded alone, the suffix among them; each begins with the family's sink.
    blocks: tuple[ContextKV, ...] = ()


@dataclass(frozen=True, slots=True)
class Facts:
    """What the engine must know of a family."""

    mask_id: int
    end_id: int
    #: Begins each context encoded alone; its key is what attention rests on.
    sink_id: int
    #: How many masks a group should have; 0 where masks predict nothing yet.
    lookahead: int
    #: Known tokens before the gap to encode on the canvas, where they see the blocks: at least, and at most.
    left: tuple[int, int]
    #: How many groups of masks a pass should have at most: one behind the committed text, the others behind the first
    #: proposed tokens.
    groups: int = 1
    #: Tokens that `Writer.write` should write at once; 1 where the family is none.
    steps: int = 1


class Denoiser(Protocol):
    """A model family."""

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

    def denoise(
        self, canvases: Sequence[Canvas], contexts: Sequence[Contexts], states: Sequence[Any]
    ) -> tuple[list[Tensor], list[Any]]:
        """One forward pass over a batch of canvases, each with its contexts and its last pass's state (None at first).

        Returns for each canvas the hidden rows [R, D], final norm applied, and the new state. The first rows predict
        the slots from the frontier on: one row for the frontier, one for each slot behind a proposed token. Then come
        the masks' rows, group by group (`Canvas.group`), then the branches', one for each branch token, which predicts
        what follows it. Raises `MemoryError` where there is no room; the same call may then be made again.
        """


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

    canvas: Canvas
    contexts: Contexts
    #: Of the canvas's last pass; None at first.
    state: Any = None
    #: Rows that are restricted, each to its ids: bool [V] on the host.
    allowed: Mapping[int, Tensor] = field(default_factory=dict)
    #: One a branch row: the id whose log-probability is wanted there.
    targets: tuple[int, ...] = ()
    #: What is remembered of the first rows: that of the frontier, and those behind proposed tokens.
    memory: Candidates | None = None

    @property
    def rows(self) -> int:
        """How many rows it has: those of `Denoiser.denoise`."""
        return 1 + len(self.canvas.proposal) + sum(self.canvas.masks) + len(self.targets)


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

    def __len__(self) -> int:
        return len(self.token)

    def __getitem__(self, rows: slice) -> Rows:
        """The same of some rows."""
        return Rows(
            self.token[rows], self.prob[rows], self.entropy[rows], self.end_prob[rows], self.target_logprob[rows]
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
