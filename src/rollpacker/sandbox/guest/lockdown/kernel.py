"""System calls that Python lacks, through ctypes. Errors are ``OSError``."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable

CLONE_NEWUTS, CLONE_NEWIPC = 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP = 1, 4, 22
_PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 24, 38
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 47, 4
_SECCOMP_MODE_FILTER = 2
_CAPSET = {"x86_64": 126, "aarch64": 91}
_CAPABILITY_VERSION_3 = 0x20080522
_LAST_CAPABILITY = 63

_libc = ctypes.CDLL(None, use_errno=True)


class _SockFprog(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


_interpreter = ctypes.PyDLL(None, use_errno=True)


def _checked(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def syscall(what: str, number: int, *arguments: object) -> int:
    """Make a system call by number."""
    return _checked(_libc.syscall(ctypes.c_long(number), *arguments), what)


def fork() -> int:
    """Fork without the work of ``os.fork`` for threads and random seeds: there is one thread. This
    saves a tenth of an execution's CPU time, and programs draw the same random numbers."""
    return _checked(_interpreter.fork(), "fork")


class Prepared:
    """A call of the C library with arguments made beforehand, so that a child only makes the
    call."""

    def __init__(self, what: str, function: Callable[..., int], *arguments: object) -> None:
        self._what = what
        self._function = function
        self._arguments = arguments

    def __call__(self) -> None:
        """Make the call. Raises ``OSError``."""
        _checked(self._function(*self._arguments), self._what)


def prepared_syscall(what: str, number: int, *arguments: object) -> Prepared:
    """Prepare a system call by number."""
    return Prepared(what, _libc.syscall, ctypes.c_long(number), *arguments)


def _prepared_prctl(what: str, *arguments: int) -> Prepared:
    padded = [ctypes.c_ulong(value) for value in (*arguments, 0, 0, 0, 0)[:5]]
    return Prepared(what, _libc.prctl, *padded)


no_new_privileges = _prepared_prctl("no-new-privs", _PR_SET_NO_NEW_PRIVS, 1)
"""Executed programs gain no privileges. seccomp and Landlock need this."""

die_with_parent = _prepared_prctl("pdeathsig", _PR_SET_PDEATHSIG, signal.SIGKILL)
"""Have this process killed when its parent ends. A change of uid clears this."""


def set_dumpable(dumpable: bool) -> None:
    """Set whether others of the same uid may look into this process."""
    _prepared_prctl("dumpable", _PR_SET_DUMPABLE, int(dumpable))()


def unshare(flags: int) -> None:
    """Enter new namespaces."""
    _checked(_libc.unshare(ctypes.c_int(flags)), "unshare")


def drop_capabilities(machine: str) -> None:
    """Empty every capability set of this process."""
    for capability in range(_LAST_CAPABILITY + 1):
        # Fails beyond the last one that the kernel knows, or without CAP_SETPCAP.
        if _libc.prctl(_PR_CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0) < 0:
            break
    _libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    empty = (ctypes.c_uint32 * 6)()
    syscall("capset", _CAPSET[machine], header, empty)


class SeccompFilter:
    """A filter in memory that the kernel can read."""

    def __init__(self, program: bytes) -> None:
        self._program = ctypes.create_string_buffer(program, len(program))
        self._header = _SockFprog(len(program) // 8, ctypes.addressof(self._program))

        header = ctypes.addressof(self._header)
        self._install = _prepared_prctl("seccomp", _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, header)

    def install(self) -> None:
        self._install()
