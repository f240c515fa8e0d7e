import functools
import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_race import FITS, ONE_OF_FITS, race, tell

from rollpacker.config import TailBatchingConfig
from rollpacker.core.types import PromptId, RoundKind
from rollpacker.policy.engines.hardware import LatencyCurve
from rollpacker.policy.lengths import Bias, LengthHistory, known_correlation
from rollpacker.policy.rounds.measure import (
    AutoMode,
    Choice,
    RoundCosts,
    StepTime,
    SyntheticRounds,
    predict,
)

GPU = LatencyCurve({1: 0.010, 16: 0.011, 64: 0.0135, 128: 0.018, 256: 0.027})
WORK = RoundCosts(prompts=64, responses=8, engines=8, latency=GPU)
AUTO = TailBatchingConfig(mode="auto", bias_limit=0.9)


def full_rounds(family, prompts=64, steps=10, seed=0):
    history = LengthHistory(family.cap)
    for i, group in enumerate(family.sample(prompts * steps, 8, seed)):
        tell(history, PromptId(str(i)), group, group, RoundKind.FULL, i // prompts, family.cap)
    return history


@functools.cache
def usual():
    """What is known of the 8k lengths; nobody adds to it."""
    return full_rounds(FITS["8k"])


@functools.cache
def plain_steps(name):
    """Rounds drawn from what whole rounds tell, their mean seconds, and the true mean length."""
    history = full_rounds(FITS[name], steps=20)
    rounds = SyntheticRounds.draw(
        history.distribution(), history.icc(), (100, 80, 10), np.random.default_rng(0)
    )
    base, _ = seconds_of(FITS[name], 1.0, 1.0, 60)
    return rounds, base, FITS[name].sample(20_000, 8).mean()


def near_the_cap():
    """Long answers that hang on the prompt: nothing to win."""
    history, rng = LengthHistory(16_000), np.random.default_rng(0)
    for i in range(160):
        group = np.clip(rng.uniform(2000, 19_000) * np.exp(rng.normal(0, 0.1, 8)), 1, 16_000)
        group = group.astype(int)
        tell(history, PromptId(str(i)), group, group, RoundKind.FULL, i // 16, 16_000)
    return history


def choose(admission, history, work=WORK, step=10, measured=None):
    return admission.choose(step, history, work, np.random.default_rng(step), measured)


def test_step_time_adds_up_ticks():
    work = RoundCosts(
        prompts=1,
        responses=4,
        engines=2,
        latency=LatencyCurve({1: 1.0, 2: 2.0, 4: 4.0}),
        train_seconds_per_token=0.5,
        streaming=False,
    )
    stops = np.array([[3.0, 1.0, 2.0, 10.0]])
    # Four, three, two attempts on two workers for one tick each, one for seven ticks; 16 tokens.
    assert StepTime(work, 4).mean(stops, stops.sum(axis=1)) == 2 + 2 + 1 + 7 + 16 * 0.5 / 2
    streamed = StepTime(replace(work, streaming=True), 4)
    # The last attempt leaves the other worker 7 seconds for gradients.
    assert streamed.mean(stops, stops.sum(axis=1)) == pytest.approx(12 + (8 - 7) / 2)


@pytest.mark.parametrize("name", sorted(FITS))
def test_synthetic_rounds_have_the_measured_distribution_and_correlation(name):
    history = full_rounds(FITS[name])
    true, icc = history.distribution(), history.icc()
    rounds = SyntheticRounds.draw(true, icc, (100, 64, 8), np.random.default_rng(0))
    assert rounds.first.shape == rounds.again.shape == (100, 64, 8)
    assert rounds.first.mean() == pytest.approx(true.mean(), rel=0.04)
    assert known_correlation(list(rounds.first.reshape(-1, 8))) == pytest.approx(icc, abs=0.02)
    both = np.concatenate([rounds.first, rounds.again], axis=2).reshape(-1, 16)
    assert known_correlation(list(both)) == pytest.approx(icc, abs=0.02)


def seconds_of(family, eta_p, eta_r, steps):
    """Mean decode seconds and kept length of real steps, at one flat tick a token."""
    kept, ticks = [], []
    for step in race(family, prompts=64, responses=8, eta_p=eta_p, eta_r=eta_r, steps=steps):
        kept.append(step.kept.mean())
        ticks.append(step.kept.max())
    return np.mean(ticks), np.mean(kept)


@pytest.mark.parametrize("name", ONE_OF_FITS)
@pytest.mark.parametrize(
    "choice",
    [
        Choice(mode="prompts", eta_prompts=1.25),
        Choice(mode="race", eta_prompts=1.25, eta_responses=1.25),
        Choice(mode="race", eta_responses=1.25),
    ],
)
def test_predictions_agree_with_real_steps(name, choice):
    rounds, base, true = plain_steps(name)
    flat = replace(WORK, latency=LatencyCurve({1: 1.0}), streaming=False)
    found = predict(choice, rounds, flat, StepTime(flat, 800))
    ticks, kept = seconds_of(FITS[name], choice.eta_prompts, choice.eta_responses, 80)
    # A tail that only some prompts have is more than the copula knows.
    assert found.kept_vs_true == pytest.approx(
        kept / true, abs=0.05 if choice.mode == "prompts" else 0.1
    )
    assert found.gain == pytest.approx(base / ticks, rel=0.2)


def test_exact_changes_nothing():
    history = usual()
    rounds = SyntheticRounds.draw(
        history.distribution(), history.icc(), (8, 64, 8), np.random.default_rng(0)
    )
    found = predict(Choice(), rounds, WORK, StepTime(WORK, 512))
    assert found.gain == pytest.approx(1.0)
    assert found.kept_vs_true == pytest.approx(1.0)


def test_it_waits_until_enough_is_known():
    admission = AutoMode(AUTO)
    assert choose(admission, LengthHistory()) == Choice()
    few = LengthHistory()
    tell(few, PromptId("a"), np.arange(8), np.arange(8), RoundKind.FULL, 0, 99)
    assert choose(admission, few, step=20) == Choice()
    assert choose(admission, usual(), step=30) != Choice()


def test_where_all_responses_are_empty_there_is_nothing_to_win():
    history = LengthHistory(100)
    for i in range(200):
        tell(history, PromptId(str(i)), np.zeros(8, int), np.zeros(8, int), RoundKind.FULL, 0, 100)
    assert choose(AutoMode(AUTO), history) == Choice()


def test_it_races_prompts_only_within_the_bias_limit():
    history = usual()
    found = {}
    for limit in (0.8, 0.9, 0.95, 0.99):
        admission = AutoMode(AUTO.model_copy(update={"bias_limit": limit}))
        found[limit] = choose(admission, history)
        assert found[limit].mode in ("exact", "prompts")
        assert found[limit].eta_responses == 1.0
        assert admission._prediction.kept_vs_true >= limit
        assert admission._prediction.gain >= 1.05 or found[limit] == Choice()
    assert found[0.8].eta_prompts > found[0.9].eta_prompts > 1.0
    assert found[0.99] == Choice()


def test_responses_race_only_where_allowed():
    history = usual()
    wide = AUTO.model_copy(update={"bias_limit": 0.5, "race_responses": True})
    assert choose(AutoMode(wide), history).mode == "race"
    narrow = wide.model_copy(update={"race_responses": False})
    assert choose(AutoMode(narrow), history).mode == "prompts"


@pytest.mark.parametrize("train", [0.0, 2e-4])
def test_it_stays_off_near_the_cap(train):
    work = replace(WORK, prompts=16, train_seconds_per_token=train)
    assert choose(AutoMode(AUTO), near_the_cap(), work) == Choice()


def test_it_stays_off_where_latency_grows_with_the_batch():
    linear = LatencyCurve({1: 0.001, 256: 0.256})
    assert choose(AutoMode(AUTO), usual(), replace(WORK, latency=linear)) == Choice()


def test_it_does_not_flap():
    admission = AutoMode(AUTO)
    chosen = [
        choose(admission, full_rounds(FITS["8k"], seed=seed), step=10 * seed) for seed in range(15)
    ]
    changes = sum(a != b for a, b in itertools.pairwise(chosen))
    assert changes <= 4


def bias(ratio, audits=20, alarms=()):
    return Bias(
        censored=True,
        kept_vs_true_len=1.0,
        audited={} if ratio is None else {"len": ratio},
        audits=audits,
        alarms=alarms,
    )


def test_bad_audits_make_it_careful():
    history = usual()
    admission = AutoMode(AUTO)
    before = choose(admission, history)
    after = choose(admission, history, step=20, measured=bias(0.80))
    assert after.eta_prompts < before.eta_prompts
    lenient = AutoMode(AUTO)
    choose(lenient, history)
    assert choose(lenient, history, step=20, measured=bias(0.97)).eta_prompts >= before.eta_prompts


def test_an_alarm_turns_it_off_for_a_while():
    history = usual()
    admission = AutoMode(AUTO)
    assert choose(admission, history) != Choice()
    assert choose(admission, history, step=13, measured=bias(0.9, alarms=("x",))) == Choice()
    assert choose(admission, history, step=112) == Choice()
    assert choose(admission, history, step=113) != Choice()


def test_between_decisions_it_costs_nothing_and_on_average_little(calls):
    """About 10 ms of CPU a step."""
    history = full_rounds(FITS["8k"], prompts=128, steps=10)
    work = replace(WORK, prompts=128)
    admission = AutoMode(AUTO)
    choose(admission, history, work, step=0)
    rng = np.random.default_rng(5)
    state = rng.bit_generator.state
    admission.choose(7, history, work, rng)
    assert rng.bit_generator.state == state

    def act():
        for step in range(10, 60):
            choose(admission, history, work, step)

    assert calls(act) / 50 < 10_000


@settings(max_examples=settings().max_examples // 25)
@given(st.integers(0, 50))
def test_a_restored_admission_goes_on_the_same(seed):
    history = full_rounds(FITS["8k"], prompts=32, steps=2, seed=seed)
    admission, restored = AutoMode(AUTO), AutoMode(AUTO)
    choose(admission, history)
    choose(admission, history, step=20, measured=bias(0.85))
    restored.load_state_dict(json.loads(json.dumps(admission.state_dict())))
    for step in (25, 30, 40):
        assert choose(restored, history, step=step) == choose(admission, history, step=step)
    assert restored.state_dict() == admission.state_dict()
