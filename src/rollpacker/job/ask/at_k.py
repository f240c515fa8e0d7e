"""pass@k and maj@k of several answers to each problem."""

from __future__ import annotations

import itertools
import math
import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_EXACT = 2000
_DRAWS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class GradedAnswer:
    """One graded answer.

    Args:
        vote: what equal answers have in common.
        right: whether its reward counts as correct.
    """

    vote: str
    right: bool


def ks(count: int) -> list[int]:
    """The k to report of so many answers: powers of two, and all."""
    powers = itertools.takewhile(lambda k: k < count, (2**i for i in itertools.count()))
    return [*powers, count]


def pass_at(k: int, right: Sequence[bool]) -> float:
    """Probability that one of k answers, drawn without replacement, is right.

    The unbiased estimator 1 - C(n - c, k) / C(n, k) of Chen et al. (2021), "Evaluating Large
    Language Models Trained on Code".
    """
    wrong = len(right) - sum(right)
    return 1.0 - math.comb(wrong, k) / math.comb(len(right), k)


def maj_at(k: int, answers: Sequence[GradedAnswer]) -> float:
    """Probability that the most frequent of k answers, drawn without replacement, is right.

    Self-consistency (Wang et al., 2022). Among equally frequent ones each counts alike. Exact
    where there are few ways to draw k, else the mean of 1,000 draws, always the same ones.
    """
    if math.comb(len(answers), k) <= _EXACT:
        draws: Iterable[Sequence[GradedAnswer]] = itertools.combinations(answers, k)
    else:
        rng = random.Random(0)
        draws = (rng.sample(answers, k) for _ in range(_DRAWS))
    results = [_elected(draw) for draw in draws]
    return sum(results) / len(results)


def _elected(answers: Sequence[GradedAnswer]) -> float:
    votes: dict[str, list[bool]] = defaultdict(list)
    for answer in answers:
        votes[answer.vote].append(answer.right)
    most = max(len(right) for right in votes.values())
    winners = [sum(right) / most for right in votes.values() if len(right) == most]
    return sum(winners) / len(winners)
