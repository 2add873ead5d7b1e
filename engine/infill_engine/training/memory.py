"""Fits the weights with which the memory is mixed into a model: `python -m infill_engine.training.memory`.

Gaps are cut out of held-out packages; of each the model, as it is served, says how probable every token of the true
middle is, and so do the file around the gap and the other files of the package. The weights of a bucket are those under
which the middles are most probable, by expectation-maximisation, drawn towards those of all buckets where there are few
tokens. What is reported is of packages that the weights were not fitted on; what is written is fitted on all of them.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from infill_kernels import logits
from rich.progress import track

from infill_engine import adapter, models, smollm, weights
from infill_engine.core import Canvas, Contexts, Denoiser, complete
from infill_engine.fetch import ensure_weights
from infill_engine.memory import WEIGHTS, Array, Candidates, Match, Memory, Weights, mix
from infill_engine.protocol import cache_dir
from infill_engine.tokenizer import LineTokenizer
from infill_engine.training.corpus import Document, Split, documents
from infill_engine.workspace import Workspace

Kind = Literal["rest", "line", "lines"]
KINDS: tuple[Kind, ...] = get_args(Kind)

#: The buckets' lower ends.
LENGTHS, COUNTS = (2, 3, 4, 6, 9, 16), (1, 2, 4)
#: Tokens of a middle at most, and of the file before a gap at least; gaps that are cut out of one window.
MIDDLE, BEFORE, WINDOW = 64, 64, 8
#: Tokens of the prefix and of the suffix that the model sees, and those before the gap that stand on the canvas.
PREFIX, SUFFIX, LEFT = 1024, 96, 12
#: Steps of expectation-maximisation, and the tokens that the weights of a larger bucket count for in a smaller one.
STEPS, PRIOR = 100, 20.0


@dataclass(frozen=True, slots=True)
class Gap:
    """A gap of a file: the tokens of the lines before and after it, and those that stand in it."""

    package: str
    path: str
    kind: Kind
    before: Sequence[tuple[int, ...]]
    after: Sequence[tuple[int, ...]]
    middle: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Observed:
    """What is known of N tokens that stand in gaps, one a row."""

    package: Array
    kind: Array
    token: Array
    #: The model's probability of the token, its most probable one with its probability, and its entropy in nats.
    model: Array
    top: Array
    prob: Array
    entropy: Array
    #: The model's probability of END.
    end: Array
    #: The model's probabilities of what file and workspace name, [N, 2 * NAMED].
    named: Array
    #: What file and workspace say.
    file: Match
    workspace: Match
    end_id: int

    def only(self, rows: Array) -> Observed:
        """Some of the rows."""
        columns: dict[str, Any] = {name: getattr(self, name)[rows] for name in _COLUMNS}
        file, other = (Match(*(column[rows] for column in match)) for match in (self.file, self.workspace))
        return Observed(**columns, file=file, workspace=other, end_id=self.end_id)

    @staticmethod
    def joined(parts: Sequence[Observed]) -> Observed:
        """All rows of all parts."""
        columns: dict[str, Any] = {name: np.concatenate([getattr(part, name) for part in parts]) for name in _COLUMNS}
        matches = ([part.file for part in parts], [part.workspace for part in parts])
        file, other = (Match(*map(np.concatenate, zip(*match, strict=True))) for match in matches)
        return Observed(**columns, file=file, workspace=other, end_id=parts[0].end_id)

    def parts(self) -> Array:
        """float64 [N, 3]: the probability of each token by model, file and workspace alone, with END as the model has
        it; 0 where they know none."""
        here = [(match.share * (match.ids == self.token[:, None])).sum(1) for match in (self.file, self.workspace)]
        remembered = [np.where(self.token == self.end_id, self.end, (1.0 - self.end) * share) for share in here]
        return np.stack([self.model, *remembered], 1)


_COLUMNS = ("package", "kind", "token", "model", "top", "prob", "entropy", "end", "named")


def cut(document: Document, tokenizer: LineTokenizer, count: int, chance: random.Random) -> list[Gap]:
    """Up to `count` gaps in one window of a document, from its end to its start, of all kinds: rests of a line from its
    second token on, lines, and two or three lines. Each is cut where the tokens are those of the whole line."""
    lines = [tokenizer.encode_segment(segment) for segment in tokenizer.segments(document.text)]
    ends = np.cumsum([len(line) for line in lines])
    start = chance.randrange(max(1, int(ends[-1]) - PREFIX // 2))
    window = [i for i in range(1, len(lines)) if start + BEFORE <= ends[i - 1] < start + PREFIX]
    gaps = []
    for first in sorted(chance.sample(window, min(len(window), count)), reverse=True):
        kind = chance.choice(KINDS)
        end = first + (chance.choice((2, 3)) if kind == "lines" else 1)
        at = chance.randrange(1, max(2, len(lines[first]))) if kind == "rest" else 0
        middle = tuple(token for line in lines[first:end] for token in line)[at:]
        if 0 < len(middle) <= MIDDLE and end < len(lines):
            gap = Gap(document.package, document.path, kind, [*lines[:first], lines[first][:at]], lines[end:], middle)
            gaps.append(gap)
    return gaps


@torch.inference_mode()
def observe(
    gaps: Sequence[Gap], denoiser: Denoiser, memory: Memory, workspace: Workspace, ends: bool = False
) -> Iterator[Observed]:
    """What the model, with prefix and suffix as it has them when it serves, and the memory say of the tokens of gaps of
    one window, from its end to its start: what is encoded for the first serves the others too. ends: also of END behind
    them, which says something of a model that has learned it."""
    opening, prefix, free = denoiser.facts.opening, None, denoiser.head.free
    end = [denoiser.facts.end_id] * ends
    for gap in gaps:
        known = [token for line in gap.before for token in line]
        after = [token for line in gap.after for token in line][:SUFFIX]
        if prefix is None:
            start = max(0, len(known) - PREFIX)
            prefix = complete(denoiser.encode([*opening, *known[start:-LEFT]], None))
        origin = len(known) - start - LEFT + 1
        prefix.truncate(origin)
        blocks = (complete(denoiser.encode([*opening, *after], None)),) if after else ()
        middle = (*gap.middle, *end)
        canvas = Canvas(origin, tuple(known[-LEFT:]), len(middle), proposal=middle[:-1])
        (hidden,), _ = denoiser.denoise([canvas], [Contexts(prefix, blocks)], [None])
        scores = logits(hidden, denoiser.head).double().masked_fill(~free, -torch.inf).log_softmax(-1)
        p, token = scores.exp(), torch.tensor(middle)
        file, other = memory.view("gap", gap.before, gap.after, workspace, gap.path).matches(middle[:-1])
        ids = torch.from_numpy(np.concatenate([file.ids, other.ids], 1)).long()
        n, prob = len(middle), p.max(-1)
        yield Observed(
            np.repeat(gap.package, n),
            np.repeat(gap.kind, n),
            token.numpy(),
            p.gather(1, token[:, None])[:, 0].numpy(),
            prob.indices.numpy(),
            prob.values.numpy(),
            torch.special.entr(p).sum(-1).numpy(),
            p[:, denoiser.facts.end_id].numpy(),
            p.gather(1, ids).numpy(),
            file,
            other,
            denoiser.facts.end_id,
        )


def expectation_maximisation(parts: Array, towards: Array, prior: float) -> Array:
    """float64 [3]: the weights under which tokens with these probabilities, [N, 3], are most probable; `towards` counts
    as `prior` tokens (Dempster et al. 1977, section 4.3)."""
    mixing = towards.copy()
    for _ in range(STEPS):
        share = parts * mixing
        share /= np.maximum(share.sum(1, keepdims=True), 1e-300)
        mixing = (share.sum(0) + prior * towards) / (len(parts) + prior)
    return mixing


def fit(observed: Observed, note: str = "") -> Weights:
    """The table. A bucket is drawn towards that of both lengths, which is drawn towards that of the workspace's length,
    and that one towards all tokens with a match in the same parts. (The finer buckets that were tried, by whether all
    that followed agrees or by how often the file's match stands there, gained less than 0.003 nats.)"""
    sizes = (len(LENGTHS) + 1, len(LENGTHS) + 1, len(COUNTS) + 1, 3)
    table = np.zeros(sizes)
    buckets = np.stack(Weights(LENGTHS, COUNTS, np.full(sizes, 1 / 3)).bucket(observed.file, observed.workspace), 1)
    parts = observed.parts()

    def draw(of: Array, towards: Array) -> Array:
        return expectation_maximisation(parts[of], towards, PRIOR)

    for file, workspace, count in np.ndindex(sizes[:3]):
        matched = np.array([file > 0, workspace > 0])
        can = np.array([1.0, *matched])
        of = ((buckets[:, :2] > 0) == matched).all(1)
        mixing = draw(of, can / can.sum())
        for column, bucket in ((1, workspace), (0, file), (2, count)):
            of &= buckets[:, column] == bucket
            mixing = draw(of, mixing)
        table[file, workspace, count] = mixing
    return Weights(LENGTHS, COUNTS, table, note)


def mixed(observed: Observed, fitted: Weights) -> tuple[Array, Array, Array]:
    """Of each token: its probability in the mixture, the mixture's most probable token, and that one's probability."""
    candidates = Candidates.of(observed.file, observed.workspace, fitted)
    everything = np.concatenate([observed.file.ids, observed.workspace.ids], 1)
    at = (candidates.ids[:, :, None] == everything[:, None, :]).argmax(2)
    scores = np.log(np.maximum(np.take_along_axis(observed.named, at, 1), 1e-300))
    model = observed.top, observed.prob, np.zeros(len(at)), observed.entropy, scores
    said = mix(candidates, *model, observed.end_id, observed.end)
    shares = fitted.of(observed.file, observed.workspace)
    return (observed.parts() * shares).sum(1), said.token, said.prob


def report(observed: Observed, halves: Sequence[tuple[Observed, Weights]]) -> Iterator[str]:
    """Lines of a table: nats a token, accuracy and precision without the memory and with it, of tokens that the weights
    were not fitted on."""
    rows = [(part, *mixed(part, fitted)) for part, fitted in halves]
    whole = Observed.joined([part for part, *_ in rows])
    p, token, prob = (np.concatenate(column) for column in list(zip(*rows, strict=True))[1:])
    yield "| gaps | tokens | nats | with memory | accuracy | with memory | right where p > 0.7 | with memory |"
    yield "|---|---|---|---|---|---|---|---|"
    for kind in ("all", *sorted(set(whole.kind.tolist()))):
        of = np.full(len(p), True) if kind == "all" else whole.kind == kind
        cells = [kind, str(of.sum())]
        cells += [f"{-np.log(np.maximum(q[of], 1e-12)).mean():.3f}" for q in (whole.model, p)]
        cells += [f"{(t[of] == whole.token[of]).mean():.1%}" for t in (whole.top, token)]
        for t, confidence in ((whole.top, whole.prob), (token, prob)):
            sure = of & (confidence > 0.7)
            right = (t[sure] == whole.token[sure]).sum() / max(1, sure.sum())
            cells.append(f"{right:.1%} of {sure.sum() / of.sum():.0%}")
        yield f"| {' | '.join(cells)} |"
    long = np.maximum(whole.file.length, whole.workspace.length) >= 4
    yield f"matches of 4 tokens and more: {long.mean():.0%} of the tokens"


def halves(observed: Observed) -> list[tuple[Observed, Weights]]:
    """The tokens of each half of the packages, with the weights that the other half gives."""
    half = np.array([zlib.crc32(str(name).encode()) % 2 == 0 for name in observed.package])
    return [(observed.only(rows), fit(observed.only(~rows))) for rows in (half, ~half)]


def collect(
    corpus: Path,
    split: Split,
    gaps: int,
    denoiser: Denoiser,
    tokenizer: LineTokenizer,
    characters: int = 1 << 31,
    ends: bool = False,
) -> Observed:
    """Observes about so many gaps, as many of each package. characters: of a package, for its workspace, at most;
    ends: as `observe` has it."""
    packages: dict[str, list[Document]] = defaultdict(list)
    for document in documents(corpus, split):
        packages[document.package].append(document)
    vocab = len(tokenizer.codec.tokens)
    memory, chance = Memory(vocab, Weights((), (), np.array([[[[1.0, 0.0, 0.0]]]]))), random.Random(0)
    parts: list[Observed] = []
    windows = max(1, round(gaps / len(packages) / WINDOW))
    for of_package in track(packages.values(), "packages"):
        with tempfile.TemporaryDirectory() as folder:
            workspace = Workspace(Path(folder), vocab, background=False)
            chance.shuffle(of_package)
            sizes = np.cumsum([len(document.text) for document in of_package])
            held = of_package[: max(1, int(np.searchsorted(sizes, characters)))]
            for document in held:
                workspace.put(document.path, "", tokenizer.encode(document.text))
            workspace.merge()
            for document in chance.choices(held, k=windows):
                parts += observe(cut(document, tokenizer, WINDOW, chance), denoiser, memory, workspace, ends)
            workspace.close()
    return Observed.joined(parts)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m infill_engine.training.memory", description=__doc__)
    parser.add_argument("--corpus", type=Path, default=cache_dir() / "corpus", help="where the corpus was built")
    parser.add_argument("--split", choices=get_args(Split), default="held")
    parser.add_argument("--gaps", type=int, default=300)
    parser.add_argument("--characters", type=int, default=1 << 31, help="of each package, for its workspace")
    parser.add_argument("--ends", action="store_true", help="count END too, for a model that has learned it")
    parser.add_argument("--dtype", choices=smollm.cpu_dtypes(), default=smollm.cpu_dtypes()[-1])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--adapter", type=Path, help="to be merged into the base first")
    parser.add_argument("--out", type=Path, default=WEIGHTS)
    options = parser.parse_args()
    path = ensure_weights(lambda message, progress: None)
    kept = models.prepared(path, str(options.adapter or models.BASE))
    tensors, codec = weights.load(path, kept, options.adapter)
    torch.set_num_threads(options.threads)
    denoiser = smollm.SmolDenoiser(tensors, options.dtype, "cpu", threads=options.threads)
    observed = collect(
        options.corpus, options.split, options.gaps, denoiser, LineTokenizer(codec), options.characters, options.ends
    )
    print("\n".join(report(observed, halves(observed))))
    model = f"{path.stem} with {adapter.digest(options.adapter) if options.adapter else 'no adapter'}"
    fit(observed, f"{model}, {options.dtype}, {len(observed.token)} tokens of {options.split}").save(options.out)
    print(f"written to {options.out}")


if __name__ == "__main__":
    main()
