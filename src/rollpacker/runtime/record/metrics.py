"""What each step is measured by, and the files that it goes to.

Names follow TRL's ``GRPOTrainer`` where they mean the same.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from rollpacker.core.types import Group, RoundKind, Sample
from rollpacker.durable import AppendFile, cut_jsonl
from rollpacker.runtime.attempts.attempts import Trajectory
from rollpacker.runtime.record.trackers import TensorBoard, Tracker
from rollpacker.train.base import RATIO, Update

Metrics = dict[str, float | str]
"""One step: numbers by name, and ``tail/round_kind``. ``step`` is always there."""

OFTEN = 0.1
"""Share of steps that teach nothing from which on that is said."""
_KINDS = tuple(kind.value for kind in RoundKind)


@dataclass(frozen=True, slots=True, kw_only=True)
class TailMetrics:
    """What tail batching did in a step.

    Args:
        round_kind: of this step's round.
        long_queue: prompts that wait for a long round, after this step.
        deferred: prompts that lost their race in this step.
        aborted_tokens: tokens generated and thrown away in this step.
        kept_vs_true_len: mean length of kept responses over that without aborts; 1 is unbiased.
        audited: the same on audited prompts, for ``len``, ``turns`` and ``wait``, where known.
    """

    round_kind: RoundKind
    long_queue: int = 0
    deferred: int = 0
    aborted_tokens: int = 0
    kept_vs_true_len: float = 1.0
    audited: Mapping[str, float] = field(default_factory=dict[str, float])


def completion_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Lengths in tokens: ``completions/*``; "terminated" responses are those not cut off.
    Nothing of none."""
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
    """``reward`` and ``reward_std`` over all responses, ``reward_group_std`` (mean over groups),
    ``rewards/<name>/*``, the shares of groups without variance and of responses without reward.

    Standard deviations are unbiased, as in TRL; a function that does not apply to a response is
    left out of its mean. Of no groups, and of no rewards, there is nothing to say.
    """
    if not groups:
        return {}
    totals = [[s.reward for s in group.samples if s.reward is not None] for group in groups]
    stds = _stds(totals)
    flat = [reward for rewards in totals for reward in rewards]
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
    """How far trained responses are from on-policy (mode ``partial``); of none, nothing.

    By verl's names, mean and largest of responses: ``trajectory_spans``, versions of the weights
    from the first token to the last; ``trajectory_staleness``, age of the last token in steps, and
    ``trajectory_staleness_worst``, of the first. ``partial/stale_tokens``: share of the tokens that
    earlier weights have sampled; ``_of_longest``, of the longest tenth of the responses.
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


def taught(groups: Sequence[Group]) -> bool:
    """Whether any response of them has an advantage."""
    return any(np.any(group.advantages) for group in groups)


def update_metrics(updates: Sequence[Update]) -> dict[str, float]:
    """Means over a step's updates, of extremes those of all; the last one's ``learning_rate``."""
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
    *,
    step: int,
    epoch: float,
    groups: Sequence[Group],
    updates: Sequence[Update],
    tail: TailMetrics,
    step_time: float,
    num_tokens: int,
    timing_s: Mapping[str, float],
    bubble: Mapping[str, float],
) -> Metrics:
    """All metrics of a step.

    Args:
        step: its number, which is also the weights' version.
        epoch: passes over the data so far, with its fraction.
        groups: trained on in this step.
        updates: made in this step.
        tail: what tail batching did.
        step_time: wall time, seconds.
        num_tokens: prompt and response tokens trained on since the run began.
        timing_s: seconds of each phase by name (``rollout``, ``train``, ``weights`` ...).
        bubble: idle share of worker time by phase, 0 to 1; ``total`` is that of the whole step.
    """
    samples = [sample for group in groups for sample in group.samples]
    lag = max((step - sample.weights_version for sample in samples), default=0)
    return {
        "step": step,
        "epoch": epoch,
        **reward_metrics(groups),
        **completion_metrics(samples),
        **update_metrics(updates),
        "num_tokens": num_tokens,
        "step_time": step_time,
        **{f"timing_s/{name}": value for name, value in timing_s.items()},
        "tail/round_kind": tail.round_kind.value,
        "tail/long_queue": tail.long_queue,
        "tail/deferred": tail.deferred,
        "tail/aborted_tokens": tail.aborted_tokens,
        "tail/kept_vs_true_len": tail.kept_vs_true_len,
        **{f"tail/audited_kept_vs_true_{name}": value for name, value in tail.audited.items()},
        **{f"bubble/{name}": value for name, value in bubble.items()},
        "policy_version_max_lag": lag,
    }


_LEARNED = ("reward", "frac_reward", "grad_norm", "learning_rate", "skipped_updates")
"""How the names begin of what tells about learning, besides what a real update reports."""


def without_learning(metrics: Metrics) -> Metrics:
    """Those of a step on emulated devices: where nothing is learned, nothing is said of it."""
    kept = {name: v for name, v in metrics.items() if not name.startswith(_LEARNED)}
    return {**kept, "emulated": 1.0}


class StepWarnings:
    """Loud lines on steps that cannot teach much.

    Each kind is said once, and how often it was at the end. One step whose rewards are equal is
    no reason to worry: that nothing is learned is said where it is one step in ten.

    Args:
        max_completion_length: the cap in force, tokens.
        context: the model's, tokens, when beside the longest prompt it leaves no more than that.
    """

    def __init__(self, max_completion_length: int, context: int | None = None) -> None:
        self._cap = max_completion_length
        self._advice = "; raise 'rollout.max_completion_length'"
        if context is not None:
            self._advice = (
                f", all that the longest prompt leaves of the model's context of {context}; take a "
                "model with a longer one, or leave long prompts out: a higher "
                "'rollout.max_completion_length' with 'data.overlong: skip'"
            )
        self._counts = {"clipped": 0, "flat": 0, "unscored": 0, "unfilled": 0}
        self._steps = self._flat = 0

    def check(self, step: int, groups: Sequence[Group], no_code: float = 0.0) -> list[str]:
        """Lines to print for a step; usually none.

        ``no_code`` is the share of responses that a code reward found no program in.
        """
        samples = [sample for group in groups for sample in group.samples]
        clipped = sum(s.finish_reason != "stop" for s in samples) / max(len(samples), 1)
        unscored = sum(sample.reward is None for sample in samples)
        flat = bool(groups) and not taught(groups)
        self._steps, self._flat = self._steps + 1, self._flat + flat
        lines: list[str] = []
        if clipped > 0.5 and self._due("clipped"):
            lines.append(
                f"WARNING step {step}: {clipped:.0%} of the completions were cut off at {self._cap}"
                f" tokens{self._advice}"
            )
        if (
            flat
            and unscored < len(samples)
            and self._flat >= OFTEN * self._steps
            and self._due("flat")
        ):
            cause = f"; {no_code:.0%} of the responses hold no program" if no_code else ""
            lines.append(
                f"WARNING step {step}: all advantages are zero, nothing is learned: every group has"
                f" equal rewards{cause}; check 'rewards', take problems of another difficulty, or "
                "draw others in place of such groups: 'rollout.dynamic_sampling.enabled=true'"
            )
        if unscored and self._due("unscored"):
            lines.append(
                f"WARNING step {step}: no reward function applies to {unscored} of {len(samples)} "
                "completions: they are kept with advantage 0; check 'rewards[].domains' and where "
                "your functions return None"
            )
        return lines

    def unfilled(
        self, step: int, groups: int, wanted: int, dropped: int, reward: float, used_up: bool
    ) -> list[str]:
        """A line where dynamic sampling has ended a step with fewer groups than it ``wanted``.

        ``dropped`` groups had equal rewards, of mean ``reward`` (not finite: no reward applies).
        ``used_up``: the epoch has no other prompts.
        """
        if groups >= wanted or not dropped or not self._due("unfilled"):
            return []
        what = (
            f"only {groups} of {wanted} groups are trained on" if groups else "nothing is trained"
        )
        mean = f" (mean {reward:.3g})" if math.isfinite(reward) else ""
        more = "give it more data" if used_up else "raise 'rollout.dynamic_sampling.max_draws'"
        return [
            f"WARNING step {step}: {what}: dynamic sampling has dropped {dropped} groups, whose "
            f"rewards are equal{mean}; check 'rewards', take problems of another difficulty, or "
            f"{more}"
        ]

    def _due(self, kind: str) -> bool:
        self._counts[kind] += 1
        return self._counts[kind] == 1

    def counted(self) -> list[str]:
        """Lines for the end, on what was said once; ``Counters.lesson`` has equal rewards."""
        again = {
            "clipped": "more than half of the completions were cut off",
            "unscored": "no reward function applied to some of the completions",
            "unfilled": "dynamic sampling found fewer groups than a step has",
        }
        return [
            f"WARNING in {self._counts[kind]} of {self._steps} steps {what}"
            for kind, what in again.items()
            if self._counts[kind] > 1
        ]


class MetricsLog:
    """``metrics.jsonl``, TensorBoard and the trackers. A full disk or a tracker never stops a run.

    Args:
        folder: the run's folder; made if missing.
        last_step: lines of later steps, left by a crash, are dropped; -1 drops all of them.
        trackers: from ``open_trackers``.
        say: told once, in one line, of each target that fails.
    """

    def __init__(
        self,
        folder: Path,
        *,
        last_step: int = -1,
        trackers: Sequence[Tracker] = (),
        say: Callable[[str], None],
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "metrics.jsonl"
        cut_jsonl(self._path, last_step)
        self._file = AppendFile(self._path)
        self._say = say
        self._failing: set[str] = set()
        self._trackers = [TensorBoard(folder / "tensorboard", last_step + 1), *trackers]

    def write(self, metrics: Metrics) -> None:
        """Record one step, named by ``metrics["step"]``."""
        self._try(str(self._path), lambda: self._file.write(_line(metrics)))
        shown = numbers(metrics)
        step = int(shown.pop("step"))
        for tracker in self._trackers:
            self._try(type(tracker).__name__, lambda t=tracker: t.log(step, shown))

    def close(self) -> None:
        """Close the file and finish the trackers."""
        self._file.close()
        for tracker in self._trackers:
            self._try(type(tracker).__name__, tracker.close)

    def _try(self, target: str, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:  # third-party trackers raise anything
            if target not in self._failing:
                self._say(f"{target}: metrics cannot be written ({error}); the run goes on")
            self._failing.add(target)


def numbers(metrics: Metrics) -> dict[str, float]:
    """What can be drawn: finite numbers, and the round kind as 0 full, 1 short, 2 long."""
    result: dict[str, float] = {}
    for name, value in metrics.items():
        if isinstance(value, str):
            if value in _KINDS:
                result[name] = float(_KINDS.index(value))
        elif math.isfinite(value):
            result[name] = float(value)
    return result


def _line(metrics: Metrics) -> bytes:
    plain = {name: _plain(value) for name, value in metrics.items()}
    return json.dumps(plain, separators=(",", ":")).encode() + b"\n"


def _plain(value: float | str) -> float | str | None:
    """JSON has no infinities: they and nan become null. NumPy's numbers become Python's."""
    if isinstance(value, str | int):
        return value
    return float(value) if math.isfinite(value) else None


def _mean(values: Sequence[float] | np.ndarray) -> float:
    return float(np.mean(values)) if len(values) else 0.0


def _stds(rows: Sequence[Sequence[float]]) -> np.ndarray:
    """``_std`` of each; in one call where all are alike."""
    if len({len(row) for row in rows}) == 1 and len(rows[0]) > 1:
        return np.std(rows, axis=1, ddof=1)
    return np.array([_std(row) for row in rows])


def _std(values: Sequence[float]) -> float:
    return float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
