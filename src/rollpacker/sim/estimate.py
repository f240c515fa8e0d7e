"""Predict the gain of each mode of tail batching on the user's own lengths, by simulation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollpacker.config.rollout import RolloutConfig, TailMode, is_own
from rollpacker.core.types import RoundKind
from rollpacker.policy.settings import RolloutSettings
from rollpacker.polytrace.schema import Trace
from rollpacker.polytrace.statistics import Dependence, dependence, read_of
from rollpacker.sim.costs import calibration as calibrations
from rollpacker.sim.costs.calibration import Calibration
from rollpacker.sim.costs.costs import PROMPT_TOKENS, Ahead
from rollpacker.sim.recorded.fit_costs import calibrate
from rollpacker.sim.recorded.run_record import RunRecord
from rollpacker.sim.workload.source import LengthSource, task_samples
from rollpacker.sim.world.machines import DomainConfig, SimulationConfig
from rollpacker.sim.world.simulator import Simulation, world_costs
from rollpacker.sim.world.step import JobResult, StepResult, mean

# --- The recommended mode, and its reasons in words

AHEAD = "exact, ahead"
"""Name of ``exact`` with speculative decoding, if the log's engines do not use it."""
_SIMPLEST = ("exact", "auto", "prompts", "race")
"""Modes in order of their effect on training, the smallest first."""
_SAME = 1.02  # speeds with a smaller ratio count as equal
_WORTH_IT = 1.05
_FEW = 100  # with fewer responses, hardly one is in the longest hundredth


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeEstimate:
    """One mode against ``off``, on the same prompts.

    Args:
        speedup: mean step time of ``off`` over the mode's, the median of several jobs.
        low, high: expected range of one run. For a single job its own value.
        kept_vs_true_len: mean length of the responses trained on over that of all.
        decoded_vs_kept: tokens decoded, including aborted ones, over tokens kept.
        tool_wait_s: mean seconds per step in which an engine only waits for tools.
        stale: share of the trained tokens that earlier weights sampled.
    """

    speedup: float
    low: float
    high: float
    kept_vs_true_len: float
    step_s: float
    decoded_vs_kept: float
    tool_wait_s: float = 0.0
    stale: float = 0.0

    @property
    def range(self) -> str:
        return f"{self.low:.2f}x to {self.high:.2f}x"


def recommend(modes: Mapping[str, ModeEstimate], limit: float) -> str:
    """Return the simplest mode that keeps ``limit`` of the true mean length and is not clearly
    beaten.

    A mode is beaten if another one's range begins more than 5% above the end of its own. ``off`` is
    returned if the chosen mode is less than 2% faster.
    """
    fair = _fair(modes, limit)
    if not fair:
        return "off"
    best = max(modes[name].low for name in fair)
    chosen = next(name for name in fair if _WORTH_IT * modes[name].high >= best)
    return chosen if modes[chosen].speedup >= _SAME else "off"


def _fair(modes: Mapping[str, ModeEstimate], limit: float) -> list[str]:
    order = [*_SIMPLEST, *(name for name in modes if is_own(name))]
    return [n for n in order if n in modes and modes[n].kept_vs_true_len >= limit]


def sentences(
    modes: Mapping[str, ModeEstimate],
    recommended: str,
    *,
    left_out: str,
    depends: Dependence | None,
    read: int,
    limit: float,
    aborted: float = 0.0,
) -> list[str]:
    """Describe the estimate in one to seven sentences. ``left_out``: omissions of the
    simulation. ``depends``: dependence of the trace's lengths, None if unknown. ``read``: number
    of its responses. ``aborted``: share of aborted ones."""
    chosen = modes[recommended]
    exact = modes.get("exact", chosen)
    races = {name: modes[name] for name in ("race", "prompts") if name in modes}
    best = max(races, key=lambda name: races[name].speedup, default="")
    told: list[str] = []
    pays = recommended not in ("off", "exact")
    pays = pays or not races or races[best].speedup > _WORTH_IT * exact.speedup
    if not pays:
        told.append(
            f"Racing does not pay here: the best race ({best}) is about "
            f"{races[best].speedup / exact.speedup:.2f}x as fast as exact rounds."
        )
    if read < _FEW:
        told.append(
            f"Only {read} finished responses were read: a log of more steps says more of the tail."
        )
    if _fair(modes, limit):
        told.append(_use(recommended, chosen, left_out))
    else:
        told.append(
            f"No on-policy mode of these keeps {limit:g} of the true mean length (left out: "
            f"{left_out})."
        )
    auto = modes.get("auto", exact)
    fair = recommended == "exact" and auto.kept_vs_true_len >= limit
    if fair and auto.speedup > _WORTH_IT * exact.speedup:
        told.append(
            f"Mode auto may be faster ({auto.range}), keeping {auto.kept_vs_true_len:.2f} of the "
            "true mean length, but the ranges do not tell the two apart."
        )
    tempting = _SAME * max(1.0, chosen.speedup)
    biased = [n for n, r in races.items() if r.kept_vs_true_len < limit and r.speedup > tempting]
    for name in biased[:1] if pays else ():
        told.append(
            f"Mode {name} may be faster ({races[name].range}) but trains on responses of "
            f"{races[name].kept_vs_true_len:.2f} of the true mean length{_cause(depends)}."
        )
    partial, ahead = modes.get("partial"), modes.get(AHEAD)
    if partial is not None and partial.speedup > tempting:
        told.append(
            f"Partial rollouts may make it {partial.range}, with {partial.stale:.0%} of the tokens "
            "from earlier weights: mode partial is there to compare with, and not on-policy."
        )
    if ahead is not None and ahead.speedup > _SAME * exact.speedup:
        told.append(
            f"Decoding ahead, which changes no distribution, may make exact {ahead.range}. Engines "
            "mini and vLLM do it."
        )
    if aborted >= 0.01:
        told.append(
            f"{aborted:.0%} of the responses were aborted and are left out, so true lengths are "
            "longer: estimate from a run of mode off or exact."
        )
    return told


def _use(recommended: str, chosen: ModeEstimate, left_out: str) -> str:
    if recommended == "off":
        return (
            "No mode is measurably faster than plain synchronous rounds: leave tail batching off "
            f"(left out: {left_out})."
        )
    return (
        f"Use {recommended}: {chosen.range} as fast as synchronous rounds, {_keeps(chosen)} "
        f"(left out: {left_out})."
    )


def _cause(depends: Dependence | None) -> str:
    if depends is None or depends == "a property of the prompt":
        return ""
    return f" since length is {'only ' if depends.startswith('partly') else ''}{depends}"


def _keeps(mode: ModeEstimate) -> str:
    if mode.kept_vs_true_len > 0.995:
        return "and no response is lost"
    return f"keeping {mode.kept_vs_true_len:.2f} of the true mean length"


# --- The estimate of every mode

MODES: tuple[TailMode, ...] = ("off", "exact", "auto", "prompts", "race")
ALL = (*MODES, "partial", AHEAD)
CYCLE = 5  # steps from one empty queue to the next, at over-provisioning 1.25
_JOBS = 4
_LEARNS, _CYCLES = 10, 3
"""Steps before mode ``auto`` leaves ``exact``, and the factor of its cycles' length."""
_MOST_STEPS = 20
_MOST_ATTEMPTS = 5_200
_REPEATS, _REPEATS_CPU = 0.05, 0.07
"""Relative deviation of one job's speed-up. An emulated 7B run's ``exact`` was 1.98 instead of
2.10, and the demo's on a CPU were 1.11, 1.20 and 1.27."""
_DEVIATIONS = 2.0
"""From the middle of a range to its ends: covers 0.83 of normal values, estimated from four
jobs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The result of an estimate.

    Args:
        read: finished responses in the trace.
        icc: intraclass correlation of length within a prompt. None with one response each.
        modes: by name. ``partial`` is missing for responses with tools and never recommended.
            ``AHEAD`` is missing if ``exact`` uses speculative decoding already.
        recommended: the mode with the smallest effect on training that is not clearly beaten.
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
    """Possible results of speculative decoding. ``source`` describes their origin."""

    cases: tuple[Ahead, ...]
    source: str

    @property
    def words(self) -> str:
        tokens = dict.fromkeys(f"{each.tokens:.1f}" for each in (self.cases[0], self.cases[-1]))
        return f"{' to '.join(tokens)}, {self.source}"


ASSUMED_DRAFTS = DraftCases(
    cases=tuple(Ahead(tokens=tokens) for tokens in (1.5, 2.0, 2.5)),
    source="assumed; --tokenizer measures them on a log's texts",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CostCase:
    """Possible costs of a job, with any positive ``weight``. ``gpus``: None takes the
    calibration's."""

    calibration: Calibration
    gpus: int | None = None
    weight: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatedJob:
    """A job to simulate.

    Args:
        rollout: the run's section. Its mode is replaced.
        cases: costs, the likeliest first.
        graded: the calibration's seconds of grading are charged.
        costs, left_out: descriptions of the costs, by subject, and of the simulation's omissions.
        ahead: its engines draft, in modes that let them.
        repeats: relative deviation between two runs of the same job.
        texts: its responses have texts, so drafts can be measured on them.
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
    """The user's machines. None is assumed. ``calibration``: a built-in one or a file. Default:
    all built-in ones, weighted by the similarity of their response lengths. ``gpus``: default:
    as many as keep the calibration's responses per GPU."""

    calibration: str | None = None
    model: str | None = None
    device: str | None = None
    gpus: int | None = None


ASSUMED = EstimatedMachine()


def on_paper_gpus(
    task: str, source: LengthSource, hardware: EstimatedMachine = ASSUMED
) -> EstimatedJob:
    """Place the job on GPUs of a calibration, by default of each of the paper's settings.

    A part of the prompts on that part of the GPUs stands for steps that take too long to simulate.
    Rewards cost nothing. Raises ``ValueError`` if no calibration has such machines.
    """
    assert source.prompts is not None
    assert source.responses is not None
    prompts = min(source.prompts, max(8, _MOST_ATTEMPTS // (CYCLE * source.responses)))
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
        costs["weights"] = f"by the mean of the longest hundredth, {_longest(source):.0f} tokens"
    if prompts < source.prompts:
        costs["simulated"] = f"{prompts / source.prompts:.0%} of a step and of its GPUs"
    return replace(job, cases=cases, costs=costs)


def _longest(source: LengthSource) -> float:
    """Mean of the longest hundredth, so that no single response decides."""
    lengths = np.sort(np.concatenate([each.lengths for each in source.recorded]))
    return float(lengths[-math.ceil(lengths.size / 100) :].mean())


def _weight(fitted: Calibration, source: LengthSource) -> float:
    ratio = _longest(source) / fitted.response_cap
    return min(ratio, 1.0 / ratio) ** 2


def _on_gpus(
    job: EstimatedJob, fitted: Calibration, hardware: EstimatedMachine
) -> tuple[CostCase, str]:
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
        # The calibration's replicas may have more GPUs than there are.
        sizes = {key: math.gcd(getattr(costs, key), gpus) for key in ("train_gpus", "rollout_tp")}
        costs = costs.model_copy(update=sizes)
    case = CostCase(calibration=costs, gpus=gpus, weight=_weight(fitted, source))
    world_costs(simulation_of(job, case, 1), costs)
    device = "CPU workers" if costs.measured else costs.device
    told = f"{costs.model} on {gpus or costs.gpus} {device}"
    return case, told if carried is None else f"{told}; {carried}"


def on_own_workers(run: RunRecord, source: LengthSource, task: str) -> EstimatedJob:
    """Place the job of a run on its own workers. Raises ``ValueError`` if it timed too little."""
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
    """Return whole cycles of short and long rounds that run within seconds."""
    rollout = job.rollout
    most = _MOST_ATTEMPTS // (rollout.prompts_per_step * rollout.num_generations)
    return CYCLE * max(1, min(most, _MOST_STEPS) // CYCLE)


def estimate(
    job: EstimatedJob, trace: Trace, *, steps: int | None = None, modes: Sequence[str] = ALL
) -> Estimate:
    """Simulate modes beside ``off``. Raises ``ValueError`` if the machines cannot run the job.
    ``steps``: of every job. Default: enough to converge, within seconds. ``modes``: ours, or the
    user's own rules (``path/to/file.py:name``)."""
    read = read_of(task_samples(trace, job.task))
    count = steps or steps_for(job)
    order = [number % len(job.cases) for number in range(_JOBS)]
    weights = np.array([job.cases[each].weight / order.count(each) for each in order])
    found = [_simulated(job, job.cases[each], n, count, modes) for n, each in enumerate(order)]
    rows = {
        name: _joined(
            [each[name] for each in found], weights / weights.sum(), job.repeats * (name != "off")
        )
        for name in found[0]
    }
    limit = job.rollout.tail_batching.bias_limit
    recommended = recommend(rows, limit)
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
        modes=rows,
        recommended=recommended,
        sentences=sentences(
            rows,
            recommended,
            left_out=job.left_out,
            depends=dependence(read.icc, read.icc_log),
            read=read.responses,
            limit=limit,
            aborted=read.aborted / (read.responses + read.aborted),
        ),
    )


def simulation_of(job: EstimatedJob, case: CostCase, steps: int, seed: int = 0) -> SimulationConfig:
    """Return the job's configuration, in its own mode."""
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
    job: EstimatedJob, case: CostCase, number: int, steps: int, modes: Sequence[str]
) -> dict[str, ModeEstimate]:
    size, rollout, costs = job.rollout.prompts_per_step, job.rollout, case.calibration
    most = _LEARNS + _CYCLES * steps
    source = job.source.drawn_again(np.random.default_rng([number, 6]), size, most)
    possible = costs.ahead.possible
    drafts = job.drafts.cases[number % len(job.drafts.cases)]
    drafting = replace(case, calibration=costs.model_copy(update={"ahead": drafts}))
    own = drafting if job.ahead and not possible else case

    rules = any(map(is_own, modes))

    def first(mode: str) -> int:
        """Steps before those that count. A rule may learn, and all modes beside it start alike."""
        return _LEARNS if rules or mode == "auto" else 0

    def run(mode: str, case: CostCase = own, **changes: object) -> JobResult:
        tail = rollout.tail_batching.model_copy(update={"mode": mode})
        changed = rollout.model_copy(update={"tail_batching": tail, **changes})
        count, recorded = steps, source.recorded[_LEARNS * size :]
        if first(mode):  # the steps that count are those of all modes, again and again
            count = most
            recorded = source.recorded[: _LEARNS * size] + recorded[: steps * size] * _CYCLES
        config = simulation_of(replace(job, rollout=changed), case, count, number)
        same = replace(source, recorded=recorded)
        grows = rollout.planner != "off"
        return Simulation(config, case.calibration, same, grows=grows).run()

    off = run("off")
    counted = off.steps[first("off") :]
    base = mean(step.step_s for step in counted)
    found = {"off": _mode(off, base, first("off"))}
    for mode in modes:
        if mode not in ("off", "partial", AHEAD):
            whole = size * rollout.num_generations if is_own(mode) else None
            found[mode] = _mode(run(mode), base, first(mode), whole)
    if job.source.turns is None and "partial" in modes:
        found["partial"] = _partial(run("partial").steps[first("partial") :], counted)
    if AHEAD in modes and not (job.ahead or possible):
        allowed = rollout.speculation.model_copy(update={"mode": "auto"})
        found[AHEAD] = _mode(run("exact", drafting, speculation=allowed), base, first("exact"))
    return found


def _joined(
    each: Sequence[ModeEstimate], weights: NDArray[np.float64], repeats: float
) -> ModeEstimate:
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
    costs, source = case.calibration, job.source
    if costs.measured is not None or source.cap is None:
        return None
    prompt = (source.prompt_tokens or PROMPT_TOKENS) + source.tool_tokens
    need = source.cap + prompt
    sizes = [tp for tp in costs.engine_sizes(case.gpus) if tp >= costs.rollout_tp]
    engines = {tp: costs.engine(tp) for tp in sizes}
    return next((tp for tp in sizes if engines[tp].capacity >= need + engines[tp].slack), None)


def _mode(result: JobResult, base: float, first: int = 0, whole: int | None = None) -> ModeEstimate:
    """Average over whole cycles, since prompts queued at the end would shorten kept lengths.
    ``whole``: samples of a whole step, if the mode may end steps with fewer."""
    last = max((n for n, s in enumerate(result.steps) if s.kind is RoundKind.LONG), default=-1)
    steps = result.steps[first : last + 1] or result.steps[first:]
    kept = _kept_length(steps) / _kept_length(result.steps) * result.kept_vs_true_len
    seconds = mean(step.step_s for step in steps)
    if whole is not None:
        seconds *= whole / mean(step.samples for step in steps)
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
    """Average by kept tokens over the last two thirds of the steps, since the queue of long
    responses fills first."""
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
