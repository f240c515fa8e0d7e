"""Records to JSON and back: what is kept in files, one object a line, by msgspec.

Numbers that are not finite are written as ``json`` writes them, ``NaN``, and are read back.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args

import msgspec

T = TypeVar("T")


class Tagged(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag=True):
    """One of several classes; its JSON object says which, by name, as ``kind``.

    Each class of a family is declared with ``frozen=True, kw_only=True``.
    """


def _number(value: object) -> object:
    """A number of numpy's that is one of Python's too."""
    if isinstance(value, float):
        return float(value)
    raise TypeError(f"cannot write {type(value).__name__} as JSON")


_encode = msgspec.json.Encoder(enc_hook=_number).encode
_decode = msgspec.json.Decoder().decode


def plain(value: object) -> Any:
    """The same as dicts, lists, tuples, text and numbers. Raises ``TypeError`` on anything else."""
    return msgspec.to_builtins(value, enc_hook=_number)


def dumps(value: object) -> bytes:
    """JSON in one line of records, dataclasses and plain values. Raises ``TypeError``."""
    try:
        text = _encode(value)
        if b"null" not in text:
            return text
    except UnicodeEncodeError:
        pass
    # msgspec refuses half a surrogate pair, and null may have been a number that is not finite.
    return json.dumps(plain(value), separators=(",", ":")).encode()


def dumps_finite(value: object) -> bytes:
    """As ``dumps``, several times faster with much that is None.

    A number that is not finite becomes null: only for what has none. Raises ``TypeError``.
    """
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
    """A record or dataclass from its plain values; keys that it does not know are left out.

    Raises ``ValueError`` with one line: what is wrong, and where.
    """
    return msgspec.convert(data, kind)


def kinds(union: Any) -> dict[str, type[Tagged]]:
    """The classes of a union by name."""
    return {each.__name__: each for each in get_args(union)}


def load_tagged(data: Mapping[str, Any], classes: Mapping[str, type[T]]) -> T:
    """The record that ``data`` says it is. Raises ``ValueError`` in one line."""
    kind = data.get("kind", "")
    if kind not in classes:
        raise ValueError(f"unknown kind {kind!r}; known: {', '.join(sorted(classes))}")
    try:
        return load(data, classes[kind])
    except ValueError as error:
        raise ValueError(f"{kind}: {error}") from error


def read_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield ``(line number, value)``; a last line that was torn is left out.

    Raises ``ValueError`` that names the file and the line.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                yield number, loads(line)
            except ValueError as error:
                if not line.endswith(b"\n"):
                    return
                problem = getattr(error, "msg", error)
                raise ValueError(f"{path}, line {number}: not JSON ({problem})") from error
