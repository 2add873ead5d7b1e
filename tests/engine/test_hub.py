"""Repositories of the hub, from a server on this machine: fetched, interrupted, damaged, missing, refused."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
import urllib.request
from collections import namedtuple
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from infill_engine import catalogue, cli, hub, models
from infill_engine.core import ModelError
from infill_engine.fetch import FetchError

COMMIT = "c0ffee" * 6 + "beef"
WEIGHTS = bytes(range(256)) * 4096  # 1 MB
Q4, Q8 = b"GGUF four" * 1000, b"GGUF eight" * 1000


class Hub(ThreadingHTTPServer):
    """A hub with a few repositories. It tells what it was asked."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.asked: list[tuple[str, str | None]] = []
        self.tokens: list[str | None] = []
        #: Bytes of a file after which the connection breaks off, once for each entry.
        self.breaks: list[int] = []
        self.ranges = True
        self.elsewhere = ""
        self.repositories: dict[str, dict[str, bytes]] = {
            "who/model": {
                "config.json": b'{"architectures": ["DreamModel"]}',
                "tokenizer.json": b"{}",
                "README.md": b"# A model",
                "model.safetensors.index.json": json.dumps(
                    {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
                ).encode(),
                "model-1.safetensors": WEIGHTS,
                "model-2.safetensors": WEIGHTS[::-1],
                "modeling_dream.py": b"raise SystemExit",
            },
            "who/small-GGUF": {"it-Q4_K_M.gguf": Q4, "it-Q8_0.gguf": Q8, "mmproj-it-Q8_0.txt": b"x"},
        }


class Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        there = self.server
        there.asked.append((self.path, self.headers.get("Range")))
        there.tokens.append(self.headers.get("Authorization"))
        path = self.path.partition("?")[0].strip("/").split("/")
        if path[:2] == ["api", "models"]:
            self.describe("/".join(path[2:4]))
            return
        files = there.repositories.get("/".join(path[:2]), {})
        data = files.get("/".join(path[4:]))
        if data is None or path[2:4] != ["resolve", COMMIT]:
            self.send(404, b"")
        elif there.elsewhere:
            self.send_response(302)
            self.send_header("Location", f"{there.elsewhere}{self.path}")
            self.send_header("Content-Length", "0")
            self.end_headers()
        else:
            self.give(data)

    def describe(self, name: str) -> None:
        files = self.server.repositories.get(name)
        if files is None:
            self.send(401, b"")
            return
        siblings = [
            {"rfilename": name, "size": len(data), "blobId": git(data)}
            | ({"lfs": {"sha256": hashlib.sha256(data).hexdigest()}} if len(data) > 1000 else {})
            for name, data in files.items()
        ]
        self.send(200, json.dumps({"sha": COMMIT, "siblings": siblings}).encode())

    def give(self, data: bytes) -> None:
        first = 0
        if self.server.ranges and (wanted := self.headers.get("Range")):
            first = int(wanted.removeprefix("bytes=").rstrip("-"))
        breaks = self.server.breaks.pop(0) if self.server.breaks and len(data) > 100_000 else None
        self.send_response(206 if first else 200)
        self.send_header("Content-Length", str(len(data) - first))
        self.end_headers()
        self.wfile.write(data[first:] if breaks is None else data[first : first + breaks])
        if breaks is not None:
            self.wfile.flush()
            self.close_connection = True

    def send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def git(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@pytest.fixture
def server(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "http_proxy", "HTTP_PROXY", "HF_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    with Hub() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_HUB_CACHE", str(home / "hub"))
        monkeypatch.setenv("HF_HOME", str(home / "hf"))
        monkeypatch.setattr(hub, "PAUSE_S", 0.0)
        yield server
        server.shutdown()


def quiet(message: str, progress: float | None) -> None:
    """Nobody reads reports here."""


def test_a_repository_is_fetched_into_the_shared_cache_and_then_read_from_there(server: Hub, home: Path) -> None:
    told: list[float] = []
    folder = hub.ensure("who/model", lambda message, progress: told.append(progress or 0.0))
    assert folder == home / "hub" / "models--who--model" / "snapshots" / COMMIT
    assert sorted(os.listdir(folder)) == sorted(
        name for name in server.repositories["who/model"] if not name.endswith((".md", ".py"))
    )
    assert (folder / "model-1.safetensors").read_bytes() == WEIGHTS
    blob = folder / os.readlink(folder / "model-1.safetensors")
    assert blob.resolve().name == hashlib.sha256(WEIGHTS).hexdigest()
    assert told == sorted(told)
    assert 0.5 < max(told) < 1
    asked = len(server.asked)
    assert hub.ensure("who/model", quiet) == folder
    assert len(server.asked) == asked
    assert [one.hub for one in catalogue.on_disk()] == ["who/model"]


def test_the_hubs_own_client_finds_what_was_fetched(server: Hub, home: Path) -> None:
    client = pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
    folder = hub.ensure("who/model", quiet)
    found = client.try_to_load_from_cache("who/model", "model-2.safetensors", cache_dir=home / "hub")
    assert Path(found) == folder / "model-2.safetensors"
    assert client.snapshot_download("who/model", cache_dir=home / "hub", local_files_only=True) == str(folder)


def test_a_form_that_a_repository_does_not_have_is_not_another_one(server: Hub) -> None:
    with pytest.raises(FetchError, match="has no file of Q8_0: name it alone"):
        hub.ensure("who/model", quiet, "Q8_0")
    assert not any("safetensors" in path for path, _ in server.asked)
    hub.ensure("who/model", quiet)
    assert hub.cached("who/model", "Q8_0") is None


def test_one_gguf_file_is_fetched_by_its_form(server: Hub) -> None:
    path = hub.ensure("who/small-GGUF", quiet, "q4_k_m")
    assert path.read_bytes() == Q4
    assert len(server.asked) == 2
    assert hub.cached("who/small-GGUF", "Q4_K_M") == path
    assert hub.cached("who/small-GGUF", "Q8_0") is None
    with pytest.raises(FetchError, match="has no single file of Q5_K_M: it has Q4_K_M, Q8_0"):
        hub.ensure("who/small-GGUF", quiet, "Q5_K_M")
    with pytest.raises(FetchError, match=r"say which, such as who/small-GGUF:Q4_K_M, of Q4_K_M, Q8_0"):
        hub.ensure("who/small-GGUF", quiet)


def test_a_connection_that_breaks_off_goes_on_where_it_was(server: Hub) -> None:
    server.breaks = [100_000, 200_000, 0, 0]
    folder = hub.ensure("who/model", quiet)
    assert (folder / "model-1.safetensors").read_bytes() == WEIGHTS
    ranges = [wanted for path, wanted in server.asked if path.endswith("model-1.safetensors")]
    assert ranges == [None, "bytes=100000-", "bytes=300000-", "bytes=300000-", "bytes=300000-"]


def test_a_download_that_was_ended_goes_on_the_next_time(server: Hub, home: Path) -> None:
    class Enough(BaseException):
        pass

    def report(message: str, progress: float | None) -> None:
        if progress and progress > 0.1:
            raise Enough

    server.breaks = [600_000]
    with pytest.raises(Enough):
        hub.ensure("who/model", report)
    (part,) = (home / "hub" / "models--who--model" / "blobs").glob("*.incomplete")
    there = part.stat().st_size
    assert there > 0
    assert hub.cached("who/model") is None
    server.asked.clear()
    folder = hub.ensure("who/model", quiet)
    assert (folder / "model-1.safetensors").read_bytes() == WEIGHTS
    assert f"bytes={there}-" in [wanted for _, wanted in server.asked]


def test_a_server_that_knows_no_ranges_is_read_from_the_beginning(server: Hub) -> None:
    server.breaks, server.ranges = [100_000], False
    folder = hub.ensure("who/model", quiet)
    assert (folder / "model-1.safetensors").read_bytes() == WEIGHTS


def test_what_arrives_damaged_is_thrown_away(server: Hub, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub._File, "digest", lambda file, path: "0" * 64)
    with pytest.raises(FetchError, match=r"arrived damaged .*: try again"):
        hub.ensure("who/model", quiet)
    monkeypatch.undo()
    assert list((home / "hub" / "models--who--model" / "blobs").iterdir()) == []


def test_without_a_network_one_line_says_what_to_do(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(FetchError) as caught:
        hub.ensure("who/model", quiet)
    message = str(caught.value)
    assert message.startswith("cannot fetch who/model (")
    assert "hf download who/model" in message
    assert "\n" not in message
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(FetchError, match="is not on this disk, and HF_HUB_OFFLINE is set: copy a folder"):
        hub.ensure("who/model", quiet)


def test_a_connection_that_is_gone_for_good_is_given_up(server: Hub) -> None:
    server.breaks = [0] * 100
    with pytest.raises(FetchError, match="cannot fetch who/model"):
        hub.ensure("who/model", quiet)


def test_what_needs_a_login_says_so_and_the_token_stays_with_its_host(
    server: Hub, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(FetchError, match=r"accept its terms at .*/no/such, and set HF_TOKEN"):
        hub.ensure("no/such", quiet)
    (home / "hf").mkdir()
    (home / "hf" / "token").write_text("s3cret\n")
    with Hub() as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        server.elsewhere = other.url
        hub.ensure("who/small-GGUF", quiet, "Q8_0")
        other.shutdown()
    assert set(server.tokens[1:]) == {"Bearer s3cret"}
    assert other.tokens == [None]


@pytest.mark.parametrize(("to", "sent"), [("https://hub/b", True), ("http://hub/b", False), ("https://other/b", False)])
def test_a_token_is_sent_to_the_same_host_in_the_same_way_only(to: str, sent: bool) -> None:
    asked = urllib.request.Request("https://hub/a", headers={"Authorization": "Bearer s3cret"})
    request = hub._SameHost().redirect_request(asked, None, 302, "Found", {}, to)
    assert request is not None
    assert request.has_header("Authorization") == sent


def test_a_full_disk_is_called_that(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**12, 10**12, 1000))
    with pytest.raises(FetchError, match=r"0\.0 GB are needed and 0\.0 GB free to fetch who/model: free some of"):
        hub.ensure("who/model", quiet)


def test_what_is_no_hub_is_called_that(server: Hub) -> None:
    server.repositories["who/model"] = {"../../evil": b"x"}
    with pytest.raises(FetchError, match="is not Hugging Face's hub"):
        hub.ensure("who/model", quiet)


def test_names_lead_to_what_fits_and_what_is_there(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    one = catalogue.Model(
        "it", "It", "DreamModel", 8000, "MIT", 512,
        (catalogue.File("bf16", "who/model", 16_000), catalogue.File("Q4_K_M", "who/small-GGUF", 5_000, gguf=True)),
    )  # fmt: skip
    monkeypatch.setattr(catalogue, "MODELS", (one,))
    monkeypatch.setattr(catalogue, "CONTEXT_BYTES", 0)
    free = 20_000
    monkeypatch.setattr(models, "machine", lambda device: catalogue.Machine("a GPU", free, free, 4))
    small = models.located("it:q4_k_m", quiet)
    assert small
    assert small.name == "it-Q4_K_M.gguf"
    assert models.located("it", quiet) == small  # it is there already
    assert models.located("who/model", quiet) == hub.cached("who/model")
    free = 1000
    with pytest.raises(ModelError, match=r"it in Q4_K_M needs 0\.0 GB, the card has 0 GB"):
        models.located("it", quiet)
    assert models.located("it:int4", quiet) == hub.cached("who/model")
    with pytest.raises(ModelError, match="it has no form 'Q2': use one of bf16, Q4_K_M"):
        models.located("it:Q2", quiet)
    with pytest.raises(ModelError, match="there is no model 'nothing': use one of"):
        models.located("nothing", quiet)


def test_without_an_engine_what_is_chosen_is_fetched_at_once(server: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["use", "who/small-GGUF:Q8_0"]) == 0
    assert "is chosen, and will be loaded with the next start" in capsys.readouterr().out
    assert catalogue.chosen() == "who/small-GGUF:Q8_0"
    assert cli.main(["fetch", "who/small-GGUF:Q4_K_M"]) == 0
    assert capsys.readouterr().out.endswith("/it-Q4_K_M.gguf\n")
    assert cli.main(["use", "who/small-GGUF:Q9"]) == 1
    assert catalogue.chosen() == "who/small-GGUF:Q8_0"
