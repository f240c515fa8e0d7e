"""A tiny configuration of every family of causal language models that is compared.

Windows, chunks and convolutions are shorter than the sequences of the tests, experts are more than
a token takes, and layers alternate where a family's do.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from case_files import read_table
from rollpacker.checkpoint_names import stored

VOCABULARY = 41

_PLAIN = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
_SHARED = read_table(__file__, "shared")


def _configuration(*parts: str | dict[str, Any]) -> dict[str, Any]:
    """What a family has besides ``_PLAIN``: parts of several families by name, and its own."""
    chosen = (_SHARED[part] if isinstance(part, str) else part for part in parts)
    return {key: value for part in chosen for key, value in part.items()}


CONFIGURATIONS: dict[str, dict[str, Any]] = {
    name: _configuration(*parts) for name, parts in read_table(__file__, "configurations").items()
}
"""By a name whose first word is transformers' ``model_type``."""


COMPOSED: dict[str, Any] = {
    "text_config": _PLAIN
    | CONFIGURATIONS["gemma3_text"]
    | {"model_type": "gemma3_text", "vocab_size": 96},
    "vision_config": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    },
    "mm_tokens_per_image": 4,
    "image_token_index": 95,
}
"""Text and vision, of gemma3."""


def make(name: str, seed: int = 0, **more: Any) -> Any:
    """A random model of a family in float32, far from its initial symmetry, buffers too; ``more``
    is of its configuration."""
    settings = _PLAIN | CONFIGURATIONS.get(name, {}) | more
    config = AutoConfig.for_model(name.split(",")[0], **settings)
    torch.manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for _, weight in stored(model):
            weight.add_(0.05 * torch.randn_like(weight))
    return model.eval()
