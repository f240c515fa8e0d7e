"""Performs a job: runs a program, and the test's use of it. It imports nothing of this package, so
that its text can be sent elsewhere."""

from __future__ import annotations

import builtins
import contextlib
import json
import sys
import textwrap
import types
import unittest
from typing import Any


def perform(
    fields: dict[str, str], run_tests: Any, encode: Any, plain: dict[str, Any]
) -> dict[str, Any]:
    """Return the outcome of a job. This is the encoded ``value`` of a call, or that the asserts
    ``held`` and the values that they revealed. Asserts see the builtins ``plain``."""
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
        return {"value": encode(_call(space, fields))}
    if kind == "asserts":
        revealed: list[Any] = []
        tests = {**space, **(_helpers(fields) if "prompt" in fields else {}), "__builtins__": plain}
        # Encode at once, because a program may change the value later.
        tests["__reveal__"] = lambda *value: revealed.append(encode(value))
        tests["__real__"] = _real
        _assert(fields["code"], tests, space, run_tests)
        return {"held": True, "value": ["l", revealed]}
    return {}


def _compiled(source: str, name: str = "<program>") -> Any:
    return compile(source, name, "exec", dont_inherit=True)


def _complete(fields: dict[str, str], space: dict[str, Any]) -> None:
    program, prompt = fields["program"], fields["prompt"]
    try:
        code = _compiled(program)
    except SyntaxError:
        code = _body(prompt, program)
        if code is None:
            raise
        exec(code, space)
        return
    # The prompt may be prose, or import modules that are missing here.
    with contextlib.suppress(Exception):
        exec(_compiled(prompt, "<prompt>"), space)
    # The program must define the function that the prompt only begins.
    space.pop(fields["stub"], None)
    exec(code, space)


def _helpers(fields: dict[str, str]) -> dict[str, Any]:
    # The functions that a prompt defines for its tests, unchanged by the program.
    space: dict[str, Any] = {}
    with contextlib.suppress(Exception):
        exec(_compiled(fields["prompt"], "<prompt>"), space)
    theirs = fields["stub"].partition("(")[0]
    return {name: each for name, each in space.items() if callable(each) and name != theirs}


def _body(prompt: str, program: str) -> Any:
    # The prompt's function with the program as its body; None if that does not compile.
    body = program if program.lstrip("\n")[:1].isspace() else textwrap.indent(program, "    ")
    try:
        return _compiled(f"{prompt.rstrip()}\n{body}")
    except SyntaxError:
        return None


def _call(space: dict[str, Any], fields: dict[str, str]) -> Any:
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
    nodes = json.loads(fields["nodes"]) if "nodes" in fields else {}
    for key in nodes and (args if isinstance(args, dict) else range(len(args))):
        args[key] = _linked(args[key], nodes.get(str(key), ""), space)
    if isinstance(args, dict):
        return _listed(target(**args), nodes.get("return", ""))
    for place in map(int, fields.get("number_keys", "").split()):
        args[place] = {int(key): value for key, value in args[place].items()}
    value = target(*args)
    if "in_place" in fields:
        return _listed(args[0], nodes.get("0", ""))
    return _listed(value, nodes.get("return", ""))


def _linked(value: Any, kind: str, space: dict[str, Any]) -> Any:
    if kind[:1] == "*":
        return [_linked(each, kind[1:], space) for each in value]
    if not kind:
        return value
    make = space.get(kind) or vars(builtins)[kind]
    nodes = [None if each is None else make(each) for each in value or [None]]
    parents = [node for node in nodes if node is not None]
    for place, node in enumerate(nodes[1:]):
        if kind == "ListNode":
            parents[place].next = node
        else:
            setattr(parents[place // 2], ("left", "right")[place % 2], node)
    return nodes[0]


def _listed(value: Any, kind: str) -> Any:
    if kind[:1] == "*":
        return [_listed(each, kind[1:]) for each in value]
    if not kind:
        return value
    nodes = [value]
    for node in nodes:  # the list grows meanwhile
        if node is not None:
            nodes += [node.next] if kind == "ListNode" else [node.left, node.right]
    values = [None if node is None else node.val for node in nodes]
    while values and values[-1] is None:
        values.pop()
    return values


def _assert(code: str, space: dict[str, Any], program: dict[str, Any], run_tests: Any) -> None:
    space["__name__"] = "__tests__"
    unittest.main = _nothing  # type: ignore[misc,assignment]  # they are run in any case
    exec(_compiled(code, "<tests>"), space)
    run_tests(space, program)


def _real(value: Any) -> Any:
    if type(value) in (int, float, bool, str, bytes, type(None)):
        return value
    if isinstance(value, list | tuple | dict):
        for each in value.values() if isinstance(value, dict) else value:
            _real(each)
    try:
        claims = bool(value == object())
    except Exception:
        claims = False
    if claims:
        raise AssertionError("the value claims to equal whatever it is compared with")
    return value


def _nothing(*_: Any, **__: Any) -> None: ...
