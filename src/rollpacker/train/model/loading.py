"""Loading checkpoints of causal language models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rollpacker.config import ModelConfig
from rollpacker.errors import first_line
from rollpacker.hub import model_arguments
from rollpacker.train.model.adapters import has_adapters

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")

_ADAPTERS = (
    "holds adapters, not a whole model: take the folder around them where it is a run's "
    "checkpoint, which has them merged, or what peft's merge_and_unload and save_pretrained write"
)

_CODE = "it needs code of its own (auto_map), which is not run: take one that transformers has"

_BY_LENGTH = ("dynamic", "longrope")

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_model(
    config: ModelConfig, device: torch.device | str
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model in evaluation mode (no dropout) on ``device``, and its tokenizer.

    Raises ``ValueError``, in one line, when there is no checkpoint, no tokenizer, or an
    architecture that is not supported.
    """
    place, _ = source(config.path)
    with _in_one_line(config.path):
        model: Any = AutoModelForCausalLM.from_pretrained(**place, dtype=_DTYPES[config.dtype])
    if has_adapters(model):
        raise ValueError(f"model.path={config.path}: {_ADAPTERS}")
    settle_head(model)
    return model.to(device).eval(), load_tokenizer(config, place)


def settle_head(model: Any) -> None:
    """Let the configuration say so where the weights have a head of their own, which engines and
    readers of checkpoints would drop else."""
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    if head.weight is not embeddings.weight:
        for config in (model.config, model.config.get_text_config()):
            config.tie_word_embeddings = False


def load_tokenizer(config: ModelConfig, place: dict[str, Any]) -> PreTrainedTokenizerBase:
    """The checkpoint's, from where ``source`` found it. Raises ``ValueError`` as ``load_model``."""
    with _in_one_line(config.path):
        tokenizer = AutoTokenizer.from_pretrained(**place)
    if config.chat_template_kwargs:
        require_chat_template(tokenizer, config.path)
    return tokenizer


def require_chat_template(tokenizer: PreTrainedTokenizerBase, path: str) -> None:
    """Raise ``ValueError`` when chat prompts cannot be rendered."""
    if not tokenizer.chat_template:
        raise ValueError(
            f"model.path={path}: the tokenizer has no chat template; "
            "set data.chat=false or use an instruct model"
        )


def _meant(folder: Path) -> str:
    """The checkpoint below a folder that is none itself."""
    numbered = {
        int(number): each
        for each in folder.glob("checkpoint-*")
        if (number := each.name.removeprefix("checkpoint-")).isdecimal()
    }
    return f"; did you mean '{numbered[max(numbered)]}'?" if numbered else ""


def source(path: str) -> tuple[dict[str, Any], Any]:
    """Arguments of ``from_pretrained``, and the model's configuration.

    Local folders never reach for the network. Raises ``ValueError``, in one line, when there is
    neither a folder nor a model on the hub, or its architecture is not supported.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        if (folder / "adapter_config.json").exists():  # transformers would load both
            raise ValueError(f"model.path={path}: {_ADAPTERS}")
        if not (folder / "config.json").exists():
            raise ValueError(
                f"model.path={path}: the folder has no config.json, not a checkpoint"
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
            f"model.path={path}: {config.model_type} models are no causal language models, or this "
            "release of transformers does not know them"
        )
    text = config.get_text_config()
    if quantized := getattr(config, "quantization_config", None):
        raise ValueError(
            f"model.path={path}: quantized weights ({dict(quantized).get('quant_method')}, "
            "quantization_config) cannot be trained: take the checkpoint that they come from"
        )
    for rope in _ropes(getattr(text, "rope_parameters", None) or {}):
        first = rope.get("original_max_position_embeddings") or text.max_position_embeddings
        if rope.get("rope_type") in _BY_LENGTH and first < text.max_position_embeddings:
            raise ValueError(
                f"model.path={path}: rotary embeddings of type {rope['rope_type']} change with the "
                f"longest sequence beside one, so that a sampler and a trainer cannot agree: set "
                f"max_position_embeddings to {first} in its config.json"
            )


def _ropes(parameters: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Of all layers, or one for each of their types."""
    if "rope_type" in parameters:
        yield parameters
    else:
        yield from (each for each in parameters.values() if isinstance(each, dict))


@contextmanager
def _in_one_line(path: str) -> Iterator[None]:
    """What transformers says is wrong with a checkpoint."""
    try:
        yield
    except (OSError, ValueError, SafetensorError) as error:
        said = _CODE if "trust_remote_code" in str(error) else first_line(error)
        raise ValueError(f"model.path={path}: {said}") from error
