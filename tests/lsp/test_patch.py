"""Filling a file from the command line, with a model from a table."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
from editor import fake_model, ready

from infill_lsp.patch import Patch, PatchError, patched

pytestmark = pytest.mark.process

TABLE = {"def f(a):\n    ": "return 2 * a", "x = ": "1"}


@pytest.fixture(scope="module")
def model(shared_home: Path) -> str:
    return asyncio.run(ready(fake_model(shared_home, "patch", TABLE)))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / ".git").mkdir()
    return tmp_path / "a.py"


def run(*arguments: object) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "infill_lsp", "fill", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, timeout=120, check=False)


def test_a_diff_is_printed_and_applies(model: str, file: Path) -> None:
    file.write_bytes(b"def f(a):\r\n    ...\r\n\r\n\r\nx = ???")
    ran = run(file, "--holes", "--model", model)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.decode() == (
        f"--- a{file}\n+++ b{file}\n@@ -1,5 +1,5 @@\n def f(a):\r\n-    ...\r\n+    return 2 * a\r\n \r\n \r\n"
        "-x = ???\n\\ No newline at end of file\n+x = 1\n\\ No newline at end of file\n"
    )
    assert file.read_bytes().endswith(b"???")


def test_a_file_is_written_with_all_else_as_it_was(model: str, file: Path) -> None:
    file.write_bytes(b"\xef\xbb\xbfdef f(a):\n    return a\n\x0c\r\n# \xe2\x80\xa8 \xf0\x9d\x94\x98\rx = ???\n")
    file.chmod(0o750)
    ran = run(file, "--line", 2, "--write", "--model", model)
    assert (ran.returncode, ran.stdout) == (0, b""), ran.stderr
    assert file.read_bytes() == (
        b"\xef\xbb\xbfdef f(a):\n    return 2 * a\n\x0c\r\n# \xe2\x80\xa8 \xf0\x9d\x94\x98\rx = ???\n"
    )
    assert file.stat().st_mode & 0o777 == 0o750
    assert [path.name for path in file.parent.iterdir() if path.is_file()] == ["a.py"]


def test_what_cannot_be_filled_is_said(model: str, file: Path) -> None:
    said: list[str] = []
    file.write_text("y = 1\n")
    patch = patched(file, None, model, said.append)
    assert patch.diff == b""
    assert said == [f"there is nothing to fill in {file}: no hole"]
    with pytest.raises(PatchError, match="no lines 3 to 4: the file has 2"):
        patched(file, (2, 3), model, said.append)
    with pytest.raises(PatchError, match="no lines 2 to 1"):
        patched(file, (1, 0), model, said.append)
    file.write_bytes(b"\xff")
    with pytest.raises(PatchError, match="is not UTF-8"):
        patched(file, None, model, said.append)
    with pytest.raises(PatchError, match="No such file"):
        patched(file.with_name("b.py"), None, model, said.append)
    file.with_name(".env").write_text("A = ???\n")
    with pytest.raises(PatchError, match="may hold secrets"):
        patched(file.with_name(".env"), None, model, said.append)


def test_a_file_that_changed_meanwhile_is_not_written(file: Path) -> None:
    file.write_bytes(b"mine\n")
    with pytest.raises(PatchError, match="has changed meanwhile"):
        Patch(file, b"old\n", b"new\n").write()
    assert file.read_bytes() == b"mine\n"
    link = file.with_name("link.py")
    link.symlink_to(file)
    Patch(link, b"mine\n", b"new\n").write()
    assert link.is_symlink()
    assert file.read_bytes() == b"new\n"


@pytest.mark.parametrize("arguments", [["a.py"], ["a.py", "--holes", "--line", "1"], ["a.py", "--holes", "--to", "2"]])
def test_wrong_usage_is_one_line(arguments: list[str]) -> None:
    ran = run(*arguments)
    assert ran.returncode == 2
    assert ran.stderr.count(b"\n") == 1
