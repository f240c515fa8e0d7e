"""The reasoning-gym reward: the scorer of the row's own task, on the text after the thinking."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

import reasoning_gym

from rollpacker.reward.base import CLOSE, GradingError, after_thinking

_EVALUATED = {"string_insertion", "spiral_matrix", "binary_matrix", "n_queens"}
_PARSED = {
    "countdown",
    "intermediate_integration",
    "polynomial_multiplication",
    "puzzle24",
    "simple_integration",
}
_LITERAL_NODES = (
    ast.Expression,
    ast.Name,
    ast.Load,
    ast.Constant,
    ast.List,
    ast.Tuple,
    ast.Set,
    ast.Dict,
    ast.UnaryOp,
    ast.USub,
)
_FUNCTIONS = "sin cos tan cot sec csc asin acos atan sinh cosh tanh exp log ln sqrt Abs abs"
_CALL = re.compile(r"([^\W\d]\w*)\s*\(")
_NOT_ALGEBRA = re.compile(r"__|[\"'\[\]{}:;\\@`=]|\.\s*[^\W\d]|\b(lambda|import|for|if|await)\b")


class TaskReward:
    """Scores a response with ``dataset.score_answer`` of the row's reasoning-gym task.

    Args:
        require_think_end: score 0 if ``</think>`` is missing, as in a truncated response.
        answer_pattern: regular expression. The first group (or all) of its last match is the
            answer. No match scores 0. Default: all text after ``</think>``.
        threshold: scores of at least this become 1 and others 0. None keeps the scores.
        format_pattern: regular expression that a well-formed text ends in (blanks ignored).
        format_bonus: added to the score of a well-formed text.
    """

    def __init__(
        self,
        require_think_end: bool = False,
        answer_pattern: str | None = None,
        threshold: float | None = None,
        format_pattern: str | None = None,
        format_bonus: float = 0.0,
    ) -> None:
        self._require_think_end = require_think_end
        self._answer = _compiled("answer_pattern", answer_pattern)
        self._threshold = threshold
        self._format = _compiled("format_pattern", format_pattern and rf"(?:{format_pattern})\Z")
        self._bonus = format_bonus

    def __call__(self, completion: str, row: Mapping[str, Any]) -> float:
        if self._require_think_end and CLOSE not in completion:
            return 0.0
        text = after_thinking(completion).strip()
        bonus = self._bonus if self._format and self._format.search(text) else 0.0
        return self._score(text, row) + bonus

    def _score(self, text: str, row: Mapping[str, Any]) -> float:
        answer = _last_match(self._answer, text) if self._answer else text
        if answer is None:
            return 0.0
        score = score_answer(answer, row)
        return score if self._threshold is None else float(score >= self._threshold)


def score_answer(answer: str, row: Mapping[str, Any]) -> float:
    """Return reasoning-gym's score. Raises ``GradingError`` on a row of another source."""
    task = row.get("rg_task")
    if not isinstance(task, str):
        raise GradingError("reward 'rg' needs rows of an 'rg:<task>' dataset")
    if not harmless(task, answer):
        return 0.0
    entry = {name: row[name] for name in ("question", "answer", "metadata")}
    options = json.dumps(row.get("rg_options") or {}, sort_keys=True)
    return float(_dataset(task, options).score_answer(answer, entry))


@cache
def _dataset(task: str, options: str) -> Any:
    return reasoning_gym.create_dataset(task, **json.loads(options), size=1, seed=0)


def harmless(task: str, answer: str) -> bool:
    """Return whether the answer may go to the task's scorer. Some of them call ``eval`` or sympy's
    ``parse_expr``, so only literals and plain algebra may."""
    if task in _EVALUATED:
        try:
            tree = ast.parse(answer.strip(), mode="eval")
        except (SyntaxError, ValueError, MemoryError, RecursionError):
            return True  # eval refuses it in the same way
        return all(isinstance(node, _LITERAL_NODES) for node in ast.walk(tree))
    if task in _PARSED:
        calls = {match.group(1) for match in _CALL.finditer(answer)}
        return not _NOT_ALGEBRA.search(answer) and calls <= set(_FUNCTIONS.split())
    return True


def _compiled(name: str, pattern: str | None) -> re.Pattern[str] | None:
    try:
        return re.compile(pattern) if pattern else None
    except re.error as error:
        raise ValueError(f"rewards: option '{name}' is not a regular expression: {error}") from None


def _last_match(pattern: re.Pattern[str], text: str) -> str | None:
    match = None
    for match in pattern.finditer(text):  # noqa: B007
        pass
    if match is None:
        return None
    return match.group(1) if pattern.groups else match.group()
