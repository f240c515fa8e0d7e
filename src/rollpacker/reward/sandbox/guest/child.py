"""From a fork of the zygote to a locked-down process that runs one program."""

from __future__ import annotations

import fcntl
import os
import resource
import sysconfig
from dataclasses import dataclass
from typing import NoReturn

from . import harness, kernel, landlock
from .bpf import build_filters

RESULT, JOB = 3, 4
"""Places of descriptors in a child, after the standard streams."""
_ERROR = 3  # place among the descriptors that are sent
FIRST_FREE = 64
"""Descriptors below it are those of the program."""
_NOT_THE_LIBRARY = {"site-packages", "dist-packages"}
_LIMITED = (resource.RLIMIT_AS, resource.RLIMIT_CPU, resource.RLIMIT_FSIZE)
_FIXED = {
    resource.RLIMIT_NOFILE: 32,
    resource.RLIMIT_NPROC: 0,
    resource.RLIMIT_CORE: 0,
    resource.RLIMIT_MEMLOCK: 0,
    resource.RLIMIT_MSGQUEUE: 0,
}


@dataclass(frozen=True, slots=True)
class Lockdown:
    """What a child locks itself down with.

    Args:
        restrict: holds a process to the files of the library; None at level ``basic``.
        zygote_filter: system calls that the zygote keeps.
        child_filter: takes away those that a program must not have.
    """

    restrict: kernel.Prepared | None
    zygote_filter: kernel.SeccompFilter
    child_filter: kernel.SeccompFilter

    @classmethod
    def build(cls, level: str) -> Lockdown:
        """Prepare a level. Raises ``OSError`` or ``ValueError`` where the machine has it not."""
        files = level != "basic"
        filters = build_filters(os.uname().machine, files)
        restrict = None
        if files:
            low = landlock.ruleset(*_library())
            # Out of the way of the child's own descriptors.
            rules = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, FIRST_FREE)
            os.close(low)
            restrict = landlock.restriction(rules)
        return cls(restrict, *map(kernel.SeccompFilter, filters))

    def enter(self) -> None:
        """Lock a child down, for good; descriptors from ``JOB`` up are closed."""
        if self.restrict is not None:
            self.restrict()
        os.closerange(JOB, 1 << 16)
        self.child_filter.install()


def _library() -> tuple[list[str], list[str]]:
    """What to read and what to list of the standard library, without installed packages."""
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
    descriptors: list[int], limits: tuple[int, ...], lockdown: Lockdown, zygote: int
) -> NoReturn:
    """Give everything up, then run the program; never returns."""
    status = 1
    try:
        job = _enter(descriptors, limits, lockdown, zygote)
        status = harness.run(job, RESULT)
    finally:
        os._exit(status)


def _enter(
    descriptors: list[int], limits: tuple[int, ...], lockdown: Lockdown, zygote: int
) -> bytes:
    try:
        kernel.die_with_parent()
        if os.getppid() != zygote:
            raise ProcessLookupError("the zygote has ended")
        job = take(descriptors)
        limit(dict(zip(_LIMITED, limits, strict=True)) | _FIXED)
        lockdown.enter()
    except Exception as error:
        os.write(descriptors[_ERROR], repr(error).encode())
        raise
    # The one sign that all of the above has worked; a program cannot take it back.
    os.write(RESULT, b"+")
    return job


def take(descriptors: list[int]) -> bytes:
    """Put descriptors in their places; the job. Some may sit in others' places."""
    job, *others = [fcntl.fcntl(each, fcntl.F_DUPFD, FIRST_FREE) for each in descriptors]
    for place, descriptor in enumerate(others):
        os.dup2(descriptor, place)
    os.dup2(job, JOB)
    return os.pread(JOB, os.fstat(JOB).st_size, 0)


def limit(limits: dict[int, int]) -> None:
    """Lower limits of this process, for good."""
    for kind, wanted in limits.items():
        hard = resource.getrlimit(kind)[1]
        value = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(kind, (value, value))
