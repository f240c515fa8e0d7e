"""Names that programs may use without importing them, as the harnesses of public datasets have it.

Answers to LeetCode's tasks use ``List``, ``defaultdict`` or ``heapq`` as if they were built in;
LiveCodeBench, APPS and verl run one list of imports before every program. Here the names join the
builtins, once for all programs: those that a program defines hide them, its own stay what a test
finds in it, and an execution costs nothing more.

It imports nothing of this package, so that it can also be sent elsewhere as text.
"""

from __future__ import annotations

import builtins
import importlib
import sys
from typing import Any

_MODULES = (
    *("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random"),
    *("statistics", "itertools", "functools", "operator", "io", "sys", "json"),
)
"""Of each, all public names, then itself, as many have a name in common with a module."""

_DEEP = 50_000
"""Calls inside of each other, as in LiveCodeBench."""


class ListNode:
    """LeetCode's linked list."""

    def __init__(self, val: Any = 0, next: Any = None) -> None:
        self.val, self.next = val, next


class TreeNode:
    """LeetCode's binary tree."""

    def __init__(self, val: Any = 0, left: Any = None, right: Any = None) -> None:
        self.val, self.left, self.right = val, left, right


def install() -> dict[str, Any]:
    """Add the names to the builtins; the builtins without them, for code that is no program."""
    plain = dict(vars(builtins))
    # Only some of typing's have a better namesake in collections.
    loaded = [importlib.import_module(name) for name in ("typing", *_MODULES)]
    names = {name: value for module in loaded for name, value in _public(module).items()}
    names |= dict(zip(_MODULES, loaded[1:], strict=True))
    names |= {"ListNode": ListNode, "TreeNode": TreeNode}
    builtins.__dict__.update({name: names[name] for name in names.keys() - plain.keys()})
    sys.setrecursionlimit(_DEEP)
    getattr(sys, "set_int_max_str_digits", int)(0)  # an older Python has no limit
    return plain


def _public(module: Any) -> dict[str, Any]:
    """What ``from module import *`` brings; some of typing's are made as they are asked for."""
    names = getattr(module, "__all__", None) or [n for n in vars(module) if not n.startswith("_")]
    return {name: getattr(module, name) for name in names}
