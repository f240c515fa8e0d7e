"""An environment that notes what happens to it, for the matrix."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rollpacker.env.base import Message, Turn


class Chat:
    """Says the same for ever; its turns are worth 1, 2, 3 ...

    Args:
        log: file of what happens.
        word: what it says.
        ill: id of a row whose environment raises.
        stuck: id of a row whose environment hangs.
    """

    def __init__(self, log: str, word: str = "go", ill: str = "", stuck: str = "") -> None:
        self._log = log
        self._word = word
        self._ill = ill
        self._stuck = stuck
        self._turns = 0

    def reset(self, row: Mapping[str, Any]) -> Sequence[Message]:
        self._row = row["id"]
        self._note("reset")
        return []

    def step(self, reply: Message) -> Turn:
        self._turns += 1
        self._note("step", said=reply["content"])
        if self._row == self._ill:
            raise RuntimeError("ill on purpose")
        if self._row == self._stuck:
            time.sleep(1000.0)
        return Turn(messages=[{"role": "user", "content": self._word}], reward=float(self._turns))

    def close(self) -> None:
        self._note("close")

    def _note(self, kind: str, **more: Any) -> None:
        note = {"kind": kind, "pid": os.getpid(), "word": self._word, **more}
        with open(self._log, "a", encoding="utf-8") as file:
            file.write(json.dumps(note) + "\n")


def look_up(key: str) -> str:
    """Look something up.

    Args:
        key: what.
    """
    return key
