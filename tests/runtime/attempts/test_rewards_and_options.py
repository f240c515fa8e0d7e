"""Whole jobs: responses without reward, and options of the update."""

from typing import Any

import pytest
from runtime_jobs import Workshop, metrics, run, table

from rollpacker.core import journal
from rollpacker.policy.rollout import from_journal

shop = Workshop.fixture(rows=8)


PICKY = """
def picky(completions, completion_ids, **_):
    return [None if len(ids) % 2 else len(ids) * 1e-5 for ids in completion_ids]
"""


def test_responses_without_reward_are_kept_and_not_sampled_again(shop: Workshop) -> None:
    """Sampling them again would leave only lengths that have a reward: here the even ones. The
    rewards that there are lie close together, and all the same teach."""
    (shop.folder / "picky.py").write_text(PICKY)
    options: dict[str, Any] = {
        "kind": "grpo",
        "scale_rewards": "batch",
        "std_epsilon": 1e-4,
        "delta": 3.0,
    }
    folder, said = run(
        shop.config(
            "picky",
            rewards=[{"function": f"{shop.folder / 'picky.py'}:picky"}],
            epochs=1,
            devices__per_node=1,
            train__algorithm=options,
            train__mask_truncated_completions=True,
            train__beta=0.1,
            train__kl_bias_correction=False,
            train__warmup_steps=2,
            train__warmup_from_zero=True,
        )
    )
    kept = table(folder, "kept")
    assert set(table(folder)["state"]) == {"kept"}
    assert kept["sample_index"].to_list() == [0, 1, 2] * 8
    odd = kept["tokens"] % 2 == 1
    assert kept["reward"].is_null().to_list() == odd.to_list()
    assert 0 < odd.sum() < len(kept)
    steps = metrics(folder)
    assert sum(step["grading/unscored"] for step in steps) / 2 == pytest.approx(odd.mean())
    assert [step["grading/resampled"] for step in steps] == [0, 0]
    assert "no reward function applies" in said
    assert [step["learning_rate"] for step in steps] == [0.0, 0.005]
    assert steps[1]["grad_norm"] > 0.0
    accepted = [
        decision
        for _, line in journal.read(folder / "journal.jsonl")
        for decision in line.get("decisions", ())
        if decision["kind"] == "AcceptGroup"
    ]
    assert any(decision["informative"] for decision in accepted)
    assert journal.replay(folder / "journal.jsonl", from_journal).differences == []


def test_equal_is_what_the_run_says(shop: Workshop) -> None:
    """Policy, advantages and dynamic sampling by one range."""
    changes = {
        "rewards": [{"function": f"{shop.folder / 'picky.py'}:picky"}],
        "rollout__min_reward_range": 0.5,
        "steps": 1,
        "devices__per_node": 1,
        "train__algorithm": {"kind": "reinforce_pp", "whiten": "batch"},
    }
    (shop.folder / "picky.py").write_text(PICKY)
    folder, _ = run(shop.config("equal", **changes))
    (step,) = metrics(folder)
    assert step["grad_norm"] == 0.0
    assert step["reward_std"] > 0.0
    assert '"informative":true' not in (folder / "journal.jsonl").read_text()
