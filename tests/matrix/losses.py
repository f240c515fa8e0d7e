"""The loss of an on-policy update by the papers' formulas, from the table of samples alone.

Every probability ratio is 1 there, so that the loss is a sum of advantages.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import polars as pl
from matrix_runs import Ran

Rule = Literal["group", "none", "batch", "leave_one_out", "tokens", "responses"]
Mean = Literal["tokens", "responses", "constant"]
Group = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Rewards, lengths and which responses are in the loss."""


def expected_loss(
    ran: Ran,
    step: int,
    rule: Rule = "group",
    mean: Mean = "tokens",
    *,
    cap: int = 40,
    buffer: int = 0,
    penalty: float = 0.0,
    epsilon: float = 1e-6,
    least: float = 1e-3,
    masked: bool = False,
) -> float:
    """Loss of a step.

    Args:
        ran: the run.
        step: whose.
        rule: what centred rewards become.
        mean: of the update's tokens, its responses (each by its tokens), or ``cap`` a response.
        cap: longest response.
        buffer: DAPO's soft punishment begins so many tokens before the cap ...
        penalty: ... and is so large at it.
        epsilon: added to a standard deviation.
        least: range of the rewards below which a group counts as equal.
        masked: responses that were cut off are not in the loss.
    """
    groups: list[Group] = []
    for _, group in ran.kept.filter(pl.col("step") == step).group_by("prompt"):
        lengths = group["tokens"].to_numpy().astype(float)
        rewards = group["reward"].to_numpy().astype(float)
        if buffer:
            rewards = rewards - penalty * np.clip((lengths - (cap - buffer)) / buffer, 0.0, 1.0)
        ends = group["finish_reason"].to_numpy() == "stop"
        groups.append((rewards, lengths, ends | (not masked)))
    values = advantages(groups, rule, epsilon, least)
    lengths, inside = (np.concatenate([group[i] for group in groups]) for i in (1, 2))
    if mean == "responses":
        return float(-values.mean())
    divisor = lengths[inside].sum() if mean == "tokens" else cap * len(lengths)
    return float(-(values * lengths)[inside].sum() / divisor)


def advantages(groups: list[Group], rule: Rule, epsilon: float, least: float) -> np.ndarray:
    """Of all responses."""
    values = np.concatenate([_centred(rewards, rule, epsilon, least) for rewards, _, _ in groups])
    rewards, lengths = (np.concatenate([group[i] for group in groups]) for i in (0, 1))
    if rule == "batch":
        return values / (rewards.std(ddof=1) + epsilon)
    if rule == "responses":
        return values / (np.sqrt(np.mean(values**2)) + 1e-8)
    if rule == "tokens":
        mean = (values * lengths).sum() / lengths.sum()
        variance = (lengths * (values - mean) ** 2).sum() / (lengths.sum() - 1)
        return (values - mean) / np.sqrt(variance + 1e-8)
    return values


def _centred(rewards: np.ndarray, rule: Rule, epsilon: float, least: float) -> np.ndarray:
    if np.ptp(rewards) < least:
        return np.zeros(len(rewards))
    centred = rewards - rewards.mean()
    if rule == "group":
        return centred / (rewards.std(ddof=1) + epsilon)
    return centred * (len(rewards) / (len(rewards) - 1) if rule == "leave_one_out" else 1.0)
