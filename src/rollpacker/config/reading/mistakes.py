"""What pydantic found wrong with a configuration, a sentence for each key."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import Any, get_args

from pydantic import ValidationError

from rollpacker.config.base import Config, keys, kind_of
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
    kinds = {kind_of(model) for _, model in _sections(tree)} - {""}
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
    models, value = _models(tree, key), first["input"]
    if "tag" in first["type"]:
        kinds = [kind_of(model) for model in models]
        key, wanted, value = f"{key}.kind", _either(kinds), value.get("kind")
        meant = _near(value, kinds)
    else:
        wanted = " or ".join(dict.fromkeys(_wanted(each, models) for each in errors))
        meant = _read_otherwise(errors, value)
    shown = repr(value)
    shown = shown if len(shown) <= _LONGEST else f"{shown[:_LONGEST]}..."
    where = f"'{key}': " if key else ""
    return f"{where}must be {wanted}, got {shown}{meant}"


def _wanted(error: Any, models: Sequence[type[Config]]) -> str:
    if error["type"] in ("model_type", "model_attributes_type", "dict_type"):
        return f"keys and values{_example(models, error['input'])}"
    text = error["msg"] if error["type"] == "literal_error" else error["msg"].partition(", ")[0]
    return text.removeprefix("Input should be ")


def _example(models: Sequence[type[Config]], value: Any) -> str:
    """The key that a bare value stands for: one that has such a value, else the required one."""
    fields = [item for model in models for item in model.model_fields.items()]
    having = [name for name, field in fields if value in get_args(field.annotation)]
    meant = set(having or [name for name, field in fields if field.is_required()])
    fits = isinstance(value, str) and len(value) <= _LONGEST and len(meant) == 1
    return f" such as '{meant.pop()}: {value}'" if fits else ""


def _read_otherwise(errors: Sequence[Any], value: Any) -> str:
    """A hint where YAML took a text for something else, or a choice is spelled almost so."""
    choices = [each["ctx"]["expected"] for each in errors if each["type"] == "literal_error"]
    choices = "".join(choices).split("'")[1::2]
    truth = isinstance(value, bool) and {"on", "yes", "off", "no"} & {*choices}
    if truth or (isinstance(value, int | float) and errors[0]["type"] == "string_type"):
        kind = "truth value" if isinstance(value, bool) else "number"
        return f"; YAML reads it as a {kind}: put it in quotes"
    return _near(value, choices)


def _near(value: Any, choices: Sequence[str]) -> str:
    near = get_close_matches(str(value), choices, 1)
    return f"; did you mean '{near[0]}'?" if near else ""


def _either(words: Sequence[str]) -> str:
    *others, last = map(repr, dict.fromkeys(words))
    return f"{', '.join(others)} or {last}" if others else last


def _hint(tree: type[Config], key: str) -> str:
    """Which key is meant: what another framework calls so, the same one of another section or kind,
    one that is spelled or begins so. Nothing rather than a guess."""
    *parents, name = key.split(".")
    paths = [
        f"{path}.{each}".lstrip(".")
        for path, model in _sections(tree)
        for each in model.model_fields
    ]
    wrong = name.lower().replace("-", "_")
    if wrong in REASONS and "rewards" in tree.model_fields:
        return f"; {REASONS[wrong]}"
    here = _models(tree, ".".join(parents))
    kinds = [kind_of(model) for model in here if name in model.model_fields and kind_of(model)]
    if kinds:
        return f"; for it set {'.'.join([*parents, 'kind'])}={' or '.join(kinds)}"
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


def _models(tree: type[Config], key: str) -> list[type[Config]]:
    """The models that may stand at a dotted key."""
    section = ".".join(part for part in key.split(".") if not part.isdigit())
    return [model for path, model in _sections(tree) if path == section]


def _sections(tree: type[Config]) -> list[tuple[str, type[Config]]]:
    """Every model of a tree by its dotted path without kinds and places."""
    below = [(key.path, model) for key in keys(tree) for model in key.sections]
    return [("", tree), *((re.sub(r"\[\w*\]", "", path), model) for path, model in below)]
