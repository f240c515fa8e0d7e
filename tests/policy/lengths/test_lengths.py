"""Response lengths: their estimates, and how far a mode changes their mean."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_race import FITS, ONE_OF_FITS, race

from rollpacker.core.types import PromptId, RoundKind
from rollpacker.policy.lengths import (
    CENSORED,
    FINISHED,
    TRUNCATED,
    Audited,
    BiasMeter,
    KaplanMeier,
    LengthHistory,
    Observations,
    Response,
    is_audit_step,
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


PROMPTS_KNOB = "rollout.tail_batching.eta_prompts"
RESPONSES_KNOB = "rollout.tail_batching.eta_responses"


def audited(lengths, kept):
    return Audited(
        ended=tuple(map(Response, lengths)),
        kept=None if kept is None else tuple(map(Response, kept)),
    )


def raced_meter(mode="race"):
    """A meter whose history holds an abort, so that it does not stand back."""
    history = LengthHistory()
    for i in range(40):
        history.observe(PromptId(str(i % 5)), 50 + i, i == 7, RoundKind.SHORT, 0)
    return BiasMeter(mode, history)


def measured(mode, eta_p, eta_r, family=FITS["8k"], steps=40):
    meter, bias = None, []
    for step in race(family, prompts=64, responses=8, eta_p=eta_p, eta_r=eta_r, steps=steps):
        meter = meter or BiasMeter(mode, step.history)
        bias.append(meter.measure(step.kept))
    return meter, bias


@pytest.mark.parametrize("mode", ["exact", "off"])
def test_without_aborts_there_is_no_bias_by_construction(mode):
    _, found = measured(mode, 1.0, 1.0, steps=12)
    for bias in found:
        assert not bias.censored
        assert bias.kept_vs_true_len == 1.0
        assert bias.alarms == ()


@pytest.mark.parametrize(("mode", "eta_r"), [("prompts", 1.0), ("race", 1.25)])
def test_the_meter_reads_the_bias_of_racing(mode, eta_r):
    family = FITS["8k"]
    meter, found = measured(mode, 1.25, eta_r)
    sample = family.sample(20_000, 8)
    kept = np.concatenate(meter._kept)
    bias = found[-1]
    assert bias.censored
    assert bias.kept_vs_true_len == pytest.approx(kept.mean() / sample.mean(), abs=0.06)


def test_audits_come_every_so_many_steps_and_never_at_zero():
    assert [s for s in range(30) if is_audit_step(s, 7)] == [7, 14, 21, 28]
    assert not any(is_audit_step(s, 0) for s in range(30))


@pytest.mark.parametrize(("mode", "knob"), [("race", RESPONSES_KNOB), ("prompts", PROMPTS_KNOB)])
def test_six_bad_audits_name_the_knob(mode, knob):
    meter = raced_meter(mode)
    for number in range(1, 7):
        bias = meter.measure([50], [audited([100, 100], [80])])
        assert bias.audits == number
        assert bias.audited["len"] == pytest.approx(0.8)
        assert (len(bias.alarms) == 1) == (number == 6)
    assert knob in bias.alarms[0]
    assert "0.800 < 0.85" in bias.alarms[0]


def test_twenty_audits_are_held_to_a_closer_limit():
    meter = raced_meter()
    for _ in range(19):
        bias = meter.measure([50], [audited([100, 100], [92])])
        assert bias.alarms == ()
    bias = meter.measure([50], [audited([100, 100], [92])])
    assert "0.920 < 0.95 over 20" in bias.alarms[0]
    for _ in range(12):
        bias = meter.measure([50], [audited([100, 100], [100])])
    assert bias.alarms == ()


def test_auto_is_held_to_its_own_limit():
    history = raced_meter()._history
    for limit, loud in ((0.95, True), (0.90, False)):
        meter = BiasMeter("auto", history, limit=limit)
        for _ in range(20):
            bias = meter.measure([50], [audited([100, 100], [92])])
        assert bool(bias.alarms) == loud
        assert all("raise rollout.tail_batching.bias_limit" in alarm for alarm in bias.alarms)


def test_an_audited_loser_is_expected_to_come_back_with_its_shrunk_mean():
    meter = raced_meter()
    icc, grand = meter._history.icc(), meter._history.distribution().mean()
    assert icc == 0.0
    bias = meter.measure([50], [audited([300, 100], None)])
    assert bias.audited["len"] == pytest.approx(grand / 200)


def talked(*kept):
    """Four responses of one, two, three and four turns, a second each; these are kept."""
    ended = tuple(Response(10, turns, float(turns)) for turns in range(1, 5))
    return Audited(ended=ended, kept=tuple(ended[n] for n in kept) if kept else None)


def test_a_race_that_turns_lose_is_told_though_tokens_are_fair():
    meter = raced_meter()
    for _ in range(19):
        bias = meter.measure([10], [talked(0, 1), talked(0, 3)])
        assert bias.alarms == ()
    assert bias.audited == {"len": 1.0, "turns": 0.8, "wait": 0.8}
    bias = meter.measure([10], [talked(0, 1), talked(0, 3)])
    (alarm,) = bias.alarms
    assert alarm.startswith("audited kept/true turns 0.800 < 0.95")
    assert RESPONSES_KNOB in alarm


def test_a_prompt_whose_turns_lost_comes_back_with_its_shrunk_mean():
    meter = raced_meter()
    assert meter._history.icc() == 0.0
    longer = Audited(ended=(Response(10, 5),), kept=(Response(10, 5),))
    bias = meter.measure([10], [talked(), longer])
    grand = (2.5 + 5) / 2
    assert bias.audited["turns"] == pytest.approx((grand + 5) / 7.5)


def test_nothing_is_said_of_turns_where_there_are_none():
    bias = raced_meter().measure([50], [audited([100, 100], [100])])
    assert bias.audited == {"len": 1.0}


def test_measuring_nothing_is_no_bias():
    bias = raced_meter().measure([], [audited([], None)])
    assert bias.audits == 0
    assert bias.kept_vs_true_len == 1.0


@settings(max_examples=settings().max_examples // 5)
@given(st.integers(1, 29))
def test_a_restored_meter_measures_the_same(cut):
    rng = np.random.default_rng(cut)
    meter = raced_meter()
    restored = BiasMeter("race", meter._history)

    def measure(one, seed):
        rng = np.random.default_rng(seed)
        kept = rng.integers(20, 90, 16)
        return one.measure(kept, [audited(kept, kept[:8]), talked(0, 1)] if seed % 3 else [])

    for seed in range(cut):
        measure(meter, seed)
    restored.load_state_dict(json.loads(json.dumps(meter.state_dict())))
    for seed in rng.integers(0, 1000, 10).tolist():
        assert measure(restored, seed) == measure(meter, seed)
    assert not math.isnan(measure(meter, 1).kept_vs_true_len)
