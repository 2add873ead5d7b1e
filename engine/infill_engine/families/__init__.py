"""Model families: each runs checkpoints of one architecture behind `infill_engine.core`. Here is which one it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:  # they bring torch, and the kernels numba
    from infill_kernels import cpu

    from infill_engine.checkpoint import Weights
    from infill_engine.core import OpenDenoiser
    from infill_engine.families.masked import Caching


class Sizes(Protocol):
    """A model's sizes."""

    @property
    def compiled(self) -> bool:
        """Whether the compiled kernels of this machine's CPU run it."""

    def context_bytes(self, before: int, behind: int, caching: Caching, itemsize: int) -> int:
        """What keys and values take, of so many bytes a number, for one request alone that has so many tokens before
        its gap and behind it."""


class Loadable(Protocol):
    """A family that a checkpoint can be loaded into."""

    def sizes(self, config: Mapping[str, Any], /) -> Sizes:
        """Of what config.json says. Raises `ModelError` where it is not this family's."""

    def __call__(
        self,
        config: Mapping[str, Any],
        weights: Weights,
        text: Sequence[bytes],
        *,
        caching: Caching,
        device: str,
        cache_bytes: int,
        team: cpu.Team | None,
    ) -> OpenDenoiser:
        """config: what config.json says, with the ids that the tokenizer's files say in the place of its own, and as
        `generation_config` what generation_config.json does; weights: by their published names; text: the bytes of each
        id, empty for those that never stand in text. Raises `ModelError` for what is not of this family."""


def families() -> dict[str, Loadable]:
    """The families by the architecture that a config.json names."""
    from infill_engine.families.diffusion_gemma import DiffusionGemmaDenoiser
    from infill_engine.families.llada import LladaDenoiser
    from infill_engine.families.qwen2 import Qwen2Denoiser

    return {
        "DreamModel": Qwen2Denoiser,
        "Qwen2ForCausalLM": Qwen2Denoiser,
        "LLaDAModelLM": LladaDenoiser,
        "DiffusionGemmaForBlockDiffusion": DiffusionGemmaDenoiser,
    }
