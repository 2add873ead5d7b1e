"""An engine's socket whose answers a test writes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

from infill_engine import protocol

Answer = Callable[[str, bytes, asyncio.StreamWriter], Awaitable[None]]


class Peer:
    """An HTTP server on the engine's socket; `answer(target, body, writer)` writes what it likes."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.targets: list[str] = []
        self.connections = 0
        self.bodies: list[bytes] = []

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                length = head.partition("content-length: ")[2].partition("\r\n")[0]
                body = await reader.readexactly(int(length or 0))
                target = head.split(" ")[1]
                self.targets.append(target)
                self.bodies.append(body)
                await self.answer(target, body, writer)
        writer.close()


@contextlib.asynccontextmanager
async def listening(answer: Answer) -> AsyncIterator[Peer]:
    peer = Peer(answer)
    server = await asyncio.start_unix_server(peer, protocol.socket_path("m"))
    try:
        yield peer
    finally:
        server.close()
        protocol.socket_path("m").unlink(missing_ok=True)


async def plain(writer: asyncio.StreamWriter, body: bytes, status: str = "200 OK") -> None:
    writer.write(f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
    await writer.drain()
