"""Short sums (reasoning-gym's ``chain_sum``) and the reward that SmolLM2 is trained on.

There are only 4,200 sums of two or three digits, so a quarter of them is held out by a hash of
the sum, and none is drawn twice.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any

import reasoning_gym

_TASK = {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1}
_SHOTS = {"4 - 1 - 7", "5 + 3"}
"""The worked examples in config.yaml; never drawn."""
_BUCKETS = 4
_SEED_STRIDE = 1_000_003
_MOST_DRAWS = 20_000
_ANSWER = re.compile(r"Answer:\s*(-?\d+)")
_WELL_FORMED = re.compile(r"Answer: -?\d+\Z")
_FORMAT_BONUS = 0.1
_SCORER = reasoning_gym.create_dataset("chain_sum", **_TASK, size=1, seed=0)


def train_rows(size: int = 1000, seed: int = 0) -> list[dict[str, Any]]:
    """Distinct training problems. Raises ``ValueError`` when there are fewer than ``size``."""
    return _rows(size, seed, heldout=False)


def eval_rows(size: int = 200, seed: int = 0) -> list[dict[str, Any]]:
    """Distinct problems whose questions are never trained on; raises like ``train_rows``."""
    return _rows(size, seed, heldout=True)


def _rows(size: int, seed: int, *, heldout: bool) -> list[dict[str, Any]]:
    # reasoning-gym seeds problem i with seed + i: neighbouring seeds would share their problems.
    problems = reasoning_gym.create_dataset(
        "chain_sum", **_TASK, size=_MOST_DRAWS, seed=seed * _SEED_STRIDE
    )
    rows: list[dict[str, Any]] = []
    seen = set(_SHOTS)
    for index in range(_MOST_DRAWS):
        if len(rows) == size:
            break
        entry = problems[index]
        expression = entry["metadata"]["expression"]
        if expression in seen or _is_heldout(expression) != heldout:
            continue
        seen.add(expression)
        name = f"sum-{expression.replace(' ', '')}"
        rows.append({"id": name, "prompt": entry["question"], "rg_task": "chain_sum", **entry})
    if len(rows) < size:
        raise ValueError(f"chain_sum has only {len(rows)} such problems, asked for size={size}")
    return rows


def _is_heldout(expression: str) -> bool:
    digest = hashlib.blake2b(expression.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") % _BUCKETS == 0


def correct_and_well_formed(
    completions: list[str], answer: list[str], **_: list[Any]
) -> list[float]:
    """1 for the right number after the last ``Answer:``, plus 0.1 if nothing comes after it."""
    return [_reward(text.strip(), gold) for text, gold in zip(completions, answer, strict=True)]


def _reward(text: str, gold: str) -> float:
    given = _ANSWER.findall(text)
    score = _SCORER.score_answer(given[-1], {"answer": gold}) if given else 0.0
    return float(score >= 0.99) + (_FORMAT_BONUS if _WELL_FORMED.search(text) else 0.0)
