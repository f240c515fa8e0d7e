"""Weights by the names, types and shapes that checkpoints of a family have.

A model in memory may hold them otherwise: experts of a layer fused into one tensor, modules
renamed. transformers knows the way back (``revert_weight_conversion``), for a whole model at once.
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Layout = dict[str, tuple[torch.dtype, torch.Size]]
"""Types and shapes of weights by name, in the order in which they come."""

_LAYER = re.compile(r"(.*?\.\d+)\.")


def stored(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """What a checkpoint holds of a model, by the model's own names: parameters, and buffers that
    persist.

    They are the live ones. Of tied parameters only the first comes.
    """
    left_out = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen and name not in left_out:
            seen.add(id(tensor))
            yield name, tensor.detach()


class CheckpointNames:
    """From a model's own names to those that its ``save_pretrained`` writes.

    What is only renamed passes as it is, one by one and in its order. What is not, such as fused
    experts, is held back until all that its layer has of it is there: no more than one layer's,
    unless a family cannot be converted layer by layer.

    Args:
        model: as it was loaded, its weights at most on the meta device.
        own: what it will export (``stored``), with any values: only types and shapes are read.
    """

    def __init__(
        self, model: PreTrainedModel, own: Iterable[tuple[str, torch.Tensor]] | None = None
    ) -> None:
        self._model: Any = model
        self.own: Layout = dict(map(_entry, stored(model) if own is None else own))
        """What ``converted`` takes, by the model's own names."""
        meta = torch.device("meta")
        like = {n: torch.empty(s, dtype=d, device=meta) for n, (d, s) in self.own.items()}
        whole = revert_weight_conversion(model, dict(like))
        names = {id(tensor): name for name, tensor in whole.items()}
        self._renamed = {n: names[id(tensor)] for n, tensor in like.items() if id(tensor) in names}
        self._blocks = {name: _layer(name) for name in like if name not in self._renamed}
        if self._blocks:
            self._model = _twin(model)
        self.layout: Layout = dict(map(_entry, self.converted(like.items())))
        """What ``converted`` yields."""
        if self.layout != dict(map(_entry, whole.items())):
            self._blocks = dict.fromkeys(self._blocks, "")
            self.layout = dict(map(_entry, self.converted(like.items())))

    def converted(
        self, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Weights by the checkpoint's names, given all of ``own``."""
        sizes = Counter(self._blocks.values())
        held: dict[str, dict[str, torch.Tensor]] = {block: {} for block in sizes}
        for name, weight in weights:
            if name in self._renamed:
                yield self._renamed[name], weight
                continue
            block = self._blocks[name]
            held[block][name] = weight
            if len(held[block]) == sizes[block]:
                yield from revert_weight_conversion(self._model, held.pop(block)).items()


def possible_names(like: PreTrainedModel) -> tuple[frozenset[str], ...]:
    """Names that checkpoints of a model may have, by its configuration alone: those that
    ``CheckpointNames`` gives a model that was made, and those of one that was loaded from the hub,
    where a part of a model that also sees (Qwen3.5's, Gemma 3's) has a prefix.

    Args:
        like: made with ``from_config``, its weights at most on the meta device.
    """
    made = frozenset(CheckpointNames(like).layout)
    part: Any = like
    # Without them transformers takes its own, and leaves prefixes out.
    part._weight_conversions = get_model_conversion_mapping(like, add_legacy=False)
    loaded = frozenset(CheckpointNames(like).layout)
    return (made,) if made == loaded else (made, loaded)


def _twin(model: Any) -> Any:
    """A model without weights that is converted as this one is now: transformers goes by the names
    of classes, which FSDP changes."""
    with torch.device("meta"):
        twin: Any = type(model)(copy.deepcopy(model.config))
    twin._weight_conversions = getattr(model, "_weight_conversions", None)
    return twin


def _layer(name: str) -> str:
    """A weight's name up to the number of its layer; empty outside of layers."""
    found = _LAYER.match(name)
    return found[1] if found else ""


def _entry(weight: tuple[str, torch.Tensor]) -> tuple[str, tuple[torch.dtype, torch.Size]]:
    name, tensor = weight
    return name, (tensor.dtype, tensor.shape)
