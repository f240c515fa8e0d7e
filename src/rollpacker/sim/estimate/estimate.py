"""What each mode of tail batching would gain on somebody's own response lengths.

The job is simulated once a mode with the same prompts. The trace's prompts come first, with their
recorded lengths; what it does not hold (more responses of a prompt, another visit, further prompts)
is drawn from a model with the trace's marginal and correlations, given the prompt's own responses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rollpacker.config.rollout import RolloutConfig, StreamingConfig, TailMode
from rollpacker.core.types import RoundKind
from rollpacker.polytrace.schema import Trace
from rollpacker.polytrace.statistics.statistics import dependence, read_of
from rollpacker.sim.costs import calibration as calibrations
from rollpacker.sim.costs.ahead import Ahead
from rollpacker.sim.costs.calibration import Calibration
from rollpacker.sim.costs.costs import PROMPT_TOKENS
from rollpacker.sim.estimate.verdict import ModeEstimate, recommend, sentences
from rollpacker.sim.recorded.fit_costs import calibrate
from rollpacker.sim.recorded.run_record import RunRecord, SharedCores
from rollpacker.sim.workload.source import LengthSource, task_samples
from rollpacker.sim.world.config import DomainConfig, SimulationConfig
from rollpacker.sim.world.result import JobResult, StepResult, mean
from rollpacker.sim.world.simulator import Simulation

MODES: tuple[TailMode, ...] = ("off", "exact", "prompts", "race", "auto")
_CYCLE = 5
"""Steps from one empty queue to the next, at over-provisioning 1.25."""
_MOST_STEPS = 60
_MOST_ATTEMPTS = 12_000
"""Responses simulated for one mode, about three seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What was found.

    Args:
        task: of the trace.
        prompts, responses: of a step.
        steps: simulated for each mode.
        read: finished responses in the trace.
        icc: intraclass correlation of length within a prompt; None with one response each.
        costs: which costs were assumed, in words.
        modes: by name.
        partial: mode ``partial``, which is not on-policy and never recommended; None for responses
            with tools.
        ahead: ``exact`` with engines that decode ahead, by tokens of a decode step; empty where the
            costs have it already.
        ahead_from: where these tokens are from, in words.
        recommended: the fastest mode within the bias limit; ``exact`` where it is as fast.
        at_most: why speeds are upper bounds; empty where they are estimates.
        sentences: the same in plain words.
    """

    task: str
    prompts: int
    responses: int
    steps: int
    read: int
    icc: float | None
    costs: str
    modes: dict[str, ModeEstimate]
    partial: ModeEstimate | None
    ahead: dict[str, ModeEstimate]
    ahead_from: str
    recommended: str
    at_most: str
    sentences: list[str]

    @property
    def rows(self) -> dict[str, ModeEstimate]:
        """All of them, by name."""
        drafts = {f"exact, ahead {tokens}": mode for tokens, mode in self.ahead.items()}
        stale = {} if self.partial is None else {"partial": self.partial}
        return self.modes | stale | drafts


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCases:
    """What engines that decode ahead might bring, each a case; ``source``: from where, in words."""

    cases: tuple[Ahead, ...]
    source: str


ASSUMED_DRAFTS = DraftCases(
    cases=tuple(Ahead(tokens=tokens) for tokens in (1.5, 2.0, 2.5)),
    source="assumed; --tokenizer measures them on a log's texts",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatedJob:
    """What is simulated.

    Args:
        task: name.
        source: lengths.
        rollout: the run's section; its mode is replaced.
        calibration: costs.
        gpus: devices; None takes the calibration's.
        graded: the calibration's seconds of grading are charged.
        costs: the costs in words.
        left_out: what the simulation does not have, in words.
        shared: cores on which all processes take turns; None where the driver has its own, or where
            nothing is known of that.
        drafts: what engines that decode ahead might bring.
    """

    task: str
    source: LengthSource
    rollout: RolloutConfig
    calibration: Calibration
    gpus: int | None
    graded: bool
    costs: str
    left_out: str
    shared: SharedCores | None = None
    drafts: DraftCases = ASSUMED_DRAFTS


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatedMachine:
    """What the user says of the machines; None is assumed.

    Args:
        calibration: a built-in one or a file; by default the nearest by the cap of responses.
        model: another model than the calibration's.
        device: other GPUs than the calibration's.
        gpus: how many; by default as many as keep the calibration's responses a GPU.
    """

    calibration: str | None = None
    model: str | None = None
    device: str | None = None
    gpus: int | None = None


ASSUMED = EstimatedMachine()


def on_paper_gpus(
    task: str, source: LengthSource, hardware: EstimatedMachine = ASSUMED
) -> EstimatedJob:
    """The job on GPUs of a calibration; by default the paper's setting of the nearest cap.

    Of steps that would take too long to simulate, a part of the prompts runs on that part of the
    GPUs.
    Rewards cost nothing, whatever the calibration says of the paper's.
    """
    assert source.cap is not None
    assert source.prompts is not None
    assert source.responses is not None
    name, gpus = hardware.calibration, hardware.gpus
    fitted = calibrations.load(name) if name else calibrations.nearest(source.cap)
    costs = fitted.moved(hardware.model, hardware.device)
    carried = fitted.carried_over(costs)
    costs = costs.model_copy(update={"synchronous_reward_s": 0.0})
    prompts = min(source.prompts, max(8, _MOST_ATTEMPTS // (_CYCLE * source.responses)))
    smaller = prompts / source.prompts
    if costs.measured is None:
        wanted = costs.gpus * prompts * source.responses / (costs.prompts * costs.responses)
        node = costs.devices().node_size
        if gpus is None or smaller < 1.0:
            gpus = node * max(1, round((wanted if gpus is None else gpus * smaller) / node))
    count = gpus or costs.gpus
    why = "given" if name else f"assumed for responses of up to {source.cap} tokens"
    part = "" if smaller == 1.0 else f"; {smaller:.0%} of a step and of its GPUs are simulated"
    part += "" if carried is None else f"; {carried}"
    device = "CPU workers" if costs.measured else costs.device
    return EstimatedJob(
        task=task,
        source=source,
        rollout=RolloutConfig(
            prompts_per_step=prompts,
            num_generations=source.responses,
            max_completion_length=source.cap,
            streaming=StreamingConfig(group_tokens=16384),
        ),
        calibration=costs,
        gpus=gpus,
        graded=False,
        costs=(
            f"{costs.name}: {costs.model} on {count} {device} ({why}); rewards take no time{part}"
        ),
        left_out="the time of rewards and of the driver",
    )


def on_own_workers(run: RunRecord, source: LengthSource, task: str) -> EstimatedJob:
    """The job of a run on its own workers. Raises ``ValueError`` when it timed too little."""
    costs = calibrate(run)
    return EstimatedJob(
        task=task,
        source=replace(source, cap=run.settings["cap"]),
        rollout=RolloutConfig.model_validate(run.settings["rollout"]),
        calibration=costs,
        gpus=None,
        graded=True,
        costs=f"fitted to the run itself, with its {costs.gpus} workers",
        left_out="what other jobs take" if run.shared else "that processes may share cores",
        shared=run.shared,
    )


def steps_for(job: EstimatedJob) -> int:
    """Whole cycles of short and long rounds, within seconds to run."""
    rollout = job.rollout
    most = _MOST_ATTEMPTS // (rollout.prompts_per_step * rollout.num_generations)
    return _CYCLE * max(1, min(most, _MOST_STEPS) // _CYCLE)


def estimate(job: EstimatedJob, trace: Trace, *, steps: int | None = None) -> Estimate:
    """Simulate every mode. Raises ``ValueError`` when the machines cannot run the job.

    Args:
        job: what is simulated.
        trace: where its lengths come from.
        steps: of every mode; default: enough to settle, within seconds.
    """
    read = read_of(task_samples(trace, job.task))
    count = steps or steps_for(job)
    found = {mode: _simulate(job, mode, count) for mode in MODES}
    base = _step_s(found["off"].steps, job.shared)
    modes = {mode: _mode(result, base, job.shared) for mode, result in found.items()}
    partial = None
    if job.source.turns is None:
        partial = _partial(_simulate(job, "partial", count).steps, found["off"].steps, job.shared)
    ahead = {
        f"{case.tokens:.1f}": _mode(_simulate(drafting, "exact", count), base, job.shared)
        for case, drafting in _drafting(job)
    }
    limit = job.rollout.tail_batching.bias_limit
    recommended = recommend(modes, limit)
    at_most = ""
    if job.shared:
        at_most = f"driver, grading and workers take turns on {job.shared.cores} cores"
    return Estimate(
        task=job.task,
        prompts=job.rollout.prompts_per_step,
        responses=job.rollout.num_generations,
        steps=count,
        read=read.responses,
        icc=read.icc,
        costs=job.costs,
        modes=modes,
        partial=partial,
        ahead=ahead,
        ahead_from=job.drafts.source,
        recommended=recommended,
        at_most=at_most,
        sentences=sentences(
            modes,
            recommended,
            partial=partial,
            ahead=ahead,
            left_out=job.left_out,
            at_most=bool(at_most),
            depends=dependence(read.icc, read.icc_log),
            read=read.responses,
            limit=limit,
            aborted=read.aborted / (read.responses + read.aborted),
        ),
    )


def simulation_of(job: EstimatedJob, steps: int) -> SimulationConfig:
    """The job's configuration, in its own mode."""
    return SimulationConfig(
        calibration=job.calibration.name,
        workload=job.task,
        steps=steps,
        rollout=job.rollout,
        gpus=job.gpus,
        rollout_tp=_tensor_parallel(job),
        domains={"default": DomainConfig(reward="math" if job.graded else "none")},
    )


def _drafting(job: EstimatedJob) -> Iterator[tuple[Ahead, EstimatedJob]]:
    """The job with each case of drafts; none where its costs were measured with some."""
    if not job.calibration.ahead.possible:
        allowed = job.rollout.speculation.model_copy(update={"mode": "auto"})
        rollout = job.rollout.model_copy(update={"speculation": allowed})
        for case in job.drafts.cases:
            costs = job.calibration.model_copy(update={"ahead": case})
            yield case, replace(job, calibration=costs, rollout=rollout)


def _simulate(job: EstimatedJob, mode: TailMode, steps: int) -> JobResult:
    tail = job.rollout.tail_batching.model_copy(update={"mode": mode})
    job = replace(job, rollout=job.rollout.model_copy(update={"tail_batching": tail}))
    return Simulation(simulation_of(job, steps), job.calibration, job.source).run()


def _tensor_parallel(job: EstimatedJob) -> int | None:
    """The least size, from the calibration's, whose KV cache holds one response of any length."""
    costs, source = job.calibration, job.source
    if costs.measured is not None or source.cap is None:
        return None
    prompt = (source.prompt_tokens or PROMPT_TOKENS) + source.tool_tokens
    need = source.cap + prompt
    sizes = [tp for tp in costs.engine_sizes(job.gpus) if tp >= costs.rollout_tp]
    engines = {tp: costs.engine(tp) for tp in sizes}
    return next((tp for tp in sizes if engines[tp].capacity >= need + engines[tp].slack), None)


def _mode(result: JobResult, base: float, shared: SharedCores | None) -> ModeEstimate:
    """Over whole cycles: what waits in the queue at the end would make kept lengths too short."""
    last = max((n for n, s in enumerate(result.steps) if s.kind is RoundKind.LONG), default=-1)
    steps = result.steps[: last + 1] or result.steps
    kept = _kept_length(steps) / _kept_length(result.steps) * result.kept_vs_true_len
    seconds = _step_s(steps, shared)
    return ModeEstimate(
        speedup=base / seconds,
        kept_vs_true_len=kept,
        step_s=seconds,
        decoded_vs_kept=sum(s.decoded_tokens for s in steps) / sum(s.kept_tokens for s in steps),
        tool_wait_s=mean(step.tool_wait_s for step in steps),
    )


def _partial(
    steps: Sequence[StepResult], off: Sequence[StepResult], shared: SharedCores | None
) -> ModeEstimate:
    """By kept tokens, in the last two thirds of the steps: at first the queue fills up with those
    that are long."""
    steps = steps[len(steps) // 3 :]
    tokens = sum(s.kept_tokens for s in steps)
    seconds = _step_s(steps, shared) * _kept(off) / _kept(steps)
    return ModeEstimate(
        speedup=_step_s(off, shared) / seconds,
        kept_vs_true_len=_kept_length(steps) / _kept_length(off),
        step_s=seconds,
        # Of few steps, what is kept may have been decoded before them.
        decoded_vs_kept=max(1.0, sum(s.decoded_tokens for s in steps) / tokens),
        stale=sum(s.stale_tokens for s in steps) / tokens,
    )


def _kept(steps: Sequence[StepResult]) -> float:
    return mean(step.kept_tokens for step in steps)


def _step_s(steps: Sequence[StepResult], shared: SharedCores | None) -> float:
    """Mean seconds of a step; on shared cores none is shorter than its work without any gap."""
    seconds = mean(step.step_s for step in steps)
    if shared is None:
        return seconds
    return max(seconds, shared.least_s(mean(step.decoded_tokens for step in steps)))


def _kept_length(steps: Any) -> float:
    return sum(s.kept_tokens for s in steps) / sum(s.samples for s in steps)
