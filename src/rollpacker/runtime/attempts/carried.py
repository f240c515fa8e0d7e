"""What losers of a round had, for the next (mode ``partial``): tokens, log-probabilities, grades.

In a checkpoint it is a file of its own, since a run that goes on must not sample it again.
"""

from __future__ import annotations

from collections.abc import Collection
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
    """Unfinished and finished responses of prompts that were deferred.

    Args:
        samples: of a prompt: those that go on have the first so many indices.
    """

    def __init__(self, samples: int) -> None:
        self._samples = samples
        self._now: Responses = {}
        self._next: Responses = {}

    def begin(self) -> None:
        """A step begins with what the last one left."""
        self._now = self._next

    def find(self, prompt: PromptId, index: int) -> KnownResponse | None:
        """What there is of the sample of a prompt from before this step."""
        return self._now.get((prompt, index))

    def keep(
        self, attempts: Collection[Trajectory], deferred: Collection[PromptId], step: int
    ) -> None:
        """A rollout is over: what the attempts of deferred prompts have is for the next step.

        Prompts that did not begin in it still have what they had.
        """
        lost: dict[PromptId, list[Trajectory]] = {attempt.prompt: [] for attempt in attempts}
        self._next = {key: known for key, known in self._now.items() if key[0] not in lost}
        for attempt in attempts:
            if attempt.prompt in deferred and attempt.verdict == "aborted":
                lost[attempt.prompt].append(attempt)
        for prompt, some in lost.items():
            own = {attempt.index for attempt in some}
            free = iter(n for n in range(self._samples) if n not in own)
            for attempt in some:
                # One that was sampled in place of another takes its index.
                index = attempt.index if attempt.index < self._samples else next(free, None)
                if index is None:
                    continue
                attempt.verdict = "carried"
                if attempt.tokens:
                    left = KnownResponse.left_by(attempt)
                    self._next[prompt, index] = replace(left, carried=attempt.spans(step))

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
