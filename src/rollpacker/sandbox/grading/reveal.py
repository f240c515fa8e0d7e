"""Takes what asserts expect out of them: a program cannot forge what it has to return.

Only the row's own text is parsed here, never what a model wrote.
"""

from __future__ import annotations

import ast
import builtins
import re
import sys
from collections.abc import Collection, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

from rollpacker.sandbox.grading.decode import Pairs, SetMembers
from rollpacker.sandbox.guest.values import encode

_MADE: dict[str, Any] = {"float": float, "list": list, "set": set, "tuple": tuple}
_FOREIGN = {*dir(builtins), *sys.stdlib_module_names, "pytest", ""}
_ISCLOSE = {"rel_tol": 1e-9, "abs_tol": 0.0}
_ENDS = ast.Return | ast.Yield | ast.YieldFrom | ast.Await
_LEFT = ast.Assert | ast.Raise | ast.With | ast.ClassDef
_LEFT_OUT = re.compile(r"skip|xfail|pytestmark")


class Demand(NamedTuple):
    """What an assert, ``source``, demands of a value: to equal ``expected``, to be it, or to be no
    farther from it than ``within``."""

    source: str
    expected: Any
    same_type: bool = False
    within: float | None = None

    def holds(self, found: Any) -> bool:
        """Whether a decoded value is as demanded."""
        if self.within is not None:
            near = type(found) in (int, float) and abs(found) < sys.float_info.max
            return near and abs(found - self.expected) <= self.within
        same = type(found) is type(self.expected) or not self.same_type
        return same and bool(_plain(found) == self.expected)


class Revealed(NamedTuple):
    """The ``code`` of tests that reveal values, as ``__reveal__(place, value)``, the ``checks`` of
    these by place, and whether tests are left that the program's process judges."""

    code: str
    checks: list[Demand]
    forgeable: bool


@lru_cache(1024)
def reveal(source: str) -> Revealed:
    """Tests without the literals that they expect, where an assert is run in any case."""
    checks: list[Demand] = []
    try:
        tree = ast.parse(source)
        foreign = _foreign(tree)
        for body in () if _LEFT_OUT.search(source) else _bodies(tree):
            for place, each in enumerate(body):
                demand = isinstance(each, ast.Assert) and _demand(each.test, foreign)
                if demand:
                    (body[place],) = ast.parse(f"__reveal__({len(checks)}, {demand[0]})").body
                    checks.append(demand[1])
        code = ast.unparse(_Guard().visit(tree))
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return Revealed(source, [], forgeable=True)
    left = any(isinstance(each, _LEFT) for each in ast.walk(tree))
    return Revealed(code, checks, left or not checks)


class _Guard(ast.NodeTransformer):
    """Has what is left to be compared inside looked at before, as ``__real__(value)``."""

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        self.generic_visit(node)
        node.left, *node.comparators = map(_guarded, [node.left, *node.comparators])
        return node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr.startswith("assert"):
            node.args = [*map(_guarded, node.args)]
        return node


def _guarded(value: ast.expr) -> ast.expr:
    plain = isinstance(value, ast.Constant | ast.Starred)
    return value if plain else ast.Call(ast.Name("__real__"), [value], [])


def _bodies(tree: ast.Module) -> Iterator[list[ast.stmt]]:
    """Statements that are run in any case: the file's, those of its tests and of what it calls."""
    yield tree.body
    called = {_root(each.value) for each in tree.body if isinstance(each, ast.Expr)}
    functions = {each.name: each for each in tree.body if isinstance(each, ast.FunctionDef)}
    for name, each in functions.items():
        whole = not each.decorator_list and not any(isinstance(n, _ENDS) for n in ast.walk(each))
        if whole and (name.startswith("test") or name in called):
            yield each.body


def _foreign(tree: ast.Module) -> set[str]:
    """Names that are not the program's."""
    defined = [each for each in tree.body if isinstance(each, ast.FunctionDef | ast.ClassDef)]
    imports = [each for each in tree.body if isinstance(each, ast.ImportFrom)]
    imported = [name for each in imports if each.module != "solution" for name in each.names]
    return _FOREIGN | {each.name for each in defined} | {n.asname or n.name for n in imported}


def _demand(test: ast.expr, foreign: Collection[str]) -> tuple[str, Demand] | None:
    """The source of the value that an assert is about, and what it demands of it."""
    source = ast.unparse(test)
    within, same_type = None, False
    try:
        match test:
            case ast.Compare(
                ast.Call(ast.Name("abs"), [ast.BinOp(one, ast.Sub(), other)]),
                [ast.Lt() | ast.LtE()],
                [limit],
            ):
                found, expected = _sides(one, other)
                within = float(_literal(limit)) + 0.0 * expected  # both are numbers
            case ast.Call(ast.Attribute(ast.Name("math"), "isclose"), [one, other], given):
                found, expected = _sides(one, other)
                # A program may have put a function of its own into the module.
                limits = _ISCLOSE | {str(each.arg): _literal(each.value) for each in given}
                within = max(limits["rel_tol"] * abs(expected), limits["abs_tol"])
            case ast.Compare(one, [ast.Eq() | ast.Is() as how], [other]):
                found, expected = _sides(one, other)
                same_type = isinstance(how, ast.Is)
            case ast.UnaryOp(ast.Not(), found) | (ast.Call() as found):
                expected, same_type = test is found, True
            case _:
                return None
    except (TypeError, ValueError):
        return None
    single = isinstance(expected, bool | None)
    # Of what compares inside, true says nothing.
    if (single and _root(found) in foreign) or (same_type and not single):
        return None
    truth = "" if within is not None or isinstance(test, ast.Compare) else "not not "
    return truth + ast.unparse(found), Demand(source, expected, same_type, within)


def _sides(one: ast.expr, other: ast.expr) -> tuple[ast.expr, Any]:
    """A value, and the literal that it is compared with."""
    try:
        return one, _literal(other)
    except (TypeError, ValueError):
        return other, _literal(one)


def _literal(node: ast.expr) -> Any:
    """Its value, if that is of plain types. Raises ``TypeError`` or ``ValueError``."""
    match node:
        case ast.Call(ast.Name(name), [inner], []) if name in _MADE:
            value = _MADE[name](_literal(inner))
        case _:
            value = ast.literal_eval(node)
    encode(value)
    return value


def _root(node: ast.AST) -> str:
    """The name that calls, attributes and items begin with, or nothing."""
    while isinstance(node, ast.Attribute | ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return getattr(node, "id", "")


def _plain(value: Any) -> Any:
    """With dicts and sets, which are no larger here than what is expected."""
    if isinstance(value, Pairs):
        return {key: _plain(each) for key, each in value}
    if isinstance(value, SetMembers):
        return set(value)
    return type(value)(map(_plain, value)) if isinstance(value, list | tuple) else value
