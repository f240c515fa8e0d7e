"""What each mode of tail batching would gain on somebody's own response lengths.

Several jobs are simulated for each mode, all modes with the same prompts. A job's steps are drawn
from the trace's, with their recorded lengths; what it does not hold (more responses of a prompt,
another visit, further prompts) is drawn from a model with the trace's marginal and correlations,
given the prompt's own responses. Where costs are assumed, jobs have those of neighbouring settings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollpacker.config.rollout import RolloutConfig, TailMode
from rollpacker.core.types import RoundKind
from rollpacker.policy.settings import RolloutSettings
from rollpacker.polytrace.schema import Trace
from rollpacker.polytrace.statistics.statistics import dependence, read_of
from rollpacker.sim.costs import calibration as calibrations
from rollpacker.sim.costs.ahead import Ahead
from rollpacker.sim.costs.calibration import Calibration
from rollpacker.sim.costs.costs import PROMPT_TOKENS
from rollpacker.sim.estimate.verdict import AHEAD, ModeEstimate, recommend, sentences
from rollpacker.sim.recorded.fit_costs import calibrate
from rollpacker.sim.recorded.run_record import RunRecord
from rollpacker.sim.workload.source import LengthSource, task_samples
from rollpacker.sim.world.config import DomainConfig, SimulationConfig
from rollpacker.sim.world.result import JobResult, StepResult, mean
from rollpacker.sim.world.simulator import Simulation, world_costs

MODES: tuple[TailMode, ...] = ("off", "exact", "auto", "prompts", "race")
_CYCLE = 5
"""Steps from one empty queue to the next, at over-provisioning 1.25."""
_JOBS = 4
"""Simulated for each mode."""
_LEARNS, _CYCLES = 10, 3
"""Steps before mode ``auto`` chooses anything but ``exact``, and how much longer its cycles are."""
_MOST_STEPS = 20
_MOST_ATTEMPTS = 5_200
"""Responses of one simulated job, about a second."""
_REPEATS, _REPEATS_CPU = 0.05, 0.07
"""By so much speed-ups of one job differ: an emulated 7B run's ``exact`` was 1.98 and not 2.10, the
demo's on a CPU were 1.11, 1.20 and 1.27."""
_DEVIATIONS = 2.0
"""From the middle of a range to its ends: 0.83 of normal values, with four jobs to know it from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What was found.

    Args:
        read: finished responses in the trace.
        icc: intraclass correlation of length within a prompt; None with one response each.
        modes: by name. Mode ``partial``, which is not on-policy and never recommended, is left out
            for responses with tools, and ``exact`` with engines that decode ahead where ``exact``
            has them already.
        recommended: the mode that changes least of what is learned, within the bias limit, and is
            not clearly beaten.
    """

    task: str
    prompts: int
    responses: int
    jobs: int
    steps: int
    read: int
    icc: float | None
    costs: dict[str, str]
    modes: dict[str, ModeEstimate]
    recommended: str
    sentences: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCases:
    """What engines that decode ahead might bring, each a case; ``source``: from where, in words."""

    cases: tuple[Ahead, ...]
    source: str

    @property
    def words(self) -> str:
        """Tokens of a decode step, and where they are from."""
        tokens = dict.fromkeys(f"{each.tokens:.1f}" for each in (self.cases[0], self.cases[-1]))
        return f"{' to '.join(tokens)}, {self.source}"


ASSUMED_DRAFTS = DraftCases(
    cases=tuple(Ahead(tokens=tokens) for tokens in (1.5, 2.0, 2.5)),
    source="assumed; --tokenizer measures them on a log's texts",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CostCase:
    """Costs that a job might have.

    Args:
        gpus: devices; None takes the calibration's.
        weight: any positive number; how much it counts beside others.
    """

    calibration: Calibration
    gpus: int | None = None
    weight: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatedJob:
    """What is simulated.

    Args:
        rollout: the run's section; its mode is replaced.
        cases: costs, the likeliest first.
        graded: the calibration's seconds of grading are charged.
        costs: the costs in words, by what they are.
        left_out: what the simulation does not have, in words.
        ahead: its engines decode ahead, in modes that let them.
        drafts: what engines that decode ahead might bring.
        repeats: relative deviation between two runs of the same job.
        texts: its responses say something, so that drafts can be measured on them.
        early: mode ``off`` grades responses while others decode, as its own run did.
    """

    task: str
    source: LengthSource
    rollout: RolloutConfig
    cases: tuple[CostCase, ...]
    graded: bool
    costs: dict[str, str]
    left_out: str
    ahead: bool = False
    drafts: DraftCases = ASSUMED_DRAFTS
    repeats: float = _REPEATS
    texts: bool = True
    early: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatedMachine:
    """What the user says of the machines; None is assumed.

    Args:
        calibration: a built-in one or a file; by default all built-in ones, the more the nearer
            the lengths of their responses.
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
    """The job on GPUs of a calibration; by default of each of the paper's settings.

    Of steps that would take too long to simulate, a part of the prompts runs on that part of the
    GPUs. Rewards cost nothing, whatever the calibration says of the paper's. Raises ``ValueError``
    where no calibration has such machines.
    """
    assert source.prompts is not None
    assert source.responses is not None
    prompts = min(source.prompts, max(8, _MOST_ATTEMPTS // (_CYCLE * source.responses)))
    job = EstimatedJob(
        task=task,
        source=source,
        rollout=RolloutConfig(
            prompts_per_step=prompts,
            num_generations=source.responses,
            max_completion_length=source.cap,
        ),
        cases=(),
        graded=False,
        costs={},
        left_out="the time of rewards and of the driver",
    )
    names = [hardware.calibration] if hardware.calibration else calibrations.builtin()
    fitted = sorted(map(calibrations.load, names), key=lambda each: -_weight(each, source))
    found: dict[str, tuple[CostCase, str]] = {}
    wrong: ValueError | None = None
    for each in fitted:
        try:
            found[each.name] = _on_gpus(job, each, hardware)
        except ValueError as error:
            wrong = wrong or error
    if not found:
        assert wrong is not None
        raise wrong
    cases = tuple(case for case, _ in found.values())
    whole = sum(case.weight for case in cases)
    costs = {f"{name}, {case.weight / whole:.0%}": told for name, (case, told) in found.items()}
    costs["rewards"] = "take no time"
    if not hardware.calibration:
        costs["weights"] = f"by the longest responses, of {_longest(source):.0f} tokens"
    if prompts < source.prompts:
        costs["simulated"] = f"{prompts / source.prompts:.0%} of a step and of its GPUs"
    return replace(job, cases=cases, costs=costs)


def _longest(source: LengthSource) -> float:
    """Mean of the longest hundredth: no single response decides."""
    lengths = np.sort(np.concatenate([each.lengths for each in source.recorded]))
    return float(lengths[-math.ceil(lengths.size / 100) :].mean())


def _weight(fitted: Calibration, source: LengthSource) -> float:
    """By how far its responses are from these, either way."""
    ratio = _longest(source) / fitted.response_cap
    return min(ratio, 1.0 / ratio) ** 2


def _on_gpus(
    job: EstimatedJob, fitted: Calibration, hardware: EstimatedMachine
) -> tuple[CostCase, str]:
    """Costs of a job, and in words. Raises ``ValueError`` where the machines cannot run it."""
    source, rollout = job.source, job.rollout
    costs = fitted.moved(hardware.model, hardware.device)
    carried = fitted.carried_over(costs)
    costs = costs.model_copy(update={"synchronous_reward_s": 0.0})
    gpus, smaller = hardware.gpus, rollout.prompts_per_step / (source.prompts or 1)
    if costs.measured is None:
        responses = rollout.prompts_per_step * rollout.num_generations
        wanted = costs.gpus * responses / (costs.prompts * costs.responses)
        node = costs.devices().node_size
        if gpus is None or smaller < 1.0:
            gpus = node * max(1, round((wanted if gpus is None else gpus * smaller) / node))
    case = CostCase(calibration=costs, gpus=gpus, weight=_weight(fitted, source))
    world_costs(simulation_of(job, case, 1), costs)
    device = "CPU workers" if costs.measured else costs.device
    told = f"{costs.model} on {gpus or costs.gpus} {device}"
    return case, told if carried is None else f"{told}; {carried}"


def on_own_workers(run: RunRecord, source: LengthSource, task: str) -> EstimatedJob:
    """The job of a run on its own workers. Raises ``ValueError`` when it timed too little."""
    costs = calibrate(run)
    rollout = RolloutConfig.model_validate(run.settings["rollout"])
    tasks = {"group_tokens": RolloutSettings.from_json(run.settings).rules.task_tokens}
    streaming = rollout.streaming.model_copy(update=tasks)
    rollout = rollout.model_copy(update={"streaming": streaming})
    early = run.settings["asynchronous_grading"] if rollout.tail_batching.mode == "off" else None
    return EstimatedJob(
        task=task,
        source=replace(source, cap=run.settings["cap"]),
        rollout=rollout,
        cases=(CostCase(calibration=costs),),
        graded=True,
        costs={run.name: f"fitted to the run itself, with its {costs.gpus} workers"},
        left_out="what other jobs take" if run.cores else "that processes may share cores",
        ahead=run.settings.get("rows") is not None and rollout.speculation.mode != "off",
        repeats=_REPEATS_CPU,
        early=early,
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
        steps: of every job; default: enough to settle, within seconds.
    """
    read = read_of(task_samples(trace, job.task))
    count = steps or steps_for(job)
    order = [number % len(job.cases) for number in range(_JOBS)]
    weights = np.array([job.cases[each].weight / order.count(each) for each in order])
    found = [_simulated(job, job.cases[each], n, count) for n, each in enumerate(order)]
    modes = {
        name: _joined(
            [each[name] for each in found], weights / weights.sum(), job.repeats * (name != "off")
        )
        for name in found[0]
    }
    limit = job.rollout.tail_batching.bias_limit
    recommended = recommend(modes, limit)
    drafts = {"tokens of a step ahead": job.drafts.words}
    if job.cases[0].calibration.ahead.possible:
        drafts = {}
    return Estimate(
        task=job.task,
        prompts=job.rollout.prompts_per_step,
        responses=job.rollout.num_generations,
        jobs=_JOBS,
        steps=count,
        read=read.responses,
        icc=read.icc,
        costs=job.costs | drafts,
        modes=modes,
        recommended=recommended,
        sentences=sentences(
            modes,
            recommended,
            left_out=job.left_out,
            depends=dependence(read.icc, read.icc_log),
            read=read.responses,
            limit=limit,
            aborted=read.aborted / (read.responses + read.aborted),
        ),
    )


def simulation_of(job: EstimatedJob, case: CostCase, steps: int, seed: int = 0) -> SimulationConfig:
    """The job's configuration, in its own mode."""
    return SimulationConfig(
        calibration=case.calibration.name,
        workload=job.task,
        steps=steps,
        seed=seed,
        rollout=job.rollout,
        asynchronous_grading=job.early if job.rollout.tail_batching.mode == "off" else None,
        gpus=case.gpus,
        rollout_tp=_tensor_parallel(job, case),
        domains={"default": DomainConfig(reward="math" if job.graded else "none")},
    )


def _simulated(
    job: EstimatedJob, case: CostCase, number: int, steps: int
) -> dict[str, ModeEstimate]:
    """Every mode of one job, on the same prompts and with the same costs."""
    size, rollout, costs = job.rollout.prompts_per_step, job.rollout, case.calibration
    most = _LEARNS + _CYCLES * steps
    source = job.source.drawn_again(np.random.default_rng([number, 6]), size, most)
    possible = costs.ahead.possible
    drafts = job.drafts.cases[number % len(job.drafts.cases)]
    drafting = replace(case, calibration=costs.model_copy(update={"ahead": drafts}))
    own = drafting if job.ahead and not possible else case

    def run(mode: TailMode, case: CostCase = own, **changes: object) -> JobResult:
        first, count = (0, most) if mode == "auto" else (_LEARNS, steps)
        tail = rollout.tail_batching.model_copy(update={"mode": mode})
        changed = rollout.model_copy(update={"tail_batching": tail, **changes})
        config = simulation_of(replace(job, rollout=changed), case, count, number)
        same = replace(source, recorded=source.recorded[first * size :])
        grows = rollout.planner != "off"
        return Simulation(config, case.calibration, same, grows=grows).run()

    off = run("off")
    base = off.mean_step_s
    found = {"off": _mode(off, base)}
    for mode in MODES[1:]:
        found[mode] = _mode(run(mode), base, _LEARNS if mode == "auto" else 0)
    if job.source.turns is None:
        found["partial"] = _partial(run("partial").steps, off.steps)
    if not (job.ahead or possible):
        allowed = rollout.speculation.model_copy(update={"mode": "auto"})
        found[AHEAD] = _mode(run("exact", drafting, speculation=allowed), base)
    return found


def _joined(
    each: Sequence[ModeEstimate], weights: NDArray[np.float64], repeats: float
) -> ModeEstimate:
    """What jobs say together of a mode."""

    def middle(of: Callable[[ModeEstimate], float]) -> float:
        return float(weights @ [of(mode) for mode in each])

    centre = middle(lambda mode: math.log(mode.speedup))
    spread = middle(lambda mode: (math.log(mode.speedup) - centre) ** 2)
    variance = spread / (1.0 - float(weights @ weights)) + repeats**2
    reach = math.exp(_DEVIATIONS * math.sqrt(variance))
    return ModeEstimate(
        speedup=math.exp(centre),
        low=math.exp(centre) / reach,
        high=math.exp(centre) * reach,
        kept_vs_true_len=middle(lambda mode: mode.kept_vs_true_len),
        step_s=middle(lambda mode: mode.step_s),
        decoded_vs_kept=middle(lambda mode: mode.decoded_vs_kept),
        tool_wait_s=middle(lambda mode: mode.tool_wait_s),
        stale=middle(lambda mode: mode.stale),
    )


def _tensor_parallel(job: EstimatedJob, case: CostCase) -> int | None:
    """The least size, from the calibration's, whose KV cache holds one response of any length."""
    costs, source = case.calibration, job.source
    if costs.measured is not None or source.cap is None:
        return None
    prompt = (source.prompt_tokens or PROMPT_TOKENS) + source.tool_tokens
    need = source.cap + prompt
    sizes = [tp for tp in costs.engine_sizes(case.gpus) if tp >= costs.rollout_tp]
    engines = {tp: costs.engine(tp) for tp in sizes}
    return next((tp for tp in sizes if engines[tp].capacity >= need + engines[tp].slack), None)


def _mode(result: JobResult, base: float, first: int = 0) -> ModeEstimate:
    """Over whole cycles: what waits in the queue at the end would make kept lengths too short."""
    last = max((n for n, s in enumerate(result.steps) if s.kind is RoundKind.LONG), default=-1)
    steps = result.steps[first : last + 1] or result.steps[first:]
    kept = _kept_length(steps) / _kept_length(result.steps) * result.kept_vs_true_len
    seconds = mean(step.step_s for step in steps)
    return ModeEstimate(
        speedup=base / seconds,
        low=base / seconds,
        high=base / seconds,
        kept_vs_true_len=kept,
        step_s=seconds,
        decoded_vs_kept=sum(s.decoded_tokens for s in steps) / sum(s.kept_tokens for s in steps),
        tool_wait_s=mean(step.tool_wait_s for step in steps),
    )


def _partial(steps: Sequence[StepResult], off: Sequence[StepResult]) -> ModeEstimate:
    """By kept tokens, in the last two thirds of the steps: at first the queue fills up with those
    that are long."""
    steps = steps[len(steps) // 3 :]
    tokens = sum(s.kept_tokens for s in steps)
    seconds = mean(step.step_s for step in steps) * _kept(off) / _kept(steps)
    speedup = mean(step.step_s for step in off) / seconds
    return ModeEstimate(
        speedup=speedup,
        low=speedup,
        high=speedup,
        kept_vs_true_len=_kept_length(steps) / _kept_length(off),
        step_s=seconds,
        # Of few steps, what is kept may have been decoded before them.
        decoded_vs_kept=max(1.0, sum(s.decoded_tokens for s in steps) / tokens),
        stale=sum(s.stale_tokens for s in steps) / tokens,
    )


def _kept(steps: Sequence[StepResult]) -> float:
    return mean(step.kept_tokens for step in steps)


def _kept_length(steps: Any) -> float:
    return sum(s.kept_tokens for s in steps) / sum(s.samples for s in steps)
