"""What answers have in common that count as the same answer, for majority votes."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from rollpacker.config import RewardConfig

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def voting(rewards: Sequence[RewardConfig]) -> tuple[str, Callable[[str], str]]:
    """By what responses to these rewards are counted, in words and as a function of the text.

    The first reward with an answer of its own decides: ``math`` or ``rg``. Without one, only
    equal texts are equal answers.
    """
    for reward in rewards:
        if reward.function == "math":
            return "the final answer, as text", _math
        if reward.function == "rg":
            return "the text after </think>", _after_thinking
    return "the whole text", str.strip


def _after_thinking(text: str) -> str:
    return text.rpartition("</think>")[2].strip()


def _math(text: str) -> str:
    """Of the last ``\\boxed{}`` or ``####``, else the last number, else everything."""
    # Here, so that votes on other rewards don't import math-verify.
    from rollpacker.reward.math import final_answer, plain

    text = _after_thinking(text)
    answer = final_answer(text)
    if answer is None:
        numbers = _NUMBER.findall(text)
        answer = numbers[-1].replace(",", "") if numbers else text
    return plain(answer)
