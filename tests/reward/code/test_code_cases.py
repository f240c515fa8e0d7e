"""Responses as models write them, to rows as datasets have them: what each of them is worth.

``code.jsonl`` and ``code_more.jsonl`` were scored by common sense; ``code_kinds.jsonl`` has one
right answer of each kind that is supported, ``code_near_misses.jsonl`` wrong ones that a laxer rule
would let pass. The score of rows that are refused is null.
Programs without an end have ``timeouts_s`` of their own.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from rollpacker.core.types import AttemptId
from rollpacker.reward.base import GradeRequest, GradingError

if sys.platform != "linux":
    pytest.skip("the code sandbox needs Linux", allow_module_level=True)

from rollpacker.reward.code import CodeReward

CASES = Path(__file__).parents[1] / "cases"


@pytest.fixture(scope="module")
def reward() -> CodeReward:
    return CodeReward({"idle_s": 1.0})


def cases(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (CASES / name).open(encoding="utf-8")]


def score(reward: CodeReward, case: dict[str, Any]) -> float | None:
    request = GradeRequest(
        attempt=AttemptId(0),
        prompt="p",
        completion=case["response"],
        completion_ids=[],
        row=case["row"],
        timeouts_s=case.get("timeouts_s", ()),
    )
    try:
        return reward(request).score
    except GradingError as error:
        if "the row's tests cannot be read" not in str(error):
            raise
        return None


@pytest.mark.parametrize(
    "name", ["code.jsonl", "code_more.jsonl", "code_kinds.jsonl", "code_near_misses.jsonl"]
)
def test_what_people_bring_and_near_misses(reward: CodeReward, name: str) -> None:
    given = cases(name)
    assert [case["kind"] for case in given if score(reward, case) != case["score"]] == []
