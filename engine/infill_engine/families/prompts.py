"""What stands around prefix, gap and suffix, family by family: a table of facts.

The bare form is the document itself, between ids that the model was trained to see around one. Checkpoints that were
tuned to chat publish another form, in which a request is a user's turn and the answer the next one. The bare form is
used for all of them: in a turn that is written behind a request there is no place for a suffix; those who measured
these models at infilling, the chat-tuned among them, did so in the bare form (DreamOn, arXiv 2602.01326; Open-dLLM's
eval/eval_infill); and nobody has published that the other one is better. Whoever measures that it is says so here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from infill_engine.families.masked import special

#: The roles of special ids, as a config.json names them with `_token_id`.
BOS, EOS = "bos", "eos"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One family's."""

    #: What the bare form, which is used, has before the document and behind it: roles of ids.
    opening: tuple[str, ...]
    closing: tuple[str, ...]
    #: Where that is published.
    source: str
    #: The form that its chat-tuned checkpoints publish, {} being what a user asks, and where; "": there are none.
    chat: str = ""
    chat_source: str = ""

    def around(self, config: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The ids before the document and behind it, as far as a config says them."""
        before, behind = (
            [id_ for role in roles for id_ in special(config, f"{role}_token_id", needed=False)[:1]]
            for roles in (self.opening, self.closing)
        )
        return tuple(before), tuple(behind)


DREAM = Prompt(
    opening=(),
    closing=(),
    source="Open-dLLM, eval/eval_infill: prefix, masks, suffix",
    chat="<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n",
    chat_source="tokenizer of Dream-v0-Instruct-7B; Dream-Coder and DiffuCoder have the same",
)
DREAMON = Prompt(
    opening=(BOS,),
    closing=(EOS,),
    source="DreamOn, readme.md: trained on whole documents, between these",
)
LLADA = Prompt(
    opening=(),
    closing=(),
    source="LLaDA, generate.py: a base model's prompt is the text",
    chat="<|startoftext|><|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    chat_source="tokenizer of LLaDA-8B-Instruct",
)
DIFFUSION_GEMMA = Prompt(
    opening=(BOS,),
    closing=(),
    source="transformers' tokenizer, which puts it before each text",
    chat="<bos><|turn>user\n{}<turn|>\n<|turn>model\n",
    chat_source="https://ai.google.dev/gemma/docs/core/prompt-formatting-gemma4",
)
