"""What children do, done in the zygote before the first of them.

A fork copies every page that it writes to, and an interpreter writes: it counts calls, specialises
the code that it runs, and remembers what it has looked up. Done here, children need not.
"""

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
# What neither the zygote nor a child may have any of.
_LIMITS = [(resource.RLIMIT_CORE, 0), (resource.RLIMIT_MEMLOCK, 0), (resource.RLIMIT_MSGQUEUE, 0)]
_HARMLESS = kernel.no_new_privileges
_LOCKDOWN = Lockdown(_HARMLESS, _HARMLESS, 1 << 16, _HARMLESS)


def rehearse() -> None:
    """Do what a child does, locking down aside, and leave fresh streams."""
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
