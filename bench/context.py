"""What context is worth: `python -m bench.context [--gaps N] [--packages N] [--adapter FILE] [--write]`.

The same gaps of held-out packages, with the text before the gap alone, with the suffix as a block, and with the memory,
snippets of other files, or both beside it; for the base as it is and for an adapter. Of the true middle: loss and
accuracy with the truth to the left of each token. Of what the engine writes: exact match, of all gaps and of those in
which something is shown. Of each package up to 400,000 characters are indexed and remembered. Times are wall time of
this process. What was looked at is kept in the cache folder, so a run that breaks off goes on where it was. Prints
Markdown; `--write` puts it into docs/context.md, too.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import msgspec
import numpy as np
import torch
from infill_engine import adapter
from infill_engine.config import EngineConfig
from infill_engine.core import Denoiser, Pass, complete
from infill_engine.engine import Engine
from infill_engine.memory import mix
from infill_engine.protocol import InfillRequest, Snippet, cache_dir
from infill_kernels import logits
from rich.console import Console
from rich.progress import track

from bench.filling import (
    Case,
    Model,
    Projects,
    Store,
    answer,
    edited,
    held_out,
    remembered,
    tokens_of,
    with_suffix,
    without_suffix,
)
from bench.plot import table
from bench.score import Figure, quantile, ratio, same
from infill_lsp.index import Index
from infill_lsp.postprocess import tidied
from infill_lsp.priming import retrieve, sent

GAPS, PACKAGES, SEED = 300, 10, 2
#: What is written, and what stands above it.
PAGE = Path(__file__).resolve().parents[1] / "docs" / "context.md"
HEADING = """# What context is worth

Made by `python -m bench.context --write`: the same gaps with the text before the gap alone (*none*), with the suffix
as a block, and with the memory, snippets of other files of the package, or both beside it. *Nats a token* and
*accuracy* are of the true middle, with the truth to the left of each token; *exact* is what the product's edit makes of
what the model writes, of all gaps, and of those in which it would show something asked for by hand. Of each package up
to 400,000 characters are indexed and remembered, the gap's own document as it is without the gap. No training saw any
of these packages."""
#: Tokens of a middle that are looked at.
MIDDLE = 128
#: Gaps of a language that has rows of its own.
FEWEST = 20
#: Gaps tried for each that is wanted, as those of other packages than the first are passed over.
TRIES = 40


@dataclass(frozen=True, slots=True)
class Variant:
    """What a canvas sees beside the text before it."""

    name: str
    suffix: bool = True
    memory: bool = False
    snippets: bool = False


VARIANTS = (
    Variant("none", suffix=False),
    Variant("suffix"),
    Variant("suffix, memory", memory=True),
    Variant("suffix, snippets", snippets=True),
    Variant("all", memory=True, snippets=True),
)


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """What a model with a variant makes of a gap; a line of the files that tables are made of."""

    index: int
    package: str
    language: str
    tokens: int
    #: Of all tokens together.
    nats: float
    right: int
    #: Whether anything was shown, and whether it made the document that was.
    shown: bool
    exact: bool
    #: Snippets that the canvas saw, milliseconds of their retrieval, and of a look-up in the memory.
    snippets: int
    retrieval_ms: float
    look_up_ms: float


@dataclass(frozen=True, slots=True)
class Package:
    """A package as a folder with an index."""

    root: Path
    index: Index


class Packages:
    """The packages of the corpus, each indexed when a gap of it first comes up."""

    def __init__(self, corpus: Path) -> None:
        self._corpus = corpus
        self._home = tempfile.TemporaryDirectory(prefix="infill-")
        self._found: dict[str, Package] = {}

    def retrieve(self, case: Case, limit: int) -> tuple[tuple[Snippet, ...], float]:
        """The best snippets for a gap, whose document is open as the product has it, and in how many milliseconds."""
        package = self._package(case.package)
        snapshot = replace(case.snapshot, uri=(package.root / case.path).as_uri())
        package.index.update(snapshot.uri, "\n".join(snapshot.lines))
        assert package.index.settle(60)
        began = time.perf_counter()
        found = retrieve(package.index, snapshot, case.gap, limit)
        ms = (time.perf_counter() - began) * 1000
        package.index.close(snapshot.uri)
        return tuple(map(sent, found)), ms

    def close(self) -> None:
        for package in self._found.values():
            package.index.stop()
        self._home.cleanup()

    def _package(self, name: str) -> Package:
        if name not in self._found:
            root = Path(self._home.name) / "projects" / str(len(self._found))
            for document in remembered(self._corpus, name):
                path = root / document.path
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(document.text, encoding="utf-8")
            index = Index(str(root), home=Path(self._home.name) / "index")
            index.start()
            assert index.settle(600)
            self._found[name] = Package(root, index)
        return self._found[name]


def cases(corpus: Path, seed: int, gaps: int, packages: int) -> dict[int, Case]:
    """So many gaps of the first so many packages that come up, by their numbers in the draw."""
    draw, found = held_out(corpus, seed), dict[int, Case]()
    names: dict[str, None] = {}
    for index in range(TRIES * gaps):
        case = draw(index)
        if case.package in names or len(names) < packages:
            names[case.package] = None
            found[index] = case
        if len(found) == gaps:
            break
    return found


@dataclass(slots=True)
class Bench:
    """One model with all variants."""

    model: Model
    packages: Packages
    projects: Projects
    #: Snippets that a canvas sees.
    snippets: int
    engines: dict[bool, Engine] = field(default_factory=dict)

    def store(self, folder: Path, variant: Variant, seed: int) -> Store[Seen]:
        """What was looked at before."""
        kind = variant.name.replace(", ", "-") + (f"-{self.snippets}" if variant.snippets else "")
        return Store(folder / f"gaps-{seed}_{self.model.fingerprint}_{kind}.jsonl", Seen)

    def look(self, variant: Variant, case: Case, index: int) -> Seen:
        engine = self._engine(variant.memory)
        request, retrieval_ms = self._request(variant, case)
        complete(engine.prime(request))
        truth = tokens_of(case.truth, request, engine._tokenizer)[:MIDDLE]
        nats, right, ms, seen = observe(engine, request, truth)
        candidate, _ = answer(engine, request)
        shown, rest, _ = edited(case, tidied(case.snapshot, case.gap, candidate))
        exact = same(shown, rest, case.truth, case.gap.tail)
        return Seen(
            index=index,
            package=case.package,
            language=case.snapshot.language,
            tokens=len(truth),
            nats=nats,
            right=right,
            shown=bool(shown),
            exact=exact,
            snippets=seen,
            retrieval_ms=retrieval_ms,
            look_up_ms=ms,
        )

    def _engine(self, memory: bool) -> Engine:
        if memory not in self.engines:
            proposals = EngineConfig().proposal_tokens
            engine = self.model.decoder(
                proposals, self.model.has_masks, None, workspaces=self.projects if memory else None
            )
            engine._config = replace(engine._config, snippets=self.snippets)
            self.engines[memory] = engine
        return self.engines[memory]

    def _request(self, variant: Variant, case: Case) -> tuple[InfillRequest, float]:
        """And how many milliseconds its snippets took."""
        ms, request = 0.0, (with_suffix if variant.suffix else without_suffix)(case, self.model)
        if variant.memory:
            request = msgspec.structs.replace(request, workspace=case.package, path=case.path)
        if variant.snippets:
            snippets, ms = self.packages.retrieve(case, self.snippets)
            request = msgspec.structs.replace(request, snippets=snippets)
        return request, ms


@torch.inference_mode()
def observe(engine: Engine, request: InfillRequest, truth: Sequence[int]) -> tuple[float, int, float, int]:
    """Nats of the true middle, how many of its tokens are the most probable where they stand, milliseconds of a look-up
    in the memory, and how many snippets were seen; in one pass, with the truth as a proposal."""
    facts, head = engine._denoiser.facts, engine._denoiser.head
    with engine._cache.lease() as lease:
        run = engine._begin(request, time.monotonic(), lease)
        assert complete(engine._prepare(run)) is None
        if not (rows := len(truth)):  # nothing is missing
            return 0.0, 0, 0.0, run.snippets
        canvas = replace(run.canvas, size=max(rows, run.canvas.size), proposal=tuple(truth[:-1]), masks=())
        (hidden,), _ = engine._forward([Pass(canvas, run.contexts)], cast(Denoiser, engine._denoiser).denoise)
        admitted = head.free.repeat(rows, 1)
        for row, ids in enumerate(engine._tokenizer.restricted(run.head.rest, truth[:-1])):
            admitted[row] &= ids
        scores = logits(hidden, head).double().cpu().masked_fill(~admitted, -torch.inf).log_softmax(-1)
        p, ids = scores.exp(), torch.tensor(truth)
        of_truth, top = p.gather(1, ids[:, None])[:, 0].numpy(), p.argmax(-1).numpy()
        ms = 0.0
        if run.view is not None:
            sets = {row: admitted[row].numpy() for row in range(rows)}
            began = time.perf_counter()
            candidates = run.view.candidates(truth[:-1], sets, engine._free)
            ms = (time.perf_counter() - began) * 1000 / rows
            end = p[:, facts.end_id].numpy()
            share = (candidates.remembered * (candidates.ids == ids.numpy()[:, None])).sum(1)
            of_truth = candidates.weights[:, 0] * of_truth + (1.0 - end) * share
            best, lse = p.max(-1).values.numpy(), np.zeros(rows)
            named = scores.gather(1, torch.from_numpy(candidates.ids)).numpy()
            top = mix(candidates, top, best, lse, np.zeros(rows), named, facts.end_id, end).token
        nats = -np.log(np.maximum(of_truth, 1e-12)).sum()
        return float(nats), int((top == ids.numpy()).sum()), ms, run.snippets


Results = Mapping[tuple[str, str], Sequence[Seen]]


def measure(benches: Mapping[str, Bench], gaps: Mapping[int, Case], folder: Path, seed: int) -> Results:
    """By model and variant, in the order of the gaps. folder: of what was looked at."""
    folder.mkdir(parents=True, exist_ok=True)
    stores = {(n, v.name): bench.store(folder, v, seed) for n, bench in benches.items() for v in VARIANTS}
    for index, case in track(gaps.items(), "gaps", console=Console(stderr=True)):
        for name, bench in benches.items():
            torch.set_num_threads(bench.model.threads)
            for variant in VARIANTS:
                store = stores[name, variant.name]
                if index not in store.filled:
                    store.add(bench.look(variant, case, index))
    return {key: [store.filled[index] for index in gaps] for key, store in stores.items()}


def loss(seen: Sequence[Seen]) -> Figure:
    return ratio([one.nats for one in seen], [one.tokens for one in seen])


def accuracy(seen: Sequence[Seen]) -> Figure:
    return ratio([one.right for one in seen], [one.tokens for one in seen])


def exact(seen: Sequence[Seen]) -> Figure:
    return ratio([one.exact for one in seen])


def precision(seen: Sequence[Seen]) -> Figure:
    """How much of what is shown is exact."""
    return ratio([one.exact and one.shown for one in seen], [one.shown for one in seen])


def page(results: Results) -> str:
    """The tables."""
    gaps = next(iter(results.values()))
    rows = [
        [
            model,
            variant,
            loss(seen).number(),
            accuracy(seen).percent(),
            exact(seen).percent(),
            precision(seen).percent(),
            f"{with_snippet(seen):.0%}",
        ]
        for (model, variant), seen in results.items()
    ]
    counts = Counter(one.language for one in gaps)
    groups = {language: {language} for language, count in counts.most_common() if count >= FEWEST}
    groups["others"] = counts.keys() - groups.keys()
    by_language = [
        [
            name,
            str(len(those)),
            model,
            variant,
            f"{loss(those).value:.2f}",
            *(f"{of(those).value:.0%}" for of in (accuracy, exact, precision)),
        ]
        for name, languages in groups.items()
        for (model, variant), seen in results.items()
        if (those := [one for one in seen if one.language in languages])
    ]
    both = [one for (_, variant), seen in results.items() for one in seen if variant == "all"]
    times = [
        ["retrieval, ms", *_both([one.retrieval_ms for one in both])],
        ["memory, ms a slot", *_both([one.look_up_ms for one in both if one.tokens])],
    ]
    return "\n\n".join(
        [
            f"{len(gaps)} gaps of {len({one.package for one in gaps})} held-out packages; 95% intervals in brackets.",
            table(
                ["model", "context", "nats a token", "accuracy", "exact", "exact of what is shown", "with a snippet"],
                rows,
            ),
            table(
                ["language", "gaps", "model", "context", "nats a token", "accuracy", "exact", "exact of what is shown"],
                by_language,
            ),
            table(["", "median", "p95"], times),
        ]
    )


def with_snippet(seen: Sequence[Seen]) -> float:
    return sum(one.snippets > 0 for one in seen) / len(seen)


def _both(times: Sequence[float]) -> tuple[str, str]:
    return f"{statistics.median(times):.2f}", f"{quantile(times, 0.95):.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.context", description=__doc__)
    parser.add_argument("--corpus", type=Path, default=cache_dir() / "corpus", help="where the corpus was built")
    parser.add_argument("--gaps", type=int, default=GAPS)
    parser.add_argument("--packages", type=int, default=PACKAGES, help="of which the gaps are")
    parser.add_argument("--snippets", type=int, default=EngineConfig().snippets, help="that a canvas sees at most")
    parser.add_argument("--adapter", type=Path, help="to compare with the base (default: the installed one)")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--seed", type=int, default=SEED, help="of the gaps")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(PAGE.parents[1])}, too")
    options = parser.parse_args()
    names = {"base": "embedded:base", "adapter": f"embedded:{options.adapter or adapter.EMBEDDED}"}
    gaps = cases(options.corpus, options.seed, options.gaps, options.packages)
    packages, benches = Packages(options.corpus), dict[str, Bench]()
    for name, model in names.items():
        loaded = Model.load(EngineConfig(model=model, dtype=options.dtype, threads=options.threads))
        benches[name] = Bench(loaded, packages, Projects(options.corpus, loaded.codec), options.snippets)
    said = page(measure(benches, gaps, cache_dir() / "bench" / "context", options.seed))
    packages.close()
    for bench in benches.values():
        bench.projects.close()
    print(said)
    if options.write:
        PAGE.write_text(f"{HEADING}\n\n{said}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
