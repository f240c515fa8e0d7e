"""When a tool is broken, rather than called in a wrong way now and then.

Whose fault a call that raises is cannot be seen, so a tool is given the patience of a reward that
has answered before, and any answer speaks for it. A result that is no text and has no JSON form is
never the model's fault.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rollpacker.errors import told, way
from rollpacker.policy.grading.reward_faults import PROMPTS, RewardFaults

KEY = "environment.path"


@dataclass(slots=True)
class _Record:
    """Of one tool."""

    raising: RewardFaults = field(default_factory=lambda: RewardFaults(1, patient=[0]))
    returning: RewardFaults = field(default_factory=lambda: RewardFaults(1))
    prompts: set[str] = field(default_factory=set[str])
    """Of calls that raised since the last answer."""


class ToolFaults:
    """Counts calls of the tools of a process that fail."""

    def __init__(self) -> None:
        self._records: dict[str, _Record] = {}
        self._episodes = 0
        self._told: set[str] = set()
        self._said: list[str] = []
        self.broken: str | None = None
        """Why the run cannot go on."""

    def said(self) -> list[str]:
        """What the user should know and was not told yet."""
        said, self._said = self._said, []
        return said

    def caller(self, row: Mapping[str, Any]) -> Caller:
        """A new episode, which calls tools."""
        self._episodes += 1
        return Caller(self, self._episodes, row)

    def _record(self, tool: str) -> _Record:
        return self._records.setdefault(tool, _Record())

    def answered(self, tool: str) -> None:
        """A call was answered."""
        if tool in self._records:
            record = self._records[tool]
            record.raising.answered(0)
            record.returning.answered(0)
            record.prompts.clear()

    def raised(self, tool: str, episode: int, prompt: str, error: Exception) -> None:
        """A call raised."""
        record = self._record(tool)
        record.prompts.add(prompt)
        broken = record.raising.failed(0, episode, prompt, way(error))
        if broken and len(record.prompts) >= PROMPTS:
            mend = "mend it, or let it return as text what the model did wrong"
            self._break(tool, record.raising, f"{told(error)}; {mend}")

    def returned(self, tool: str, episode: int, prompt: str, kind: str) -> None:
        """A call returned what the model cannot read: a value of type ``kind``."""
        faults = self._record(tool).returning
        error = f"it returned {kind}; let it return text, or what JSON has"
        if faults.failed(0, episode, prompt, kind):
            self._break(tool, faults, error)
        elif error not in self._told:
            self._told.add(error)
            self._said.append(f"{KEY}: tool '{tool}': {error}")

    def _break(self, tool: str, faults: RewardFaults, error: str) -> None:
        failed, tried = faults.counts(0)
        self.broken = f"{KEY}: tool '{tool}' failed {failed} of {tried}: {error}"


@dataclass(frozen=True, slots=True)
class Caller:
    """An episode that calls tools.

    Args:
        faults: of the tools.
        episode: its number.
        row: of the data.
    """

    faults: ToolFaults
    episode: int
    row: Mapping[str, Any]

    @property
    def _prompt(self) -> str:
        return repr(self.row.get("prompt"))

    def answered(self, tool: str) -> None:
        """A call was answered."""
        self.faults.answered(tool)

    def raised(self, tool: str, error: Exception) -> None:
        """A call raised."""
        self.faults.raised(tool, self.episode, self._prompt, error)

    def returned(self, tool: str, kind: str) -> None:
        """A call returned what the model cannot read: a value of type ``kind``."""
        self.faults.returned(tool, self.episode, self._prompt, kind)
