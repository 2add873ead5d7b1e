"""Dream, Dream-Coder, DiffuCoder, Open-dCoder and DreamOn: Qwen2's decoder without a causal mask, trained to unmask.

They were causal models before, and a token still predicts its right neighbour: the family hides that shift. DreamOn was
also taught tokens by which a canvas grows and shrinks; a config that names `expand_token_id` is of one of those. Models
that were not are asked for the length by CAL.

Defaults are those of the published samplers (Dream's `diffusion_generate` with alg="entropy"; DreamOn's with one token
a step), but tokens are not drawn: of a completion the most probable text is wanted, and the same one each time. What
they publish to draw with is `SAMPLING`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from infill_engine.checkpoint import Weights
from infill_engine.core import Facts, ModelError, OpenFacts
from infill_engine.families import prompts
from infill_engine.families.masked import MOST_SLOTS, Kind, MaskedDenoiser, Names, Shape, count, ends, number, special
from infill_engine.lengths import CANDIDATES, PUBLISHED_BIAS
from infill_engine.policy import ElasticPolicy, StepsPolicy

_LAYER = "model.layers.{}."
NAMES = Names(
    embedding="model.embed_tokens.weight",
    norm="model.norm.weight",
    head="lm_head.weight",
    attention_norm=f"{_LAYER}input_layernorm.weight",
    q=f"{_LAYER}self_attn.q_proj.weight",
    k=f"{_LAYER}self_attn.k_proj.weight",
    v=f"{_LAYER}self_attn.v_proj.weight",
    output=f"{_LAYER}self_attn.o_proj.weight",
    ffn_norm=f"{_LAYER}post_attention_layernorm.weight",
    gate=f"{_LAYER}mlp.gate_proj.weight",
    up=f"{_LAYER}mlp.up_proj.weight",
    down=f"{_LAYER}mlp.down_proj.weight",
)

#: Temperature and `top_p` of Dream's examples, and of DreamOn's.
SAMPLING, ELASTIC_SAMPLING = (0.2, 0.95), (0.2, 0.9)

#: Slots that DreamOn may begin with; it may grow to `MOST_SLOTS`.
ELASTIC_LENGTHS = (4, 8, 16, 32, 64)


def shape(config: Mapping[str, Any]) -> Shape:
    """Raises `ModelError` for a config that lacks a size."""
    width, heads = count(config, "hidden_size"), count(config, "num_attention_heads")
    turned = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope = {**config, **turned} if isinstance(turned, Mapping) else {"type": turned}
    if (kind := rope.get("rope_type") or rope.get("type") or "default") != "default":
        raise ModelError(f"its rotary positions are of type {kind!r}, which is not served: use a checkpoint without")
    return Shape(
        layers=count(config, "num_hidden_layers"),
        width=width,
        heads=heads,
        kv_heads=count(config, "num_key_value_heads"),
        head_size=count(config, "head_dim", width // heads),
        rope_base=number(rope, "rope_theta"),
        eps=number(config, "rms_norm_eps"),
        positions=count(config, "max_position_embeddings"),
    )


class Qwen2Denoiser(MaskedDenoiser):
    """`OpenDenoiser` of these checkpoints."""

    sizes = staticmethod(shape)

    @staticmethod
    def kind(config: Mapping[str, Any], weights: Weights) -> Kind:
        mask_id, (end_id, ended) = special(config, "mask_token_id")[0], ends(config)
        positions = shape(config).positions
        generation = config.get("generation_config") or {}
        own = [special(of, "expand_token_id", needed=False) for of in (config, generation)]
        expand = own[0] or own[1]  # some say it only to what draws their tokens
        opening, closing = (prompts.DREAMON if expand else prompts.DREAM).around(config)
        if expand:
            facts = OpenFacts(
                policy=ElasticPolicy(StepsPolicy("entropy"), mask_id, expand[0], end_id, MOST_SLOTS),
                lengths=ELASTIC_LENGTHS,
                length="elastic",
                ends=ended,
                most=MOST_SLOTS,
                positions=positions,
                closing=closing,
                blocks=True,
                sampling=ELASTIC_SAMPLING,
            )
        else:
            facts = OpenFacts(
                policy=StepsPolicy("entropy", spread="time"),
                lengths=CANDIDATES,
                length="calibrated",
                ends=ended,
                bias=PUBLISHED_BIAS,
                positions=positions,
                blocks=True,
                sampling=SAMPLING,
                closing=closing,
            )
        tied = bool(config.get("tie_word_embeddings")) and not weights.has("lm_head.weight")
        return Kind(
            NAMES.tied() if tied else NAMES,
            Facts(mask_id, end_id, opening, lookahead=0, left=(0, 0), open=facts),
            shifted=True,
            controls=expand,
        )
