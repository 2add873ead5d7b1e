"""How good the texts are: `python -m bench.quality [--gaps N] [--problems N] [--jobs N] [--write]`.

The same held-out gaps are filled by the base model and by ours, by one after the other, and compared with what their
authors wrote; so are the problems of HumanEval-Infilling, whose tests are run. What came of it is kept: a run that was
broken off goes on, and `--cached` makes the tables again without a model. `--write` puts them into docs/quality.md, the
curve into docs/quality.svg, and the fitted gate into infill_lsp/confidence.json.

Most of the work is to encode contexts, which one thread does about half as fast as two: `--jobs 2` fills two gaps at a
time on two cores. What is timed is filled afterwards, by itself.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import shutil
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import TypeVar, get_args

import msgspec
from infill_engine import smollm
from infill_engine.config import EngineConfig
from infill_engine.core import ModelError
from infill_engine.protocol import cache_dir
from infill_engine.training.corpus import Document
from rich.progress import track

from bench import gate, humaneval, plot
from bench.filling import Case, Row, Runner, Store, held_out, suffix_as_text, with_suffix, without_suffix
from bench.score import Figure, Filled, ratio
from infill_lsp.confidence import FITTED, fitted
from infill_lsp.gaps import Authored

ROOT = Path(__file__).resolve().parents[1]
PAGE, PLOT = ROOT / "docs" / "quality.md", ROOT / "docs" / "quality.svg"
GAPS, SEED = 1_500, 1
#: Gaps of what needs fewer to be told: where texts end and what they are made of, and how many tokens a pass writes.
PART, FEW = 600, 300
#: Gaps whose times are measured, and that are filled in several types.
TIMED_GAPS = 100

BASE = Row("base, prefix only", "base", without_suffix)
BASE_TEXT = Row("base, suffix as text", "base", suffix_as_text)
BASE_BLOCK = Row("base, suffix as a block", "base", with_suffix)
OURS = Row("ours, one token a pass", "ours", with_suffix)
MASKS = replace(OURS, name="ours, masks", masks=True)
LOOKUP = replace(OURS, name="ours, look-up", proposals=EngineConfig().proposal_tokens)
BOTH = replace(LOOKUP, name="ours, look-up and masks", masks=True)
BASE_MEMORY = replace(BASE_BLOCK, name="base, suffix as a block, memory", proposals=LOOKUP.proposals, memory=True)
MEMORY = replace(BOTH, name="ours, memory and masks", memory=True)
#: As an editor asks: no further than somebody may be shown.
SERVED = replace(MEMORY, name="ours, memory and masks, as far as an editor asks", min_prob=fitted().floor)
DECODERS = (BASE, BASE_TEXT, BASE_BLOCK, BASE_MEMORY, OURS, MEMORY)
#: Ways to write the same text, one token a pass or several.
WAYS = (OURS, MASKS, LOOKUP, BOTH)
#: The same with the truth written for them.
FORCED = tuple(replace(row, forced=True) for row in (BASE_BLOCK, OURS))
ABLATIONS = (
    replace(OURS, name="ours, without the suffix", ask=without_suffix),
    replace(OURS, name="ours, the text before the gap tokenised as it stands", healing=False),
)
BF16 = replace(OURS, name="ours, bf16", model="ours bf16")
PROBLEMS = (BASE, BASE_TEXT, BASE_BLOCK, OURS)

#: A stratum in which the gate shows something this seldom is called silent.
SILENT = 0.2

Rows = Mapping[str, Sequence[Filled]]
T = TypeVar("T")


def configs(model: str, dtype: str, threads: int) -> dict[str, EngineConfig]:
    """The models that are compared, by the names that rows have for them."""
    named = {"base": "embedded:base", "ours": model}
    found = {name: EngineConfig(model=of, dtype=dtype, threads=threads) for name, of in named.items()}
    if dtype == "int8" and "bf16" in smollm.cpu_dtypes():
        found["ours bf16"] = EngineConfig(model=model, dtype="bf16", device="cpu", threads=threads)
    return found


@dataclass(frozen=True)
class Results:
    """What tables are made of. Every decoder of one table has the same gaps."""

    seed: int
    #: By row name.
    decoders: Rows
    ways: Rows
    forced: Rows
    ablations: Rows
    types: Rows
    #: Some of the gaps once more, for how long they take: filling all is hours of work, in which no machine is quiet.
    timed: Rows
    #: By subset of problems.
    problems: Mapping[str, Rows]

    @property
    def served(self) -> Sequence[Filled]:
        """As the product fills gaps: with the memory."""
        return self.decoders.get(MEMORY.name, self.decoders[OURS.name])


# The runs.


def run(arguments: argparse.Namespace, job: int | None = None) -> dict[str, dict[str, tuple[str, int]]]:
    """Runs what is missing; returns for each suite the file of each row, and of how many gaps its tables are.

    job: of several that share the gaps, one thread each, and leave out what is timed; None: all that is there to do."""
    named = configs(arguments.model, arguments.dtype, arguments.threads if job is None else 1)
    runner = Runner(named, cache_dir() / "bench" / "quality", arguments.corpus)
    files: dict[str, dict[str, tuple[str, int]]] = {}

    def fill(
        suite: str, tables: Mapping[str, tuple[Sequence[Row], int]], draw: Callable[[int], Case], apart: bool = False
    ) -> None:
        """tables: of which rows each is, and of how many gaps; apart: what has the machine to itself."""
        if apart and job is not None:
            return
        served = {name: ([row for row in of if runner.serves(row)], count) for name, (of, count) in tables.items()}
        first = 0
        for last in sorted({count for _, count in served.values()}):
            indices = range(first, last) if job is None else range(first + job, last, arguments.jobs)
            # All rows of a gap one after the other, whichever table they are in: they share what is encoded.
            wanted = [of for of, count in served.values() if count >= last]
            rows = list(dict.fromkeys(itertools.chain.from_iterable(wanted)))
            steps = runner.run(rows, suite, indices, draw)
            for _ in track(steps, f"{suite}, {len(rows)} decoders", total=len(indices), disable=bool(job)):
                pass
            first = last
        for name, (of, count) in served.items():
            files[name] = {row.name: (runner.store(row, suite).path.name, count) for row in of}

    draw = held_out(arguments.corpus, arguments.seed)
    gaps, part, few, timed = (min(count, arguments.gaps) for count in (arguments.gaps, PART, FEW, TIMED_GAPS))
    tables = {
        "decoders": (DECODERS, gaps),
        "forced": (FORCED, part),
        "ablations": ((OURS, *ABLATIONS), part),
        "ways": (WAYS, few),
    }
    fill(f"gaps-{arguments.seed}", tables, draw)
    for subset in get_args(humaneval.Subset) if arguments.problems != 0 else ():
        problems = list(humaneval.problems(arguments.data / "human-eval-infilling", subset))
        Random(arguments.seed).shuffle(problems)  # so that a few of them are of all functions
        count = min(arguments.problems or len(problems), len(problems))
        fill(f"{subset}-{arguments.seed}", {subset: (PROBLEMS, count)}, partial(case_of, problems))
    types = (replace(OURS, name=f"ours, {arguments.dtype}"), BF16)
    in_time = tuple(dict.fromkeys((*DECODERS[:-1], *WAYS, MEMORY, SERVED)))
    fill(f"timed-{arguments.seed}", {"timed": (in_time, timed), "types": (types, timed)}, draw, apart=True)
    return files


def case_of(problems: Sequence[humaneval.Problem], index: int) -> Case:
    """A problem as a document with the cursor in its hole."""
    problem = problems[index]
    case = Case.of(
        index,
        Document(problem.task_id, "python", "", problem.text),
        Authored("line", *problem.hole),
        "invoked",
        lambda document: humaneval.passes(problem.program(document)),
    )
    assert case is not None
    return case


def read(files: Mapping[str, Mapping[str, tuple[str, int]]], folder: Path, seed: int) -> Results:
    """The rows that `run` names. Raises `ValueError` where they are of different gaps, as after a change of how gaps
    are drawn."""

    def rows(suite: str) -> Rows:
        found = {}
        for name, (file, count) in files.get(suite, {}).items():
            filled = Store(folder / file, Filled).filled
            found[name] = [filled[i] for i in range(count)]
            if any(a.truth != b.truth for a, b in zip(found[name], next(iter(found.values())), strict=False)):
                raise ValueError(f"the gaps in {folder} are not all the same: run again with --fresh")
        return found

    problems = {subset: rows(subset) for subset in get_args(humaneval.Subset) if subset in files}
    tables = {name: rows(name) for name in ("decoders", "ways", "forced", "ablations", "types", "timed")}
    return Results(seed, **tables, problems=problems)


# The tables.


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return plot.table(header, rows) + "\n"


def of_decoders(decoders: Rows, timed: Rows) -> str:
    base = decoders[BASE.name]
    header = [
        "decoder",
        "exact",
        "exact, of the model",
        "similarity",
        "first line",
        "exact to the base's",
        "median ms",
    ]
    rows = []
    for name, filled in decoders.items():
        rows.append(
            [
                name,
                exact(filled),
                share(filled, lambda of: of.exact_model).percent(),
                alike(filled),
                share(filled, lambda of: of.first_line).percent(),
                against(filled, base, lambda of: of.exact),
                f"{statistics.median(of.ms for of in timed[name]):.0f}",
            ]
        )
    return table(header, rows)


def of_ways(ways: Rows, timed: Rows) -> str:
    """How many passes the same texts take."""
    first = next(iter(ways.values()))
    rows = []
    for name, filled in ways.items():
        rows.append(
            [
                name,
                exact(filled),
                share(list(zip(filled, first, strict=True)), lambda of: of[0].chosen == of[1].chosen).percent(),
                f"{statistics.fmean(of.steps for of in filled):.1f}",
                ratio([of.tokens for of in filled], [of.steps for of in filled]).number(),
                f"{statistics.median(of.ms for of in timed[name]):.0f}",
            ]
        )
    return table(["decoder", "exact", "same text as the first", "passes a gap", "tokens a pass", "median ms"], rows)


def first_of(rows: Rows, row: Row, count: int) -> Rows:
    """The first gaps of a row, if it is there."""
    return {row.name: rows[row.name][:count]} if row.name in rows else {}


def of_strata(
    what: str, decoders: Rows, stratum: Callable[[Filled], str], cell: Callable[[Sequence[Filled]], str]
) -> str:
    """`what` is in the cells, by stratum, the most frequent first."""
    counts = Counter(map(stratum, next(iter(decoders.values()))))
    names = [name for name, _ in counts.most_common()]
    rows = [["gaps", *(str(counts[name]) for name in names)]]
    for name, filled in decoders.items():
        rows.append([name, *(cell([of for of in filled if stratum(of) == part]) for part in names)])
    return table([what, *names], rows)


def exact(filled: Sequence[Filled]) -> str:
    return share(filled, lambda of: of.exact).percent()


def alike(filled: Sequence[Filled]) -> str:
    return ratio([of.similarity for of in filled]).number()


def passes_and_ms(filled: Sequence[Filled]) -> str:
    passes = statistics.fmean(of.steps for of in filled)
    return f"{passes:.1f}, {statistics.median(of.ms for of in filled):.0f} ms"


def ended(filled: Sequence[Filled]) -> str:
    return share(filled, lambda of: of.ended is True).percent()


def of_ends(forced: Rows, free: Rows) -> str:
    header = ["decoder", "end right", "of the model", "tokens right", "end right in its own text", "of gaps"]
    rows = []
    for name, filled in forced.items():
        own = [of.ended for of in free[name] if of.ended is not None]
        rows.append(
            [
                name,
                exact(filled),
                ended(filled),
                f"{sum(of.agreed or 0 for of in filled) / max(1, sum(of.forced or 0 for of in filled)):.1%}",
                ratio(own).percent() if own else "",
                str(len(own)),
            ]
        )
    return table(header, rows)


def of_variants(variants: Rows, timed: bool) -> str:
    """Variants of one decoder beside the first; timed: how long they take, too."""
    first = next(iter(variants.values()))
    rows = []
    for name, filled in variants.items():
        rows.append(
            [
                name,
                exact(filled),
                alike(filled),
                against(filled, first, lambda of: of.exact),
                share(list(zip(filled, first, strict=True)), lambda of: of[0].chosen == of[1].chosen).percent(),
                *([f"{statistics.median(of.ms for of in filled):.0f}"] if timed else []),
            ]
        )
    header = ["decoder", "exact", "similarity", "exact to the first's", "same text as the first"]
    return table([*header, *(["median ms"] if timed else [])], rows)


def of_problems(problems: Mapping[str, Rows]) -> str:
    rows = []
    for subset, decoders in problems.items():
        base = decoders[BASE.name]
        for name, filled in decoders.items():
            rows.append(
                [
                    subset,
                    str(len(filled)),
                    name,
                    share(filled, lambda of: of.passed is True).percent(),
                    against(filled, base, lambda of: of.passed is True),
                    exact(filled),
                ]
            )
    return table(["problems", "n", "decoder", "pass@1", "to the base's", "exact"], rows)


def made(of: Filled) -> str:
    return of.made


def language(of: Filled) -> str:
    return of.language


def kind(of: Filled) -> str:
    return of.kind


def length(of: Filled) -> str:
    """Of how many lines the truth is, Python apart."""
    if not (truth := of.truth.strip()):
        return "nothing is missing"
    where = "Python" if of.language == "python" else "others"
    return f"{where}, several lines" if "\n" in truth else f"{where}, one line"


def share(filled: Sequence[T], of: Callable[[T], bool]) -> Figure:
    return ratio([of(one) for one in filled])


def against(filled: Sequence[Filled], base: Sequence[Filled], of: Callable[[Filled], bool]) -> str:
    """How often one has what another has, paired."""
    figure = ratio([of(one) for one in filled], [of(one) for one in base])
    return "" if filled is base or math.isnan(figure.value) else figure.number()


@dataclass(frozen=True)
class Shown:
    """How much would be shown, by what decides it."""

    ways: Mapping[str, gate.Judged]
    #: The decision of the product, and the one that it has to beat.
    product: str
    rule: str

    @classmethod
    def of(cls, results: Results) -> Shown:
        texts = {
            "base with its suffix block": results.decoders[BASE_BLOCK.name],
            "base with its suffix block and the memory": results.decoders.get(BASE_MEMORY.name),
            "ours": results.decoders[OURS.name],
            "ours with the memory": results.decoders.get(MEMORY.name),
        }
        options = {name: [gate.Options.of(one) for one in filled] for name, filled in texts.items() if filled}
        ways = {
            f"{name}, {'gate' if by_gate else 'running product'}": gate.judge(of, gate=by_gate)
            for name, of in options.items()
            for by_gate in (False, True)
        }
        names = list(ways)
        return cls(ways, names[-1], names[0])

    def table(self) -> str:
        rows = []
        rule = self.ways[self.rule].saved
        for name, judged in self.ways.items():
            characters = [len(gap.filled.truth) for gap in judged.gaps]
            shown, right = [size > 0 for size in judged.sizes], [saved > 0 for saved in judged.saved]
            times = ratio(judged.saved, rule).number() if sum(rule) and name != self.rule else ""
            precision = ratio(right, shown).percent() if any(shown) else ""
            rows.append([name, ratio(shown).percent(), precision, ratio(judged.saved, characters).percent(), times])
        return table(
            ["what is shown", "gaps with text", "of these right", "characters saved", "to the first row"], rows
        )

    def calibration(self) -> str:
        rows = [
            [f"{weight:.0%}", f"{mean:.0%}", f"{right:.0%}"]
            for weight, mean, right in gate.calibration(self.ways[self.product])
        ]
        return table(["cuts", "said to be right", "right"], rows)

    def strata(self) -> tuple[str, list[str]]:
        """The product's decision by how gaps were made and by language, and where it is mostly silent."""
        judged = self.ways[self.product]
        rows, silent = [], []
        for what, stratum in (("made", made), ("kind", kind), ("language", language)):
            for name in sorted({stratum(gap.filled) for gap in judged.gaps}):
                inside = [i for i, gap in enumerate(judged.gaps) if stratum(gap.filled) == name]
                gaps, sizes = [judged.gaps[i] for i in inside], [judged.sizes[i] for i in inside]
                of = gate.point(gaps, sizes)
                whole = [gap.filled.exact for gap in gaps if len(gap.sizes)]
                rights = "" if math.isnan(of.precision) else f"{of.precision:.0%}"
                all_rights = f"{statistics.fmean(whole):.0%}" if whole else ""
                rows.append(
                    [f"{what} {name}", str(len(gaps)), f"{of.shown:.0%}", rights, f"{of.saved:.1%}", all_rights]
                )
                if of.shown < SILENT:
                    silent.append(f"{what} {name}")
        header = ["gaps", "n", "with text", "of these right", "characters saved", "right if all were shown"]
        return table(header, rows), silent

    def plot(self) -> str:
        lines = {
            name: [(of.precision, of.saved) for of in judged.curve if of.shown > 0.01]
            for name, judged in self.ways.items()
        }
        highest = max((y for points in lines.values() for _, y in points), default=0.0)
        step = next(step for step in (0.01, 0.02, 0.05, 0.1, 0.25) if highest <= 5 * step or step == 0.25)
        y_ticks = [step * i for i in range(math.ceil(highest / step - 1e-9) + 1)] if highest else [0.0, 0.01]
        x_ticks = [i / 10 for i in range(11)]
        return plot.curves(
            lines, "shown texts that are right", "characters saved", x_ticks, y_ticks, mark=gate.PRECISION
        )


def page(results: Results, shown: Shown) -> str:
    count = len(results.served)
    strata, silent = shown.strata()
    quiet = ", ".join(silent) if silent else "nowhere"
    parts = [
        f"""# Quality

Made by `python -m bench.quality --write`. Figures in brackets are 95% intervals, from a bootstrap of the gaps; ratios
are of the same gaps.

## Held-out gaps

{count} gaps, drawn by seed {results.seed} from documents of packages that no training saw, about half of them Python.
Each decoder is given what the product cuts out of the document around the cursor, and nothing of what stood there.
*Exact*: the product's edit makes the document that was, trailing space aside. *Exact, of the model*: its own text does,
at the end chosen for it. *Similarity*: 1 less the edit distance over the longer length. Times are of the first
{len(results.timed[BASE.name])} gaps, filled once more, decoder by decoder at each gap, with the context encoded before.
The base is the model before our training, which knows no tokens for infilling: *suffix as text* puts the lines after
the gap, then a blank line, above those before it. The weights with which the memory is mixed in were fitted on other
gaps of the same packages. *As far as an editor asks*: the text breaks off where it is less sure than anything that is
shown. A decoder that is missing is one that the model cannot do.
""",
        of_decoders(results.decoders, results.timed),
        "By how the gap was made, by its length, and by language:\n",
        *(of_strata("exact", results.decoders, by, exact) for by in (made, length, language)),
        *(of_strata("similarity", results.decoders, by, alike) for by in (made, language)),
        f"""## How soon it is there

The same texts, written one token a pass or several, which masks and look-up propose and the next pass confirms; of the
first {len(results.ways[OURS.name])} gaps, the memory's of as many. Below, over the gaps whose times were measured,
passes and milliseconds of all decoders.
""",
        of_ways({**results.ways, **first_of(results.decoders, MEMORY, len(results.ways[OURS.name]))}, results.timed),
        *(of_strata("passes, time", results.timed, by, passes_and_ms) for by in (made, language)),
        f"""## Where a text ends

Of the first {len(results.forced[OURS.name])} gaps. Here the truth is written for the model, token by token, as long
as it would not end before, and from its end on the model writes. A gap of one line ends with a line break, too. *End
right*: the edit makes the document that was. *Of the model*: its own text, at the end chosen for it, is the truth. *In
its own text*: of the texts above which are the truth, or begin with it, or are its beginning, those that are the truth.
""",
        of_ends(results.forced, results.decoders),
        *(of_strata("end right", results.forced, by, exact) for by in (made, length, language)),
        f"## What it is made of\n\nOf the first {len(results.ablations[OURS.name])} gaps.\n",
        of_variants(results.ablations, timed=False),
        "In other types, over the gaps whose times were measured:\n",
        of_variants(results.types, timed=True),
    ]
    if results.problems:
        parts += [
            """## HumanEval-Infilling

Problems of Bavarian et al. (arXiv 2207.14255). *pass@1*: the function with the edit in it passes its tests. The cursor
stands in the hole, at the start of an empty line where a line is missing.
""",
            of_problems(results.problems),
        ]
    parts += [
        f"""## What is shown

A text may be cut before it is shown. *Right*: the truth begins with what is shown. *Saved*: characters of right
texts, of all characters of the gaps. The running product cuts a text where the product of its tokens' probabilities
falls below a threshold; the gate (`infill_lsp/confidence.py`) takes the cut that promises most. Both are fitted on
half of the packages to be right {gate.PRECISION:.0%} of the time, and judged on the other half.

![Characters saved by precision](quality.svg)
""",
        shown.table(),
        "What the gate says of its cuts, and what they are:\n",
        shown.calibration(),
        f"""Where it is silent. *Right if all were shown*: exact edits, of those that there are. Text is offered in less
than {SILENT:.0%} of the gaps of: {quiet}.
""",
        strata,
    ]
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.quality", description=__doc__)
    parser.add_argument("--gaps", type=int, default=GAPS)
    parser.add_argument("--problems", type=int, help="of each set, drawn by the seed; 0: none (default: all)")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--model", default="embedded", help="ours (default: %(default)s)")
    parser.add_argument("--dtype", default=smollm.cpu_dtypes()[-1], help="type that the models are served in")
    parser.add_argument("--threads", type=int, default=0, help="of one pass (default: as the engine chooses)")
    parser.add_argument("--jobs", type=int, default=1, help="gaps that are filled at a time (default: %(default)s)")
    parser.add_argument("--corpus", type=Path, default=cache_dir() / "corpus", help="folder of `infill-engine corpus`")
    parser.add_argument("--data", type=Path, default=humaneval.data_dir(), help="folder of data sets")
    parser.add_argument("--cached", action="store_true", help="make the tables of the last run again")
    parser.add_argument("--fresh", action="store_true", help="forget what earlier runs have kept")
    parser.add_argument("--write", action="store_true", help="write the page, the plot and the gate, too")
    arguments = parser.parse_args()
    folder = cache_dir() / "bench" / "quality"
    last = folder / "last.json"
    try:
        if arguments.fresh:
            shutil.rmtree(folder, ignore_errors=True)
        if not arguments.cached:
            if arguments.jobs > 1:
                with ProcessPoolExecutor(arguments.jobs, get_context("spawn")) as pool:
                    list(pool.map(partial(run, arguments), range(arguments.jobs)))
            files = run(arguments)
            last.write_text(json.dumps({"seed": arguments.seed, "files": files}), encoding="utf-8")
        kept = json.loads(last.read_text(encoding="utf-8"))
        results = read(kept["files"], folder, kept["seed"])
    except (FileNotFoundError, ValueError, ModelError) as error:
        raise SystemExit(str(error)) from None
    shown = Shown.of(results)
    text = page(results, shown)
    print(f"\n{text}")
    if arguments.write:
        PAGE.write_text(text, encoding="utf-8")
        PLOT.write_text(shown.plot(), encoding="utf-8")
        fitted = gate.final(shown.ways[shown.product].gaps)
        FITTED.write_bytes(msgspec.json.format(msgspec.json.encode(fitted)) + b"\n")


if __name__ == "__main__":
    main()
