"""A small byte-level tokenizer that cuts text as Qwen2's does, as the text of a tokenizer.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

#: How Qwen2's tokenizer.json cuts text; punctuation takes the newlines behind it along.
PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def description(merges: int = 200, added: Mapping[str, int] | None = None) -> str:
    """Trained on this project's own code, with as many merges at most, and added tokens by name."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(PIECES), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=256 + merges, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([Path(__file__).read_text(encoding="utf-8")], trainer)
    found = json.loads(tokenizer.to_str())
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    found["added_tokens"] = [{"id": i, "content": name, **plain} for name, i in (added or {}).items()]
    return json.dumps(found)
