"""The command `infill-lsp`: the server on stdio or TCP, and `doctor`. Words and exit codes, no other logic.

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
from typing import NoReturn

from infill_lsp import __version__


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        return _doctor(options) if options.command == "doctor" else _serve(options)
    except KeyboardInterrupt:
        return 130


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
    doctor.add_argument("--model", default="embedded", help="as infill.model (default: %(default)s)")
    doctor.add_argument("--python", default=sys.executable, help="as infill.engine.python (default: this one)")
    return parser


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text} is no port: give a number from 0 to 65535")
    return int(text)


def _serve(options: argparse.Namespace) -> int:
    # The classes of lsprotocol stay for good: to collect among them costs a tenth of the time to start.
    gc.disable()
    from infill_lsp.server import create_server, serve_stdio, serve_tcp, set_log_level

    gc.freeze()
    gc.enable()
    set_log_level(options.log_level)
    if options.tcp is not None:
        try:
            asyncio.run(serve_tcp(create_server(), options.tcp, _announce))
        except OSError as error:
            return _fail(_unheard(options.tcp, error), 2)
        return 0
    if sys.stdin.isatty():
        print("infill-lsp speaks LSP on stdin, with an editor: see infill-lsp --help", file=sys.stderr)
    try:
        asyncio.run(serve_stdio(create_server()))
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


def _doctor(options: argparse.Namespace) -> int:
    from infill_lsp.doctor import examine

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # A terminal without check marks gets question marks.
    return 0 if asyncio.run(examine(options.model, options.python)) else 1


def _fail(message: str, code: int) -> int:
    print(f"infill-lsp: {message}", file=sys.stderr)
    return code
