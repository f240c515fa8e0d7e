"""What the daemon itself records, besides the scheduler's events."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, get_args

from pydantic import TypeAdapter

from rollpacker.rollmux import decisions as do
from rollpacker.rollmux import events as ev


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainSet:
    """Whether new jobs are turned away."""

    draining: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentJoined:
    """A node's agent reported for the first time; from now on its silence is a failure."""

    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFenced:
    """A node failed while permits of its jobs are out; the scheduler hears it when they are over.

    Args:
        tokens: of those permits; no heartbeat extends them any more.
    """

    node: str
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EndFenced:
    """A job is to end while its permit is out; the scheduler hears it when the permit is over."""

    job: str
    token: int


Note = DrainSet | AgentJoined | NodeFenced | EndFenced
Recorded = ev.Event | Note
"""All that an entry of the log can hold."""

_KINDS: dict[str, type] = {cls.__name__: cls for cls in (*get_args(ev.Event), *get_args(Note))}
_FIELDS = {
    cls: tuple(field.name for field in fields(cls))
    for cls in (*_KINDS.values(), *get_args(do.Decision))
}
_DECISIONS: dict[str, type] = {cls.__name__: cls for cls in get_args(do.Decision)}
_ADAPTERS: dict[type, TypeAdapter[Any]] = {
    cls: TypeAdapter(cls) for cls in (*_KINDS.values(), *_DECISIONS.values())
}


def _plain(value: object) -> object:
    assert is_dataclass(value), type(value)
    return {field.name: getattr(value, field.name) for field in fields(value)}


_ENCODER = json.JSONEncoder(separators=(",", ":"), default=_plain, check_circular=False)


def _tagged(item: Any) -> dict[str, Any]:
    names = _FIELDS[type(item)]
    return {"kind": type(item).__name__} | {name: getattr(item, name) for name in names}


def encode(event: Recorded) -> str:
    """An event as JSON, its class name as ``kind``."""
    return _ENCODER.encode(_tagged(event))


def encode_decisions(decisions: Sequence[do.Decision]) -> str:
    """Decisions as a JSON array, in the same way."""
    return _ENCODER.encode([_tagged(decision) for decision in decisions])


def decode(text: str) -> Recorded:
    """The inverse of ``encode``. Raises ``ValueError`` on what is no event."""
    data = json.loads(text)
    kind = data.pop("kind", None)
    if kind not in _KINDS:
        raise ValueError(f"unknown kind of event {kind!r}")
    return _ADAPTERS[_KINDS[kind]].validate_python(data)


def decode_decisions(text: str) -> list[do.Decision]:
    """The inverse of ``encode_decisions``, for what it has written."""
    found: list[do.Decision] = []
    for data in json.loads(text):
        kind = _DECISIONS[data.pop("kind")]
        found.append(_ADAPTERS[kind].validate_python(data))
    return found
