"""What a model is loaded with, refused in words."""

from __future__ import annotations

from pathlib import Path

import pytest
from infill_engine import models, ngrams
from infill_engine.config import EngineConfig
from infill_engine.core import ModelError
from infill_engine.tokenizer import ByteCodec


@pytest.mark.parametrize("device", ["cuda:99", "cpu:0", "abacus"])
def test_a_device_that_is_not_there_is_refused_with_those_that_are(home: Path, device: str) -> None:
    with pytest.raises(ModelError, match=f"there is no device '{device}' here: use one of auto, cpu"):
        models.load(EngineConfig(device=device), lambda message, progress: None)


def test_there_is_no_memory_where_it_is_not_wanted_or_would_be_too_slow(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert None not in models._memory(EngineConfig(), ByteCodec())
    assert models._memory(EngineConfig(memory=False), ByteCodec()) == (None, None)
    monkeypatch.setattr(ngrams, "available", lambda: False)
    assert models._memory(EngineConfig(), ByteCodec()) == (None, None)
