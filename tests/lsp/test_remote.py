"""An engine elsewhere: a real one on a loopback port, reached as through a tunnel or over TLS; none is started here."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
from editor import Editor, fake_model, until
from infill_engine import protocol
from infill_engine.protocol import Candidate, Document, Event, Final, InfillRequest

from infill_lsp.client import EngineClient, EngineError
from infill_lsp.remote import RemoteEngine, engine_of
from infill_lsp.settings import Engine, Settings

pytestmark = pytest.mark.process

TOKEN = "0123456789abcdef"


@pytest.fixture(scope="module")
def table(shared_home: Path) -> str:
    return fake_model(shared_home, "there", {"return ": "a + b"})


@pytest.fixture(scope="module")
def token(shared_home: Path) -> str:
    return written(shared_home / "token", TOKEN + "\n")


@pytest.fixture(scope="module")
def address(table: str, token: str) -> Iterator[str]:
    with listening(table, token) as url:
        yield url


@contextmanager
def listening(model: str, token: str, *options: str, port: int = 0) -> Iterator[str]:
    """An engine elsewhere; gives its address."""
    command = [sys.executable, "-m", "infill_engine", "serve", "--model", model, "--token-file", token]
    command += ["--listen", f"127.0.0.1:{port}", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdout
        try:
            yield engine.stdout.readline().strip().removeprefix("infill-engine: serving ")
        finally:
            engine.terminate()


@asynccontextmanager
async def client(address: str, token: str) -> AsyncIterator[EngineClient]:
    engine = engine_of(Settings(model="unused", engine=Engine(address=address, token_file=token)))
    try:
        yield engine
    finally:
        await engine.aclose()


def written(file: Path, text: str) -> str:
    file.write_text(text)
    return str(file)


async def fault(address: str, token: str) -> str:
    """The one line with which the engine cannot be had."""
    async with client(address, token) as engine:
        with pytest.raises(EngineError) as caught:
            _ = [status async for status in engine.bring_up()]
        request = InfillRequest(client="c", document="d", head="return ", deadline_ms=2000)
        events = [event async for event in engine.infill(request)]
    (final,) = events
    assert isinstance(final, Final)
    assert final.reason in ("starting", "error")
    line = str(caught.value)
    assert "\n" not in line
    return line


async def answer(address: str, token: str) -> list[Event]:
    async with client(address, token) as engine:
        states = [status.state async for status in engine.bring_up()]
        assert states[-1] == "ready"
        request = InfillRequest(client="c", document="d", head="return ", workspace="w", deadline_ms=20_000)
        return [event async for event in engine.infill(request)]


async def test_it_is_asked_with_the_token(address: str, token: str) -> None:
    *_, best, final = await answer(address, token)
    assert isinstance(best, Candidate)
    assert best.text == "a + b"
    assert isinstance(final, Final)
    assert final.reason == "end"


async def test_what_it_remembers_is_named_by_this_machine(address: str, token: str) -> None:
    async with client(address, token) as engine:
        assert isinstance(engine, RemoteEngine)
        assert await engine.sync("w", {"a.py": "1"}) in (["a.py"], [])
        await engine.put("w", [Document("a.py", "1", "x = 1\n")])
        await engine.remove("w", ["a.py"])
        await engine.forget("w")
        assert engine._workspace("w") not in ("w", "")
        assert engine._workspace("") == ""


async def test_it_is_not_ended_from_here(address: str, token: str) -> None:
    async with client(address, token) as engine:
        with pytest.raises(EngineError, match="is not ended from here"):
            await engine.stop()
        assert await engine.status() is not None


async def test_what_is_wrong_is_one_line_that_says_what_to_do(address: str, token: str, shared_home: Path) -> None:
    other = written(shared_home / "other", "another token that is long")
    empty = written(shared_home / "empty", "\n")
    assert await fault(address, other) == f"the engine at {address} does not know the token in {other}: give its own"
    assert "wants a token: set infill.engine.tokenFile" in await fault(address, "")
    assert "holds no token: set infill.engine.tokenFile" in await fault(address, empty)
    assert "cannot be read (No such file or directory)" in await fault(address, str(shared_home / "nowhere"))
    assert "set infill.engine.address to https://" in await fault("http://example.com:8013", token)
    assert "no engine answers at http://127.0.0.1:9: start it there" in await fault("http://127.0.0.1:9", token)
    for wrong in ("http://127.0.0.1:80130", "http://localhost:80l3", "https://münchen.example:8013"):
        assert await fault(wrong, token) == f"{wrong} is no address: set infill.engine.address to http://…"
    assert "does not speak TLS" in await fault(address.replace("http:", "https:"), token)


async def test_another_token_in_the_file_is_taken(address: str, shared_home: Path) -> None:
    file = written(shared_home / "later", "a token of some other engine")
    async with client(address, file) as engine:
        with pytest.raises(EngineError, match="does not know the token"):
            await engine.status()
        written(shared_home / "later", TOKEN)
        assert await engine.status() is not None


async def test_over_tls_the_certificate_must_be_trusted(
    shared_home: Path, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl to make a certificate with")
    cert, key = str(shared_home / "cert.pem"), str(shared_home / "key.pem")
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    made = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    await asyncio.to_thread(
        subprocess.run, [openssl, *made, *names, "-keyout", key, "-out", cert], check=True, capture_output=True
    )
    model = fake_model(shared_home, "tls", {"return ": "a + b"})
    with listening(model, token, "--tls-cert", cert, "--tls-key", key) as address:
        assert address.startswith("https://")
        assert "is not trusted" in await fault(address, token)
        monkeypatch.setenv("SSL_CERT_FILE", cert)
        assert isinstance((await answer(address, token))[-1], Final)


async def test_an_editor_uses_it_and_starts_none(
    editor: Editor, address: str, token: str, shared_home: Path, tmp_path: Path
) -> None:
    started = tmp_path / "started"
    python = tmp_path / "python"
    written(python, f"#!/bin/sh\ntouch {started}\n")
    python.chmod(0o755)
    engine = {"address": address, "tokenFile": token, "python": str(python)}
    await editor.start(options={"model": "fake:nothing", "engine": engine})
    editor.open("return ")
    assert (await editor.item(0, 7)).insert_text == "a + b"
    assert editor.messages == []
    editor.configure({"infill": {"engine": {**engine, "address": "http://127.0.0.1:9"}}})
    await editor.shown(1)
    assert editor.messages[0].startswith("no engine answers at http://127.0.0.1:9")
    editor.edit((0, 7), (0, 7), "x")
    editor.edit((0, 7), (0, 8), "")
    assert await editor.complete(0, 7) == []
    editor.configure({"infill": {"engine": engine}})
    async with asyncio.timeout(20):
        while not await editor.complete(0, 7):  # noqa: ASYNC110 - a person types on
            await asyncio.sleep(0.1)
    assert not started.exists()
    assert not protocol.socket_path("fake:nothing").exists()


async def test_another_device_ends_the_engine_that_runs(
    editor: Editor, shared_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = shared_home / "commands"
    python = shared_home / "python"
    written(python, f'#!/bin/sh\necho "$@" >> {commands}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    model = fake_model(shared_home, "device", {"return ": "a + b"})
    options = {"model": model, "engine": {"python": str(python)}}
    await editor.start(options=options)
    await until(lambda: commands.exists() and commands.read_text().count("\n") == 1)
    editor.open("return ")
    async with asyncio.timeout(20):
        while not await editor.complete(0, 7):  # noqa: ASYNC110 - a person types on
            await asyncio.sleep(0.1)
    editor.configure({"infill": {**options, "device": "cpu"}})
    await until(lambda: commands.read_text().count("\n") == 2)
    first, second = commands.read_text().splitlines()
    assert "--device" not in first
    assert second.endswith("--device cpu")
    assert editor.messages == []
