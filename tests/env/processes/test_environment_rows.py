"""Values between a run and its environments: a row's columns, metrics and rewards."""

from __future__ import annotations

import asyncio
import math
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import pytest
from one_episode import Says, talk
from pool_driving import TOKENIZER, Driver, pool_of

from rollpacker.config import EnvironmentConfig, RewardConfig
from rollpacker.config.rewards import GradingConfig
from rollpacker.core.types import AttemptId, EngineId, PromptId
from rollpacker.env.adapters import number
from rollpacker.env.base import EpisodeError, Message, Turn
from rollpacker.env.messages import packed
from rollpacker.reward.base import Grade
from rollpacker.runtime.attempts.attempts import EpisodeRecord, Trajectory, TurnRecord
from rollpacker.runtime.attempts.rewards import EnvironmentReward, Rewards
from rollpacker.runtime.record.metrics import environment_metrics

SEER = """
class Seer:
    def reset(self, row):
        return [{"role": "user", "content": repr(row)}]
    async def step(self, reply): ...
    async def close(self): ...
"""


def test_an_environment_sees_its_row_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "seer.py"
    file.write_text(SEER)
    row = {
        "when": datetime(2026, 1, 2, tzinfo=UTC),
        "pair": (1, "a"),
        "price": Decimal("1.50"),
        "board": np.zeros((2, 2), np.int8),
        "more": {3: {"x"}},
    }

    async def seen() -> str:
        driver = Driver(pool)
        answer = (await driver.answer(driver.begin(**row))).answer
        return TOKENIZER.decode(np.frombuffer(answer.prompt, np.int32))

    pool = pool_of(f"{file}:Seer")
    try:
        pool.wait_ready()
        assert repr(row) in asyncio.run(seen())
    finally:
        pool.close()


def test_a_column_that_cannot_be_sent_is_named() -> None:
    with pytest.raises(ValueError, match="data: column 'lock' cannot be sent") as error:
        packed({"answer": "1", "lock": Lock()})
    assert "pickling its lock failed: TypeError" in str(error.value)
    assert "\n" not in str(error.value)


# Numbers that environments give: in metrics, as rewards, or none at all.


CONFIG = EnvironmentConfig(kind="python", path=["x"])


def attempt(id_: int = 1, **conversation: Any) -> Trajectory:
    """One that has ended by itself after a turn."""
    held = {"over": "stop", "turns": [TurnRecord(sampled=1)]} | conversation
    return Trajectory(
        id=AttemptId(id_),
        prompt=PromptId("p"),
        index=0,
        engine=EngineId("0"),
        prompt_tokens=np.zeros(1, np.int32),
        start_s=0.0,
        since_s=None,
        conversation=EpisodeRecord(**held),
    )


def test_one_value_that_is_no_number_leaves_the_others_their_mean() -> None:
    given = [{"hits": 1.0, "bad": math.nan}, {"hits": math.nan}, {"hits": 2.0}, {"hits": math.inf}]
    found = environment_metrics(attempt(metrics=metrics) for metrics in given)
    assert found["environment/hits"] == 1.5
    assert "environment/bad" not in found
    assert all(map(math.isfinite, found.values()))


def test_metrics_may_have_the_names_of_ours() -> None:
    found = environment_metrics([attempt(metrics={"turns": 7.0, "failed": 1.0, "own": 2.0})])
    assert (found["environment/turns"], found["environment/own/turns"]) == (1.0, 7.0)
    assert (found["environment/failed"], found["environment/own/failed"]) == (0.0, 1.0)
    assert found["environment/own"] == 2.0


def test_a_reward_of_the_environment_s_name_is_refused() -> None:
    rewards = [RewardConfig(function="math"), RewardConfig(function="x.py:f", name="environment")]
    with pytest.raises(ValueError, match=r"set rewards\.1\.name"):
        Rewards(rewards, GradingConfig(), None, environment=CONFIG)
    EnvironmentReward(None, ["environment"])


def noted(rewards: EnvironmentReward, count: int, /, **conversation: Any) -> list[str]:
    rewards.note([attempt(n, **conversation) for n in range(count)])
    return rewards.said()


def test_episodes_that_are_given_nothing_are_told_of_once() -> None:
    rewards = EnvironmentReward(CONFIG, [])
    assert noted(rewards, 7) == noted(rewards, 20, failed="broken", rewards=[0.0]) == []
    (line,) = noted(rewards, 2)
    assert line.startswith("WARNING environment: 9 episodes ended without a reward")
    assert noted(rewards, 20) == []
    assert rewards.add(Grade(attempt=AttemptId(1), reward=None, rewards={})).reward == 0.0


@pytest.mark.parametrize(
    "conversation", [{"rewards": [0.0]}, {"over": "length"}, {"failed": "broken", "rewards": [0.0]}]
)
def test_episodes_that_were_given_something_or_cut_off_are_none_of_these(
    conversation: dict[str, Any],
) -> None:
    rewards = EnvironmentReward(CONFIG, [])
    assert noted(rewards, 20, **conversation) == []
    assert noted(EnvironmentReward(CONFIG, ["math"]), 20) == []


class Gives(Says):
    """Ends with a reward."""

    def __init__(self, reward: Any) -> None:
        super().__init__()
        self._reward = reward

    async def step(self, reply: Message) -> Turn:
        return Turn(done=True, reward=self._reward)


@pytest.mark.parametrize(
    ("given", "reward"),
    [(True, 1.0), (np.float32(0.5), 0.5), (Decimal("0.5"), 0.5), (np.array(2), 2.0), (None, None)],
)
def test_a_turn_s_reward_is_a_number_of_any_kind(given: Any, reward: float | None) -> None:
    answer = talk("qwen3", Gives(given), "Done.")[-1]
    assert (answer.reward, answer.error) == (reward, "")


@pytest.mark.parametrize("given", ["1", (1.0,), {"score": 1}, np.array([1.0, 2.0]), 10**400, 1j])
def test_a_turn_s_reward_that_is_none_is_named(given: Any) -> None:
    answer = talk("qwen3", Gives(given), "Done.")[-1]
    assert answer.error == f"step gave a reward of {type(given).__name__}, not a number"


class Concludes(Gives):
    """Has a reward for the episode as a whole too."""

    async def final_reward(self) -> float:
        return 0.25


def test_the_reward_of_an_episode_as_a_whole_is_added_to_its_last_turn_s() -> None:
    rewards = [talk("qwen3", Concludes(given), "Done.")[-1].reward for given in (0.5, None)]
    assert rewards == [0.75, 0.25]


def test_a_reward_of_another_trainer_s_is_named_too() -> None:
    for given in (10**400, "much", [1.0]):
        with pytest.raises(EpisodeError, match=r"the reward of step is .*, not a number"):
            number(given, "the reward of step")
