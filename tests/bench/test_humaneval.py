"""What a solution may do while its tests run, and what a problem looks like."""

from __future__ import annotations

import gzip
import sys

import msgspec
import pytest

from bench.humaneval import FILES, Problem, data_dir, passes, problems

PROBLEM = Problem(
    task_id="t/0",
    entry_point="double",
    prompt="def double(x):\n",
    canonical_solution="    y = 2 * x\n",
    suffix="    return y\n",
    test="def check(candidate):\n    assert candidate(2) == 4\n",
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits as Linux has them")


def test_a_right_function_passes_and_a_wrong_one_does_not():
    assert passes(PROBLEM.program(PROBLEM.text))
    assert not passes(PROBLEM.program(PROBLEM.text.replace("2 *", "3 *")))
    assert not passes(PROBLEM.program(PROBLEM.text.replace("2 *", "2 * (")))


def test_usual_modules_can_be_imported():
    names = "bisect, collections, copy, datetime, fractions, functools, hashlib, heapq, itertools, math, random, re"
    assert passes(f"import {names}, string, typing\nassert hashlib.md5(b'a').hexdigest()")


def test_what_is_printed_is_no_verdict():
    assert passes("print('x' * 100_000, flush=True)")


@pytest.mark.parametrize(
    "program",
    [
        "assert False",
        "raise SystemExit(0)",
        "import os; os._exit(0)",
        "input()",
        "open('x', 'w')",
        "import os; os.open('x', os.O_CREAT | os.O_RDWR)",
        "import os; os.remove('/etc/hostname')",
        "import os; os.mkdir('x')",
        "import shutil; shutil.rmtree('/tmp/there-is-no-such-folder')",
        "import os; os.fork()",
        "import os; os.kill(os.getppid(), 0)",
        "import os; os.system('true')",
        "import subprocess; subprocess.run(['true'])",
        "import threading; threading.Thread(target=print).start()",
        "import socket; socket.socket()",
        "import urllib.request; urllib.request.urlopen('http://localhost:1')",
        "import ctypes; ctypes.CDLL(None)",
        "x = 'a' * (1 << 31)",
        "f = lambda n: n and f(n - 1)\nf(10 ** 5)",
        "def f(:",
    ],
)
def test_what_reaches_outside_or_fails_does_not_pass(program):
    assert not passes(program)


def test_what_does_not_end_is_ended():
    assert not passes("while True: pass", cpu_s=1, wall_s=60)
    assert not passes("import time; time.sleep(600)", wall_s=0.5)


def test_a_hole_of_a_whole_line_leaves_its_newline():
    start, end = PROBLEM.hole
    assert PROBLEM.text[:start] + PROBLEM.text[end:] == "def double(x):\n\n    return y\n"
    inside = Problem("t/1", "double", "def double(x):\n    return ", "* x\n", "2 ", "")
    assert inside.text[slice(*inside.hole)] == "2 "


def test_problems_are_read_and_a_missing_file_says_what_to_do(tmp_path, monkeypatch):
    with gzip.open(tmp_path / FILES["single-line"], "wb") as file:
        file.write(msgspec.json.encode(PROBLEM) + b"\n")
    assert list(problems(tmp_path, "single-line")) == [PROBLEM]
    with pytest.raises(FileNotFoundError, match="--data"):
        next(problems(tmp_path, "random-span-light"))
    monkeypatch.setenv("INFILL_DATA", str(tmp_path))
    assert data_dir() == tmp_path
