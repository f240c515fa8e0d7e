"""What a program printed last is what its episode was worth."""

import pytest

from rollpacker.env.agent.outcome import verdict
from rollpacker.env.agent.program import Ending
from rollpacker.env.base import EpisodeError


def ended(stdout: str = "", stderr: str = "", code: int = 0) -> Ending:
    how = f"exited with code {code}"
    return Ending(code=code, how=how, stdout=stdout.encode(), stderr=stderr.encode())


@pytest.mark.parametrize(
    ("stdout", "reward", "metrics"),
    [
        ('{"reward": 0.5}\n', 0.5, {}),
        ('{"reward": 1}', 1.0, {}),
        (
            '{"reward": true, "hits": 3, "ok": false, "name": "x", "n": null}',
            1.0,
            {"hits": 3.0, "ok": 0.0},
        ),
        ('{"reward": 1, "loss": NaN, "huge": 1e999}', 1.0, {}),
        ('{"reward": null, "hits": 3}', None, {"hits": 3.0}),
        ("-0.25\n", -0.25, {}),
        ("7", 7.0, {}),
        ('{"reward": 1}\n{"reward": 2}\n', 2.0, {}),
        ('{"reward": 1}\ngood bye\n{"x": 1}\n[2]\n"3"\ntrue\nnull\n\n', 1.0, {}),
        ("", None, {}),
        ("the reward is 1\n", None, {}),
        ("[" * 100_000, None, {}),
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
    "reward", ['{"reward": NaN}', '{"reward": "1"}', "Infinity", '{"reward": [1]}', "1" + "0" * 400]
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
