"""What a user's path names, found: the only place where the user's code is imported."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from rollpacker.errors import told

BUILT_IN = ("math", "code", "judge", "rg")

_EXPECTED = {
    "rewards": f"{', '.join(BUILT_IN)}, path/to/file.py:name, package.module:name or the folder of "
    "a reward model",
}
_PATHS = "path/to/file.py:name or package.module:name"


def find(function: str, key: str = "rewards") -> Callable[..., Any]:
    """The object that ``path/to/file.py:name`` or ``package.module:name`` names.

    Raises ``ValueError``, which names the configuration's ``key``, when there is none, or importing
    it fails.
    """
    place, colon, name = function.rpartition(":")
    if not colon:
        raise ValueError(
            f"{key}: unknown function '{function}': expected {_EXPECTED.get(key, _PATHS)}"
        )
    file = Path(place).expanduser().resolve() if place.endswith(".py") else None
    if file is not None and not file.is_file():
        raise ValueError(f"{key}: cannot import '{place}': there is no file {file}")
    try:
        module = importlib.import_module(place) if file is None else _load(file)
    except ModuleNotFoundError as error:
        itself = error.name is not None and f"{place}.".startswith(f"{error.name}.")
        why = f"there is no module '{error.name}'" if itself else told(error)
        raise ValueError(f"{key}: cannot import '{place}': {why}") from error
    except (Exception, SystemExit) as error:  # importing runs the user's code
        raise ValueError(f"{key}: cannot import '{place}': {told(error)}") from error
    target = getattr(module, name, None)
    if callable(target):
        return target
    if hasattr(module, name):
        raise ValueError(
            f"{key}: '{name}' in '{place}' is no function but a {type(target).__name__}"
        )
    found = [n for n, v in vars(module).items() if callable(v) and _own(v, module, n)]
    raise ValueError(
        f"{key}: '{place}' has no function '{name}'{nearest(name, found) or _listed(found)}"
    )


_LOADED: dict[tuple[Path, int], Any] = {}
"""Modules by file, and when that was written: named twice it is one, edited it is a new one."""


def _load(file: Path) -> Any:
    found = (file, file.stat().st_mtime_ns)
    if found not in _LOADED:
        _LOADED[found] = _executed(file)
    return _LOADED[found]


def _executed(file: Path) -> Any:
    # Its neighbours can be imported, but never shadow a library.
    sys.path.append(str(file.parent))
    # Two files of one name are two modules: pickle and dataclasses look a class up by its module's.
    name = file.stem if file.stem not in sys.modules else f"{file.stem}_{len(_LOADED)}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _own(value: Any, module: Any, name: str) -> bool:
    return not name.startswith("_") and getattr(value, "__module__", None) == module.__name__


def _listed(names: Collection[str]) -> str:
    return f"; it has {', '.join(names)}" if names else "; it has none at all"


def nearest(name: str, names: Collection[str]) -> str:
    """A hint to the name that was probably meant, or nothing."""
    close = difflib.get_close_matches(name, list(names), n=1)
    return f": did you mean '{close[0]}'?" if close else ""


def bound_name(target: Callable[..., Any]) -> str | None:
    """By which name a method, or what is called by one, takes its own object, mostly ``self``: that
    cannot be given to it once more, whatever else it takes."""
    if inspect.isclass(target):
        method: Any = target.__init__
    else:
        method = target if inspect.isroutine(target) else type(target).__call__
    function = getattr(method, "__func__", method)
    if function is target or not inspect.isfunction(function):
        return None
    first = next(iter(inspect.signature(function).parameters.values()), None)
    return None if first is None or first.kind is not first.POSITIONAL_OR_KEYWORD else first.name


class Parameters:
    """What a function can be given by name.

    Args:
        function: as in the configuration.
        target: what it names.
        key: of the configuration, for errors.
        options: the key of its options, for errors.

    Raises ``ValueError`` when it cannot be read.
    """

    def __init__(
        self,
        function: str,
        target: Callable[..., Any],
        key: str = "rewards",
        options: str = "rewards[].options",
    ) -> None:
        try:
            parameters = inspect.signature(target).parameters.values()
        except (TypeError, ValueError):
            raise ValueError(f"{key}: '{function}' has no readable signature") from None
        if by_place := [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]:
            raise ValueError(
                f"{key}: '{function}' takes '{by_place[0]}' by its place alone, and values are "
                "given by name: remove the '/' from its parameters"
            )
        by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        named = [p for p in parameters if p.kind in by_name]
        self._function = function
        self._key = key
        self._options = options
        self.any = any(p.kind is p.VAR_KEYWORD for p in parameters)
        """Whether it takes any name."""
        self.names = {p.name for p in named}
        self._required = [p.name for p in named if p.default is p.empty]
        self._own = bound_name(target)

    def take(self, name: str) -> bool:
        """Whether it can be given this."""
        return name in self.names or (self.any and name != self._own)

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Raise ``ValueError`` on an option that it does not take."""
        unknown = sorted(name for name in options if not self.take(name))
        if unknown:
            raise ValueError(
                f"{self._key}: '{self._function}' takes no option '{unknown[0]}'; "
                f"it takes {sorted(self.names)}"
            )

    def check_given(self, given: Collection[str], columns: Collection[str] = ()) -> None:
        """Raise ``ValueError`` where a parameter is neither given nor a column of the rows."""
        missing = [name for name in self._required if name not in {*given, *columns}]
        if not missing:
            return
        if columns:
            where = f"neither a column of the rows ({', '.join(sorted(columns))}) nor an option"
        else:
            where = f"no option ({self._options}.{missing[0]})"
        hint = nearest(missing[0], columns)
        raise ValueError(
            f"{self._key}: '{self._function}' needs '{missing[0]}', which is {where}{hint}"
        )
