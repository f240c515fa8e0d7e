"""Loading checkpoints of the supported architectures."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from rollpacker.config import ModelConfig
from rollpacker.hub import model_arguments

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SUPPORTED = ("llama", "qwen2", "qwen3")
"""Model types (``config.json``) that the engines and trainers run."""

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_model(
    config: ModelConfig, device: torch.device | str
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model in evaluation mode (no dropout) on ``device``, and its tokenizer.

    Raises ``ValueError``, in one line, when there is no checkpoint, no tokenizer, or an
    architecture that is not supported.
    """
    place = source(config.path)
    check_architecture(place, config.path)
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            **place, dtype=_DTYPES[config.dtype], attn_implementation="sdpa"
        )
        tokenizer = AutoTokenizer.from_pretrained(**place)
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(f"model.path={config.path}: {first_line(error)}") from error
    if config.chat_template_kwargs:
        require_chat_template(tokenizer, config.path)
    return model.to(device).eval(), tokenizer


def require_chat_template(tokenizer: PreTrainedTokenizerBase, path: str) -> None:
    """Raise ``ValueError`` when chat prompts cannot be rendered."""
    if not tokenizer.chat_template:
        raise ValueError(
            f"model.path={path}: the tokenizer has no chat template; "
            "set data.chat=false or use an instruct model"
        )


def _meant(folder: Path) -> str:
    """The checkpoint beside or below a folder that is none itself."""
    if (folder / "adapter_config.json").exists():
        return (
            ", but LoRA adapters alone: a run's checkpoint, the folder around them, has them merged"
        )
    numbered = {
        int(number): each
        for each in folder.glob("checkpoint-*")
        if (number := each.name.removeprefix("checkpoint-")).isdecimal()
    }
    return f"; did you mean '{numbered[max(numbered)]}'?" if numbered else ""


def source(path: str) -> dict[str, Any]:
    """Arguments of ``from_pretrained``; local folders never reach for the network.

    Raises ``ValueError``, in one line, when there is neither a folder nor a model on the hub.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").exists():
            raise ValueError(
                f"model.path={path}: the folder has no config.json, not a checkpoint"
                f"{_meant(folder)}"
            )
        if not any((folder / name).exists() for name in _TOKENIZER_FILES):
            raise ValueError(f"model.path={path}: the folder has no tokenizer")
    try:
        return model_arguments(path)
    except ValueError as error:
        raise ValueError(f"model.path={path}: {error}") from None


def check_architecture(place: dict[str, Any], path: str) -> None:
    """Raise ``ValueError`` when the checkpoint's architecture is not supported."""
    try:
        config = AutoConfig.from_pretrained(**place)
    except (OSError, ValueError) as error:
        raise ValueError(f"model.path={path}: {first_line(error)}") from error
    if config.model_type not in SUPPORTED:
        raise ValueError(
            f"model.path={path}: {config.model_type} models are not supported; "
            f"supported: {', '.join(SUPPORTED)}"
        )
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        raise ValueError(
            f"model.path={path}: sliding-window attention is not supported; "
            "set use_sliding_window to false in its config.json"
        )


def first_line(error: Exception) -> str:
    """An error as one line."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
