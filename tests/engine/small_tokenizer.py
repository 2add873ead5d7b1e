"""Small tokenizers as the texts of tokenizer.json files: byte-level as Qwen2's, and over characters as Gemma's."""

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


#: Added to the one like Gemma's, from id 0 on: what is never text, then what is.
CONTROLS = ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<unused0>", "<|turn>", "<turn|>")
ADDED_TEXT = ("\n", "\n\n", "\n\n\n", "<b>", "</b>")
#: A piece that no merge makes, though nobody added it.
RESERVED = "<unused1>"


def sentencepiece(size: int = 640) -> str:
    """Trained on this project's own code, with so many pieces at most. Runs of spaces are pieces that merges make."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    words = pre_tokenizers.Split(Regex(r"\n+|\u2581+(?=\u2581)|\u2581?[a-z_]+|\u2581|."), "isolated")
    tokenizer.pre_tokenizer = words
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    names = [*CONTROLS, RESERVED, *ADDED_TEXT, *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=names, limit_alphabet=80, show_progress=False)
    tokenizer.train_from_iterator([Path(__file__).read_text(encoding="utf-8")], trainer)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    found = json.loads(tokenizer.to_str())
    added = [one for one in found["added_tokens"] if one["content"] in (*CONTROLS, *ADDED_TEXT)]
    found["added_tokens"] = [one | {"special": one["content"] not in ("<unused0>", *ADDED_TEXT)} for one in added]
    return json.dumps(found)
