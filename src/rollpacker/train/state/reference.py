"""Log-probabilities of the reference policy: the weights that the run began with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch


class Reference(Protocol):
    """The first weights."""

    def active(self) -> AbstractContextManager[None]:
        """The model is the reference inside."""
        ...


class SwappedReference:
    """Keeps a copy of the first weights on the host and puts them in place while it is asked."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._copies = [p.detach().to("cpu", copy=True) for p in self._parameters]

    @contextmanager
    def active(self) -> Iterator[None]:
        """The model is the reference inside; its own storage is untouched."""
        own = [p.data for p in self._parameters]
        try:
            for parameter, copy in zip(self._parameters, self._copies, strict=True):
                parameter.data = copy.to(parameter.device)
            yield
        finally:
            for parameter, data in zip(self._parameters, own, strict=True):
                parameter.data = data


class CopiedReference:
    """Keeps a copy of the first weights on the host and copies it over their storage and back.

    For weights that others read through their storage, as FSDP gathers its shards.
    """

    def __init__(self, weights: Sequence[torch.Tensor]) -> None:
        self._weights = list(weights)
        self._copies = [w.detach().to("cpu", copy=True) for w in self._weights]

    @contextmanager
    def active(self) -> Iterator[None]:
        """The model is the reference inside."""
        own = [w.detach().clone() for w in self._weights]
        try:
            _copy(self._weights, self._copies)
            yield
        finally:
            _copy(self._weights, own)


@torch.no_grad()
def _copy(into: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    for weight, value in zip(into, values, strict=True):
        weight.copy_(value)
