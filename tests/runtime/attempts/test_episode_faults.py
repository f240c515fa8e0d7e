"""Environments that raise, hang, die or talk nonsense harm their own responses only.

Those that take their process along are slow; ``tests/env/processes/test_environment_pool.py`` has
them too.
"""

import json
from typing import Any

import polars as pl
import pytest
from runtime_jobs import cli_here, metrics, run, table, times_trained
from test_episode_runs import ECHO, SUPPORT, TALKING, Talkshop

SOFT = {1: "raises at once", 2: "raises", 3: "hangs", 4: "garbage", 5: "says nothing"}
SOFT |= {6: "megabytes", 7: "bytes", 8: "over at once"}
HARD = {2: "exits", 5: "is killed", 8: "blocks"}
SAID = {
    "raises at once": "no such game",
    "raises": "KeyError: 'board'",
    "hangs": "timed out after 2 s (environment.step_timeout_s)",
    "garbage": "step returned dict, not a Turn",
    "says nothing": "step returned no messages, and is not done",
    "exits": "its process exited with code 3",
    "is killed": "its process was killed by signal 9",
    "blocks": "its process hung for 4 s (environment.step_timeout_s)",
}


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Talkshop:
    return Talkshop(tmp_path_factory.mktemp("faults"))


def bad(how: dict[int, str], **more: Any) -> dict[str, Any]:
    options = {"how": {str(number): what for number, what in how.items()}}
    path = f"{SUPPORT / 'talking.py'}:Bad"
    environment = ECHO | {"path": path, "options": options, "step_timeout_s": 2.0} | more
    return TALKING | {"environment": environment, "epochs": 1, "rollout__max_retries": 0}


@pytest.mark.parametrize("how", [SOFT, pytest.param(HARD, marks=pytest.mark.slow)])
def test_a_bad_environment_harms_its_own_prompt_only(shop: Talkshop, how: dict[int, str]) -> None:
    folder, said = run(shop.config(f"bad-{min(how)}", "exact", **bad(how)))
    failing = {f"p{number}" for number, what in how.items() if what in SAID}
    trained = times_trained(folder)
    assert failing.isdisjoint(trained)
    assert trained.keys() | failing == {f"p{n}" for n in range(11)}
    assert set(trained.values()) == {1}
    for what in how.values():
        if what in SAID:
            assert SAID[what] in said
    assert cli_here("journal", "replay", folder).returncode == 0


def test_what_says_megabytes_ends_as_too_long(shop: Talkshop) -> None:
    kept = table(shop.folder / "bad-1", "kept").filter(pl.col("prompt") == "p6")
    went_on = kept.filter(pl.col("tool_calls") >= 0)
    assert (went_on["finish_reason"] == "length").all()
    assert went_on.height == 3


def test_what_is_over_at_once_or_no_text_is_a_response(shop: Talkshop) -> None:
    kept = table(shop.folder / "bad-1", "kept")
    over = kept.filter(pl.col("prompt") == "p8")
    assert over["reward"].to_list() == [1.0] * 3
    assert over["tokens"].to_list() == [0] * 3
    pictures = kept.filter(pl.col("prompt") == "p7")
    assert pictures["reward"].to_list() == [0.5] * 3
    assert all("/w==" in str(talk) for talk in pictures["messages"]), pictures["messages"].to_list()


LENGTH = """
def length(completions, **_):
    return [float(len(talk)) for talk in completions]
"""


@pytest.mark.wide
def test_an_evaluation_names_what_fails_and_ends(shop: Talkshop) -> None:
    """With a reward function, which is asked of what is over at once too."""
    function = shop.folder / "lengths.py"
    function.write_text(LENGTH)
    how = {1: "raises at once", 2: "over at once", 3: "raises"}
    changes = bad(how, on_error="score") | {"eval": {"data": {"path": str(shop.data)}}, "steps": 1}
    changes |= {"rewards": [{"function": f"{function}:length"}]}
    folder, said = run(shop.config("evaluated", "exact", **changes))
    assert json.loads((folder / "summary.json").read_text())["after"]["eval/ungraded"] == 0
    assert said.count("evaluation: the environment of problem p1: ") >= 1
    assert "evaluation: the environment of problem p3: " in said


@pytest.mark.slow
def test_an_evaluation_begins_again_what_another_one_brought_down(shop: Talkshop) -> None:
    changes = bad({2: "exits"}) | {"eval": {"data": {"path": str(shop.data)}}, "steps": 1}
    folder, said = run(shop.config("brought-down", "exact", **changes))
    after = json.loads((folder / "summary.json").read_text())["after"]
    assert after["eval/ungraded"] == 1, after
    assert "evaluation: the environment of problem p2: its process exited with code 3" in said
    assert said.count("evaluation: the environment of problem") == said.count("problem p2: ")


@pytest.mark.wide
def test_a_failure_may_be_a_reward(shop: Talkshop) -> None:
    changes = bad({2: "raises"}, on_error="score", failed_reward=-1.0)
    folder, _ = run(shop.config("scored", "exact", **changes))
    kept = table(folder, "kept").filter(pl.col("prompt") == "p2")
    assert kept["reward"].to_list() == [-1.0] * 3
    assert sum(row["environment/failed"] for row in metrics(folder)) > 0
