import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic_race import FITS, ONE_OF_FITS, race

from rollpacker.core.types import PromptId, RoundKind
from rollpacker.policy.lengths import (
    CENSORED,
    FINISHED,
    TRUNCATED,
    KaplanMeier,
    LengthHistory,
    Observations,
    known_correlation,
    shrunk_mean,
)

NONE = Observations.of([])
lengths = st.lists(st.integers(0, 60), min_size=1, max_size=40)


@given(lengths)
def test_without_censoring_the_curve_is_the_empirical_one(values):
    curve = KaplanMeier.fit(Observations.of(values), NONE)
    assert curve.mean() == pytest.approx(np.mean(values))
    assert curve.at([-1, 10, 100]) == pytest.approx([1, np.mean(np.array(values) > 10), 0])
    assert curve.quantile(0.5) == sorted(values)[(len(values) + 1) // 2 - 1]


@given(lengths, lengths)
def test_the_curve_falls_from_one_to_zero_whatever_is_censored(ended, aborted):
    ends = [FINISHED] * len(ended) + [CENSORED] * len(aborted)
    curve = KaplanMeier.fit(Observations.of(ended + aborted, ends), NONE, cap=80)
    assert curve.survival[-1] == 0
    assert np.all(np.diff(curve.survival) <= 0)
    assert curve.survival.size <= 82
    assert curve.mean() >= np.mean(np.minimum(ended + aborted, 0)) - 1e-9


def test_the_textbook_example_of_kaplan_and_meier():
    times = Observations.of(
        [6, 6, 6, 6, 7, 9, 10, 10, 11, 13, 16], [0, 0, 0, 2, 0, 2, 0, 2, 2, 0, 0]
    )
    curve = KaplanMeier.fit(times, NONE)
    assert curve.at([5, 6, 7, 10, 13]) == pytest.approx(
        [1, 8 / 11, 8 / 11 * 6 / 7, 8 / 11 * 6 / 7 * 4 / 5, 8 / 11 * 6 / 7 * 4 / 5 / 2]
    )


def test_a_tail_that_nobody_saw_is_exponential_up_to_the_cap():
    rng = np.random.default_rng(0)
    true = np.ceil(rng.exponential(500, 20_000)).astype(int)
    stop = 700
    seen = Observations.of(np.minimum(true, stop), np.where(true > stop, CENSORED, FINISHED))
    assert KaplanMeier.fit(seen, NONE).mean() == pytest.approx(500, rel=0.02)
    capped = KaplanMeier.fit(seen, NONE, cap=900)
    assert capped.survival.size == 901
    assert capped.mean() < KaplanMeier.fit(seen, NONE).mean()


def test_truncation_is_estimated_through_censoring():
    rng = np.random.default_rng(1)
    true = np.minimum(np.ceil(rng.exponential(500, 20_000)), 1000).astype(int)
    stop = rng.integers(1, 3000, true.size)
    ends = np.where(true > stop, CENSORED, np.where(true == 1000, TRUNCATED, FINISHED))
    curve = KaplanMeier.fit(Observations.of(np.minimum(true, stop), ends), NONE)
    assert curve.truncated == pytest.approx(np.mean(true == 1000), rel=0.05)


def test_no_observation_is_an_error():
    with pytest.raises(ValueError, match="no lengths"):
        LengthHistory().distribution()


@pytest.mark.parametrize("name", ONE_OF_FITS)
@pytest.mark.parametrize(("eta_r", "low", "high"), [(1.0, 0.95, 1.05), (1.25, 0.95, 1.12)])
def test_the_true_mean_is_found_behind_the_race(name, eta_r, low, high):
    # Racing responses censors by how slow the prompt is, which leaves the estimate too long.
    family = FITS[name]
    found, kept = [], []
    for step in race(family, prompts=96, responses=8, eta_p=1.25, eta_r=eta_r, steps=40):
        if step.number >= 20:
            kept.append(step.kept)
            found.append(step.history.distribution().mean())
    true = family.sample(20_000, 8).mean()
    assert low < np.mean(found) / true < high
    assert np.concatenate(kept).mean() / true < (0.92 if eta_r == 1.0 else 0.75)


def test_correlation_is_that_of_the_prompts():
    rng = np.random.default_rng(0)
    groups = [
        rng.normal(u, 1, size) for u, size in zip(rng.normal(0, 1, 600), [4, 8] * 300, strict=True)
    ]
    assert known_correlation(groups) == pytest.approx(0.5, abs=0.05)
    assert known_correlation([rng.normal(0, 1, 8) for _ in range(600)]) < 0.03
    assert known_correlation([np.full(3, 1.0), np.full(3, 2.0)]) == 1.0
    assert known_correlation([np.ones(3), np.ones(3)]) == 0.0
    assert known_correlation(groups[:1]) == 0.0


def test_shrinking_is_between_the_prompt_and_all():
    assert shrunk_mean(10, 8, 20, 0.0) == 20
    assert shrunk_mean(10, 8, 20, 1.0) == 10
    assert 10 < shrunk_mean(10, 8, 20, 0.3) < shrunk_mean(10, 2, 20, 0.3) < 20


def test_memory_is_bounded():
    history = LengthHistory(window=3)
    for step in range(100):
        for i in range(10):
            history.observe(PromptId(str(step * 7 + i)), step + 1, False, RoundKind.FULL, step)
    assert len(history) == 30
    assert set(history.seen().lengths) == {98, 99, 100}


@given(st.integers(0, 30))
def test_a_restored_history_goes_on_as_if_nothing_had_happened(cut):
    steps = race(FITS["16k"], prompts=4, responses=3, eta_p=1.5, eta_r=1.34, steps=31)
    restored = LengthHistory(FITS["16k"].cap)
    for step in steps:
        if step.number == cut:
            restored.load_state_dict(json.loads(json.dumps(step.history.state_dict())))
            break
    original = step.history
    for history in (original, restored):
        history.observe(PromptId("0"), 50, True, RoundKind.SHORT, cut)
        history.observe(PromptId("1"), 70, False, "audit", cut + 1)
        history.observe(PromptId("1"), 70, True, RoundKind.SHORT, cut + 1)
    assert restored.state_dict() == original.state_dict()
    assert restored.distribution().mean() == original.distribution().mean()
    assert restored.icc() == original.icc()
