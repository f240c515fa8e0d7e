"""Problems that a short Python function solves, with their tests; made by a generator.

Each asks for ``f(n)``: the sum, the number or the largest of some terms over a range with a step
and a condition. There are about 50,000 of them; a quarter, by a hash, is held out.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

SUM, LARGEST, COUNT = "the sum of ", "the largest ", "the number of "
_BUCKETS = 4
_TESTED = range(30, 90)
_MOST_DRAWS = 200_000


@dataclass(frozen=True, slots=True)
class Problem:
    """``operation`` of a term for i from ``start`` to n in steps of ``step``.

    The term is i, or i ``operator`` ``operand``. With a ``divisor`` only those i count that it
    divides, or (``divides`` false) does not divide.
    """

    operation: str
    operator: str
    operand: str
    start: int
    step: int
    divisor: int
    divides: bool

    @property
    def term(self) -> str:
        """As Python writes it."""
        return f"i {self.operator} {self.operand}" if self.operator else "i"

    def question(self) -> str:
        """The prompt."""
        where = ""
        if self.divisor:
            where = f" where {self.divisor} {'divides i' if self.divides else 'does not divide i'}"
        return (
            f"Write f(n): {self.operation}{self.term} for i from {self.start} "
            f"to n in steps of {self.step}{where}.\n"
        )

    def counted(self, n: int) -> list[int]:
        """The values of i that count."""
        values = range(self.start, n + 1, self.step)
        return [i for i in values if not self.divisor or (i % self.divisor == 0) == self.divides]

    def answer(self, n: int) -> int:
        """What ``f(n)`` must return; the largest of nothing is 0."""
        terms = [self._value(i) for i in self.counted(n)]
        if self.operation == COUNT:
            return len(terms)
        return sum(terms) if self.operation == SUM else max(terms, default=0)

    def _value(self, i: int) -> int:
        other = i if self.operand == "i" else int(self.operand or 0)
        return i * other if self.operator == "*" else i + other

    def tests(self) -> list[dict[str, Any]]:
        """Two calls, at arguments that count themselves, which tells < from <=."""
        ends = [i for i in self.counted(_TESTED.stop) if i >= _TESTED.start]
        arguments = (ends[0], ends[-1])
        return [{"call": "f", "args": [n], "expected": self.answer(n)} for n in arguments]


def draw(rng: random.Random) -> Problem:
    """A random problem that has terms to count in the tested range."""
    while True:
        operation = rng.choice((SUM, LARGEST, COUNT))
        operators = (("", ""), ("*", "i"), ("*", _digit(rng, 2)), ("+", _digit(rng, 1)))
        operator, operand = ("", "") if operation == COUNT else rng.choice(operators)
        divisor = rng.choice((0, rng.randint(2, 9)))
        problem = Problem(
            operation=operation,
            operator=operator,
            operand=operand,
            start=rng.randint(0, 9),
            step=rng.randint(1, 9),
            divisor=divisor,
            divides=bool(divisor) and rng.random() < 0.5,
        )
        if problem.counted(_TESTED.stop)[-1:] >= [_TESTED.start]:
            return problem


def _digit(rng: random.Random, least: int) -> str:
    return str(rng.randint(least, 9))


def is_heldout(problem: Problem) -> bool:
    """Whether the problem belongs to the held-out quarter."""
    digest = hashlib.blake2b(problem.question().encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") % _BUCKETS == 0


def train_problems(size: int, seed: int) -> list[Problem]:
    """Distinct problems to train on. Raises ``ValueError`` when there are fewer than ``size``."""
    return _distinct(size, seed, heldout=False)


def train_rows(size: int = 2000, seed: int = 0) -> list[dict[str, Any]]:
    """``train_problems`` as rows: ``id``, ``prompt``, ``tests``."""
    return [_row(problem) for problem in train_problems(size, seed)]


def heldout_rows(size: int = 256, seed: int = 0) -> list[dict[str, Any]]:
    """Rows of distinct problems that are never trained on."""
    return [_row(problem) for problem in _distinct(size, seed, heldout=True)]


def _distinct(size: int, seed: int, *, heldout: bool) -> list[Problem]:
    found = list(islice(_draws(seed, heldout=heldout), size))
    if len(found) < size:
        raise ValueError(f"there are only {len(found)} such problems, asked for size={size}")
    return found


def _draws(seed: int, *, heldout: bool) -> Iterator[Problem]:
    rng = random.Random(seed)
    seen = set[Problem]()
    for _ in range(_MOST_DRAWS):
        problem = draw(rng)
        if problem not in seen and is_heldout(problem) == heldout:
            seen.add(problem)
            yield problem


def _row(problem: Problem) -> dict[str, Any]:
    question = problem.question()
    name = hashlib.blake2b(question.encode(), digest_size=6).hexdigest()
    return {"id": f"code-{name}", "prompt": question, "tests": problem.tests()}
