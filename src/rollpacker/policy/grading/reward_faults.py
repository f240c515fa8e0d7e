"""When a reward function is broken, rather than unable to grade a response now and then.

A function that has never answered is given up after few responses, since nothing is lost by
stopping early; one that has answered before may only be out of order for a while.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

PROMPTS = 3
"""Prompts that fail in the same way before the first answer: one bad row cannot be all of them."""
RESPONSES = 8
"""Responses that fail before the first answer, where there are no so many prompts to try."""
IN_A_ROW = 32
"""Responses that fail in a row after an answer. With a timeout of 10 s and one process this takes
some five to ten minutes, about as long as a service takes that is started again."""


@dataclass(slots=True)
class _Record:
    answered: bool = False
    ways: dict[int, str] = field(default_factory=dict[int, str])
    """How each response failed since the last answer."""
    prompts: dict[str, set[str]] = field(default_factory=dict[str, set[str]])
    """The prompts of those responses, by how they failed."""
    last: str = ""


class RewardFaults:
    """Counts what failed since a function's last answer.

    Args:
        functions: how many there are.
        patient: those that fail for the machine's faults, too: never given up at the first ones.
    """

    def __init__(self, functions: int, patient: Collection[int] = ()) -> None:
        self._records = [_Record(answered=index in patient) for index in range(functions)]

    def answered(self, function: int) -> None:
        """A call was answered: what failed before says nothing of the function."""
        record = self._records[function]
        record.answered = True
        if record.ways:
            record.ways, record.prompts = {}, {}

    def failed(self, function: int, response: int, prompt: str, way: str) -> bool:
        """A call for one response failed; returns whether the function is broken.

        Args:
            function: its index.
            response: repeated calls for the same one count once.
            prompt: the row that it belongs to.
            way: equal for faults of one kind.
        """
        record = self._records[function]
        record.ways[response] = way
        record.prompts.setdefault(way, set()).add(prompt)
        record.last = way
        if record.answered:
            return len(record.ways) >= IN_A_ROW
        return len(record.prompts[way]) >= PROMPTS or len(record.ways) >= RESPONSES

    def counts(self, function: int) -> tuple[int, int]:
        """Responses that failed in the way of the last one, of all since the last answer."""
        record = self._records[function]
        return sum(way == record.last for way in record.ways.values()), len(record.ways)

    def suspects(self) -> list[int]:
        """Functions whose last calls failed, and that have not answered or not for long."""
        return [
            index
            for index, record in enumerate(self._records)
            if record.ways and (not record.answered or len(record.ways) >= RESPONSES)
        ]

    def tried(self, function: int, prompt: str) -> bool:
        """Whether a response to this prompt failed since the last answer."""
        return any(prompt in prompts for prompts in self._records[function].prompts.values())
