"""Performs a job: runs a program, and what a test does with it.

It imports nothing of this package, so that it can also be sent elsewhere as text.
"""

from __future__ import annotations

import json
import sys
import types
from typing import Any


def perform(fields: dict[str, str], run_tests: Any) -> dict[str, Any]:
    """The outcome of a job: the ``value`` of a call, or that its asserts ``held``."""
    kind = fields["kind"]
    name = "__main__" if kind == "stdin" else "solution"
    module = types.ModuleType(name)
    sys.modules[name] = module
    space = vars(module)
    exec(compile(fields["program"], "<program>", "exec", dont_inherit=True), space)
    if kind == "call":
        return {"value": _call(space, fields["call"], json.loads(fields["args"]))}
    if kind == "asserts":
        _assert(fields["code"], space, run_tests)
        return {"held": True}
    return {}


def _call(space: dict[str, Any], path: str, args: list[Any]) -> Any:
    """Call ``function``, ``Class.method`` or a method of ``Solution``, on a new instance."""
    first, _, method = path.partition(".")
    if first not in space and hasattr(space.get("Solution"), path):
        first, method = "Solution", path
    if first not in space:
        raise NameError(f"the program has no '{first}'")
    target = space[first]
    if method:
        target = getattr(target(), method)
    return target(*args)


def _assert(code: str, program: dict[str, Any], run_tests: Any) -> None:
    """Run asserts that see the program's names, then the tests among them."""
    space: dict[str, Any] = {**program, "__name__": "__tests__"}
    exec(compile(code, "<tests>", "exec", dont_inherit=True), space)
    run_tests(space, program)
