"""Reading a configuration: a YAML file plus ``key.sub=value`` overrides.

Every mistake is one line that names the key; unknown keys are answered with the nearest valid one.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast, get_args

import yaml
from pydantic import ValidationError

from rollpacker.config.tree import Config, RunConfig

Tree = TypeVar("Tree", bound=Config)


class ConfigError(ValueError):
    """The user's configuration is wrong; the message says where and what to change."""


def load(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a run's YAML file and apply ``key.sub=value`` overrides. Raises ``ConfigError``."""
    return load_as(RunConfig, path, overrides)


def parse(data: dict[str, Any], source: str = "config") -> RunConfig:
    """Validate a run's plain tree. Raises ``ConfigError`` with one line for the first mistake."""
    return parse_as(RunConfig, data, source)


def load_as(tree: type[Tree], path: Path, overrides: Sequence[str] = ()) -> Tree:
    """The same as ``load``, for any configuration tree."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such config file") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be read as YAML: {_one_line(error)}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected keys and values, found {type(data).__name__}")
    merged = _override(cast(dict[str, Any], data), overrides)
    return _validated(tree, merged, lambda key: _set_by(key, path, overrides))


def parse_as(tree: type[Tree], data: dict[str, Any], source: str = "config") -> Tree:
    """The same as ``parse``, for any configuration tree."""
    return _validated(tree, data, lambda _key: source)


def _validated(tree: type[Tree], data: dict[str, Any], source: Callable[[str], str]) -> Tree:
    try:
        return tree.model_validate(data)
    except ValidationError as error:
        key = ".".join(str(part) for part in error.errors()[0]["loc"])
        raise ConfigError(f"{source(key)}: {_explain(tree, error)}") from None


def _set_by(key: str, path: Path, overrides: Sequence[str]) -> str:
    """The override that gave a key its value, or the file."""
    for item in reversed(overrides):
        given = item.partition("=")[0]
        if f"{key}.".startswith(f"{given}.") or given.startswith(f"{key}."):
            return f"override {item!r}"
    return str(path)


def _override(data: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    for item in overrides:
        key, equals, text = item.partition("=")
        if not equals or not key:
            raise ConfigError(f"override {item!r}: expected key.sub=value")
        *parents, leaf = key.split(".")
        node = data
        for parent in parents:
            if not isinstance(node.get(parent), dict):
                node[parent] = {}
            node = node[parent]
        try:
            node[leaf] = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"override {item!r}: {_one_line(error)}") from None
    return data


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _explain(tree: type[Config], error: ValidationError) -> str:
    first = error.errors()[0]
    location = [str(part) for part in first["loc"]]
    where = ".".join(location)
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    if first["type"] == "extra_forbidden":
        near = difflib.get_close_matches(location[-1], _keys(tree, location[:-1]), n=1, cutoff=0.5)
        hint = f"; did you mean '{'.'.join([*location[:-1], near[0]])}'?" if near else ""
        return f"unknown key '{where}'{hint}{more}"
    if first["type"] == "missing":
        return f"'{where}' is required{more}"
    value = first.get("input")
    return f"'{where}': {first['msg'].lower()}, got {value!r}{more}"


def _keys(tree: type[Config], location: Sequence[str]) -> list[str]:
    """Valid keys of the node at ``location``; all keys of the tree where it is ambiguous."""
    node: Any = tree
    for part in location:
        candidates = [c for c in _models(node) if part in c.model_fields]
        if candidates:
            node = candidates[0].model_fields[part].annotation
    return [key for model in _models(node) for key in model.model_fields]


def _models(annotation: Any) -> list[type[Config]]:
    if isinstance(annotation, type) and issubclass(annotation, Config):
        return [annotation]
    return [model for arg in get_args(annotation) for model in _models(arg)]
