"""What the driver needs of a checkpoint without loading its weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig

from rollpacker.config import ModelConfig
from rollpacker.train.model.loading import load_tokenizer, source


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A checkpoint's facts.

    Args:
        tokenizer: of transformers.
        context: longest sequence, tokens.
        heads: attention heads.
        kv_heads: those of keys and values.
        stop_token_ids: ids that end a response.
        generation: its generation configuration; None where it has none.
    """

    tokenizer: Any
    context: int
    heads: int
    kv_heads: int
    stop_token_ids: tuple[int, ...]
    generation: Any = None


def read_card(config: ModelConfig) -> Card:
    """Read configuration and tokenizer. Raises ``ValueError`` in one line."""
    place, model = source(config.path)
    tokenizer = load_tokenizer(config, place)
    generation = _generation(place)
    model = model.get_text_config()
    return Card(
        tokenizer=tokenizer,
        context=model.max_position_embeddings,
        heads=model.num_attention_heads,
        kv_heads=getattr(model, "num_key_value_heads", None) or model.num_attention_heads,
        stop_token_ids=_stop_token_ids(generation, model, tokenizer),
        generation=generation,
    )


def _generation(place: dict[str, Any]) -> GenerationConfig | None:
    try:
        return GenerationConfig.from_pretrained(
            place["pretrained_model_name_or_path"],
            local_files_only=place.get("local_files_only", False),
        )
    except OSError:
        return None


def _stop_token_ids(
    generation: GenerationConfig | None, model: Any, tokenizer: Any
) -> tuple[int, ...]:
    """End ids of the generation configuration, the model's and the tokenizer's."""
    found = set[int]() if generation is None else _ids(generation.eos_token_id)
    return tuple(sorted(found | _ids(model.eos_token_id) | _ids(tokenizer.eos_token_id)))


def _ids(value: Any) -> set[int]:
    values = value if isinstance(value, list) else [value]
    return {int(item) for item in values if item is not None}
