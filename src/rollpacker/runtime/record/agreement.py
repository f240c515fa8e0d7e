"""When sampler and trainer disagree more than their arithmetic explains, and what to do then."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rollpacker.config import FakeEngineConfig, RunConfig, SamplerCorrectionConfig

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
