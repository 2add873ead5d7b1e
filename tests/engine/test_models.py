"""What a model is loaded with, refused in words."""

from __future__ import annotations

from pathlib import Path

import pytest
from infill_engine import models
from infill_engine.config import EngineConfig
from infill_engine.core import ModelError


@pytest.mark.parametrize("device", ["cuda:99", "cpu:0", "abacus"])
def test_a_device_that_is_not_there_is_refused_with_those_that_are(home: Path, device: str) -> None:
    with pytest.raises(ModelError, match=f"there is no device '{device}' here: use one of auto, cpu"):
        models.load(EngineConfig(device=device), lambda message, progress: None)
