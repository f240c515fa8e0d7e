"""What a response says after it has thought: the part that built-in rewards read."""

from __future__ import annotations

OPEN, CLOSE = "<think>", "</think>"


def after_thinking(text: str) -> str:
    """The text after the last ``</think>``; without one, what stands before a ``<think>`` that was
    never closed, as in a response that was cut off, but for an ``<answer>`` in it.

    A model whose template opens the thinking writes no ``<think>``: all of it counts then.
    """
    after = text.rpartition(CLOSE)[2]
    before, opened, thought = after.rpartition(OPEN)
    if not opened:
        return after
    answer = thought.rfind("<answer>")
    return thought[answer:] if answer >= 0 else before
