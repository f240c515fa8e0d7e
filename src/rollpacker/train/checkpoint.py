"""What a trainer writes: the model in the hub's layout, the optimizer through torch DCP."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_ARCHITECTURE = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)

State = dict[str, dict[str, torch.Tensor]]


def save_model(
    folder: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    weights: Iterable[tuple[str, torch.Tensor]],
) -> None:
    """Write weights (safetensors), configuration and tokenizer for ``from_pretrained``.

    Tensors are copied first: views of fused storage cannot be written as they are.
    """
    state = {name: w.detach().to("cpu", copy=True).contiguous() for name, w in weights}
    model.save_pretrained(str(folder), state_dict=state)
    tokenizer.save_pretrained(str(folder))


def save_state(folder: Path, state: State) -> None:
    """Write tensors by name; one replica does it for all."""
    with warnings.catch_warnings():
        # DCP warns of exactly what no_dist asks for.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        save(state, checkpoint_id=str(folder), no_dist=True)


def load_state(folder: Path, state: State) -> None:
    """Read into the tensors of ``state``. Raises ``ValueError`` when the names differ."""
    saved = set(FileSystemReader(str(folder)).read_metadata().state_dict_metadata)
    wanted = {f"{kind}.{name}" for kind, tensors in state.items() for name in tensors}
    if saved != wanted:
        odd = sorted(saved ^ wanted)[0]
        raise ValueError(
            f"{folder}: holds other weights than this trainer ({odd}, for one); "
            "were model.lora_rank or model.path changed?"
        )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load(state, checkpoint_id=str(folder), no_dist=True)


def check_architecture(folder: Path, model: PreTrainedModel) -> None:
    """Raise ``ValueError`` when the checkpoint's model is not shaped like ``model``."""
    path = folder / "config.json"
    if not path.exists():
        raise ValueError(f"{folder}: no config.json, not a checkpoint's model folder")
    saved, own = _describe(json.loads(path.read_text())), _describe(model.config.to_dict())
    if saved != own:
        raise ValueError(f"{folder} holds {saved}, but the trainer has {own}")


def _describe(config: dict[str, Any]) -> str:
    shape = ", ".join(f"{key}={config.get(key)}" for key in _ARCHITECTURE[1:])
    return f"{config.get('model_type')} ({shape})"
