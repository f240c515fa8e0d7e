"""What the driver needs of a checkpoint without loading its weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig

from rollpacker.config import ModelConfig
from rollpacker.response_text import ResponseText
from rollpacker.train.model.loading import load_tokenizer, source


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A checkpoint's facts.

    Args:
        kind: ``model_type`` of its text model.
        tokenizer: of transformers.
        context: longest sequence, tokens.
        heads: attention heads; 0 where it has none.
        kv_heads: those of keys and values; 0 likewise.
        stop_token_ids: ids that end a response.
        generation: its generation configuration; None where it has none.
        config: that of its text model, of transformers.
    """

    kind: str
    tokenizer: Any
    context: int
    heads: int
    kv_heads: int
    stop_token_ids: tuple[int, ...]
    generation: Any = None
    config: Any = None

    @property
    def read(self) -> ResponseText:
        """Decodes responses."""
        return ResponseText.of(self.tokenizer, self.stop_token_ids)


def read_card(config: ModelConfig) -> Card:
    """Read configuration and tokenizer. Raises ``ValueError`` in one line."""
    place, model = source(config.path)
    return card_of(model, load_tokenizer(config, place), _generation(place), config.path)


def card_of(model: Any, tokenizer: Any, generation: GenerationConfig | None, path: str) -> Card:
    """Of a configuration of transformers, of its text model where it is composed.

    Raises ``ValueError`` in one line where the longest sequence is not known.
    """
    text = model.get_text_config()
    heads = getattr(text, "num_attention_heads", None) or 0
    return Card(
        kind=text.model_type,
        tokenizer=tokenizer,
        context=_context(text, tokenizer, path),
        heads=heads,
        kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        stop_token_ids=_stop_token_ids(generation, text, tokenizer),
        generation=generation,
        config=text,
    )


_CONTEXT = ("max_position_embeddings", "max_sequence_length", "seq_length")
"""Names of the longest sequence; transformers gives the first to most that have another."""
_NO_LIMIT = 1_000_000_000
"""From so many tokens on a tokenizer means that it knows none."""


def _context(model: Any, tokenizer: Any, path: str) -> int:
    """Tokens of the longest sequence: of the model, else of its tokenizer.

    Raises ``ValueError`` where neither says it.
    """
    found = next((n for name in _CONTEXT if (n := getattr(model, name, None))), None)
    limit = int(found or getattr(tokenizer, "model_max_length", None) or _NO_LIMIT)
    if limit >= _NO_LIMIT:
        raise ValueError(
            f"model.path={path}: {model.model_type} models have no longest sequence: set "
            "model_max_length in its tokenizer_config.json to the tokens that it is to have"
        )
    return limit


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
