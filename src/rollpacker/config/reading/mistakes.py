"""What pydantic found wrong with a configuration, in our words: which key, what it must be."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Union, cast, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from rollpacker.config.base import Config
from rollpacker.config.reading.foreign import KEYS, REASONS

_KEY = "[key]"
"""How pydantic marks an error in a key of a mapping, rather than in its value."""
_LONGEST = 80
"""Characters of a wrong value that are shown."""
_YAML = "; YAML reads it as {}: put it in quotes"

WORDS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "string_type": lambda _: "text",
    "string_unicode": lambda _: "text",
    "int_type": lambda _: "a whole number",
    "int_parsing": lambda _: "a whole number",
    "int_parsing_size": lambda _: "a whole number of fewer digits",
    "int_from_float": lambda _: "a whole number",
    "float_type": lambda _: "a number",
    "float_parsing": lambda _: "a number",
    "finite_number": lambda _: "a finite number",
    "bool_type": lambda _: "true or false",
    "bool_parsing": lambda _: "true or false",
    "list_type": lambda _: "a list",
    "dict_type": lambda _: "keys and values",
    "model_type": lambda _: "keys and values",
    "model_attributes_type": lambda _: "keys and values",
    "literal_error": lambda context: str(context["expected"]),
    "union_tag_invalid": lambda context: _either(str(context["expected_tags"]).split(", ")),
    "greater_than": lambda context: f"more than {context['gt']:g}",
    "greater_than_equal": lambda context: f"at least {context['ge']:g}",
    "less_than": lambda context: f"less than {context['lt']:g}",
    "less_than_equal": lambda context: f"at most {context['le']:g}",
    "too_short": lambda context: f"a list of at least {context['min_length']}",
}
"""What a value must be, by pydantic's name of the error. Unknown and missing keys, and what our
own validators say, have sentences of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistake:
    """One wrong key.

    Args:
        key: dotted; empty for the whole tree.
        text: a sentence about it; of an unknown key, only the key and the nearest ones.
        unknown: whether there is no such key.
    """

    key: str
    text: str
    unknown: bool = False


def mistakes(tree: type[Config], error: ValidationError) -> list[Mistake]:
    """Every mistake once, in the order of the tree; the alternatives of a union are one."""
    by_key: dict[tuple[str, ...], list[Any]] = {}
    for each in error.errors():
        keys, _ = walk(tree, each["loc"])
        by_key.setdefault(tuple(keys), []).append(each)
    return [_mistake(tree, keys, errors) for keys, errors in by_key.items()]


def _mistake(tree: type[Config], keys: tuple[str, ...], errors: Sequence[Any]) -> Mistake:
    first = errors[0]
    key, kind = ".".join(keys), first["type"]
    if kind in ("extra_forbidden", "invalid_key"):
        hints = _near(tree, first["loc"]) + _of_other_kinds(tree, first["loc"])
        return Mistake(key=key, text=f"'{key}'{hints}", unknown=True)
    if kind == "missing":
        return Mistake(key=key, text=f"'{key}' is required")
    if kind == "value_error":
        said = str(first["ctx"]["error"])
        return Mistake(key=key, text=f"'{key}': {said}" if key else said)
    if kind == "union_tag_not_found":
        kinds = _either([repr(tag) for tag in _tags(walk(tree, first["loc"])[1])])
        return Mistake(key=f"{key}.kind", text=f"'{key}.kind' is required: {kinds}")
    if kind == "union_tag_invalid":
        key = f"{key}.kind"
        return Mistake(key=key, text=_must(key, errors, first["input"].get("kind")))
    if _KEY in first["loc"]:
        return Mistake(key=key, text=f"'{key}': the key must be text{_quoted(first['input'])}")
    hint = _shorthand(walk(tree, first["loc"])[1], first["input"])
    return Mistake(key=key, text=_must(key, errors, first["input"], hint))


def _must(key: str, errors: Sequence[Any], value: Any, hint: str = "") -> str:
    wanted = dict.fromkeys(_wanted(each) for each in errors)
    where = f"'{key}': " if key else ""
    shown = repr(value)
    shown = shown if len(shown) <= _LONGEST else f"{shown[:_LONGEST]}..."
    return (
        f"{where}must be {' or '.join(wanted)}{hint}, got {shown}{_read_otherwise(errors, value)}"
    )


def _wanted(error: Any) -> str:
    words = WORDS.get(error["type"])
    return words(error.get("ctx", {})) if words else str(error["msg"]).lower()


def _read_otherwise(errors: Sequence[Any], value: Any) -> str:
    """Where the value is not what was written, or is near to a valid one."""
    kinds = {each["type"] for each in errors}
    if "string_type" in kinds:
        return _quoted(value)
    expected = next((each["ctx"] for each in errors if each["type"] in _CHOICES), None)
    if expected is None:
        return ""
    if isinstance(value, bool):
        meant = {"on", "yes", "true"} if value else {"off", "no", "false"}
        return _YAML.format("a truth value") if meant & {*_listed(expected)} else ""
    near = difflib.get_close_matches(str(value), _listed(expected), n=1)
    return f"; did you mean '{near[0]}'?" if near else ""


_CHOICES = ("literal_error", "union_tag_invalid")


def _listed(context: Mapping[str, Any]) -> list[str]:
    """The choices of an error, such as ``'a', 'b' or 'c'``."""
    text = str(context.get("expected") or context.get("expected_tags"))
    return text.split("'")[1::2]


def _quoted(value: Any) -> str:
    if isinstance(value, bool):
        return _YAML.format("a truth value")
    return _YAML.format("a number") if isinstance(value, int | float) else ""


def _shorthand(node: Any, value: Any) -> str:
    """How to say it where a value stands for the one key that its section needs, or for one that
    has such a value."""
    if not isinstance(value, str) or len(value) > _LONGEST:
        return ""
    fields = [field for member in _members(node) for field in _fields(member).items()]
    having = [name for name, each in fields if value in get_args(each.annotation)]
    required = [name for name, each in _fields(node).items() if each.is_required()]
    meant = dict.fromkeys(having or required)
    return f" such as '{next(iter(meant))}: {value}'" if len(meant) == 1 else ""


def _of_other_kinds(tree: type[Config], location: Sequence[int | str]) -> str:
    """Which kinds of the section, other than the one that it is of, have such a key."""
    keys, section = walk(tree, location[:-2])
    having = [each for each in _members(section) if str(location[-1]) in _fields(each)]
    kinds = [str(tag) for each in having for tag in _tags(each)]
    return f"; for it set {'.'.join([*keys, 'kind'])}={_either(kinds)}" if kinds else ""


def _near(tree: type[Config], location: Sequence[int | str]) -> str:
    """Which key is meant: one of this section in the plural or singular, the same one of another
    section, what another framework calls so, or one of this section that is spelled almost so or
    begins so.
    Empty rather than a guess, but options of one thing are few enough to list."""
    keys, node = walk(tree, location[:-1])
    wrong = str(location[-1])
    here = ".".join([*keys, wrong])
    paths = [path for path in _paths(tree) if path != here]
    name = wrong.lower().replace("-", "_").rpartition(".")[2]
    found = [".".join([*keys, each]) for each in _fields(node) if each in _other_number(wrong)]
    found = found or [path for path in paths if path.rpartition(".")[2] == wrong]
    if not found and name in REASONS and "rewards" in tree.model_fields:
        return f"; {REASONS[name]}"
    if not found and KEYS.get(name) in paths:
        found = [KEYS[name]]
    if not found:
        found = [".".join([*keys, each]) for each in _fields(node) if _misspelled(wrong, each)]
    found = found or [path for path in paths if _flag(path, name)]
    if not found and len(wrong) >= _BEGUN:
        found = [".".join([*keys, each]) for each in _fields(node) if each.startswith(wrong)]
    if not found and not any("." in path for path in paths):
        return _among_few(paths, name)
    return f"; did you mean {_either([repr(path) for path in found[:3]])}?" if found else ""


def _among_few(options: Sequence[str], name: str) -> str:
    """Of a tree without sections: those that hold its words, else all."""
    words = {*name.split("_")}
    found = [each for each in options if words <= {*each.split("_")}]
    if found:
        return f"; did you mean {_either([repr(each) for each in found[:3]])}?"
    return f"; expected {_either([repr(each) for each in options])}"


def _other_number(word: str) -> set[str]:
    """The word in the plural and in the singular."""
    return {f"{word}s", word.removesuffix("s")} - {word}


def _flag(path: str, name: str) -> bool:
    """Whether a name is a key with sections before it, as flags of a command line have them."""
    parts = path.split(".")
    return any("_".join(parts[start:]) == name for start in range(len(parts) - 1))


def _misspelled(wrong: str, right: str) -> bool:
    """Whether one is the other with a slip of the hand, or its beginning. Digits are none: beta1
    is not beta."""
    if [c for c in wrong if c.isdigit()] != [c for c in right if c.isdigit()]:
        return False
    begun = right.startswith(wrong) and 3 * len(wrong) >= 2 * len(right)
    return begun or _slips(wrong, right) <= (1 if len(right) < _SHORT else 2)


_BEGUN = 4
"""Letters of a beginning that says which key is meant."""

_SHORT = 8
"""Letters below which a name has room for one slip."""


def _slips(one: str, other: str) -> int:
    """Letters to change, add, leave out or swap with their neighbours (optimal alignment)."""
    before: list[int] = []
    row = [*range(len(other) + 1)]
    for i, letter in enumerate(one, 1):
        last, before_last, row = row, before, [i]
        for j, wanted in enumerate(other, 1):
            cost = min(last[j] + 1, row[j - 1] + 1, last[j - 1] + (letter != wanted))
            if i > 1 and j > 1 and letter == other[j - 2] and one[i - 2] == wanted:
                cost = min(cost, before_last[j - 2] + 1)
            row.append(cost)
        before = last
    return row[-1]


def _paths(node: type[Config], prefix: str = "") -> Iterator[str]:
    """Every dotted key below a node, but for those in lists."""
    for name, field in node.model_fields.items():
        path = f"{prefix}{name}"
        yield path
        for member in _members(field.annotation):
            if isinstance(member, type) and issubclass(member, Config):
                yield from _paths(member, f"{path}.")


def _either(words: Sequence[str]) -> str:
    words = list(dict.fromkeys(words))
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def walk(tree: type[Config], location: Sequence[int | str]) -> tuple[list[str], Any]:
    """The keys of an error's location, without its tags of unions, and the type found there."""
    keys: list[str] = []
    node: Any = tree
    for part in location:
        members = _members(node)
        if len(members) > 1:
            node = next((each for each in members if _has_tag(each, part)), Any)
        elif part != _KEY:
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


def _tags(node: Any) -> list[str]:
    """The kinds of a discriminated union."""
    found = [_fields(member).get("kind") for member in _members(node)]
    return [str(tag) for field in found if field for tag in get_args(field.annotation)]


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
    if isinstance(found, type) and issubclass(found, Config):
        return found.model_fields
    return cast(dict[str, FieldInfo], {})
