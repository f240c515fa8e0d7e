"""Files of rows: which ones a path or a pattern names, and how each kind is read."""

from __future__ import annotations

import codecs
import difflib
import glob
import gzip
import json
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import polars

from rollpacker.data.base import DataError
from rollpacker.errors import one_line

Record = dict[str, Any]

KINDS = (".json", ".jsonl", ".parquet", ".csv", ".tsv", ".arrow")
"""Suffixes of files that are read."""

_TEXT = (".json", ".jsonl", ".csv", ".tsv")
"""Those that may be followed by ``.gz``."""

_NO_VALUE = ["NaN", "nan", "<NA>", "NaT"]
"""What pandas writes into a text file where a value is missing, besides nothing."""

_NAMED = 5
"""Keys of an object that are named, where it is no row."""

_FILE_FORMAT = b"ARROW1"
"""What an Arrow file begins with; the ``datasets`` library writes streams, which do not."""


def is_pattern(path: str) -> bool:
    """Whether a path stands for several files."""
    return glob.has_magic(path) and not Path(path).expanduser().exists()


def kind_of(file: Path) -> str:
    """The suffix that says how a file is read, without ``.gz``; empty for an unknown one."""
    if file.suffix == ".gz":
        suffix = Path(file.stem).suffix
        return suffix if suffix in _TEXT else ""
    return file.suffix if file.suffix in KINDS else ""


def find_files(path: str) -> list[Path]:
    """The file of a path, or those of a pattern in the order of their names."""
    if not is_pattern(path):
        return [Path(path).expanduser()]
    found = glob.glob(str(Path(path).expanduser()), recursive=True)
    files = sorted(file for file in map(Path, found) if file.is_file())
    if not files:
        raise DataError(f"data.path: no file matches '{path}'")
    return files


def check_file(file: Path) -> str:
    """How it is read. Raises ``DataError`` where it is not there, or of no known type."""
    if not file.is_file():
        raise DataError(f"data.path: no file '{file}'{_near(file)}")
    kind = kind_of(file)
    if not kind:
        known = ", ".join(KINDS)
        raise DataError(f"data.path: '{file}' is of no known type; known: {known}")
    return kind


def read_file(file: Path) -> list[Record]:
    """All rows of a file. Raises ``DataError``."""
    kind = check_file(file)
    if kind == ".jsonl":
        return _read_jsonl(file)
    if kind == ".json":
        return _read_json(file)
    try:
        return _read_table(file, kind).to_dicts()
    except (OSError, EOFError, zlib.error, UnicodeError, polars.exceptions.PolarsError) as error:
        raise DataError(f"{file}: cannot be read: {one_line(error)}") from None


def checked(records: Iterable[Any], source: str) -> list[Record]:
    """Rows as dictionaries by column. Raises ``DataError`` on what is none."""
    result: list[Record] = []
    for number, record in enumerate(records):
        if not isinstance(record, Mapping):
            found = type(record).__name__
            raise DataError(f"{source}, row {number}: expected an object, found {found}")
        result.append({str(name): value for name, value in record.items()})
    return result


def _near(file: Path) -> str:
    if not file.parent.is_dir():
        return f": no folder '{file.parent}'"
    names = [p.name for p in file.parent.iterdir() if kind_of(p)]
    close = difflib.get_close_matches(file.name, names, n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(repr(n) for n in close)}?" if close else ""


def _read_table(file: Path, kind: str) -> polars.DataFrame:
    if kind in (".csv", ".tsv"):
        return _read_separated(_read_bytes(file))
    if kind == ".parquet":
        return polars.read_parquet(file)
    with file.open("rb") as start:
        is_file = start.read(len(_FILE_FORMAT)) == _FILE_FORMAT
    return polars.read_ipc(file) if is_file else polars.read_ipc_stream(file)


def _read_separated(data: bytes) -> polars.DataFrame:
    """A table of text, by the first of these that its header has: Excel writes what the country
    has, and spreadsheets put spaces behind commas."""
    header = data.split(b"\n", 1)[0].decode(errors="replace")
    separator = next((each for each in ("\t", ",", ";") if each in header), ",")
    table = polars.read_csv(data, infer_schema=False, null_values=_NO_VALUE, separator=separator)
    names = {name: name.strip() for name in table.columns}
    return table.rename(names) if len({*names.values()}) == len(names) else table


def _read_bytes(file: Path) -> bytes:
    """What a file of text holds, as UTF-8; Excel and PowerShell write UTF-16."""
    data = file.read_bytes()
    data = gzip.decompress(data) if file.suffix == ".gz" else data
    wide = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    return data.decode("utf-16").encode() if wide else data


def _read_text(file: Path) -> str:
    try:
        return _read_bytes(file).decode("utf-8-sig")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise DataError(f"{file}: cannot be read: {one_line(error)}") from None


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise json.JSONDecodeError("nested too deeply", text, 0) from None


def _read_jsonl(file: Path) -> list[Record]:
    records: list[Record] = []
    # str.splitlines would also break at U+2028, which JSON strings may hold.
    for number, line in enumerate(_read_text(file).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = _parse(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{file}, line {number}: not JSON ({error.msg})") from None
        if not isinstance(record, dict):
            found = type(record).__name__
            raise DataError(f"{file}, line {number}: expected an object, found {found}")
        records.append(record)
    return records


def _read_json(file: Path) -> list[Record]:
    text = _read_text(file)
    try:
        data = _parse(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            return _read_jsonl(file)
        raise DataError(f"{file}, line {error.lineno}: not JSON ({error.msg})") from None
    if isinstance(data, dict) and len(data) == 1:
        data = next(iter(data.values()))
    if not isinstance(data, list):
        found = type(data).__name__
        if isinstance(data, dict):
            names = ", ".join(f"'{name}'" for name in [*data][:_NAMED])
            found = f"an object of {names} (pandas: to_json(path, orient='records'))"
        raise DataError(f"{file}: expected a list of objects, found {found}")
    return checked(data, str(file))
