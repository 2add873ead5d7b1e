"""Where the server meets its one editor: stdin and stdout, or a TCP port of this machine.

Knows streams and who may connect, neither messages nor documents.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import stat
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from pygls.io_ import StdoutWriter, run_async

if TYPE_CHECKING:
    from pygls.io_ import AsyncWriter, Writer

    from infill_lsp.server import InfillServer

log = logging.getLogger(__name__)

#: The only address served over TCP.
HOST = "127.0.0.1"


async def serve_stdio(server: InfillServer) -> None:
    """Serves the editor at the other end of stdin and stdout, until it goes.

    Raises `ValueError` if stdin is nothing an editor can be at the other end of, such as a file.
    """
    mode = os.fstat(sys.stdin.fileno()).st_mode
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or sys.stdin.isatty()):
        raise ValueError("stdin is no pipe")
    reader = _MessageReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin.buffer)
    writer = StdoutWriter(sys.stdout.buffer)
    with contextlib.redirect_stdout(sys.stderr):  # A stray print would be taken for a message.
        await _serve(server, reader, writer)


async def serve_tcp(server: InfillServer, port: int, listening: Callable[[int], None]) -> None:
    """Serves the first editor that connects to `port` of this machine (0: any), until it goes.

    `listening` is told the port. Further editors are turned away: a server holds one editor's documents.
    Raises `OSError` if the port cannot be had.
    """
    loop = asyncio.get_running_loop()
    first: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = loop.create_future()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if first.done():
            log.warning("another editor was turned away: it needs an infill-lsp of its own")
            writer.close()
        else:
            first.set_result((reader, writer))

    listener = await loop.create_server(lambda: asyncio.StreamReaderProtocol(_MessageReader(), accept), HOST, port)
    listening(listener.sockets[0].getsockname()[1])
    try:
        await _serve(server, *await first)
    finally:
        listener.close()


async def _serve(server: InfillServer, reader: asyncio.StreamReader, writer: AsyncWriter | Writer) -> None:
    server.protocol.set_writer(writer)
    asyncio.get_running_loop().set_exception_handler(partial(_note, server))
    try:
        await run_async(threading.Event(), reader, server.protocol, log, server.report_server_error)
    except (asyncio.IncompleteReadError, ConnectionError):
        log.warning("the editor went away in the middle of a message")
    finally:
        await server.leave()


def _note(server: InfillServer, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """A fault that nobody waits for goes to the log as ours do: asyncio would write what it was called with."""
    error = context.get("exception")
    # anyio's, wherever a question is taken back in the moment in which its answer comes.
    if isinstance(error, Exception) and not isinstance(error, asyncio.InvalidStateError):
        server.report_fault(error)


class _MessageReader(asyncio.StreamReader):
    """Lets each message take effect before the next is read.

    pygls runs a request's handler as a task. Were the next message here already, say an edit, it would be
    handled before that task's first step, and the snapshot would be of a text other than the request's.
    """

    async def readline(self) -> bytes:
        await asyncio.sleep(0)
        return await super().readline()
