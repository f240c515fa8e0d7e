"""A small stand-in for pytest, as installed packages are out of reach of programs.

It is imported as ``pytest`` too: ``raises``, ``approx``, ``fixture``, ``mark.parametrize``,
``param``, ``fail`` and ``skip`` do what datasets of tests use them for, and other marks nothing.
``run_tests`` finds and runs tests as pytest does.
"""

from __future__ import annotations

import inspect
import itertools
import math
import re
import unittest
from typing import Any


class SkippedError(Exception):
    """What ``skip`` raises; a test that ends with it counts as passed."""


class _Raised:
    value: Any = None
    type: Any = None


class _Raises:
    def __init__(self, expected: Any, match: str | None) -> None:
        self._expected = expected
        self._match = match
        self._raised = _Raised()

    def __enter__(self) -> _Raised:
        return self._raised

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        if kind is None:
            raise AssertionError(f"did not raise {self._expected}")
        if not issubclass(kind, self._expected):
            return False
        self._raised.type, self._raised.value = kind, error
        if self._match is not None and not re.search(self._match, str(error)):
            raise AssertionError(f"{self._match!r} is not in {str(error)!r}")
        return True


def raises(expected: Any, *args: Any, match: str | None = None, **kwargs: Any) -> Any:
    """``with raises(Error, match=...)``, or ``raises(Error, function, *args)``."""
    context = _Raises(expected, match)
    if not args:
        return context
    with context as raised:
        args[0](*args[1:], **kwargs)
    return raised


class approx:  # noqa: N801
    """Equal to numbers within 1e-6 of them or 1e-12, also those in lists, tuples and dicts."""

    def __init__(self, expected: Any, rel: float | None = None, abs: float | None = None) -> None:
        self._expected = expected
        # An absolute tolerance alone takes the place of the relative one.
        self._rel = rel if rel is not None else 0.0 if abs is not None else 1e-6
        self._abs = abs if abs is not None else 1e-12

    def __eq__(self, found: Any) -> bool:
        expected = self._expected
        if isinstance(expected, dict):
            return (
                isinstance(found, dict)
                and found.keys() == expected.keys()
                and all(self._near(found[key], expected[key]) for key in expected)
            )
        if isinstance(expected, list | tuple):
            return len(found) == len(expected) and all(map(self._near, found, expected))
        return self._near(found, expected)

    __hash__ = None  # type: ignore[assignment]

    def _near(self, found: Any, expected: Any) -> bool:
        if found == expected:
            return True
        try:
            return math.isclose(found, expected, rel_tol=self._rel, abs_tol=self._abs)
        except TypeError:
            return False


class _Marks:
    def __getattr__(self, _name: str) -> Any:
        return _mark

    @staticmethod
    def parametrize(names: Any, values: Any, **_: Any) -> Any:
        """Once with each of the values; several of these multiply."""
        split = [each.strip() for each in names.split(",")] if isinstance(names, str) else names
        wrapped = [row if len(split) > 1 else (_unparam(row),) for row in values]
        rows = [dict(zip(split, _unparam(row), strict=True)) for row in wrapped]

        def decorate(function: Any) -> Any:
            function.parameters = [*getattr(function, "parameters", ()), rows]
            return function

        return decorate


def _mark(*args: Any, **_: Any) -> Any:
    plain = len(args) == 1 and callable(args[0])
    return args[0] if plain else lambda function: function


class _Param(tuple[Any, ...]):
    pass


def param(*values: Any, **_: Any) -> Any:
    """A row of ``parametrize``; its id and marks are nothing to us."""
    return _Param(values)


def _unparam(row: Any) -> Any:
    return row[0] if isinstance(row, _Param) and len(row) == 1 else row


def fixture(function: Any = None, **_: Any) -> Any:
    """A value for the tests that name it as an argument, made anew for each."""
    if function is None:
        return fixture
    function.is_fixture = True
    return function


def fail(reason: str = "", **_: Any) -> None:
    """Fail a test."""
    raise AssertionError(reason)


def skip(reason: str = "", **_: Any) -> None:
    """Leave a test out."""
    raise SkippedError(reason)


def main(*_: Any, **__: Any) -> int:
    """Do nothing: the tests are run in any case."""
    return 0


mark = _Marks()


def run_tests(space: dict[str, Any], program: dict[str, Any]) -> None:
    """Run every test in ``space`` that the program has not brought; the first failure raises."""
    for name, found in list(space.items()):
        if name in program and program[name] is found:
            continue
        if inspect.isclass(found):
            if issubclass(found, unittest.TestCase):
                _run_unittest(found)
            elif name.startswith("Test"):
                _run_class(found, space)
        elif name.startswith("test") and callable(found):
            _run_function(found, space)


def _run_class(kind: Any, space: dict[str, Any]) -> None:
    for name in [each for each in dir(kind) if each.startswith("test")]:
        instance = kind()
        for each in ("setup_class", "setup_method"):
            _call_hook(getattr(instance, each, None), getattr(instance, name))
        own = {each: getattr(instance, each) for each in dir(kind) if _is_fixture(kind, each)}
        _run_function(getattr(instance, name), {**space, **own})
        _call_hook(getattr(instance, "teardown_method", None), getattr(instance, name))


def _is_fixture(kind: Any, name: str) -> bool:
    return getattr(getattr(kind, name, None), "is_fixture", False)


def _call_hook(hook: Any, test: Any) -> None:
    if hook is not None:
        hook(*([test] if inspect.signature(hook).parameters else []))


def _run_unittest(kind: Any) -> None:
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(kind).run(result)
    broken = [*result.failures, *result.errors]
    if broken:
        raise AssertionError(broken[0][1].strip().rpartition("\n")[2])


def _run_function(test: Any, space: dict[str, Any]) -> None:
    for rows in itertools.product(*getattr(test, "parameters", ())):
        given = {name: value for row in rows for name, value in row.items()}
        running: list[Any] = []
        try:
            test(**given, **_fixtures(test, space, given, running))
        except (SkippedError, unittest.SkipTest):
            continue
        finally:
            for generator in reversed(running):
                next(generator, None)


def _fixtures(
    function: Any, space: dict[str, Any], given: dict[str, Any], running: list[Any]
) -> dict[str, Any]:
    """The values of the fixtures that a function names; those that yield go on afterwards."""
    values: dict[str, Any] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if name in given or parameter.default is not parameter.empty:
            continue
        if not getattr(space.get(name), "is_fixture", False):
            raise TypeError(f"there is no fixture '{name}' here")
        value = space[name](**_fixtures(space[name], space, {}, running))
        if inspect.isgenerator(value):
            running.append(value)
            value = next(value)
        values[name] = value
    return values
