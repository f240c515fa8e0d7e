"""Values as configurations write them: numbers that YAML takes for text, references to keys."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, cast

import yaml

from rollpacker.cli.convert.table import Unknown

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)[eE][+-]?\d+")
"""YAML 1.1 reads ``1e-6`` as text; hydra and transformers read a number."""
_REFERENCE = re.compile(r"\$\{(?:oc\.select:)?([\w.]+)(?:,\s*([^${}]*))?\}")
_DEEPEST = 5
"""References to references."""


def plain(value: Any) -> Any:
    """A value with its numbers as numbers, in lists too."""
    if isinstance(value, list):
        return [plain(each) for each in cast(list[Any], value)]
    if isinstance(value, str) and not isinstance(value, Unknown) and _NUMBER.fullmatch(value):
        return float(value)
    return value


def value_of(text: str) -> Any:
    """The value of an override's text; ``Unknown`` where the shell would have put something in."""
    if "$" in text or "`" in text:
        return Unknown(text)
    try:
        return plain(yaml.safe_load(text))
    except yaml.YAMLError:
        return text


def flat(tree: Mapping[str, Any], parents: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf of nested mappings with its dotted key; an empty mapping is a leaf."""
    for key, value in tree.items():
        name = f"{parents}{key}"
        if isinstance(value, dict) and value:
            yield from flat(cast(dict[str, Any], value), f"{name}.")
        else:
            yield name, plain(value)


def resolved(given: Mapping[str, Any]) -> dict[str, Any]:
    """Values with omegaconf's references (``${a.b}``) put in; ``Unknown`` where there is none."""
    return {key: _resolved(value, given, _DEEPEST) for key, value in given.items()}


def _resolved(value: Any, given: Mapping[str, Any], depth: int) -> Any:
    if value == "???":
        return Unknown("???")
    if not isinstance(value, str) or "${" not in value:
        return value
    whole = _REFERENCE.fullmatch(value)
    if whole and depth:
        name, default = whole[1], whole[2]
        if name in given:
            return _resolved(given[name], given, depth - 1)
        return Unknown(value) if default is None else plain(yaml.safe_load(default))
    text = _REFERENCE.sub(lambda m: str(given.get(m[1], m.group())), value)
    return Unknown(text) if "${" in text else text
