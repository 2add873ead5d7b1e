"""Checkpoints in every published form through `models.load`: a GGUF file as llama.cpp writes it, quantised folders, an
expert's matrices one by one; what it costs in memory; and what nobody reads."""

from __future__ import annotations

import json
import logging
import re
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from infill_engine import checkpoint, models
from infill_engine.checkpoint import Loaded, opened
from infill_engine.config import EngineConfig
from infill_engine.core import ModelError
from infill_engine.families.diffusion_gemma import Shape
from infill_engine.protocol import Candidate, InfillRequest
from infill_kernels import experts
from infill_kernels.stored import E2M1, Dense, Scaled, relative_error
from safetensors.torch import load_file, save_file
from small_checkpoint import ADDED, EXACT, GEMMA_CANVAS, ROWS, save, save_gemma
from torch import Tensor

pytest.importorskip("transformers", minversion="5.11", reason="transformers is not installed")


def quiet(message: str, progress: float | None) -> None:
    """Nobody reads reports here."""


def text_of(model: Path, **options: Any) -> str:
    """What it writes into a gap."""
    engine = models.load(EngineConfig(model=str(model), threads=1, **EXACT, **options), quiet)
    wanted = InfillRequest(client="c", document="d", head="x = f(", tail=")", max_tokens=6, deadline_ms=60_000)
    *events, final = engine.events(wanted, time.monotonic())
    assert final.reason in ("end", "limit"), final
    return next((event.text for event in reversed(events) if isinstance(event, Candidate)), "")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "it"
    path.mkdir()
    save(path)
    return path


def write_gguf(folder: Path, path: Path, kind: Kind, arch: str = "dream") -> None:
    """As llama.cpp converts a folder: names from the gguf package's own table, matrices in `kind`."""
    config = json.loads((folder / "config.json").read_text())
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], config["num_hidden_layers"])
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    pieces = {i: piece for piece, i in tokenizer["model"]["vocab"].items()} | {i: name for name, i in ADDED.items()}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([pieces.get(i, f"[PAD{i}]") for i in range(ROWS)])
    writer.add_token_types([3 if i in ADDED.values() else 1 if i in pieces else 5 for i in range(ROWS)])
    merges = tokenizer["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_mask_token_id(config["mask_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    for name, tensor in load_file(folder / "model.safetensors").items():
        own = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert own is not None, name
        values = tensor.float().numpy()
        wanted = kind if values.ndim == 2 else Kind.F32
        writer.add_tensor(own, gguf.quants.quantize(values, wanted), raw_dtype=wanted)
    finish(writer)


def finish(writer: gguf.GGUFWriter) -> None:
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()


@pytest.mark.parametrize("kind", [Kind.F32, Kind.BF16, Kind.Q8_0], ids=lambda kind: kind.name)
def test_a_gguf_file_is_served_as_its_folder_is(
    folder: Path, tmp_path: Path, kind: Kind, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "it.gguf"
    write_gguf(folder, path, kind)
    file, whole = opened(path), opened(folder)
    assert set(file.names) == set(whole.names)
    worst = max(relative_error(file.read(name), whole.read(name).rows(0, 9999, torch.float32)) for name in file.names
                if len(file.shape(name)) == 2)  # fmt: skip
    assert worst < {Kind.F32: 1e-7, Kind.BF16: 3e-3, Kind.Q8_0: 9e-3}[kind]
    with caplog.at_level(logging.INFO, logger="infill_engine.models"):
        text = text_of(path, dtype="fp32")
    if kind == Kind.F32:
        assert text == text_of(folder, dtype="fp32")
    assert ("14 matrices of Q8_0, off by at most 0.0e+00" in caplog.text) == (kind == Kind.Q8_0)


def test_a_gguf_files_own_tokenizer_is_the_folders(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "alone" / "it.gguf"
    path.parent.mkdir()
    write_gguf(folder, path, Kind.F32)
    own = models._codec(opened(path), path.parent, "DreamModel", quiet)
    whole = models._codec(opened(folder), folder, "Qwen2ForCausalLM", quiet)
    for text in ("def f(x):\n    return x + 1\n", "  ); // é\n\n\t}", "<mask>", ""):
        assert own.encode(text) == whole.encode(text)
    assert own.tokens[:300] == whole.tokens[:300]
    assert len(own.tokens) == ROWS
    spoilt = opened(path)
    spoilt.file.facts["tokenizer.ggml.tokens"][70] = "\u068a"  # which stands for no byte
    with pytest.raises(ModelError, match=r"the tokenizer in .*it\.gguf cannot be read \(.*\): download it again"):
        models._codec(spoilt, path.parent, "DreamModel", quiet)


def test_names_of_published_gguf_files_are_those_of_the_gguf_package() -> None:
    for arch in ("DREAM", "LLADA", "QWEN2"):
        known = {gguf.TENSOR_NAMES[kind].format(bid="{}") for kind in gguf.MODEL_TENSORS[gguf.MODEL_ARCH[arch]]}
        table, _, _ = checkpoint._ARCHITECTURES[arch.lower()]
        assert {name.removesuffix(".bias") for name in table} <= known
    # DiffusionGemma's are Gemma 4's but for what says how encoder and decoder differ.
    known = {gguf.TENSOR_NAMES[kind].format(bid="{}") for kind in gguf.MODEL_TENSORS[gguf.MODEL_ARCH.GEMMA4]}
    own = {name.removesuffix(".bias").removesuffix(".scale") for name in checkpoint._GEMMA}
    assert {name.removeprefix("blk.{}.") for name in own - known} == {
        "self_cond_pre_norm", "self_cond_gate", "self_cond_up", "self_cond_down", "enc_layer_output_scale",
    }  # fmt: skip


@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q8_0, Kind.Q4_0], ids=lambda kind: kind.name)
def test_the_rows_of_lladas_queries_and_keys_are_put_back_into_halves(tmp_path: Path, kind: Kind) -> None:
    heads, of_keys, size, width, path = 4, 2, 8, 32, tmp_path / "it.gguf"
    root = "model.transformer."
    shapes = {"wte": (320, width), "blocks.0.q_proj": (heads * size, width), "blocks.0.k_proj": (of_keys * size, width)}
    exact = {f"{root}{name}.weight": torch.randn(*shape) for name, shape in shapes.items()}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLADA, 1)
    writer = gguf.GGUFWriter(path, "llada")
    for write, value in (
        (writer.add_block_count, 1),
        (writer.add_context_length, 512),
        (writer.add_embedding_length, width),
        (writer.add_feed_forward_length, 64),
        (writer.add_head_count, heads),
        (writer.add_head_count_kv, of_keys),
        (writer.add_layer_norm_rms_eps, 1e-5),
    ):
        write(value)
    for name, tensor in exact.items():
        count = {"q": heads, "k": of_keys}.get(name.rpartition("_proj")[0][-1:])
        rows = tensor if count is None else tensor.view(count, 2, size // 2, width).transpose(1, 2).reshape(-1, width)
        values = gguf.quants.quantize(rows.contiguous().numpy(), kind)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), values, raw_dtype=kind)
    finish(writer)
    file = opened(path)
    for name, tensor in exact.items():
        assert relative_error(file.read(name), tensor) < {Kind.F32: 1e-7, Kind.Q8_0: 0.01, Kind.Q4_0: 0.12}[kind], name
    assert (file.config["n_heads"], file.config["n_kv_heads"], file.config["weight_tying"]) == (heads, of_keys, True)


def test_a_gguf_file_of_diffusion_gemma_is_served_as_its_folder_is(tmp_path: Path) -> None:
    folder = tmp_path / "it"
    folder.mkdir()
    save_gemma(folder)
    path, text = tmp_path / "alone" / "it.gguf", json.loads((folder / "config.json").read_text())["text_config"]
    path.parent.mkdir()
    full = [kind == "full_attention" for kind in text["layer_types"]]
    writer = gguf.GGUFWriter(path, "diffusion-gemma")
    for write, value in (
        (writer.add_block_count, len(full)),
        (writer.add_context_length, text["max_position_embeddings"]),
        (writer.add_embedding_length, text["hidden_size"]),
        (writer.add_head_count, text["num_attention_heads"]),
        (writer.add_head_count_kv, [1 if is_full else text["num_key_value_heads"] for is_full in full]),
        (writer.add_key_length, 16),
        (writer.add_key_length_swa, text["head_dim"]),
        (writer.add_sliding_window, text["sliding_window"]),
        (writer.add_rope_freq_base, 1e6),
        (writer.add_rope_freq_base_swa, 1e4),
        (writer.add_expert_used_count, text["top_k_experts"]),
        (writer.add_layer_norm_rms_eps, text["rms_norm_eps"]),
        (writer.add_final_logit_softcapping, 30.0),
    ):
        write(value)
    writer.add_uint32("diffusion.canvas_length", GEMMA_CANVAS)
    whole, table = opened(folder), checkpoint._GEMMA
    names = {published.replace("{root}", "model.decoder."): own for own, published in table.items()}
    for name in checkpoint.text_names(whole):
        layer = re.search(r"layers\.(\d+)\.", name)
        own = names.get(re.sub(r"layers\.\d+\.", "layers.{}.", name))
        if own is not None:
            own = own.replace("{}", layer[1]) if layer else own
            stored = whole.read(name).rows(0, whole.shape(name)[0], torch.float32)
            writer.add_tensor(own if own.endswith(".scale") else f"{own}.weight", stored.numpy())
    finish(writer)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(folder / name, path.parent)
    read, said = Shape.of(opened(path).config), Shape.of(whole.config)
    assert read == replace(said, eps=pytest.approx(said.eps))  # which the file has in fp32
    assert text_of(path, dtype="fp32") == text_of(folder, dtype="fp32")


def fp8(weight: Tensor, scale: Tensor) -> Tensor:
    return (weight / scale).to(torch.float8_e4m3fn)


def packed(codes: Tensor, bits: int) -> Tensor:
    """As compressed-tensors packs integers: half their range added, the first lowest, rows filled up with zeros."""
    a_word = 32 // bits
    padded = torch.nn.functional.pad(codes + (1 << bits - 1), (0, -codes.shape[1] % a_word)).long()
    words = padded.view(len(codes), -1, a_word) << torch.arange(0, 32, bits)
    return words.sum(-1).to(torch.uint32).view(torch.int32)


def quantised(weight: Tensor, form: str) -> dict[str, Tensor]:
    """A matrix as a published checkpoint of that form has it, by the endings of its names."""
    most = weight.abs().max()
    if form == "fp8-tensor":
        return {"": fp8(weight, most / 448), "_scale": most / 448}
    if form == "fp8-block":
        blocks = weight.view(len(weight) // 16, 16, -1, 16)
        scale = blocks.abs().amax((1, 3)) / 448
        return {"": fp8(blocks, scale[:, None, :, None]).view(weight.shape), "_scale_inv": scale}
    if form == "nvfp4":
        groups = weight.view(len(weight), -1, 16)
        whole = most / 6 / 448
        scale = (groups.abs().amax(-1) / 6 / whole).clamp(min=2**-6).to(torch.float8_e4m3fn)
        exact = groups / (scale.float() * whole)[..., None]
        codes = (exact[..., None] - torch.tensor(E2M1)).abs().argmin(-1).view(weight.shape).to(torch.uint8)
        return {"": codes[:, ::2] | codes[:, 1::2] << 4, "_scale": scale, "_scale_2": whole}
    bits, group = {"int4": (4, 16), "int8": (8, weight.shape[1])}[form]
    groups = weight.view(len(weight), -1, group)
    scale = groups.abs().amax(-1) / ((1 << bits - 1) - 1)
    codes = (groups / scale[..., None]).round().view(weight.shape).int()
    if form == "int8":
        return {"": codes.to(torch.int8), "_scale": scale}
    shape = torch.tensor(weight.shape)
    order = torch.arange(weight.shape[1], dtype=torch.int32) // group
    return {"_packed": packed(codes, bits), "_scale": scale, "_shape": shape, "_g_idx": order}


METHODS = {"fp8-tensor": "compressed-tensors", "fp8-block": "fp8", "nvfp4": "modelopt", "int4": "compressed-tensors",
           "int8": "compressed-tensors"}  # fmt: skip
#: Of a matrix of normal numbers, at most.
ERRORS = {"fp8-tensor": 0.04, "fp8-block": 0.04, "nvfp4": 0.12, "int4": 0.11, "int8": 0.01}


@pytest.mark.parametrize("form", METHODS)
def test_a_quantised_folder_is_served(folder: Path, form: str) -> None:
    tensors: dict[str, Tensor] = {}
    exact = load_file(folder / "model.safetensors")
    for name, tensor in exact.items():
        if "_proj.weight" in name:
            parts = quantised(tensor.float(), form)
            tensors |= {f"{name}{ending}": part.contiguous() for ending, part in parts.items()}
        else:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    method = {"quant_method": METHODS[form], "weight_block_size": [16, 16]}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": method}))
    read = opened(folder)
    assert set(read.names) == set(exact)
    for name, tensor in exact.items():
        stored = read.read(name)
        assert stored.shape == tuple(tensor.shape) == read.shape(name)
        if "_proj.weight" in name:
            assert 0 < relative_error(stored, tensor) < ERRORS[form]
            assert not isinstance(stored, Dense)
            assert stored.nbytes == read.served_bytes(name, 2)
            kind, error = read.rounding(name)
            assert (kind == "NVFP4") == (error > 0) == (form == "nvfp4")
            assert error < 3e-4
    text_of(folder)
    text_of(folder, dtype="fp32")


@pytest.mark.parametrize("columns", [16, 20])
@pytest.mark.parametrize("bits", [4, 8])
def test_integers_packed_into_words_are_those_that_were_packed(tmp_path: Path, bits: int, columns: int) -> None:
    torch.manual_seed(0)
    codes = torch.randint(-(1 << bits - 1), 1 << bits - 1, (6, columns))
    scale = torch.rand(6, columns // 4)
    folder = tmp_path
    (folder / "config.json").write_text("{}")
    sides = {
        "a.weight_packed": packed(codes, bits),
        "a.weight_scale": scale,
        "a.weight_shape": torch.tensor([6, columns]),
    }
    save_file(sides, folder / "m.safetensors")
    stored = opened(folder).read("a.weight")
    torch.testing.assert_close(stored.rows(0, 6, torch.float32), codes * scale.repeat_interleave(4, 1))
    order = torch.arange(columns, dtype=torch.int32).flip(0) // 4
    save_file(sides | {"a.weight_g_idx": order}, folder / "m.safetensors")
    with pytest.raises(ModelError, match=r"has groups out of order .actorder., which are not read"):
        opened(folder).read("a.weight")
    save_file(sides | {"a.weight_zero_point": torch.zeros(1, 1)}, folder / "m.safetensors")
    with pytest.raises(ModelError, match="has zero points, which are not read: use a symmetric quantisation"):
        opened(folder).read("a.weight")


@pytest.mark.parametrize("method", ["awq", "gptq", "bitsandbytes"])
def test_what_is_not_read_is_named_and_what_is(folder: Path, method: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": method}}))
    with pytest.raises(ModelError, match=f"is quantised by {method}, which is not read: use bf16, FP8, NVFP4"):
        opened(folder)


@pytest.mark.parametrize("form", ["bf16", "fp8-tensor", "nvfp4"])
def test_experts_one_by_one_are_one_stack(tmp_path: Path, form: str) -> None:
    torch.manual_seed(0)
    (tmp_path / "config.json").write_text("{}")
    gate, up, down = (torch.randn(3, *size) for size in ((16, 32), (16, 32), (32, 16)))
    tensors: dict[str, Tensor] = {}
    for name, whole in (("gate_proj", gate), ("up_proj", up), ("down_proj", down)):
        for i, matrix in enumerate(whole):
            parts = {"": matrix.bfloat16()} if form == "bf16" else quantised(matrix, form)
            tensors |= {f"l.experts.{i}.{name}.weight{ending}": part.contiguous() for ending, part in parts.items()}
    save_file(tensors, tmp_path / "m.safetensors")
    weights = Loaded(opened(tmp_path), "cpu", torch.bfloat16, "stored")
    for name, exact in (("gate_up_proj", torch.cat([gate, up], 1)), ("down_proj", down)):
        stored = weights.stored(f"l.experts.{name}")
        assert stored.shape == tuple(exact.shape)
        assert relative_error(stored, exact) < {"bf16": 0.01, "fp8-tensor": 0.04, "nvfp4": 0.12}[form]
        if form == "fp8-tensor":  # a GPU multiplies all of them at once
            assert isinstance(stored, Scaled)
            assert experts._an_output(stored)
    with pytest.raises(ModelError, match=r"has no tensor m\.experts\.down_proj"):
        weights.stored("m.experts.down_proj")


#: Writes four shards of bf16, then loads them tensor by tensor, as if each went to another device: prints the bytes of
#: a shard, and the most memory held meanwhile, over what was held before. That of mapped files counts, too.
PEAK = """
import sys, threading, time
from pathlib import Path
import torch
from safetensors.torch import save_file
from infill_engine.checkpoint import Loaded, opened
torch.set_num_threads(1)
folder, form, shards = Path(sys.argv[1]), sys.argv[2], 4
names = [[f"l.{s}.{i}.weight" for i in range(4)] for s in range(shards)]
(folder / "config.json").write_text("{}")
for s, members in enumerate(names):
    ones = torch.ones(4096, 4096, dtype=torch.bfloat16)
    save_file({name: ones.clone() for name in members}, folder / f"m{s}.safetensors")
del ones
def held():
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(lines[name].split()[0]) * 1024 for name in ("RssAnon", "RssFile"))
weights = Loaded(opened(folder), "cpu", torch.bfloat16, form)
weights.stored(names[0][0])
before = most = held()
def watch():
    global most
    while not done:
        most = max(most, held())
        time.sleep(0.005)
done = False
watching = threading.Thread(target=watch)
watching.start()
for members in names:
    for name in members:
        weights.stored(name)
done = True
watching.join()
print((folder / "m0.safetensors").stat().st_size, most - before)
"""


@pytest.mark.process
@pytest.mark.parametrize("form", ["stored", "int8"])
def test_the_host_holds_less_than_a_shard_and_a_fifth(tmp_path: Path, form: str) -> None:
    if not Path("/proc/self/status").exists():
        pytest.skip("this system does not tell how much memory a process holds")
    done = subprocess.run([sys.executable, "-c", PEAK, tmp_path, form], capture_output=True, text=True, check=True)
    shard, most = map(int, done.stdout.split())
    assert shard > 128 << 20
    assert most < 1.2 * shard, f"{most / shard:.2f} of a shard"
