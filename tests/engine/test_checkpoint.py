"""Checkpoints as they lie on disk: GGUF's blocks, safetensors' forms, and files that are broken."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from infill_engine import catalogue, models
from infill_engine.catalogue import GB, Machine
from infill_engine.checkpoint import Loaded, SafetensorsFolder, needed_bytes, opened
from infill_engine.core import ModelError
from infill_engine.gguf_file import GgufFile
from infill_kernels.stored import Grouped, Int4Linear, Scaled, blocked, linear, relative_error
from safetensors.torch import save_file
from torch import Tensor

KINDS = (Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K)


def blocks(kind: Kind, *shape: int) -> np.ndarray:
    """Random blocks with scales of the size that weights have."""
    rng = np.random.default_rng(int(kind))
    numbers, size = gguf.GGML_QUANT_SIZES[kind]
    raw = rng.integers(0, 256, (int(np.prod(shape)) // numbers, size), dtype=np.uint8)
    scales = rng.uniform(0.001, 0.01, (len(raw), 2)).astype(np.float16).view(np.uint8).reshape(len(raw), 4)
    at, count = {Kind.Q6_K: (208, 2), Kind.Q4_0: (0, 2), Kind.Q5_0: (0, 2), Kind.Q8_0: (0, 2)}.get(kind, (0, 4))
    raw[:, at : at + count] = scales[:, :count]
    return raw.reshape(*shape[:-1], -1)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_quantised_tensors_keep_their_integers(tmp_path: Path, kind: Kind) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "any")
    raw = blocks(kind, 3, 8, 512)
    writer.add_tensor("w", raw, raw_dtype=kind)
    for write in (
        writer.write_header_to_file,
        writer.write_kv_data_to_file,
        writer.write_tensors_to_file,
        writer.close,
    ):
        write()
    file = GgufFile(tmp_path / "a.gguf")
    stored, exact = file.tensor("w"), torch.from_numpy(gguf.dequantize(raw, kind).copy()).view(3, 8, 512)
    assert stored.shape == (3, 8, 512)
    error = relative_error(stored, exact)
    assert error < 3e-4  # scales are rounded to fp16, where they are products
    assert file.rounding("w", 8) == pytest.approx(relative_error(stored[0], exact[0]), rel=1e-2, abs=1e-9)
    assert stored.nbytes == file.served_bytes("w")
    (tmp_path / "cut.gguf").write_bytes((tmp_path / "a.gguf").read_bytes()[:-40])
    with pytest.raises(ModelError, match="is cut short"):
        GgufFile(tmp_path / "cut.gguf")


@pytest.mark.parametrize("group", [32, 64])
def test_torchs_product_of_4_bits_is_that_of_the_blocks(group: int) -> None:
    torch.manual_seed(0)
    weight = Grouped.of(torch.randn(48, 128), 4, group)
    x = torch.randn(5, 128)
    product = linear(weight)
    assert isinstance(product, Int4Linear)
    torch.testing.assert_close(product(x), blocked(x, weight), rtol=1e-4, atol=1e-4)


def folder(path: Path, **tensors: Tensor) -> Path:
    (path / "config.json").write_text(json.dumps({"quantization_config": {"weight_block_size": [16, 16]}}))
    save_file(
        {name.replace("__", "."): tensor.contiguous() for name, tensor in tensors.items()}, path / "m.safetensors"
    )
    return path


def test_fp8_with_a_scale_a_tensor_an_output_and_a_block(tmp_path: Path) -> None:
    values = torch.randn(32, 48).to(torch.float8_e4m3fn)
    for name, scale, wide in (
        ("weight_scale", torch.tensor(0.5), torch.full((32, 48), 0.5)),
        ("weight_scale", torch.rand(32, 1), None),
        ("weight_scale_inv", torch.rand(2, 3), None),
    ):
        exact = scale.expand(32, 48) if wide is None and scale.shape[1] == 1 else wide
        if exact is None:
            exact = scale.repeat_interleave(16, 0).repeat_interleave(16, 1)
        checkpoint = SafetensorsFolder(folder(tmp_path, a__weight=values, **{f"a__{name}": scale}))
        stored = checkpoint.read("a.weight")
        assert isinstance(stored, Scaled)
        assert list(checkpoint.names) == ["a.weight"]
        torch.testing.assert_close(stored.rows(5, 20, torch.float32), (values.float() * exact)[5:20])


def test_nvfp4_is_widened_as_its_codes_say(tmp_path: Path) -> None:
    packed = torch.tensor([[0x21, 0xF7] + [0] * 6])
    scale = torch.tensor([[2.0]]).to(torch.float8_e4m3fn)
    stored = SafetensorsFolder(
        folder(tmp_path, a__weight=packed.to(torch.uint8), a__weight_scale=scale, a__weight_scale_2=torch.tensor(0.25))
    ).read("a.weight")
    assert stored.rows(0, 1, torch.float32)[0, :5].tolist() == [0.25, 0.5, 3.0, -3.0, 0.0]


@pytest.mark.parametrize(("form", "most"), [("int8", 0.01), ("int4", 0.15), ("fp8", 0.04)])
def test_floating_matrices_are_rounded_as_they_are_loaded_and_the_error_is_known(
    tmp_path: Path, form: str, most: float
) -> None:
    torch.manual_seed(0)
    checkpoint = opened(folder(tmp_path, a__weight=torch.randn(32, 64)))
    weights = Loaded(checkpoint, "cpu", torch.float32, form)  # type: ignore[arg-type]
    assert weights.stored("a.weight").nbytes == needed_bytes(checkpoint, form, 4)  # type: ignore[arg-type]
    assert 0 < max(weights.errors[form]) < most


def test_broken_files_are_refused_in_one_line(tmp_path: Path) -> None:
    good = folder(tmp_path, a__weight=torch.ones(4, 4), b__weight=torch.full((4, 4), torch.nan))
    weights = Loaded(opened(good), "cpu", torch.float32, "stored")
    with pytest.raises(ModelError, match=r"b\.weight holds NaN"):
        weights.dense("b.weight")
    with pytest.raises(ModelError, match=r"has no tensor c\.weight"):
        weights.dense("c.weight")
    shard = tmp_path / "m.safetensors"
    shard.write_bytes(shard.read_bytes()[:-8])
    with pytest.raises(ModelError, match="is cut short"):
        opened(good)


def test_what_does_not_fit_is_refused_with_the_numbers_and_what_would(tmp_path: Path) -> None:
    checkpoint = opened(folder(tmp_path, a__weight=torch.ones(1024, 1024)))

    def fits(free: int, card: bool = False) -> None:
        models._fits(
            "me", checkpoint, "stored", torch.float32, 0, Machine("a GPU" if card else "cpu", 24 * GB, free, 4)
        )

    with pytest.raises(ModelError, match=r"0\.0B in fp32, needs 0\.0 GB, 0\.0 GB are free: use `me:int8`, which"):
        fits(1_200_000)
    with pytest.raises(ModelError, match="use a smaller model"):
        fits(1000)
    fits(1 << 23)


class Listed:
    """A checkpoint of which nothing but the header is there."""

    def __init__(self, architecture: str, kind: str, **shapes: tuple[int, ...]) -> None:
        self.path, self.config = Path("/models/it"), {"architectures": [architecture]}
        self._shapes, self._bits = shapes, {"bf16": 16, "q8": 9, "q4": 5}[kind]
        self.names = list(shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def served_bytes(self, name: str, floating: int) -> int:
        return int(np.prod(self._shapes[name], dtype=np.int64)) * self._bits // 8


@pytest.mark.parametrize(
    ("total", "free", "kind", "says"),
    [
        (24, 23, "bf16", "it, 25.6B in bf16, needs 51.7 GB, the card has 24 GB, 23.0 GB free: use the Q4_K_M file, "
         "about 17 GB (`diffusion-gemma:Q4_K_M`)"),
        (24, 20.5, "bf16", "20.5 GB free: use the NVFP4 checkpoint, about 18 GB"),
        (16, 15.5, "bf16", "use Dream 7B (`dream`), which needs 8.6 GB"),
        (12, 11, "q8", "in its own form, needs 29.3 GB, the card has 12 GB, 11.0 GB free: use Dream 7B (`dream`)"),
    ],
)  # fmt: skip
def test_the_nearest_choice_is_named(total: float, free: float, kind: str, says: str) -> None:
    experts = Listed("DiffusionGemmaForBlockDiffusion", kind, a=(128, 14_000, 14_286))
    here = Machine("a GPU", int(total * GB), int(free * GB), 8)
    with pytest.raises(ModelError) as caught:
        models._fits("it", experts, "stored", torch.bfloat16, 512 << 20, here)  # type: ignore[arg-type]
    assert says in str(caught.value)


@pytest.mark.parametrize("form", ["bf16", "q4"])
def test_a_cpu_that_serves_int8_needs_as_much_of_a_small_file_as_of_a_large_one(form: str) -> None:
    """What the catalogue says before a download, and what the file's header says behind it: of Dream 7B, 10 GB."""
    body, table = (7616 * 10**6 - 2 * 152_064 * 3584) // 3584, (152_064, 3584)
    dream = Listed("DreamModel", form, **{"a": (body, 3584), "embed_tokens.weight": table, "lm_head.weight": table})
    here, published = Machine("cpu", 9 * GB, 8 * GB, 4), catalogue.named("dream")
    assert published is not None
    listed = [published.needs(file, gpu=False) for file in published.files]
    assert listed == [pytest.approx(needed_bytes(dream, "int8", 4, compiled=True) + (512 << 20), rel=0.07)] * 5  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=r"7\.6B in int8, needs 9\.8 GB, 8\.0 GB are free: use"):
        models._fits("dream", dream, "int8", torch.float32, 512 << 20, here, compiled=True)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.Q8_0], ids=lambda kind: kind.name)
def test_what_a_form_grows_by_is_what_its_tensors_do(tmp_path: Path, kind: Kind) -> None:
    """A file called K_M has some tensors of more bits: Q4_K_M a quarter or so in Q6_K."""
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "any")
    writer.add_tensor("w", blocks(kind, 8, 512), raw_dtype=kind)
    for write in (
        writer.write_header_to_file,
        writer.write_kv_data_to_file,
        writer.write_tensors_to_file,
        writer.close,
    ):
        write()
    file = GgufFile(tmp_path / "a.gguf")
    grown = file.served_bytes("w") / file.tensors["w"].size
    form = {Kind.Q4_K: "Q4_K_M", Kind.Q5_K: "Q5_K_M"}.get(kind, kind.name)
    assert grown - 0.05 <= catalogue.GROWTH.get(form, 1.0) <= grown + 0.15


def test_where_no_other_form_is_published_rounding_is_named() -> None:
    llada, here = Listed("LLaDAModelLM", "bf16", a=(8016, 1000, 1024)), Machine("a GPU", 8 * GB, 7 * GB, 8)
    with pytest.raises(
        ModelError, match=r"8\.2B in bf16, needs 17\.0 GB.*: use `llada:int4`, which rounds it .*, about 6\.7 GB"
    ):
        models._fits("llada", llada, "stored", torch.bfloat16, 512 << 20, here)  # type: ignore[arg-type]
