"""An engine on another machine, or at the other end of a tunnel: reached at an address, with a token.

It is neither started nor ended from here, and its model is its own. What is typed goes to it: over TLS, or to a
loopback address, behind which a tunnel does the same.
"""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import os
import platform
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import httpcore
from infill_engine.protocol import Status

from infill_lsp.client import KEEP_ALIVE_S, POLL_S, EngineClient, EngineError
from infill_lsp.settings import Settings


def engine_of(settings: Settings) -> EngineClient:
    """The engine that is set."""
    engine = settings.engine
    if engine.address:
        return RemoteEngine(engine.address, engine.token_file)
    return EngineClient(settings.model, engine.interpreter, settings.device)


class RemoteEngine(EngineClient):
    """The engine at `address`, http://HOST:PORT or https://HOST:PORT, with the token that `token_file` holds."""

    def __init__(self, address: str, token_file: str) -> None:
        super().__init__(model="")
        self._address = address.rstrip("/")
        self._url = f"{self._address}/v1"
        self._token_file = token_file
        self._token = ""

    async def bring_up(self) -> AsyncIterator[Status]:
        """Yields its status every 0.1 s until it is "ready" or "error". Raises `EngineError` where none answers."""
        while True:
            status = await self.status()
            if status is None:
                raise EngineError(
                    f"no engine answers at {self._address}: start it there with `infill-engine serve --listen`, "
                    "or look after the tunnel"
                )
            yield status
            if status.state in ("ready", "error"):
                return
            await asyncio.sleep(POLL_S)

    async def stop(self) -> None:
        raise EngineError(f"the engine at {self._address} is not ended from here: {self._end_it}")

    @property
    def _headers(self) -> dict[bytes | str, bytes | str]:
        if not self._token:
            self._token = self._read_token()
        return {**super()._headers, "authorization": f"Bearer {self._token}"}

    @property
    def _end_it(self) -> str:
        return f"update it, or end it, where it runs ({self._address})"

    def _workspace(self, name: str) -> str:
        """Two machines may have a folder at the same path."""
        return name and hashlib.sha256(f"{platform.node()}:{name}".encode(errors="replace")).hexdigest()[:32]

    def _look_into(self, error: Exception) -> None:
        reason = error.__context__
        if isinstance(reason, ssl.SSLCertVerificationError):
            why = reason.verify_message
            raise EngineError(
                f"the certificate of {self._address} is not trusted ({why}): name its issuer's in SSL_CERT_FILE"
            ) from None
        if isinstance(reason, ssl.SSLError):
            raise EngineError(f"{self._address} does not speak TLS: set infill.engine.address to http://…") from None

    def _refusal(self, code: int, body: bytes) -> str:
        if code == 401:
            self._token = ""  # It may be another next time.
            return f"the engine at {self._address} does not know the token in {self._token_file}: give its own"
        return super()._refusal(code, body)

    def _pool(self) -> httpcore.AsyncConnectionPool:
        if self._connections is None:
            try:
                parts = urlsplit(self._address)
                httpcore.URL(self._url)
            except (TypeError, ValueError):  # A port that is none, or a host that is not written in ASCII.
                raise EngineError(f"{self._address} is no address: set infill.engine.address to http://…") from None
            if parts.scheme == "http" and not _is_loopback(parts.hostname or ""):
                raise EngineError(f"{self._address} is on another machine: set infill.engine.address to https://…")
            tls = ssl.create_default_context() if parts.scheme == "https" else None
            self._connections = httpcore.AsyncConnectionPool(
                ssl_context=tls, keepalive_expiry=KEEP_ALIVE_S, max_connections=None
            )
        return self._connections

    def _read_token(self) -> str:
        cure = "set infill.engine.tokenFile to the file that the engine was given"
        if not self._token_file:
            raise EngineError(f"the engine at {self._address} wants a token: {cure}")
        try:
            token = Path(os.path.expanduser(self._token_file)).read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else "no text"
            raise EngineError(f"{self._token_file} cannot be read ({why}): {cure}") from None
        if not token or not token.isascii() or not token.isprintable():
            raise EngineError(f"{self._token_file} holds no token: {cure}")
        return token


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
