"""Whether an answer is right, and whether the tool was called rightly.

A response is the list of messages behind the question: what the model said and what tools answered.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Messages = Sequence[Mapping[str, Any]]

_NUMBER = re.compile(r"-?\d+")


def right(
    completions: Sequence[Messages],
    answer: Sequence[str],
    log_metric: Callable[[str, float], None],
    **_columns: Any,
) -> list[float]:
    """1 where the model's last message gives the answer, else 0.

    Logs ``tools/right_calls``: of the calls of each response that has some, the share that was
    answered with what the question asks for.
    """
    pairs = list(zip(completions, answer, strict=True))
    for messages, wanted in pairs:
        calls = _calls(messages, wanted)
        if calls:
            log_metric("tools/right_calls", sum(calls) / len(calls))
    return [float(final_number(messages) == wanted) for messages, wanted in pairs]


def final_number(messages: Messages) -> str | None:
    """The last number that the model's last message says; None where that one has none, or calls
    a tool."""
    last = messages[-1]
    if last["role"] != "assistant" or last.get("tool_calls") or last.get("bad_calls"):
        return None
    numbers = _NUMBER.findall(str(last["content"]))
    return numbers[-1] if numbers else None


def _calls(messages: Messages, wanted: str) -> list[bool]:
    """For each call whether its answer is the one that is wanted."""
    return [each["content"] == wanted for each in messages if each["role"] == "tool"]
