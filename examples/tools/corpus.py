"""What the model has read before reinforcement learning starts: conversations of a mixed crowd.

More than half of the authors answer at once, with an estimate. The others call the calculator; some
of them ask it for another expression, write JSON that is none or name a tool that there is not.
Those who are told of such a mistake may try again or give an estimate after all.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, replace

from tasks import OPERATORS, Task
from tools import calculate

Message = dict[str, str]

TOOL, NO_TOOL = "calculate", "calculator"
_MOST_CALLS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """How often the authors do what.

    Args:
        at_once: answer without a call.
        other: of the calls, those that ask for another expression.
        broken: of the calls, those whose JSON is none.
        unknown: of the calls, those of a tool that there is not.
        again: call again after a mistake.
    """

    at_once: float = 0.56
    other: float = 0.15
    broken: float = 0.08
    unknown: float = 0.08
    again: float = 0.5


def written(name: str, expression: str, *, broken: bool = False) -> str:
    """A call as an author writes it; ``broken`` leaves a brace out."""
    made = json.dumps({"name": name, "arguments": {"expression": expression}})
    return f"<tool_call>\n{made[:-1] if broken else made}\n</tool_call>"


def final(number: int | str) -> Message:
    """The message that ends a conversation."""
    return {"role": "assistant", "content": f"The answer is {number}."}


def sample(task: Task, rng: random.Random, habits: Habits) -> list[Message]:
    """A conversation as one of the authors would have it."""
    messages: list[Message] = [{"role": "user", "content": task.question}]
    if rng.random() < habits.at_once:
        return [*messages, final(_estimate(task.answer))]
    for _ in range(_MOST_CALLS):
        call, result = _call(task, rng, habits)
        messages.append({"role": "assistant", "content": call})
        messages.append({"role": "tool", "content": result})
        if not result.startswith("Error"):
            return [*messages, final(result)]
        if rng.random() >= habits.again:
            break
    return [*messages, final(_estimate(task.answer))]


def _call(task: Task, rng: random.Random, habits: Habits) -> tuple[str, str]:
    """A call, and what comes back."""
    kind = rng.random()
    if kind < habits.broken:
        call = written(TOOL, task.expression, broken=True)
        return call, _json_error(call)
    if kind < habits.broken + habits.unknown:
        error = f"Error: there is no tool '{NO_TOOL}': there is {TOOL}"
        return written(NO_TOOL, task.expression), error
    other = kind < habits.broken + habits.unknown + habits.other
    expression = (_other(task, rng) if other else task).expression
    return written(TOOL, expression), calculate(expression)


def _json_error(call: str) -> str:
    text = call.removeprefix("<tool_call>\n")
    try:
        json.JSONDecoder().raw_decode(text)
    except json.JSONDecodeError as error:
        where = f"{error.msg} at character {error.pos}"
        return f"Error: the call is no valid JSON: {where}"
    raise ValueError(f"not broken: {call}")


def _other(task: Task, rng: random.Random) -> Task:
    """The task misread: a number with its digits swapped, or another operator."""
    place = rng.randrange(3)
    tens, ones = divmod(task.numbers[place], 10)
    if rng.random() < 0.5 and 0 < ones != tens:
        numbers = list(task.numbers)
        numbers[place] = 10 * ones + tens
        return replace(task, numbers=tuple(numbers))
    operators = list(task.operators)
    place = rng.randrange(2)
    operators[place] = rng.choice([each for each in OPERATORS if each != operators[place]])
    return replace(task, operators=tuple(operators))


def _estimate(answer: int) -> int:
    """With one digit that is not 0."""
    return round(answer, 1 - len(str(abs(answer))))
