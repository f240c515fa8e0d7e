"""Warm starts: a phase's tensors wait in host memory, and come back without a checkpoint.

What a phase needs on its devices (weights, optimizer state, an engine's weights) is copied to
buffers that are allocated once, page-locked where there is CUDA, and the device's memory is given
back. Tensor objects stay the same, so optimizers and process groups never notice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import torch


class WarmState:
    """Tensors that are on a device during a phase and in host memory between phases.

    Tensors that share memory with one of ``tensors`` (views) do not follow it: name every tensor
    that owns memory, and rebuild views in ``on_load``.

    Args:
        tensors: all of them, asked for at every ``offload``; optimizers make theirs late.
        device: where they are needed.
        on_load: called when they are there.
    """

    def __init__(
        self,
        tensors: Callable[[], Iterable[torch.Tensor]],
        device: torch.device | str,
        *,
        on_load: Callable[[], None] = lambda: None,
    ) -> None:
        self._tensors = tensors
        self._device = torch.device(device)
        self._on_load = on_load
        self._away: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._buffers: dict[int, torch.Tensor] = {}
        self.load_s = 0.0
        """Seconds of the last ``load``."""
        self.offload_s = 0.0
        """Seconds of the last ``offload``."""

    @property
    def bytes(self) -> int:
        """Host memory that is kept."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def offload(self) -> None:
        """Device to host memory; nothing to do when they are away already."""
        if self._away:
            return
        begun = time.monotonic()
        unique = {id(tensor): tensor for tensor in self._tensors()}
        self._buffers = {key: self._buffer(key, tensor) for key, tensor in unique.items()}
        for key, tensor in unique.items():
            self._buffers[key].copy_(tensor.detach(), non_blocking=True)
        self._wait()
        for key, tensor in unique.items():
            self._away.append((tensor, self._buffers[key]))
            tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        self.offload_s = time.monotonic() - begun

    def load(self) -> None:
        """Host memory to device; nothing to do when they are there already."""
        begun = time.monotonic()
        for tensor, buffer in self._away:
            tensor.data = buffer.to(self._device, non_blocking=True, copy=True)
        self._wait()
        self._away.clear()
        self._on_load()
        self.load_s = time.monotonic() - begun

    def _buffer(self, key: int, tensor: torch.Tensor) -> torch.Tensor:
        known = self._buffers.get(key)
        if known is not None and known.shape == tensor.shape and known.dtype == tensor.dtype:
            return known
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._device.type == "cuda")

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def training_tensors(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> Callable[[], list[torch.Tensor]]:
    """The tensors of a model and its optimizer between two steps; gradients are dropped."""

    def tensors() -> list[torch.Tensor]:
        optimizer.zero_grad(set_to_none=True)
        state = [value for each in optimizer.state.values() for value in each.values()]
        kept = [value for value in state if isinstance(value, torch.Tensor) and value.dim() > 0]
        return [*model.parameters(), *model.buffers(), *kept]

    return tensors
