"""What is wrong with a model, met by the real engine process: one clear line, and the former model goes on."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from infill_engine import catalogue, process
from infill_engine.catalogue import AUTO
from infill_engine.protocol import Candidate, Final
from safetensors.torch import load_file, save_file
from scripted import ask, wait_for
from small_checkpoint import save
from test_process import infill, state_of

pytest.importorskip("transformers", minversion="5.11", reason="transformers is not installed")
pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def engine() -> Iterator[Path]:
    """Folders in which an engine serves a model that writes "y + 1" behind "x = "."""
    with tempfile.TemporaryDirectory(prefix="infill-") as name, pytest.MonkeyPatch.context() as patch:
        home = Path(name)
        patch.setenv("INFILL_RUNTIME_DIR", str(home / "run"))
        patch.setenv("INFILL_CACHE_DIR", str(home / "cache"))
        patch.setenv("HF_HUB_CACHE", str(home / "hub"))
        patch.setenv("HF_HUB_OFFLINE", "1")
        (home / "table.json").write_text(json.dumps({"x = ": "y + 1"}))
        catalogue.choose(f"fake:{home / 'table.json'}")
        save(home / "good")
        running = subprocess.Popen([sys.executable, "-m", "infill_engine", "serve", "--threads", "1"])
        wait_for(lambda: state_of(AUTO) == "ready", 60)
        yield home
        running.kill()
        running.wait()


def truncated(folder: Path) -> None:
    shard = folder / "model.safetensors"
    os.truncate(shard, shard.stat().st_size - 100)


def of_another_kind(folder: Path) -> None:
    configured(folder, architectures=["LlamaForCausalLM"])


def without_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def without_mask(folder: Path) -> None:
    configured(folder, mask_token_id=None)


def with_nan(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = torch.nan
    save_file(tensors, folder / "model.safetensors")


def without_a_shard(folder: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "model.safetensors", "lm_head.weight": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def of_other_sizes(folder: Path) -> None:
    configured(folder, intermediate_size=96, hidden_size=64)


def without_a_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.0.self_attn.k_proj.weight"]
    save_file(tensors, folder / "model.safetensors")


def without_a_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def no_gguf(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "it.gguf").write_bytes(b"GGUF" + bytes(40))


def empty(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def configured(folder: Path, **changed: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changed))


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (truncated, "model.safetensors is cut short: it has"),
        (of_another_kind, "holds a model of type 'LlamaForCausalLM', which is not served"),
        (without_tokenizer, "tokenizer.json is missing: download the whole model"),
        (without_mask, "mask_token_id"),
        (with_nan, "model.layers.1.mlp.up_proj.weight holds NaN or infinity: download it again"),
        (without_a_shard, "model-2.safetensors cannot be read (No such file or directory)"),
        (of_other_sizes, "model.embed_tokens.weight is [320, 32], not [320, 64]: the config is another's"),
        (without_a_tensor, "has no tensor model.layers.0.self_attn.k_proj.weight"),
        (without_a_config, "config.json cannot be read"),
        (no_gguf, "it.gguf"),
        (empty, "config.json is missing: download the whole model"),
    ],
)
def test_one_line_says_what_is_wrong_and_the_former_model_answers(
    engine: Path, tmp_path: Path, harm: Callable[[Path], None], says: str
) -> None:
    folder = tmp_path / "it"
    shutil.copytree(engine / "good", folder)
    harm(folder)
    with pytest.raises(process.EngineError) as caught:
        process.change(str(folder), lambda message, progress: None)
    line = str(caught.value)
    assert says in line
    assert "\n" not in line
    assert "Error:" not in line
    assert line.endswith(f"fake:{engine / 'table.json'} goes on")
    candidate, final = infill(AUTO, ask(head="x = ", deadline_ms=10_000))[-2:]
    assert isinstance(candidate, Candidate)
    assert (candidate.text, final) == ("y + 1", Final("end"))


def test_what_is_nothing_or_far_away_is_said_in_a_line(engine: Path) -> None:
    for name, says in (
        ("/nowhere/at/all", "there is no model '/nowhere/at/all': use one of dreamon"),
        ("who/what", "who/what is not on this disk, and HF_HUB_OFFLINE is set: copy a folder with it here"),
        ("open-dcoder", "fredzzp/open-dcoder-0.5B is not on this disk"),
    ):
        with pytest.raises(process.EngineError, match=says):
            process.change(name, lambda message, progress: None)


def test_a_good_one_takes_over(engine: Path) -> None:
    good = str(engine / "good")
    assert process.change(good, lambda message, progress: None) == good
    status = process.status(AUTO)
    assert status
    assert (status.model, status.message) == (good, "")
    assert infill(AUTO, ask(head="x = ", deadline_ms=10_000))[-1] in (Final("end"), Final("limit"))
    assert catalogue.chosen() == good
