"""The alarm of sampler and trainer: when, how often, and with what advice."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollpacker.config import RunConfig, SamplerCorrectionConfig
from rollpacker.runtime.record.alarms import AgreementAlarm
from rollpacker.runtime.record.metrics import update_metrics
from rollpacker.train.base import Update


def alarm(dtype: str = "float32", **correction: Any) -> AgreementAlarm:
    return AgreementAlarm(dtype, SamplerCorrectionConfig.model_validate(correction))


def step(apart: float, effective: float = 1.0, number: int = 4) -> dict[str, Any]:
    return {
        "step": number,
        "sampler/abs_logprob_difference": apart,
        "sampler/effective_sample_size": effective,
    }


@pytest.mark.parametrize(("dtype", "fine", "bad"), [("float32", 9e-4, 2e-3),
                                                    ("bfloat16", 0.09, 0.2)])  # fmt: skip
def test_it_sounds_where_the_type_does_not_explain_it(dtype: str, fine: float, bad: float) -> None:
    assert alarm(dtype).check(step(fine)) is None
    line = alarm(dtype).check(step(bad))
    assert line is not None
    assert line.startswith(f"WARNING step 4: sampler and trainer disagree: the log-probabilities of"
                           f" a token are {bad:g} nats apart in the mean ({dtype} ")  # fmt: skip
    assert "\n" not in line
    assert "this step's weights" in line
    assert "train.sampler_correction.kind: truncate" in line
    assert ("model.dtype: float32" in line) == (dtype == "bfloat16")


def test_it_sounds_once_and_again_when_it_has_doubled() -> None:
    one = alarm()
    steps = [0.002, 0.002, 0.0039, 0.0041, 0.005, 0.0001, 0.008, 0.0083]
    assert [one.check(step(apart)) is not None for apart in steps] == [
        True, False, False, True, False, False, False, True,
    ]  # fmt: skip


@given(st.lists(st.floats(0, 10), max_size=30), st.lists(st.floats(0.0, 1.0), min_size=30))
def test_it_sounds_seldom(apart: list[float], effective: list[float]) -> None:
    """Each time at twice as much as before, so that no run is full of it."""
    one = alarm("bfloat16")
    bad = [
        max(a / 0.1, 0.5 / max(e, 1e-9))
        for a, e in zip(apart, effective, strict=False)
        if one.check(step(a, e)) is not None
    ]
    assert all(value > 1.0 for value in bad)
    assert all(later >= 2.0 * earlier for earlier, later in pairwise(bad))


@pytest.mark.parametrize(
    ("correction", "advice"),
    [
        ({}, "kind: mask' leaves them out"),
        ({"kind": "truncate", "level": "sequence"}, "level: token'"),
        ({"kind": "mask"}, "computes as the trainer does"),
    ],
)
def test_few_weights_that_count_sound_it_too(correction: dict[str, Any], advice: str) -> None:
    assert alarm(**correction).check(step(1e-4, 0.6)) is None
    line = alarm(**correction).check(step(1e-4, 0.4))
    assert line is not None
    assert "effective sample size is 40%" in line
    assert advice in line


def test_a_step_without_a_gradient_says_nothing() -> None:
    assert alarm().check({"step": 0, "loss": 0.0}) is None
    assert alarm().check({"step": 0, "sampler/abs_logprob_difference": 1.0}) is None


@pytest.mark.parametrize(
    ("apart", "effective"), [(math.nan, 1.0), (None, 1.0), (math.inf, 0.0), (0.0, math.nan)]
)
def test_nothing_is_worse_than_what_is_no_number(apart: Any, effective: float) -> None:
    """A log has null in its place."""
    one = alarm()
    assert one.check(step(2.0)) is not None
    line = one.check(step(apart, effective))
    assert line is not None
    assert "nan" in line or "inf" in line
    assert one.check(step(apart, effective)) is None


def test_only_runs_whose_probabilities_can_be_compared_have_one() -> None:
    tree = {"model": {"path": "m"}, "data": {"path": "d"}, "rewards": [{"function": "math"}]}
    assert AgreementAlarm.of(RunConfig.model_validate(tree)) is not None
    stale = {"tail_batching": {"mode": "partial"}}
    for other in ({"rollout": {"top_p": 0.9}}, {"engine": {"kind": "fake"}}, {"rollout": stale}):
        assert AgreementAlarm.of(RunConfig.model_validate(tree | other)) is None


def test_extremes_of_a_step_are_those_of_all_its_updates() -> None:
    found = update_metrics(
        [
            Update(applied=True, grad_norm=1.0, learning_rate=0.1, metrics=metrics)
            for metrics in (
                {"sampler/ratio_min": 0.5, "sampler/ratio_max": 1.5, "sampler/k3": 1.0},
                {"sampler/ratio_min": 0.7, "sampler/ratio_max": 3.0, "sampler/k3": 2.0},
                {"loss": 1.0},
            )
        ]
    )
    assert found["sampler/ratio_min"] == 0.5
    assert found["sampler/ratio_max"] == 3.0
    assert found["sampler/k3"] == 1.5
