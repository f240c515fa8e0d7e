"""Reading a configuration: a YAML file plus ``key.sub=value`` overrides.

Every mistake is one line that names the key; unknown keys are answered with the nearest valid one.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, cast, get_args, get_origin

import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from rollpacker.config.base import Config
from rollpacker.config.tree import RunConfig

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
        keys, _ = _walk(tree, error.errors()[0]["loc"])
        raise ConfigError(f"{source('.'.join(keys))}: {_explain(tree, error)}") from None


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
    keys, _ = _walk(tree, first["loc"])
    where = ".".join(keys)
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    if first["type"] == "extra_forbidden":
        _, node = _walk(tree, first["loc"][:-1])
        near = difflib.get_close_matches(keys[-1], _fields(node), n=1, cutoff=0.5)
        hint = f"; did you mean '{'.'.join([*keys[:-1], near[0]])}'?" if near else ""
        return f"unknown key '{where}'{hint}{more}"
    if first["type"] == "missing":
        return f"'{where}' is required{more}"
    value = first.get("input")
    return f"'{where}': {first['msg'].lower()}, got {value!r}{more}"


def _walk(tree: type[Config], location: Sequence[int | str]) -> tuple[list[str], Any]:
    """The keys of an error's location, without its tags of unions, and the type found there."""
    keys: list[str] = []
    node: Any = tree
    for part in location:
        members = _members(node)
        if len(members) > 1:
            node = next((each for each in members if _has_tag(each, part)), Any)
        else:
            keys.append(str(part))
            node = _inside(members[0], part)
    return keys, node


def _members(annotation: Any) -> list[Any]:
    """The types of a union but for None, whose errors have no tag; of another type, itself."""
    if get_origin(annotation) is Annotated:
        return _members(get_args(annotation)[0])
    if get_origin(annotation) not in (Union, UnionType):
        return [annotation]
    kinds = [each for each in get_args(annotation) if each is not NoneType]
    return [member for each in kinds for member in _members(each)]


def _has_tag(member: Any, tag: int | str) -> bool:
    """Whether pydantic names this member by ``tag``: the value of its discriminator."""
    return any(get_args(field.annotation) == (tag,) for field in _fields(member).values())


def _inside(node: Any, part: int | str) -> Any:
    """The type of what ``node`` has under a key or at a place."""
    if isinstance(node, type) and issubclass(node, Config):
        field = node.model_fields.get(str(part))
        return Any if field is None else field.annotation
    return next(reversed(get_args(node)), Any)


def _fields(node: Any) -> dict[str, FieldInfo]:
    found = _members(node)[0]
    return found.model_fields if isinstance(found, type) and issubclass(found, Config) else {}
