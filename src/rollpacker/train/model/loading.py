"""Checkpoints of causal language models: loaded whole, or read for the driver's facts. Responses
are sampled from the softmax of the logits that are trained, with the run's own temperature, top_p
and top_k. Other settings of a ``generation_config`` are not applied."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rollpacker.config import ModelConfig
from rollpacker.errors import first_line
from rollpacker.hub import model_arguments
from rollpacker.response_text import ResponseText
from rollpacker.train.model.adapters import has_adapters

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")

_ADAPTERS = (
    "holds adapters, not a whole model: take the folder around them if it is a run's checkpoint, "
    "which has them merged, or merge them with peft's merge_and_unload and save_pretrained"
)

_CODE = "it needs its own code (auto_map), which rollpacker does not run: take one of transformers"

_BY_LENGTH = ("dynamic", "longrope")

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_model(
    config: ModelConfig, device: torch.device | str
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model in evaluation mode (no dropout) on ``device``, and its tokenizer. Raises
    ``ValueError``, in one line, without a checkpoint or tokenizer, or for an unsupported
    architecture."""
    place, _ = source(config.path)
    with _in_one_line(config.path):
        model: Any = AutoModelForCausalLM.from_pretrained(**place, dtype=_DTYPES[config.dtype])
    if has_adapters(model):
        raise ValueError(f"model.path={config.path}: {_ADAPTERS}")
    settle_head(model)
    return model.to(device).eval(), load_tokenizer(config, place)


def settle_head(model: Any) -> None:
    """Mark a model with its own head as untied. Otherwise engines and readers would drop the
    head."""
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    if head.weight is not embeddings.weight:
        for config in (model.config, model.config.get_text_config()):
            config.tie_word_embeddings = False


def load_tokenizer(config: ModelConfig, place: dict[str, Any]) -> PreTrainedTokenizerBase:
    """The checkpoint's tokenizer, from the result of ``source``. Raises ``ValueError`` as
    ``load_model``."""
    with _in_one_line(config.path):
        tokenizer = AutoTokenizer.from_pretrained(**place)
    if config.chat_template_kwargs:
        require_chat_template(tokenizer, config.path)
    return tokenizer


def require_chat_template(tokenizer: PreTrainedTokenizerBase, path: str) -> None:
    """Raise ``ValueError`` when chat prompts cannot be rendered."""
    if not tokenizer.chat_template:
        raise ValueError(
            f"model.path={path}: the tokenizer has no chat template: "
            "set data.chat=false or use an instruct model"
        )


def _meant(folder: Path) -> str:
    numbered = {
        int(number): each
        for each in folder.glob("checkpoint-*")
        if (number := each.name.removeprefix("checkpoint-")).isdecimal()
    }
    return f": did you mean '{numbered[max(numbered)]}'?" if numbered else ""


def source(path: str) -> tuple[dict[str, Any], Any]:
    """Arguments of ``from_pretrained``, and the model's configuration. Local folders never use the
    network. Raises ``ValueError``, in one line, if there is neither a folder nor a model on the
    hub, or its architecture is not supported."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        if (folder / "adapter_config.json").exists():  # transformers would load both
            raise ValueError(f"model.path={path}: {_ADAPTERS}")
        if not (folder / "config.json").exists():
            raise ValueError(
                f"model.path={path}: the folder has no config.json, so it is not a checkpoint"
                f"{_meant(folder)}"
            )
        if not any((folder / name).exists() for name in _TOKENIZER_FILES):
            raise ValueError(f"model.path={path}: the folder has no tokenizer")
    try:
        place: dict[str, Any] = model_arguments(path)
    except ValueError as error:
        raise ValueError(f"model.path={path}: {error}") from None
    with _in_one_line(path):
        config = AutoConfig.from_pretrained(**place)
    _check_architecture(config, path)
    return place, config


def _check_architecture(config: Any, path: str) -> None:
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ValueError(
            f"model.path={path}: {config.model_type} models are not causal language models, or "
            "this release of transformers does not know them"
        )
    text = config.get_text_config()
    if quantized := getattr(config, "quantization_config", None):
        raise ValueError(
            f"model.path={path}: quantized weights ({dict(quantized).get('quant_method')}, "
            "quantization_config) cannot be trained: take the original checkpoint"
        )
    for rope in _ropes(getattr(text, "rope_parameters", None) or {}):
        first = rope.get("original_max_position_embeddings") or text.max_position_embeddings
        if rope.get("rope_type") in _BY_LENGTH and first < text.max_position_embeddings:
            raise ValueError(
                f"model.path={path}: rotary embeddings of type {rope['rope_type']} change with the "
                "longest sequence of a batch, so sampler and trainer would differ: set "
                f"max_position_embeddings to {first} in its config.json"
            )


def _ropes(parameters: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if "rope_type" in parameters:
        yield parameters
    else:
        yield from (each for each in parameters.values() if isinstance(each, dict))


@contextmanager
def _in_one_line(path: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, SafetensorError) as error:
        said = _CODE if "trust_remote_code" in str(error) else first_line(error)
        raise ValueError(f"model.path={path}: {said}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A checkpoint's facts for the driver, without its weights.

    Args:
        kind: ``model_type`` of its text model.
        context: longest sequence, tokens.
        heads, kv_heads: of attention, 0 without.
        stop_token_ids: ids that end a response.
        config: of its text model.
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
        return ResponseText.of(self.tokenizer, self.stop_token_ids)


def read_card(config: ModelConfig) -> Card:
    """Read configuration and tokenizer. Raises ``ValueError`` in one line."""
    place, model = source(config.path)
    return card_of(model, load_tokenizer(config, place), _generation(place), config.path)


def card_of(model: Any, tokenizer: Any, generation: GenerationConfig | None, path: str) -> Card:
    """The card of a transformers configuration, or of its text model if it is composed. Raises
    ``ValueError`` in one line if the longest sequence is not known."""
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
_NO_LIMIT = 1_000_000_000  # a tokenizer with this limit or more knows none


def _context(model: Any, tokenizer: Any, path: str) -> int:
    found = next((n for name in _CONTEXT if (n := getattr(model, name, None))), None)
    limit = int(found or getattr(tokenizer, "model_max_length", None) or _NO_LIMIT)
    if limit >= _NO_LIMIT:
        raise ValueError(
            f"model.path={path}: {model.model_type} models have no longest sequence: set "
            "model_max_length in its tokenizer_config.json to a number of tokens"
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
    found = set[int]() if generation is None else _ids(generation.eos_token_id)
    return tuple(sorted(found | _ids(model.eos_token_id) | _ids(tokenizer.eos_token_id)))


def _ids(value: Any) -> set[int]:
    values = value if isinstance(value, list) else [value]
    return {int(item) for item in values if item is not None}


NEUTRAL: dict[str, Any] = {
    **dict.fromkeys(
        (
            *("bad_words_ids", "begin_suppress_tokens", "constraints", "dola_layers"),
            *("exponential_decay_length_penalty", "force_words_ids", "forced_bos_token_id"),
            *("forced_eos_token_id", "max_time", "sequence_bias", "stop_strings"),
            *("suppress_tokens", "top_h", "watermarking_config"),
        )
    ),
    **dict.fromkeys(("encoder_no_repeat_ngram_size", "min_length", "min_new_tokens"), 0),
    **dict.fromkeys(("no_repeat_ngram_size", "token_healing"), 0),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "min_p", "penalty_alpha"), 0),
    **dict.fromkeys(("encoder_repetition_penalty", "guidance_scale", "num_beams"), 1),
    **dict.fromkeys(("repetition_penalty", "typical_p"), 1),
}
"""Keys that change which tokens are drawn, or where a response ends, with their neutral values."""

OURS = ("temperature", "top_p", "top_k")  # keys of the run's own ``rollout`` section


def shaping(generation: Any) -> dict[str, Any]:
    """The values of ``NEUTRAL``'s keys in a ``GenerationConfig`` that are not neutral."""
    given = {key: getattr(generation, key, None) for key in sorted(NEUTRAL)}
    return {k: v for k, v in given.items() if v not in (None, NEUTRAL[k], [], {})}


def notes(generation: Any, rollout: Any) -> list[str]:
    """Lines for the user: settings of a ``GenerationConfig`` that are not applied, and the run's
    own ones."""
    lines: list[str] = []
    if found := shaping(generation):
        asked = ", ".join(f"{key}={value}" for key, value in found.items())
        lines.append(
            f"WARNING model.path: its generation_config.json asks for {asked}, which is not "
            "applied, as responses come from the trained distribution. Remove it there before "
            "you deploy the model, or its users sample differently."
        )
    own = {key: getattr(generation, key, None) for key in OURS}
    ours = {key: getattr(rollout, key) for key in OURS}
    differ = [key for key, value in own.items() if value is not None and value != ours[key]]
    if differ:
        theirs = ", ".join(f"{key}={own[key]}" for key in differ)
        taken = ", ".join(f"rollout.{key}={ours[key]}" for key in differ)
        lines.append(f"sampling with {taken} (the model's generation_config.json has {theirs})")
    return lines


def check_generation(generation: Any, given: tuple[str, ...]) -> None:
    """Raise ``ValueError`` in one line if a model's ``GenerationConfig`` would shape plain TRL's
    sampling. Keys that its trainer sets itself (``given``) do not count."""
    found = [key for key in shaping(generation) if key not in given]
    if found:
        raise ValueError(
            f"the model's generation_config sets {', '.join(found)}, which trl.GRPOTrainer would "
            "sample with and rollpacker's engines cannot: set "
            f"{' = '.join(f'model.generation_config.{key}' for key in found)} = None, or train "
            "with trl.GRPOTrainer"
        )
