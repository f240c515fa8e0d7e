"""Options that meet each other: few configurations in which every pair of values occurs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

MODE = "rollout.tail_batching.mode"
OPTIONS: dict[str, tuple[Any, ...]] = {
    MODE: ("exact", "off", "race", "prompts", "partial", "auto"),
    "train.algorithm.kind": ("grpo", "reinforce_pp", "gspo"),
    "rollout.tail_batching.long_round_steps": (1, 2),
    "rollout.tail_batching.audit_every": (0, 1),
    "rollout.streaming.enabled": (True, False),
    "rollout.streaming.scaling": ("consolidate", "fixed"),
    "rollout.dynamic_sampling.enabled": (False, True),
    "grading.asynchronous": (None, False),
    "rewards.0.needs_group": (False, True),
    "train.updates_per_step": (1, 2),
    "train.beta": (0.0, 0.1),
    "train.packing": ("padded", "prompt_shared"),
    "train.gradient_checkpointing": (False, True),
    "model.dtype": ("float32", "bfloat16"),
    "model.lora_rank": (0, 4),
    "devices.per_node": (1, 2),
    "deterministic": (False, True),
}

Row = dict[str, Any]
Pair = tuple[tuple[str, Any], tuple[str, Any]]

_TRIES = 16


def pairs(row: Row) -> set[Pair]:
    """Those that occur in a configuration."""
    return set(itertools.combinations(row.items(), 2))


def every_pair() -> set[Pair]:
    return {
        ((one, a), (two, b))
        for one, two in itertools.combinations(OPTIONS, 2)
        for a in OPTIONS[one]
        for b in OPTIONS[two]
    }


def covering(valid: Callable[[Row], bool], seed: int) -> tuple[list[Row], list[Row]]:
    """Valid configurations that hold every pair that can be had, and one with each other pair.

    Greedy: of some random valid rows with a pair that is missing, the one with the most of them.
    """
    rng = random.Random(seed)
    missing = every_pair()
    chosen: list[Row] = []
    refused: list[Row] = []
    while missing:
        pair = min(missing, key=repr)
        rows = [row for row in _drawn(pair, rng) if valid(row)]
        if not rows:
            rows = list(itertools.islice(filter(valid, _near(pair)), 1))
        if rows:
            chosen.append(max(rows, key=lambda row: len(pairs(row) & missing)))
            missing -= pairs(chosen[-1])
        else:
            refused.append(_usual(pair))
            missing.remove(pair)
    return chosen, refused


def _usual(pair: Pair) -> Row:
    """Everything else has its default."""
    return {name: values[0] for name, values in OPTIONS.items()} | dict(pair)


def _near(pair: Pair) -> Iterator[Row]:
    """Those that differ from the usual one in one option."""
    yield _usual(pair)
    for name, values in OPTIONS.items():
        if name not in dict(pair):
            yield from (_usual(pair) | {name: value} for value in values[1:])


def _drawn(pair: Pair, rng: random.Random) -> Iterator[Row]:
    for _ in range(_TRIES):
        row = {name: rng.choice(values) for name, values in OPTIONS.items()} | dict(pair)
        yield {name: row[name] for name in OPTIONS}
