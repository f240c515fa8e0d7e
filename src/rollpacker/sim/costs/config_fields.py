"""Reading a model's ``config.json``, whose families have names of their own for the same sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
HIDDEN = ("hidden_size", "n_embd", "d_model")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
INNER = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
CONTEXT = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")

_HUB_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    # What the hub's files of Gemma 3 leave to transformers.
    "gemma3_text": {
        "vocab_size": 262208,
        "head_dim": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "sliding_window_pattern": 6,
        "max_position_embeddings": 131072,
    },
    "gemma2": {"sliding_window_pattern": 2},
    "cohere2": {"sliding_window_pattern": 4},
    "qwen3_next": {"full_attention_interval": 4},
}
_TIED = (
    *("gemma", "gemma2", "gemma3_text", "smollm3", "ernie4_5", "starcoder2", "cohere", "cohere2"),
    *("gpt2", "bloom", "falcon", "opt", "ernie4_5_moe", "lfm2", "mamba", "falcon_mamba"),
)
"""Families whose head is the embedding where nothing says otherwise."""


class ConfigFields:
    """Fields of a configuration, of its text model where it is composed of several."""

    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        text = config.get("text_config")
        inner = cast(dict[str, Any], text) if isinstance(text, dict) else config
        self.name = name
        self.composed = inner is not config
        self.kind = str(inner.get("model_type"))
        self._fields: Mapping[str, Any] = {**_HUB_DEFAULTS.get(self.kind, {}), **inner}
        # The whole model ties its head, whatever its parts say.
        tied = config.get("tie_word_embeddings", inner.get("tie_word_embeddings"))
        self.tied = self.kind in _TIED if tied is None else bool(tied)

    def get(self, *names: str) -> Any:
        """The first of these that is set; None where none is."""
        return next((self._fields[n] for n in names if self._fields.get(n) is not None), None)

    def integer(self, *names: str, default: int | None = None) -> int:
        """The first of these that is set. Raises ``ValueError`` for none, without a default."""
        value = self.get(*names)
        if isinstance(value, list):  # one for each layer, all alike
            value = next(iter(cast(list[Any], value)), None)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        if default is None:
            raise ValueError(f"{self.name}: no integer {names[0]} in its config")
        return default

    def integers(self, name: str) -> tuple[int, ...] | None:
        """A list of numbers; None where there is none."""
        value = self._fields.get(name)
        return tuple(cast(list[int], value)) if isinstance(value, list) else None

    def of_layer(self, index: int) -> ConfigFields:
        """With what this layer has otherwise (``per_layer_config`` of transformers)."""
        each = self._fields.get("per_layer_config")
        if not isinstance(each, dict):
            return self
        own: Any = {int(n): v for n, v in cast(dict[Any, Any], each).items()}.get(index)
        if not own:
            return self
        return ConfigFields({**self._fields, **own}, self.name)
