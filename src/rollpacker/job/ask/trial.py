"""A job's parts on this machine, one after the other: ``rollpacker doctor job.yaml --run``.

Each step has a deadline and runs in another process, as a driver or a kernel may hang, or end it. A
step that fails is named; steps that need it are skipped.
"""

from __future__ import annotations

import json
import multiprocessing
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from io import StringIO
from multiprocessing.connection import Connection
from typing import Any

from rich.console import Console

from rollpacker.config import RunConfig, VllmEngineConfig
from rollpacker.engine.configured import build_engine
from rollpacker.errors import words_of
from rollpacker.runtime.cluster.devices import worker_devices
from rollpacker.runtime.cluster.machine_checks import devices
from rollpacker.runtime.record.progress import Progress

_DEADLINE_S = {"engine": 900.0, "step": 900.0}
"""Kernels are compiled as an engine starts for the first time."""
_USUAL_S = 180.0
_NEEDED = ("devices", "engine", "sleep")
"""Steps without which the engine's others are skipped; the job's own needs the first two."""
_PROMPTS, _LONGEST = 8, 256
"""Of the job's step, which is to take seconds."""
_SAID = ("rollpacker", "torch", "transformers", "vllm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a step found; ``ok`` is None where it was skipped."""

    step: str
    ok: bool | None
    detail: str
    seconds: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict[str, Any])


def trial(config: RunConfig) -> Iterator[Finding]:
    """Each step as it ends. Raises ``ValueError`` for a configuration that no step
    could begin with."""
    if config.devices.emulate is not None:
        raise ValueError("devices.emulate: emulated devices are no machine that can be tried")
    failed = False
    for steps, part in ((EngineTrial.STEPS, _try_engine), (("step",), _try_step)):
        if failed:
            yield from (Finding(step=step, ok=None, detail="skipped") for step in steps)
            continue
        for finding in _apart(part, config, steps):
            failed = failed or (finding.ok is False and finding.step in _NEEDED[:2])
            yield finding


def versions() -> dict[str, str]:
    """Of what the trial ran."""
    found: dict[str, str] = {}
    for name in _SAID:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _apart(
    part: Callable[[RunConfig, Connection], None], config: RunConfig, steps: tuple[str, ...]
) -> Iterator[Finding]:
    """What a process finds, and the step that it was at where it hangs or dies."""
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
    """A step of the job itself, of few prompts, in a folder that goes."""
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
    """The job's engine and model in this process.

    Args:
        config: the job.
        build: makes the engine.
    """

    STEPS = ("devices", "engine", "weights", "log-probabilities", "sleep", "drafts", "rates")

    def __init__(self, config: RunConfig, build: Callable[..., Any] = build_engine) -> None:
        engine = config.engine
        if isinstance(engine, VllmEngineConfig):  # one device is enough to try
            engine = engine.model_copy(update={"tensor_parallel": 1})
        self._config = config.model_copy(update={"engine": engine})
        self._build = build
        self._loads = 0

    def findings(self) -> Iterator[Finding]:
        """Of each step, in order; without devices or an engine the others are skipped."""
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
        # Beside vLLM, which takes its share of the device, the model is compared on the CPU.
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
        """The model's weights, as they are now."""
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
        self._scale(2.0)  # a power of two: halved again they are what they were, to the bit
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
        """The engine's against the model's own."""
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
            return "this engine does not decode ahead here", {}
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
    """Bytes of the device that are taken, or of this process on a CPU."""
    if device == "cpu":
        return 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    import torch

    free, whole = torch.cuda.mem_get_info(device)
    return float(whole - free)
