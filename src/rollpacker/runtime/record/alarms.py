"""Lines that a run prints where its steps teach little, or its engine and trainer disagree."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rollpacker.config import FakeEngineConfig, RunConfig, SamplerCorrectionConfig
from rollpacker.core.types import Group
from rollpacker.runtime.record.metrics import OFTEN, taught

_AGAIN = {
    "clipped": "more than half of the completions were cut off",
    "unscored": "no reward function applied to some of the completions",
    "unfilled": "dynamic sampling found fewer groups than a step has",
}
"""What is said at the end of lines that came once; ``Counters.lesson`` has equal rewards."""


class StepWarnings:
    """Loud lines on steps that cannot teach much.

    Each kind is said once, and how often it was at the end. One step whose rewards are equal is
    no reason to worry: that nothing is learned is said where it is one step in ten.

    Args:
        max_completion_length: the cap in force, tokens.
        context: the model's, tokens, when beside the longest prompt it leaves no more than that.
    """

    def __init__(self, max_completion_length: int, context: int | None = None) -> None:
        self._cap, self._context = max_completion_length, context
        self._counts: Counter[str] = Counter()
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
            lines.append(f"{clipped:.0%} of the completions were cut off at {self._longest()}")
        equal = flat and unscored < len(samples) and self._flat >= OFTEN * self._steps
        if equal and self._due("flat"):
            cause = f"; {no_code:.0%} of the responses hold no program" if no_code else ""
            lines.append(
                "all advantages are zero, nothing is learned: every group has"
                f" equal rewards{cause}; check 'rewards', take problems of another difficulty, or "
                "draw others in place of such groups: 'rollout.dynamic_sampling.enabled=true'"
            )
        if unscored and self._due("unscored"):
            lines.append(
                f"no reward function applies to {unscored} of {len(samples)} "
                "completions: they are kept with advantage 0; check 'rewards[].domains' and where "
                "your functions return None"
            )
        return [f"WARNING step {step}: {line}" for line in lines]

    def _longest(self) -> str:
        if self._context is None:
            return f"{self._cap} tokens; raise 'rollout.max_completion_length'"
        return (
            f"{self._cap} tokens, all that the longest prompt leaves of the model's context of "
            f"{self._context}; take a model with a longer one, or leave long prompts out: a higher "
            "'rollout.max_completion_length' with 'data.overlong: skip'"
        )

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
        """Lines for the end, on what was said once."""
        return [
            f"WARNING in {self._counts[kind]} of {self._steps} steps {what}"
            for kind, what in _AGAIN.items()
            if self._counts[kind] > 1
        ]


EXPLAINED: Mapping[str, float] = {"float32": 1e-3, "bfloat16": 0.1}
"""Nats that the two log-probabilities of a token may be apart in the mean, by the weights' type.
Measured with vLLM on a CPU: 1e-6 in float32 over a dozen families; 0.04 in bfloat16 with
SmolLM2-135M, 0.014 with a tiny Qwen3-Next."""
MEASURED = ("sampler/abs_logprob_difference", "sampler/effective_sample_size")
"""Metrics of a step; what is not finite is null in a log."""
LEAST_EFFECTIVE = 0.5
"""Effective sample size, as a share, below which the step's tokens count like half as many."""


class AgreementAlarm:
    """Says it once, and again whenever it is twice as bad as what was said; nothing is worse than a
    number that is not finite.

    Args:
        dtype: of the weights: a key of ``EXPLAINED``.
        correction: what is done about it.
    """

    def __init__(self, dtype: str, correction: SamplerCorrectionConfig) -> None:
        self._dtype = dtype
        self._correction = correction
        self._said = 0.5

    @classmethod
    def of(cls, config: RunConfig) -> AgreementAlarm | None:
        """That of a run; None where the two log-probabilities are not of the same distribution, or
        of the same weights."""
        stale = config.rollout.tail_batching.carries
        if stale or not config.rollout.full_softmax or isinstance(config.engine, FakeEngineConfig):
            return None
        return cls(config.model.dtype, config.train.sampler_correction)

    def check(self, metrics: Mapping[str, Any]) -> str | None:
        """The line to print for a step's metrics; usually none."""
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
            f"{explained:g}), the effective sample size is {effective:.0%}; {self._advice(apart)}"
        )

    def _advice(self, apart: float) -> str:
        key, correction = "'train.sampler_correction", self._correction
        if math.isnan(apart):
            return "see whether the engine's or the trainer's weights or activations overflow"
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
        return "; ".join(parts)
