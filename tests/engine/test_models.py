"""What a model is loaded with, refused in words."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from infill_engine import models, ngrams
from infill_engine.config import EngineConfig
from infill_engine.core import ModelError
from infill_engine.families.masked import KEPT, Caching
from infill_engine.protocol import Event, Final, InfillRequest, Snippet
from infill_engine.scheduler import Scheduler
from infill_engine.tokenizer import ByteCodec
from scripted import wait_for
from small_checkpoint import EXACT, save, save_gemma
from small_tokenizer import description


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


def quiet(message: str, progress: float | None) -> None:
    """Nobody reads reports here."""


@pytest.mark.parametrize("dtype", ["auto", "bf16", "int8"])
def test_a_folder_is_a_model(tmp_path: Path, dtype: str) -> None:
    pytest.importorskip("transformers", minversion="5.11", reason="transformers is not installed")
    save(tmp_path)
    engine: Any = models.load(EngineConfig(model=str(tmp_path), dtype=dtype, device="cpu"), quiet)
    assert engine.dtype == {"auto": "fp32"}.get(dtype, dtype)
    assert engine._denoiser._caching == KEPT
    wanted = InfillRequest(client="c", document="d", head="x = f(", tail=")", max_tokens=4, deadline_ms=60_000)
    *_, final = engine.events(wanted, time.monotonic())
    assert final.reason in ("end", "limit")
    assert final.timing.steps > 0


def test_a_form_behind_a_name_rounds_as_it_is_loaded(tmp_path: Path) -> None:
    pytest.importorskip("transformers", minversion="5.11", reason="transformers is not installed")
    save(tmp_path)
    engine = models.load(EngineConfig(model=f"{tmp_path}:int4"), quiet)
    assert (engine.name, engine.dtype) == (f"{tmp_path}:int4", "int4")
    (tmp_path / "it:int8").mkdir()
    assert models.located(str(tmp_path / "it:int8"), quiet) == tmp_path / "it:int8"


@pytest.mark.parametrize(
    ("asked", "on_cpu", "on_gpu"),
    [
        ({}, KEPT, Caching()),
        (EXACT, Caching(), Caching()),
        ({"refresh_passes": 8}, replace(KEPT, refresh=8), Caching(refresh=8)),
        ({"dual_cache": False}, replace(KEPT, dual=False), Caching()),
        ({"reuse_context": True}, KEPT, Caching(across=True)),
        ({"reuse_context": False}, replace(KEPT, across=False), Caching()),
    ],
)
def test_what_is_kept_suits_the_device_unless_it_is_said(
    asked: dict[str, Any], on_cpu: Caching, on_gpu: Caching
) -> None:
    config = EngineConfig(**asked)
    assert (models._caching(config, "cpu"), models._caching(config, "cuda:1")) == (on_cpu, on_gpu)


def test_there_is_always_room_for_the_contexts_of_one_request(tmp_path: Path) -> None:
    """Else each would encode them, find no room, and be refused, the next one as well."""
    pytest.importorskip("transformers", minversion="5.11", reason="transformers is not installed")
    save(tmp_path / "qwen2", head_dim=64)
    save_gemma(tmp_path / "gemma")
    text = "".join(f"name_{i} = {i}\n" for i in range(300))
    ask = InfillRequest(
        client="c", document="d", prefix=text, head="x = f(", tail=")", suffix="\n" + text, max_tokens=40,
        snippets=(Snippet("def f(): ...\n" * 30),), max_lines=3, deadline_ms=60_000,
    )  # fmt: skip
    for name in ("qwen2", "gemma"):
        config = EngineConfig(model=str(tmp_path / name), dtype="fp32", cache_mb=1)
        served = models.load(config, quiet)
        serving = Scheduler(lambda report, engine=served: engine)
        serving.start()
        finals = []
        for head in ("x = f(", "x = f(a", "x = f(a, b"):
            events: list[Event] = []
            serving.submit(msgspec.structs.replace(ask, head=head), events.append, time.monotonic())
            wait_for(lambda found=events: bool(found) and isinstance(found[-1], Final), 60)
            finals.append(events[-1])
            wait_for(lambda serving=serving: not serving.background, 60)
        serving.close()
        assert serving.join(10)
        assert {final.reason for final in finals} <= {"end", "limit"}
        assert all(final.timing.encoded < 20 for final in finals[1:])  # no loop


def test_what_is_wrong_with_a_folder_is_said_in_a_line(tmp_path: Path) -> None:
    pytest.importorskip("transformers", minversion="5.11", reason="transformers is not installed")
    config = EngineConfig(model=str(tmp_path))
    with pytest.raises(ModelError, match=r"config\.json"):
        models.load(config, quiet)
    save(tmp_path)
    with pytest.raises(ModelError, match="cannot be served in 'fp12': use one of auto, fp32, bf16"):
        models.load(EngineConfig(model=str(tmp_path), dtype="fp12"), quiet)
    (tmp_path / "tokenizer.json").rename(tmp_path / "elsewhere.json")
    with pytest.raises(ModelError, match=r"tokenizer\.json is missing: download the whole model"):
        models.load(config, quiet)
    (tmp_path / "tokenizer.json").write_text(description(added={"<far>": 999}))
    with pytest.raises(ModelError, match="its tokenizer has 1000 ids, its weights 320"):
        models.load(config, quiet)
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {"architectures": ["OtherModel"]}))
    with pytest.raises(ModelError, match="holds a model of type 'OtherModel', which is not served"):
        models.load(config, quiet)
