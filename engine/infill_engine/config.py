"""The engine's settings, checked once. Does not know where they come from, nor which models exist."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What an engine process is told at its start. Raises `ValueError` with a line a person can act on."""

    #: "embedded", or any other name that `infill_engine.models` understands.
    model: str = "embedded"
    #: "auto", or a torch device such as "cpu" or "cuda:0".
    device: str = "auto"
    #: "auto", or a torch floating-point type such as "bfloat16".
    dtype: str = "auto"
    #: CPU threads of one forward pass; 0: one fewer than there are physical cores, but at least one.
    threads: int = 0
    #: Tokens of context before and after the gap.
    prefix_tokens: int = 1024
    suffix_tokens: int = 96
    #: Whether what followed the last tokens elsewhere is proposed. The text is the same, in fewer passes.
    lookup: bool = True
    #: Tokens of context encoded in one step at most; fewer on a machine that needs more than 0.1 s for them.
    chunk_tokens: int = 64
    #: Memory for encoded contexts, in MiB.
    cache_mb: int = 512
    #: Seconds without a request after which the process ends.
    idle_exit_s: float = 900.0

    def __post_init__(self) -> None:
        for name in ("model", "device", "dtype"):
            if not getattr(self, name).strip():
                raise ValueError(f"{name} must not be empty")
        for name, least in (
            ("threads", 0),
            ("prefix_tokens", 1),
            ("suffix_tokens", 0),
            ("chunk_tokens", 1),
            ("cache_mb", 1),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, not {getattr(self, name)}")
        if not self.idle_exit_s > 0:
            raise ValueError(f"idle_exit_s must be more than 0 seconds, not {self.idle_exit_s}")
