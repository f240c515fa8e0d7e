"""New weights into a built vLLM engine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_HEAD = "lm_head.weight"
"""May come too where it is tied to the embeddings."""


def names_of(path: str) -> frozenset[str]:
    """Names of a checkpoint's tensors, by its configuration."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        like = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
    return frozenset(name for name, _ in like.named_parameters())


class Checked:
    """A checkpoint's tensors, one by one, up to the first with an unknown name.

    An error within vLLM's reload would leave it half on the meta device for good; after one that
    ends early it runs again, with some of the old weights, and takes the next ones.
    """

    def __init__(self, weights: Iterable[tuple[str, torch.Tensor]], wanted: frozenset[str]) -> None:
        self._weights = weights
        self._wanted = wanted
        self._missing = set(wanted)
        self._problem: Exception | None = None

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        try:
            for name, tensor in self._weights:
                if name not in self._wanted and name != _HEAD:
                    raise ValueError(f"weights hold {name!r}, which the model lacks")
                self._missing.discard(name)
                yield name, tensor
        except Exception as error:
            self._problem = error

    def verify(self) -> None:
        """Raise what went wrong, ``ValueError`` when names are missing."""
        if self._problem is not None:
            raise self._problem
        if self._missing:
            first, count = sorted(self._missing)[0], len(self._missing)
            raise ValueError(f"weights lack {first!r} ({count} missing in all)")


def reload(worker: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Runs in vLLM's worker. On a CPU a tied head keeps a packed copy that a reload forgets."""
    worker.reload_weights(weights_iterator=iter(weights))
    head = getattr(worker.get_model(), "lm_head", None)
    if head is not None and head.weight.device.type == "cpu":
        head.quant_method.process_weights_after_loading(head)
