"""The resident process as editors meet it: started, doubled, killed, stopped, idle; its socket and peers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import ssl
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpcore
import pytest
import uvicorn
from infill_engine import catalogue, cli, process, protocol
from infill_engine.protocol import Candidate, Event, Final, InfillRequest, Status, Timing
from msgspec.structs import replace
from scripted import ask, wait_for

SCRIPT = Path(__file__).with_name("scripted_process.py")


class Engines:
    """Starts engine processes in the folders of one test, and ends them after it."""

    def __init__(self) -> None:
        self.started: list[subprocess.Popen[str]] = []

    def start(self, model: str, *options: str) -> subprocess.Popen[str]:
        command = [sys.executable, str(SCRIPT), "serve", "--model", model, *options]
        engine = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.started.append(engine)
        return engine

    def up(self, model: str, *options: str) -> subprocess.Popen[str]:
        """Starts one and waits until it is ready."""
        engine = self.start(model, *options)
        wait_for(lambda: state_of(model) in ("ready", "error"), 15)
        return engine

    def end(self) -> None:
        for engine in self.started:
            engine.kill()
            engine.communicate()


@pytest.fixture
def engines(home: Path) -> Iterator[Engines]:
    engines = Engines()
    yield engines
    engines.end()


def status_of(model: str) -> Status:
    status = process.status(model)
    assert status
    return status


def state_of(model: str) -> str | None:
    status = process.status(model)
    return status.state if status else None


def post(model: str, body: bytes) -> tuple[int, bytes]:
    with httpcore.ConnectionPool(uds=str(protocol.socket_path(model))) as pool:
        response = pool.request("POST", "http://engine/v1/infill", content=body)
        return response.status, response.content


def infill(model: str, request: InfillRequest) -> list[Event]:
    status, body = post(model, protocol.encode(request))
    assert status == 200
    return [untimed(protocol.decode_event(line)) for line in body.splitlines()]


def untimed(event: Event) -> Event:
    return replace(event, timing=Timing()) if isinstance(event, Final) else event


class Stream:
    """An answer that is read line by line."""

    def __init__(self, model: str) -> None:
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._connection.settimeout(10)
        self._connection.connect(str(protocol.socket_path(model)))
        body = protocol.encode(ask(deadline_ms=60_000))
        head = f"POST /v1/infill HTTP/1.1\r\nHost: engine\r\nContent-Length: {len(body)}\r\n\r\n"
        self._connection.sendall(head.encode() + body)
        self._file = self._connection.makefile("rb")

    def event(self) -> Event:
        while not (line := self._file.readline()).startswith(b"{"):
            assert line, "the stream is torn off"
        return untimed(protocol.decode_event(line))

    def close(self) -> None:
        self._file.close()
        self._connection.close()


@pytest.mark.process
def test_socket_and_folder_are_the_users_alone(engines: Engines) -> None:
    engines.up("instant")
    path = protocol.socket_path("instant")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.with_suffix(".lock").stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


@pytest.mark.process
def test_requests_are_answered(engines: Engines) -> None:
    engine = engines.up("instant")
    assert infill("instant", ask(head="return")) == [Candidate("return"), Final("end")]
    status = process.status("instant")
    assert isinstance(status, Status)
    assert (status.pid, status.requests, status.live) == (engine.pid, 1, 0)


@pytest.mark.process
def test_the_real_command_serves_the_model_that_it_is_told(engines: Engines, home: Path) -> None:
    table = home / "table.json"
    table.write_text(json.dumps({"x = ": "y + 1"}))
    model = f"fake:{table}"
    command = [sys.executable, "-m", "infill_engine", "serve", "--model", model, "--threads", "1"]
    engines.started.append(subprocess.Popen(command, text=True))
    wait_for(lambda: state_of(model) == "ready", 30)
    *candidates, final = infill(model, ask(head="x = ", deadline_ms=5000))
    assert candidates, final
    assert isinstance(candidates[-1], Candidate)
    assert candidates[-1].text == "y + 1"
    assert final == Final("end")


@pytest.mark.process
def test_of_two_at_once_one_stays(engines: Engines) -> None:
    both = [engines.start("instant") for _ in range(2)]
    wait_for(lambda: any(engine.poll() is not None for engine in both), 15)
    wait_for(lambda: state_of("instant") == "ready", 15)
    (gone,) = [engine for engine in both if engine.poll() is not None]
    (stays,) = [engine for engine in both if engine.poll() is None]
    out, err = gone.communicate()
    assert gone.returncode == 0
    assert f"served already by process {stays.pid}" in out
    assert err == ""


@pytest.mark.process
def test_engines_of_two_models_live_side_by_side(engines: Engines) -> None:
    assert engines.up("instant").poll() is None
    assert engines.up("brief").poll() is None
    assert state_of("instant") == "ready"


@pytest.mark.process
def test_what_a_killed_engine_left_is_replaced(engines: Engines) -> None:
    first = engines.up("instant")
    first.kill()
    first.wait(5)
    assert protocol.socket_path("instant").exists()
    assert process.status("instant") is None
    engines.up("instant")
    assert infill("instant", ask())[-1] == Final("end")


@pytest.mark.process
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("model", ["instant", "loading"])
def test_a_signal_ends_it_and_removes_the_socket(engines: Engines, model: str, number: signal.Signals) -> None:
    engine = engines.start(model)
    wait_for(lambda: state_of(model) in ("ready", "fetching"), 15)
    engine.send_signal(number)
    out, err = engine.communicate(timeout=5)
    assert (engine.returncode, out, err) == (0, "", "")
    assert not protocol.socket_path(model).exists()


@pytest.mark.process
def test_it_ends_when_idle(engines: Engines) -> None:
    engine = engines.start("instant", "--idle-exit", "0.2")
    assert engine.wait(10) == 0
    assert not protocol.socket_path("instant").exists()


@pytest.mark.process
def test_before_the_model_is_ready_it_says_how_far_it_is(engines: Engines) -> None:
    engines.start("loading")
    wait_for(lambda: state_of("loading") == "fetching", 15)
    status = process.status("loading")
    assert isinstance(status, Status)
    assert (status.progress, status.message) == (0.5, "fetching weights")
    assert infill("loading", ask()) == [Final("starting", "fetching weights (50%)")]


@pytest.mark.process
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_log_that_cannot_be_written_costs_its_lines_only() -> None:
    script = """
import logging, pathlib
from infill_engine import process
process._log_to(pathlib.Path("/dev/full"))
logging.getLogger("infill_engine").info("lost")
print("went on")
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (ended.stdout, ended.stderr) == ("went on\n", "")


def test_a_model_that_cannot_be_loaded_is_said_and_logged(engines: Engines, home: Path) -> None:
    engines.up("broken")
    assert infill("broken", ask()) == [Final("error", "no such model: use embedded")]
    (log,) = (home / "cache").glob("engine-*.log")
    assert "Traceback" in log.read_text()


@pytest.mark.process
def test_a_model_that_cannot_be_loaded_is_said_on_the_terminal_at_once_and_by_the_exit_code(engines: Engines) -> None:
    engine = engines.up("broken")
    assert engine.stderr
    assert engine.stderr.readline() == "infill-engine: no such model: use embedded\n"
    engine.send_signal(signal.SIGTERM)
    assert engine.communicate(timeout=5) == ("", "")
    assert engine.returncode == 1


@pytest.mark.process
def test_a_library_that_is_missing_is_named_with_what_to_do(engines: Engines) -> None:
    engine = engines.up("uninstalled")
    line = f"no_such_library is not installed in {sys.executable}: run `infill-lsp doctor`"
    assert infill("uninstalled", ask()) == [Final("error", line)]
    engine.send_signal(signal.SIGTERM)
    assert engine.communicate(timeout=5) == ("", f"infill-engine: {line}\n")


@pytest.mark.process
def test_hanging_up_cancels(engines: Engines) -> None:
    engines.up("endless")
    stream = Stream("endless")
    assert stream.event() == Candidate("first")
    closed = protocol.runtime_dir() / "closed"
    assert not closed.exists()
    stream.close()
    wait_for(closed.exists, 1)
    status = process.status("endless")
    assert isinstance(status, Status)
    assert status.live == 0


@pytest.mark.process
def test_stopping_lets_live_requests_finish(engines: Engines) -> None:
    engine = engines.up("brief")
    stream = Stream("brief")
    assert stream.event() == Candidate("first")
    assert process.stop("brief")
    assert stream.event() == Final("end")
    assert engine.wait(5) == 0
    assert not protocol.socket_path("brief").exists()
    stream.close()


@pytest.mark.process
def test_stopping_waits_no_longer_than_it_says(engines: Engines) -> None:
    engines.up("endless")
    stream = Stream("endless")
    assert stream.event() == Candidate("first")
    begun = time.monotonic()
    assert process.stop("endless")
    assert process.DRAIN_S <= time.monotonic() - begun < process.DRAIN_S + 2
    assert stream.event() == Final("cancelled")
    stream.close()


@pytest.mark.process
def test_an_engine_that_hangs_is_stopped_by_signals(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = engines.up("instant")
    monkeypatch.setattr(process, "ASK_S", 0.1)
    monkeypatch.setattr(process, "SIGNAL_S", 0.1)
    engine.send_signal(signal.SIGSTOP)
    assert cli.main(["status", "--model", "instant"]) == 1
    assert "end it with `infill-engine stop --model instant`" in capsys.readouterr().err
    assert cli.main(["stop", "--model", "instant"]) == 0
    said = capsys.readouterr().out
    assert said == f"infill-engine: process {engine.pid} did not stop when asked: ended by SIGKILL\n"
    assert engine.wait(5) == -signal.SIGKILL


def test_a_queue_full_of_callers_is_an_engine_that_hangs(home: Path) -> None:
    path = str(protocol.socket_path("instant"))
    with contextlib.ExitStack() as sockets:
        listener = sockets.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        listener.bind(path)
        listener.listen(0)
        caller = sockets.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        caller.connect(path)
        with pytest.raises(process.EngineError, match="does not answer"):
            process.status("instant")


@pytest.mark.process
def test_an_engine_started_while_the_old_one_drains_takes_its_place(engines: Engines) -> None:
    old = engines.up("brief")
    stream = Stream("brief")
    stream.event()
    old.send_signal(signal.SIGTERM)
    new = engines.up("brief")
    assert old.wait(5) == 0
    assert new.poll() is None
    assert stream.event() == Final("end")
    stream.close()


@pytest.mark.process
def test_another_model_takes_over_once_it_is_loaded(
    engines: Engines, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engines.up("auto")
    with ThreadPoolExecutor(1) as pool:
        used = pool.submit(cli.main, ["use", "loading"])
        wait_for(lambda: status_of("auto").next == "loading")
        status = status_of("auto")
        assert (status.state, status.model) == ("ready", "embedded")
        assert (status.message, status.progress) == ("fetching weights", 0.5)
        assert infill("auto", ask(head="return")) == [Candidate("return"), Final("end")]  # the former
        (home / "run" / "go").touch()
        assert used.result(10) == 0
    assert "loading answers now" in capsys.readouterr().out
    status = status_of("auto")
    assert (status.model, status.next, status.message) == ("loading", "", "")
    assert infill("auto", ask(head="return"))[0] == Candidate("first")
    assert catalogue.chosen() == "loading"
    process.stop("auto")
    engines.up("auto")
    assert status_of("auto").model == "loading"


@pytest.mark.process
def test_who_goes_back_to_what_serves_while_another_is_loaded_keeps_it(
    engines: Engines, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engines.up("auto")
    with ThreadPoolExecutor(1) as pool:
        used = pool.submit(cli.main, ["use", "loading"])
        wait_for(lambda: status_of("auto").next == "loading")
        assert cli.main(["use", "embedded"]) == 0
        assert status_of("auto").next == ""
        assert used.result(10) == 1
        (home / "run" / "go").touch()
    assert "another model was chosen meanwhile: embedded goes on" in capsys.readouterr().err
    assert infill("auto", ask(head="return"))[-1] == Final("end")
    assert (status_of("auto").model, catalogue.chosen()) == ("embedded", "embedded")


@pytest.mark.process
def test_a_model_that_cannot_be_loaded_changes_nothing(engines: Engines, capsys: pytest.CaptureFixture[str]) -> None:
    engines.up("auto")
    assert cli.main(["use", "broken"]) == 1
    line = "broken is not used: no such model: use embedded"
    # Above it may stand how far the loading was, as of any that takes a while.
    assert capsys.readouterr().err.splitlines()[-1] == f"infill-engine: {line}: embedded goes on"
    status = status_of("auto")
    assert (status.state, status.model, status.message) == ("ready", "embedded", line)
    assert infill("auto", ask(head="return"))[-1] == Final("end")
    assert catalogue.chosen() == "embedded"


@pytest.mark.process
def test_an_engine_of_one_model_stays_with_it(engines: Engines) -> None:
    engines.up("instant")
    with pytest.raises(process.EngineError, match="this engine serves instant alone: set infill"):
        process._ask("instant", "PUT", "/v1/model", b'{"model": "brief"}')


@pytest.mark.process
def test_bad_bodies_are_refused_and_the_engine_lives_on(engines: Engines) -> None:
    engines.up("instant")
    for body, code in [(b"nonsense", 400), (b"x" * (8 * 1024 * 1024), 413)]:
        status, answer = post("instant", body)
        assert status == code
        assert "\n" not in json.loads(answer)["error"]
    assert infill("instant", ask())[-1] == Final("end")


@pytest.mark.process
def test_the_command_line_shows_and_stops_an_engine(engines: Engines, capsys: pytest.CaptureFixture[str]) -> None:
    engine = engines.up("instant")
    assert cli.main(["status", "--model", "instant"]) == 0
    shown = capsys.readouterr().out
    assert f"process   {engine.pid}, up 0:00:0" in shown
    assert "state     ready" in shown
    assert cli.main(["stop", "--model", "instant"]) == 0
    assert capsys.readouterr().out == "infill-engine: stopped\n"
    assert cli.main(["stop", "--model", "instant"]) == 0
    assert cli.main(["status", "--model", "instant"]) == 0
    assert capsys.readouterr().out == "infill-engine: no engine serves instant\n" * 2


def url_of(engine: subprocess.Popen[str]) -> str:
    """The URL that an engine prints once it listens."""
    assert engine.stdout
    found = re.fullmatch(r"infill-engine: serving (http://\S+)\n", engine.stdout.readline())
    assert found
    return found[1]


def ask_tcp(url: str, method: str, body: object = None, **headers: str) -> tuple[int, Any]:
    with httpcore.ConnectionPool() as pool:
        content = None if body is None else json.dumps(body).encode()
        response = pool.request(method, url, headers=headers, content=content)
        return response.status, json.loads(response.content)


@pytest.mark.process
def test_other_plugins_are_served_where_asked_for(engines: Engines, capsys: pytest.CaptureFixture[str]) -> None:
    engine = engines.start("instant", "--http", "127.0.0.1:0")
    url = url_of(engine)
    assert url.startswith("http://127.0.0.1:")
    wait_for(lambda: state_of("instant") == "ready", 15)
    status, answer = ask_tcp(f"{url}/v1/completions", "POST", {"prompt": "x =", "suffix": ""})
    assert (status, answer["choices"][0]["text"]) == (200, "x =")
    for path in ("/v1/stop", "/v1/infill", "/v1/prime"):
        assert ask_tcp(url + path, "POST", {})[0] == 404
    assert ask_tcp(f"{url}/health", "GET", host="example.com")[0] == 403
    assert infill("instant", ask())[-1] == Final("end")
    assert cli.main(["stop", "--model", "instant"]) == 0
    assert engine.wait(5) == 0


@pytest.mark.process
@pytest.mark.parametrize("way", ["file", "variable"])
def test_a_key_is_asked_for_where_one_is_set(
    engines: Engines, home: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    options = []
    if way == "file":
        (home / "key").write_text("s3cret\n")
        options = ["--api-key-file", str(home / "key")]
    else:
        monkeypatch.setenv("INFILL_API_KEY", "s3cret")
    url = url_of(engines.start("instant", "--http", "localhost:0", *options))
    assert ask_tcp(f"{url}/v1/models", "GET")[0] == 401
    assert ask_tcp(f"{url}/v1/models", "GET", authorization="Bearer s3cret")[0] == 200
    assert state_of("instant")  # The socket asks for a uid, not for a key.


@pytest.mark.process
def test_a_port_that_is_taken_is_one_clear_line(engines: Engines, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        engine = engines.start("instant", "--http", f"127.0.0.1:{port}")
        out, err = engine.communicate(timeout=15)
    assert (engine.returncode, out) == (1, "")
    assert f"cannot listen at 127.0.0.1 port {port} (Address already in use): choose another --http" in err
    assert err.count("\n") == 1
    assert not protocol.socket_path("instant").exists()


@pytest.mark.process
def test_an_engine_that_does_not_serve_plugins_is_to_be_stopped_first(engines: Engines) -> None:
    engines.up("instant")
    late = engines.start("instant", "--http", "127.0.0.1:0")
    out, err = late.communicate(timeout=15)
    assert (late.returncode, out) == (1, "")
    assert "stop it first (`infill-engine stop --model instant`)" in err


@pytest.mark.process
def test_stopping_lets_requests_over_tcp_finish(engines: Engines) -> None:
    engine = engines.start("brief", "--http", "127.0.0.1:0")
    url = url_of(engine)
    wait_for(lambda: state_of("brief") == "ready", 15)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ask_tcp, f"{url}/v1/completions", "POST", {"prompt": "x = "})
        wait_for(lambda: live_of("brief") == 1)
        assert process.stop("brief") == "stopped"
        status, answer = waiting.result(5)
    assert (status, answer["choices"][0]["text"]) == (200, "first")


@pytest.mark.process
def test_hanging_up_over_tcp_cancels(engines: Engines) -> None:
    url = url_of(engines.start("endless", "--http", "127.0.0.1:0"))
    wait_for(lambda: state_of("endless") == "ready", 15)
    host, port = url.removeprefix("http://").split(":")
    body = json.dumps({"prompt": "x = ", "max_tokens": 9}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + body)
        wait_for(lambda: live_of("endless") == 1)
    wait_for((protocol.runtime_dir() / "closed").exists, 1)
    wait_for(lambda: live_of("endless") == 0, 1)


TOKEN = "0123456789abcdef"


def certificate(folder: Path) -> tuple[str, str]:
    """The files of a certificate for localhost, and of its key."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl to make a certificate with")
    cert, key = str(folder / "cert.pem"), str(folder / "key.pem")
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    made = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    subprocess.run([openssl, *made, *subject, "-keyout", key, "-out", cert], check=True, capture_output=True)
    return cert, key


@pytest.mark.process
@pytest.mark.parametrize("tls", [False, True])
def test_editors_elsewhere_are_served_with_a_token(engines: Engines, home: Path, tls: bool) -> None:
    (home / "token").write_text(TOKEN + "\n")
    options = ["--listen", "127.0.0.1:0", "--token-file", str(home / "token")]
    context = None
    if tls:
        cert, key = certificate(home)
        options += ["--tls-cert", cert, "--tls-key", key]
        context = ssl.create_default_context(cafile=cert)
    engine = engines.start("instant", *options)
    assert engine.stdout
    url = engine.stdout.readline().strip().removeprefix("infill-engine: serving ")
    assert url.startswith("https://127.0.0.1:" if tls else "http://127.0.0.1:")
    wait_for(lambda: state_of("instant") == "ready", 15)

    def ask_there(method: str, path: str, body: bytes = b"", token: str = TOKEN, **headers: str) -> httpcore.Response:
        with httpcore.ConnectionPool(ssl_context=context) as pool:
            given = {"authorization": f"Bearer {token}", **headers}
            return pool.request(method, url + path, headers=given, content=body)

    assert protocol.decode_status(ask_there("GET", "/v1/status").content).model == "instant"
    assert ask_there("GET", "/v1/status", host="gpu.example.com").status == 200
    answer = ask_there("POST", "/v1/infill", protocol.encode(ask()))
    assert untimed(protocol.decode_event(answer.content.splitlines()[-1])) == Final("end")
    for token in ("wrong", TOKEN[:-1], TOKEN + "x"):
        assert ask_there("GET", "/v1/status", token=token).status == 401
    assert ask_there("GET", "/v1/status", origin="http://localhost").status == 403
    for path in ("/v1/stop", "/v1/completions"):
        assert ask_there("POST", path, b"{}").status == 404
    assert state_of("instant") == "ready"  # Its own socket speaks as ever.
    assert process.stop("instant") == "stopped"
    assert engine.wait(5) == 0


@pytest.mark.process
def test_a_certificate_that_cannot_be_used_is_one_clear_line(engines: Engines, home: Path) -> None:
    (home / "token").write_text(TOKEN)
    tls = ["--tls-cert", str(home / "token"), "--tls-key", str(home / "token")]
    engine = engines.start("instant", "--listen", "0.0.0.0:0", "--token-file", str(home / "token"), *tls)
    out, err = engine.communicate(timeout=15)
    assert (engine.returncode, out) == (1, "")
    assert "are no certificate and its key" in err
    assert err.count("\n") == 1


def live_of(model: str) -> int:
    status = process.status(model)
    assert status
    return status.live


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "required"),
        (["serve", "--threads", "many"], "--threads"),
        (["serve", "--threads", "-1"], "threads must be at least 0, not -1"),
        (["serve", "--idle-exit", "nan"], "idle_exit_s must be more than 0 seconds, not nan"),
        (["serve", "--model", ""], "model must not be empty"),
        (["serve", "--http", "0.0.0.0:8012"], "http must be a loopback address and a port, such as 127.0.0.1:8012"),
        (["serve", "--http", "example.com:8012"], "http must be a loopback address"),
        (["serve", "--http", "127.0.0.1"], "http must be a loopback address and a port"),
        (["serve", "--http", "127.0.0.1:99999"], "http must be a loopback address and a port"),
        (["serve", "--http", "http://127.0.0.1:1/x"], "http must be a loopback address and a port"),
        (["serve", "--api-key-file", "key"], "--api-key-file is for --http"),
        (["serve", "--http", "[::1]:0", "--api-key-file", os.devnull], "holds no key"),
        (["serve", "--listen", "127.0.0.1:0"], "--listen and --token-file are for each other"),
        (["serve", "--token-file", "x"], "--listen and --token-file are for each other"),
        (["serve", "--listen", "127.0.0.1:0", "--token-file", os.devnull], "holds no key"),
        (["serve", "--listen", "127.0.0.1:0", "--token-file", "{short}"], "a token of at least 16 characters"),
        (["serve", "--listen", "example.com:1", "--token-file", "{token}"], "listen must be an address and a port"),
        (["serve", "--listen", "0.0.0.0:0", "--token-file", "{token}"], "give a certificate and its key, too"),
        (["serve", "--listen", "[::1]:0", "--token-file", "{token}", "--tls-cert", "x"], "give both"),
    ],
)
def test_wrong_usage_is_one_line_and_code_2(
    home: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    files = {"short": home / "short", "token": home / "token"}
    files["short"].write_text("s3cret")
    files["token"].write_text(TOKEN)
    assert run_cli([argument.format_map(files) for argument in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert says in captured.err
    assert captured.out == ""


def test_what_is_not_a_socket_is_left_alone(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = protocol.socket_path("instant")
    path.write_text("mine")
    assert cli.main(["serve", "--model", "instant"]) == 1
    assert capsys.readouterr().err == f"infill-engine: {path} is not a socket: remove it\n"
    assert path.read_text() == "mine"


def test_a_folder_that_others_can_write_to_is_refused(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    protocol.runtime_dir().chmod(0o777)
    assert cli.main(["serve", "--model", "instant"]) == 1
    assert "mode 0700" in capsys.readouterr().err


def test_an_engine_of_another_user_is_not_spoken_to(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as foreign:
        foreign.bind(str(protocol.socket_path("instant")))
        foreign.listen()
        monkeypatch.setattr(protocol, "peer_uid", lambda _: os.getuid() + 1)
        with pytest.raises(process.EngineError, match="another user's"):
            process.status("instant")
        connection, _ = foreign.accept()
        with connection:
            assert connection.recv(100) == b""


async def test_a_peer_of_another_user_is_hung_up_on_unread(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def app(scope: dict[str, object], receive: Callable[..., object], send: object) -> None:
        pytest.fail("a foreign request was read")

    monkeypatch.setattr(protocol, "peer_uid", lambda _: os.getuid() + 1)
    path = protocol.socket_path("instant")
    with process._listening(path) as listener:
        config = uvicorn.Config(app, http=process._OwnPeerProtocol, ws="none", lifespan="off", log_config=None)
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server._serve([listener]))
        reader, writer = await asyncio.open_unix_connection(str(path))
        writer.write(b"GET /v1/status HTTP/1.1\r\nHost: engine\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()
        server.should_exit = True
        await asyncio.wait_for(serving, 5)


def run_cli(arguments: list[str]) -> int:
    try:
        return cli.main(arguments)
    except SystemExit as exit:
        return int(exit.code or 0)
