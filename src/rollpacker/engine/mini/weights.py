"""Weights that come from elsewhere."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@torch.no_grad()
def copy_weights(model: PreTrainedModel, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Copy a checkpoint in place, but what is the very same memory.

    Raises ``ValueError`` when the names are not the model's.
    """
    parameters = dict(model.named_parameters())
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set[str]()
    missing = set(parameters)
    for name, tensor in weights:
        if name in parameters:
            if parameters[name].data_ptr() != tensor.data_ptr():
                parameters[name].copy_(tensor)
            missing.discard(name)
        elif name not in tied:
            raise ValueError(f"weights hold {name!r}, which the model lacks")
    if missing:
        raise ValueError(f"weights lack {sorted(missing)[0]!r} ({len(missing)} missing in all)")
