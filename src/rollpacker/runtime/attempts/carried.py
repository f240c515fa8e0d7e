"""What losers of a round had, for the next (mode ``partial``): tokens, log-probabilities, grades.

In a checkpoint it is a file of its own, since a run that goes on must not sample it again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from itertools import chain
from pathlib import Path

from rollpacker.core.types import PromptId
from rollpacker.durable import write_file
from rollpacker.runtime.attempts.attempts import Trajectory
from rollpacker.runtime.attempts.known_response import KnownResponse, decode, read

FILE = "carried.bin"

Responses = dict[tuple[PromptId, int], KnownResponse]


class CarriedResponses:
    """Unfinished and finished responses of prompts that were deferred."""

    def __init__(self) -> None:
        self._now: Responses = {}
        self._next: Responses = {}

    def begin(self) -> None:
        """A step begins with what the last one left."""
        self._now = self._next

    def find(self, prompt: PromptId, index: int) -> KnownResponse | None:
        """What there is of the sample of a prompt from before this step."""
        return self._now.get((prompt, index))

    def keep(
        self, attempts: Iterable[Trajectory], deferred: Collection[PromptId], step: int
    ) -> None:
        """A rollout is over: what the attempts of deferred prompts have is for the next step."""
        self._next = {}
        for attempt in attempts:
            if attempt.prompt not in deferred or attempt.verdict != "aborted":
                continue
            attempt.verdict = "carried"
            if attempt.tokens:
                left = replace(KnownResponse.left_by(attempt), carried=attempt.spans(step))
                self._next[attempt.prompt, attempt.index] = left

    def clear(self) -> None:
        """The epoch is over."""
        self._next = {}

    def save(self, folder: Path, *, begun: bool) -> None:
        """Write what the next step begins with, or what this one has ``begun`` with."""
        known = self._now if begun else self._next
        if known:
            records = (each.encode(*key) for key, each in known.items())
            write_file(folder / FILE, b"".join(chain.from_iterable(records)))

    def load(self, folder: Path, step: int) -> None:
        """Take up what a checkpoint has for ``step``; nothing where it has none."""
        records, _ = read(folder / FILE)
        self._next = {
            (fields["prompt"], fields["index"]): decode(step, fields, body)
            for fields, body in records
        }
