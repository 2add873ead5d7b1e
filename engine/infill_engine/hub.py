"""Brings a repository of Hugging Face's hub to this machine, into the cache that the hub's other tools share.

What is in the cache is taken from there without a network. A download that was interrupted goes on where it stopped, in
whichever process (the hub's own client begins anew), and every file is held against the hash that the hub names. Knows
files, and nothing of what is in them.

Layout (https://huggingface.co/docs/huggingface_hub/guides/manage-cache): `blobs/HASH` holds a file's bytes,
`snapshots/COMMIT/NAME` is a link to them, `refs/main` names the commit. The variables are the hub's own: `HF_HOME`,
`HF_HUB_CACHE`, `HF_ENDPOINT`, `HF_TOKEN`, `HF_TOKEN_PATH` and `HF_HUB_OFFLINE`.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import http.client
import json
import os
import re
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from infill_engine.catalogue import GB, hub_cache, named_shards, snapshot
from infill_engine.fetch import BLOCK, POLL_S, FetchError, Report, alone

#: Seconds without a byte after which a connection is given up; tries without one, and seconds between two of them.
TIMEOUT_S = 30.0
TRIES, PAUSE_S = 5, 1.0
#: Bytes that stay free on the disk.
SPARE_BYTES = 256 << 20

#: What is wanted beside the weights: what a config and a tokenizer consist of.
_SMALL = re.compile(
    r"(config|generation_config|tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab)\.json|merges\.txt"
    r"|model\.safetensors\.index\.json"
)
_SHARD = re.compile(r"[^/]*\.safetensors")
#: A GGUF file that is one of several.
_SPLIT = re.compile(r"-\d{5}-of-\d{5}\.gguf$")


@dataclass(frozen=True, slots=True)
class _File:
    name: str
    bytes: int
    #: The name of its blob: sha256 where the hub keeps it as a large file, else git's own hash.
    hash: str
    sha256: bool

    def digest(self, path: Path) -> str:
        """What `hash` would be of a file on this disk."""
        if self.sha256:
            with open(path, "rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
        data = path.read_bytes()
        return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def ensure(hub: str, report: Report, form: str = "", only_small: bool = False) -> Path:
    """The folder of a repository's safetensors, with its config and tokenizer; or its GGUF file of a form, such as
    Q4_K_M. Fetched first where something is missing.

    only_small: all but the weights. An exception that `report` raises ends the download, which goes on the next time.
    Raises `FetchError` with one line that says what to do.
    """
    if (path := cached(hub, form, only_small)) is not None:
        return path
    try:
        return _Repository(hub, report).fetch(form, only_small)
    except OSError as error:
        if isinstance(error, urllib.error.URLError | TimeoutError):
            raise FetchError(_unreachable(hub, error)) from None
        cache = hub_cache()
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise FetchError(
                f"{error.strerror} to fetch {hub}: free some of {cache}, or set HF_HOME elsewhere"
            ) from None
        raise FetchError(f"cannot write to {cache} ({error.strerror}): make it writable, or set HF_HOME") from None


def cached(hub: str, form: str = "", only_small: bool = False) -> Path | None:
    """As `ensure`, where all of it is in the cache."""
    folder = snapshot(hub)
    if folder is None:
        return None
    ggufs = _of_form([str(file.relative_to(folder)) for file in folder.rglob("*.gguf") if file.exists()], form)
    if form:
        return folder / ggufs[0] if len(ggufs) == 1 else None
    if not (folder / "config.json").exists() or not has_tokenizer(folder):
        return None
    if only_small:
        return folder
    if (names := named_shards(folder)) is None:
        return None
    whole = all((folder / name).exists() for name in names) if names else any(folder.glob("*.safetensors"))
    return folder if whole else None


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder has the files of a tokenizer."""
    return (folder / "tokenizer.json").exists() or (folder / "vocab.json").exists()


def _of_form(names: Sequence[str], form: str) -> list[str]:
    """Those of GGUF files that are of a form."""
    return [name for name in names if re.search(rf"(?<![A-Za-z0-9]){re.escape(form)}\.gguf$", name, re.IGNORECASE)]


class _Repository:
    """One repository at the hub's end, and its place in the cache."""

    def __init__(self, hub: str, report: Report) -> None:
        self._hub, self._report = hub, report
        self._endpoint = os.environ.get("HF_ENDPOINT", "").rstrip("/") or "https://huggingface.co"
        name = f"models--{hub.replace('/', '--')}"
        self._folder, self._locks = hub_cache() / name, hub_cache() / ".locks" / name
        self._opener = urllib.request.build_opener(_SameHost)
        #: Bytes of all files that are wanted, and of those that are there.
        self._all = self._done = 0

    def fetch(self, form: str, only_small: bool) -> Path:
        if os.environ.get("HF_HUB_OFFLINE", "").casefold() in ("1", "on", "true", "yes"):
            raise FetchError(f"{self._hub} is not on this disk, and HF_HUB_OFFLINE is set: {_cures(self._hub)}")
        self._report(f"looking for {self._hub}", None)
        with self._opened(f"{self._endpoint}/api/models/{self._hub}/revision/main?blobs=true") as answer:
            commit, files = _described(answer.read(), self._hub)
        wanted = self._wanted(files, form, only_small)
        snapshot = self._folder / "snapshots" / commit
        self._all = sum(file.bytes for file in wanted)
        self._check_disk(wanted)
        for file in sorted(wanted, key=lambda file: file.bytes):
            link = snapshot / file.name
            if not link.exists():
                self._bring(commit, file)
                _link(self._folder / "blobs" / file.hash, link)
            self._done += file.bytes
        ref = self._folder / "refs" / "main"
        ref.parent.mkdir(parents=True, exist_ok=True)
        ref.write_text(commit)
        return snapshot / wanted[0].name if form and wanted[0].name.endswith(".gguf") else snapshot

    def _wanted(self, files: Sequence[_File], form: str, only_small: bool) -> list[_File]:
        by_name = {file.name: file for file in files}
        ggufs = [name for name in by_name if name.endswith(".gguf")]
        shards = [] if only_small else [file for name, file in by_name.items() if _SHARD.fullmatch(name)]
        if form:
            found = _of_form(ggufs, form)
            if len(found) == 1 and not _SPLIT.search(found[0]):
                return [by_name[found[0]]]
            if not ggufs:
                raise FetchError(f"{self._hub} has no file of {form}: name it alone, or with int8, int4 or fp8")
            raise FetchError(f"{self._hub} has no single file of {form}: it has {', '.join(map(_form_of, ggufs))}")
        if not shards and not only_small:
            if ggufs:
                raise FetchError(
                    f"{self._hub} has GGUF files: say which, such as {self._hub}:{_form_of(ggufs[0])}, "
                    f"of {', '.join(map(_form_of, ggufs))}"
                )
            raise FetchError(f"{self._hub} has neither safetensors nor GGUF files: use another repository")
        return [*shards, *(file for name, file in by_name.items() if _SMALL.fullmatch(name))]

    def _check_disk(self, wanted: Sequence[_File]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        missing = sum(file.bytes for file in wanted if not (self._folder / "blobs" / file.hash).exists())
        free = shutil.disk_usage(self._folder).free
        if missing + SPARE_BYTES > free:
            lacks = f"{missing / GB:.1f} GB are needed and {free / GB:.1f} GB free"
            raise OSError(errno.ENOSPC, lacks)

    def _bring(self, commit: str, file: _File) -> None:
        """Sees to it that a file's blob is whole."""
        blob = self._folder / "blobs" / file.hash
        blob.parent.mkdir(parents=True, exist_ok=True)
        lock = self._locks / f"{file.hash}.lock"  # which the hub's own tools take, too
        with alone(lock, self._hub, self._report):
            if blob.exists():
                return
            part = blob.with_name(f"{file.hash}.incomplete")
            url = f"{self._endpoint}/{self._hub}/resolve/{commit}/{quote(file.name)}"
            tries = 0
            while (there := part.stat().st_size if part.exists() else 0) < file.bytes or not part.exists():
                fault: Exception = ConnectionError("the connection breaks off")
                try:
                    self._append(url, part, there)
                except (OSError, http.client.HTTPException) as error:
                    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES):
                        raise
                    fault = error
                tries = 0 if part.exists() and part.stat().st_size > there else tries + 1
                if tries == TRIES:
                    raise FetchError(_unreachable(self._hub, fault)) from None
                self._wait(tries)
            if (found := file.digest(part)) != file.hash:
                part.unlink()
                raise FetchError(f"{file.name} of {self._hub} arrived damaged ({found}, not {file.hash}): try again")
            part.replace(blob)

    def _append(self, url: str, part: Path, there: int) -> None:
        """Adds to a file what it lacks, from `there` on."""
        headers = {"Range": f"bytes={there}-"} if there else {}
        with self._opened(url, headers) as answer:
            if there and answer.status != 206:  # it comes from the beginning
                there = 0
            with open(part, "r+b" if part.exists() else "wb") as file:
                file.truncate(there)
                file.seek(there)
                while block := answer.read(BLOCK):
                    file.write(block)
                    there += len(block)
                    self._report(f"fetching {self._hub}", min((self._done + there) / max(1, self._all), 0.99))

    def _wait(self, tries: int) -> None:
        until = time.monotonic() + PAUSE_S * tries
        while time.monotonic() < until:
            self._report(f"fetching {self._hub}: the connection broke off, trying again", None)
            time.sleep(POLL_S)

    @contextlib.contextmanager
    def _opened(self, url: str, headers: dict[str, str] | None = None) -> Iterator[Any]:
        request = urllib.request.Request(url, headers={"User-Agent": "infill-engine", **(headers or {})})
        if token := _token():
            request.add_header("Authorization", f"Bearer {token}")
        try:
            with self._opener.open(request, timeout=TIMEOUT_S) as answer:
                yield answer
        except urllib.error.HTTPError as error:
            error.close()
            if error.code in (401, 403):
                raise FetchError(
                    f"{self._endpoint} does not let you have {self._hub}, or has no such model: check the name, accept "
                    f"its terms at {self._endpoint}/{self._hub}, and set HF_TOKEN to your token"
                ) from None
            if error.code == 404:
                raise FetchError(f"there is no {self._hub} at {self._endpoint}: check the name") from None
            if error.code == 416 and headers:  # more was there than there is: begin anew
                raise FetchError(f"{self._hub} changed while it was fetched: try again") from None
            raise


class _SameHost(urllib.request.HTTPRedirectHandler):
    """A token is for the host that was asked: nobody gets it who is redirected to, nor who listens on the way there."""

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        request = super().redirect_request(req, fp, code, msg, headers, newurl)
        if request is not None and (request.type, request.host) != (req.type, req.host):
            request.remove_header("Authorization")
        return request


def _described(body: bytes, hub: str) -> tuple[str, list[_File]]:
    """The newest commit of a repository, and its files, as the hub's API tells them."""
    try:
        found = json.loads(body)
        files = []
        for one in found["siblings"]:
            large, name = one.get("lfs"), str(one["rfilename"])
            digest = str(large["sha256"] if large else one["blobId"])
            if not re.fullmatch(r"[0-9a-f]{40,64}", digest) or name.startswith("/") or ".." in name.split("/"):
                raise ValueError(f"a file {name!r}")
            files.append(_File(name, int(one["size"]), digest, bool(large)))
        commit = str(found["sha"])
        if not re.fullmatch(r"\w+", commit):
            raise ValueError(f"a commit {commit!r}")
    except (ValueError, KeyError, TypeError) as error:
        raise FetchError(f"what answers for {hub} is not Hugging Face's hub ({error}): check HF_ENDPOINT") from None
    return commit, files


def _token() -> str:
    if token := os.environ.get("HF_TOKEN", "").strip():
        return token
    home = Path(os.environ.get("HF_HOME") or hub_cache().parent)
    path = Path(os.environ.get("HF_TOKEN_PATH") or home / "token").expanduser()
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _link(blob: Path, link: Path) -> None:
    link.parent.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    try:
        link.symlink_to(os.path.relpath(blob, link.parent))
    except OSError:  # a file system without links
        blob.replace(link)


def _form_of(name: str) -> str:
    """Q4_K_M of it-Q4_K_M.gguf."""
    return name.removesuffix(".gguf").rpartition("/")[2].rpartition("-")[2]


def _unreachable(hub: str, error: Exception) -> str:
    why = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
    return f"cannot fetch {hub} ({' '.join(str(why).split())}): try again online, or {_cures(hub)}"


def _cures(hub: str) -> str:
    return f"copy a folder with it here and name that, or fetch it elsewhere with `hf download {hub}`"
