"""What a trainer writes: the model in the hub's layout, the optimizer through torch DCP."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from transformers import AutoConfig

from rollpacker.checkpoint_names import Layout
from rollpacker.errors import first_line
from rollpacker.hub import folder_here
from rollpacker.train.state import both_forms
from rollpacker.train.state.export import write_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_ARCHITECTURE = re.compile(
    r"size$|_dim$|_rank$|layer|_heads?$|expert|window|^n_|^moe_|^mamba_|^linear_|^conv_|_positions$"
)
"""Names of what a model is made of, whatever its family calls it: numbers, and kinds of layers."""

_MOST = 6
"""Differences that are named."""

State = dict[str, dict[str, torch.Tensor]]


def save_model(
    folder: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    layout: Layout,
    weights: Iterator[tuple[str, torch.Tensor]],
) -> None:
    """Write weights (safetensors), configuration and tokenizer for ``from_pretrained``.

    Args:
        folder: made where there is none.
        model: whose configuration it is.
        tokenizer: beside it.
        layout: of ``weights``.
        weights: as they come; one is held at a time.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config: Any = model.config
    config.dtype = str(_usual_type(layout)).removeprefix("torch.")
    # fully_shard makes a class of its own.
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    config.save_pretrained(str(folder))
    both_forms.rewrite(folder / "config.json", both_forms.with_older_fields)
    if model.can_generate() and model.generation_config is not None:
        model.generation_config.save_pretrained(str(folder))
    write_weights(folder, layout, weights)
    both_forms.write_beside(folder, tokenizer, folder_here(tokenizer.name_or_path))


def _usual_type(layout: Layout) -> torch.dtype:
    """Of most weights: a router or a bias among them may have another."""
    counts = Counter[torch.dtype]()
    for dtype, shape in layout.values():
        if dtype.is_floating_point:
            counts[dtype] += shape.numel()
    return counts.most_common(1)[0][0]


def save_state(folder: Path, state: State, group: dist.ProcessGroup | None = None) -> None:
    """Write tensors by name; one replica does it for all.

    ``group`` are the processes that hold a part of them each, which all call it.
    """
    with warnings.catch_warnings():
        # DCP warns of exactly what no_dist asks for.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        save(state, checkpoint_id=str(folder), process_group=group, no_dist=group is None)


def load_state(folder: Path, state: State) -> None:
    """Read into the tensors of ``state``, whichever processes wrote which parts.

    Raises ``ValueError`` when the names differ.
    """
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
    try:
        config = AutoConfig.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {first_line(error)}") from error
    saved, own = _architecture(config), _architecture(model.config)
    odd = [key for key in own | saved if saved.get(key) != own.get(key)]
    if odd:
        one, other = (
            ", ".join(f"{key}={found.get(key)}" for key in odd[:_MOST]) for found in (saved, own)
        )
        raise ValueError(f"{folder} holds a model with {one}, but the trainer has {other}")


def _architecture(config: Any) -> dict[str, Any]:
    """Of the text model: its family first, then sizes and kinds of layers."""
    text = config.get_text_config()
    found = {
        key: value
        for key, value in text.to_dict().items()
        if _ARCHITECTURE.search(key) and isinstance(value, int | list) and value is not False
    }
    return {"model_type": text.model_type, **found}
