"""Loading checkpoints of the supported architectures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from rollpacker.config import ModelConfig
from rollpacker.errors import first_line
from rollpacker.hub import model_arguments
from rollpacker.train.model.adapters import has_adapters

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SUPPORTED = ("llama", "qwen2", "qwen3")
"""Model types (``config.json``) that the engines and trainers run."""

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")

_ADAPTERS = (
    "holds adapters, not a whole model: take the folder around them where it is a run's "
    "checkpoint, which has them merged, or what peft's merge_and_unload and save_pretrained write"
)

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
        model: Any = AutoModelForCausalLM.from_pretrained(
            **place, dtype=_DTYPES[config.dtype], attn_implementation="sdpa"
        )
    if has_adapters(model):
        raise ValueError(f"model.path={config.path}: {_ADAPTERS}")
    return model.to(device).eval(), load_tokenizer(config, place)


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


@contextmanager
def _in_one_line(path: str) -> Iterator[None]:
    """What transformers says is wrong with a checkpoint."""
    try:
        yield
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(f"model.path={path}: {first_line(error)}") from error
