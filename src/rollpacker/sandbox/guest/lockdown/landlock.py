"""Landlock: the files that a program may read. It may write none. Linux,
Documentation/userspace-api/landlock.rst."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable

from .kernel import Prepared, prepared_syscall, syscall

_CREATE, _ADD_RULE, _RESTRICT = 444, 445, 446
_VERSION_FLAG, _PATH_BENEATH = 1, 1
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
# Rights of the file system in version 1, and those that later versions added.
_FILES_V1, _REFER, _TRUNCATE, _IOCTL = (1 << 13) - 1, 1 << 13, 1 << 14, 1 << 15
_TCP, _SCOPES = 0b11, 0b11


class _RulesetAttr(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32))


def version() -> int:
    """Return the kernel's version of Landlock. Raises ``OSError`` if there is none."""
    return syscall("Landlock", _CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(_VERSION_FLAG))


def restriction(readable: Iterable[str], listable: Iterable[str]) -> Prepared:
    """Return the call that restricts a process to reading and listing these files and folders."""
    known = version()
    attr = _RulesetAttr(files=_FILES_V1)
    if known >= 2:
        attr.files |= _REFER
    if known >= 3:
        attr.files |= _TRUNCATE
    if known >= 4:
        attr.net = _TCP
    if known >= 5:
        attr.files |= _IOCTL
    if known >= 6:
        attr.scoped = _SCOPES
    size = 24 if known >= 6 else 16 if known >= 4 else 8
    rules = syscall(
        "Landlock", _CREATE, ctypes.byref(attr), ctypes.c_size_t(size), ctypes.c_uint32(0)
    )
    for path in readable:
        _allow(rules, path, _READ_FILE)
    for path in listable:
        _allow(rules, path, _READ_DIR)
    return prepared_syscall("Landlock", _RESTRICT, ctypes.c_int(rules), ctypes.c_uint32(0))


def _allow(rules: int, path: str, right: int) -> None:
    parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
    rule = _PathBeneath(allowed=right, parent=parent)
    try:
        syscall(
            "Landlock",
            _ADD_RULE,
            ctypes.c_int(rules),
            ctypes.c_int(_PATH_BENEATH),
            ctypes.byref(rule),
            ctypes.c_uint32(0),
        )
    finally:
        os.close(parent)
