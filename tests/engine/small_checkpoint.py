"""Tiny random checkpoints with their own tokenizers, in folders as the hub has them. Needs transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from small_tokenizer import CONTROLS, description, sentencepiece

#: Ids that the tokenizer has for them, and rows of the embedding, of which the last ones are nobody's.
ADDED, ROWS = {"<expand>": 300, "<end>": 301, "<mask>": 302, "<begin>": 303}, 320

#: Settings of `EngineConfig` with which a pass is exact on any device.
EXACT = {"refresh_passes": 1, "dual_cache": False, "reuse_context": False}


def save(folder: Path, **changed: Any) -> None:
    """changed: what config.json says otherwise."""
    import transformers

    torch.manual_seed(0)
    ids = {"eos_token_id": 301, "pad_token_id": 301, "mask_token_id": 302, "bos_token_id": 303}
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 512}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.Qwen2Config(vocab_size=ROWS, initializer_range=0.2, **ids, **sizes, **heads, **changed)
    transformers.Qwen2ForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_text(description(merges=40, added=ADDED))


def gemma(vocab: int, canvas: int, gain: float = 1.0, window: int = 16) -> Any:
    """transformers' DiffusionGemma, every weight random, those that begin as ones too: a norm left out would not show.
    gain: of what the layers add; where it is small, what a slot holds is what is predicted there."""
    import transformers

    torch.manual_seed(0)
    text = transformers.DiffusionGemmaTextConfig(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        global_head_dim=16,
        num_global_key_value_heads=1,
        sliding_window=window,
        num_experts=4,
        top_k_experts=2,
        moe_intermediate_size=16,
        max_position_embeddings=512,
        use_bidirectional_attention="vision",
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
    )
    vision = transformers.Gemma4VisionConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        patch_size=4,
    )
    config = transformers.DiffusionGemmaConfig(
        text_config=text,
        vision_config=vision,
        canvas_length=canvas,
        boi_token_id=vocab - 8,
        eoi_token_id=vocab - 7,
        image_token_id=vocab - 6,
    )
    model = transformers.DiffusionGemmaForBlockDiffusion(config).eval()
    model.set_experts_implementation("eager")
    with torch.no_grad():
        unlike = {tensor.data_ptr(): (name, tensor) for name, tensor in model.state_dict().items()}
        for name, tensor in unlike.values():
            if name.endswith(("norm.weight", "scale", "layer_scalar", "norm_1.weight", "norm_2.weight")):
                tensor.uniform_(0.5, 1.5)
                if name.endswith(("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")):
                    tensor.mul_(gain)
            elif tensor.dim() > 1:  # self-conditioning less, lest rounding grow tenfold with each pass of a trace
                tensor.mul_(2 if "self_conditioning" in name else 10)
    return model


#: Of `save_gemma`: ids, of which the last ones are nobody's, and the most tokens of a canvas.
GEMMA_ROWS, GEMMA_CANVAS = 700, 128


def save_gemma(folder: Path, steps: int = 4) -> None:
    """steps: passes that a canvas may take, as its generation_config.json says."""
    gemma(GEMMA_ROWS, GEMMA_CANVAS).save_pretrained(folder)
    ends = [CONTROLS.index(name) for name in ("<eos>", "<turn|>")]
    generation = {"eos_token_id": ends, "max_denoising_steps": steps, "t_min": 0.4, "t_max": 0.8}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    (folder / "tokenizer.json").write_text(sentencepiece())
    settings = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "mask_token": "<mask>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
