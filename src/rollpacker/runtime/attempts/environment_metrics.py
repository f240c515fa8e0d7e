"""What a step's environments were like."""

from __future__ import annotations

import math
from collections.abc import Iterable

from rollpacker.runtime.attempts.attempts import Trajectory


def environment_metrics(attempts: Iterable[Trajectory]) -> dict[str, float]:
    """Means over responses that an environment took part in; nothing where there is none.

    ``environment/turns``, ``/wait_s`` (seconds in which it was waited for), ``/added_tokens``,
    ``/failed`` (share that it ended by failing) and its own metrics by name, where a value that is
    not finite counts for nothing; one that has a name of ours is ``environment/own/NAME``. Of
    tools, by TRL's names, ``tools/call_frequency`` (calls of a response) and
    ``tools/failure_frequency`` (share of calls that failed).
    """
    held = [a.conversation for a in attempts if a.conversation is not None]
    if not held:
        return {}
    own: dict[str, list[float]] = {}
    for conversation in held:
        for name, value in conversation.metrics.items():
            if math.isfinite(value):
                own.setdefault(name, []).append(value)
    calls = sum(conversation.calls for conversation in held)
    failed = sum(conversation.failed_calls for conversation in held)
    ours = {
        "environment/turns": sum(len(c.turns) for c in held) / len(held),
        "environment/wait_s": sum(c.wait_s for c in held) / len(held),
        "environment/added_tokens": sum(c.put_in for c in held) / len(held),
        "environment/failed": sum(bool(c.failed) for c in held) / len(held),
        "tools/call_frequency": calls / len(held),
        "tools/failure_frequency": failed / calls if calls else 0.0,
    }
    for name, values in sorted(own.items()):
        key = f"environment/{name}"
        ours[f"environment/own/{name}" if key in ours else key] = sum(values) / len(values)
    return ours
