"""The command `infill-lsp`: the server on stdio or TCP, `doctor`, `fill` and more. Words and exit codes alone.

On stdio, stdout is the protocol's alone; what is for people goes to stderr. Exit codes: 0 done, 1 a fault,
2 wrong usage or a port that cannot be had.
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import gc
import io
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from infill_lsp import __version__

#: Seconds after which a thread that computes lets the message loop go on: a round took 0.7 ms then.
SWITCH_S = 0.0005


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        commands = {
            "doctor": _doctor,
            "context": _context,
            "fill": _fill,
            "gaps": _gaps,
            "settings": _settings,
            "stats": _stats,
        }
        code = commands.get(options.command, _serve)(options)
        if options.command is not None:
            sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # Whoever read it has seen enough; what is left may go nowhere at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


class _Parser(argparse.ArgumentParser):
    """argparse, but wrong usage is one line."""

    def error(self, message: str) -> NoReturn:
        raise SystemExit(_fail(f"{message} (see {self.prog} --help)", 2))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="infill-lsp", description="Code infilling as a language server; editors start it.")
    parser.add_argument("--version", action="version", version=f"infill-lsp {__version__}")
    transport = parser.add_mutually_exclusive_group()
    transport.add_argument("--stdio", action="store_true", help="speak LSP on stdin and stdout (the default)")
    transport.add_argument(
        "--tcp",
        type=_port,
        nargs="?",
        const=0,
        metavar="PORT",
        help="speak LSP with the first editor that connects to this port of 127.0.0.1 (default: a free one)",
    )
    levels = ("error", "warning", "info", "debug")
    parser.add_argument("--log-level", choices=levels, default="warning", help="on stderr (default: %(default)s)")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    doctor = commands.add_parser("doctor", help="check the installation with a real completion")
    doctor.add_argument("--model", help="as infill.model (default: what infill.toml says)")
    doctor.add_argument("--python", help="as infill.engine.python (default: what infill.toml says)")
    settings = commands.add_parser("settings", help="show what is set for a folder, and where; but for the editor's")
    settings.add_argument("folder", type=Path, nargs="?", default=Path(), help="a workspace folder (default: this one)")
    commands.add_parser("stats", help="show what was offered and accepted on this machine, day by day")
    context = commands.add_parser("context", help="show what a completion at a place is made from, and why")
    context.add_argument("place", metavar="FILE:LINE:COL", help="from 1, as editors show them")
    context.add_argument("--folder", metavar="DIR", help="the workspace folder (default: the nearest project)")
    fill = commands.add_parser("fill", help="fill the holes of a file, or write some lines of it anew")
    fill.add_argument("file", type=Path, metavar="FILE")
    places = fill.add_mutually_exclusive_group(required=True)
    places.add_argument("--holes", action="store_true", help="fill `...`, `???`, TODO and what else marks a hole")
    places.add_argument("--line", type=_positive, metavar="A", help="write the lines from this one anew, from 1")
    fill.add_argument("--to", type=_positive, metavar="B", help="the last of these lines (default: the first)")
    result = fill.add_mutually_exclusive_group()
    result.add_argument("--diff", action="store_true", help="print what changes as a unified diff (the default)")
    result.add_argument("--write", action="store_true", help="change the file")
    fill.add_argument("--model", help="as infill.model (default: what is set)")
    gaps = commands.add_parser("gaps", help="cut gaps out of the corpus, to train and measure the embedded model with")
    gaps.add_argument("--corpus", type=Path, required=True, metavar="DIR", help="what `infill-engine corpus` wrote")
    gaps.add_argument("--split", choices=("train", "held"), required=True)
    gaps.add_argument("--windows", type=_positive, required=True, metavar="N", help="pieces of documents to write")
    gaps.add_argument("--seed", type=int, required=True, help="the same one gives the same file")
    gaps.add_argument("--out", type=Path, required=True, metavar="FILE", help="JSON lines, gzipped")
    gaps.add_argument("--gaps", type=_positive, default=12, metavar="N", help="a window (default: %(default)s)")
    gaps.add_argument(
        "--snippets",
        type=_share,
        default=0.3,
        metavar="SHARE",
        help="windows that get a piece of another file, from 0 to 1 (default: %(default)s)",
    )
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text} is no number: give 1 or more")
    return int(text)


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise argparse.ArgumentTypeError(f"{text} is no share: give a number from 0 to 1")
    return share


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text} is no port: give a number from 0 to 65535")
    return int(text)


def _serve(options: argparse.Namespace) -> int:
    # The classes of lsprotocol stay for good: to collect among them costs a tenth of the time to start.
    gc.disable()
    # By Python's usual 5 ms a round of the message loop took 6 while the index cut an open document of 5,000 lines.
    sys.setswitchinterval(SWITCH_S)
    from infill_lsp.server import create_server, set_log_level
    from infill_lsp.transport import serve_stdio, serve_tcp

    gc.freeze()
    gc.enable()
    set_log_level(options.log_level)
    if options.tcp is not None:
        try:
            asyncio.run(serve_tcp(create_server(options.log_level), options.tcp, _announce))
        except OSError as error:
            return _fail(_unheard(options.tcp, error), 2)
        return 0
    if sys.stdin.isatty():
        print("infill-lsp speaks LSP on stdin, with an editor: see infill-lsp --help", file=sys.stderr)
    try:
        asyncio.run(serve_stdio(create_server(options.log_level)))
    except ValueError as error:
        return _fail(f"{error}: an editor starts this, see infill-lsp --help", 2)
    return 0


def _unheard(port: int, error: OSError) -> str:
    """Why nothing listens on the port; asyncio's own words repeat the address and the number of the error."""
    if error.errno == errno.EADDRINUSE:
        return f"port {port} of 127.0.0.1 is in use: choose another, or 0 for any free one"
    why = os.strerror(error.errno) if error.errno else str(error)
    return f"cannot listen on port {port} of 127.0.0.1 ({why}): choose another, or 0 for any free one"


def _announce(port: int) -> None:
    print(f"infill-lsp: listening on 127.0.0.1:{port}", file=sys.stderr, flush=True)


def _stats(_: argparse.Namespace) -> int:
    from infill_lsp.statistics import database, report

    _print_what_can_be_printed()
    print(report(database()))
    return 0


def _doctor(options: argparse.Namespace) -> int:
    import msgspec

    from infill_lsp.doctor import examine
    from infill_lsp.sources import Sources

    sources = Sources.of_files()
    settings = sources.general
    if options.model is not None:
        settings = msgspec.structs.replace(settings, model=options.model)
    if options.python is not None:
        settings = msgspec.structs.replace(
            settings, engine=msgspec.structs.replace(settings.engine, python=options.python)
        )
    _print_what_can_be_printed()
    return 0 if asyncio.run(examine(settings, sources.problems)) else 1


def _settings(options: argparse.Namespace) -> int:
    import json

    from infill_lsp.sources import Sources

    if not options.folder.is_dir():
        return _fail(f"{options.folder} is no folder", 2)
    folder = options.folder.resolve().as_uri()
    effective = Sources.of_files(folder).effective(folder)
    rows = [
        (".".join(key), json.dumps(value, ensure_ascii=False), effective.sources[key])
        for key, value in effective.values.items()
    ]
    widths = [max(map(len, column)) for column in list(zip(*rows, strict=True))[:2]]
    for name, shown, source in rows:
        print(f"{name:{widths[0]}}  {shown:{widths[1]}}  {source}")
    for problem in effective.problems:
        print(f"! {problem}", file=sys.stderr)
    return 1 if effective.problems else 0


def _context(options: argparse.Namespace) -> int:
    from infill_lsp.context import ContextError, Place, explain

    _print_what_can_be_printed()
    try:
        print(explain(Place.parse(options.place), options.folder))
    except ContextError as error:
        return _fail(str(error), 1)
    return 0


def _fill(options: argparse.Namespace) -> int:
    from infill_lsp.patch import PatchError, patched

    if options.holes and options.to:
        return _fail("--to goes with --line", 2)
    rows = None if options.holes else (options.line - 1, (options.to or options.line) - 1)
    last = ""

    def said(words: str) -> None:
        nonlocal last
        if words != last:
            print(f"infill-lsp: {words}", file=sys.stderr)
            last = words

    try:
        patch = patched(options.file, rows, options.model, said)
        if options.write:
            patch.write()
    except PatchError as error:
        return _fail(str(error), 1)
    if not options.write:
        sys.stdout.buffer.write(patch.diff)
        sys.stdout.buffer.flush()
    return 0


def _gaps(options: argparse.Namespace) -> int:
    from random import Random

    from infill_lsp.gaps import Corpus, GapsError, windows, write

    try:
        corpus = Corpus(options.corpus, options.split)
        write(options.out, windows(corpus, Random(options.seed), options.windows, options.gaps, options.snippets))
    except GapsError as error:
        return _fail(str(error), 1)
    except OSError as error:
        return _fail(f"cannot write {options.out} ({error.strerror}): choose another --out", 1)
    return 0


def _print_what_can_be_printed() -> None:
    """A terminal without check marks gets question marks."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _fail(message: str, code: int) -> int:
    print(f"infill-lsp: {message}", file=sys.stderr)
    return code
