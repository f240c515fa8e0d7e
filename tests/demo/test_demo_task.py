import math

import pytest
import reasoning_gym
from hypothesis import given
from hypothesis import strategies as st

from rollpacker.config import DataConfig
from rollpacker.data.load import load_rows
from rollpacker.demo.task import (
    answer_at_once,
    chain_of_thought,
    heldout_rows,
    is_heldout,
    steps,
    train_rows,
)
from rollpacker.reward.task import TaskReward

NUMBERS = st.integers(1, 99)


def pair(row) -> tuple[int, int]:
    first, second = row["metadata"]["numbers"]
    return first, second


@pytest.fixture(scope="module")
def train():
    return train_rows(size=4000, seed=3)


@pytest.fixture(scope="module")
def heldout():
    return heldout_rows(size=450, seed=0)


def test_no_heldout_pair_is_trained_on_in_either_order(train, heldout):
    held = {frozenset(pair(row)) for row in heldout}
    assert len(held) == len(heldout) == 450
    assert not held & {frozenset(pair(row)) for row in train}


def test_training_prompts_and_ids_are_distinct(train):
    assert len({row["prompt"] for row in train}) == len({row["id"] for row in train}) == 4000


def test_rows_are_a_function_of_the_seed():
    assert train_rows(50, seed=1) == train_rows(50, seed=1)
    prompts = [{row["prompt"] for row in train_rows(50, seed=seed)} for seed in (1, 2)]
    assert len(prompts[0] & prompts[1]) < 10


def test_too_many_rows_are_refused_with_the_number_that_exists():
    with pytest.raises(
        ValueError, match=r"gcd has only 1\d\d\d such problems, asked for size=5000"
    ):
        heldout_rows(size=5000)
    with pytest.raises(ValueError, match="only 415 such problems"):
        train_rows(size=500, least=32)


@given(NUMBERS, NUMBERS)
def test_the_split_ignores_order(first, second):
    assert is_heldout(first, second) == is_heldout(second, first)


@given(NUMBERS, NUMBERS)
def test_steps_keep_the_gcd_and_end_in_it(first, second):
    states = steps(first, second)
    assert {math.gcd(*state) for state in states} == {math.gcd(first, second)}
    assert states[-1] == (math.gcd(first, second),) * 2
    assert len(states) <= 99


def test_chain_of_thought_is_written_ones_digit_first():
    assert chain_of_thought(7, 21) == "70 12\n70 41\n70 70\n</think>7"
    assert answer_at_once(52, 5) == "</think>1"


def test_both_solutions_satisfy_reasoning_gym_and_truncated_ones_do_not(heldout):
    reward = TaskReward(require_think_end=True)
    for row in heldout[:40]:
        full = chain_of_thought(*pair(row))
        assert reward(full, row) == reward(answer_at_once(*pair(row)), row) == 1.0
        assert reward(full.partition("</think>")[0], row) == 0.0
        assert reward(full + "0", row) < 0.99


def test_rows_are_entries_of_the_reasoning_gym_task(heldout):
    scorer = reasoning_gym.create_dataset("gcd", size=1, seed=0)
    assert all(scorer.score_answer(row["answer"], row) == 1.0 for row in heldout)


def test_the_data_loader_takes_them_by_name():
    config = DataConfig(
        path="rollpacker.demo.task:train_rows", options={"size": 20, "seed": 5}, chat=False
    )
    rows = load_rows(config).rows
    assert [row.id for row in rows] == [row["id"] for row in train_rows(20, seed=5)]
    assert rows[0].prompt == rows[0].columns["question"]
    assert rows[0].columns["rg_task"] == "gcd"
