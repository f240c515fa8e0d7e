"""What a run says of itself at its end."""

from types import SimpleNamespace
from typing import Any

import pytest

from rollpacker.runtime.record.metrics import Counters


def after(rewards: list[float]) -> Counters:
    """A run of steps with these mean rewards, resumed in between."""
    counters = Counters()
    record: Any = SimpleNamespace(kept=[])
    engine = {"engine/steps": 1, "engine/generated_tokens": 1}
    times = {"timing_s/worker_cpu": 0.0, "timing_s/decode_cpu": 0.0}
    for reward in rewards:
        counters = Counters(**counters.state_dict())
        counters.step += 1
        counters.measure(record, {**engine, **times, "reward": reward}, 0.0)
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
        assert "a mean reward of 0.3 in its last 10 steps, of 0.5 in its first" in lesson


def test_a_short_run_is_not_judged() -> None:
    assert after([0.9] * 5 + [0.1] * 5).lesson() is None
