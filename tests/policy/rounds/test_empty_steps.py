"""When a run stops whose steps dynamic sampling leaves empty."""

import json

from hypothesis import given
from hypothesis import strategies as st

from rollpacker.config import DynamicSamplingConfig
from rollpacker.policy.grading import EmptySteps


@given(st.lists(st.integers(0, 2)), st.integers(1, 4))
def test_so_many_empty_steps_in_a_row_are_too_many(groups: list[int], most: int) -> None:
    steps = EmptySteps(DynamicSamplingConfig(enabled=True, max_empty_steps=most))
    for at, count in enumerate(groups, start=1):
        in_a_row = next((n for n, each in enumerate(reversed(groups[:at])) if each), at)
        assert steps.too_many(count) == (in_a_row >= most)
        assert steps.in_a_row == in_a_row


@given(st.integers(1, 50), st.booleans())
def test_without_a_limit_or_dynamic_sampling_there_are_never_too_many(
    count: int, enabled: bool
) -> None:
    steps = EmptySteps(DynamicSamplingConfig(enabled=enabled, max_empty_steps=3 * (not enabled)))
    assert not any(steps.too_many(0) for _ in range(count))


@given(st.lists(st.integers(0, 1)), st.integers(1, 4))
def test_a_run_that_starts_again_after_every_step_counts_on(groups: list[int], most: int) -> None:
    config = DynamicSamplingConfig(enabled=True, max_empty_steps=most)
    steps = EmptySteps(config)
    for count in groups:
        again = EmptySteps(config)
        again.load_state_dict(json.loads(json.dumps(steps.state_dict())))
        assert again.too_many(count) == steps.too_many(count)
        assert str(again) == str(steps)
