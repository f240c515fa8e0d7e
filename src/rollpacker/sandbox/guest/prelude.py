"""Names that programs may use without importing them, as in the harnesses of public datasets.

Answers to LeetCode's tasks use ``List``, ``defaultdict`` or ``heapq`` as if they were built in. The
names join the builtins, once for all programs. A program's own definitions hide them, and a test
finds only a program's own names in it.

It imports nothing of this package, so that its text can be sent elsewhere.
"""

from __future__ import annotations

import builtins
import importlib
import sys
from typing import Any

_MODULES = (
    *("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random"),
    *("statistics", "itertools", "functools", "operator", "io", "sys", "json"),
)  # their public names are installed, then the modules, which replace names equal to a module's

_DEEP = 50_000  # depth of nested calls, as in LiveCodeBench


class ListNode:
    """LeetCode's linked list."""

    def __init__(self, val: Any = 0, next: Any = None) -> None:
        self.val, self.next = val, next


class TreeNode:
    """LeetCode's binary tree."""

    def __init__(self, val: Any = 0, left: Any = None, right: Any = None) -> None:
        self.val, self.left, self.right = val, left, right


def install() -> dict[str, Any]:
    """Add the names to the builtins. Return the builtins without them, for code that is no
    program."""
    plain = dict(vars(builtins))
    # ``typing`` comes first, because ``collections`` has better versions of some of its names.
    loaded = [importlib.import_module(name) for name in ("typing", *_MODULES)]
    names = {name: value for module in loaded for name, value in _public(module).items()}
    names |= dict(zip(_MODULES, loaded[1:], strict=True))
    names |= {"ListNode": ListNode, "TreeNode": TreeNode}
    builtins.__dict__.update({name: names[name] for name in names.keys() - plain.keys()})
    sys.setrecursionlimit(_DEEP)
    getattr(sys, "set_int_max_str_digits", int)(0)  # an older Python has no limit
    return plain


def _public(module: Any) -> dict[str, Any]:
    names = getattr(module, "__all__", None) or [n for n in vars(module) if not n.startswith("_")]
    return {name: getattr(module, name) for name in names}
