"""The mathematics reward.

It runs in a process's main thread only: its time limit is a signal.
"""

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
"""Keys under which a gold answer that is a mapping keeps it."""


@dataclass(frozen=True, slots=True)
class MathReport:
    """How a score came about.

    Args:
        score: 1 or 0.
        found: the response's final answer and where it stood; None where there is none.
        answer: what it says.
        golds: what the row's right answers say.
        why: the rule that decided.
    """

    score: float
    found: Extracted | None
    answer: MathAnswer | None
    golds: tuple[MathAnswer, ...]
    why: str


class MathReward:
    """1 where the final answer equals the row's ``answer``, else 0.

    ``extract`` finds the final answer in the text after ``</think>``, ``read`` makes both sides
    one spelling, ``compare`` says whether they are equal. An answer that cannot be compared
    within ``time_limit`` was not shown to be right and scores 0.

    A row's ``answer`` is text or a number, a mapping with it under ``value``, or a list: answers
    that are equal to one another are spellings, different ones are all wanted.

    Args:
        require_boxed: score 0 where there is no ``\\boxed{}``.
        time_limit: CPU seconds for a response.
    """

    def __init__(self, require_boxed: bool = False, time_limit: float = 5.0) -> None:
        if time_limit <= 0:
            raise ValueError(f"rewards: option 'time_limit' must be positive, got {time_limit}")
        # It warns that its own time limit is off.
        logging.getLogger("math_verify").setLevel(logging.ERROR)
        self._require_boxed = require_boxed
        self._time_limit = time_limit

    def __call__(
        self, completion: str, row: Mapping[str, Any], unwanted: Callable[[], bool] = lambda: False
    ) -> float:
        """The score of one response.

        Args:
            completion: the response.
            row: the data row, which has the ``answer``.
            unwanted: asked four times in a CPU second whether nobody waits for the score any
                more, which ends the comparison.

        Raises ``GradingError`` when the row has no answer.
        """
        return self.explain(completion, row, unwanted).score

    def explain(
        self, completion: str, row: Mapping[str, Any], unwanted: Callable[[], bool] = lambda: False
    ) -> MathReport:
        """The score and how it came about; arguments and errors are a call's."""
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
                # A letter behind a number is a variable where the gold answer has letters.
                answer = read(found.answer, all(gold.value is not None for gold in golds))
                decided = _decide(golds, answer)
                return MathReport(float(decided.equal), found, answer, golds, decided.why)
        except (RecursionError, OverflowError) as error:
            return MathReport(0.0, found, None, (), f"cannot be compared: {error}")
        except _OutOfTimeError:
            why = f"not compared within {self._time_limit:g} CPU seconds (options.time_limit)"
            return MathReport(0.0, found, None, (), why)


def _texts(gold: Any) -> tuple[str, ...]:
    """The row's right answers as texts."""
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
            f"reward 'math': 'answer' is a mapping with {', '.join(sorted(map(str, known)))}; "
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
    """What is written as JSON or, as pandas writes it, as Python's list of texts."""
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
    """What counts as right: several where they are spellings of one answer."""
    golds = tuple(read(of_gold(text)) for text in texts)
    chosen = sum(gold.choice is not None and not gold.text for gold in golds)
    if len(golds) == 2 and chosen == 1:
        return golds  # a letter and what stands behind it
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
    """Not an ``Exception``: sympy catches those."""


@contextmanager
def _cpu_limit(seconds: float, unwanted: Callable[[], bool]) -> Iterator[None]:
    # Asking is a sign of life to whoever waits in wall seconds.
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
