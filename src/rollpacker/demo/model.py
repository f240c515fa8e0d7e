"""The demo's model: a Qwen2 of 0.2M parameters and a tokenizer with one token per task word."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import AddedToken, AutoConfig, AutoModelForCausalLM, Qwen2Tokenizer

from rollpacker.demo.task import END_OF_THOUGHT

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

CONTEXT = 1024
PAD_ID, EOS_ID = 0, 1
_PAD, _EOS = "<pad>", "<eos>"
_PIECES = (
    "Find the Greatest Common Divisor (GCD) of these numbers: ",
    ". Give only the GCD as your final answer.",
    ", ",
    END_OF_THOUGHT,
)
_BYTE_LEVEL = (*"0123456789", "\u0120", "\u010a")
"""Digits, space and newline, as byte-level BPE spells them."""

VOCABULARY = 2 + len(_BYTE_LEVEL) + len(_PIECES)


def build_tokenizer() -> PreTrainedTokenizerBase:
    """Build a tokenizer of 18 words: characters, and the pieces of the question template. It has
    the class that ``AutoTokenizer`` requires for a Qwen2 checkpoint, no merges and no chat
    template. Decoding joins tokens without spaces, so it returns the original text."""
    words = (_PAD, _EOS, *_BYTE_LEVEL)
    tokenizer = Qwen2Tokenizer(
        vocab={word: index for index, word in enumerate(words)},
        merges=[],
        unk_token=_PAD,
        eos_token=_EOS,
        pad_token=_PAD,
        model_max_length=CONTEXT,
    )
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in _PIECES])
    return tokenizer


def build_model(
    seed: int, heads: int = 3, family: str = "qwen2", **settings: Any
) -> PreTrainedModel:
    """Build an untrained float32 model with heads of 32. Torch's global generator is not
    changed. ``family``: ``model_type`` of transformers. ``settings``: keys of the family's
    configuration."""
    ours = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32 * heads,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": 1,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": True,
        # Of the order of 1/sqrt(hidden): the usual 0.02 takes about twice as many steps.
        "initializer_range": 0.08,
        "bos_token_id": None,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **ours | settings))
