from pathlib import Path

import pytest

from case_files import read_table
from importing import module_of
from rollpacker.config import load
from rollpacker.core.types import AttemptId
from rollpacker.data.load import load_rows
from rollpacker.reward.base import GradeRequest
from rollpacker.reward.functions import resolve

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "smollm2"


@pytest.fixture
def config(monkeypatch):
    monkeypatch.chdir(ROOT)
    return load(EXAMPLE / "config.yaml")


def test_training_and_evaluation_share_no_question(config):
    train = load_rows(config.data).rows
    heldout = load_rows(config.eval.data).rows
    assert len({row.prompt for row in train}) == len(train) == 192
    assert len({row.prompt for row in heldout}) == len(heldout) == 200
    assert not {row.prompt for row in train} & {row.prompt for row in heldout}
    shots = {turn["content"] for turn in config.data.shots}
    assert not shots & {row.prompt for row in (*train, *heldout)}


def test_the_shots_are_right_answers_by_the_reward(config):
    score = resolve(config.rewards[0].function, config.rewards[0].options)
    for shot, gold in ((config.data.shots[1], "-4"), (config.data.shots[3], "8")):
        assert score([request(shot["content"], gold)]) == [1.1]


@pytest.mark.parametrize(("completion", "reward"), read_table(__file__, "test_reward"))
def test_reward(config, completion, reward):
    score = resolve(config.rewards[0].function, {})
    assert score([request(completion, "5")]) == [reward]


def test_more_problems_than_there_are_is_an_error():
    with pytest.raises(ValueError, match="asked for size=4000"):
        module_of(EXAMPLE / "tasks.py").train_rows(size=4000)


def request(completion: str, answer: str) -> GradeRequest:
    row = {"answer": answer, "rg_task": "chain_sum"}
    return GradeRequest(
        attempt=AttemptId(0), prompt="?", completion=completion, completion_ids=[], row=row
    )
