"""Sends what programs print to the daemon."""

from __future__ import annotations

from rollpacker.rollmux.node.programs import AttemptName, NodePrograms
from rollpacker.rollmux.service.client import MuxClient
from rollpacker.rollmux.service.link import MuxError

_PIECE = 24 * 1024
_PIECES = 16
"""Of one attempt in one go: the daemon has to be told of the node's life too."""


class Printing:
    """How far the logs of a node's attempts have been sent."""

    def __init__(self, client: MuxClient, programs: NodePrograms) -> None:
        self._client = client
        self._programs = programs
        self._sent: dict[AttemptName, int] = {}
        self._full: set[AttemptName] = set()

    def send(self, name: AttemptName) -> bool:
        """Send some of what is new of an attempt; whether that was all. Raises
        ``UnreachableError``."""
        path = self._programs.log(name)
        if name in self._full or not path.exists():
            return True
        with path.open("rb") as file:
            for _ in range(_PIECES):
                at = self._sent.get(name, 0)
                file.seek(at)
                data = file.read(_PIECE)
                if not data:
                    return True
                try:
                    have, full = self._client.printed(name.job, name.number, at, data)
                except MuxError:  # of a job that nobody knows any more
                    have, full = at, True
                self._sent[name] = have
                if full:
                    self._full.add(name)
                    return True
        return False

    def forget(self, names: set[AttemptName]) -> None:
        """All but these are gone."""
        self._sent = {name: at for name, at in self._sent.items() if name in names}
        self._full &= names
