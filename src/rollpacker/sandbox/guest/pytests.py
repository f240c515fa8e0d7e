"""A small stand-in for pytest, as installed packages are out of reach of programs.

It is imported as ``pytest`` too, with the parts that datasets of tests use. Marks other than
``parametrize``, ``skip``, ``skipif``, ``xfail`` and ``usefixtures`` do nothing. ``testrun`` finds
and runs tests as pytest does.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import math
import os
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple


class SkippedError(Exception):
    """Raised by ``skip``. A test that ends with it counts as passed."""


class _Raised:
    value: Any = None
    type: Any = None

    def match(self, pattern: str) -> bool:
        if not re.search(pattern, str(self.value)):
            raise AssertionError(f"{pattern!r} is not in {str(self.value)!r}")
        return True


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
        return self._match is None or self._raised.match(self._match)


def raises(expected: Any, *args: Any, match: str | None = None, **kwargs: Any) -> Any:
    """``with raises(Error, match=...)``, or ``raises(Error, function, *args)``."""
    context = _Raises(expected, match)
    if not args:
        return context
    with context as raised:
        args[0](*args[1:], **kwargs)
    return raised


@contextlib.contextmanager
def warns(expected: Any = Warning, *, match: str = "") -> Iterator[list[Any]]:
    """``with warns(Warning, match=...)``."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield found
    fitting = [each for each in found if issubclass(each.category, expected)]
    if not any(re.search(match, str(each.message)) for each in fitting):
        raise AssertionError(f"did not warn of {expected}")


class approx:  # noqa: N801
    """Equal to numbers within 1e-6 of them or 1e-12, also those in lists, tuples and dicts."""

    def __init__(
        self,
        expected: Any,
        rel: float | None = None,
        abs: float | None = None,
        nan_ok: bool = False,
    ) -> None:
        self._expected = expected
        self._nan_ok = nan_ok
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
            if self._nan_ok and math.isnan(expected):
                return math.isnan(found)
            return math.isclose(found, expected, rel_tol=self._rel, abs_tol=self._abs)
        except TypeError:
            return False


class PytestMark:
    """Decorates functions and classes, with arguments or without."""

    def __init__(self, name: str, args: Sequence[Any] = (), named: Mapping[str, Any] = {}) -> None:
        self.name = name
        self.args = args
        self.named = named

    def __call__(self, *args: Any, **named: Any) -> Any:
        if named or len(args) != 1 or not callable(args[0]):
            return PytestMark(self.name, (*self.args, *args), {**self.named, **named})
        marked: Any = args[0]
        marked.pytestmark = [*marks_on(marked), self]
        return marked

    @property
    def holds(self) -> bool:
        """Whether its condition is met. True without a condition."""
        return bool(self.named.get("condition", self.args[0] if self.args else True))

    def rows(self) -> list[tuple[dict[str, Any], list[PytestMark]]]:
        """For ``parametrize``: return the arguments of each run, and its own marks."""
        named = dict(zip(("argnames", "argvalues"), self.args, strict=False)) | dict(self.named)
        names, values = named["argnames"], named["argvalues"]
        split = (
            [n.strip() for n in names.split(",") if n.strip()] if isinstance(names, str) else names
        )
        rows = []
        for each in values:
            row = each if len(split) > 1 or isinstance(each, _Param) else (each,)
            rows.append((dict(zip(split, row, strict=True)), marks_of(each)))
        return rows


class _Marks:
    def __getattr__(self, name: str) -> PytestMark:
        return PytestMark(name)


def marks_on(target: Any) -> list[PytestMark]:
    """Return the marks of a function or a class."""
    found = getattr(target, "pytestmark", ())
    return list(found) if isinstance(found, list | tuple) else [found]


class _Param(tuple[Any, ...]):
    marks: list[PytestMark]


def param(*values: Any, marks: Any = (), **_: Any) -> Any:
    """A row of ``parametrize``, or one of a fixture's ``params``. Its id is ignored."""
    row = _Param(values)
    row.marks = list(marks) if isinstance(marks, list | tuple) else [marks]
    return row


def marks_of(row: Any) -> list[PytestMark]:
    """Return the marks of a row that ``param`` made."""
    return row.marks if isinstance(row, _Param) else []


def unparam(row: Any) -> Any:
    """The value of one of a fixture's ``params``."""
    return row[0] if isinstance(row, _Param) and len(row) == 1 else row


class Options(NamedTuple):
    """The options of a fixture."""

    params: Sequence[Any] | None
    autouse: bool
    shared: bool
    name: str | None


def fixture(
    function: Any = None,
    *,
    params: Any = None,
    autouse: bool = False,
    scope: Any = "function",
    name: str | None = None,
    **_: Any,
) -> Any:
    """A value for the tests that name it as an argument, made anew for each unless ``scope`` is
    wider than a function."""
    rows = None if params is None else list(params)
    options = Options(rows, autouse, scope != "function", name)

    def decorate(function: Any) -> Any:
        function.fixture = options
        return function

    return decorate if function is None else decorate(function)


def fail(reason: str = "", **_: Any) -> None:
    """Fail a test."""
    raise AssertionError(reason)


def skip(reason: str = "", **_: Any) -> None:
    """Leave a test out."""
    raise SkippedError(reason)


xfail = skip


def main(*_: Any, **__: Any) -> int:
    """Do nothing: the tests run in any case."""
    return 0


mark = _Marks()

# -- built-in fixtures

_MISSING: Any = object()


class MonkeyPatch:
    """Changes attributes, items and environment variables until the end of a test."""

    def __init__(self) -> None:
        self._undo: list[Any] = []

    def setattr(self, target: Any, name: Any, value: Any = _MISSING, raising: bool = True) -> None:
        """``setattr(object, "name", value)``, or ``setattr("module.name", value)``."""
        if value is _MISSING:
            target, name, value = *_resolve(target), name
        old = inspect.getattr_static(target, name, _MISSING)
        if old is _MISSING and raising:
            raise AttributeError(f"{target!r} has no attribute {name!r}")
        if old is _MISSING or (inspect.isclass(target) and name not in vars(target)):
            self._undo.append(lambda: delattr(target, name))
        else:
            self._undo.append(lambda: setattr(target, name, old))
        setattr(target, name, value)

    def delattr(self, target: Any, name: str = "", raising: bool = True) -> None:
        if not name:
            target, name = _resolve(target)
        old = inspect.getattr_static(target, name, _MISSING)
        if old is not _MISSING:
            self._undo.append(lambda: setattr(target, name, old))
        if old is not _MISSING or raising:
            delattr(target, name)

    def setitem(self, items: Any, key: Any, value: Any) -> None:
        self._keep(items, key)
        items[key] = value

    def delitem(self, items: Any, key: Any, raising: bool = True) -> None:
        self._keep(items, key)
        if key in items or raising:
            del items[key]

    def setenv(self, name: str, value: Any, **_: Any) -> None:
        self.setitem(os.environ, name, str(value))

    def delenv(self, name: str, raising: bool = True) -> None:
        self.delitem(os.environ, name, raising)

    def _keep(self, items: Any, key: Any) -> None:
        old = items.get(key, _MISSING)
        if old is _MISSING:
            self._undo.append(lambda: items.pop(key, None))
        else:
            self._undo.append(lambda: items.update({key: old}))

    def undo(self) -> None:
        while self._undo:
            self._undo.pop()()


def _resolve(path: str) -> tuple[Any, str]:
    first, *names, last = path.split(".")
    found: Any = importlib.import_module(first)
    for name in names:
        first = f"{first}.{name}"
        found = getattr(found, name) if hasattr(found, name) else importlib.import_module(first)
    return found, last


@fixture
def _monkeypatch() -> Iterator[MonkeyPatch]:
    patch = MonkeyPatch()
    yield patch
    patch.undo()


class _Printed(NamedTuple):
    out: str
    err: str


class _Capture:
    def __init__(self) -> None:
        self.streams = (io.StringIO(), io.StringIO())

    def readouterr(self) -> _Printed:
        found = _Printed(*(stream.getvalue() for stream in self.streams))
        for stream in self.streams:
            stream.seek(0)
            stream.truncate()
        return found

    def disabled(self) -> Any:
        # Output is not shown in any case.
        return contextlib.nullcontext()


@fixture
def _capsys() -> Iterator[_Capture]:
    before, capture = (sys.stdout, sys.stderr), _Capture()
    sys.stdout, sys.stderr = capture.streams
    yield capture
    sys.stdout, sys.stderr = before


BUILT_IN = {"monkeypatch": _monkeypatch, "capsys": _capsys, "capfd": _capsys}
