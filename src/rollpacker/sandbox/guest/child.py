"""From a fork of the parent to a locked-down process that runs one program."""

from __future__ import annotations

import os
import resource
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from . import harness
from .lockdown import kernel, landlock
from .lockdown.bpf import build_filters

RESULT = 3  # place of the result descriptor in a child, after the standard streams

_ERROR = 3  # place among the descriptors that are sent
Limits = list[tuple[int, int]]  # pairs of a resource and its limit

_NOT_THE_LIBRARY = {"site-packages", "dist-packages"}


@dataclass(frozen=True, slots=True)
class Lockdown:
    """The steps of a child's lockdown."""

    die_with_parent: Callable[[], None]
    restrict: Callable[[], None]
    first: int
    filter: Callable[[], None]


def lockdown_of(level: str) -> tuple[Lockdown, Callable[[], None]]:
    """Return the lockdown of a level, and the function that filters the fork server's own system
    calls. Raises ``OSError`` or ``ValueError`` if the machine lacks the level."""
    files = level != "basic"
    zygotes, childs = map(kernel.SeccompFilter, build_filters(os.uname().machine, files))
    restrict = kernel.no_new_privileges
    if files:
        restrict = landlock.restriction(*_library())
    lockdown = Lockdown(kernel.die_with_parent, restrict, RESULT + 1, childs.install)
    return lockdown, zygotes.install


def _library() -> tuple[list[str], list[str]]:
    folders = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    folders = {os.path.realpath(folder) for folder in folders}
    readable = [
        entry.path
        for folder in sorted(folders)
        for entry in os.scandir(folder)
        if entry.name not in _NOT_THE_LIBRARY
    ]
    return readable, sorted(folders)


def become_program(
    descriptors: list[int], limits: Limits, size: int, lockdown: Lockdown, zygote: int
) -> NoReturn:
    """Lock this process down, then run the program of a job of ``size`` bytes. Never returns."""
    status = 1
    try:
        job = enter(descriptors, limits, size, lockdown, zygote)
        status = harness.run(job, RESULT)
    finally:
        os._exit(status)


def enter(
    descriptors: list[int], limits: Limits, size: int, lockdown: Lockdown, zygote: int
) -> bytes:
    """Lock this process down for good and return its job. The descriptors must not be in their
    final places yet."""
    try:
        lockdown.die_with_parent()
        if os.getppid() != zygote:
            raise ProcessLookupError("the fork server has ended")
        job, stdin, stdout, stderr, result = descriptors
        os.dup2(stdin, 0)
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        os.dup2(result, RESULT)
        program = os.pread(job, size, 0)
        for kind, most in limits:
            _limit(kind, most)
        lockdown.restrict()
        os.closerange(lockdown.first, 1 << 16)
        lockdown.filter()
    except Exception as error:
        os.write(descriptors[_ERROR], repr(error).encode())
        raise
    # This byte proves that the lockdown worked. A program cannot take it back.
    os.write(RESULT, b"+")
    return program


def _limit(kind: int, most: int) -> None:
    try:
        resource.setrlimit(kind, (most, most))
    except ValueError:
        # The trainer's own limit is lower.
        most = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (most, most))
