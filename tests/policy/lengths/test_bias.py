import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_race import FITS, ONE_OF_FITS, race

from rollpacker.core.types import PromptId, RoundKind
from rollpacker.policy.lengths.bias import Audited, BiasMeter, Talk, is_audit_step
from rollpacker.policy.lengths.censoring import (
    KaplanMeier,
    Observations,
    censoring_weights,
    effective_sample_size,
)
from rollpacker.policy.lengths.lengths import LengthHistory

PROMPTS_KNOB = "rollout.tail_batching.eta_prompts"
RESPONSES_KNOB = "rollout.tail_batching.eta_responses"


def audited(lengths, kept, cut=False):
    return Audited(
        lengths=tuple(lengths),
        truncated=(cut,) * len(lengths),
        kept=None if kept is None else tuple(kept),
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
        bias.append(meter.measure(step.kind, step.kept, step.kept >= family.cap))
    return meter, bias


@pytest.mark.parametrize("mode", ["exact", "off"])
def test_without_aborts_there_is_no_bias_by_construction(mode):
    _, found = measured(mode, 1.0, 1.0, steps=12)
    for bias in found:
        assert not bias.censored
        assert bias.kept_vs_true_len == 1.0
        assert bias.truncated_kept == bias.truncated_true
        assert bias.effective_sample_size == 1.0
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
    assert bias.truncated_kept == np.mean(kept >= family.cap)
    assert bias.truncated_true == pytest.approx(np.mean(sample >= family.cap), rel=0.4)
    assert bias.truncated_true > bias.truncated_kept
    assert 0.5 < bias.effective_sample_size < 1.0


@pytest.mark.parametrize("name", ONE_OF_FITS)
def test_censoring_weights_bring_the_true_mean_back(name):
    family = FITS[name]
    tokens, weight, squares, count, plain = 0.0, 0.0, 0.0, 0, 0.0
    meter = None
    for step in race(family, prompts=128, responses=8, eta_p=1.25, eta_r=1.0, steps=60):
        meter = meter or BiasMeter("prompts", step.history)
        meter.measure(step.kind, step.kept, step.kept >= family.cap)
        if step.number >= 20:
            weights = meter.weights(step.kept)
            assert weights.shape == step.kept.shape
            tokens += float(weights @ step.kept)
            weight += float(weights.sum())
            squares += float(weights @ weights)
            count += weights.size
            plain += float(step.kept.sum())
    true = family.sample(40_000, 8).mean()
    assert plain / count / true < 0.92
    assert tokens / weight / true == pytest.approx(1.0, abs=0.045)
    assert weight / count == pytest.approx(1.0, abs=0.02)
    assert weight**2 / squares / count > 0.9


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60))
def test_weights_are_one_where_everything_is_kept(lengths):
    true = KaplanMeier.fit(Observations.of(lengths), Observations.of([]))
    weights = censoring_weights(lengths, lengths, true)
    assert weights == pytest.approx(np.ones(len(lengths)))
    assert effective_sample_size(weights) == pytest.approx(1.0)


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=60),
    st.lists(st.integers(1, 50), min_size=1, max_size=60),
)
def test_weights_are_clipped_and_have_mean_one(kept, everything):
    true = KaplanMeier.fit(Observations.of(everything), Observations.of([]))
    weights = censoring_weights(kept, kept, true)
    assert np.all(weights >= 0)
    assert weights.mean() == pytest.approx(1.0) or np.all(weights == 0)
    assert 0 < effective_sample_size(weights) <= 1 + 1e-9 or np.all(weights == 0)


def test_audits_come_every_so_many_steps_and_never_at_zero():
    assert [s for s in range(30) if is_audit_step(s, 7)] == [7, 14, 21, 28]
    assert not any(is_audit_step(s, 0) for s in range(30))


@pytest.mark.parametrize(("mode", "knob"), [("race", RESPONSES_KNOB), ("prompts", PROMPTS_KNOB)])
def test_six_bad_audits_name_the_knob(mode, knob):
    meter = raced_meter(mode)
    for number in range(1, 7):
        bias = meter.measure(RoundKind.SHORT, [50], [False], [audited([100, 100], [80])])
        assert bias.audits == number
        assert bias.audited_kept_vs_true == pytest.approx(0.8)
        assert (len(bias.alarms) == 1) == (number == 6)
    assert knob in bias.alarms[0]
    assert "0.800 < 0.85" in bias.alarms[0]


def test_twenty_audits_are_held_to_a_closer_limit():
    meter = raced_meter()
    for _ in range(19):
        bias = meter.measure(RoundKind.SHORT, [50], [False], [audited([100, 100], [92])])
        assert bias.alarms == ()
    bias = meter.measure(RoundKind.SHORT, [50], [False], [audited([100, 100], [92])])
    assert "0.920 < 0.95 over 20" in bias.alarms[0]
    for _ in range(12):
        bias = meter.measure(RoundKind.SHORT, [50], [False], [audited([100, 100], [100])])
    assert bias.alarms == ()


def test_auto_is_held_to_its_own_limit():
    history = raced_meter()._history
    for limit, loud in ((0.95, True), (0.90, False)):
        meter = BiasMeter("auto", history, limit=limit)
        for _ in range(20):
            bias = meter.measure(RoundKind.SHORT, [50], [False], [audited([100, 100], [92])])
        assert bool(bias.alarms) == loud
        assert all("raise rollout.tail_batching.bias_limit" in alarm for alarm in bias.alarms)


def test_an_audited_loser_is_expected_to_come_back_with_its_shrunk_mean():
    meter = raced_meter()
    icc, grand = meter._history.icc(), meter._history.distribution().mean()
    assert icc == 0.0
    bias = meter.measure(RoundKind.SHORT, [50], [False], [audited([300, 100], None)])
    assert bias.audited_kept_vs_true == pytest.approx(grand / 200)


def talked(*kept):
    """Four responses of one, two, three and four turns, a second each; these are kept."""
    talk = [Talk(turns, float(turns)) for turns in range(1, 5)]
    known = {"lengths": (10,) * 4, "truncated": (False,) * 4, "talk": tuple(talk)}
    if not kept:
        return Audited(**known, kept=None)
    some = tuple(talk[n] for n in kept)
    return Audited(**known, kept=(10,) * len(kept), talk_kept=some)


def test_a_race_that_turns_lose_is_told_though_tokens_are_fair():
    meter = raced_meter()
    for _ in range(19):
        bias = meter.measure(RoundKind.SHORT, [10], [False], [talked(0, 1), talked(0, 3)])
        assert bias.alarms == ()
    assert bias.audited == {"len": 1.0, "turns": 0.8, "wait": 0.8}
    bias = meter.measure(RoundKind.SHORT, [10], [False], [talked(0, 1), talked(0, 3)])
    (alarm,) = bias.alarms
    assert alarm.startswith("audited kept/true turns 0.800 < 0.95")
    assert RESPONSES_KNOB in alarm


def test_a_prompt_whose_turns_lost_comes_back_with_its_shrunk_mean():
    meter = raced_meter()
    assert meter._history.icc() == 0.0
    longer = Audited(
        lengths=(10,), truncated=(False,), kept=(10,), talk=(Talk(5, 0.0),), talk_kept=(Talk(5, 0),)
    )
    bias = meter.measure(RoundKind.SHORT, [10], [False], [talked(), longer])
    grand = (2.5 + 5) / 2
    assert bias.audited["turns"] == pytest.approx((grand + 5) / 7.5)


def test_nothing_is_said_of_turns_where_there_are_none():
    bias = raced_meter().measure(RoundKind.SHORT, [50], [False], [audited([100, 100], [100])])
    assert bias.audited == {"len": 1.0}


def test_what_audits_heard_of_turns_is_saved():
    meter, other = raced_meter(), raced_meter()
    meter.measure(RoundKind.SHORT, [10], [False], [talked(0, 1)])
    other.load_state_dict(json.loads(json.dumps(meter.state_dict())))
    assert other.measure(RoundKind.SHORT, [10], [False]).audited == pytest.approx(
        {"len": 1.0, "turns": 0.6, "wait": 0.6}
    )


def test_growing_runaways_raise_an_alarm():
    steady, longer, cut = raced_meter(), raced_meter(), raced_meter()
    rng = np.random.default_rng(0)
    for number in range(20):
        lengths = rng.integers(50, 150, 32)
        late = number >= 10
        found = [
            meter.measure(RoundKind.SHORT, [50], [False], [audited(group, group, truncated)])
            for meter, group, truncated in (
                (steady, lengths, False),
                (longer, lengths * (1 + late), False),
                (cut, lengths, late),
            )
        ]
    assert found[0].alarms == ()
    assert "p90" in found[1].alarms[0]
    assert "truncated share" in found[2].alarms[0]


def test_truncation_that_rises_in_long_rounds_raises_an_alarm():
    def last(shares):
        meter = raced_meter()
        for share in shares:
            cut = [i < share * 100 for i in range(100)]
            bias = meter.measure(RoundKind.LONG, [60] * 100, cut)
        return bias.alarms

    assert "quarter to quarter" in last(np.linspace(0.0, 0.3, 12))[0]
    assert last(np.full(12, 0.1)) == ()
    assert last([0.0, 0.3] * 6) == ()
    assert last(np.linspace(0.0, 0.3, 7)) == ()
    assert "quarter to quarter" in last(np.linspace(0.0, 0.3, 700))[0]


def test_measuring_nothing_is_no_bias():
    bias = raced_meter().measure(RoundKind.SHORT, [], [], [audited([], None)])
    assert bias.audits == 0
    assert bias.kept_vs_true_len == 1.0
    assert bias.truncated_kept == 0.0


@settings(max_examples=settings().max_examples // 5)
@given(st.integers(1, 29))
def test_a_restored_meter_measures_the_same(cut):
    rng = np.random.default_rng(cut)
    meter = raced_meter()
    restored = BiasMeter("race", meter._history)

    def measure(one, seed):
        rng = np.random.default_rng(seed)
        kept = rng.integers(20, 90, 16)
        kind = RoundKind.LONG if seed % 5 == 0 else RoundKind.SHORT
        return one.measure(kind, kept, kept > 85, [audited(kept, kept[:8])] if seed % 3 else [])

    for seed in range(cut):
        measure(meter, seed)
    restored.load_state_dict(json.loads(json.dumps(meter.state_dict())))
    for seed in rng.integers(0, 1000, 10).tolist():
        assert measure(restored, seed) == measure(meter, seed)
    assert not math.isnan(measure(meter, 1).kept_vs_true_len)
