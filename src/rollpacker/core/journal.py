"""The journal: one JSON line per event, with its time and the decisions that it led to.

The first line, and one line after every resume, is a ``meta`` object: the policy's configuration
and state. If the following events are replayed, they must give the same decisions. A bounded
journal is cut into segments, each with a ``meta`` line at its head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from errno import ENOSPC
from os import SEEK_END
from pathlib import Path
from typing import IO, Any, Protocol, cast

from rollpacker.core import decisions, events
from rollpacker.core.codec import dumps, kinds, load_tagged, loads, read_lines

VERSION = 2
"""The version of the format, in every ``meta`` line. No other version is read."""
_EVENTS = kinds(events.Event)
_BUFFER = 1 << 16
"""At most so many bytes wait for the next ``flush``."""
_SEGMENTS = 8
"""A bounded journal is cut into so many files."""
_DIGITS = 5


class Policy(Protocol):
    """A pure state machine: events in, decisions out. It has no clock, no I/O and no global
    randomness, so a journal replays to the same decisions."""

    def handle(self, now: float, event: events.Event) -> Iterable[decisions.Decision]:
        """Take one event at time ``now`` (seconds) and return the decisions in order."""
        ...


def decode_event(data: dict[str, Any]) -> events.Event:
    """Build an event from its JSON object. Raises ``ValueError`` on an unknown kind."""
    return cast(events.Event, load_tagged(data, _EVENTS))


class JournalWriter:
    """Appends to a journal. It first cuts off a line that a crash has torn.

    Args:
        path: the file, with older lines in ``segments`` beside it.
        on_error: called if the file cannot be written, if no new segment can be begun, or if an old
            segment stays. Events until the next ``meta`` or ``turn`` are then left out. None raises
            ``OSError``.
    """

    def __init__(self, path: Path, on_error: Callable[[OSError], None] | None = None) -> None:
        _cut_torn_line(path)
        self._path = path
        self._on_error = on_error
        self._open()

    def _open(self) -> None:
        self._file: IO[bytes] = self._path.open("ab", buffering=0)
        self._good = self._file.seek(0, SEEK_END)
        self._lines: list[bytes] = []
        self._waiting = 0
        self._lost = self._torn = False

    def meta(self, policy: dict[str, Any]) -> None:
        """Write the head of the events that follow: ``{"settings": …, "state": …}``."""
        self._lost = False
        self._add({"meta": policy, "version": VERSION})
        self.flush()

    def record(self, now: float, event: events.Event, made: Sequence[decisions.Decision]) -> None:
        """Write one handled event, with the time exactly as the policy got it."""
        if self._lost:
            return
        self._add({"t": now, "event": event, "decisions": made})
        if self._waiting >= _BUFFER:
            self.flush()

    def _add(self, line: dict[str, Any]) -> None:
        self._lines.append(dumps(line) + b"\n")
        self._waiting += len(self._lines[-1])

    def flush(self) -> None:
        if not self._lines:
            return
        data = b"".join(self._lines)
        self._lines, self._waiting = [], 0
        try:
            if self._torn:
                self._cut()
            if self._file.write(data) != len(data):
                raise OSError(ENOSPC, "No space left on device", str(self._path))
        except OSError as error:
            self._lost = self._torn = True
            with suppress(OSError):
                self._cut()
            self._fail(error)
        else:
            self._good += len(data)

    def _cut(self) -> None:
        self._file.truncate(self._good)
        self._torn = False

    def _fail(self, error: OSError) -> None:
        if self._on_error is None:
            raise error
        self._on_error(error)

    def turn(self, policy: Callable[[], dict[str, Any]], most: float) -> None:
        """Keep at most about ``most`` bytes (0: all). Call this between two steps. A large file
        becomes a segment, and a new file begins with ``policy()`` as its ``meta``. A gap of lost
        lines also ends with a ``meta`` line."""
        self.flush()
        if most and self._good >= most / _SEGMENTS:
            try:
                self._turn(most)
            except OSError as error:
                self._fail(error)
            self.meta(policy())
        elif self._lost:
            self.meta(policy())

    def _turn(self, most: float) -> None:
        older, file = segments(self._path)[:-1], self._file
        number = _number(older[-1]) + 1 if older else 1
        older.append(self._path.with_name(f"{self._path.stem}-{number:0{_DIGITS}}.jsonl"))
        self._path.replace(older[-1])
        try:
            self._open()
        except OSError:
            older[-1].replace(self._path)  # it goes on in the same one
            raise
        file.close()
        while older and sum(p.stat().st_size for p in older) > most * (1 - 1 / _SEGMENTS):
            older.pop(0).unlink()

    def close(self) -> None:
        self.flush()
        self._file.close()


def segments(path: Path) -> list[Path]:
    """A journal's files in order: ``journal-00001.jsonl``, ..., ``journal.jsonl``, or one
    segment."""
    beside = (p for p in path.parent.glob(f"{path.stem}-*.jsonl") if _number(p) > 0)
    return [*sorted(beside, key=_number), path]


def _number(path: Path) -> int:
    number = path.stem.rpartition("-")[2]
    return int(number) if len(number) >= _DIGITS and number.isdecimal() else 0


def _cut_torn_line(path: Path) -> None:
    """Read the file's end only, in blocks: a journal may have gigabytes."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        start = size = file.seek(0, SEEK_END)
        end = 0
        while start and not end:
            start = max(0, start - _BUFFER)
            file.seek(start)
            block = file.read(_BUFFER)
            end = start + block.rfind(b"\n") + 1 if b"\n" in block else 0
        if end < size:
            file.truncate(end)


def read(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield ``(line number, object)``. Raises ``ValueError`` that names a bad line."""
    for number, found in read_lines(path):
        if not isinstance(found, dict):
            raise ValueError(f"{path}, line {number}: expected a JSON object")
        line = cast(dict[str, Any], found)
        if "meta" in line and line.get("version") != VERSION:
            written = f"version {line.get('version', 1)} of the journal"
            raise ValueError(
                f"{path}, line {number}: {written}, this rollpacker reads version {VERSION}"
            )
        yield number, line


def read_all(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield ``("FILE, line N", object)`` over all segments. Raises as ``read``."""
    for part, number, line in _lines_of(path):
        yield f"{part}, line {number}", line


def prompts_in(state: object) -> Iterator[dict[str, Any]]:
    """Yield all prompts within a policy's state, as the lines that drew them may be gone."""
    if isinstance(state, dict):
        found = cast(dict[str, Any], state)
        if isinstance(found.get("id"), str) and "tokens" in found:
            yield found
        for value in found.values():
            yield from prompts_in(value)
    elif isinstance(state, list):
        for value in cast(list[Any], state):
            yield from prompts_in(value)


def _lines_of(path: Path) -> Iterator[tuple[Path, int, dict[str, Any]]]:
    for part in segments(path):
        for number, line in read(part):
            yield part, number, line


class Replay:
    """The result of a replay: counts, and the lines with other decisions."""

    def __init__(self) -> None:
        self.events = 0
        self.decisions = 0
        self.differences: list[dict[str, Any]] = []
        self.unfinished: int | None = None
        """The step that the journal ends in. The run goes on, was killed, or lines are lost."""
        self._last_update: int | None = None

    def follow(self, event: events.Event, made: Iterable[decisions.Decision]) -> None:
        for decision in made:
            if isinstance(decision, decisions.ApplyUpdate) and decision.last:
                self._last_update = decision.update
        if isinstance(event, events.StepStarted):
            self.unfinished, self._last_update = event.step, None
        elif isinstance(event, events.UpdateApplied) and event.update == self._last_update:
            self.unfinished = None


def replay(path: Path, build: Callable[[dict[str, Any]], Policy]) -> Replay:
    """Feed a journal's events to the policy that ``build`` makes from each ``meta`` object. Raises
    ``ValueError`` if the file is no journal."""
    result = Replay()
    policy: Policy | None = None
    for part, number, line in _lines_of(path):
        where = {"file": str(part), "line": number}
        if "meta" in line:
            policy = build(line["meta"])
            continue
        if policy is None or "event" not in line:
            raise ValueError(f"{part}, line {number}: expected a meta line first, then events")
        try:
            event = decode_event(line["event"])
        except ValueError as error:
            raise ValueError(f"{part}, line {number}: {error}") from error
        try:
            made = list(policy.handle(float(line["t"]), event))
        except (AssertionError, LookupError) as error:
            # An event that cannot follow what came before: lines are missing or were changed.
            problem = f"{type(error).__name__}: {error}"
            result.differences.append(where | {"written": line["event"], "error": problem})
            result.unfinished = None
            return result
        result.follow(event, made)
        again, written = loads(dumps(made)), line["decisions"]
        result.events += 1
        result.decisions += len(written)
        if again != written:
            result.differences.append(where | {"written": written, "replayed": again})
    if policy is None:
        raise ValueError(f"{path}: empty, no meta line")
    return result
