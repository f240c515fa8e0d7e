from __future__ import annotations

import json
import math
import resource
import subprocess
import sys
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from checkpoint_files import child
from hypothesis import given
from hypothesis import strategies as st

from rollpacker.config import RunConfig, SamplerCorrectionConfig
from rollpacker.core.types import AttemptId, Group, PromptId, RoundKind, Sample
from rollpacker.policy.lengths import Bias
from rollpacker.runtime.record.metrics import (
    AgreementAlarm,
    Counters,
    StepWarnings,
    completion_metrics,
    numbers,
    reward_metrics,
    step_metrics,
    update_metrics,
)
from rollpacker.runtime.record.run_log import MetricsLog, Tracker, open_trackers
from rollpacker.runtime.step.step import StepRecord
from rollpacker.train.base import Update


def sample(length=3, reward=1.0, finish="stop", version=5, **rewards):
    return Sample(
        prompt=PromptId("p"),
        index=0,
        attempt=AttemptId(0),
        prompt_tokens=np.zeros(2, np.int32),
        tokens=np.zeros(length, np.int32),
        logprobs=np.zeros(length, np.float32),
        finish_reason=finish,
        weights_version=version,
        reward=reward,
        rewards=rewards,
    )


def group(*samples, advantages=None):
    chosen = np.ones(len(samples)) if advantages is None else np.array(advantages)
    return Group(prompt=PromptId("p"), samples=samples, advantages=chosen.astype(np.float32))


def update(**other):
    plain = {"applied": True, "grad_norm": 2.0, "learning_rate": 0.1, "metrics": {"loss": 1.0}}
    return Update(**(plain | other))


def test_completion_metrics():
    lengths = completion_metrics([sample(2), sample(4), sample(9, finish="length")])
    assert lengths == {
        "completions/mean_length": 5,
        "completions/min_length": 2,
        "completions/max_length": 9,
        "completions/mean_terminated_length": 3,
        "completions/min_terminated_length": 2,
        "completions/max_terminated_length": 4,
        "completions/clipped_ratio": pytest.approx(1 / 3),
    }


def test_reward_metrics_follow_trl():
    """TRL: unbiased deviations over all samples; ours is the mean over groups."""
    groups = [
        group(sample(reward=0.0, math=0.0, style=1.0), sample(reward=2.0, math=2.0)),
        group(sample(reward=1.0, math=1.0), sample(reward=1.0, math=1.0)),
    ]
    assert reward_metrics(groups) == {
        "reward": 1.0,
        "reward_std": pytest.approx(np.std([0, 2, 1, 1], ddof=1)),
        "reward_group_std": pytest.approx(math.sqrt(2) / 2),
        "rewards/math/mean": 1.0,
        "rewards/math/std": pytest.approx(np.std([0, 2, 1, 1], ddof=1)),
        "rewards/style/mean": 1.0,
        "rewards/style/std": 0.0,
        "frac_reward_zero_std": 0.5,
        "grading/unscored": 0.0,
    }


def test_responses_without_reward_are_counted_and_warned_of():
    groups = [group(sample(reward=1.0), sample(reward=None), sample(reward=0.0))]
    found = reward_metrics(groups)
    assert found["reward"] == 0.5
    assert found["grading/unscored"] == pytest.approx(1 / 3)
    lines = StepWarnings(99).check(4, groups)
    assert [line for line in lines if "no reward function applies to 1 of 3" in line]


def test_update_metrics():
    skipped = update(applied=False, grad_norm=4.0, learning_rate=0.2, metrics={"loss": 3.0})
    assert update_metrics([update(), skipped]) == {
        "loss": 2.0,
        "grad_norm": 3.0,
        "learning_rate": 0.2,
        "skipped_updates": 1.0,
    }


def test_step_metrics():
    record = StepRecord(step=5, start_s=2.0, rollout_end_s=3.0, end_s=3.5, kind=RoundKind.LONG)
    record.updates = [update(metrics={"loss": 1.0, "entropy": 0.3})]
    record.deferred = [PromptId("a"), PromptId("b")]
    metrics = step_metrics(
        record,
        [group(sample(), sample(version=4))],
        epoch=0.5,
        num_tokens=1234,
        queue=3,
        bias=Bias(audited={"len": 0.5}),
    )
    assert (
        metrics.items()
        >= {
            "step": 5,
            "epoch": 0.5,
            "entropy": 0.3,
            "loss": 1.0,
            "num_tokens": 1234,
            "start_s": 2.0,
            "step_time": 1.5,
            "timing_s/rollout": 1.0,
            "timing_s/train": 0.5,
            "tail/round_kind": "long",
            "tail/long_queue": 3,
            "tail/deferred": 2,
            "tail/aborted_tokens": 0,
            "tail/kept_vs_true_len": 1.0,
            "tail/audited_kept_vs_true_len": 0.5,
            "engine/steps": 0,
            "policy_version_max_lag": 1,
        }.items()
    )
    assert numbers(metrics)["tail/round_kind"] == 2.0


def test_a_step_without_groups_has_numbers_only():
    record = StepRecord(step=0, start_s=0.0)
    metrics = step_metrics(record, [], epoch=0.0, num_tokens=0, queue=0, bias=Bias())
    told = {n: v for n, v in metrics.items() if isinstance(v, str | list)}
    assert told == {"tail/round_kind": "full", "engine/step_times": []}
    assert all(math.isfinite(v) for n, v in metrics.items() if n not in told)


def test_warnings_are_loud_and_not_endless():
    bad = [group(sample(finish="length"), sample(finish="length"), advantages=[0, 0])]
    good = [group(sample(finish="length"), sample(), advantages=[-1, 1])]
    warnings = StepWarnings(256)
    assert warnings.check(0, good) == []
    first = warnings.check(1, bad)
    assert "100% of the completions were cut off at 256 tokens" in first[0]
    assert "rollout.max_completion_length" in first[0]
    assert "all advantages are zero" in first[1]
    assert "rollout.dynamic_sampling.enabled=true" in first[1]
    assert warnings.counted() == []
    assert [line for step in range(2, 9) for line in warnings.check(step, bad)] == []
    assert warnings.counted() == [
        "WARNING in 8 of 9 steps more than half of the completions were cut off"
    ]
    assert StepWarnings(256).check(0, []) == []
    (limited,) = StepWarnings(256, 300).check(0, [*bad, *good, *good])[:1]
    assert (
        "cut off at 256 tokens, all that the longest prompt leaves of the model's context of 300"
        in limited
    )
    assert "raise" not in limited
    assert "no program" not in first[1]
    assert (
        "(75% of the responses hold no program). Check" in StepWarnings(256).check(0, bad, 0.75)[1]
    )


def test_one_step_that_all_got_right_is_no_reason_to_warn():
    flat, good = [group(sample(), sample(), advantages=[0, 0])], [group(sample(), advantages=[1])]
    warnings = StepWarnings(256)
    assert [warnings.check(step, good) for step in range(20)] == [[]] * 20
    assert [warnings.check(step, flat) for step in range(20, 24)] == [[]] * 4
    (line,) = warnings.check(24, flat)
    assert "all advantages are zero" in line


def log(folder, steps, last_step=-1, **other):
    said = []
    metrics = MetricsLog(folder, last_step=last_step, say=said.append, **other)
    for step in steps:
        metrics.write({"step": step, "loss": step / 2, "tail/round_kind": "short"})
    metrics.close()
    return said


def written(folder):
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").open()]


def test_one_object_per_step(tmp_path):
    metrics = MetricsLog(tmp_path, say=[].append)
    metrics.write({"step": 0, "loss": math.nan, "n": np.float32(0.5), "m": np.int64(3)})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[0], parse_constant=pytest.fail) == {
        "step": 0,
        "loss": None,
        "n": 0.5,
        "m": 3,
    }
    metrics.close()


def test_resume_cuts_torn_and_later_lines(tmp_path):
    log(tmp_path, range(6))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')
    log(tmp_path, [4, 5], last_step=3)
    assert written(tmp_path) == [0, 1, 2, 3, 4, 5]
    log(tmp_path, [0])
    assert written(tmp_path) == [0]


def test_tensorboard_reads_what_was_written(tmp_path):
    """A run that goes on hides the later points of the one before."""
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    found = []
    for steps, last in ((range(6), -1), ([4], 3)):
        before = {*tmp_path.glob("tensorboard/*")}
        log(tmp_path, steps, last_step=last)
        [file] = {*tmp_path.glob("tensorboard/*")} - before
        found.append([*loader.EventFileLoader(str(file)).Load()])
    starts = [[e.step for e in events if e.HasField("session_log")] for events in found]
    assert starts == [[0], [4]]
    points = [
        (value.tag, event.step, value.tensor.float_val[0])
        for events in found
        for event in events
        for value in event.summary.value
    ]
    losses = [(step, value) for tag, step, value in points if tag == "loss"]
    assert losses == [(step, step / 2) for step in (*range(6), 4)]
    assert ("tail/round_kind", 0, 1.0) in points


def broken(*_args, **_named):
    raise ConnectionError("no route")


def test_a_broken_tracker_is_said_once(tmp_path):
    seen = []
    counted = Tracker("counted", lambda numbers, step: seen.append(step), broken)
    said = log(tmp_path, range(4), trackers=[Tracker("wandb", broken, broken), counted])
    assert seen == [0, 1, 2, 3]
    assert said == [
        f"{name}: metrics cannot be written (no route), but the run goes on"
        for name in ("wandb", "counted")
    ]
    assert written(tmp_path) == [0, 1, 2, 3]


def test_full_disk_is_said_once_and_the_file_stays_whole(tmp_path):
    """With a real limit of the kernel: every line in the file is whole, the run goes on."""
    size = 400

    def act():
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
        said = []
        metrics = MetricsLog(tmp_path, say=said.append)
        for step in range(30):
            metrics.write({"step": step, "loss": 0.5})
        assert sorted(line.split(":")[0] for line in said) == sorted(
            [str(tmp_path / "metrics.jsonl"), "TensorBoard"]
        )
        before = written(tmp_path)
        assert before == list(range(len(before)))
        assert 5 < len(before) < 30
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        metrics.write({"step": 30, "loss": 0.5})
        metrics.close()

    assert child(act) == 0
    assert written(tmp_path) == list(range(31))


def test_a_missing_tracker_names_the_package(tmp_path):
    for name in ("wandb", "trackio", "mlflow"):
        try:
            __import__(name)
        except ImportError:
            with pytest.raises(ValueError, match=f"'pip install {name}'"):
                open_trackers([name], tmp_path, {})
    assert open_trackers([], tmp_path, {}) == []


def test_what_shows_a_run_needs_no_torch():
    script = (
        "import sys; import rollpacker.core.sample_table\n"
        "import rollpacker.runtime.record.checkpoint, rollpacker.runtime.record.progress\n"
        "print('torch' in sys.modules)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert result.stdout == "False\n"


# --- test counters: What a run says of itself at its end.


def after(rewards: list[float]) -> Counters:
    """A run of steps with these mean rewards, resumed in between."""
    counters = Counters()
    for step, reward in enumerate(rewards):
        counters = Counters(**counters.state_dict())
        group: Any = SimpleNamespace(samples=[SimpleNamespace(reward=reward)], advantages=1.0)
        counters.add(StepRecord(step=step, start_s=0.0), [group], 0.0, learns=True)
    return counters


NOISE = [0.02, -0.03, 0.01, 0.0, -0.01, 0.03, -0.02, 0.01, 0.0, -0.01]


@pytest.mark.parametrize(
    ("first", "last", "worse"),
    [(0.5, 0.3, True), (0.5, 0.49, False), (0.3, 0.5, False), (0.5, float("nan"), False)],
)
def test_a_run_that_ends_worse_than_it_began_says_so(
    first: float, last: float, worse: bool
) -> None:
    rewards = [first + n for n in NOISE] + [0.9] * 20 + [last + n for n in NOISE]
    lesson = after(rewards).lesson()
    assert (lesson is not None) == worse
    if lesson is not None:
        assert "its mean reward is 0.3 in the last 10 steps and 0.5 in the first" in lesson


def test_a_short_run_is_not_judged() -> None:
    assert after([0.9] * 5 + [0.1] * 5).lesson() is None


# --- test agreement: The alarm of sampler and trainer: when, how often, and with what advice.


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
