"""The journal: one JSON line per event, with its time and the decisions that it led to.

The first line, and one line after every resume, is a ``meta`` object that says how to build the
policy: its configuration and its state. Replaying the events that follow must give the same
decisions, always.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import IO, Any, get_args

from pydantic import TypeAdapter

from rollpacker.core import decisions, events
from rollpacker.core.policy import Policy

_EVENTS = {cls.__name__: cls for cls in get_args(events.Event)}
_DECISIONS = {cls.__name__: cls for cls in get_args(decisions.Decision)}
_FIELDS = {
    cls: tuple(f.name for f in fields(cls)) for cls in (*_EVENTS.values(), *_DECISIONS.values())
}
_ADAPTERS: dict[type, TypeAdapter[Any]] = {cls: TypeAdapter(cls) for cls in _FIELDS}


class JournalError(ValueError):
    """A journal cannot be read; the message names the file and the line."""


def encode(item: events.Event | decisions.Decision) -> dict[str, Any]:
    """An event or a decision as a JSON object with its class name as ``kind``."""
    return {"kind": type(item).__name__} | {
        name: getattr(item, name) for name in _FIELDS[type(item)]
    }


def decode_event(data: dict[str, Any]) -> events.Event:
    """The inverse of ``encode`` for events. Raises ``ValueError`` on an unknown kind."""
    return _decode(data, _EVENTS)


def decode_decision(data: dict[str, Any]) -> decisions.Decision:
    """The inverse of ``encode`` for decisions. Raises ``ValueError`` on an unknown kind."""
    return _decode(data, _DECISIONS)


def _decode(data: dict[str, Any], classes: dict[str, type]) -> Any:
    kind = data.get("kind")
    if kind not in classes:
        raise ValueError(f"unknown kind {kind!r}; known: {', '.join(sorted(classes))}")
    body = {key: value for key, value in data.items() if key != "kind"}
    return _ADAPTERS[classes[kind]].validate_python(body)


_PARTS: dict[type, tuple[str, ...]] = {}


def _plain(value: object) -> object:
    if is_dataclass(value):
        names = _PARTS.get(type(value)) or _PARTS.setdefault(
            type(value), tuple(f.name for f in fields(value))
        )
        return {name: getattr(value, name) for name in names}
    raise TypeError(f"cannot write {type(value).__name__} to a journal")


_ENCODER = json.JSONEncoder(separators=(",", ":"), default=_plain, check_circular=False)


def _dumps(data: dict[str, Any]) -> str:
    return _ENCODER.encode(data)


class JournalWriter:
    """Appends to a journal. A line torn by a crash is cut off first."""

    def __init__(self, path: Path) -> None:
        _cut_torn_line(path)
        self._file: IO[str] = path.open("a", encoding="utf-8")

    def meta(self, policy: dict[str, Any]) -> None:
        """Write how to build the policy whose events follow: ``{"settings": …, "state": …}``."""
        self._file.write(_dumps({"meta": policy}) + "\n")
        self._file.flush()

    def record(self, now: float, event: events.Event, made: Sequence[decisions.Decision]) -> None:
        """Write one handled event."""
        line = {"t": round(now, 6), "event": encode(event), "decisions": [encode(d) for d in made]}
        self._file.write(_dumps(line) + "\n")

    def flush(self) -> None:
        """Hand buffered lines to the operating system."""
        self._file.flush()

    def close(self) -> None:
        """Flush and close."""
        self._file.close()


def _cut_torn_line(path: Path) -> None:
    if not path.exists():
        return
    data = path.read_bytes()
    end = data.rfind(b"\n") + 1
    if end < len(data):
        with path.open("r+b") as file:
            file.truncate(end)


def read(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield ``(line number, object)``. Raises ``JournalError`` on a line that is not JSON."""
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                yield number, json.loads(line)
            except json.JSONDecodeError as error:
                if not line.endswith("\n"):
                    return
                raise JournalError(f"{path}, line {number}: not JSON ({error.msg})") from error


AnyPolicy = Policy[events.Event, decisions.Decision]


class Replay:
    """Result of a replay: counts, and the lines whose decisions differ."""

    def __init__(self) -> None:
        self.events = 0
        self.decisions = 0
        self.differences: list[dict[str, Any]] = []
        self.unfinished: int | None = None
        """The step within which it ends: the run goes on, was killed, or lines are lost."""
        self._last_update: int | None = None

    def follow(self, event: events.Event, made: Iterable[decisions.Decision]) -> None:
        """Note where a step begins and ends."""
        for decision in made:
            if isinstance(decision, decisions.ApplyUpdate) and decision.last:
                self._last_update = decision.update
        if isinstance(event, events.StepStarted):
            self.unfinished, self._last_update = event.step, None
        elif isinstance(event, events.UpdateApplied) and event.update == self._last_update:
            self.unfinished = None


def replay(path: Path, build: Callable[[dict[str, Any]], AnyPolicy]) -> Replay:
    """Feed a journal's events to the policy that ``build`` makes from each ``meta`` object.

    Raises ``JournalError`` when the file is no journal.
    """
    result = Replay()
    policy: AnyPolicy | None = None
    for number, line in read(path):
        if "meta" in line:
            policy = build(line["meta"])
            continue
        if policy is None or "event" not in line:
            raise JournalError(f"{path}, line {number}: expected a meta line first, then events")
        event = decode_event(line["event"])
        try:
            made = list(policy.handle(float(line["t"]), event))
        except (AssertionError, LookupError) as error:
            # An event that cannot follow what came before: lines are missing or were changed.
            problem = f"{type(error).__name__}: {error}"
            result.differences.append({"line": number, "written": line["event"], "error": problem})
            return result
        result.follow(event, made)
        _compare(result, number, made, line["decisions"])
    if policy is None:
        raise JournalError(f"{path}: empty, no meta line")
    return result


def _compare(
    result: Replay,
    number: int,
    made: Iterable[decisions.Decision],
    written: list[dict[str, Any]],
) -> None:
    again = [json.loads(_dumps(encode(d))) for d in made]
    result.events += 1
    result.decisions += len(written)
    if again != written:
        result.differences.append({"line": number, "written": written, "replayed": again})
