"""Performs a job: runs a program, and what a test does with it.

It imports nothing of this package, so that it can also be sent elsewhere as text.
"""

from __future__ import annotations

import contextlib
import json
import sys
import textwrap
import types
import unittest
from typing import Any


def perform(fields: dict[str, str], run_tests: Any, plain: dict[str, Any]) -> dict[str, Any]:
    """The outcome of a job: the ``value`` of a call, or that its asserts ``held``.

    Asserts see the builtins ``plain``.
    """
    kind = fields["kind"]
    name = "__main__" if kind == "stdin" else "solution"
    module = types.ModuleType(name)
    sys.modules[name] = module
    space = vars(module)
    space["__file__"] = f"/{name.strip('_')}.py"
    if fields.get("prompt"):
        _complete(fields, space)
    else:
        exec(_compiled(fields["program"]), space)
    if kind == "call":
        return {"value": _call(space, fields)}
    if kind == "asserts":
        _assert(fields["code"], {**space, "__builtins__": plain}, space, run_tests)
        return {"held": True}
    return {}


def _compiled(source: str, name: str = "<program>") -> Any:
    return compile(source, name, "exec", dont_inherit=True)


def _complete(fields: dict[str, str], space: dict[str, Any]) -> None:
    """Run a program that goes on where its prompt ends, or repeats what the prompt began."""
    program, prompt = fields["program"], fields["prompt"]
    try:
        code = _compiled(program)
    except SyntaxError:
        code = _body(prompt, program)
        if code is None:
            raise
        exec(code, space)
        return
    # It may be a text, or import more than there is here.
    with contextlib.suppress(Exception):
        exec(_compiled(prompt, "<prompt>"), space)
    # What the prompt has only begun is not the program's.
    space.pop(fields["stub"], None)
    exec(code, space)


def _body(prompt: str, program: str) -> Any:
    """The function that a prompt begins with the body that a program is; None if it is none."""
    body = program if program.lstrip("\n")[:1].isspace() else textwrap.indent(program, "    ")
    try:
        return _compiled(f"{prompt.rstrip()}\n{body}")
    except SyntaxError:
        return None


def _call(space: dict[str, Any], fields: dict[str, str]) -> Any:
    """Call ``function``, ``Class.method`` or a method of ``Solution``, on a new instance."""
    path = fields["call"]
    first, _, method = path.partition(".")
    if first not in space and hasattr(space.get("Solution"), path):
        first, method = "Solution", path
    if first not in space:
        raise NameError(f"the program has no '{first}'")
    target = space[first]
    if method:
        target = getattr(target(), method)
    args = json.loads(fields["args"])
    if isinstance(args, dict):
        return target(**args)
    for place in map(int, fields.get("number_keys", "").split()):
        args[place] = {int(key): value for key, value in args[place].items()}
    value = target(*args)
    return args[0] if "in_place" in fields else value


def _assert(code: str, space: dict[str, Any], program: dict[str, Any], run_tests: Any) -> None:
    """Run asserts that see the program's names, then the tests among them."""
    space["__name__"] = "__tests__"
    unittest.main = _nothing  # type: ignore[misc,assignment]  # they are run in any case
    exec(_compiled(code, "<tests>"), space)
    run_tests(space, program)


def _nothing(*_: Any, **__: Any) -> None: ...
