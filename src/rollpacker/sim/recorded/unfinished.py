"""What a recorded response that was stopped would have become, told by those that were not."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rollpacker.sim.recorded.run_lanes import Tried
from rollpacker.sim.workload.turn_script import ScriptedTurn, Turns


def gone_on(
    tried: Tried, ended: Sequence[Sequence[Tried]], cap: int, rng: np.random.Generator
) -> Turns:
    """As far as it came, and from there as another one that went on for longer.

    One that was stopped while its environment had the word goes on as one that waited longer
    there: what loses a race by its tools is not short of tokens.

    Args:
        tried: the attempt.
        ended: responses that ended, those that are most like it first.
        cap: tokens of one that no other tells of.
        rng: chooses among them.
    """
    if tried.waited_s is None:
        known, current = tried.turns, tried.tokens - sum(turn.tokens for turn in tried.turns)
    else:
        known, current = tried.turns[:-1], 0
    for some in ended:
        longer = [turns for each in some if (turns := _longer(tried, len(known), each))]
        if longer:
            turn, *rest = longer[rng.choice(len(longer))]
            if tried.waited_s is not None and tried.turns:
                turn = turn._replace(tokens=tried.turns[-1].tokens)
            return (*known, turn, *rest)
    if tried.waited_s is None:
        return (*known, ScriptedTurn(max(1, current, cap - tried.tokens + current)))
    last = tried.turns[-1] if tried.turns else ScriptedTurn(0)
    return (*known, last._replace(tool_s=tried.waited_s), ScriptedTurn(1))


def whole(tried: Tried) -> Turns:
    """Of a response that ended."""
    return tuple(tried.turns) or (ScriptedTurn(max(1, tried.tokens)),)


def _longer(tried: Tried, number: int, other: Tried) -> Turns:
    """Another one's turns from this one's present one on; none where it was no longer there."""
    turns = whole(other)
    if len(turns) <= number:
        return ()
    rest = turns[number:]
    if tried.waited_s is not None:
        return rest if rest[0].tool_s > tried.waited_s else ()
    if not tried.turns and not tried.tokens:  # nothing is known of it
        return rest
    current = tried.tokens - sum(turn.tokens for turn in tried.turns)
    return rest if rest[0].tokens > current else ()
