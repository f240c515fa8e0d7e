"""Logs that kernels are being compiled. numba caches them on disk, so few runs wait."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from numba.core import event as events

COMPILING = (
    "the built-in engine compiles its kernels: about 20 seconds, once per machine and kind of model"
)
_KIND = "numba:compile"  # numba's event for functions that its cache on disk lacks
_OURS = __name__.rpartition(".")[0] + "."


class _Compiling(events.Listener):
    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._said = False

    def on_start(self, event: events.Event) -> None:
        data: Any = event.data
        if not self._said and data["dispatcher"].py_func.__module__.startswith(_OURS):
            self._said = True
            self._say(COMPILING)

    def on_end(self, event: events.Event) -> None:
        pass


@contextmanager
def told_of_compiling(say: Callable[[str], None]) -> Iterator[None]:
    """Give ``say`` one line when the first of the engine's kernels starts to compile."""
    with events.install_listener(_KIND, _Compiling(say)):
        yield
