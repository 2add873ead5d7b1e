"""A few seeds of `fuzz`; `python tests/lsp/fuzz.py --seeds 1000` tries more."""

from __future__ import annotations

from pathlib import Path

import fuzz
import pytest


@pytest.mark.parametrize("seed", range(12))
async def test_nothing_that_is_sent_breaks_the_server(home: Path, seed: int) -> None:
    await fuzz.trial(seed)
