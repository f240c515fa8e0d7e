"""What the model has read before reinforcement learning starts: programs of a mixed crowd.

Half of the authors write one expression; most of these forget that a range ends before its end.
The others write a loop, which some of them let run in the wrong direction, for ever. Anyone may
mix up the condition.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from problems import COUNT, LARGEST, Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """How often the authors do what.

    Args:
        loop: a ``while`` loop rather than one expression.
        short_expression: the end of the range is left out of an expression.
        short_loop: it is left out of a loop.
        inverted: the condition is turned round.
        backwards: a loop counts down, for ever.
    """

    loop: float = 0.5
    short_expression: float = 0.55
    short_loop: float = 0.15
    inverted: float = 0.2
    backwards: float = 0.12


def program(problem: Problem, *, loop: bool, short: bool, inverted: bool, backwards: bool) -> str:
    """A response with a program that has the mistakes asked for; without any it is right."""
    condition = ""
    if problem.divisor:
        equal = "==" if problem.divides != inverted else "!="
        condition = f"if i % {problem.divisor} {equal} 0"
    if not loop:
        return _fenced(f"def f(n): return {_expression(problem, short, condition)}\n")
    update = _update(problem)
    body = f"  {condition}: {update}\n" if condition else f"  {update}\n"
    return _fenced(
        f"def f(n):\n s = 0\n i = {problem.start}\n while i {'<' if short else '<='} n:\n{body}"
        f"  i {'-' if backwards else '+'}= {problem.step}\n return s\n"
    )


def _fenced(text: str) -> str:
    return f"```python\n{text}```"


def _expression(problem: Problem, short: bool, condition: str) -> str:
    end = "n" if short else "n + 1"
    term = "1" if problem.operation == COUNT else problem.term
    terms = f"{term} for i in range({problem.start}, {end}, {problem.step})"
    if condition:
        terms = f"{terms} {condition}"
    if problem.operation == LARGEST:
        return f"max(({terms}), default=0)"
    return f"sum({terms})"


def _update(problem: Problem) -> str:
    if problem.operation == LARGEST:
        return f"s = max(s, {problem.term})"
    return f"s += {'1' if problem.operation == COUNT else problem.term}"


def sample(problem: Problem, rng: random.Random, habits: Habits) -> str:
    """A response as one of the authors would write it."""
    loop = rng.random() < habits.loop
    return program(
        problem,
        loop=loop,
        short=rng.random() < (habits.short_loop if loop else habits.short_expression),
        inverted=rng.random() < habits.inverted,
        backwards=loop and rng.random() < habits.backwards,
    )
