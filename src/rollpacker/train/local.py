"""The trainer that holds a whole replica of the model in one process."""

from __future__ import annotations

import torch

from rollpacker.train.model.packing import MicroBatch
from rollpacker.train.state.optimizer import Optimizer
from rollpacker.train.state.reference import SwappedReference
from rollpacker.train.trainer import Trainer


class LocalTrainer(Trainer):
    """A replica in one process.

    Weights change in place, in ``apply`` only, so an engine in the same process may share their
    storage (build it first if it re-points parameters; with LoRA give it an ``engine_copy``).
    """

    def _place(self) -> Optimizer:
        trained = [(n, p) for n, p in self._model.named_parameters() if p.requires_grad]
        return Optimizer(trained, self._config)

    def _reference(self) -> SwappedReference:
        return SwappedReference([p for p in self._model.parameters() if p.requires_grad])

    def _logprobs(self, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        return self._forward.logprobs(batch, self._temperature)

    @property
    def shares_weights(self) -> bool:
        """Whether ``weights`` yields the live tensors (false with LoRA: merged copies)."""
        return self._adapted is None
