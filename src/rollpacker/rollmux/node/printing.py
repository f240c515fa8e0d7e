"""Sends what programs print to the daemon, beside the reports of the node's life."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from rollpacker.rollmux.node.programs import AttemptName, NodePrograms
from rollpacker.rollmux.service.client.client import MuxClient
from rollpacker.rollmux.service.client.link import MuxError

_PIECE = 24 * 1024
_PIECES = 16
"""Of one attempt in one go: others print too."""
_PAUSE_S = 5.0
"""After a piece that the daemon could not take."""
_STUCK_S = 60.0
"""So long no piece got through: an attempt that is over does not wait for its log any more."""
_GONE = (404, 410)


@dataclass(slots=True)
class _Log:
    """How far an attempt's log has been sent.

    Args:
        over: the daemon takes no more of it.
        failed: when it took no piece for the first time since it took one; None while it does.
        again: when to send the next one.
    """

    sent: int = 0
    over: bool = False
    failed: float | None = None
    again: float = 0.0


class Printing:
    """The logs of a node's attempts, and the thread that sends them.

    However long the daemon takes for a log, its agent reports the node in time.
    """

    def __init__(self, client: MuxClient, programs: NodePrograms) -> None:
        self._client = client
        self._programs = programs
        self._logs: dict[AttemptName, _Log] = {}
        """Replaced as a whole, and only by ``follow``."""
        self._look = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="printing", daemon=True)

    def follow(self, names: set[AttemptName]) -> None:
        """Send what these have printed since; all others are gone."""
        self._logs = {name: self._logs.get(name) or _Log() for name in sorted(names)}
        self._look.set()
        if names and self._thread.ident is None:
            self._thread.start()

    def sent(self, name: AttemptName) -> bool:
        """Whether the daemon has all that is there, or will not have it."""
        log, path = self._logs[name], self._programs.log(name)
        stuck = log.failed is not None and time.monotonic() > log.failed + _STUCK_S
        return log.over or stuck or not path.exists() or log.sent >= path.stat().st_size

    def close(self) -> None:
        """Send no more; what is under way is not waited for."""
        self._closed = True
        self._look.set()

    def _run(self) -> None:
        while not self._closed:
            self._look.wait()
            self._look.clear()
            while not self._closed and self._send_some():
                continue

    def _send_some(self) -> bool:
        """Some of each log; whether there may be more."""
        more = [self._send(name, log) for name, log in self._logs.items()]
        return any(more)

    def _send(self, name: AttemptName, log: _Log) -> bool:
        if log.over or time.monotonic() < log.again:
            return False
        try:
            with self._programs.log(name).open("rb") as file:
                file.seek(log.sent)
                for _ in range(_PIECES):
                    data = file.read(_PIECE)
                    if not data or self._closed:
                        return False
                    log.sent, log.over = self._client.printed(
                        name.job, name.number, log.sent, data, patience_s=_PAUSE_S
                    )
                    log.failed = None
                    file.seek(log.sent)
        except FileNotFoundError:  # it is not there yet, or not any more
            return False
        except Exception as error:
            # Of a job that nobody knows any more; all else may pass, whatever it is.
            log.over = isinstance(error, MuxError) and error.status in _GONE
            log.failed = time.monotonic() if log.failed is None else log.failed
            log.again = time.monotonic() + _PAUSE_S
            return False
        return not log.over
