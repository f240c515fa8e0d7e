"""The mathematics reward: math-verify's symbolic comparison of the final answer.

It runs in the grading processes only: its time limit is a signal.
"""

from __future__ import annotations

import logging
import re
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from rollpacker.reward.base import GradingError

_EXTRACTION = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
_WRAPPERS = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_BOXED = re.compile(r"\\f?boxed\s*\{")
_SPACES = re.compile(r"(?:\\[,;: ]|\s|~)+")
_IGNORED = re.compile(r"\\!|\$|\.$")
_LETTER = re.compile(r"\((\w)\)")
_WORDS = re.compile(r"[a-z]{2,}( [a-z]+)*", re.IGNORECASE)


class MathReward:
    """1 where the final answer equals the row's ``answer``, else 0.

    The final answer is in the last ``\\boxed{}`` of the text after ``</think>``, or else what
    math-verify finds in that text. An answer that cannot be compared within ``time_limit`` was
    not shown to be right and scores 0.

    Args:
        require_boxed: score 0 where there is no ``\\boxed{}``.
        time_limit: CPU seconds for a comparison.
    """

    def __init__(self, require_boxed: bool = False, time_limit: float = 5.0) -> None:
        if time_limit <= 0:
            raise ValueError(f"rewards: option 'time_limit' must be positive, got {time_limit}")
        # It warns that its own time limit is off.
        logging.getLogger("math_verify").setLevel(logging.ERROR)
        self._require_boxed = require_boxed
        self._time_limit = time_limit

    def __call__(self, completion: str, row: Mapping[str, Any]) -> float:
        """The score of one response. Raises ``GradingError`` when the row has no answer."""
        gold = row.get("answer")
        if gold is None:
            raise GradingError("reward 'math' needs rows with an 'answer'")
        gold = final_answer(str(gold)) or str(gold).strip()
        text = completion.rpartition("</think>")[2]
        boxed = final_answer(text)
        if boxed is None and self._require_boxed:
            return 0.0
        answer = text if boxed is None else boxed
        if _same_text(answer, gold):
            return 1.0
        try:
            with _cpu_limit(self._time_limit):
                return float(_equal(gold, answer, boxed is not None))
        except _OutOfTimeError:
            return 0.0


def final_answer(text: str) -> str | None:
    """What is in the last complete ``\\boxed{}``, or after GSM8K's ``####``; None without."""
    for match in reversed(list(_BOXED.finditer(text))):
        end = _closing(text, match.end())
        if end is not None:
            return text[match.end() : end].strip()
    _, mark, after = text.rpartition("####")
    return after.strip() if mark else None


def _closing(text: str, start: int) -> int | None:
    depth = 1
    for place in range(start, len(text)):
        if text[place] == "{":
            depth += 1
        elif text[place] == "}":
            depth -= 1
            if depth == 0:
                return place
    return None


def _same_text(answer: str, gold: str) -> bool:
    """Equal but for spacing and font; words in any case (letters alone are variables)."""
    answer, gold = plain(answer), plain(gold)
    return answer == gold or (bool(_WORDS.fullmatch(gold)) and answer.lower() == gold.lower())


def plain(text: str) -> str:
    """An answer without what does not matter: spacing, font, a last point, brackets of a letter."""
    text = _SPACES.sub(" ", _WRAPPERS.sub(r"\1", text)).strip()
    text = _IGNORED.sub("", text)
    letter = _LETTER.fullmatch(text)
    return letter.group(1) if letter else text


def _equal(gold: str, answer: str, boxed: bool) -> bool:
    reference = _parse_gold(gold)
    # The limit is ours: math-verify's own is in wall seconds, which a busy machine stretches.
    found = parse(_delimited(answer) if boxed else answer, _EXTRACTION, parsing_timeout=0)
    return bool(reference and found) and verify(list(reference), found, timeout_seconds=0)


@lru_cache(maxsize=4096)
def _parse_gold(gold: str) -> tuple[Any, ...]:
    return tuple(parse(_delimited(gold), _EXTRACTION, parsing_timeout=0))


def _delimited(answer: str) -> str:
    return answer if "$" in answer else f"${answer}$"


class _OutOfTimeError(BaseException):
    """Not an ``Exception``: sympy catches those."""


@contextmanager
def _cpu_limit(seconds: float) -> Iterator[None]:
    def stop(_signal: int, _frame: object) -> None:
        raise _OutOfTimeError

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
