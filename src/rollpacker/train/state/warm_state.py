"""Warm starts: a phase's tensors wait in host memory, and come back without a checkpoint. Weights
and optimizer state are copied to host memory, page-locked with CUDA, and their storages are freed
on the device. Tensors, views, process groups and sharded parameters stay valid."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch


class WarmState:
    """Tensors that are on a device during a phase and in host memory between phases.

    A storage that cannot be resized, such as one that numpy has seen, stays. ``tensors`` is called
    at every ``offload``, as optimizers make theirs late. A view stands for its whole storage.
    """

    def __init__(
        self, tensors: Callable[[], Iterable[torch.Tensor]], device: torch.device | str
    ) -> None:
        self._tensors = tensors
        self._cuda = torch.device(device).type == "cuda"
        self._away: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []
        self._locked: dict[int, torch.UntypedStorage] = {}
        self.bytes = 0  # of host memory at the last offload

    def offload(self) -> None:
        if self._away:
            return
        storages = (tensor.untyped_storage() for tensor in self._tensors())
        unique = {s.data_ptr(): s for s in storages if s.nbytes() and s.resizable()}
        for number, storage in enumerate(unique.values()):
            buffer = self._buffer(number, storage.nbytes())
            buffer.copy_(storage, non_blocking=True)
            self._away.append((storage, buffer))
        self._wait()
        for storage, _ in self._away:
            storage.resize_(0)
        if self._cuda:
            torch.cuda.empty_cache()  # other processes take it
        self.bytes = sum(buffer.nbytes() for _, buffer in self._away)

    def load(self) -> None:
        for storage, buffer in self._away:
            storage.resize_(buffer.nbytes())
            storage.copy_(buffer, non_blocking=True)
        self._wait()
        self._away.clear()

    def _buffer(self, number: int, size: int) -> torch.UntypedStorage:
        if not self._cuda:
            return torch.UntypedStorage(size)
        known = self._locked.get(number)
        if known is None or known.nbytes() != size:
            locked = torch.empty(size, dtype=torch.uint8, pin_memory=True)
            known = self._locked[number] = locked.untyped_storage()
        return known

    def _wait(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()
