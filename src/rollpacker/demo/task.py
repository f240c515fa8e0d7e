"""The demo's task: reasoning-gym's ``gcd`` of two numbers, solved by subtraction in writing.

Euclid by subtraction takes a number of steps with a heavy tail, as tail batching needs. Half of the
problems need about 10 steps, the worst 98.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import islice
from typing import Any

from reasoning_gym.factory import create_dataset

LARGEST = 99  # numbers are in 1..LARGEST: two digits are enough
END_OF_THOUGHT = "</think>"
_BUCKETS = 4
_SEED_STRIDE = 1_000_003
_MOST_DRAWS = 60_000


def is_heldout(first: int, second: int) -> bool:
    """Whether the pair, in either order, belongs to the held-out quarter of all pairs."""
    low, high = sorted((first, second))
    digest = hashlib.blake2b(f"gcd/{low}/{high}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") % _BUCKETS == 0


def train_rows(size: int = 4000, seed: int = 0, least: int = 1) -> list[dict[str, Any]]:
    """Return distinct training prompts. No pair is held out, in any order.

    Args:
        least: fewest lines of reasoning, of six tokens each, that a problem needs.

    Raises ``ValueError`` if there are fewer than ``size`` (about 7,000 can be drawn, 400 of 32
    lines).
    """
    drawn = _draw(seed, heldout=False)
    return _take((row for row in drawn if len(steps(*row["metadata"]["numbers"])) >= least), size)


def heldout_rows(size: int = 400, seed: int = 0) -> list[dict[str, Any]]:
    """Return held-out problems, distinct as unordered pairs, in the form of ``train_rows``.
    Raises ``ValueError`` if there are fewer than ``size``."""
    return _take(_draw(seed, heldout=True), size)


def _draw(seed: int, *, heldout: bool) -> Iterator[dict[str, Any]]:
    # reasoning-gym seeds problem i with seed + i: neighbouring seeds would share their problems.
    problems = create_dataset(
        "gcd",
        max_numbers=2,
        max_value=LARGEST,
        seed=seed * _SEED_STRIDE,
        size=_MOST_DRAWS,
    )
    seen = set[tuple[int, int]]()
    for index in range(_MOST_DRAWS):
        entry = problems[index]
        first, second = entry["metadata"]["numbers"]
        key = (min(first, second), max(first, second)) if heldout else (first, second)
        if key in seen or is_heldout(first, second) != heldout:
            continue
        seen.add(key)
        yield {
            "id": f"gcd-{first}-{second}",
            "prompt": entry["question"],
            "rg_task": "gcd",
            **entry,
        }


def _take(rows: Iterator[dict[str, Any]], size: int) -> list[dict[str, Any]]:
    taken = list(islice(rows, size))
    if len(taken) < size:
        raise ValueError(f"gcd has only {len(taken)} such problems, asked for size={size}")
    return taken


def steps(first: int, second: int) -> list[tuple[int, int]]:
    """Return the states of Euclid's algorithm by subtraction, down to two equal numbers."""
    states = [(first, second)]
    while first != second:
        if first > second:
            first -= second
        else:
            second -= first
        states.append((first, second))
    return states


def chain_of_thought(first: int, second: int) -> str:
    """Return the worked solution: one line per state, then the answer. Numbers are written ones
    digit first, so that a borrow is known before the digit that it changes: ``52, 5`` starts
    with ``25 50``."""
    states = steps(first, second)
    lines = "".join(f"{_ones_first(a)} {_ones_first(b)}\n" for a, b in states)
    return f"{lines}{END_OF_THOUGHT}{states[-1][0]}"


def answer_at_once(first: int, second: int) -> str:
    """Return the answer without any thought."""
    return f"{END_OF_THOUGHT}{steps(first, second)[-1][0]}"


def _ones_first(number: int) -> str:
    return f"{number:02d}"[::-1]
