"""Whether a job fits into memory, and which layout would fit: ``rollpacker doctor job.yaml``. With
``--run``, its parts are tried on this machine one after the other.

Each step has a deadline and runs in another process, as a driver or a kernel may hang or crash it.
A failed step is named, and steps that need it are skipped.
"""

from __future__ import annotations

import json
import multiprocessing
import resource
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from io import StringIO
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rich.console import Console

from rollpacker.config import RunConfig, VllmEngineConfig
from rollpacker.engine.configured import build_engine
from rollpacker.errors import words_of
from rollpacker.job.plan.checks import check, check_context, check_engine
from rollpacker.job.plan.defaults import defaults_here, machine_here, shape_of
from rollpacker.runtime.cluster.devices import place_devices, worker_devices
from rollpacker.runtime.cluster.machine_checks import devices, free_memory_gb
from rollpacker.runtime.messages.shared_weights import rooms
from rollpacker.runtime.record.progress import Progress
from rollpacker.sim.costs.hardware import find_device
from rollpacker.sim.costs.models import ModelShape, near_model
from rollpacker.sim.memory.needs import JobMachine, MemoryNeeds, needs
from rollpacker.sim.memory.settings import (
    NONE,
    Changes,
    fitting,
    gpu_defaults,
    nearest,
    other_results,
    with_changes,
)

_MOST_GPUS, _MOST_NODES = 8, 4
"""The largest machine and number of machines to consider."""
_NO_BFLOAT16 = ("T4",)
_Found = tuple[Changes, MemoryNeeds]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFit:
    """The result of ``look``.

    Args:
        config: the job, with its ``defaults``.
        defaults: values for GPUs of keys that the job leaves out.
        needs: the job's as it is.
        changes: changes that make it fit, maybe on more devices. None if it fits already or nothing
            helps. Changes that learn the same come first.
        otherwise: if ``changes`` need more devices, changes that fit these devices but learn
            differently, and the needs with them.
        nearest: if nothing helps, the changes with the least needs, and those needs.
        free_host: free bytes of host memory, if it is known and this machine has GPUs.
        folders: folders for the engines' weights in the order of preference, and their free bytes.
            Empty for another machine.
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
    folders: Sequence[tuple[Path, int]]

    @property
    def fits(self) -> bool:
        return self.needs.fits and self.host_fits and self.weights_fit

    @property
    def host_fits(self) -> bool:
        return self.free_host is None or sum(p.size for p in self.needs.host) <= self.free_host

    @property
    def weights_fit(self) -> bool:
        return not self.folders or self.room is not None

    @property
    def room(self) -> tuple[Path, int] | None:
        size = self.needs.shared_weights
        return next(((folder, free) for folder, free in self.folders if free >= size), None)


def look(config: RunConfig, device: str | None, gpus: int) -> MemoryFit:
    """Compare a job with this machine, or with one that has ``gpus`` of ``device``. It loads no
    weights and starts nothing. Raises ``ValueError`` in one line."""
    check(config)
    if device is None and config.devices.emulate is not None:
        raise ValueError(
            "devices.emulate: emulated devices hold nothing. Give --device and --gpus to name the "
            "machine for the job."
        )
    shape = _shape(config.model.path)
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
        folders=rooms() if device is None else (),
    )


def _free() -> float:
    return free_memory_gb() * 1024**3


def _shape(path: str) -> ModelShape:
    try:
        return shape_of(path)
    except ValueError as error:
        near = "" if Path(path).expanduser().exists() else near_model(path)
        raise ValueError(f"{error}{near and f'; did you mean {near}?'}") from None


def _elsewhere(config: RunConfig, name: str, gpus: int) -> JobMachine:
    device = find_device(name)
    if config.devices.kind == "cpu":
        raise ValueError(
            f"--device {name}: devices.kind=cpu keeps the job on CPUs. Add devices.kind=cuda."
        )
    if gpus > device.per_node:
        raise ValueError(
            f"--gpus {gpus}: a machine has at most {device.per_node} {name}. For more, use --gpus "
            f"{device.per_node} and devices.nodes={-(-gpus // device.per_node)}."
        )
    asked, most = config.devices.per_node, gpus * config.devices.per_gpu
    if asked > most:
        wanted = -(-asked // config.devices.per_gpu)
        other = f"use --gpus {wanted}"
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
    """Changes that fit this machine or larger ones. If the first need more GPUs, the second fit
    it."""
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
    for changes, machine in machines:
        for also in settings:
            found = fitting(with_changes(config, changes), shape, machine, also)
            if found is not None:
                return {**changes, **found[0]}, found[1]
    return None


def _nearest(config: RunConfig, shape: ModelShape, machine: JobMachine) -> _Found | None:
    """The changes with the least needs, on as many such GPUs as a machine has."""
    (changes, wider), *_ = reversed(
        [each for each in _machines(config, machine) if each[1].nodes == machine.nodes]
    )
    found = nearest(with_changes(config, changes), shape, wider)
    return None if found is None else ({**changes, **found[0]}, found[1])


def _machines(config: RunConfig, machine: JobMachine) -> Iterator[tuple[Changes, JobMachine]]:
    """Yield this machine, larger ones and several, with the job's keys for them."""
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


_DEADLINE_S = {"engine": 900.0, "step": 900.0}
"""Kernels are compiled at the first start of an engine."""
_USUAL_S = 180.0
_NEEDED = ("devices", "engine", "sleep")
"""If the engine fails one of these, its later steps are skipped. The job's step needs two."""
_PROMPTS, _LONGEST = 8, 256
"""Limits of the job's step, which is to take seconds."""
_SAID = ("rollpacker", "torch", "transformers", "vllm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of a step. ``ok`` is None if it was skipped."""

    step: str
    ok: bool | None
    detail: str
    seconds: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict[str, Any])


def trial(config: RunConfig) -> Iterator[Finding]:
    """Yield each step's result. Raises ``ValueError`` for a configuration without real devices."""
    if config.devices.emulate is not None:
        raise ValueError("devices.emulate: emulated devices are no machine to try the job on")
    failed = False
    for steps, part in ((EngineTrial.STEPS, _try_engine), (("step",), _try_step)):
        if failed:
            yield from (Finding(step=step, ok=None, detail="skipped") for step in steps)
            continue
        for finding in _apart(part, config, steps):
            failed = failed or (finding.ok is False and finding.step in _NEEDED[:2])
            yield finding


def versions() -> dict[str, str]:
    """Versions of the packages that the trial uses."""
    found: dict[str, str] = {}
    for name in _SAID:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _apart(
    part: Callable[[RunConfig, Connection], None], config: RunConfig, steps: tuple[str, ...]
) -> Iterator[Finding]:
    """Yield a process's results. If it hangs or dies, the current step has failed."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=part, args=(config, theirs))
    process.start()
    theirs.close()
    try:
        for number, step in enumerate(steps):
            deadline = _DEADLINE_S.get(step, _USUAL_S)
            try:
                found = ours.recv() if ours.poll(deadline) else f"no answer within {deadline:g} s"
            except EOFError:
                process.join()
                found = f"the process died with status {process.exitcode}"
            if not isinstance(found, str):
                yield found
                continue
            yield Finding(step=step, ok=False, detail=found, seconds=deadline)
            yield from (
                Finding(step=each, ok=None, detail="skipped") for each in steps[number + 1 :]
            )
            return
    finally:
        process.kill()
        process.join()
        ours.close()


def _try_engine(config: RunConfig, answer: Connection) -> None:
    for finding in EngineTrial(config).findings():
        answer.send(finding)


def _try_step(config: RunConfig, answer: Connection) -> None:
    answer.send(_found("step", lambda: _one_step(config)))


def _found(step: str, act: Callable[[], tuple[str, dict[str, Any]]]) -> Finding:
    begun = time.monotonic()
    try:
        detail, facts = act()
    except Exception as error:
        took = time.monotonic() - begun
        said = words_of(error) or type(error).__name__
        return Finding(step=step, ok=False, detail=said, seconds=took)
    took = time.monotonic() - begun
    return Finding(step=step, ok=True, detail=detail, seconds=took, facts=facts)


def _one_step(config: RunConfig) -> tuple[str, dict[str, Any]]:
    from rollpacker.job import train

    with tempfile.TemporaryDirectory(prefix="rollpacker-doctor-") as folder:
        rollout = config.rollout
        small = {
            "prompts_per_step": min(_PROMPTS, rollout.prompts_per_step),
            "max_completion_length": min(_LONGEST, rollout.max_completion_length or _LONGEST),
        }
        one = config.model_copy(
            update={
                "rollout": rollout.model_copy(update=small),
                "output": folder,
                "steps": 1,
                "eval": None,
                "trackers": [],
                "checkpoint": config.checkpoint.model_copy(update={"every": 0}),
            }
        )
        run = train(one, progress=Progress(Console(file=StringIO())))
        line = json.loads((run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[0])
    kept = {
        name: line[name]
        for name in ("step_time", "timing_s/rollout", "sampler/kl", "completions/mean_length")
        if name in line
    }
    return f"a small step of the job took {line['step_time']:.1f} s", kept


class EngineTrial:
    """The job's engine and model in this process. ``build`` makes the engine."""

    STEPS = ("devices", "engine", "weights", "log-probabilities", "sleep", "drafts", "rates")

    def __init__(self, config: RunConfig, build: Callable[..., Any] = build_engine) -> None:
        engine = config.engine
        if isinstance(engine, VllmEngineConfig):  # one device is enough to try
            engine = engine.model_copy(update={"tensor_parallel": 1})
        self._config = config.model_copy(update={"engine": engine})
        self._build = build
        self._loads = 0

    def findings(self) -> Iterator[Finding]:
        """Yield each step's result. Without devices or an engine, later steps are skipped."""
        acts = (
            self._devices,
            self._start,
            self._weights,
            self._logprobs,
            self._sleep,
            self._drafts,
            self._rates,
        )
        going = True
        for step, act in zip(self.STEPS, acts, strict=True):
            if not going:
                yield Finding(step=step, ok=None, detail="skipped")
                continue
            finding = _found(step, act)
            going = finding.ok is True or step not in _NEEDED
            yield finding

    def _devices(self) -> tuple[str, dict[str, Any]]:
        found = devices()
        if not found.ok:
            raise ValueError(f"{found.detail}: {found.fix}")
        self._device = worker_devices(self._config)[0][0]
        return found.detail, {"device": self._device}

    def _start(self) -> tuple[str, dict[str, Any]]:
        import torch
        from transformers.utils import logging

        from rollpacker.train.model.loading import load_model

        logging.disable_progress_bar()
        config, device = self._config, self._device
        # vLLM takes its share of the device, so the model to compare with is on the CPU.
        self._place = device if config.engine.kind == "mini" else "cpu"
        self._model, tokenizer = load_model(config.model, self._place)
        before, begun = _held(device), time.monotonic()
        notes: list[str] = []
        self._engine = self._build(
            config, self._model, tokenizer, device, alone=False, note=notes.append
        )
        self._loose = config.model.dtype != "float32"
        self._notes = notes
        torch.manual_seed(0)
        took, size = time.monotonic() - begun, (_held(device) - before) / 1e9
        facts = {"start_s": took, "memory_gb": size}
        return f"{config.engine.kind} starts in {took:.0f} s and takes {size:.1f} GB", facts

    def _load(self) -> None:
        from rollpacker.checkpoint_names import CheckpointNames, stored

        self._loads += 1
        if self._config.engine.kind == "mini":
            self._engine.load_weights(None, self._loads)
            return
        names = CheckpointNames(self._model)
        self._engine.load_weights(names.converted(stored(self._model)), self._loads)

    def _scale(self, by: float) -> None:
        import torch

        with torch.no_grad():
            for weight in self._model.parameters():
                weight.mul_(by)

    def _weights(self) -> tuple[str, dict[str, Any]]:
        from rollpacker.engine.probe import answers, differ

        self._load()
        self._first = answers(self._engine)
        self._scale(2.0)  # halving a power of two later restores every bit
        self._load()
        doubled = answers(self._engine)
        self._scale(0.5)
        self._load()
        if not differ(self._first, doubled, loose=True):
            raise ValueError("new weights do not arrive: other weights give the same responses")
        if said := differ(self._first, answers(self._engine), loose=self._loose):
            raise ValueError(f"with the first weights again, {said}")
        return "new weights arrive", {}

    def _logprobs(self) -> tuple[str, dict[str, Any]]:
        import torch

        gaps: list[float] = []
        for number, output in enumerate(self._first):
            ids = torch.from_numpy(_with_prompt(number, output.tokens))[None].to(self._place)
            with torch.no_grad():
                logits = self._model(ids).logits[0].float()
            start = ids.shape[1] - len(output.tokens)
            own = torch.log_softmax(logits[start - 1 : -1], -1)
            own = own.gather(1, ids[0, start:, None].long())[:, 0].cpu().numpy()
            gaps += abs(own - output.logprobs).tolist()
        mean, most = sum(gaps) / len(gaps), max(gaps)
        if mean > (0.05 if self._loose else 1e-3):
            raise ValueError(f"the engine's differ from the model's by {mean:.3f} nats on average")
        return f"{mean:.1e} nats apart, {most:.1e} at most", {"mean": mean, "most": most}

    def _sleep(self) -> tuple[str, dict[str, Any]]:
        from rollpacker.engine.probe import answers, differ

        held, begun = _held(self._device), time.monotonic()
        self._engine.sleep()
        freed, slept = (held - _held(self._device)) / 1e9, time.monotonic()
        self._engine.wake()
        self._load()
        woken = time.monotonic()
        if said := differ(self._first, answers(self._engine), loose=self._loose):
            raise ValueError(f"after a sleep, {said}")
        facts = {"freed_gb": freed, "sleep_s": slept - begun, "wake_s": woken - slept}
        return (
            f"frees {max(0.0, freed):.1f} GB in {slept - begun:.1f} s, wakes and loads in "
            f"{woken - slept:.1f} s",
            facts,
        )

    def _drafts(self) -> tuple[str, dict[str, Any]]:
        from rollpacker.engine.probe import drafts_differ

        if self._notes:
            raise ValueError(self._notes[-1])
        if not self._engine.info().speculates:
            return "this engine does not use speculative decoding here", {}
        self._load()
        if said := drafts_differ(self._engine, loose=self._loose):
            raise ValueError(f"with drafts, {said}")
        return "responses with drafts are those without", {}

    def _rates(self) -> tuple[str, dict[str, Any]]:
        info = self._engine.info()
        steps = ", ".join(f"{size}: {1000 * s:.1f} ms" for size, s in info.latency.items())
        prefill = f"{1 / info.prefill_token_s:,.0f} tokens/s" if info.prefill_token_s else "unknown"
        facts = {"latency_s": info.latency, "prefill_token_s": info.prefill_token_s}
        return f"a decode step by sequences {steps}; prefill {prefill}", facts


def _with_prompt(number: int, tokens: Any) -> Any:
    import numpy as np

    from rollpacker.engine.probe import prompt

    return np.concatenate([prompt(number), tokens]).astype(np.int64)


def _held(device: str) -> float:
    """Used bytes of the device, or of this process on a CPU."""
    if device == "cpu":
        return 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    import torch

    free, whole = torch.cuda.mem_get_info(device)
    return float(whole - free)
