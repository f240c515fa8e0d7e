"""Runs typical jobs in the fork server before the first child. A fork copies each page that it
writes to, and a fresh interpreter fills counters and caches."""

from __future__ import annotations

import marshal
import os
import resource
import sys

from . import harness
from .child import RESULT, Lockdown, enter
from .lockdown import kernel

_INPUT = b"1 2\n"
_JOBS = (
    {"kind": "stdin", "program": "a, b = map(int, input().split())\nprint(a + b)\n"},
    {"kind": "call", "program": "def f(a): return [a]", "call": "f", "args": "[1]"},
    {"kind": "asserts", "program": "def f(a): return a", "code": "__reveal__(0, f(1))"},
)
_TIMES = 20
_PROGRAM_NAMES = ("__main__", "solution")
# Resources that neither the fork server nor a child may use.
_LIMITS = [(resource.RLIMIT_CORE, 0), (resource.RLIMIT_MEMLOCK, 0), (resource.RLIMIT_MSGQUEUE, 0)]
_HARMLESS = kernel.no_new_privileges
_LOCKDOWN = Lockdown(_HARMLESS, _HARMLESS, 1 << 16, _HARMLESS)


def rehearse() -> None:
    """Do the work of a child except the lockdown, and leave fresh streams."""
    before = {name: sys.modules.get(name) for name in _PROGRAM_NAMES}
    for fields in _TIMES * _JOBS:
        job = _enter(marshal.dumps(fields), _INPUT)
        harness.open_streams()
        harness.run(job, RESULT)
    _enter(b"", b"")
    harness.open_streams()
    for name, module in before.items():
        sys.modules.pop(name, None)
        if module is not None:
            sys.modules[name] = module


def _enter(job: bytes, stdin: bytes) -> bytes:
    descriptors = [os.memfd_create("sandbox") for _ in range(5)]
    for descriptor, content in zip(descriptors, (job, stdin), strict=False):
        os.pwrite(descriptor, content, 0)
    taken = enter(descriptors, _LIMITS, len(job), _LOCKDOWN, os.getppid())
    for descriptor in descriptors:
        os.close(descriptor)
    return taken
