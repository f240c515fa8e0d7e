"""What each mode of tail batching would gain on somebody's own response lengths.

The job is simulated once a mode with the same prompts. The trace's prompts come first, with their
recorded lengths; what it does not hold (more responses of a prompt, another visit, further prompts)
is drawn from a model with the trace's marginal and correlations, given the prompt's own responses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
import polars as pl
from numpy.typing import NDArray

from rollpacker.config import RolloutConfig, StreamingConfig
from rollpacker.core.types import RoundKind
from rollpacker.polytrace.copula import CopulaLengths
from rollpacker.polytrace.numerics import midranks
from rollpacker.polytrace.schema import Trace
from rollpacker.polytrace.statistics import finished, intraclass_correlation, known_cap, visits
from rollpacker.sim import calibration as calibrations
from rollpacker.sim.calibration import Calibration
from rollpacker.sim.config import SimulationConfig
from rollpacker.sim.costs import BLOCK_SLACK, PROMPT_TOKENS
from rollpacker.sim.result import JobResult, mean
from rollpacker.sim.simulator import Simulation
from rollpacker.sim.source import Source
from rollpacker.sim.workload import Recorded

Mode = Literal["off", "exact", "race", "prompts", "auto"]
MODES: tuple[Mode, ...] = ("off", "exact", "prompts", "race", "auto")
_CYCLE = 5
"""Steps from one empty queue to the next, at over-provisioning 1.25."""
_MOST_STEPS = 60
_MOST_ATTEMPTS = 25_000
"""Responses simulated for one mode, about two seconds."""
_SAME = 1.02
_WORTH_IT = 1.05

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeEstimate:
    """One mode against ``off``, on the same prompts.

    Args:
        speedup: mean seconds of a step of ``off`` over the mode's.
        kept_vs_true_len: mean length of the responses trained on over that of all.
        step_s: mean seconds of a step.
        decoded_vs_kept: tokens decoded, aborted ones too, over tokens kept.
    """

    speedup: float
    kept_vs_true_len: float
    step_s: float
    decoded_vs_kept: float


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
        recommended: the fastest mode within the bias limit; ``exact`` where it is as fast.
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
    recommended: str
    sentences: list[str]

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is simulated.

    Args:
        task: name.
        source: lengths.
        rollout: the run's section; its mode is replaced.
        calibration: costs.
        gpus: devices; None takes the calibration's.
        reward: seconds of grading are charged.
        costs: the costs in words.
    """

    task: str
    source: Source
    rollout: RolloutConfig
    calibration: Calibration
    gpus: int | None
    reward: bool
    costs: str


def source_of(trace: Trace, task: str | None = None, *, seed: int = 0) -> Source:
    """A trace's prompts, and a model of what it does not hold.

    Raises ``ValueError`` when the task is not there, not unique, or has no finished response.
    """
    samples = finished(_of_task(trace, task)).sort("step", "prompt", "index", maintain_order=True)
    if samples.is_empty():
        raise ValueError("the trace has no finished response: nothing is known of its lengths")
    tokens = np.maximum(samples["response_tokens"].to_numpy().astype(np.float64), 1.0)
    groups = visits(samples)
    sizes = np.bincount(groups)
    icc, icc_log = (intraclass_correlation(v, groups) for v in (tokens, np.log(tokens)))
    cap = known_cap(samples)
    model = CopulaLengths.matching(tokens, *np.nan_to_num([icc, icc_log]), cap)
    traits = _posterior(tokens, groups, model.rho, np.random.default_rng([seed, 4]))
    mean_prompt = samples["prompt_tokens"].cast(pl.Float64).mean()
    return Source(
        lengths=model,
        recorded=tuple(
            Recorded(traits[place : place + 1], part.astype(np.int32))
            for place, part in enumerate(np.split(tokens, np.cumsum(sizes)[:-1]))
        ),
        cap=cap or int(tokens.max()),
        prompt_tokens=round(mean_prompt) if isinstance(mean_prompt, float) else None,
        prompts=max(1, round(sizes.size / samples["step"].n_unique())),
        responses=max(1, int(np.median(sizes))),
    )


def _of_task(trace: Trace, task: str | None) -> pl.DataFrame:
    names = trace.tasks
    if task is None and len(names) != 1:
        raise ValueError(f"the trace has the tasks {', '.join(names)}: choose one with --task")
    if task is not None and task not in names:
        raise ValueError(f"task {task!r} is not in the trace; it has {', '.join(names)}")
    return trace.samples.filter(pl.col("task") == (task or names[0]))


def _posterior(
    tokens: Floats, groups: NDArray[np.int64], rho: float, rng: np.random.Generator
) -> Floats:
    """A draw of each prompt's shared normal given its responses, shape (prompts, 1).

    Exact for a copula without skew: normal scores with correlation ``rho``.
    """
    levels = (midranks(tokens) - 0.5) / tokens.size
    scores = np.array([NormalDist().inv_cdf(level) for level in levels.tolist()])
    sizes = np.bincount(groups)
    total = 1.0 - rho + sizes * rho
    centre = np.sqrt(rho) * np.bincount(groups, scores) / total
    spread = np.sqrt((1.0 - rho) / total)
    return (centre + spread * rng.standard_normal(sizes.size))[:, None]


def correlation(trace: Trace, task: str | None = None) -> tuple[float | None, int]:
    """Intraclass correlation of length within a prompt, and the number of finished responses."""
    samples = finished(_of_task(trace, task))
    found = intraclass_correlation(samples["response_tokens"].to_numpy(), visits(samples))
    return (found if np.isfinite(found) else None), samples.height


def on_paper_gpus(
    task: str, source: Source, name: str | None = None, gpus: int | None = None
) -> Job:
    """The job on GPUs of a calibration; by default the paper's setting of the nearest cap.

    There are as many GPUs as keep the calibration's responses a GPU, unless ``gpus`` says so.
    Rewards cost nothing, whatever the calibration says of the paper's.
    """
    assert source.cap is not None
    assert source.prompts is not None
    assert source.responses is not None
    costs = calibrations.load(name or _nearest(source.cap))
    costs = costs.model_copy(update={"synchronous_reward_s": 0.0})
    if costs.measured is None and gpus is None:
        replicas = (
            source.prompts
            * source.responses
            * costs.gpus
            / (costs.prompts * costs.responses * costs.train_gpus)
        )
        node = costs.cluster().per_node
        gpus = node * max(1, round(replicas * costs.train_gpus / node))
    count = gpus or costs.gpus
    why = "given" if name else f"assumed for responses of up to {source.cap} tokens"
    device = "CPU workers" if costs.measured else costs.device
    return Job(
        task=task,
        source=source,
        rollout=RolloutConfig(
            prompts_per_step=source.prompts,
            num_generations=source.responses,
            max_completion_length=source.cap,
            streaming=StreamingConfig(group_tokens=16384),
        ),
        calibration=costs,
        gpus=gpus,
        reward=False,
        costs=f"{costs.name}: {costs.model} on {count} {device} ({why}); rewards take no time",
    )


def _nearest(cap: int) -> str:
    for name in ("paper-7b-8k", "paper-14b-16k"):
        if cap <= calibrations.load(name).response_cap:
            return name
    return "paper-32b-32k"


def steps_for(job: Job) -> int:
    """Whole cycles of short and long rounds, within seconds to run."""
    rollout = job.rollout
    most = _MOST_ATTEMPTS // (rollout.prompts_per_step * rollout.num_generations)
    return _CYCLE * max(1, min(most, _MOST_STEPS) // _CYCLE)


def estimate(
    job: Job,
    trace: Trace,
    *,
    steps: int | None = None,
    seed: int = 0,
    on_mode: Callable[[str], None] | None = None,
) -> Estimate:
    """Simulate every mode. Raises ``ValueError`` when the machines cannot run the job.

    Args:
        job: what is simulated.
        trace: where its lengths come from.
        steps: of every mode; default: enough to settle, within seconds.
        seed: of what the trace does not hold.
        on_mode: told which mode comes next.
    """
    icc, read = correlation(trace, job.task)
    count = steps or steps_for(job)
    found: dict[str, JobResult] = {}
    for mode in MODES:
        if on_mode is not None:
            on_mode(mode)
        found[mode] = _simulate(job, mode, count, seed)
    modes = _against_off(found)
    limit = job.rollout.tail_batching.bias_limit
    recommended = recommend(modes, limit)
    return Estimate(
        task=job.task,
        prompts=job.rollout.prompts_per_step,
        responses=job.rollout.num_generations,
        steps=count,
        read=read,
        icc=icc,
        costs=job.costs,
        modes=modes,
        recommended=recommended,
        sentences=sentences(modes, recommended, icc, limit),
    )


def _simulate(job: Job, mode: Mode, steps: int, seed: int) -> JobResult:
    tail = job.rollout.tail_batching.model_copy(update={"mode": mode})
    config = SimulationConfig(
        calibration=job.calibration.name,
        workload=job.task,
        steps=steps,
        seed=seed,
        rollout=job.rollout.model_copy(update={"tail_batching": tail}),
        gpus=job.gpus,
        rollout_tp=_tensor_parallel(job),
    )
    return Simulation(config, job.calibration, job.source).run()


def _tensor_parallel(job: Job) -> int | None:
    """The least size, from the calibration's, whose KV cache holds one response of any length."""
    costs, source = job.calibration, job.source
    if costs.measured is not None or source.cap is None:
        return None
    need = source.cap + (source.prompt_tokens or PROMPT_TOKENS) + BLOCK_SLACK
    tp = costs.rollout_tp
    while costs.engine(tp).capacity < need:
        tp *= 2
    return tp


def _against_off(found: Mapping[str, JobResult]) -> dict[str, ModeEstimate]:
    base = mean(step.step_s for step in found["off"].steps)
    return {mode: _mode(result, base) for mode, result in found.items()}


def _mode(result: JobResult, base: float) -> ModeEstimate:
    """Over whole cycles: what waits in the queue at the end would make kept lengths too short."""
    last = max((n for n, s in enumerate(result.steps) if s.kind is RoundKind.LONG), default=-1)
    steps = result.steps[: last + 1] or result.steps
    kept = _kept_length(steps) / _kept_length(result.steps) * result.kept_vs_true_len
    seconds = mean(step.step_s for step in steps)
    return ModeEstimate(
        speedup=base / seconds,
        kept_vs_true_len=kept,
        step_s=seconds,
        decoded_vs_kept=sum(s.decoded_tokens for s in steps) / sum(s.kept_tokens for s in steps),
    )


def _kept_length(steps: Any) -> float:
    return sum(s.kept_tokens for s in steps) / sum(s.samples for s in steps)


def recommend(modes: Mapping[str, ModeEstimate], limit: float) -> str:
    """The fastest mode that keeps ``limit`` of the true mean length.

    ``exact`` where the fastest gains less than 2% on it; ``off`` where that loses more than 2%.
    """
    fair = {name: each.speedup for name, each in modes.items() if each.kept_vs_true_len >= limit}
    best = max(fair, key=fair.__getitem__, default="exact")
    if "exact" in fair and fair[best] < _SAME * fair["exact"]:
        best = "exact"
    return best if modes[best].speedup > 2.0 - _SAME else "off"


def sentences(
    modes: Mapping[str, ModeEstimate], recommended: str, icc: float | None, limit: float
) -> list[str]:
    """The estimate in one to three plain sentences."""
    exact, chosen = modes["exact"], modes[recommended]
    races = {name: modes[name] for name in ("race", "prompts")}
    best = max(races, key=lambda name: races[name].speedup)
    told: list[str] = []
    if races[best].speedup < _WORTH_IT * exact.speedup:
        told.append(
            f"Racing does not pay here: the best race ({best}) is "
            f"{races[best].speedup / exact.speedup:.2f}x as fast as exact rounds."
        )
    if recommended == "off":
        told.append("No mode is faster than plain synchronous rounds; leave tail batching off.")
    else:
        told.append(
            f"Use {recommended}: about {chosen.speedup:.2f}x faster than synchronous rounds, "
            f"{_keeps(chosen)}."
        )
    biased = [name for name, each in races.items() if _tempting(each, chosen, limit)]
    for name in biased[:1]:
        cause = "" if icc is None or icc > 0.5 else " since length is mostly chance within a prompt"
        told.append(
            f"Mode {name} would be faster ({races[name].speedup:.2f}x) but trains on responses of "
            f"{races[name].kept_vs_true_len:.2f} of the true mean length{cause}."
        )
    return told


def _keeps(mode: ModeEstimate) -> str:
    if mode.kept_vs_true_len > 0.995:
        return "and no response is lost"
    return f"keeping {mode.kept_vs_true_len:.2f} of the true mean length"


def _tempting(mode: ModeEstimate, chosen: ModeEstimate, limit: float) -> bool:
    return mode.kept_vs_true_len < limit and mode.speedup > _SAME * chosen.speedup
