"""What is known of models, what is on the disk, and what fits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from infill_engine import catalogue, cli, models
from infill_engine.catalogue import GB, MODELS, Machine
from infill_engine.families import families

LAPTOP = Machine("cpu", 16 * GB, 9 * GB, 4)
CARD = Machine("a GPU", 24 * GB, 23 * GB, 8)
SERVER = Machine("a GPU", 141 * GB, 140 * GB, 16)


def place(cache: Path, hub: str, **files: str) -> Path:
    """A repository in the hub's cache."""
    repository = cache / f"models--{hub.replace('/', '--')}"
    folder = repository / "snapshots" / "c0ffee"
    folder.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("c0ffee")
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return folder


@pytest.fixture
def hub(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HUB_CACHE", str(home / "hub"))
    return home / "hub"


def test_facts_are_whole() -> None:
    assert len({model.name for model in MODELS}) == len(MODELS)
    for model in MODELS:
        sizes = [file.bytes for file in model.files if file.form != "NVFP4"]
        assert sizes == sorted(sizes, reverse=True)
        assert model.architecture in {"", *families()}
        for file in model.files:
            assert 3 < 8 * file.bytes / model.parameters < 17, file  # bits a parameter


@pytest.mark.parametrize(
    ("machine", "name"),
    [
        (LAPTOP, "embedded"),
        (CARD, "dreamon"),
        (Machine("a GPU", 8 * GB, 7 * GB, 8), "dream"),
        (Machine("a GPU", 2 * GB, 2 * GB, 8), "open-dcoder"),
        (Machine("a GPU", GB, GB // 2, 8), "embedded"),
    ],
)
def test_the_best_model_that_fits_is_recommended(machine: Machine, name: str) -> None:
    model, file = catalogue.recommended(machine, families())
    assert model.name == name
    assert model.needs(file, machine.gpu) <= machine.free or name == "embedded"


def test_what_is_not_served_is_not_recommended() -> None:
    assert catalogue.recommended(CARD, ["LLaDAModelLM"])[0].name == "llada"


def test_the_nearest_form_that_fits_is_named_then_the_nearest_model() -> None:
    gemma = catalogue.named("diffusion-gemma")
    assert gemma
    said = catalogue.nearest(CARD, gemma, 52 * GB)
    assert said == "use the Q4_K_M file, about 17 GB (`diffusion-gemma:Q4_K_M`)"
    small = Machine("a GPU", 22 * GB, 21 * GB, 8)
    assert catalogue.nearest(small, gemma, 52 * GB).startswith("use the NVFP4 checkpoint, about 18 GB")
    assert catalogue.nearest(Machine("a GPU", 7 * GB, 7 * GB, 8), gemma, 52 * GB).startswith("use Dream 7B (`dream`)")
    assert catalogue.nearest(Machine("a GPU", 0, 0, 8), gemma, 52 * GB) == "use a smaller model"


def test_names_are_understood() -> None:
    assert catalogue.reference("dream-coder") == catalogue.Reference(
        "Dream-org/Dream-Coder-v0-Base-7B", "", catalogue.named("dream-coder")
    )
    found = catalogue.reference("diffusion-gemma:q4_k_m")
    assert found
    assert found.hub == "unsloth/diffusiongemma-26B-A4B-it-GGUF"
    other = catalogue.reference("some-one/else.s:Q8_0")
    assert other == catalogue.Reference("some-one/else.s", "Q8_0")
    for nothing in ("nothing", "./a/b", "a/b/c", "", "../a"):
        assert catalogue.reference(nothing) is None


def test_a_checkpoint_is_recognised_by_its_class_and_size() -> None:
    model = catalogue.alike("DiffusionGemmaForBlockDiffusion", 25_200_000_000)
    assert model
    assert model.name == "diffusion-gemma"
    assert catalogue.alike("DreamModel", 1_000_000) is None


def test_what_is_on_the_disk_is_found(hub: Path, home: Path) -> None:
    config = json.dumps({"architectures": ["DreamModel"]})
    whole = place(hub, "Dream-org/DreamOn-v0-7B", config__json=config, model__safetensors="12345")
    index = json.dumps({"weight_map": {"a": "m1.safetensors", "b": "m2.safetensors"}})
    names = {"config.json": config, "m1.safetensors": "1", "model.safetensors.index.json": index}
    place(hub, "Dream-org/Dream-Coder-v0-Base-7B", **names)
    place(hub, "who/knows", **{"it-Q4_K_M.gguf": "1", "config.json": "{}"})
    place(hub, "an/image-model", config__json='{"architectures": ["Other"]}', model__safetensors="1")
    mine = home / "mine"
    mine.mkdir()
    (mine / "a.gguf").write_text("1")
    listing = catalogue.listing(SERVER, families(), [mine])
    files = {model["name"]: model["files"][0] for model in listing["models"]}
    assert (files["dreamon"]["path"], files["dreamon"]["fault"]) == (str(whole), "")
    assert files["dream-coder"]["fault"] == "m2.safetensors is missing"
    assert files["llada"]["path"] is None
    others = [Path(one["path"]).name for one in listing["others"]]
    assert others == ["it-Q4_K_M.gguf", "a.gguf"]
    assert listing["recommended"] == "dreamon"


def test_the_choice_is_kept(home: Path) -> None:
    assert catalogue.chosen() == "embedded"
    catalogue.choose("dreamon")
    assert catalogue.chosen() == "dreamon"
    catalogue.choice_file().write_bytes(b"\xff")
    assert catalogue.chosen() == "embedded"


def test_the_list_is_printed(
    hub: Path, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(models, "machine", lambda device: CARD)
    catalogue.choose("llada")
    assert cli.main(["models"]) == 0
    said = capsys.readouterr().out
    rows = {row[2:].split()[0]: row for row in said.splitlines()[2:-1]}
    assert rows["dreamon"].startswith("* ")
    assert rows["llada"].lstrip().startswith(">")
    assert "does not fit: 52.1 GB" in rows["diffusion-gemma"]
    assert "does not fit" not in rows["diffusion-gemma:Q4_K_M"]
    assert cli.main(["models", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["chosen"] == "llada"


def test_what_the_documentation_lists_is_what_is_known() -> None:
    lines = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| `")]
    assert [row[0].strip("`") for row in rows] == [model.name for model in MODELS]
    for row, model in zip(rows, MODELS, strict=True):
        published = ", ".join(f"{file.form} {file.bytes / GB:.1f}" for file in model.files)
        assert row[2:] == [f"{model.parameters / 1e9:.1f}B", model.licence, f"{model.context:,}", published]
