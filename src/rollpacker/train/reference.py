"""Log-probabilities of the reference policy: the weights that the run began with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch


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
