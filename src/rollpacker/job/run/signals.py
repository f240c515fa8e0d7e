"""Signals that ask a run to stop, and what they lead to at the moment."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

_ECHO_S = 0.5
"""A launcher may signal a process and then its whole group: within this, that is one signal."""


class Stopped(SystemExit):
    """A signal has stopped the run early; uncaught, the process exits with 128 + its number.

    Args:
        number: the first signal.
        said: whether the user was told what is kept.
    """

    def __init__(self, number: signal.Signals, *, said: bool = True) -> None:
        super().__init__(128 + number)
        self.number = number
        self.said = said


class Signals:
    """Takes SIGINT, SIGTERM and ``others``, as ``checkpoint.signals`` has them, while it is open.

    A signal raises ``Stopped`` wherever the main thread is, unless ``react`` says otherwise. In
    another thread than the main one it takes none.
    """

    def __init__(self, others: Sequence[str] = ()) -> None:
        names = ("SIGINT", "SIGTERM", *(f"SIG{name}" for name in others))
        self._numbers = [signal.Signals[name] for name in names]
        self._before: dict[signal.Signals, Any] = {}
        self._at = 0.0
        self.taken: signal.Signals | None = None
        self.react()

    def react(
        self, first: Callable[[], None] | None = None, again: Callable[[], None] | None = None
    ) -> None:
        """What the first signal does and what a further one does; None raises ``Stopped``."""
        self._first = first or (lambda: self._stop(said=False))
        self._again = again or (lambda: self._stop(said=True))

    def age(self) -> float:
        """Seconds since the first signal."""
        return time.monotonic() - self._at

    def _stop(self, *, said: bool) -> None:
        assert self.taken is not None
        raise Stopped(self.taken, said=said)

    def _take(self, number: int, _frame: FrameType | None) -> None:
        if self.taken is None:
            self.taken, self._at = signal.Signals(number), time.monotonic()
            self._first()
        elif number == signal.SIGINT or self.age() > _ECHO_S:
            self._again()

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            self._before = {n: signal.signal(n, self._take) for n in self._numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
