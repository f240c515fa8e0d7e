"""Graded responses of the step in flight, so that a run that is killed does not sample them again.

They hold for one step and for the weights of one verified checkpoint: a step that begins with any
others starts an empty log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from rollpacker.core.types import PromptId
from rollpacker.durable import AppendFile
from rollpacker.runtime.attempts.attempts import Trajectory
from rollpacker.runtime.attempts.known_response import KnownResponse, decode, encode, read


class GradedLog:
    """The log of one run.

    Args:
        path: its file; made when the first step that can use it begins.
        say: told, once, when the log cannot be read, written or removed; the run goes on without
            it.
    """

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        self._path = path
        self._say = say
        self._file: AppendFile | None = None
        self._told = False
        self._known: dict[tuple[PromptId, int], KnownResponse] = {}

    def begin(self, step: int, weights: str | None) -> int:
        """Begin a step; returns how many responses of it are known from before.

        Args:
            step: the step.
            weights: fingerprint of the checkpoint that the step begins with; None where there is
                none, so that nothing of the step could be used again.
        """
        self.close()
        self._known = {}
        if weights is None:
            self.clear()
            return 0
        head = {"step": step, "weights": weights}
        try:
            records, good = read(self._path)
            if records and records[0][0] == head:
                for fields, body in records[1:]:
                    self._known[fields["prompt"], fields["index"]] = decode(step, fields, body)
            self._open(head, good if self._known else 0)
        except OSError as error:
            self._stop(error)
        return len(self._known)

    def find(self, prompt: PromptId, index: int) -> KnownResponse | None:
        """The response to a prompt with this sample index, if it was graded before."""
        return self._known.get((prompt, index))

    def add(self, attempts: Iterable[Trajectory]) -> None:
        """Keep what was just graded."""
        if self._file is None:
            return
        new = (a for a in attempts if (a.prompt, a.index) not in self._known)
        try:
            records = (KnownResponse.left_by(a).encode(a.prompt, a.index) for a in new)
            self._file.write(b"".join(chain.from_iterable(records)))
        except OSError as error:
            self._stop(error)

    def clear(self) -> None:
        """Nothing is in flight: remove the file."""
        self.close()
        try:
            self._path.unlink(missing_ok=True)
        except OSError as error:
            self._stop(error)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self, head: Mapping[str, Any], good: int) -> None:
        with self._path.open("ab") as file:
            file.truncate(good)
        self._file = AppendFile(self._path)
        if not good:
            self._file.write(b"".join(encode(head)))

    def _stop(self, error: OSError) -> None:
        self.close()
        if not self._told:
            self._told = True
            self._say(
                f"WARNING {self._path} cannot be written ({error}): the run goes on without it; "
                "one that is killed samples the step again"
            )
