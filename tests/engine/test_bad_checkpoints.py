"""Checkpoints that are wrong: one clear line each, and the model that serves goes on."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import scripted
import torch
from infill_engine import models
from infill_engine.checkpoint import opened, text_names
from infill_engine.config import EngineConfig
from infill_engine.core import ModelError
from infill_engine.protocol import Candidate, Final, InfillRequest
from infill_engine.scheduler import Scheduler
from safetensors.torch import load_file, save_file

pytest.importorskip("transformers", minversion="5.11", reason="transformers is not installed")

from small_checkpoint import save, save_gemma

KINDS = ("qwen2", "gemma")
#: A model is loaded in less than a second, on a machine that has nothing else to do.
wait_for = partial(scripted.wait_for, timeout=60.0)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {kind: tmp_path_factory.mktemp(kind) for kind in KINDS}
    save(made["qwen2"])
    save_gemma(made["gemma"])
    return made


@pytest.fixture(scope="module")
def scheduler(folders: dict[str, Path]) -> Iterator[Scheduler]:
    """One that serves a good checkpoint."""
    serving = Scheduler(lambda report: load(folders["qwen2"]))
    serving.start()
    wait_for(lambda: serving.phase.state == "ready")
    yield serving
    serving.close()
    assert serving.join(10)


def load(folder: Path, **config: Any) -> Any:
    return models.load(EngineConfig(model=str(folder), dtype="fp32", **config), lambda message, progress: None)


def answered(scheduler: Scheduler, **fields: Any) -> tuple[str, Final]:
    events: list[Any] = []
    limits = {"max_tokens": 4, "deadline_ms": 60_000}
    request = InfillRequest(client="c", document="d", **{"head": "x = f(", "tail": ")", **limits, **fields})
    scheduler.submit(request, events.append, time.monotonic())
    wait_for(lambda: bool(events) and isinstance(events[-1], Final))
    texts = [event.text for event in events if isinstance(event, Candidate)]
    return texts[-1] if texts else "", events[-1]


def written(folder: Path, name: str, change: Callable[[dict[str, Any]], Any]) -> None:
    found = json.loads((folder / name).read_text())
    change(found)
    (folder / name).write_text(json.dumps(found))


def configured(**changed: Any) -> Callable[[Path], None]:
    return lambda folder: written(folder, "config.json", lambda found: found.update(changed))


def with_nan(folder: Path) -> None:
    shard = next(folder.glob("*.safetensors"))
    tensors = load_file(shard)
    name = next(name for name in sorted(tensors) if "layers.1." in name and tensors[name].dim() > 1)
    tensors[name][0, 0] = torch.nan
    save_file(tensors, shard)


def cut_short(folder: Path) -> None:
    shard = next(folder.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-100])


def without_weights(folder: Path) -> None:
    for shard in folder.glob("*.safetensors"):
        shard.unlink()


def without_a_layer(folder: Path) -> None:
    shard = next(folder.glob("*.safetensors"))
    save_file({name: tensor for name, tensor in load_file(shard).items() if "layers.1." not in name}, shard)


def without_a_bias(folder: Path) -> None:
    shard = next(folder.glob("*.safetensors"))
    save_file(
        {name: tensor for name, tensor in load_file(shard).items() if "1.self_attn.k_proj.bias" not in name}, shard
    )


def of_another_kind(folder: Path) -> None:
    written(folder, "tokenizer.json", lambda found: found.update(model={"type": "WordPiece", "vocab": {}}))


FAULTS: dict[str, tuple[tuple[str, ...], Callable[[Path], None], str]] = {
    "another architecture": (KINDS, configured(architectures=["Llama"]), "of type 'Llama', which is not served"),
    "no architecture": (KINDS, configured(architectures=None), "of type '', which is not served"),
    "no config": (KINDS, lambda folder: (folder / "config.json").unlink(), "config.json"),
    "no weights": (KINDS, without_weights, "no *.safetensors"),
    "no tokenizer": (KINDS, lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json is missing"),
    "another tokenizer": (KINDS, of_another_kind, "it is WordPiece, and only BPE is read"),
    "no mask": (("qwen2",), configured(mask_token_id=None), "says mask_token_id"),
    "a mask beyond the ids": (("qwen2",), configured(mask_token_id=999), "its mask is id 999, of 320 ids"),
    "no end": (("qwen2",), configured(eos_token_id=None), "says eos_token_id"),
    "an end beyond the ids": (
        ("gemma",),
        lambda folder: written(folder, "generation_config.json", lambda found: found.update(eos_token_id=[999])),
        "its end is id 999, of 700 ids",
    ),
    "NaN": (KINDS, with_nan, "holds NaN or infinity: download it again"),
    "a shard that is cut short": (KINDS, cut_short, "is cut short"),
    "a layer that is missing": (KINDS, without_a_layer, "has no tensor"),
    "a bias that is missing": (("qwen2",), without_a_bias, "has no tensor model.layers.1.self_attn.k_proj.bias"),
    "no sampler": (
        ("gemma",),
        lambda folder: written(folder, "generation_config.json", lambda found: found.update(t_min="cold")),
        "its config says 'cold' for t_min",
    ),
    "a quantisation that is none": (KINDS, configured(quantization_config="odd"), "is quantised by odd, which"),
}
CASES = [(name, kind) for name, (kinds, _, _) in FAULTS.items() for kind in kinds]


@pytest.mark.parametrize(("fault", "kind"), CASES, ids=lambda value: value)
def test_it_is_said_in_a_line_and_the_former_model_goes_on(
    scheduler: Scheduler, folders: dict[str, Path], tmp_path: Path, fault: str, kind: str
) -> None:
    bad = tmp_path / "model"
    shutil.copytree(folders[kind], bad)
    _, spoil, told = FAULTS[fault]
    spoil(bad)
    former = scheduler.engine
    scheduler.succeed("bad", lambda report: load(bad))
    wait_for(lambda: scheduler.successor is None)
    assert told in scheduler.phase.message
    assert "\n" not in scheduler.phase.message
    assert str(tmp_path) in scheduler.phase.message or "its " in scheduler.phase.message
    assert (scheduler.phase.state, scheduler.engine) == ("ready", former)
    assert answered(scheduler)[1].reason in ("end", "limit")


@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_of_another_size_is_named_before_anything_is_read(
    folders: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    bad = tmp_path / "model"
    shutil.copytree(folders[kind], bad)
    shard = next(bad.glob("*.safetensors"))
    tensors = load_file(shard)
    for name in [
        name for name in text_names(opened(bad)) if ".layers." not in name or re.search(r"\.layers\.[15]\.", name)
    ]:
        for wrong in (tensors[name].repeat(2, *[1] * (tensors[name].dim() - 1)), tensors[name][None]):
            save_file(tensors | {name: wrong.contiguous()}, shard)
            with pytest.raises(ModelError, match=r"its .* is \[.*\], not \[.*\]: the config is another's"):
                load(bad)
    save_file(tensors, shard)
    if kind == "qwen2":
        written(bad, "config.json", lambda found: found.update(vocab_size=10))
    load(bad)  # how many ids there are is told by the weights


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("positions", [300, 64])
def test_a_context_longer_than_the_models_is_cut_or_refused(
    folders: dict[str, Path], tmp_path: Path, kind: str, positions: int
) -> None:
    """Of the prefix as much is seen as there is room for; a model with next to no room says so, and lives on."""
    small = tmp_path / "model"
    shutil.copytree(folders[kind], small)
    at = {"max_position_embeddings": positions}
    written(small, "config.json", lambda found: found.get("text_config", found).update(at))
    serving = Scheduler(lambda report: load(small))
    serving.start()
    wait_for(lambda: serving.phase.state == "ready")
    text = "".join(f"name_{i} = {i}\n" for i in range(200))
    _, final = answered(serving, prefix=text, suffix="\n" + text, max_tokens=64, max_lines=9)
    if positions == 300:
        assert final.reason in ("end", "limit")
    else:
        assert final.reason == "error"
        assert "tokens are more than the model's 64" in final.message
        assert "\n" not in final.message
        assert answered(serving, head="f(", tail=")", max_lines=1)[1].reason in ("end", "limit")
    serving.close()
    assert serving.join(10)
