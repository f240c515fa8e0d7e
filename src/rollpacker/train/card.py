"""What the driver needs of a checkpoint without loading its weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig

from rollpacker.config import ModelConfig
from rollpacker.train.model import load_tokenizer, source


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A checkpoint's facts.

    Args:
        tokenizer: of transformers.
        context: longest sequence, tokens.
        heads: attention heads.
        kv_heads: those of keys and values.
        stop_token_ids: ids that end a response.
    """

    tokenizer: Any
    context: int
    heads: int
    kv_heads: int
    stop_token_ids: tuple[int, ...]


def read_card(config: ModelConfig) -> Card:
    """Read configuration and tokenizer. Raises ``ValueError`` in one line."""
    place, model = source(config.path)
    tokenizer = load_tokenizer(config, place)
    return Card(
        tokenizer=tokenizer,
        context=model.max_position_embeddings,
        heads=model.num_attention_heads,
        kv_heads=model.num_key_value_heads,
        stop_token_ids=_stop_token_ids(place, model, tokenizer),
    )


def _stop_token_ids(place: dict[str, Any], model: Any, tokenizer: Any) -> tuple[int, ...]:
    """End ids of the generation configuration, the model's and the tokenizer's."""
    try:
        generation = GenerationConfig.from_pretrained(
            place["pretrained_model_name_or_path"],
            local_files_only=place.get("local_files_only", False),
        )
        found = _ids(generation.eos_token_id)
    except OSError:
        found = set()
    return tuple(sorted(found | _ids(model.eos_token_id) | _ids(tokenizer.eos_token_id)))


def _ids(value: Any) -> set[int]:
    values = value if isinstance(value, list) else [value]
    return {int(item) for item in values if item is not None}
