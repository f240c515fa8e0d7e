"""Short sums (reasoning-gym's ``chain_sum``) and the reward that SmolLM2 is trained on.

There are only 200 sums of two digits and 4,000 of three: half of the former and a quarter of the
latter are held out by a hash of the sum, none is drawn twice, and the two kinds take turns.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterator
from typing import Any

import reasoning_gym

_DIGITS = {"min_digits": 1, "max_digits": 1}
_SHOTS = {"4 - 1 - 7", "5 + 3"}
"""The worked examples in config.yaml; never drawn."""
_HELD_OUT = {2: 2, 3: 4}
"""Terms of a sum: one in so many is held out."""
_SEED_STRIDE = 1_000_003
_MOST_DRAWS = 20_000
_ANSWER = re.compile(r"Answer:\s*(-?\d+)")
_WELL_FORMED = re.compile(r"Answer: -?\d+\Z")
_FORMAT_BONUS = 0.1
_SCORER = reasoning_gym.create_dataset("chain_sum", size=1, seed=0)


def train_rows(size: int = 1000, seed: int = 0) -> list[dict[str, Any]]:
    """Distinct training problems. Raises ``ValueError`` when there are fewer than ``size``."""
    return _rows(size, seed, heldout=False)


def eval_rows(size: int = 200, seed: int = 0) -> list[dict[str, Any]]:
    """Distinct problems whose questions are never trained on; raises like ``train_rows``."""
    return _rows(size, seed, heldout=True)


def _rows(size: int, seed: int, *, heldout: bool) -> list[dict[str, Any]]:
    kinds = [_sums(terms, seed, heldout=heldout) for terms in _HELD_OUT]
    turns = itertools.chain.from_iterable(itertools.zip_longest(*kinds))
    rows = list(itertools.islice((row for row in turns if row is not None), size))
    if len(rows) < size:
        raise ValueError(f"chain_sum has only {len(rows)} such problems, asked for size={size}")
    return rows


def _sums(terms: int, seed: int, *, heldout: bool) -> Iterator[dict[str, Any]]:
    # reasoning-gym seeds problem i with seed + i: neighbouring seeds would share their problems.
    problems = reasoning_gym.create_dataset(
        "chain_sum",
        min_terms=terms,
        max_terms=terms,
        **_DIGITS,
        size=_MOST_DRAWS,
        seed=seed * _SEED_STRIDE,
    )
    seen = set(_SHOTS)
    for index in range(_MOST_DRAWS):
        entry = problems[index]
        expression = entry["metadata"]["expression"]
        if expression in seen or _is_heldout(expression, terms) != heldout:
            continue
        seen.add(expression)
        name = f"sum-{expression.replace(' ', '')}"
        yield {"id": name, "prompt": entry["question"], "rg_task": "chain_sum", **entry}


def _is_heldout(expression: str, terms: int) -> bool:
    digest = hashlib.blake2b(expression.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") % _HELD_OUT[terms] == 0


def correct_and_well_formed(
    completions: list[str], answer: list[str], **_: list[Any]
) -> list[float]:
    """1 for the right number after the last ``Answer:``, plus 0.1 if nothing comes after it."""
    return [_reward(text.strip(), gold) for text, gold in zip(completions, answer, strict=True)]


def _reward(text: str, gold: str) -> float:
    given = _ANSWER.findall(text)
    score = _SCORER.score_answer(given[-1], {"answer": gold}) if given else 0.0
    return float(score >= 0.99) + (_FORMAT_BONUS if _WELL_FORMED.search(text) else 0.0)
