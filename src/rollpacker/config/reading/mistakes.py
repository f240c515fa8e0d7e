"""What pydantic found wrong with a configuration, a sentence for each key."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import ValidationError

from rollpacker.config.base import Config
from rollpacker.config.reading.foreign import KEYS, REASONS

_LONGEST = 80
"""Characters of a wrong value that are shown."""
_TYPE = re.compile(r"(?:str|int|float|bool|(?:list|dict|literal|function|constrained)\W.*)$")
"""How pydantic names a member of a union in an error's location."""


def mistakes(tree: type[Config], error: ValidationError) -> dict[str, str]:
    """By dotted key, in the order of the tree; the alternatives of a union are one sentence."""
    found: dict[str, list[Any]] = {}
    for each in error.errors(include_url=False):
        found.setdefault(".".join(_keys(tree, each)), []).append(each)
    return {key: _sentence(tree, key, errors) for key, errors in found.items()}


def _keys(tree: type[Config], error: Any) -> Iterator[str]:
    """An error's location without the members of unions: their types and kinds."""
    kinds = {kind for _, model in _sections(tree) for kind in _kinds(model)}
    last = len(error["loc"]) - 1
    for place, part in enumerate(error["loc"]):
        unknown = place == last and error["type"] == "extra_forbidden"
        if unknown or not (part in kinds or _TYPE.match(str(part)) or part == "[key]"):
            yield str(part)


def _sentence(tree: type[Config], key: str, errors: Sequence[Any]) -> str:
    first = errors[0]
    if first["type"] in ("extra_forbidden", "invalid_key"):
        return f"unknown key '{key}'{_hint(tree, key)}"
    if first["type"] == "missing":
        return f"'{key}' is required"
    if first["type"] == "value_error":
        said = str(first["ctx"]["error"])
        return f"'{key}': {said}" if key else said
    said = " or ".join(dict.fromkeys(_wanted(each) for each in errors))
    shown = repr(first["input"])
    shown = shown if len(shown) <= _LONGEST else f"{shown[:_LONGEST]}..."
    where = f"'{key}': " if key else ""
    return f"{where}must be {said}, got {shown}"


def _wanted(error: Any) -> str:
    if error["type"] in ("model_type", "model_attributes_type", "dict_type"):
        return "keys and values"
    if "tag" in error["type"]:
        return f"of kind {error['ctx'].get('expected_tags', 'and name it')}"
    text = error["msg"] if error["type"] == "literal_error" else error["msg"].partition(", ")[0]
    return text.removeprefix("Input should be ")


def _hint(tree: type[Config], key: str) -> str:
    """Which key is meant: what another framework calls so, the same one of another section or kind,
    one that is spelled or begins so. Nothing rather than a guess."""
    *parents, name = key.split(".")
    models = [(path.partition("[")[0], model) for path, model in _sections(tree)]
    paths = [f"{path}.{each}".lstrip(".") for path, model in models for each in model.model_fields]
    wrong = name.lower().replace("-", "_")
    if wrong in REASONS and "rewards" in tree.model_fields:
        return f"; {REASONS[wrong]}"
    section = ".".join(part for part in parents if not part.isdigit())
    here = [model for path, model in models if path == section]
    kinds = [kind for model in here if name in model.model_fields for kind in _kinds(model)]
    if kinds:
        return f"; for it set {section}.kind={' or '.join(kinds)}"
    siblings = [each for model in here for each in model.model_fields]
    close = get_close_matches(wrong, siblings, 1, 0.75)
    close = close or [each for each in siblings if each.startswith(wrong) and len(wrong) > 3]
    found = (
        [path for path in paths if path == KEYS.get(wrong)],
        [".".join([*parents, each]) for each in close],
        [path for path in paths if path.rpartition(".")[2] == wrong],
        [path for path in paths if path.replace(".", "_") == wrong],
    )
    near = [*dict.fromkeys(next((paths for paths in found if paths), ()))][:3]
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""


def _sections(node: Any, path: str = "") -> Iterator[tuple[str, type[Config]]]:
    """Every model below a node by its dotted path, those of a union with their kind behind it."""
    if isinstance(node, type) and issubclass(node, Config):
        kinds = _kinds(node)
        yield f"{path}[{kinds[0]}]" if kinds else path, node
        for name, field in node.model_fields.items():
            yield from _sections(field.annotation, f"{path}.{name}".lstrip("."))
    elif get_origin(node) in (Union, UnionType, Annotated, list):
        for member in get_args(node):
            yield from _sections(member, path)


def _kinds(model: type[Config]) -> tuple[str, ...]:
    """The kind of a member of a union."""
    field = model.model_fields.get("kind")
    kinds = () if field is None else get_args(field.annotation)
    return kinds if len(kinds) == 1 else ()
