"""Records to JSON and back, one object a line, by msgspec. Numbers that are not finite are written
as ``NaN``, as ``json`` does, and are read back."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

import msgspec

T = TypeVar("T")


class Tagged(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag=True):
    """A class of a family. Its JSON object has the class's name as ``kind``. Declare each class of
    a family with ``frozen=True, kw_only=True``."""


def _number(value: object) -> object:
    """Turn numpy's float64, a subclass of ``float``, into a float."""
    if isinstance(value, float):
        return float(value)
    raise TypeError(f"cannot write {type(value).__name__} as JSON")


_encode = msgspec.json.Encoder(enc_hook=_number).encode
_LONGEST = 80
"""The most characters of a wrong value that a message shows."""
_decode = msgspec.json.Decoder().decode


def plain(value: object) -> Any:
    """Return dicts, lists, tuples, text and numbers. Raises ``TypeError`` on anything else."""
    return msgspec.to_builtins(value, enc_hook=_number)


def dumps(value: object) -> bytes:
    """Records, dataclasses and plain values as one line of JSON. Raises ``TypeError``."""
    try:
        text = _encode(value)
        if b"null" not in text:
            return text
    except UnicodeEncodeError:
        pass
    # msgspec refuses half a surrogate pair, and null may have been a number that is not finite.
    return json.dumps(plain(value), separators=(",", ":")).encode()


def dumps_finite(value: object) -> bytes:
    """As ``dumps``, faster if much is None. A number that is not finite becomes null."""
    try:
        return _encode(value)
    except UnicodeEncodeError:
        return dumps(value)


def loads(text: bytes | str) -> Any:
    """The inverse of ``dumps``, as plain values. Raises ``ValueError`` on what is not JSON."""
    try:
        return _decode(text)
    except msgspec.DecodeError:
        return json.loads(text)


def load(data: object, kind: type[T]) -> T:
    """Build a record from plain values, ignoring unknown keys. Raises ``ValueError``."""
    return msgspec.convert(data, kind)


def says(description: str, **limits: Any) -> msgspec.Meta:
    """Describe a field in ``Annotated`` for the API's pages, with limits for ``read_record``."""
    return msgspec.Meta(description=description, **limits)


def read_record(data: object, kind: type[T], strict: bool = True) -> T:
    """As ``load``, but an unknown key raises ``ValueError`` too, with a suggestion."""
    for key, near in _unknown(data, kind, ""):
        raise ValueError(f"unknown key '{key}'{near}")
    try:
        return msgspec.convert(data, kind, strict=strict)
    except msgspec.ValidationError as error:
        raise ValueError(_problem(str(error), data, kind)) from error


@cache
def _hints(kind: type[Any]) -> Mapping[str, Any]:
    return get_type_hints(kind)


def _is_record(kind: object) -> bool:
    return is_dataclass(kind) or (isinstance(kind, type) and issubclass(kind, msgspec.Struct))


def _unknown(data: object, kind: Any, where: str) -> Iterator[tuple[str, str]]:
    """Yield keys that no record of this kind has, each with a suggestion."""
    if isinstance(data, list | tuple):
        for each in cast(list[object], data):
            yield from _unknown(each, kind, where)
    if not (isinstance(data, Mapping) and _is_record(kind)):
        return
    hints = _hints(kind)
    for key, value in cast(Mapping[str, object], data).items():
        if key not in hints:
            near = _near(str(key), [*hints], where)
            yield f"{where}{key:.64}", near
            continue
        for inner in (hints[key], *get_args(hints[key])):
            yield from _unknown(value, inner, f"{where}{key}.")


def _near(text: str, choices: list[str], where: str = "") -> str:
    near = get_close_matches(text, choices, 1)
    return f"; did you mean '{where}{near[0]}'?" if near else ""


def _problem(text: str, data: Any, kind: Any) -> str:
    text, _, at = text.partition(" - at ")
    at = at.rpartition("`$")[2].strip("`.")
    value: Any = data
    for name, place in re.findall(r"(\w+)|\[(\d+)\]", at):
        kind = _hints(kind).get(name) if _is_record(kind) else None
        value = value[int(place) if place else name]
        kind = next((each for each in (kind, *get_args(kind)) if _is_record(each)), kind)
    if text.startswith("Object missing"):
        name = text.split("`")[1]
        return f"{at}.{name} is required" if at else f"{name} is required"
    where = f"{at}: " if at else ""
    if not text.startswith(("Expected", "Invalid enum")):
        return f"{where}{text}"
    shown = repr(value)
    shown = shown if len(shown) <= _LONGEST else f"{shown[:_LONGEST]}..."
    if get_origin(kind) is Literal:
        wanted = " or ".join(map(repr, get_args(kind)))
        return f"{where}must be {wanted}, got {shown}{_near(str(value), [*get_args(kind)])}"
    wanted = text.removeprefix("Expected ").partition(", got")[0].replace("`", "")
    return f"{where}must be {wanted.replace('array', 'list')}, got {shown}"


def kinds(union: Any) -> dict[str, type[Tagged]]:
    """The classes of a union by name."""
    return {each.__name__: each for each in get_args(union)}


def load_tagged(data: Mapping[str, Any], classes: Mapping[str, type[T]]) -> T:
    """Build the record that ``kind`` names. Raises ``ValueError`` in one line."""
    kind = data.get("kind", "")
    if kind not in classes:
        raise ValueError(f"unknown kind {kind!r}; known: {', '.join(sorted(classes))}")
    try:
        return load(data, classes[kind])
    except ValueError as error:
        raise ValueError(f"{kind}: {error}") from error


def read_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield ``(line number, value)`` without a torn last line. Raises ``ValueError``."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                yield number, loads(line)
            except ValueError as error:
                if not line.endswith(b"\n"):
                    return
                problem = getattr(error, "msg", error)
                raise ValueError(f"{path}, line {number}: not JSON ({problem})") from error
