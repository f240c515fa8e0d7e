"""A job whose reward is called for many responses at once."""

from pathlib import Path

import pytest
from runtime_jobs import Workshop, run, times_trained

SIZES = """
def sized(completions, log):
    with open(log, "a") as file:
        file.write(f"{len(completions)} ")
    return [text.count("1") / 4 for text in completions]
"""


WHOLE = """
def whole(completions, **_):
    if len(completions) != 3:
        raise ValueError(f"a group of {len(completions)}")
    return [text.count("1") / 4 for text in completions]
"""
shop = Workshop.fixture(rows=8)


@pytest.mark.parametrize("deterministic", [False, True])
def test_responses_share_calls_unless_the_run_is_deterministic(
    shop: Workshop, tmp_path: Path, deterministic: bool
) -> None:
    (tmp_path / "sizes.py").write_text(SIZES)
    reward = {
        "function": f"{tmp_path / 'sizes.py'}:sized",
        "options": {"log": str(tmp_path / "log")},
        "batch": 6,
    }
    config = shop.config(
        f"batched-{deterministic}",
        epochs=1,
        rewards=[reward],
        deterministic=deterministic,
        rollout__max_completion_length=2,  # most of them end together
        grading={"workers": 1},
    )
    folder, _ = run(config)
    assert set(times_trained(folder).values()) == {1}
    sizes = [int(size) for size in (tmp_path / "log").read_text().split()]
    assert max(sizes) <= 6
    assert (max(sizes) > 1) == (not deterministic)


@pytest.mark.wide
def test_a_group_is_whole_where_all_end_in_one_step_of_the_engine(shop: Workshop) -> None:
    (shop.folder / "whole.py").write_text(WHOLE)
    reward = {"function": f"{shop.folder / 'whole.py'}:whole", "needs_group": True}
    config = shop.config(
        "whole",
        epochs=1,
        rewards=[reward],
        grading={"retries": 0},
        rollout__max_completion_length=1,
    )
    folder, said = run(config)
    assert "a group of" not in said
    assert set(times_trained(folder).values()) == {1}
