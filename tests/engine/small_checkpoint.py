"""A tiny random checkpoint with its own tokenizer, in a folder as the hub has them. Needs transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from small_tokenizer import description

#: Ids that the tokenizer has for them, and rows of the embedding, of which the last ones are nobody's.
ADDED, ROWS = {"<expand>": 300, "<end>": 301, "<mask>": 302, "<begin>": 303}, 320


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
