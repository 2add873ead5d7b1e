"""The command `infill-engine`: serves, tells, chooses, fetches, trains. Words and exit codes, no more.

Exit codes: 0 done, 1 a fault (one line on stderr), 2 wrong usage.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.table import Table

from infill_engine import catalogue, process
from infill_engine.config import DECODINGS, EngineConfig
from infill_engine.core import ModelError
from infill_engine.fetch import FetchError, Report, ensure_weights
from infill_engine.protocol import cache_dir

_KEY_VARIABLE = "INFILL_API_KEY"
#: Columns of a table that a terminal may wrap rather than that paths are cut off.
_WIDE = 240
#: Seconds between two looks at an engine that is starting.
_LOOK_S = 0.1


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except (FetchError, ModelError, process.EngineError, OSError) as error:
        return _fail(str(error), 1)
    except ValueError as error:
        return _fail(str(error), 2)
    except KeyboardInterrupt:
        return 130


class _Parser(argparse.ArgumentParser):
    """argparse, but wrong usage is one line."""

    def error(self, message: str) -> NoReturn:
        raise SystemExit(_fail(f"{message} (see {self.prog} --help)", 2))


def _parser() -> argparse.ArgumentParser:
    default = EngineConfig()
    parser = _Parser(prog="infill-engine", description="The resident engine that fills gaps in code.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    model = _Parser(add_help=False)
    model.add_argument("--model", default=default.model, help="the model to serve (default: %(default)s)")

    serve = commands.add_parser("serve", parents=[model], help="run until idle; editors start this on demand")
    serve.add_argument("--device", default=default.device, help="auto, cpu, cuda, ... (default: %(default)s)")
    serve.add_argument("--dtype", default=default.dtype, help="auto, fp32, bf16, int8, ... (default: %(default)s)")
    serve.add_argument("--threads", type=int, default=default.threads, help="CPU threads; 0: up to four cores")
    serve.add_argument(
        "--decoding",
        default=default.decoding,
        help=f"of models that see both sides, what a pass makes final: {', '.join([*DECODINGS, 'steps:N'])} "
        "(default: %(default)s)",
    )
    serve.add_argument(
        "--refresh-passes",
        type=int,
        metavar="N",
        help="of those, compute the context's keys and values in every Nth pass; more than 1 is not exact "
        "(default: as suits the device, 1 on a GPU, once a request on a CPU)",
    )
    serve.add_argument(
        "--dual-cache",
        action=argparse.BooleanOptionalAction,
        help="between those passes keep those of the suffix, too (default: on a CPU)",
    )
    serve.add_argument(
        "--reuse-context",
        action=argparse.BooleanOptionalAction,
        help="begin with the last request's; not exact (default: on a CPU)",
    )
    serve.add_argument(
        "--idle-exit",
        type=float,
        metavar="SECONDS",
        help=f"end after so long without a request (default: {default.idle_exit_s:.0f}; with --http or --listen never)",
    )
    serve.add_argument(
        "--idle-release",
        type=float,
        default=default.idle_release_s,
        metavar="SECONDS",
        help="give the model's memory back after so long without a request (default: %(default).0f)",
    )
    serve.add_argument("--http", default="", metavar="ADDRESS:PORT", help="also serve other plugins, on loopback only")
    serve.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help=f"what they have to send as a bearer token (default: the variable {_KEY_VARIABLE}, if set)",
    )
    serve.add_argument(
        "--listen",
        default="",
        metavar="ADDRESS:PORT",
        help="also serve your editors on other machines: behind a tunnel on loopback, or with a certificate",
    )
    serve.add_argument("--token-file", type=Path, metavar="FILE", help="what those editors have to send")
    serve.add_argument("--tls-cert", default="", metavar="FILE", help="the certificate of --listen, in PEM")
    serve.add_argument("--tls-key", default="", metavar="FILE", help="its key")
    serve.set_defaults(run=_serve)
    commands.add_parser("status", parents=[model], help="show what is running").set_defaults(run=_status)
    top = commands.add_parser("top", parents=[model], help="watch what is running, once a second, until Ctrl-C")
    top.add_argument("--once", action="store_true", help="print one frame and end")
    top.set_defaults(run=_top)
    commands.add_parser("stop", parents=[model], help="finish live requests and end").set_defaults(run=_stop)
    models = commands.add_parser("models", help="list the models that are known, and which one suits this machine")
    models.add_argument("places", nargs="*", type=Path, metavar="PATH", help="where to look for checkpoints, too")
    models.add_argument("--json", action="store_true", help="print it as JSON")
    models.add_argument("--device", default=default.device, help="as of `serve` (default: %(default)s)")
    models.set_defaults(run=_models)
    use = commands.add_parser("use", help="choose the model; an engine that runs goes over to it once it is loaded")
    use.add_argument("name", help="as `models` lists it, a folder, a .gguf file, or a hub id such as who/what[:Q8_0]")
    use.set_defaults(run=_use)
    fetch = commands.add_parser("fetch", help="download a model, which needs no network then")
    fetch.add_argument("name", nargs="?", default=catalogue.EMBEDDED, help="as for `use` (default: %(default)s)")
    fetch.set_defaults(run=_fetch)
    corpus = commands.add_parser("corpus", help="build the text that the embedded model is trained on")
    corpus.add_argument("--manifest", type=Path, metavar="FILE", help="the packages (default: the project's own)")
    corpus.add_argument("--out", type=Path, metavar="DIR", help=f"where to build (default: {cache_dir() / 'corpus'})")
    corpus.add_argument("--dry-run", action="store_true", help="check the manifest and list what would be fetched")
    corpus.set_defaults(run=_corpus)
    train = commands.add_parser("train", help="train an adapter of the embedded model; run again to go on")
    train.add_argument("--gaps", type=Path, required=True, metavar="FILE", help="to learn from: see `infill-lsp gaps`")
    train.add_argument("--held", type=Path, required=True, metavar="FILE", help="to measure with: those held out")
    train.add_argument("--out", type=Path, required=True, metavar="DIR", help="for checkpoints, the log, the adapter")
    train.add_argument("--minutes", type=float, required=True, help="of training in all, over all starts")
    train.add_argument("--decay", type=float, default=0.0, metavar="MINUTES", help="at the end, with a falling rate")
    train.add_argument("--start", type=Path, metavar="FILE", help="an adapter from which a new run goes on")
    train.add_argument("--share", type=float, default=1.0, help="of that one's updates (default: %(default)s)")
    train.add_argument("--rank", type=int, default=32, help="of the updates (default: %(default)s)")
    train.add_argument("--lr", type=float, default=4e-4, help="the learning rate (default: %(default)s)")
    train.add_argument("--windows", type=int, default=2, help="a step (default: %(default)s)")
    train.add_argument(
        "--average", type=int, default=200, metavar="STEPS", help="whose parameters are averaged (default: %(default)s)"
    )
    train.add_argument("--seed", type=int, default=1, help="of all that is drawn (default: %(default)s)")
    train.add_argument("--device", default="auto", help="auto, cpu, cuda, ... (default: %(default)s)")
    train.add_argument("--threads", type=int, default=0, help="CPU threads; 0: one a core")
    train.set_defaults(run=_train)
    return parser


def _serve(options: argparse.Namespace) -> int:
    if options.api_key_file and not options.http:
        raise ValueError("--api-key-file is for --http: give both")
    if bool(options.token_file) != bool(options.listen):
        raise ValueError("--listen and --token-file are for each other: give both")
    # Nothing but a person starts such an engine again.
    idle_exit_s = math.inf if options.http or options.listen else EngineConfig().idle_exit_s
    config = EngineConfig(
        model=options.model,
        device=options.device,
        dtype=options.dtype,
        threads=options.threads,
        decoding=options.decoding,
        refresh_passes=options.refresh_passes,
        dual_cache=options.dual_cache,
        reuse_context=options.reuse_context,
        idle_release_s=options.idle_release,
        idle_exit_s=idle_exit_s if options.idle_exit is None else options.idle_exit,
        http=options.http,
        api_key=_api_key(options.api_key_file) if options.http else "",
        listen=options.listen,
        token=_line_of(options.token_file) if options.listen else "",
        tls_cert=options.tls_cert,
        tls_key=options.tls_key,
    )
    code = 0

    def failed(line: str) -> None:
        nonlocal code
        code = _fail(line, 1)

    def listening(url: str) -> None:
        print(f"infill-engine: serving {url}", flush=True)

    if holder := process.serve(config, failed, listening):
        if asked := " and ".join(name for name in ("http", "listen") if getattr(config, name)):
            stop = f"stop it first (`infill-engine stop --model {config.model}`)"
            return _fail(f"{holder}, without --{asked}: {stop}", 1)
        print(f"infill-engine: {holder}")
    return code


def _api_key(file: Path | None) -> str:
    return _line_of(file) if file else _checked(os.environ.get(_KEY_VARIABLE, ""))


def _line_of(file: Path) -> str:
    """The key or token that a file holds."""
    key = file.read_text(encoding="utf-8").strip()
    if not key:
        raise ValueError(f"{file} holds no key")
    return _checked(key)


def _checked(key: str) -> str:
    if not key.isascii() or not key.isprintable():
        raise ValueError("a key is one line of ASCII characters")
    return key


def _status(options: argparse.Namespace) -> int:
    status = process.status(options.model)
    if status is None:
        print(f"infill-engine: no engine serves {options.model}")
        return 0
    state = status.state if status.progress is None else f"{status.state} ({status.progress:.0%})"
    rows = {
        "model": status.model,
        "state": f"{state}: {status.message}" if status.message else state,
        "device": f"{status.device} {status.dtype} {status.kernels}".strip(),
        "process": f"{status.pid}, up {timedelta(seconds=round(status.uptime_s))}",
        "requests": f"{status.requests}, {status.live} live",
        "memory": f"{status.rss_bytes / 2**20:.0f} MiB, {status.cache_bytes / 2**20:.0f} MiB of them cached contexts",
        "version": f"{status.version}, protocol {status.protocol}",
    }
    table = Table.grid(padding=(0, 2))
    for name, value in rows.items():
        table.add_row(name, value)
    Console(highlight=False, markup=False).print(table)
    return 0


def _top(options: argparse.Namespace) -> int:
    from infill_engine import top

    return top.watch(options.model, Console(highlight=False, markup=False), once=options.once)


def _stop(options: argparse.Namespace) -> int:
    ended = process.stop(options.model)
    print(f"infill-engine: {ended or f'no engine serves {options.model}'}")
    return 0


def _models(options: argparse.Namespace) -> int:
    from infill_engine import models
    from infill_engine.families import families

    found = catalogue.listing(models.machine(options.device), families(), options.places)
    if options.json:
        print(json.dumps(found))
        return 0
    table = Table(box=None, pad_edge=False)
    for name in ("", "model", "parameters", "licence", "context", "form", "size", "needs", "here"):
        table.add_column(name, no_wrap=True)
    for model in found["models"]:
        for number, file in enumerate(model["files"]):
            name = model["name"] if number == 0 else f"{model['name']}:{file['form']}"
            facts = (_short(model["parameters"]), model["licence"], str(model["context"])) if number == 0 else ("",) * 3
            marks = ("*" if name == found["recommended"] else "") + (">" if name == found["chosen"] else "")
            needs = (
                _gigabytes(file["needs_bytes"]) if file["fits"] else f"does not fit: {_gigabytes(file['needs_bytes'])}"
            )
            here = file["fault"] or file["path"] or ("" if model["served"] else "not served yet")
            table.add_row(marks, name, *facts, file["form"], _gigabytes(file["bytes"]), needs, here)
    for one in found["others"]:
        mark = ">" if found["chosen"] in (one["path"], one["hub"]) else ""
        kind, here = one["architecture"] or "GGUF", one["fault"] or one["path"]
        table.add_row(mark, one["hub"], "", "", "", kind, _gigabytes(one["bytes"]), "", here)
    console = Console(highlight=False, markup=False, width=_WIDE)
    console.print(f"This machine: {found['machine']['line']}")
    console.print(table)
    console.print("* suits this machine   > is chosen: `infill-engine use NAME` chooses another")
    return 0


def _use(options: argparse.Namespace) -> int:
    name = _full(options.name)
    with _reporting() as report:
        status = process.status(catalogue.AUTO)
        while status is not None and status.state in ("starting", "fetching"):
            report(status.message, status.progress)
            time.sleep(_LOOK_S)
            status = process.status(catalogue.AUTO)
        if status is not None and status.state == "error":  # it serves none, and ends soon
            process.stop(catalogue.AUTO)
            status = None
        if status is not None and process.change(name, report):
            print(f"infill-engine: {name} answers now")
            return 0
        from infill_engine import models

        models.located(name, report)
    catalogue.choose(name)
    print(f"infill-engine: {name} is chosen, and will be loaded with the next start")
    return 0


def _full(name: str) -> str:
    """A path in full, since the engine does not run where this command does."""
    whole, form = catalogue.rounding(name)
    path = Path(whole).expanduser()
    if path.is_dir() or (path.suffix == ".gguf" and path.exists()):
        return f"{path.resolve()}:{form}" if form else str(path.resolve())
    return name


def _short(parameters: int) -> str:
    return f"{parameters / 1e9:.1f}B" if parameters >= 10**9 else f"{parameters / 1e6:.0f}M"


def _gigabytes(size: int) -> str:
    return f"{size / catalogue.GB:.1f} GB"


def _fetch(options: argparse.Namespace) -> int:
    with _reporting() as report:
        if options.name == catalogue.EMBEDDED:
            path: Path | None = ensure_weights(report)
        else:
            from infill_engine import models

            path = models.located(_full(options.name), report)
    print(path or f"infill-engine: {options.name} needs no weights")
    return 0


def _corpus(options: argparse.Namespace) -> int:
    from infill_engine.training import corpus

    manifest = corpus.load_manifest(options.manifest or corpus.MANIFEST)
    folder: Path = options.out or cache_dir() / "corpus"
    if options.dry_run:
        missing = corpus.missing(manifest, folder)
        for package in missing:
            print(f"{package.registry} {package.name} {package.version}")
        print(f"infill-engine: {len(missing)} of {len(manifest.packages)} archives to fetch into {folder}")
        return 0
    with _reporting() as report:
        built = corpus.build(manifest, folder, report)
    header, *rows = built.rows()
    table = Table(box=None, pad_edge=False)
    for number, name in enumerate(header):
        table.add_column(name, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    Console(highlight=False, markup=False).print(table)
    return 0


def _train(options: argparse.Namespace) -> int:
    from infill_engine.training import train

    with _reporting() as report:
        path = ensure_weights(report)
    config = train.TrainConfig(
        minutes=options.minutes,
        decay_minutes=options.decay,
        rank=options.rank,
        lr=options.lr,
        windows=options.windows,
        average=1 - 1 / max(options.average, 1),
        seed=options.seed,
    )
    files = options.gaps, options.held, options.out
    train.run(path, *files, config, options.device, options.threads, options.start, options.share)
    return 0


@contextlib.contextmanager
def _reporting() -> Iterator[Report]:
    """A progress bar on a terminal, else a line whenever the message changes; on stderr."""
    console = Console(stderr=True, highlight=False, markup=False)
    if not console.is_terminal:
        said = ""

        def tell(message: str, _: float | None) -> None:
            nonlocal said
            if message != said:
                said = message
                print(message, file=sys.stderr)

        yield tell
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda message, progress: bar.update(task, description=message, completed=progress or 0.0)


def _fail(message: str, code: int) -> int:
    print(f"infill-engine: {message}", file=sys.stderr)
    return code
