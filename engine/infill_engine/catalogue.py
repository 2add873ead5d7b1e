"""Which models there are, as facts: what they are called, where they are published, in which forms, and how large.

It also says what of them is on this disk, what fits a machine, and which of them suits it; and it keeps which one was
chosen. It knows no weights and imports no torch.

Sources: the models' cards and papers. Parameters and bytes are those of the published files where a card says them,
else of another model of the same shape (Qwen2.5 7B for Dream's), rounded. The order of `MODELS` is that of the results
in infilling that their authors claim (HumanEval-Infilling pass@1: Dream-Coder 55.3, DiffuCoder 54.8, LLaDA 48.3,
Dream 39.4, Open-dCoder 32.5; DreamOn about what others reach when they are told the length); none was measured here.
DiffusionGemma's published none, and it comes last of the large ones.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from infill_engine import protocol
from infill_engine.fetch import EMBEDDED as EMBEDDED_SOURCE

GB = 10**9
#: Memory for encoded contexts and what a pass needs beside the weights, as `EngineConfig.cache_mb` has it by default.
CONTEXT_BYTES = 512 << 20

#: Times as many bytes as its file that a form takes where it is served: 5 and 6 bits are kept in 8, and groups have
#: scales in fp16 in place of 4 to 8 bits. Of files called K_M, which mix forms, about.
GROWTH = {"Q6_K": 1.37, "Q5_K_M": 1.6, "Q4_K_M": 1.25, "NVFP4": 1.12}

#: The model that is installed with the engine, and the name that stands for whichever was chosen.
EMBEDDED, AUTO = "embedded", "auto"

#: Forms into which floating weights may be rounded as they are loaded, asked for behind a name, as in `llada:int4`.
ROUNDED = ("fp8", "int8", "int4")

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True, slots=True)
class File:
    """A form in which a model is published."""

    #: bf16, or as the file's name calls it, such as Q4_K_M.
    form: str
    #: The repository that holds it.
    hub: str
    bytes: int
    #: Whether it is one GGUF file, and not all of the repository's safetensors.
    gguf: bool = False


@dataclass(frozen=True, slots=True)
class Model:
    """A model that is known."""

    name: str
    title: str
    #: As its config.json names the class.
    architecture: str
    parameters: int
    licence: str
    #: Tokens that it reads at most.
    context: int
    #: The most exact first.
    files: tuple[File, ...]
    #: Whether a CPU is fast enough for it.
    on_cpu: bool = False
    #: Bytes of the keys and values of one request, as it is served on a CPU, where they are more than `CONTEXT_BYTES`.
    contexts: int = 0
    #: Parameters of the tables from which tokens are looked up and onto which hidden states are projected: those that
    #: a CPU's compiled kernels have in two bytes beside int8. None where it has no such kernels for the model.
    tables: int | None = None

    def file(self, form: str) -> File | None:
        return next((file for file in self.files if file.form.casefold() == form.casefold()), None)

    def needs(self, file: File, gpu: bool) -> int:
        """Bytes of memory to serve it: its weights, and what contexts take. A CPU's kernels have all of them in int8,
        whatever the file has; without such kernels floating ones are served in fp32."""
        weights = int(file.bytes * GROWTH.get(file.form, 1.0))
        if not gpu and self.tables is not None:
            weights = self.parameters + 2 * self.tables
        elif not gpu and file.form == "bf16":
            weights = 4 * self.parameters
        return weights + max(self.contexts, CONTEXT_BYTES)


def _gb(size: float) -> int:
    return round(size * GB)


def _forms(hub: str, **sizes: float) -> tuple[File, ...]:
    return tuple(File(form, hub, _gb(size), gguf=True) for form, size in sizes.items())


#: From what fills gaps best to what fills them least well, as their authors claim it.
MODELS: tuple[Model, ...] = (
    Model(
        "dreamon",
        "DreamOn 7B, whose gaps grow and shrink",
        "DreamModel",
        7_616_000_000,
        "Apache-2.0",
        131_072,
        (File("bf16", "Dream-org/DreamOn-v0-7B", _gb(15.2)),),
        tables=2 * 152_064 * 3584,
    ),
    Model(
        "dream-coder",
        "Dream-Coder 7B",
        "DreamModel",
        7_616_000_000,
        "Apache-2.0",
        131_072,
        (File("bf16", "Dream-org/Dream-Coder-v0-Base-7B", _gb(15.2)),),
        tables=2 * 152_064 * 3584,
    ),
    Model(
        "diffucoder",
        "DiffuCoder 7B",
        "DreamModel",
        7_616_000_000,
        "see its card",
        131_072,
        (File("bf16", "apple/DiffuCoder-7B-Base", _gb(15.2)),),
        tables=2 * 152_064 * 3584,
    ),
    Model(
        "llada",
        "LLaDA 8B",
        "LLaDAModelLM",
        8_016_000_000,
        "MIT",
        4096,
        (File("bf16", "GSAI-ML/LLaDA-8B-Base", _gb(16.0)),),
        contexts=_gb(2.4),
        tables=2 * 126_464 * 4096,
    ),
    Model(
        "dream",
        "Dream 7B",
        "DreamModel",
        7_616_000_000,
        "Apache-2.0",
        131_072,
        (
            File("bf16", "Dream-org/Dream-v0-Instruct-7B", _gb(15.2)),
            *_forms("bartowski/Dream-org_Dream-v0-Instruct-7B-GGUF", Q8_0=8.1, Q6_K=6.3, Q5_K_M=5.4, Q4_K_M=4.7),
        ),
        tables=2 * 152_064 * 3584,
    ),
    Model(
        "diffusion-gemma",
        "DiffusionGemma 26B, of which 4B are active",
        "DiffusionGemmaForBlockDiffusion",
        25_800_000_000,
        "Apache-2.0",
        262_144,
        (
            File("bf16", "google/diffusiongemma-26B-A4B-it", _gb(51.6)),
            *_forms("unsloth/diffusiongemma-26B-A4B-it-GGUF", Q8_0=26.9, Q6_K=22.6, Q5_K_M=19.3, Q4_K_M=17.2),
            File("NVFP4", "nvidia/diffusiongemma-26B-A4B-it-NVFP4", _gb(17.5)),  # last: nothing multiplies it as it is
        ),
    ),
    Model(
        "open-dcoder",
        "Open-dCoder 0.5B",
        "Qwen2ForCausalLM",
        494_000_000,
        "Apache-2.0",
        32_768,
        (File("bf16", "fredzzp/open-dcoder-0.5B", _gb(1.0)),),
        tables=151_936 * 896,
    ),
    Model(
        EMBEDDED,
        "SmolLM2 135M, adapted to infilling here",
        "",
        134_515_008,
        "Apache-2.0",
        8192,
        (File("Q4_1", "", _gb(0.1), gguf=True),),
        on_cpu=True,
        tables=49_152 * 576,
    ),
)


@dataclass(frozen=True, slots=True)
class Machine:
    """What a model would run on."""

    #: "cpu", or the GPU's name.
    device: str
    #: Bytes of the memory that weights would lie in, and how many of them are free.
    total: int
    free: int
    cores: int

    @property
    def gpu(self) -> bool:
        return self.device != "cpu"

    @property
    def line(self) -> str:
        where = self.device if self.gpu else f"CPU, {self.cores} core{'s' if self.cores > 1 else ''}"
        return f"{where}, {self.total / GB:.1f} GB of memory, {self.free / GB:.1f} GB free"


def named(name: str) -> Model | None:
    """The model of that name, or of that repository."""
    wanted = name.casefold()
    return next(
        (model for model in MODELS if wanted in (model.name, *(file.hub.casefold() for file in model.files))), None
    )


def alike(architecture: str, parameters: int) -> Model | None:
    """The model that a checkpoint is likely to be of: one of its class that is as large within a twentieth."""
    fitting = (m for m in MODELS if m.architecture == architecture)
    return next((m for m in fitting if abs(m.parameters - parameters) < m.parameters / 20), None)


def largest(model: Model, machine: Machine) -> File | None:
    """The most exact published form that fits."""
    return next((file for file in model.files if model.needs(file, machine.gpu) <= machine.free), None)


def recommended(machine: Machine, architectures: Iterable[str]) -> tuple[Model, File]:
    """The model for a machine, and its form: on a GPU the best that fits, else the best for which a CPU is fast enough.

    architectures: those that are served.
    """
    served = {"", *architectures}
    for model in MODELS:
        file = largest(model, machine)
        if file is not None and model.architecture in served and (machine.gpu or model.on_cpu):
            return model, file
    return MODELS[-1], MODELS[-1].files[0]


def nearest(machine: Machine, model: Model | None, need: int, otherwise: str = "") -> str:
    """What to use in place of something that needs too much, in words: the largest other form of the same model that
    fits, else what the caller knows, else the best model that fits."""
    if model is not None:
        for file in model.files:
            if model.needs(file, machine.gpu) <= min(machine.free, need - 1):
                kind = "file" if file.gguf else "checkpoint"
                return f"use the {file.form} {kind}, about {file.bytes / GB:.0f} GB (`{model.name}:{file.form}`)"
    if otherwise:
        return otherwise
    for other in MODELS:
        smaller = largest(other, machine)
        if smaller is not None and other is not model and (takes := other.needs(smaller, machine.gpu)) < need:
            return f"use {other.title} (`{other.name}`), which needs {takes / GB:.1f} GB"
    return "use a smaller model"


@dataclass(frozen=True, slots=True)
class Reference:
    """What a person named: `NAME[:FORM]`, of the catalogue or of the hub."""

    hub: str
    #: The form that was asked for; "": that which suits the machine, or the repository's safetensors.
    form: str = ""
    model: Model | None = None


def reference(name: str) -> Reference | None:
    """None for what can be neither a name of the catalogue nor a repository."""
    whole, _, form = name.partition(":")
    model = named(whole)
    if model is not None and whole.casefold() == model.name:
        if model.name == EMBEDDED:
            return None
        file = model.file(form) if form else None
        return Reference((file or model.files[0]).hub, form, model)
    return Reference(whole, form, model) if _HUB_ID.fullmatch(whole) else None


def rounding(name: str) -> tuple[str, str]:
    """A name without the form of `ROUNDED` behind it, and that form; "" where it asks for none."""
    whole, _, form = name.rpartition(":")
    return (whole, form) if whole and form in ROUNDED and not Path(name).exists() else (name, "")


# What was chosen.


def choice_file() -> Path:
    """Holds the name of the model that stands for `AUTO`. Beside the weights, since it means nothing without them."""
    return protocol.cache_dir() / "chosen-model"


def chosen() -> str:
    """The model that was chosen; the embedded one before any was."""
    try:
        return choice_file().read_text(encoding="utf-8").strip() or EMBEDDED
    except (OSError, UnicodeDecodeError):
        return EMBEDDED


def meant(name: str) -> str:
    """The model that a name stands for."""
    return chosen() if name == AUTO else name


def choose(name: str) -> None:
    """Keeps the choice. Raises `OSError`."""
    path = choice_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_text(f"{name}\n", encoding="utf-8")
    part.replace(path)


# What is on the disk.


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint on this disk."""

    path: Path
    #: Where it is from: the hub's id, or "" where that is not known.
    hub: str
    architecture: str
    bytes: int
    #: Why it cannot be served as it is; "" where nothing is known against it.
    fault: str = ""


def hub_cache() -> Path:
    """The folder in which the hub's tools keep repositories; theirs are the variables."""
    if folder := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(folder).expanduser()
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(home).expanduser() / "hub"


def snapshot(hub: str) -> Path | None:
    """The folder of a repository's newest files in the hub's cache; some of them may be missing."""
    repository = hub_cache() / f"models--{hub.replace('/', '--')}"
    try:
        commit = (repository / "refs" / "main").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
    folder = repository / "snapshots" / commit
    return folder if commit and folder.is_dir() else None


def on_disk(places: Sequence[Path] = ()) -> list[Found]:
    """All checkpoints in the hub's cache, in the engine's own, and in or at `places`."""
    found: dict[Path, Found] = {}
    cache = hub_cache()
    for repository in sorted(cache.glob("models--*--*")) if cache.is_dir() else ():
        hub = repository.name.removeprefix("models--").replace("--", "/", 1)
        if (folder := snapshot(hub)) is not None:
            found |= {one.path: one for one in _in(folder, hub)}
    for place in (protocol.cache_dir() / "models", *places):
        inner = sorted(place.iterdir()) if place.is_dir() and not (place / "config.json").exists() else ()
        for path in (place, *(path for path in inner if path.is_dir())):
            found |= {one.path: one for one in _in(path, "")}
    return list(found.values())


def _in(path: Path, hub: str) -> Iterator[Found]:
    """The checkpoints in a folder, or the file itself."""
    if path.is_dir() and (path / "config.json").exists() and list(path.glob("*.safetensors")):
        shards = {file.name: file.stat().st_size for file in path.glob("*.safetensors") if file.exists()}
        missing = (named_shards(path) or set()) - shards.keys()
        fault = f"{sorted(missing)[0]} is missing" if missing else ""
        yield Found(path, hub, _architecture(path), sum(shards.values()), fault)
    for file in sorted(path.glob("*.gguf")) if path.is_dir() else [path] if path.suffix == ".gguf" else ():
        if file.is_file():
            yield Found(file, hub, "", file.stat().st_size)


def named_shards(folder: Path) -> set[str] | None:
    """The files that a folder's index names, none where it has no index; None where that cannot be read."""
    try:
        index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
        return set(index["weight_map"].values())
    except FileNotFoundError:
        return set()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _architecture(folder: Path) -> str:
    try:
        (kind, *_) = json.loads((folder / "config.json").read_text(encoding="utf-8"))["architectures"]
        return str(kind)
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def listing(machine: Machine, architectures: Iterable[str], places: Sequence[Path] = ()) -> dict[str, Any]:
    """All of it, as `infill-engine models` tells it, in plain types for JSON. architectures: those that are served."""
    served = {"", *architectures}
    best, form = recommended(machine, served)
    there = on_disk(places)
    models = []
    for model in MODELS:
        files = []
        for file in model.files:
            needs, here = model.needs(file, machine.gpu), [one for one in there if _is(one, model, file)]
            found = {"path": str(here[0].path), "fault": here[0].fault} if here else {"path": None, "fault": ""}
            files.append({**asdict(file), "needs_bytes": needs, "fits": needs <= machine.free, **found})
            there = [one for one in there if one not in here]
        facts = {name: getattr(model, name) for name in ("name", "title", "parameters", "licence", "context")}
        models.append({**facts, "served": model.architecture in served, "files": files})
    others = [
        {**asdict(one), "path": str(one.path), "fits": one.bytes + CONTEXT_BYTES <= machine.free}
        for one in there
        if one.architecture in served
    ]
    return {
        "machine": {**asdict(machine), "line": machine.line},
        "chosen": chosen(),
        "recommended": best.name if form is best.files[0] or best.name == EMBEDDED else f"{best.name}:{form.form}",
        "models": models,
        "others": others,
    }


def _is(found: Found, model: Model, file: File) -> bool:
    """Whether a checkpoint on the disk is that file of the model."""
    if model.name == EMBEDDED:
        return found.path.name == EMBEDDED_SOURCE.name
    gguf = found.path.suffix == ".gguf"
    if gguf != file.gguf or found.hub.casefold() != file.hub.casefold():
        return False
    return not gguf or f"-{file.form}.".casefold() in found.path.name.casefold()
