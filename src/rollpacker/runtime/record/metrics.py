"""Metrics, counts and warnings. Names are those of TRL's ``GRPOTrainer`` for the same meaning."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from rollpacker.config import FakeEngineConfig, RunConfig, SamplerCorrectionConfig
from rollpacker.core.codec import dumps_finite
from rollpacker.core.types import Group, RoundKind, Sample
from rollpacker.policy.lengths import Bias
from rollpacker.reward.base import NO_CODE, CodeRun
from rollpacker.runtime.attempts.attempts import Trajectory
from rollpacker.train.base import RATIO, Update

if TYPE_CHECKING:
    from rollpacker.runtime.step.step import StepRecord


Metrics = dict[str, Any]
"""Metrics of one step: numbers by name, ``tail/round_kind``, and the lists of
``engine/step_times``. ``step`` is always there."""

OFTEN = 0.2
"""Share of steps without a lesson at which a warning begins. The demo's race has up to 0.14."""
_KINDS = tuple(kind.value for kind in RoundKind)


def completion_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Lengths in tokens: ``completions/*``. "Terminated" ones were not cut off."""
    lengths = np.array([sample.sampled for sample in samples], np.float64)
    ended = np.array([sample.finish_reason == "stop" for sample in samples], bool)
    result: dict[str, float] = {}
    if not samples:
        return result
    for name, some in (("", lengths), ("terminated_", lengths[ended])):
        some = some if some.size else np.zeros(1)
        result[f"completions/mean_{name}length"] = float(some.mean())
        result[f"completions/min_{name}length"] = float(some.min())
        result[f"completions/max_{name}length"] = float(some.max())
    result["completions/clipped_ratio"] = float(1 - ended.mean()) if ended.size else 0.0
    return result


def reward_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """``reward*``, ``rewards/<name>/*``, and the shares of groups without variance and of responses
    without reward. Standard deviations are unbiased, as in TRL. A function's mean is over responses
    that it applies to. Metrics without values are left out."""
    if not groups:
        return {}
    totals = [_rewards([group]) for group in groups]
    stds = _stds(totals)
    flat = _rewards(groups)
    count = sum(len(group.samples) for group in groups)
    result: dict[str, float] = {}
    if flat:
        result = {"reward": _mean(flat), "reward_std": _std(flat), "reward_group_std": _mean(stds)}
    scores: dict[str, list[float]] = {}
    for group in groups:
        for sample in group.samples:
            for name, score in sample.rewards.items():
                scores.setdefault(name, []).append(score)
    for name in sorted(scores):
        result[f"rewards/{name}/mean"] = _mean(scores[name])
        result[f"rewards/{name}/std"] = _std(scores[name])
    result["frac_reward_zero_std"] = _mean(np.isclose(stds, 0.0))
    result["grading/unscored"] = 1.0 - len(flat) / count if count else 0.0
    return result


def staleness_metrics(kept: Sequence[Trajectory], step: int) -> dict[str, float]:
    """How far trained responses are from on-policy (mode ``partial``). Empty without responses.

    With verl's names, mean and maximum over responses: ``trajectory_spans`` is the number of
    versions of the weights from the first token to the last. ``trajectory_staleness`` is the age of
    the last token in steps, ``trajectory_staleness_worst`` that of the first.
    ``partial/stale_tokens`` is the share of tokens that earlier weights sampled, ``_of_longest``
    the same for the longest tenth of the responses.
    """
    if not kept:
        return {}
    tokens, stale = np.array([(a.tokens, a.stale) for a in kept]).T
    first = np.array([attempt.oldest(step) for attempt in kept])
    last = np.array([spans[-1][0] if (spans := a.spans(step)) else step for a in kept])
    longest = np.argsort(-tokens, kind="stable")[: max(1, len(kept) // 10)]
    found = {
        "partial/stale_tokens": float(stale.sum() / max(1, tokens.sum())),
        "partial/stale_tokens_of_longest": float(
            stale[longest].sum() / max(1, tokens[longest].sum())
        ),
    }
    measured = {
        "spans": last - first + 1,
        "staleness": step - last,
        "staleness_worst": step - first,
    }
    for name, values in measured.items():
        found[f"training/off_policy/trajectory_{name}/mean"] = float(values.mean())
        found[f"training/off_policy/trajectory_{name}/max"] = float(values.max())
    return found


def environment_metrics(attempts: Iterable[Trajectory]) -> dict[str, float]:
    """Means over responses with an environment. Empty if there are none.

    ``environment/turns``, ``/wait_s`` (seconds of waiting for it), ``/added_tokens``, ``/failed``
    (share of failed episodes), and its own finite metrics by name. A name that is taken becomes
    ``environment/own/NAME``. Tools have TRL's names: ``tools/call_frequency`` (calls of a response)
    and ``tools/failure_frequency`` (share of failed calls).
    """
    held = [a.conversation for a in attempts if a.conversation is not None]
    if not held:
        return {}
    own: dict[str, list[float]] = {}
    for conversation in held:
        for name, value in conversation.metrics.items():
            if math.isfinite(value):
                own.setdefault(name, []).append(value)
    calls = sum(conversation.calls for conversation in held)
    failed = sum(conversation.failed_calls for conversation in held)
    ours = {
        "environment/turns": sum(len(c.turns) for c in held) / len(held),
        "environment/wait_s": sum(c.wait_s for c in held) / len(held),
        "environment/added_tokens": sum(c.put_in for c in held) / len(held),
        "environment/failed": sum(bool(c.failed) for c in held) / len(held),
        "tools/call_frequency": calls / len(held),
        "tools/failure_frequency": failed / calls if calls else 0.0,
    }
    for name, values in sorted(own.items()):
        key = f"environment/{name}"
        ours[f"environment/own/{name}" if key in ours else key] = sum(values) / len(values)
    return ours


def program_metrics(attempts: Iterable[Trajectory]) -> dict[str, float]:
    """Metrics of all responses that a code reward graded, kept or not, as ``rewards/<name>/*``.

    Shares of responses: ``passed`` all tests, ``timeouts``, ``crashes``, ``no_code``. Share of the
    tests that ran: ``tests_passed``. CPU seconds: ``cpu_s`` of all programs together, ``timeout_s``
    as the mean limit of a test.
    """
    runs: dict[str, list[CodeRun]] = {}
    for attempt in attempts:
        for name, run in attempt.runs.items():
            runs.setdefault(name, []).append(run)
    return {
        f"rewards/{name}/{what}": value
        for name in sorted(runs)
        for what, value in _of_programs(runs[name]).items()
    }


def without_program(attempts: Iterable[Trajectory]) -> float:
    """The share of responses graded by a code reward that have no program."""
    runs = [run for attempt in attempts for run in attempt.runs.values()]
    return sum(run.verdict == NO_CODE for run in runs) / len(runs) if runs else 0.0


def _of_programs(runs: Sequence[CodeRun]) -> dict[str, float]:
    tests = [test for run in runs for test in run.tests]
    given = [run.timeout_s for run in runs if run.tests]

    def share(*verdicts: str) -> float:
        return sum(run.verdict in verdicts for run in runs) / len(runs)

    return {
        "passed": share("pass"),
        "timeouts": share("tle_cpu", "tle_idle"),
        "crashes": share("crash"),
        "no_code": share(NO_CODE),
        "tests_passed": sum(test == "pass" for test in tests) / len(tests) if tests else 0.0,
        "cpu_s": sum(seconds for run in runs for seconds in run.cpu_s),
        "timeout_s": sum(given) / len(given) if given else 0.0,
    }


def logged_metrics(attempts: Iterable[Trajectory]) -> dict[str, float]:
    """Means of the metrics that reward functions logged with these responses."""
    values: dict[str, list[float]] = {}
    for attempt in attempts:
        for name, value in attempt.metrics.items():
            values.setdefault(name, []).append(value)
    return {name: sum(each) / len(each) for name, each in sorted(values.items())}


def taught(groups: Sequence[Group]) -> bool:
    """Whether any response has an advantage."""
    return any(np.any(group.advantages) for group in groups)


def update_metrics(updates: Sequence[Update]) -> dict[str, float]:
    """Means over a step's updates, extremes of extremes, and the last ``learning_rate``."""
    names = sorted({name for update in updates for name in update.metrics})
    reduced = {f"{RATIO}_min": min, f"{RATIO}_max": max}
    result = {
        n: float(reduced.get(n, _mean)([u.metrics[n] for u in updates if n in u.metrics]))
        for n in names
    }
    result["grad_norm"] = _mean([update.grad_norm for update in updates])
    result["learning_rate"] = updates[-1].learning_rate if updates else 0.0
    result["skipped_updates"] = float(sum(not update.applied for update in updates))
    return result


def step_metrics(
    record: StepRecord,
    groups: Sequence[Group],
    *,
    epoch: float,
    num_tokens: int,
    queue: int,
    bias: Bias,
) -> Metrics:
    """All metrics of a step.

    Args:
        epoch: passes over the data so far, with the fraction.
        num_tokens: prompt and response tokens trained on since the run began.
        queue: prompts that wait for a long round after this step.
    """
    samples = [sample for group in groups for sample in group.samples]
    lag = max((record.step - sample.weights_version for sample in samples), default=0)
    parts = {
        "timing_s": record.timing_s(),
        "bubble": record.bubble(),
        "engine": record.engine(),
        "speculation": record.drafts(),
    }
    return {
        "step": record.step,
        "epoch": epoch,
        **reward_metrics(groups),
        **completion_metrics(samples),
        **update_metrics(record.updates),
        "num_tokens": num_tokens,
        "start_s": record.start_s,
        "step_time": record.end_s - record.start_s,
        "tail/round_kind": record.kind.value,
        "tail/long_queue": queue,
        "tail/deferred": len(record.deferred),
        "tail/aborted_tokens": record.aborted_tokens(),
        "tail/kept_vs_true_len": bias.kept_vs_true_len,
        "policy_version_max_lag": lag,
        "grading/resampled": record.resampled(),
        "engine/step_times": record.step_times(),
        "engine/start_s": _mean([w.start_s for w in record.work.values() if w.decode_steps]),
        **{f"tail/audited_kept_vs_true_{name}": value for name, value in bias.audited.items()},
        **{f"{part}/{name}": v for part, values in parts.items() for name, v in values.items()},
    }


_LEARNED = ("reward", "frac_reward", "grad_norm", "learning_rate", "skipped_updates")
"""Prefixes of metrics on learning, besides those of a real update."""


def without_learning(metrics: Metrics) -> Metrics:
    """The metrics of a step on emulated devices, which learn nothing."""
    kept = {name: v for name, v in metrics.items() if not name.startswith(_LEARNED)}
    return {**kept, "emulated": 1.0}


def numbers(metrics: Metrics) -> dict[str, float]:
    """Finite numbers for plots. The round kind is 0 full, 1 short, 2 long."""
    result: dict[str, float] = {}
    for name, value in metrics.items():
        if isinstance(value, str):
            if value in _KINDS:
                result[name] = float(_KINDS.index(value))
        elif isinstance(value, int | float) and math.isfinite(value):
            result[name] = float(value)
    return result


def encoded(metrics: Metrics) -> bytes:
    """A line of JSON. Numbers that are not finite are null."""
    plain = {n: v if isinstance(v, str | int | list) else float(v) for n, v in metrics.items()}
    return dumps_finite(plain) + b"\n"


def _rewards(groups: Sequence[Group]) -> list[float]:
    return [s.reward for group in groups for s in group.samples if s.reward is not None]


def _mean(values: Sequence[float] | np.ndarray) -> float:
    return float(np.mean(values)) if len(values) else 0.0


def _stds(rows: Sequence[Sequence[float]]) -> np.ndarray:
    if len({len(row) for row in rows}) == 1 and len(rows[0]) > 1:
        return np.std(rows, axis=1, ddof=1)
    return np.array([_std(row) for row in rows])


def _std(values: Sequence[float]) -> float:
    return float(np.std(values, ddof=1)) if len(values) > 1 else 0.0


_ENDS = 10
"""The numbers of first and last steps that are compared."""


@dataclass(slots=True)
class Counters:
    """A run's counts, saved with every checkpoint."""

    step: int = 0
    epochs: int = 0
    prompts_trained: int = 0
    num_tokens: int = 0
    kept_tokens: int = 0
    aborted_tokens: int = 0
    decode_steps: int = 0
    generated_tokens: int = 0
    short_rounds: int = 0
    long_rounds: int = 0
    deferred: int = 0
    rollout_s: float = 0.0
    train_s: float = 0.0
    step_s: float = 0.0
    worker_cpu_s: float = 0.0
    decode_cpu_s: float = 0.0
    driver_cpu_s: float = 0.0
    true_tokens: float = 0.0
    untaught: int = 0
    """Steps without groups, or whose groups had no advantages."""
    first_rewards: list[float] = field(default_factory=list[float])
    last_rewards: list[float] = field(default_factory=list[float])
    """Mean rewards of the first and the last ``_ENDS`` steps that had some."""

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}

    def add(
        self, record: StepRecord, groups: Sequence[Group], kept_vs_true: float, *, learns: bool
    ) -> None:
        """Count a step that trained on ``groups``.

        Args:
            groups: their rewards count if the run ``learns``, which emulated devices do not.
            kept_vs_true: bias of lengths by racing, 0 if all recently kept responses are empty.
        """
        kept = sum(attempt.tokens for attempt in record.kept)
        seconds, engine = record.timing_s(), record.engine()
        self.step += 1
        self.prompts_trained += len(record.trained)
        self.kept_tokens += kept
        self.num_tokens += kept + sum(len(a.prompt_tokens) for a in record.kept)
        self.aborted_tokens += record.aborted_tokens()
        self.short_rounds += record.kind == "short"
        self.long_rounds += record.kind == "long"
        self.deferred += len(record.deferred)
        self.rollout_s += seconds["rollout"]
        self.step_s += record.end_s - record.start_s
        self.train_s += seconds["train"]
        self.worker_cpu_s += seconds["worker_cpu"]
        self.decode_cpu_s += seconds["decode_cpu"]
        self.decode_steps += int(engine["steps"])
        self.generated_tokens += int(engine["generated_tokens"])
        if kept_vs_true:
            self.true_tokens += kept / kept_vs_true
        if learns:
            self.untaught += not taught(groups)
            self._note(_rewards(groups))

    def _note(self, rewards: Sequence[float]) -> None:
        if rewards and math.isfinite(reward := _mean(rewards)):
            self.first_rewards = [*self.first_rewards, reward][:_ENDS]
            self.last_rewards = [*self.last_rewards, reward][-_ENDS:]

    def lesson(self) -> str | None:
        """A warning at the end if many steps taught nothing or the run got worse."""
        if self.untaught < OFTEN * max(self.step, 1):
            return self._worse()
        return (
            f"WARNING {self.untaught} of {self.step} steps taught nothing: no group had rewards "
            "that differ. Check 'rewards', or use problems of another difficulty."
        )

    def _worse(self) -> str | None:
        first, last = self.first_rewards, self.last_rewards
        few = self.step < 2 * _ENDS or len(last) < _ENDS
        if few or statistics.median(last) >= min(first):
            return None
        return (
            "WARNING the run ends worse than it began: its mean reward is "
            f"{statistics.fmean(last):.3g} in the last {_ENDS} steps and "
            f"{statistics.fmean(first):.3g} in the first. Lower train.learning_rate."
        )

    def summary(self) -> dict[str, Any]:
        return {
            "steps": self.step,
            "steps_without_learning": self.untaught,
            "prompts_trained": self.prompts_trained,
            "epochs": self.epochs,
            "num_tokens": self.num_tokens,
            "kept_tokens": self.kept_tokens,
            "decoded_tokens": self.generated_tokens,
            "decode_steps": self.decode_steps,
            "timing_s": {
                "rollout": self.rollout_s,
                "train": self.train_s,
                "steps": self.step_s,
                "worker_cpu": self.worker_cpu_s,
                "decode_cpu": self.decode_cpu_s,
                "driver_cpu": self.driver_cpu_s,
            },
            "tail": {
                "short_rounds": self.short_rounds,
                "long_rounds": self.long_rounds,
                "deferred": self.deferred,
                "aborted_tokens": self.aborted_tokens,
                "kept_vs_true_len": self.kept_tokens / self.true_tokens
                if self.true_tokens
                else 1.0,
            },
        }


_AGAIN = {
    "clipped": "more than half of the completions were cut off",
    "unscored": "no reward function applied to some of the completions",
    "unfilled": "dynamic sampling found fewer groups than a step has",
}
"""Lines at the end for warnings that are printed once."""


class StepWarnings:
    """Warnings on steps that teach little. Each kind is printed once, with a count at the end. A
    single step of equal rewards is harmless. ``context``: the model's, tokens, if it limits
    responses."""

    def __init__(self, max_completion_length: int, context: int | None = None) -> None:
        self._cap, self._context = max_completion_length, context
        self._counts: Counter[str] = Counter()
        self._steps = self._flat = 0

    def check(self, step: int, groups: Sequence[Group], no_code: float = 0.0) -> list[str]:
        """Warnings on a step. ``no_code``: share of responses without a program."""
        samples = [sample for group in groups for sample in group.samples]
        clipped = sum(s.finish_reason != "stop" for s in samples) / max(len(samples), 1)
        unscored = sum(sample.reward is None for sample in samples)
        flat = bool(groups) and not taught(groups)
        self._steps, self._flat = self._steps + 1, self._flat + flat
        lines: list[str] = []
        if clipped > 0.5 and self._due("clipped"):
            lines.append(f"{clipped:.0%} of the completions were cut off at {self._longest()}")
        equal = flat and unscored < len(samples) and self._flat >= OFTEN * self._steps
        if equal and self._due("flat"):
            cause = f" ({no_code:.0%} of the responses hold no program)" if no_code else ""
            lines.append(
                "all advantages are zero, nothing is learned: every group has "
                f"equal rewards{cause}."
                " Check 'rewards', use problems of another difficulty, or draw others in place of"
                " such groups: 'rollout.dynamic_sampling.enabled=true'"
            )
        if unscored and self._due("unscored"):
            lines.append(
                f"no reward function applies to {unscored} of {len(samples)} "
                "completions: they are kept with advantage 0. Check 'rewards[].domains' and where "
                "your functions return None."
            )
        return [f"WARNING step {step}: {line}" for line in lines]

    def _longest(self) -> str:
        if self._context is None:
            return f"{self._cap} tokens: raise 'rollout.max_completion_length'"
        return (
            f"{self._cap} tokens, all that the longest prompt leaves of the model's context of "
            f"{self._context}. Use a model with a longer one, or leave long prompts out with a "
            "higher 'rollout.max_completion_length' and 'data.overlong: skip'."
        )

    def unfilled(
        self, step: int, groups: int, wanted: int, dropped: int, reward: float, used_up: bool
    ) -> list[str]:
        """A warning if dynamic sampling ended a step with fewer groups than ``wanted``. ``dropped``
        groups had equal rewards of mean ``reward`` (not finite: no reward applies). ``used_up``:
        the epoch has no other prompts."""
        if groups >= wanted or not dropped or not self._due("unfilled"):
            return []
        what = (
            f"only {groups} of {wanted} groups are trained on" if groups else "nothing is trained"
        )
        mean = f" (mean {reward:.3g})" if math.isfinite(reward) else ""
        more = "give it more data" if used_up else "raise 'rollout.dynamic_sampling.max_draws'"
        return [
            f"WARNING step {step}: {what}: dynamic sampling has dropped {dropped} groups, whose "
            f"rewards are equal{mean}. Check 'rewards', use problems of another difficulty, or "
            f"{more}."
        ]

    def _due(self, kind: str) -> bool:
        self._counts[kind] += 1
        return self._counts[kind] == 1

    def counted(self) -> list[str]:
        return [
            f"WARNING in {self._counts[kind]} of {self._steps} steps {what}"
            for kind, what in _AGAIN.items()
            if self._counts[kind] > 1
        ]


EXPLAINED: Mapping[str, float] = {"float32": 1e-3, "bfloat16": 0.1}
"""The mean difference in nats of a token's two log-probabilities that the weights' type explains.
Measured with vLLM on a CPU: 1e-6 in float32 over a dozen families, 0.04 in bfloat16 with
SmolLM2-135M, 0.014 with a tiny Qwen3-Next."""
MEASURED = ("sampler/abs_logprob_difference", "sampler/effective_sample_size")
"""Metrics of a step. Numbers that are not finite are null in a log."""
LEAST_EFFECTIVE = 0.5
"""The least share of effective samples. Below it, tokens count like half as many."""


class AgreementAlarm:
    """Warns of a disagreement of sampler and trainer once, and again when it is twice as bad."""

    def __init__(self, dtype: str, correction: SamplerCorrectionConfig) -> None:
        self._dtype = dtype
        self._correction = correction
        self._said = 0.5

    @classmethod
    def of(cls, config: RunConfig) -> AgreementAlarm | None:
        """A run's alarm. None if the two log-probabilities are not comparable."""
        stale = config.rollout.tail_batching.carries
        if stale or not config.rollout.full_softmax or isinstance(config.engine, FakeEngineConfig):
            return None
        return cls(config.model.dtype, config.train.sampler_correction)

    def check(self, metrics: Mapping[str, Any]) -> str | None:
        measured = [metrics[name] for name in MEASURED if name in metrics]
        if len(measured) < len(MEASURED):  # nothing was trained
            return None
        apart, effective = (math.nan if value is None else value for value in measured)
        explained = EXPLAINED[self._dtype]
        badness = max(apart / explained, LEAST_EFFECTIVE / max(effective, 1e-9))
        if not (math.isfinite(apart) and math.isfinite(effective)):
            badness = math.inf
        if badness <= 1.0 or badness < 2.0 * self._said or math.isinf(self._said):
            return None
        self._said = badness
        return (
            f"WARNING step {metrics['step']}: sampler and trainer disagree: the log-probabilities "
            f"of a token are {apart:.2g} nats apart in the mean ({self._dtype} explains "
            f"{explained:g}), the effective sample size is {effective:.0%}: {self._advice(apart)}"
        )

    def _advice(self, apart: float) -> str:
        key, correction = "'train.sampler_correction", self._correction
        if math.isnan(apart):
            return "check whether the engine's or the trainer's weights or activations overflow"
        if apart <= EXPLAINED[self._dtype]:  # the weights alone spread
            if correction.level != "token":
                return f"a response's ratio spreads more than a token's: {key}.level: token'"
            if correction.kind == "none":
                return f"a few tokens weigh most: {key}.kind: mask' leaves them out"
        parts = ["see whether the engine has this step's weights and computes as the trainer does"]
        if self._dtype == "bfloat16":
            parts.append("'model.dtype: float32' shows whether it is rounding")
        if correction.kind == "none":
            parts.append(f"{key}.kind: truncate' corrects the gradient")
        return ", ".join(parts)
