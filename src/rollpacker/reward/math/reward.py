"""The mathematics reward. It needs a process's main thread: its time limit is a signal."""

from __future__ import annotations

import ast
import json
import logging
import re
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from math import isnan
from typing import Any, cast

from rollpacker.reward.base import GradingError
from rollpacker.reward.math.answer import MathAnswer, read
from rollpacker.reward.math.compare import Equality, compare
from rollpacker.reward.math.extract import BOX, Extracted, extract, of_gold

_ASKED_EVERY_S = 0.25
_VERDICT = re.compile("yes|no|true|false", re.IGNORECASE)
_VALUES = ("value", "answer", "ground_truth", "target", "solution")
"""Keys of the answer in a gold answer that is a mapping."""


@dataclass(frozen=True, slots=True)
class MathReport:
    """How a score came about. ``found``: the response's final answer, if any. ``answer`` and
    ``golds``: both sides as they were read. ``why``: the rule that decided."""

    score: float
    found: Extracted | None
    answer: MathAnswer | None
    golds: tuple[MathAnswer, ...]
    why: str


class MathReward:
    """1 if the final answer equals the row's ``answer``, else 0.

    The final answer comes from the text after ``</think>``. An answer that cannot be compared
    within ``time_limit`` scores 0.

    A row's ``answer`` is text, a number, a mapping with one of these under ``value``, or a list.
    Equal answers in a list are spellings of one answer. Different answers are all required.

    Args:
        require_boxed: score 0 if there is no ``\\boxed{}``.
        time_limit: CPU seconds for a response.
    """

    def __init__(self, require_boxed: bool = False, time_limit: float = 5.0) -> None:
        if time_limit <= 0:
            raise ValueError(f"rewards: option 'time_limit' must be positive, got {time_limit}")
        # math-verify warns that its own time limit is off.
        logging.getLogger("math_verify").setLevel(logging.ERROR)
        self._require_boxed = require_boxed
        self._time_limit = time_limit

    def __call__(
        self, completion: str, row: Mapping[str, Any], unwanted: Callable[[], bool] = lambda: False
    ) -> float:
        """Return the score of one response. Raises ``GradingError`` if the row has no answer.
        ``unwanted`` is called four times in a CPU second. True ends the comparison."""
        return self.explain(completion, row, unwanted).score

    def explain(
        self, completion: str, row: Mapping[str, Any], unwanted: Callable[[], bool] = lambda: False
    ) -> MathReport:
        """Return the score and how it came about. Arguments and errors are those of a call."""
        wanted = _texts(row.get("answer"))
        found: Extracted | None = None
        try:
            with _cpu_limit(self._time_limit, unwanted):
                golds = _golds(wanted)
                verdicts = all(_VERDICT.fullmatch(gold.text) for gold in golds)
                found = extract(completion, verdicts)
                if found is None or (self._require_boxed and found.rule != BOX):
                    missing = (
                        "no \\boxed{} (require_boxed)" if found else "no answer marked or stated"
                    )
                    return MathReport(0.0, found, None, golds, missing)
                # A letter behind a number is a variable if the gold answer has letters.
                answer = read(found.answer, all(gold.value is not None for gold in golds))
                decided = _decide(golds, answer)
                return MathReport(float(decided.equal), found, answer, golds, decided.why)
        except (RecursionError, OverflowError) as error:
            return MathReport(0.0, found, None, (), f"cannot be compared: {error}")
        except _OutOfTimeError:
            why = f"not compared within {self._time_limit:g} CPU seconds (options.time_limit)"
            return MathReport(0.0, found, None, (), why)


def _texts(gold: Any) -> tuple[str, ...]:
    gold = gold.tolist() if hasattr(gold, "tolist") else gold
    if gold is None or (isinstance(gold, float) and isnan(gold)):
        raise GradingError("reward 'math' needs rows with an 'answer'")
    if isinstance(gold, str):
        if not gold.strip() or gold.strip().lower() == "nan":
            raise GradingError(
                "reward 'math' needs rows with an 'answer': this one is empty, or NaN"
            )
        listed = _from_json(gold)
        return (gold,) if listed is None else _texts(listed)
    if isinstance(gold, Mapping):
        known = cast("Mapping[str, Any]", gold)
        for key in _VALUES:
            if key in known:
                return _texts(known[key])
        raise GradingError(
            f"reward 'math': 'answer' is a mapping with {', '.join(sorted(map(str, known)))}, "
            f"expected one of {', '.join(_VALUES)} in it"
        )
    if isinstance(gold, Sequence | set | frozenset):
        texts = tuple(text for each in cast("Sequence[Any]", gold) for text in _texts(each))
        if not texts:
            raise GradingError("reward 'math': 'answer' is an empty list")
        return texts
    try:
        return (str(gold),)
    except ValueError as error:  # an integer of thousands of digits
        raise GradingError(f"reward 'math': 'answer': {error}") from None


def _from_json(gold: str) -> Any:
    # JSON, or Python's list of texts as pandas writes it.
    gold = gold.strip()
    try:
        if gold.startswith(('["', '{"')):
            return json.loads(gold)
        if gold.startswith("['") and gold.endswith("']"):
            return ast.literal_eval(gold)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        pass
    return None


@lru_cache(maxsize=4096)
def _golds(texts: tuple[str, ...]) -> tuple[MathAnswer, ...]:
    golds = tuple(read(of_gold(text)) for text in texts)
    chosen = sum(gold.choice is not None and not gold.text for gold in golds)
    if len(golds) == 2 and chosen == 1:
        return golds  # a letter and the content of its choice
    if len(golds) == 1 or all(compare(golds[0], other).equal for other in golds[1:]):
        return golds
    return (MathAnswer(", ".join(gold.text for gold in golds), items=golds),)


def _decide(golds: Sequence[MathAnswer], answer: MathAnswer) -> Equality:
    decided = Equality(False, "")
    for gold in golds:
        decided = compare(gold, answer)
        if decided.equal:
            break
    return decided


class _OutOfTimeError(BaseException):
    """Not an ``Exception``, because sympy catches those."""


@contextmanager
def _cpu_limit(seconds: float, unwanted: Callable[[], bool]) -> Iterator[None]:
    # ``unwanted`` is also a sign of life for the driver, whose limit is in wall seconds.
    every = min(seconds, _ASKED_EVERY_S)
    left = seconds

    def tick(_signal: int, _frame: object) -> None:
        nonlocal left
        left -= every
        if left <= 1e-9 or unwanted():
            raise _OutOfTimeError

    before = signal.signal(signal.SIGPROF, tick)
    signal.setitimer(signal.ITIMER_PROF, every, every)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
