import itertools
import math
import random

import pytest

from rollpacker.config import RewardConfig
from rollpacker.job.ask.assess import GradedAnswer, ks, maj_at, pass_at
from rollpacker.reward.functions import voting


def test_the_ks_are_powers_of_two_and_all():
    assert [ks(n) for n in (1, 2, 3, 8, 10)] == [
        [1],
        [1, 2],
        [1, 2, 3],
        [1, 2, 4, 8],
        [1, 2, 4, 8, 10],
    ]


@pytest.mark.parametrize("right", range(7))
def test_pass_at_k_is_what_drawing_k_of_n_gives(right):
    answers = [place < right for place in range(6)]
    for k in range(1, 7):
        draws = list(itertools.combinations(answers, k))
        assert pass_at(k, answers) == pytest.approx(sum(map(any, draws)) / len(draws))


def answers(*groups):
    return [
        GradedAnswer(vote=str(n), right=right)
        for n, (size, right) in enumerate(groups)
        for _ in [0] * size
    ]


def test_the_majority_decides_and_equals_share():
    assert maj_at(5, answers((3, True), (2, False))) == 1.0
    assert maj_at(5, answers((2, True), (3, False))) == 0.0
    assert maj_at(4, answers((2, True), (2, False))) == 0.5
    assert maj_at(3, answers((1, True), (1, False), (1, False))) == pytest.approx(1 / 3)
    # One answer is no majority: the accuracy.
    assert maj_at(1, answers((2, True), (3, False))) == pytest.approx(0.4)


def test_many_answers_are_drawn_from_always_alike():
    """C(24, 12) ways: the mean of draws, near the truth (hypergeometric)."""
    many = answers((13, True), (11, False))
    ways = {c: math.comb(13, c) * math.comb(11, 12 - c) / math.comb(24, 12) for c in range(1, 13)}
    truth = sum(p * (1.0 if c > 6 else 0.5 if c == 6 else 0.0) for c, p in ways.items())
    assert maj_at(12, many) == maj_at(12, many)
    assert maj_at(12, many) == pytest.approx(truth, abs=0.05)
    random.Random(1).shuffle(many)
    assert maj_at(24, many) == 1.0


@pytest.mark.parametrize(
    ("function", "one", "same", "other"),
    [
        (
            "math",
            "so \\boxed{\\text{12}}.",
            "<think>7</think> I say $\\boxed{ 12 }$",
            "\\boxed{13}",
        ),
        ("math", "That makes 1,200.", "8 times 150 is 1200", "It is 12"),
        ("rg", "let me see</think> 7\n", "</think>7", "7 or 8"),
        ("my.module:f", " 7 ", "7", "7."),
    ],
)
def test_votes_are_counted_by_the_answer_that_the_reward_reads(function, one, same, other):
    _, vote = voting([RewardConfig(function="code"), RewardConfig(function=function)])
    assert vote(one) == vote(same) != vote(other)
