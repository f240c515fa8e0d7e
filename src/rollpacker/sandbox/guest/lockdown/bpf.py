"""The seccomp filter: a list of system calls in classic BPF. Linux,
Documentation/userspace-api/seccomp_filter.rst."""

from __future__ import annotations

import errno
import struct

from .syscalls import (
    ALLOWED,
    AUDIT_ARCH,
    FCNTL,
    FCNTL_COMMANDS,
    IOCTL,
    IOCTL_REQUESTS,
    MACHINES,
    OPEN,
    PRLIMIT,
    ZYGOTE,
)

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_KILL, _ERRNO, _ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
_DENY = _ERRNO | errno.EPERM
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16
_X32 = 0x40000000
_RLIMIT_CPU = 0
# O_WRONLY, O_RDWR, O_CREAT, O_TRUNC and __O_TMPFILE.
_WRITES = 0x3 | 0x40 | 0x200 | 0x400000

Instruction = tuple[int, int, int, int]

# prlimit(0, RLIMIT_CPU, new, old) if a half of ``new`` is not null: a program that lowers its own
# limit would die of a SIGKILL whose sender is unknown.
_CPU_LIMIT_STAYS: list[Instruction] = [
    *((_LOAD, 0, 0, _ARGUMENTS + 8), (_EQUAL, 0, 4, _RLIMIT_CPU)),
    *((_LOAD, 0, 0, _ARGUMENTS + 16), (_EQUAL, 0, 3, 0)),
    *((_LOAD, 0, 0, _ARGUMENTS + 20), (_EQUAL, 0, 1, 0)),
    (_RETURN, 0, 0, _ALLOW),
    (_RETURN, 0, 0, _DENY),
]


def build_filters(machine: str, files: bool) -> tuple[bytes, bytes]:
    """Return the fork server's filter and a child's own, each an array of ``struct sock_filter``.

    The fork server's lists the allowed calls, and children inherit it, because installing it takes
    the kernel a tenth of a millisecond. A child's own removes the calls that only the fork server
    needs.

    Raises:
        ValueError: the machine has no table.
    """
    if machine not in MACHINES:
        raise ValueError(f"no system call table for {machine}: expected {', '.join(MACHINES)}")
    return _packed(_zygote_filter(machine, files)), _packed(_child_filter(machine))


def _packed(program: list[Instruction]) -> bytes:
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def _zygote_filter(machine: str, files: bool) -> list[Instruction]:
    column = MACHINES.index(machine)
    program = _machine_check(machine)
    for numbers in (*ALLOWED.values(), *ZYGOTE.values()):
        number = numbers[column]
        if number is not None:
            program += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    if files:
        for x86, arm, place in OPEN.values():
            number = (x86, arm)[column]
            if number is not None:
                program += _when(number, _without_bits(place, _WRITES))
    program += _when(FCNTL[column], _one_of(1, FCNTL_COMMANDS))
    program += _when(IOCTL[column], _one_of(1, IOCTL_REQUESTS))
    program += _when(PRLIMIT[column], _one_of(0, (0,)))
    return [*program, (_RETURN, 0, 0, _DENY)]


def _child_filter(machine: str) -> list[Instruction]:
    column = MACHINES.index(machine)
    program = _machine_check(machine)
    for numbers in ZYGOTE.values():
        program += _when(numbers[column], [(_RETURN, 0, 0, _DENY)])
    program += _when(PRLIMIT[column], _CPU_LIMIT_STAYS)
    return [*program, (_RETURN, 0, 0, _ALLOW)]


def _machine_check(machine: str) -> list[Instruction]:
    program = [
        (_LOAD, 0, 0, _ARCH),
        (_EQUAL, 1, 0, AUDIT_ARCH[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
    ]
    if machine == "x86_64":
        program += [(_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _KILL)]
    return program


def _when(number: int, body: list[Instruction]) -> list[Instruction]:
    # ``body`` decides about one system call. The others go past it.
    return [(_EQUAL, 0, len(body), number), *body]


def _without_bits(argument: int, bits: int) -> list[Instruction]:
    return [
        (_LOAD, 0, 0, _ARGUMENTS + 8 * argument),
        (_ANY_BIT, 0, 1, bits),
        (_RETURN, 0, 0, _DENY),
        (_RETURN, 0, 0, _ALLOW),
    ]


def _one_of(argument: int, values: tuple[int, ...]) -> list[Instruction]:
    # The kernel reads the lower half of these arguments only.
    body: list[Instruction] = [(_LOAD, 0, 0, _ARGUMENTS + 8 * argument)]
    for value in values:
        body += [(_EQUAL, 0, 1, value), (_RETURN, 0, 0, _ALLOW)]
    return [*body, (_RETURN, 0, 0, _DENY)]
