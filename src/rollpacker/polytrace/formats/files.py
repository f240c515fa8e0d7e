"""Read records from files: lines and tables, packed or not, with the place of every mistake."""

from __future__ import annotations

import gzip
import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, BinaryIO, cast

import polars as pl
from polars.exceptions import PolarsError
from pydantic import BaseModel, Field, InstanceOf, ValidationError

from rollpacker.errors import first_line
from rollpacker.polytrace.schema import SAMPLES, TraceError

# --- Bytes of a log, line by line, packed or not

PACKED = (".gz", ".zst")
_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"
_BOM = b"\xef\xbb\xbf"
_BLOCK = 1 << 20
_LINES_AT_ONCE = 64

Tick = Callable[[int], None]  # gets the number of further bytes read, in the files' size on disk


def quiet(_: int) -> None:
    """A ``Tick`` that does nothing."""


class TornError(ValueError):
    """A packed file ends too early or has another format, as the message says."""


def bare(path: Path) -> str:
    """Return the file's name without the suffix of its packing."""
    return path.stem if path.suffix in PACKED else path.name


def packing(path: Path) -> str:
    """Return the packing's suffix, by the file's name or its first bytes. Empty if not packed."""
    if path.suffix in PACKED:
        return path.suffix
    with path.open("rb") as file:
        start = file.read(len(_ZSTD))
    return ".gz" if start.startswith(_GZIP) else ".zst" if start == _ZSTD else ""


def lines(path: Path, tick: Tick = quiet) -> Iterator[bytes]:
    """Yield each line with its line end, without a byte order mark. The last may lack its end.
    Raises ``OSError``, and ``TornError`` after the last readable line."""
    if packing(path) == ".zst":
        yield from _without_mark(_of_zstd(path, tick))
    else:
        yield from _without_mark(_read(path, tick, lambda file: file.readline()))


def blocks(path: Path, tick: Tick = quiet) -> Iterator[bytes]:
    """Yield the bytes of ``lines`` in pieces of limited size, since a line may be the whole
    file."""
    if packing(path) == ".zst":
        yield from _without_mark(_of_zstd(path, tick))
    else:
        yield from _without_mark(_read(path, tick, lambda file: file.read(_BLOCK)))


def _without_mark(given: Iterator[bytes]) -> Iterator[bytes]:
    for number, piece in enumerate(given):
        yield piece.removeprefix(_BOM) if number == 0 else piece


def _read(path: Path, tick: Tick, take: Callable[[BinaryIO], bytes]) -> Iterator[bytes]:
    with path.open("rb") as raw:
        if packing(path) != ".gz":
            yield from _told(raw, raw, tick, take)
            return
        with gzip.open(raw) as packed:
            try:
                yield from _told(cast(BinaryIO, packed), raw, tick, take)
            except EOFError:
                raise TornError("the gzip file ends too early") from None
            except (gzip.BadGzipFile, zlib.error) as error:
                raise TornError(f"not a gzip file ({error})") from error


def _told(
    file: BinaryIO, raw: BinaryIO, tick: Tick, take: Callable[[BinaryIO], bytes]
) -> Iterator[bytes]:
    told = since = 0
    while piece := take(file):
        yield piece
        since += len(piece)
        if since >= _BLOCK:
            since, now = 0, raw.tell()
            tick(now - told)
            told = now
    tick(raw.tell() - told)


def _of_zstd(path: Path, tick: Tick) -> Iterator[bytes]:
    """Polars unpacks zstd, which Python itself cannot before 3.14."""
    with path.open("rb") as file:
        start = file.read(len(_ZSTD))
    if start and start != _ZSTD:
        raise TornError("not a zstd file")
    try:
        for batch in pl.scan_lines(path).collect_batches(chunk_size=_LINES_AT_ONCE):
            for line in batch.to_series():
                yield line.encode() + b"\n"
    except OSError:
        raise TornError("the zstd file ends too early") from None
    except PolarsError as error:
        raise TornError(f"the zstd file cannot be read ({first_line(error)})") from error
    tick(path.stat().st_size)


# --- JSON lines: problems by line, and types of fields

Record = dict[str, Any]
Note = Callable[[str], None]
"""Gets one line each about a reader's approximations or a writer's omissions."""


def silent(_: str) -> None:
    """A ``Note`` that does nothing."""


MOST = 2**31 - 1  # counts are stored in 32 bits

Count = Annotated[int, Field(strict=True, ge=0, le=MOST)]
Number = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
Text = InstanceOf[str]  # accepts lone surrogates, which pydantic's ``str`` may refuse

_EXPECTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a number",
    "is_instance_of": "text",
    "bool_type": "true or false",
    "list_type": "a list",
}


@dataclass(frozen=True, slots=True)
class Problem:
    """A mistake in a line. ``line`` 0 stands for the whole file."""

    file: Path
    line: int
    text: str

    def __str__(self) -> str:
        where = f", line {self.line}" if self.line else ""
        return f"{self.file}{where}: {self.text}"


Bad = Callable[[Problem], None]


def stop(problem: Problem) -> None:
    """Raise ``TraceError`` at a reader's first problem."""
    raise TraceError(str(problem))


def records(path: Path, model: type[BaseModel], bad: Bad) -> Iterator[tuple[int, Record]]:
    """Yield ``(line number, object)`` of each good line. ``bad`` gets the problems of the
    others. Blank lines are skipped, and keys that ``model`` lacks are accepted."""
    number = 0
    try:
        for number, raw in enumerate(lines(path), start=1):
            if not raw.strip():
                continue
            try:
                record = parsed(raw)
                model.model_validate(record)
            except ValidationError as error:
                bad(Problem(path, number, _said(error)))
            except ValueError as error:
                bad(Problem(path, number, str(error)))
            else:
                yield number, record
    except TornError as error:
        bad(Problem(path, number + 1, str(error)))


def parsed(raw: bytes) -> Record:
    """Return the JSON object of a line. Raises ``ValueError``."""
    try:
        value: object = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError("not UTF-8 text") from error
    except json.JSONDecodeError as error:
        torn = "" if raw.endswith(b"\n") else "; the file ends within this line"
        raise ValueError(f"not JSON ({error.msg} at column {error.colno}{torn})") from error
    except RecursionError as error:
        raise ValueError("not JSON (nested too deeply)") from error
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, got {shown(value)}")
    return cast(Record, value)


def _said(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    kind, value, about = first["type"], first["input"], first.get("ctx", {})
    if kind == "value_error":
        return str(about["error"])
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
    name = "".join(parts).removeprefix(".")
    if kind == "missing":
        return f"{name}: missing"
    if kind == "model_type":
        return f"{name}: expected a JSON object"
    if kind in _EXPECTED:
        return f"{name}: expected {_EXPECTED[kind]}, got {shown(value)}"
    least = about.get("ge", 0)
    bounds = "0 or more" if isinstance(least, float) else f"{least} to {MOST}"
    return f"{name}: expected {bounds}, got {value}"


def same_count(name: str, told: int | None, of: str, entries: Sequence[object]) -> None:
    """Raise ``ValueError`` if there is a count and the list ``of`` has another length."""
    if told is not None and told != len(entries):
        raise ValueError(f"{name}: {told}, but {of} has {len(entries)} entries")


def shown(value: object) -> str:
    """Return a value as a message shows it."""
    told = json.dumps(value, default=str)
    return told if len(told) <= 40 else told[:37] + "..."


# --- Keys without a column travel as JSON in ``extra``


def split(record: Mapping[str, Any], columns: Mapping[str, str]) -> tuple[Record, Record]:
    """Return ``(values by column, the rest)`` of a record. ``columns`` maps its keys to columns.
    An explicit null stays in the rest, since a column cannot distinguish it from a missing key."""
    held = {column: record.get(key) for key, column in columns.items()}
    rest = {key: value for key, value in record.items() if key not in columns or value is None}
    return held, rest


def join(held: Mapping[str, Any], columns: Mapping[str, str], rest: Mapping[str, Any]) -> Record:
    """Undo ``split``."""
    known = {key: held[column] for key, column in columns.items() if held.get(column) is not None}
    return {**known, **{key: value for key, value in rest.items() if key not in known}}


def pack(source: str, rest: Mapping[str, Any]) -> str:
    """Return the ``extra`` of a response from a ``source`` format."""
    return json.dumps({source: rest}, separators=(",", ":"))


def unpack(extra: str | None, source: str) -> Record | None:
    """Undo ``pack``. None if the response comes from another format."""
    if not extra:
        return None
    found: object = json.loads(extra).get(source)
    return cast(Record, found) if isinstance(found, dict) else None


def samples(rows: Iterable[Mapping[str, Any]]) -> pl.DataFrame:
    """Return rows as the table ``SAMPLES``. Missing keys are null."""
    return table(rows, SAMPLES)


def table(rows: Iterable[Mapping[str, Any]], schema: dict[str, pl.DataType]) -> pl.DataFrame:
    """Like ``samples``, for any of a trace's tables."""
    given = list(rows)
    return pl.DataFrame({name: [row.get(name) for row in given] for name in schema}, schema=schema)


# --- The circumstances of reading

TokenCount = Callable[[str], int]
_CHANCE = 4  # fewer equal records in two tasks may be chance


class Repeats:
    """Steps and records that were read before, because copies must not count twice."""

    def __init__(self) -> None:
        self.prints: dict[int, tuple[str, Path]] = {}
        self._steps: dict[int, str] = {}
        self._records: set[tuple[str, int]] = set()

    def fresh(
        self, path: Path, task: str, given: Sequence[Record], note: Note, *, least: int = _CHANCE
    ) -> list[Record]:
        """Return ``given`` without steps of another task and without earlier records of this
        task. ``least``: fewer equal records of one step in two tasks may be chance."""
        prints = [hash(json.dumps(record, sort_keys=True)) for record in given]
        steps: dict[int, set[int]] = {}
        for record, key in zip(given, prints, strict=True):
            steps.setdefault(record["step"], set()).add(key)
        shared = {step for step, keys in steps.items() if self._elsewhere(keys, task, least)}
        for step in sorted(shared):
            owner = self._steps[hash(frozenset(steps[step]))]
            note(f"{path}: step {step} is the same as in {owner}: counted once")
        kept: list[Record] = []
        for record, key in zip(given, prints, strict=True):
            if record["step"] not in shared and (task, key) not in self._records:
                self._records.add((task, key))
                kept.append(record)
        repeated = sum(record["step"] not in shared for record in given) - len(kept)
        if repeated:
            note(f"{path}: {repeated} lines repeat earlier lines: counted once")
        return kept

    def _elsewhere(self, keys: set[int], task: str, least: int) -> bool:
        owner = self._steps.setdefault(hash(frozenset(keys)), task)
        return owner != task and len(keys) >= least


@dataclass(slots=True)
class Copied:
    """Find responses with which a file, or a unit of it (a line with many), repeats all of an
    earlier one. Trainers write growing tables again and again. ``found`` counts the repeated
    responses."""

    repeats: Repeats
    task: str
    path: Path
    found: Counter[Path] = field(default_factory=Counter[Path])
    _unit: int = 0
    _print: int = 0
    _count: int = 0

    def again(self, unit: int, *response: object) -> int:
        """Return how many of the last responses, including this one, are an earlier file or
        unit."""
        if unit != self._unit:
            self.end()
            self._unit = unit
        self._print, self._count = hash((self._print, response)), self._count + 1
        task, path = self.repeats.prints.get(self._print, ("", self.path))
        if not task or (task != self.task and self._count < _CHANCE):
            return 0
        count, self._print, self._count = self._count, 0, 0
        self.found[path] += count
        return count

    def end(self) -> None:
        self.repeats.prints.setdefault(self._print, (self.task, self.path))
        self._print = self._count = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The options of reading one task.

    Args:
        repeats: shared by the tasks of one trace.
        bad: gets wrong records.
        left: gets unfinished parts that an interrupted writer left. Default: a ``note``.
        count: counts tokens of texts if a log does not. Default: an estimate by characters.
    """

    task: str
    note: Note
    repeats: Repeats = field(default_factory=Repeats)
    bad: Bad = stop
    left: Bad | None = None
    tick: Tick = quiet
    count: TokenCount | None = None

    def leave(self, problem: Problem) -> None:
        if self.left is None:
            self.note(f"{problem}: left out")
        else:
            self.left(problem)


# --- Parquet files of other shapes than the native one


def read_table(
    path: Path, needed: Sequence[str], *, only: bool = False, also: Sequence[str] = ()
) -> pl.DataFrame:
    """Read a parquet file that has at least the ``needed`` columns. ``only`` skips other
    columns, except those of ``also``, if present. Raises ``TraceError``."""
    try:
        table = pl.scan_parquet(path)
        names = table.collect_schema().names()
        for name in needed:
            if name not in names:
                raise TraceError(f"{path}: column {name} is missing")
        wanted = [*needed, *(name for name in also if name in names)]
        return (table.select(wanted) if only else table).collect()
    except PolarsError as error:
        raise TraceError(f"{path}: cannot be read as parquet ({first_line(error)})") from error


def whole_numbers(path: Path, frame: pl.DataFrame, names: Iterable[str]) -> None:
    """Raise ``TraceError`` unless these columns hold counts: whole, 0 or more, not null."""
    for name in names:
        column = frame[name]
        if not column.dtype.is_integer():
            raise TraceError(f"{path}: column {name}: expected whole numbers, got {column.dtype}")
        bad = (column.is_null() | (column < 0) | (column > MOST)).arg_true()
        if bad.len():
            row = int(bad[0])
            raise TraceError(
                f"{path}, row {row + 1}: {name}: expected 0 to {MOST}, got {column[row]}"
            )


# --- Records: lines, a JSON array, a table

_ROWS_AT_ONCE = 256
_LOOKED_AT = 5
_GAP = " \t\r\n,"
_DECODER = json.JSONDecoder()


def entries(path: Path, reading: Reading) -> Iterator[tuple[int, Record]]:
    """Yield each record with its line (in a table, its row). ``reading`` gets wrong and omitted
    records. Raises ``OSError``."""
    if bare(path).endswith(".parquet"):
        yield from _rows(path, reading)
        return
    try:
        start = next((part.lstrip()[:1] for part in blocks(path) if part.strip()), b"")
    except TornError as error:
        reading.leave(Problem(path, 0, str(error)))
        return
    if not start:
        reading.leave(Problem(path, 0, "empty"))
    elif start == b"[":
        yield from _elements(path, reading)
    elif bare(path).endswith(".json"):
        yield from _document(path, reading)
    else:
        for number, raw in _numbered(path, reading):
            yield from _line(path, number, raw, reading)


def beginning(path: Path) -> tuple[list[Record], str]:
    """Return the first records of a file that is no table, or a mistake if there are none.
    Raises ``OSError``."""
    found: list[Record] = []
    problems: list[Problem] = []
    reading = Reading(task="", note=silent, bad=problems.append, left=problems.append)
    for _, record in entries(path, reading):
        found.append(record)
        if len(found) == _LOOKED_AT:
            break
    return found, "" if found or not problems else problems[0].text


def _numbered(path: Path, reading: Reading) -> Iterator[tuple[int, bytes]]:
    number = 0
    try:
        for raw in lines(path, reading.tick):
            number += 1
            if raw.strip():
                yield number, raw
    except TornError as error:
        reading.leave(Problem(path, number + 1, str(error)))


def _line(path: Path, number: int, raw: bytes, reading: Reading) -> Iterator[tuple[int, Record]]:
    try:
        record = parsed(raw)
    except ValueError as error:
        torn = not raw.endswith(b"\n")
        (reading.leave if torn else reading.bad)(Problem(path, number, str(error)))
        return
    yield number, record


def _document(path: Path, reading: Reading) -> Iterator[tuple[int, Record]]:
    """One JSON object, which is a wandb table or a record, or else lines in spite of the name."""
    given = _numbered(path, reading)
    number, head = next(given, (0, b""))
    try:
        record = parsed(head)
    except ValueError:
        try:
            record = parsed(head + b"".join(raw for _, raw in given))
        except ValueError as error:
            reading.leave(Problem(path, number, str(error)))
            return
    yield from _of_table(path, record, reading) if is_table(record) else [(number, record)]
    for number, raw in given:
        yield from _line(path, number, raw, reading)


def is_table(record: Record) -> bool:
    """Whether it is a table as wandb writes it."""
    return isinstance(record.get("columns"), list) and isinstance(record.get("data"), list)


def _of_table(path: Path, record: Record, reading: Reading) -> Iterator[tuple[int, Record]]:
    names = [str(name) for name in record["columns"]]
    for number, row in enumerate(cast(list[Any], record["data"]), start=1):
        if isinstance(row, list) and len(cast(list[Any], row)) == len(names):
            yield number, dict(zip(names, cast(list[Any], row), strict=True))
        else:
            reading.bad(Problem(path, 0, f"row {number}: expected a list of {len(names)} values"))


def _elements(path: Path, reading: Reading) -> Iterator[tuple[int, Record]]:
    """Records of a JSON array, each with its first line. The whole file is in memory."""
    text, place, number = _whole(path, reading).lstrip()[1:], 0, 1
    while True:
        begin = _after_gap(text, place)
        number += text.count("\n", place, begin)
        if text.startswith("]", begin):
            return
        try:
            value, place = _DECODER.raw_decode(text, begin)
        except (ValueError, RecursionError) as error:
            if text.rstrip().endswith("]"):
                reading.bad(Problem(path, number, f"not JSON in this record or behind it: {error}"))
            else:
                reading.leave(Problem(path, number, "the file ends within this record"))
            return
        if isinstance(value, dict):
            yield number, cast(Record, value)
        else:
            reading.bad(Problem(path, number, f"expected a JSON object, got {shown(value)}"))
        number += text.count("\n", begin, place)


def _after_gap(text: str, place: int) -> int:
    while place < len(text) and text[place] in _GAP:
        place += 1
    return place


def _whole(path: Path, reading: Reading) -> str:
    pieces: list[bytes] = []
    try:
        pieces.extend(blocks(path, reading.tick))
    except TornError as error:
        reading.leave(Problem(path, 0, str(error)))
    try:
        return b"".join(pieces).decode()
    except UnicodeDecodeError as error:
        reading.bad(Problem(path, 0, "not UTF-8 text"))
        return b"".join(pieces)[: error.start].decode()


def _rows(path: Path, reading: Reading) -> Iterator[tuple[int, Record]]:
    number = 0
    try:
        for batch in pl.scan_parquet(path).collect_batches(chunk_size=_ROWS_AT_ONCE):
            for row in batch.iter_rows(named=True):
                number += 1
                yield number, row
    except (PolarsError, OSError) as error:
        reading.leave(Problem(path, 0, f"not a parquet file ({first_line(error)})"))
        return
    reading.tick(path.stat().st_size)
