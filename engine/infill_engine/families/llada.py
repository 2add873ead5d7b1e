"""LLaDA: a Llama-like decoder trained from the start to unmask, so each token predicts itself.

Defaults are those of the published sampler: the most probable tokens first (low-confidence remasking), temperature 0,
one a pass, without blocks, since the gap is one. Its length is asked for by CAL.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from infill_engine.checkpoint import Weights
from infill_engine.core import Facts, OpenFacts
from infill_engine.families import prompts
from infill_engine.families.masked import Kind, MaskedDenoiser, Names, Shape, count, ends, number, special
from infill_engine.lengths import CANDIDATES, PUBLISHED_BIAS
from infill_engine.policy import StepsPolicy

_ROOT = "model.transformer."
_BLOCK = f"{_ROOT}blocks.{{}}."
NAMES = Names(
    embedding=f"{_ROOT}wte.weight",
    norm=f"{_ROOT}ln_f.weight",
    head=f"{_ROOT}ff_out.weight",
    attention_norm=f"{_BLOCK}attn_norm.weight",
    q=f"{_BLOCK}q_proj.weight",
    k=f"{_BLOCK}k_proj.weight",
    v=f"{_BLOCK}v_proj.weight",
    output=f"{_BLOCK}attn_out.weight",
    ffn_norm=f"{_BLOCK}ff_norm.weight",
    gate=f"{_BLOCK}ff_proj.weight",
    up=f"{_BLOCK}up_proj.weight",
    down=f"{_BLOCK}ff_out.weight",
)


def shape(config: Mapping[str, Any]) -> Shape:
    """Raises `ModelError` for a config that lacks a size."""
    width, heads = count(config, "d_model"), count(config, "n_heads")
    return Shape(
        layers=count(config, "n_layers"),
        width=width,
        heads=heads,
        kv_heads=count(config, "n_kv_heads", heads),
        head_size=width // heads,
        rope_base=number(config, "rope_theta"),
        eps=number(config, "rms_norm_eps"),
        positions=count(config, "max_sequence_length"),
    )


class LladaDenoiser(MaskedDenoiser):
    """`OpenDenoiser` of LLaDA."""

    sizes = staticmethod(shape)

    @staticmethod
    def kind(config: Mapping[str, Any], weights: Weights) -> Kind:
        mask_id, (end_id, ended) = special(config, "mask_token_id")[0], ends(config)
        opening, closing = prompts.LLADA.around(config)
        facts = OpenFacts(
            policy=StepsPolicy("prob", spread="even", tempered=False),
            lengths=CANDIDATES,
            length="calibrated",
            ends=ended,
            bias=PUBLISHED_BIAS,
            positions=shape(config).positions,
            closing=closing,
            blocks=True,
        )
        return Kind(
            NAMES.tied() if config.get("weight_tying") else NAMES,
            Facts(mask_id, end_id, opening, lookahead=0, left=(0, 0), open=facts),
            shifted=False,
        )
