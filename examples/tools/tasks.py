"""Arithmetic that is too much for a small model: three numbers of two digits, two multiplied.

There are about 2.7 million questions; a quarter, by a hash, is held out.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

OPERATORS = ("*", "+", "-")
_SHAPES = (("*", "+"), ("*", "-"), ("+", "*"), ("-", "*"))
_SMALLEST, _LARGEST = 11, 98
_BUCKETS = 4
_MOST_DRAWS = 200_000


@dataclass(frozen=True, slots=True)
class Task:
    """``numbers`` with an operator between each two of them."""

    numbers: tuple[int, int, int]
    operators: tuple[str, str]

    @property
    def expression(self) -> str:
        """As the question has it: ``47 * 86 + 12``."""
        a, b, c = self.numbers
        return f"{a} {self.operators[0]} {b} {self.operators[1]} {c}"

    @property
    def question(self) -> str:
        """The prompt."""
        return f"What is {self.expression}?"

    @property
    def answer(self) -> int:
        """The value of the expression."""
        a, b, c = self.numbers
        if self.operators[0] == "*":
            return a * b + (c if self.operators[1] == "+" else -c)
        return a + (b * c if self.operators[0] == "+" else -b * c)


def draw(rng: random.Random) -> Task:
    """A random task."""
    a, b, c = (rng.randint(_SMALLEST, _LARGEST) for _ in range(3))
    return Task((a, b, c), rng.choice(_SHAPES))


def is_heldout(task: Task) -> bool:
    """Whether the task belongs to the held-out quarter."""
    digest = hashlib.blake2b(task.expression.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") % _BUCKETS == 0


def train_tasks(size: int, seed: int) -> list[Task]:
    """Distinct tasks to train on. Raises ``ValueError`` when fewer than ``size`` are found."""
    return _distinct(size, seed, heldout=False)


def train_rows(size: int = 2000, seed: int = 0) -> list[dict[str, Any]]:
    """``train_tasks`` as rows: ``id``, ``question``, ``answer``."""
    return [_row(task) for task in train_tasks(size, seed)]


def heldout_rows(size: int = 200, seed: int = 0) -> list[dict[str, Any]]:
    """Rows of distinct tasks that are never trained on."""
    return [_row(task) for task in _distinct(size, seed, heldout=True)]


def _distinct(size: int, seed: int, *, heldout: bool) -> list[Task]:
    found = list(islice(_draws(seed, heldout=heldout), size))
    if len(found) < size:
        raise ValueError(f"only {len(found)} such tasks are drawn, asked for size={size}")
    return found


def _draws(seed: int, *, heldout: bool) -> Iterator[Task]:
    rng = random.Random(seed)
    seen = set[Task]()
    for _ in range(_MOST_DRAWS):
        task = draw(rng)
        if task not in seen and is_heldout(task) == heldout:
            seen.add(task)
            yield task


def _row(task: Task) -> dict[str, Any]:
    name = hashlib.blake2b(task.expression.encode(), digest_size=6).hexdigest()
    return {"id": f"tools-{name}", "question": task.question, "answer": str(task.answer)}
