"""Finds and runs the tests of a file as pytest does, with the stand-in for it."""

from __future__ import annotations

import inspect
import itertools
import sys
import unittest
from collections.abc import Mapping, Sequence
from typing import Any

from .pytests import BUILT_IN, Options, PytestMark, SkippedError, marks_of, marks_on, unparam


def run_tests(space: dict[str, Any], program: dict[str, Any]) -> None:
    """Run every test in ``space`` that is not the program's. The first failure raises. It also
    raises if there are tests and all of them are left out."""
    own = {n: v for n, v in space.items() if not (n in program and program[n] is v)}
    session = _Session(own)
    _call_hook(own.get("setup_module"), None)
    for name, found in own.items():
        if inspect.isclass(found):
            if issubclass(found, unittest.TestCase):
                session.run_unittest(found)
            elif name.startswith("Test"):
                session.run_class(found, session.fixtures, session.marks)
        elif name.startswith("test") and callable(found):
            _call_hook(own.get("setup_function"), found)
            session.run(found, session.fixtures, session.marks)
            _call_hook(own.get("teardown_function"), found)
    _close(session.closing)
    _call_hook(own.get("teardown_module"), None)
    if session.found and not session.passed:
        raise AssertionError("no test was run: all of them are skipped or fail as expected")


def _fixtures_in(space: Mapping[str, Any]) -> dict[str, Any]:
    found = {n: v for n, v in space.items() if isinstance(getattr(v, "fixture", None), Options)}
    return {value.fixture.name or name: value for name, value in found.items()}


def _call_hook(hook: Any, test: Any) -> None:
    if hook is not None:
        hook(*([test] if inspect.signature(hook).parameters else []))


def _close(closing: list[Any]) -> None:
    while closing:
        next(closing.pop(), None)


class _Result(unittest.TestResult):
    # Counts passed tests, since ``testsRun`` counts skipped ones on some versions of Python.

    held = 0

    def addSuccess(self, test: unittest.TestCase) -> None:  # noqa: N802
        super().addSuccess(test)
        self.held += 1


class _Session:
    def __init__(self, space: Mapping[str, Any]) -> None:
        self.fixtures = {**BUILT_IN, **_fixtures_in(space)}
        self.marks = [*space["pytestmark"]] if isinstance(space.get("pytestmark"), list) else []
        self.shared: dict[Any, Any] = {}
        self.closing: list[Any] = []
        self.found = self.passed = 0

    def run_unittest(self, kind: Any) -> None:
        result = _Result()
        suite = unittest.defaultTestLoader.loadTestsFromTestCase(kind)
        self.found += suite.countTestCases()
        suite.run(result)
        self.passed += result.held
        broken = [*result.failures, *result.errors]
        if broken:
            raise AssertionError(broken[0][1].strip().rpartition("\n")[2])
        if result.unexpectedSuccesses:
            raise AssertionError("a test that is expected to fail did not")

    def run_class(
        self, kind: Any, fixtures: Mapping[str, Any], marks: Sequence[PytestMark]
    ) -> None:
        # Each method runs on an instance of its own. Nested ``Test*`` classes count too.
        marks = [*marks, *marks_on(kind)]
        _call_hook(getattr(kind, "setup_class", None), kind)
        for name in dir(kind):
            if name.startswith("Test") and inspect.isclass(getattr(kind, name)):
                self.run_class(getattr(kind, name), fixtures, marks)
            if not (name.startswith("test") and callable(getattr(kind, name))):
                continue
            instance = kind()
            test = getattr(instance, name)
            own = _fixtures_in({each: getattr(instance, each) for each in dir(kind)})
            _call_hook(getattr(instance, "setup_method", None), test)
            self.run(test, {**fixtures, **own}, marks)
            _call_hook(getattr(instance, "teardown_method", None), test)
        _call_hook(getattr(kind, "teardown_class", None), kind)

    def run(self, test: Any, fixtures: Mapping[str, Any], marks: Sequence[PytestMark]) -> None:
        marks = [*marks, *marks_on(test)]
        axes = [mark.rows() for mark in marks if mark.name == "parametrize"]
        given = {name for rows in axes for name in (rows[0][0] if rows else ())}
        used = [name for mark in marks if mark.name == "usefixtures" for name in mark.args]
        used += [name for name, each in fixtures.items() if each.fixture.autouse]
        wanted = _closure([*used, *(n for n in _arguments(test) if n not in given)], fixtures)
        several = [(n, fixtures[n].fixture.params) for n in wanted if n in fixtures]
        choices = [[(n, v) for v in values] for n, values in several if values is not None]
        self.found += not all(axes)  # an axis without values leaves the test out
        for rows in itertools.product(*axes):
            for params in itertools.product(*choices):
                own = [mark for _, each in rows for mark in each]
                own += [mark for _, value in params for mark in marks_of(value)]
                run = _Run(self, fixtures, dict(params), used)
                arguments = {name: value for row, _ in rows for name, value in row.items()}
                self._once(test, run, arguments, [*marks, *own])

    def _once(
        self, test: Any, run: _Run, arguments: dict[str, Any], marks: Sequence[PytestMark]
    ) -> None:
        self.found += 1
        if any(m.name == "skip" or (m.name == "skipif" and m.holds) for m in marks):
            return
        expected = [mark for mark in marks if mark.name == "xfail" and mark.holds]
        try:
            run.call(test, arguments)
        except (SkippedError, unittest.SkipTest):
            return
        except Exception as error:
            if any(isinstance(error, mark.named.get("raises") or Exception) for mark in expected):
                return
            raise
        if any(mark.named.get("strict") for mark in expected):
            raise AssertionError("a test that is expected to fail did not")
        self.passed += 1


_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def _arguments(function: Any) -> list[str]:
    # The arguments that are fixtures, without those that patches of ``unittest.mock`` pass.
    parameters = inspect.signature(function).parameters.values()
    names = [p.name for p in parameters if p.default is p.empty and p.kind in _BY_NAME]
    patches = getattr(function, "patchings", ())
    # The module is large, and is loaded only if there are patches.
    default = getattr(sys.modules.get("unittest.mock"), "DEFAULT", None)
    return names[sum(not p.attribute_name and p.new is default for p in patches) :]


def _closure(names: Sequence[str], fixtures: Mapping[str, Any]) -> list[str]:
    found = list(dict.fromkeys(names))
    for name in found:
        if name in fixtures:
            found += [each for each in _arguments(fixtures[name]) if each not in found]
    return found


class _Request:
    def __init__(self, run: _Run, name: str) -> None:
        self._run = run
        if name in run.params:
            self.param = unparam(run.params[name])

    def addfinalizer(self, function: Any) -> None:
        self._run.closing.append(iter(function, None))

    def getfixturevalue(self, name: str) -> Any:
        return self._run.value(name)


class _Run:
    def __init__(
        self,
        session: _Session,
        fixtures: Mapping[str, Any],
        params: Mapping[str, Any],
        used: Sequence[str],
    ) -> None:
        self._session = session
        self._fixtures = fixtures
        self._used = used
        self.params = params
        self.values: dict[Any, Any] = {}
        self.closing: list[Any] = []

    def call(self, test: Any, arguments: dict[str, Any]) -> None:
        try:
            for name in self._used:
                self.value(name)
            for name in _arguments(test):
                if name not in arguments:
                    arguments[name] = self.value(name)
            if inspect.iscoroutinefunction(test):
                raise TypeError("a test that is async cannot be run here")
            test(**arguments)
        finally:
            _close(self.closing)

    def value(self, name: str) -> Any:
        function = self._fixtures.get(name)
        if function is None:
            raise TypeError(f"there is no fixture '{name}' here")
        shared = function.fixture.shared
        values = self._session.shared if shared else self.values
        key = (name, id(self.params.get(name))) if shared else name
        if key not in values:
            values[key] = self._made(name, function, shared)
        return values[key]

    def _made(self, name: str, function: Any, shared: bool) -> Any:
        wanted = _arguments(function)
        given = {n: _Request(self, name) if n == "request" else self.value(n) for n in wanted}
        value = function(**given)
        if not inspect.isgenerator(value):
            return value
        (self._session.closing if shared else self.closing).append(value)
        return next(value)
