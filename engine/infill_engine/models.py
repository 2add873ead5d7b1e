"""How each model is loaded, by its name or from where it lies."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from infill_engine import adapter, hub
from infill_engine.catalogue import (
    EMBEDDED,
    GB,
    MODELS,
    File,
    Machine,
    Model,
    alike,
    meant,
    nearest,
    reference,
    rounding,
)
from infill_engine.config import EngineConfig
from infill_engine.core import ModelError
from infill_engine.engine import Engine
from infill_engine.fetch import FetchError, Report, ensure_weights
from infill_engine.protocol import cache_dir
from infill_engine.tokenizer import Codec

if TYPE_CHECKING:  # they bring numba
    from infill_engine.checkpoint import Checkpoint, Form
    from infill_engine.families import Sizes
    from infill_engine.families.masked import Caching
    from infill_engine.memory import Memory
    from infill_engine.tokenizer import JsonCodec
    from infill_engine.workspaces import Workspaces

log = logging.getLogger(__name__)

#: Tokens of the blank line behind a snippet, at most.
SNIPPET_END = 2
#: CPU threads of one pass at most: what a model of this size reads, a few cores can ask for.
MOST_THREADS = 4


def load(config: EngineConfig, report: Report) -> Engine:
    """Loads `config.model`, fetching it first where it is missing. Takes seconds, or minutes on the first start.

    Raises `ModelError` with one line that says what to do.
    """
    config = replace(config, model=meant(config.model))
    config = replace(config, dtype=rounding(config.model)[1] or config.dtype)
    path = located(config.model, report, config.device)
    name, _, argument = config.model.partition(":")
    if path is not None:
        return _checkpoint(config, path, report)
    return _embedded(config, argument, report) if name == EMBEDDED else _fake(config, Path(argument))


def located(name: str, report: Report, wanted: str = "auto") -> Path | None:
    """Where a checkpoint lies, fetched first where it is missing; None for a model that is none. wanted: as `device`'s.

    Raises `ModelError` with one line that says what to do.
    """
    if name.partition(":")[0] == EMBEDDED or name.startswith("fake:"):
        return None
    name, rounded = rounding(name)
    if (path := Path(name).expanduser()).is_dir() or path.suffix == ".gguf":
        return path
    if (asked := reference(name)) is None:
        known = ", ".join(model.name for model in MODELS)
        raise ModelError(f"there is no model {name!r}: use one of {known}, a folder, a GGUF file, or a hub id")
    hub_id, form = asked.hub, asked.form
    if asked.model is not None and name.casefold() in (asked.model.name, f"{asked.model.name}:{form}".casefold()):
        suiting = asked.model.files[0] if rounded else _suiting(asked.model, form, machine(wanted))
        hub_id, form = suiting.hub, suiting.form
    try:
        return hub.ensure(hub_id, report, "" if _is_whole(asked.model, form) else form)
    except FetchError as error:
        raise ModelError(str(error)) from None


def _suiting(model: Model, form: str, here: Machine) -> File:
    """The published form that was asked for, else the largest that fits, of those on this disk if there are some.

    Raises `ModelError` where none fits: better before a download than behind it.
    """
    files = [file for file in model.files if not form or file.form.casefold() == form.casefold()]
    if not files:
        raise ModelError(f"{model.name} has no form {form!r}: use one of {', '.join(f.form for f in model.files)}")
    fitting = [file for file in files if model.needs(file, here.gpu) <= here.free]
    if fitting:
        there = (file for file in fitting if hub.cached(file.hub, "" if not file.gguf else file.form))
        return next(there, fitting[0])
    least = files[-1]
    need = model.needs(least, here.gpu)
    raise ModelError(_too_large(f"{model.name} in {least.form}", need, here, nearest(here, model, need)))


def _too_large(what: str, need: int, here: Machine, cure: str) -> str:
    where = f"the card has {here.total / GB:.0f} GB, {here.free / GB:.1f} GB free" if here.gpu else ""
    return f"{what} needs {need / GB:.1f} GB, {where or f'{here.free / GB:.1f} GB are free'}: {cure}"


def _is_whole(model: Model | None, form: str) -> bool:
    """Whether a form is all of a repository's safetensors, and not one of its GGUF files."""
    file = model.file(form) if model is not None else None
    return file is not None and not file.gguf


def moved() -> Callable[[str], None]:
    """Called in the thread in which an engine was loaded: what to call with its device in the one in which it works,
    where that is another. Threads and streams of torch are a thread's own."""
    threads = torch.get_num_threads()

    def settle(on: str) -> None:
        from infill_engine import cuda

        torch.set_num_threads(threads)
        if on != "cpu":
            cuda.in_front(torch.device(on))

    return settle


def physical_cores() -> int:
    """Cores that this process may use, hyper-threads not counted: a second thread on a core slows matrix products."""
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    siblings = set()
    for cpu in usable:
        topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        siblings.add(topology.read_text().strip() if topology.exists() else str(cpu))
    return max(1, len(siblings))


def device(wanted: str) -> str:
    """The device to serve on. Raises `ModelError` for one that this machine does not have."""
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_available() else range(0)
    devices = ["cpu", *(["cuda"] if gpus else []), *(f"cuda:{i}" for i in gpus)]
    if wanted == "auto":
        return "cuda" if gpus else "cpu"
    if wanted not in devices:
        raise ModelError(f"there is no device {wanted!r} here: use one of auto, {', '.join(devices)}")
    return wanted


def machine(wanted: str = "auto") -> Machine:
    """What a model would run on. Raises as `device` does."""
    on = device(wanted)
    if on == "cpu":
        return Machine(on, _host_bytes("MemTotal"), _free_bytes(on), physical_cores())
    name, total = torch.cuda.get_device_name(on), int(torch.cuda.mem_get_info(on)[1])
    return Machine(name, total, _free_bytes(on), physical_cores())


#: Asks for the embedded model's base as it is, without an adapter.
BASE = "base"


def prepared(path: Path, which: str) -> Path:
    """The prepared file of the embedded model's weights; which: as in `embedded:WHICH`."""
    named = which if which in ("", BASE) else adapter.digest(Path(which))
    return cache_dir() / "prepared" / ".".join(filter(None, (path.stem, named, "safetensors")))


def _embedded(config: EngineConfig, which: str, report: Report) -> Engine:
    """which: "" for the adapter that is installed with the engine, `BASE`, or the path of another adapter."""
    from infill_engine import cuda, smollm, weights
    from infill_engine.serving import choose
    from infill_engine.tokenizer import LineTokenizer

    on = device(config.device)
    try:
        path = ensure_weights(report)
    except FetchError as error:
        raise ModelError(str(error)) from None
    report("reading the weights", None)
    trained = None if which == BASE else Path(which) if which else adapter.EMBEDDED
    kept = prepared(path, which)
    tensors, codec = weights.load(path, kept, trained)
    threads = config.threads or min(physical_cores(), MOST_THREADS)
    torch.set_num_threads(threads)

    def build(dtype: str) -> smollm.SmolDenoiser:
        memory = config.cache_mb << 20
        masks = smollm.MASKS if trained else 0
        return smollm.SmolDenoiser(tensors, dtype, on, cache_bytes=memory, threads=threads, masks=masks)

    dtype = smollm.serving_dtype(config.dtype, on)
    if dtype == "auto":
        report("measuring what is fastest on this machine (once)", None)
        tokens = [smollm.SINK_ID, *LineTokenizer(codec).encode(Path(__file__).read_text(encoding="utf-8"))]
        dtypes = smollm.cpu_dtypes()
        dtype, _ = choose(dtypes, build, tokens, f"{path.name} {threads}", kept.with_name("serving.json"))
    if dtype == "int8":
        torch.set_num_threads(1)  # its kernels have a team of their own; what torch has left to do is small
    denoiser = build(dtype)
    if on != "cpu":
        report("preparing the GPU", None)
        cuda.in_front(torch.device(on))  # for this thread, which is the engine's
        denoiser.prepare()
    memory, workspaces = _memory(config, codec)
    engine = Engine(config.model, denoiser, codec, config, device=on, dtype=dtype, memory=memory, workspaces=workspaces)
    report("preparing the kernels", None)
    engine.warm_up()
    return engine


def _checkpoint(config: EngineConfig, folder: Path, report: Report) -> Engine:
    """A model that sees both sides, in a Hugging Face folder or a GGUF file."""
    from infill_engine.checkpoint import FORMS, Loaded, opened, read_json
    from infill_engine.families import families
    from infill_engine.serving import give_back

    checkpoint, on = opened(folder), device(config.device)
    kind = next(iter(checkpoint.config.get("architectures") or ()), "")
    family = families().get(kind)
    if family is None:
        raise ModelError(f"{folder} holds a model of type {kind!r}, which is not served: {', '.join(families())} are")
    compiled = on == "cpu" and family.sizes(checkpoint.config).compiled
    best = "bf16" if on != "cpu" else "int8" if compiled else "fp32"
    types = {"auto": best, "fp32": "fp32", "bf16": "bf16"}
    served = types.get(config.dtype, config.dtype)
    if served not in (*types.values(), *FORMS[1:]):
        raise ModelError(f"{folder} cannot be served in {served!r}: use one of {', '.join([*types, *FORMS[1:]])}")
    floating = torch.bfloat16 if served != "fp32" and (served == "bf16" or on != "cpu") else torch.float32
    form = served if served in FORMS else "stored"
    caching, kept = _caching(config, on), 2 if compiled and served == "int8" else floating.itemsize
    config = _roomy(config, family.sizes(checkpoint.config), caching, kept)
    _fits(
        rounding(config.model)[0], checkpoint, form, floating, config.cache_mb << 20, machine(config.device), compiled
    )
    reading = partial(report, "reading the weights", None)  # tensor by tensor, so that it can be given up
    reading()
    team = None
    if compiled and served == "int8":  # the kernels round what the file has, and have threads of their own
        from infill_kernels import cpu

        form, team = "stored", cpu.Team(config.threads or min(physical_cores(), MOST_THREADS))
        torch.set_num_threads(1)
    weights = Loaded(checkpoint, on, floating, form, reading)
    home = folder if folder.is_dir() else folder.parent
    codec = _codec(checkpoint, home, kind, report)
    generation = read_json(path) if (path := home / "generation_config.json").exists() else {}
    denoiser = family(
        {**checkpoint.config, **codec.roles, "generation_config": generation},
        weights,
        codec.tokens,
        caching=caching,
        device=on,
        cache_bytes=config.cache_mb << 20,
        team=team,
    )
    give_back()  # what rounding took: 67 MB of a model of 0.5B
    log.info("%s is served in %s%s", config.model, served, f": {weights.told}" if weights.told else "")
    engine = Engine(config.model, denoiser, codec, config, device=on, dtype=served)
    report("preparing the kernels", None)
    engine.warm_up()
    return engine


def _caching(config: EngineConfig, on: str) -> Caching:
    """What the config says, else what suits the device."""
    from infill_engine.families.masked import EXACT, KEPT

    best = KEPT if on == "cpu" else EXACT
    return replace(
        best,
        refresh=best.refresh if config.refresh_passes is None else config.refresh_passes,
        dual=best.dual if config.dual_cache is None else config.dual_cache,
        across=best.across if config.reuse_context is None else config.reuse_context,
    )


def _roomy(config: EngineConfig, sizes: Sizes, caching: Caching, itemsize: int) -> EngineConfig:
    """With memory for the contexts of one request at least: with less each would encode them, and be refused for want
    of room."""
    before = config.prefix_tokens + config.snippets * (config.snippet_tokens + SNIPPET_END)
    need = -(-sizes.context_bytes(before, config.suffix_tokens, caching, itemsize) >> 20)
    if need <= config.cache_mb:
        return config
    log.info("contexts have %d MB in place of %d: that is what one request of this model takes", need, config.cache_mb)
    return replace(config, cache_mb=need)


def _codec(checkpoint: Checkpoint, home: Path, kind: str, report: Report) -> JsonCodec:
    """What its folder says of its tokenizer; else what the GGUF file itself does; else the published model's.

    Raises `ModelError`.
    """
    from infill_engine.checkpoint import GgufCheckpoint, parameters, vocabulary
    from infill_engine.tokenizer import JsonCodec, qwen2_description

    rows = vocabulary(checkpoint)
    if not isinstance(checkpoint, GgufCheckpoint) or hub.has_tokenizer(home):
        return JsonCodec.read(home, rows)
    if (own := checkpoint.tokenizer) is not None:
        tokens, merges, added = own
        try:
            named_ = [{"id": i, "content": tokens[i]} for i in sorted(added)]
            return JsonCodec(qwen2_description({piece: i for i, piece in enumerate(tokens)}, merges, named_), rows)
        except (ValueError, KeyError, IndexError) as error:
            line = " ".join(str(error).split())
            raise ModelError(f"the tokenizer in {checkpoint.path} cannot be read ({line}): download it again") from None
    model = alike(kind, parameters(checkpoint))
    if model is None:
        raise ModelError(f"{checkpoint.path} has no tokenizer that is read: put the model's tokenizer.json beside it")
    try:
        return JsonCodec.read(hub.ensure(model.files[0].hub, report, only_small=True), rows)
    except FetchError as error:
        raise ModelError(f"{error}; or put the tokenizer.json of {model.files[0].hub} beside {home}") from None


def _fits(
    named: str,
    checkpoint: Checkpoint,
    form: Form,
    floating: torch.dtype,
    contexts: int,
    here: Machine,
    compiled: bool = False,
) -> None:
    """named: as a person did; compiled: the kernels of a CPU serve it in int8. Raises `ModelError` with the numbers,
    and with the nearest choice that fits, where its weights and contexts need more bytes than are free."""
    from infill_engine.checkpoint import FORMS, needed_bytes, parameters

    def bytes_of(form: Form) -> int:
        return needed_bytes(checkpoint, form, floating.itemsize, compiled and form == "int8") + contexts

    need = bytes_of(form)
    if need <= here.free:
        return
    sizes = {other: bytes_of(other) for other in FORMS[1:]}
    smaller = {other: size for other, size in sizes.items() if size <= here.free}
    cure = ""
    if smaller:
        best = max(smaller, key=lambda other: smaller[other])
        cure = f"use `{named}:{best}`, which rounds it as it is loaded, about {smaller[best] / GB:.1f} GB"
    count = parameters(checkpoint)
    wide = need - contexts == count * floating.itemsize
    name = form if form != "stored" else {2: "bf16", 4: "fp32"}[floating.itemsize] if wide else "its own form"
    model = alike(next(iter(checkpoint.config.get("architectures") or ()), ""), count)
    what = f"{checkpoint.path.name}, {count / 1e9:.1f}B in {name},"
    raise ModelError(_too_large(what, need, here, nearest(here, model, need, cure)))


def _free_bytes(on: str) -> int:
    """Memory that a device has left."""
    return int(torch.cuda.mem_get_info(on)[0]) if on != "cpu" else _host_bytes("MemAvailable")


def _host_bytes(line: str) -> int:
    """What the kernel says of this machine's memory; where it does not, all that there is."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        return int(lines[line].split()[0]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _memory(config: EngineConfig, codec: Codec) -> tuple[Memory, Workspaces] | tuple[None, None]:
    """None where it is not wanted, or numba may not compile, without which it would be too slow."""
    from infill_engine import ngrams

    if not config.memory or not ngrams.available():
        return None, None
    from infill_engine.memory import Memory
    from infill_engine.workspaces import Workspaces

    return Memory(len(codec.tokens)), Workspaces(cache_dir() / "memory", codec)


def _fake(config: EngineConfig, path: Path) -> Engine:
    from infill_engine.fake import FakeDenoiser
    from infill_engine.tokenizer import ByteCodec

    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        step_s = float(table.pop("step_s", 0.0))
        denoiser = FakeDenoiser({str(key): str(text) for key, text in table.items()}, step_s=step_s)
    except (OSError, ValueError, AttributeError) as error:
        raise ModelError(f"cannot read the fake model's table {path}: {error}") from None
    return Engine(config.model, denoiser, ByteCodec(), config, dtype="bytes")
