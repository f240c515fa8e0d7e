"""Reading a configuration: a YAML file plus ``key.sub=value`` overrides.

Mistakes are one line that names every wrong key; unknown keys are answered with the one that is
meant, where that is known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import yaml
from pydantic import ValidationError

from rollpacker.config.base import Config
from rollpacker.config.reading.mistakes import mistakes
from rollpacker.config.tree import RunConfig
from rollpacker.errors import words_of

Tree = TypeVar("Tree", bound=Config)


class ConfigError(ValueError):
    """The user's configuration is wrong; the message says where and what to change."""


def load(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a run's YAML file and apply ``key.sub=value`` overrides. Raises ``ConfigError``."""
    return load_as(RunConfig, path, overrides)


def parse(data: dict[str, Any], source: str = "config") -> RunConfig:
    """Validate a run's plain tree. Raises ``ConfigError`` with one line for all mistakes."""
    return parse_as(RunConfig, data, source)


def load_as(tree: type[Tree], path: Path, overrides: Sequence[str] = ()) -> Tree:
    """The same as ``load``, for any configuration tree."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such config file") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be read as YAML: {words_of(error)}") from None
    if data is None:
        hint = "; rollpacker init writes a first job file" if tree is RunConfig else ""
        raise ConfigError(f"{path}: holds no keys{hint}")
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected keys and values, found {type(data).__name__}")
    merged = _override(cast(dict[str, Any], data), overrides)
    return _validated(tree, merged, lambda key: _set_by(key, path, overrides))


def parse_as(
    tree: type[Tree], data: dict[str, Any], source: str = "config", overrides: Sequence[str] = ()
) -> Tree:
    """The same as ``parse``, for any configuration tree, with ``overrides`` as of ``load``."""
    return _validated(tree, _override(dict(data), overrides), lambda _key: source)


def _validated(tree: type[Tree], data: dict[str, Any], source: Callable[[str], str]) -> Tree:
    try:
        return tree.model_validate(data)
    except ValidationError as error:
        raise ConfigError(_one_sentence(mistakes(tree, error), source)) from None


def _one_sentence(found: Mapping[str, str], source: Callable[[str], str]) -> str:
    """All mistakes, by the file or override that they are in."""
    by_source: dict[str, list[str]] = {}
    for key, text in found.items():
        by_source.setdefault(source(key), []).append(text)
    return "; ".join(f"{where}: {'; '.join(those)}" for where, those in by_source.items())


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
            raise ConfigError(f"override {item!r}: {words_of(error)}") from None
    return data
