"""What a program printed last is what its episode was worth."""

from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from case_files import read_table
from rollpacker.env.agent.environment import verdict
from rollpacker.env.agent.program import Ending
from rollpacker.env.base import EpisodeError


def ended(stdout: str = "", stderr: str = "", code: int = 0) -> Ending:
    how = f"exited with code {code}"
    return Ending(code=code, how=how, stdout=stdout.encode(), stderr=stderr.encode())


@pytest.mark.parametrize(
    ("stdout", "reward", "metrics"),
    [
        *read_table(__file__, "test_the_last_line_that_is_json_is_the_reward"),
        ("[" * 100_000, None, {}),
        ("{'reward': [" * 1000, None, {}),
    ],
)
def test_the_last_line_that_is_json_is_the_reward(
    stdout: str, reward: float | None, metrics: dict[str, float]
) -> None:
    assert verdict(ended(stdout), "a.py") == (reward, metrics)


def test_bytes_that_are_no_text_are_no_reward() -> None:
    ending = Ending(code=0, how="", stdout=b'{"reward": 1}\n\xff\xfe\x00{', stderr=b"")
    assert verdict(ending, "a.py") == (1.0, {})


@pytest.mark.parametrize(
    "reward",
    [
        *['{"reward": NaN}', '{"reward": "1"}', "Infinity", '{"reward": [1]}', "1" + "0" * 400],
        *['"1.0"', "'1.0'", "[1.0, {}]", "(1.0, {'n': 2})", '["1"]', '{"score": "1"}'],
        *["({'reward': 1.0}, 2)", "{'reward': 'x'}"],
    ],
)
def test_a_reward_that_is_no_number_fails(reward: str) -> None:
    with pytest.raises(EpisodeError, match=r"a\.py printed a reward that is no finite number"):
        verdict(ended(reward), "a.py")


def test_a_crash_is_told_with_its_last_words() -> None:
    stderr = "x\n" * 1000 + 'File "a.py", line 3\n  boom()\n\nKeyError: 3\n'
    with pytest.raises(EpisodeError) as failed:
        verdict(ended('{"reward": 1}', stderr, code=1), "a.py")
    assert (
        str(failed.value) == 'a.py exited with code 1: File "a.py", line 3 / boom() / KeyError: 3'
    )


def test_its_last_words_are_bounded() -> None:
    with pytest.raises(EpisodeError) as failed:
        verdict(ended(stderr="y" * 100_000, code=2), "a.py")
    assert len(str(failed.value)) < 400


def test_a_crash_without_words() -> None:
    with pytest.raises(EpisodeError, match=r"^a\.py exited with code 9$"):
        verdict(ended(code=9), "a.py")


@dataclass
class Half:
    """A number of another library."""

    def __float__(self) -> float:
        return 0.5


@pytest.mark.parametrize(
    ("result", "reward", "metrics"),
    [
        (None, None, {}),
        (True, 1.0, {}),
        (1, 1.0, {}),
        (np.float32(0.5), 0.5, {}),
        (np.array([0.5]), 0.5, {}),
        (np.bool_(True), 1.0, {}),
        (Decimal("0.5"), 0.5, {}),
        (Fraction(1, 2), 0.5, {}),
        (Half(), 0.5, {}),
        ({"score": 1}, 1.0, {}),
        ({"reward": np.float32(1), "n": np.int64(2), "nan": np.nan, "x": "y"}, 1.0, {"n": 2.0}),
        (MappingProxyType({"reward": None, "n": 1}), None, {"n": 1.0}),
    ],
)
def test_what_a_function_returns_is_its_reward(
    result: Any, reward: float | None, metrics: dict[str, float]
) -> None:
    ending = Ending(code=0, how="returned", stdout=b"", stderr=b"", result=result)
    assert verdict(ending, "a.py:solve") == (reward, metrics)


@pytest.mark.parametrize(
    ("result", "words"),
    [
        ("1.0", "it returned str, a reward that is no finite number: '1.0'"),
        ((1.0, {}), "it returned tuple, a reward that is no finite number"),
        (np.array([1.0, 2.0]), "it returned ndarray, a reward that is no finite number"),
        (10**400, "it returned int, a reward that is no finite number"),
        (float("nan"), "it returned float, a reward that is no finite number: nan"),
        (1j, "it returned complex, a reward"),
        ({"reward": (1.0,)}, "it returned dict, a reward that is no finite number: (1.0,)"),
        ({"answer": 1, 2: 3}, "no reward: none of its keys 'answer', 2 is 'reward'"),
        ({}, "it returned dict, no reward"),
    ],
)
def test_what_is_none_is_one_clear_error(result: Any, words: str) -> None:
    ending = Ending(code=0, how="returned", stdout=b"", stderr=b"", result=result)
    with pytest.raises(EpisodeError) as failed:
        verdict(ending, "a.py:solve")
    assert str(failed.value).startswith("a.py:solve: it returned ")
    assert words in str(failed.value)
