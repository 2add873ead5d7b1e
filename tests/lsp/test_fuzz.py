"""Half a minute of `fuzz`; `python tests/lsp/fuzz.py --seeds 1000` tries more."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import fuzz
import pytest

SECONDS = 30


@pytest.mark.process
def test_nothing_that_is_sent_breaks_the_server() -> None:
    command = [sys.executable, str(Path(fuzz.__file__)), "--seeds", "1000", "--seconds", str(SECONDS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20 * SECONDS, check=False)
    assert done.returncode == 0, done.stdout
    print(done.stdout)
