"""The isolation that the fork server sets up once for its children."""

from __future__ import annotations

import os

from . import kernel

_NAMESPACES = (
    kernel.CLONE_NEWUSER
    | kernel.CLONE_NEWPID
    | kernel.CLONE_NEWNET
    | kernel.CLONE_NEWIPC
    | kernel.CLONE_NEWUTS
)


def isolate(level: str, uid: int | None) -> None:
    """Change the uid, enter namespaces and drop capabilities. Raises ``OSError``."""
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    if level == "strong":
        _enter_namespaces()
    # A stopped process would not notice that its socket closes.
    kernel.die_with_parent()
    kernel.drop_capabilities(os.uname().machine)


def _enter_namespaces() -> None:
    # After the change of uid, /proc/self belongs to root.
    kernel.set_dumpable(True)
    uid, gid = os.getuid(), os.getgid()
    kernel.unshare(_NAMESPACES)
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{uid} {uid} 1")
    _write("/proc/self/gid_map", f"{gid} {gid} 1")
    # The first process of the pid namespace. All others end with it.
    first = os.fork()
    if first == 0:
        return
    kernel.die_with_parent()
    os.closerange(3, 1 << 16)
    os.waitpid(first, 0)
    os._exit(0)


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(text)
