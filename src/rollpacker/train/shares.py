"""Which micro-batches of a replica each of its members runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollpacker.train.model.packing import Item, MicroBatch


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatchShare:
    """One micro-batch of a member; those that do not count are run for the others' sake only."""

    items: list[Item]
    batch: MicroBatch
    counts: bool


def deal(plans: Sequence[list[Item]], member: int, members: int) -> list[tuple[list[Item], bool]]:
    """The micro-batches of one of ``members``, and whether they count.

    Every member has equally many, since each layer's weights are gathered from all of them.
    Neighbours, which are alike in length, run at the same time. Where the number does not come
    out even the largest ones are cut; where that is not enough a micro-batch is repeated.
    """
    dealt = _evened(plans, members)
    mine = [(plan, True) for plan in dealt[member::members]]
    rounds = -(-len(dealt) // members)
    if len(mine) < rounds:
        mine.append((min(dealt, key=_tokens), False))
    return mine


def _evened(plans: Sequence[list[Item]], members: int) -> list[list[Item]]:
    result = list(plans)
    while len(result) % members:
        number = max(range(len(result)), key=lambda n: (len(result[n]) > 1, _tokens(result[n])))
        if len(result[number]) == 1:
            break
        result[number : number + 1] = _halves(result[number])
    return result


def _halves(plan: list[Item]) -> list[list[Item]]:
    """Two parts of about as many tokens, in order."""
    half, seen = _tokens(plan) / 2, 0
    for cut, item in enumerate(plan[:-1], start=1):
        seen += _tokens([item])
        if seen >= half:
            return [plan[:cut], plan[cut:]]
    return [plan[:-1], plan[-1:]]


def _tokens(plan: list[Item]) -> int:
    return sum(item.prompt_length + item.inputs for item in plan)
