"""Whether a job fits into memory, and which layout would: ``rollpacker doctor job.yaml``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rollpacker.config import RunConfig
from rollpacker.job.plan.checks import check, check_context, check_engine
from rollpacker.job.plan.gpu_job import defaults_here, machine_here, shape_of
from rollpacker.runtime.cluster.devices import place_devices
from rollpacker.runtime.cluster.machine_checks import free_memory_gb
from rollpacker.runtime.messages.shared_weights import rooms
from rollpacker.sim.costs.hardware import find_device
from rollpacker.sim.costs.models import ModelShape
from rollpacker.sim.memory.estimate_memory import needs
from rollpacker.sim.memory.fitting_settings import (
    NONE,
    Changes,
    fitting,
    nearest,
    other_results,
    with_changes,
)
from rollpacker.sim.memory.gpu_defaults import gpu_defaults
from rollpacker.sim.memory.needs import JobMachine, MemoryNeeds

_MOST_GPUS, _MOST_NODES = 8, 4
"""Of one machine, and how many of them are thought of."""
_NO_BFLOAT16 = ("T4",)
_Found = tuple[Changes, MemoryNeeds]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFit:
    """What was found.

    Args:
        config: the job, with its ``defaults``.
        defaults: what it gets on GPUs for keys that it leaves out.
        shape: its model's.
        needs: as the job is.
        changes: with which it fits, where it does not, maybe on more devices; None where none were
            found. Where some learn the same, it is these.
        changed: what it then needs.
        otherwise: where these are for more devices, changes for those that are there, with which it
            learns otherwise, and what it then needs.
        nearest: where none were found, those with which it takes least, and what that is.
        free_host: bytes of the machine's own memory that are free, where that is this machine and
            devices are GPUs.
        rooms: where the weights for engines may lie, in the order in which it is tried, and bytes
            that are free there; empty where that is not this machine.
    """

    config: RunConfig
    defaults: Changes
    shape: ModelShape
    needs: MemoryNeeds
    changes: Changes | None
    changed: MemoryNeeds | None
    otherwise: _Found | None
    nearest: _Found | None
    free_host: float | None
    rooms: Sequence[tuple[Path, int]]

    @property
    def fits(self) -> bool:
        """On its devices and, where that is known, in the memory beside them."""
        return self.needs.fits and self.host_fits and self.weights_fit

    @property
    def host_fits(self) -> bool:
        """Whether what processes on GPUs take of the machine's own memory is free."""
        return self.free_host is None or sum(p.size for p in self.needs.host) <= self.free_host

    @property
    def weights_fit(self) -> bool:
        """Whether there is a place, where that is known, for the weights that engines read."""
        return not self.rooms or self.room is not None

    @property
    def room(self) -> tuple[Path, int] | None:
        """The place that is taken for them."""
        size = self.needs.shared_weights
        return next(((folder, free) for folder, free in self.rooms if free >= size), None)


def look(config: RunConfig, device: str | None, gpus: int) -> MemoryFit:
    """Compare a job with this machine, or with one that has ``gpus`` of ``device``.

    Loads no weights and starts nothing. Raises ``ValueError`` in one line.
    """
    check(config)
    if device is None and config.devices.emulate is not None:
        raise ValueError(
            "devices.emulate: emulated devices hold nothing; --device and --gpus say on which "
            "machine the job is to fit"
        )
    shape = shape_of(config.model.path)
    if device is None:
        machine = machine_here(config)
        defaults = defaults_here(config, shape, machine)
    else:
        machine = _elsewhere(config, device, gpus)
        bfloat16 = machine.name not in _NO_BFLOAT16
        defaults = gpu_defaults(config, shape, machine, vllm=True, bfloat16=bfloat16)
    config = with_changes(config, defaults)
    check_engine(config, shape.kind)
    if shape.context:
        check_context(config, shape.context)
    found = needs(config, shape, machine)
    better, otherwise = (None, None) if found.fits else _better(config, shape, machine)
    changes, changed = better or (None, None)
    tried = None if found.fits or better else _nearest(config, shape, machine)
    here = device is None and machine.cuda
    return MemoryFit(
        config=config,
        defaults=defaults,
        shape=shape,
        needs=found,
        changes=changes,
        changed=changed,
        otherwise=otherwise,
        nearest=tried,
        free_host=_free() if here else None,
        rooms=rooms() if device is None else (),
    )


def _free() -> float:
    return free_memory_gb() * 1024**3


def _elsewhere(config: RunConfig, name: str, gpus: int) -> JobMachine:
    device = find_device(name)
    if config.devices.kind == "cpu":
        raise ValueError(
            f"--device {name}: devices.kind=cpu keeps the job on CPUs; add devices.kind=cuda"
        )
    if gpus > device.per_node:
        raise ValueError(
            f"--gpus {gpus}: a machine has at most {device.per_node} {name}: ask about --gpus "
            f"{device.per_node} of each of devices.nodes={-(-gpus // device.per_node)}"
        )
    asked, most = config.devices.per_node, gpus * config.devices.per_gpu
    if asked > most:
        wanted = -(-asked // config.devices.per_gpu)
        other = f"ask about --gpus {wanted}"
        if wanted > device.per_node:
            other = "spread it over several machines: devices.nodes"
        raise ValueError(
            f"--gpus {gpus}: the job asks for devices.per_node={asked}: add "
            f"devices.per_node={most}, or {other}"
        )
    places = [place for place, _ in place_devices(config.devices, gpus)]
    return JobMachine(
        name=device.name,
        cuda=True,
        devices=gpus,
        device_bytes=device.memory,
        workers=config.devices.nodes * len(places),
        on_device=max(Counter(places).values()),
        nodes=config.devices.nodes,
    )


def _better(
    config: RunConfig, shape: ModelShape, machine: JobMachine
) -> tuple[_Found | None, _Found | None]:
    """Changes with which it fits this machine, or one with more such GPUs, or several; and where it
    learns the same on more GPUs only, what fits this machine."""
    same = _first(config, shape, [*_machines(config, machine)], [NONE])
    if same is not None and same[1].machine.workers == machine.workers:
        return same, None
    others = other_results(config, machine)
    here = _first(config, shape, [(NONE, machine)], others)
    if same is not None or here is not None:
        return same or here, here if same else None
    as_many = [each for each in _machines(config, machine) if each[1].nodes == machine.nodes]
    return _first(config, shape, as_many, others), None


def _first(
    config: RunConfig,
    shape: ModelShape,
    machines: Sequence[tuple[Changes, JobMachine]],
    settings: Sequence[Changes],
) -> _Found | None:
    """The first of some machines that the job fits with one of some settings."""
    for changes, machine in machines:
        for also in settings:
            found = fitting(with_changes(config, changes), shape, machine, also)
            if found is not None:
                return {**changes, **found[0]}, found[1]
    return None


def _nearest(config: RunConfig, shape: ModelShape, machine: JobMachine) -> _Found | None:
    """Changes with which it takes least, on as many such GPUs as a machine has."""
    (changes, wider), *_ = reversed(
        [each for each in _machines(config, machine) if each[1].nodes == machine.nodes]
    )
    found = nearest(with_changes(config, changes), shape, wider)
    return None if found is None else ({**changes, **found[0]}, found[1])


def _machines(config: RunConfig, machine: JobMachine) -> Iterator[tuple[Changes, JobMachine]]:
    """This one, with more such GPUs, and several; with the keys that the job needs for it."""
    yield NONE, machine
    devices, nodes = machine.devices, machine.nodes
    while machine.cuda and (devices < _MOST_GPUS or nodes < _MOST_NODES):
        nodes = nodes if devices < _MOST_GPUS else 2 * nodes
        devices = min(2 * devices, _MOST_GPUS)
        count, on_device = devices * config.devices.per_gpu, config.devices.per_gpu
        changes: Changes = {"devices.per_node": count} if config.devices.per_node else {}
        if nodes > machine.nodes:
            address = config.cluster.address or "auto"
            changes = {**changes, "devices.nodes": nodes, "cluster.address": address}
        wider = replace(machine, devices=devices, nodes=nodes, on_device=on_device)
        yield changes, replace(wider, workers=nodes * count)
