"""Runs that train nothing say so: at the step, in metrics, and at the end."""

import json
from pathlib import Path
from typing import Any

import pytest
from runtime_jobs import Workshop, checkpoints, metrics, run, table

from rollpacker.core import journal
from rollpacker.policy.rollout import from_journal
from rollpacker.report.run_report import write_report

FLAT = """
def flat(completions, prompts, first=0, **_):
    return [0.25 if int(p) >= first else len(c) for c, p in zip(completions, prompts)]

def none(completions, **_):
    return [None] * len(completions)
"""


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    shop = Workshop(tmp_path_factory.mktemp("empty"))
    (shop.folder / "flat.py").write_text(FLAT)
    return shop


def reward(shop: Workshop, name: str, **options: Any) -> list[dict[str, Any]]:
    return [{"function": f"{shop.folder / 'flat.py'}:{name}", "options": options}]


def sampling(**keys: Any) -> dict[str, Any]:
    return {"rollout__dynamic_sampling": {"enabled": True, "max_draws": 1, **keys}}


def replays(folder: Path) -> bool:
    return journal.replay(folder / "journal.jsonl", from_journal).differences == []


def test_dynamic_sampling_that_never_fills_ends_the_run(
    shop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = {"steps": 9, "rewards": reward(shop, "flat"), **sampling(max_empty_steps=2)}
    with pytest.raises(ValueError, match=r"step 1: dynamic sampling has left 2 steps in a row"):
        run(shop.config("never", **keys))
    folder = shop.folder / "never"
    for row in metrics(folder):
        assert row["dynamic_sampling/reward"] == row["dynamic_sampling/dropped_reward"] == 0.25
        assert row["dynamic_sampling/dropped"] == 1.0
        # There is no reward of nothing, nor a length.
        assert not [name for name in row if name.startswith(("reward", "completions/"))]
    assert len(metrics(folder)) == 2
    assert checkpoints(folder) == [2]
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["steps"], summary["steps_without_learning"]) == (2, 2)
    assert set(table(folder)["state"]) == {"dropped"}
    assert replays(folder)
    assert write_report(folder).stat().st_size > 10_000


def test_a_run_that_is_stopped_between_empty_steps_ends_too(shop: Workshop) -> None:
    keys = {"rewards": reward(shop, "flat"), **sampling(max_empty_steps=2)}
    folder, _ = run(shop.config("again", steps=1, **keys))
    with pytest.raises(ValueError, match=r"step 1: dynamic sampling has left 2 steps in a row"):
        run(shop.config("again", steps=9, **keys), resume=True)
    assert checkpoints(folder) == [1, 2]


@pytest.mark.wide
def test_a_run_may_go_on_and_says_what_it_trains(shop: Workshop) -> None:
    never = {"steps": 4, "rewards": reward(shop, "flat"), **sampling(max_empty_steps=0)}
    folder, said = run(shop.config("on", **never))
    lines = [line for line in said.splitlines() if "nothing is trained" in line]
    assert [line.split(":")[0] for line in lines] == ["WARNING step 0"]
    assert "WARNING in 4 of 4 steps dynamic sampling found fewer groups than a step has" in said
    assert "dynamic sampling has dropped 5 groups, whose rewards are equal (mean 0.25)" in lines[0]
    assert "WARNING 4 of 4 steps taught nothing" in said
    assert "0.0000" not in said
    assert len(metrics(folder)) == 4


@pytest.mark.wide
def test_a_step_with_fewer_groups_says_so(shop: Workshop) -> None:
    """Two of eleven prompts tell responses apart."""
    keys = {"steps": 2, "data__shuffle": False, "rewards": reward(shop, "flat", first=2)}
    folder, said = run(shop.config("fewer", **keys, **sampling()))
    assert "step 0: only 2 of 4 groups are trained on: dynamic sampling has dropped" in said
    assert "taught nothing" in said, "half of the steps"
    first = metrics(folder)[0]
    assert first["dynamic_sampling/dropped_reward"] == 0.25
    assert first["reward"] != first["dynamic_sampling/reward"]
    kept = table(folder, "kept", "dropped")
    step = kept.filter(kept["step"] == 0)
    assert first["dynamic_sampling/reward"] == pytest.approx(step["reward"].mean())
    dropped = step.filter(step["state"] == "dropped")["prompt"].n_unique()
    assert first["dynamic_sampling/dropped"] == dropped / step["prompt"].n_unique()
    assert replays(folder)


@pytest.mark.wide
def test_data_that_end_early_say_so(shop: Workshop) -> None:
    """Six of eleven prompts tell responses apart: one step and a half of four."""
    keys = {"epochs": 1, "rewards": reward(shop, "flat", first=6), **sampling(max_draws=9)}
    _, said = run(shop.config("early", **keys))
    assert "only 2 of 4 groups are trained on" in said
    assert "give it more data" in said
    assert "max_draws" not in said, "no draw is left to be made"
    assert "the data ended after 2 of 3 steps: 6 prompts were trained on" in said


@pytest.mark.wide
def test_without_dynamic_sampling_the_end_says_it_too(shop: Workshop) -> None:
    folder, said = run(shop.config("flat", steps=2, rewards=reward(shop, "flat")))
    assert "WARNING step 0: all advantages are zero" in said
    assert said.count("WARNING 2 of 2 steps taught nothing") == 1
    assert not [name for name in metrics(folder)[0] if name.startswith("dynamic_sampling")]
    _, said = run(shop.config("flat", steps=2, rewards=reward(shop, "flat")), resume=True)
    assert "nothing to do: all 2 steps are done, raise 'steps' or 'epochs'" in said


@pytest.mark.wide
def test_where_no_reward_applies_none_is_invented(shop: Workshop) -> None:
    eval_ = {"data": {"path": str(shop.data)}}
    folder, said = run(shop.config("none", steps=1, rewards=reward(shop, "none"), eval=eval_))
    assert "no reward function applies to 12 of 12 completions" in said
    assert "every group has equal rewards" not in said
    assert "reward" not in metrics(folder)[0]
    assert "evaluation: 11 of 11 got no reward: the accuracy says nothing" in said
    assert "WARNING 1 of 1 steps taught nothing" in said


@pytest.mark.wide
def test_a_run_that_learns_says_nothing_of_it(shop: Workshop) -> None:
    _, said = run(shop.config("learns", steps=1, **sampling()))
    assert "nothing" not in said
