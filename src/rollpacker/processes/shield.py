"""Child processes that only their driver may end.

Slurm and Kubernetes send their signals to every process of a job. The driver answers them; a child
that died of one would look like a fault, and a program that died of one like a wrong answer.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

OUTSIDE = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""What comes from outside; between driver and children messages count, and SIGKILL."""


@contextmanager
def shielded() -> Iterator[None]:
    """Processes started inside have these signals blocked from their first moment on.

    The driver gets those that come meanwhile when it is over, or at once by another of its threads.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, OUTSIDE)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def take_no_notice() -> None:
    """For a shielded process that runs a user's code: what that starts takes signals as usual.

    Blocked and ignored signals would be inherited, and ``terminate`` of a helper do nothing.
    """
    for number in OUTSIDE:
        signal.signal(number, _nothing)
    # Held over a fork: what hits the child before it is as usual must not be taken for nothing.
    os.register_at_fork(before=_hold, after_in_parent=_let_go, after_in_child=_as_usual)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, OUTSIDE)


def _nothing(_number: int, _frame: object) -> None:
    """A handler, not ``SIG_IGN``: ``exec`` puts the default back."""


_held: list[set[int]] = []


def _hold() -> None:
    _held.append({int(n) for n in signal.pthread_sigmask(signal.SIG_BLOCK, OUTSIDE)})


def _let_go() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _held.pop())


def _as_usual() -> None:
    for number in OUTSIDE:
        if signal.getsignal(number) is _nothing:
            default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, default)
    _let_go()
