"""Checks from their source whether a row's tests can be run at all. Only the row's own text is
parsed here, never the text of a model."""

from __future__ import annotations

import ast
import builtins
import sys
from collections.abc import Collection, Iterator
from typing import TypeGuard

_LIBRARY = {*sys.stdlib_module_names, "solution", "pytest"}
_OUT_OF_REACH = {"asyncio", "concurrent", "multiprocessing", "socket", "subprocess", "tempfile"}
"""Modules of the library that need a thread, a process, a connection or a file."""
_FIXTURES = {"monkeypatch", "capsys", "capfd", "request"}
_PYTEST = {
    *("raises", "warns", "approx", "fixture", "mark", "param", "fail", "skip", "xfail", "main"),
    *("MonkeyPatch", "SkippedError"),
}
_GUARDS = {"ImportError", "ModuleNotFoundError", "Exception", "BaseException"}
_BUILTINS = frozenset(dir(builtins))
_DEF = ast.FunctionDef | ast.AsyncFunctionDef


def fault(source: str, library_only: bool) -> str | None:
    """Return in a few words why no program, or any program, would pass these tests, else None.

    ``library_only``: they run without packages, processes and files. Text that is no Python has no
    fault here, because running it gives a better error.
    """
    tree = _parsed(source)
    try:
        return None if tree is None else _fault(tree, library_only)
    except RecursionError:  # from a thousand elifs, for example
        return None


def _fault(tree: ast.Module, library_only: bool) -> str | None:
    nodes = list(_run(tree))
    lacking = {*_imported(nodes)} & _OUT_OF_REACH or {*_imported(nodes)} - _LIBRARY
    if library_only and lacking:
        return (
            f"they import {min(lacking)}, but the sandbox has only the standard library, without "
            "threads, processes and files: leave such rows out, or run them elsewhere "
            "(options.remote)"
        )
    tests = list(_tests(tree.body))
    if any(isinstance(test, ast.AsyncFunctionDef) for test in tests):
        return "they have async tests, which the sandbox does not run: leave such rows out"
    if unknown := {*_of_pytest(nodes)} - _PYTEST or {*_unknown_fixtures(nodes, tests)}:
        return (
            f"they use '{min(unknown)}' of pytest, which its stand-in here lacks: leave such "
            "rows out"
        )
    if not tests and not any(map(_checks, tree.body)):
        return (
            "no test in them runs: no assert stands outside of functions, and no function is "
            "called test* (if they define check(), 'entry_point' must name the function to check)"
        )
    return None


def wanted(source: str) -> set[str]:
    """Return the names that tests need from a program: imports from ``solution``, else calls of
    names that they do not define."""
    tree = _parsed(source)
    nodes = [] if tree is None else list(ast.walk(tree))
    imported = {
        alias.name
        for node in nodes
        if isinstance(node, ast.ImportFrom) and node.module == "solution"
        for alias in node.names
    }
    if imported - {"*"}:
        return imported
    called = {
        node.func.id
        for node in nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    return called - _BUILTINS - {*_bound(nodes)}


def _parsed(source: str) -> ast.Module | None:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None


def _bound(nodes: Collection[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, _DEF | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)


def _run(tree: ast.Module) -> Iterator[ast.AST]:
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += node.orelse if _is_guard(node) else ast.iter_child_nodes(node)


def _is_guard(node: ast.AST) -> TypeGuard[ast.If]:
    return isinstance(node, ast.If) and any(
        isinstance(each, ast.Name) and each.id == "__name__" for each in ast.walk(node.test)
    )


# -- imports


def _imported(nodes: Collection[ast.AST]) -> Iterator[str]:
    spared = {
        id(each)
        for node in nodes
        if isinstance(node, ast.Try) and any(map(_is_import_error, node.handlers))
        for each in ast.walk(node)
    }
    for node in nodes:
        if id(node) in spared:
            continue
        if isinstance(node, ast.Import):
            yield from (name.name.partition(".")[0] for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def _is_import_error(handler: ast.ExceptHandler) -> bool:
    names = {each.id for each in ast.walk(handler.type or handler) if isinstance(each, ast.Name)}
    return handler.type is None or bool(names & _GUARDS)


# -- tests


def _tests(body: Collection[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            if node.name.startswith("Test") or node.bases:
                yield from _tests(node.body)
                # Its tests may be those of a class that it inherits from.
                yield from [node] * any(_name(base) not in _PLAIN for base in node.bases)
        elif isinstance(node, _DEF) and node.name.startswith("test"):
            yield node
        elif isinstance(node, ast.Assign):
            named = any(_name(each).lower()[:4] == "test" for each in node.targets)
            yield from [node] * (named and _may_be_function(node.value))
        elif not _is_guard(node) and not isinstance(node, _DEF):
            inside = [each for each in ast.iter_child_nodes(node) if isinstance(each, ast.stmt)]
            yield from _tests(inside)


def _may_be_function(value: ast.expr) -> bool:
    made = isinstance(value, ast.Call) and _is_own(value)
    return made or isinstance(value, ast.Name | ast.Attribute | ast.Lambda)


_PLAIN = {"object", "TestCase", "IsolatedAsyncioTestCase", "ABC", "Exception", "NamedTuple"}


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _checks(statement: ast.AST) -> bool:
    # Whether a statement of the file itself may fail on purpose: it asserts, raises, or calls
    # something that may.
    if isinstance(statement, _DEF | ast.ClassDef) or _is_guard(statement):
        return False
    if isinstance(statement, ast.Assert | ast.Raise):
        return True
    if isinstance(statement, ast.Expr):
        calls = [each for each in ast.walk(statement) if isinstance(each, ast.Call)]
        return statement.value in calls and any(map(_is_own, calls))
    inside = ast.iter_child_nodes(statement)
    return any(_checks(each) for each in inside if isinstance(each, ast.stmt | ast.ExceptHandler))


def _is_own(call: ast.Call) -> bool:
    called: ast.AST = call.func
    while isinstance(called, ast.Attribute | ast.Call | ast.Subscript):
        called = called.func if isinstance(called, ast.Call) else called.value
    name = _name(called) if isinstance(called, ast.expr) else ""
    return name not in _BUILTINS | sys.stdlib_module_names | {"pytest"}


# -- pytest


def _of_pytest(nodes: Collection[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Attribute) and _name(node.value) == "pytest":
            yield node.attr
        elif isinstance(node, ast.ImportFrom) and node.module == "pytest":
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.keyword) and node.arg == "indirect":
            yield "indirect"


def _unknown_fixtures(nodes: Collection[ast.AST], tests: Collection[ast.stmt]) -> Iterator[str]:
    own = {
        node.name
        for node in nodes
        if isinstance(node, _DEF) and any("fixture" in ast.unparse(d) for d in node.decorator_list)
    }
    known = {*_FIXTURES, "self", "cls", *own, *_texts(nodes)}
    for test in tests:
        # A decorator that is not a mark may pass arguments of its own.
        if not isinstance(test, _DEF) or not all(map(_is_mark, test.decorator_list)):
            continue
        arguments = test.args.posonlyargs + test.args.args
        needed = arguments[: len(arguments) - len(test.args.defaults)]
        yield from (each.arg for each in needed if each.arg not in known)


def _texts(nodes: Collection[ast.AST]) -> Iterator[str]:
    # Names in texts, such as those of ``parametrize`` and of a fixture's ``name``.
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from node.value.replace(",", " ").split()


def _is_mark(decorator: ast.expr) -> bool:
    return ast.unparse(decorator).startswith(("pytest.mark.", "mark."))
