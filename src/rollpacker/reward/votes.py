"""What answers have in common that count as the same answer, for majority votes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rollpacker.config import RewardConfig
from rollpacker.reward.thinking import after_thinking


def voting(rewards: Sequence[RewardConfig]) -> tuple[str, Callable[[str], str]]:
    """By what responses to these rewards are counted, in words and as a function of the text.

    The first reward with an answer of its own decides: ``math`` or ``rg``. Without one, only
    equal texts are equal answers.
    """
    for reward in rewards:
        if reward.function == "math":
            return "the final answer, as it is read", _math
        if reward.function == "rg":
            return "the text after </think>", _after_thinking
    return "the whole text", str.strip


def _after_thinking(text: str) -> str:
    return after_thinking(text).strip()


def _math(text: str) -> str:
    """The final answer in one spelling; a text without one, whole."""
    # Here, so that votes on other rewards don't import math-verify.
    from rollpacker.reward.math.answer import read
    from rollpacker.reward.math.extract import extract

    found = extract(text)
    if found is None:
        return _after_thinking(text)
    answer = read(found.answer)
    return answer.choice or (str(answer.value) if answer.value is not None else answer.text)
