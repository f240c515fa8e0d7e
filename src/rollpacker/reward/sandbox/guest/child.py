"""From a fork of the zygote to a locked-down process that runs one program."""

from __future__ import annotations

import os
import resource
import sysconfig
from dataclasses import dataclass
from typing import NoReturn

from . import harness, kernel, landlock
from .bpf import build_filters

RESULT = 3
"""Place of a descriptor in a child, after the standard streams."""

_ERROR = 3  # place among the descriptors that are sent
_OPEN_FILES = 32
_NOT_THE_LIBRARY = {"site-packages", "dist-packages"}


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
            restrict = landlock.restriction(landlock.ruleset(*_library()))
        return cls(restrict, *map(kernel.SeccompFilter, filters))

    def enter(self) -> None:
        """Lock a child down, for good; all descriptors but its own are closed."""
        if self.restrict is not None:
            self.restrict()
        os.closerange(RESULT + 1, 1 << 16)
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
    descriptors: list[int], limits: list[int], size: int, lockdown: Lockdown, zygote: int
) -> NoReturn:
    """Give everything up, then run the program of a job of ``size`` bytes; never returns."""
    status = 1
    try:
        job = _enter(descriptors, limits, size, lockdown, zygote)
        status = harness.run(job, RESULT)
    finally:
        os._exit(status)


def _enter(
    descriptors: list[int], limits: list[int], size: int, lockdown: Lockdown, zygote: int
) -> bytes:
    try:
        kernel.die_with_parent()
        if os.getppid() != zygote:
            raise ProcessLookupError("the zygote has ended")
        job = take(descriptors, size)
        memory, cpu_s, output = limits
        limit(resource.RLIMIT_AS, memory)
        limit(resource.RLIMIT_CPU, cpu_s)
        limit(resource.RLIMIT_FSIZE, output)
        limit(resource.RLIMIT_NOFILE, _OPEN_FILES)
        limit(resource.RLIMIT_NPROC, 0)
        lockdown.enter()
    except Exception as error:
        os.write(descriptors[_ERROR], repr(error).encode())
        raise
    # The one sign that all of the above has worked; a program cannot take it back.
    os.write(RESULT, b"+")
    return job


def take(descriptors: list[int], size: int) -> bytes:
    """The job; the other descriptors to their places, where none of them is."""
    job, stdin, stdout, stderr, result = descriptors
    os.dup2(stdin, 0)
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    os.dup2(result, RESULT)
    return os.pread(job, size, 0)


def limit(kind: int, most: int) -> None:
    """Lower a limit of this process, for good."""
    try:
        resource.setrlimit(kind, (most, most))
    except ValueError:
        # The trainer's own limit is lower.
        most = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (most, most))
