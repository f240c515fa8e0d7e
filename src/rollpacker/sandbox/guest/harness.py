"""Runs the program of a job inside the sandbox. The trainer trusts nothing that it reports."""

from __future__ import annotations

import _sitebuiltins
import atexit
import builtins
import io
import json
import marshal
import os
import random
import sys
import threading
import traceback
from typing import Any

from . import prelude, pytests, testrun
from .perform import perform
from .values import encode

_DETAIL = 300
_SITE = ("exit", "quit")
# Not io.IOBase: isinstance is slow with an abstract class.
_File: Any = io.IOBase.__base__
_plain: dict[str, Any] = {}
"""The builtins for tests: they must call the program's functions, not the prelude's."""


class InlineThread(threading.Thread):
    """Runs its target to the end when started, because programs may have only one thread. It serves
    programs that start a thread for a deeper stack, and no others."""

    def start(self) -> None:
        """Run the target. As in a thread, an exception is shown and goes no further."""
        try:
            self.run()
        except SystemExit:
            return
        except Exception:
            traceback.print_exc()

    def join(self, timeout: float | None = None) -> None:
        """Do nothing: it has ended."""

    def is_alive(self) -> bool:
        return False


def run(job: bytes, result: int) -> int:
    """Run a job, write its outcome to the descriptor ``result``, and return the exit status."""
    fields: dict[str, str] = marshal.loads(job)
    outcome: dict[str, Any] = {}
    status = 0
    try:
        outcome = perform(fields, testrun.run_tests, encode, _plain)
    except SystemExit as stop:
        status = _exit_status(stop.code)
    except BaseException as error:  # a program may raise anything
        outcome, status = {"error": _describe(error)}, 1
    status = _finish() or status
    if outcome:
        os.write(result, json.dumps(outcome, separators=(",", ":")).encode())
    return status


def prepare() -> None:
    """Give the fork server the names that programs expect and an interpreter without ``site``
    lacks."""
    for name in _SITE:
        setattr(builtins, name, _sitebuiltins.Quitter(name, "Ctrl-D"))
    _plain.update(prelude.install())
    # Forget the library's exit functions. A program's own run when it ends.
    atexit._clear()
    random.seed(0)
    threading.Thread = InlineThread  # type: ignore[misc]
    sys.modules["pytest"] = pytests


def open_streams() -> None:
    """Open fresh streams on descriptors 0 to 2."""
    sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    builtins.__dict__.update(stdin=sys.stdin, stdout=sys.stdout, stderr=sys.stderr)


def _exit_status(code: object) -> int:
    if code is None:
        return 0
    return code & 0xFF if isinstance(code, int) else 1


def _finish() -> int:
    try:
        atexit._run_exitfuncs()
        for value in vars(sys.modules["__main__"]).values():
            if isinstance(value, _File):
                _flush(value)
        _flush(sys.stdout)
        _flush(sys.__stdout__)
    except BaseException:
        return 1
    return 0


def _flush(file: Any) -> None:
    if file is not None and not getattr(file, "closed", False):
        file.flush()


def _describe(error: BaseException) -> str:
    try:
        text = f"{type(error).__name__}: {error}"
    except BaseException:
        text = "an exception that cannot be shown"
    return text[:_DETAIL]
