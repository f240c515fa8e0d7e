"""What a job takes on a machine, in words and bytes."""

from __future__ import annotations

from dataclasses import dataclass

from rollpacker.config import FSDPTrainerConfig, RunConfig
from rollpacker.policy.engines.device_split import Division
from rollpacker.sim.costs.models import ModelShape

PROCESS = {True: 1.0e9, False: 0.7e9}
"""On CUDA: context, libraries' workspaces, NCCL. On a CPU: libraries and compiled kernels."""
_ROOMY = 0.9
"""Share of a device that a job takes at most without being tight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobMachine:
    """What a job runs on.

    Args:
        cuda: whether ``devices`` are GPUs; else it is one, the machine's own memory.
        workers: devices of the job, of all ``nodes``, as its configuration counts them: several may
            be on a GPU, and all are on a CPU.
        on_device: of them, on the fullest device.
        packed: bytes of a bfloat16 weight as the engine for CPUs packs it.
    """

    name: str
    cuda: bool
    devices: int
    device_bytes: float
    workers: int
    on_device: int
    packed: int = 4
    nodes: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A job on a machine.

    Args:
        longest: tokens of the longest response.
    """

    config: RunConfig
    shape: ModelShape
    machine: JobMachine
    division: Division
    longest: int

    @property
    def type_bytes(self) -> int:
        """Of a weight in ``model.dtype``."""
        return 2 if self.config.model.dtype == "bfloat16" else 4

    @property
    def model_bytes(self) -> float:
        """Of all weights in ``model.dtype``, those that are never trained among them."""
        return float(self.type_bytes * self.shape.held)

    @property
    def sharded(self) -> bool:
        """Whether the trainer holds parts of the weights."""
        return isinstance(self.config.trainer, FSDPTrainerConfig)

    @property
    def separate(self) -> bool:
        """Whether devices that train do not decode."""
        return self.config.devices.layout == "separate"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Something that is held, in bytes; ``note`` says what it is."""

    name: str
    size: float
    note: str = ""
    estimated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeeds:
    """What a job takes.

    Args:
        worker: on each device; with ``layout: separate`` on each that decodes.
        trainer: with ``layout: separate`` on each device that trains.
        shared: on the first device once: what grades; on a CPU also what all processes share.
        host: of the own memory of each machine, where devices are GPUs.
        shared_weights: of these, or of ``shared`` on a CPU, bytes that have to be in shared memory
            or in a file: the copy of the weights that engines read.
        longest: tokens of the longest response.
    """

    machine: JobMachine
    division: Division
    worker: tuple[Part, ...]
    trainer: tuple[Part, ...]
    shared: tuple[Part, ...]
    host: tuple[Part, ...]
    shared_weights: float
    kv_tokens: int
    longest: int

    @property
    def worker_bytes(self) -> float:
        """Of a device, or of one that decodes."""
        return sum(part.size for part in self.worker)

    @property
    def trainer_bytes(self) -> float:
        """Of a device that only trains."""
        return sum(part.size for part in self.trainer)

    @property
    def total(self) -> float:
        """Of the fullest device."""
        machine = self.machine
        shared = sum(part.size for part in self.shared)
        return max(
            self._held(start) + (shared if start == 0 else 0.0)
            for start in range(0, machine.workers, machine.on_device)
        )

    def _held(self, start: int) -> float:
        """On the device whose first place has this number; those that decode come first."""
        machine = self.machine
        here = min(machine.on_device, machine.workers - start)
        decoding = min(here, max(0, self.division.decoding - start))
        return decoding * self.worker_bytes + (here - decoding) * self.trainer_bytes

    @property
    def sequences(self) -> int:
        """Responses of full length that the KV budget holds, their prompts aside; a prompt has one
        token at least."""
        return self.kv_tokens // self.longest if self.kv_tokens > self.longest else 0

    @property
    def fits(self) -> bool:
        """Whether the device has as much, and the engine can decode at least one response."""
        return self.total <= self.machine.device_bytes and self.sequences > 0

    @property
    def tight(self) -> bool:
        """Whether it fits with so little to spare that estimates and fragments matter."""
        return self.fits and self.total > _ROOMY * self.machine.device_bytes
