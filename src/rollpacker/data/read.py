"""Raw records, dictionaries by column, from files, the hub, tasks and functions."""

from __future__ import annotations

import codecs
import difflib
import glob
import gzip
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars

from rollpacker.config import DataConfig
from rollpacker.config.base import only_here
from rollpacker.data.base import DataError, Record
from rollpacker.data.columns import is_missing
from rollpacker.errors import one_line
from rollpacker.user_code import find

# --- Files of rows

KINDS = (".json", ".jsonl", ".parquet", ".csv", ".tsv", ".arrow")  # suffixes of files that are read

_TEXT = (".json", ".jsonl", ".csv", ".tsv")  # those that may be followed by ``.gz``

_NO_VALUE = ["NaN", "nan", "<NA>", "NaT"]
"""Texts of pandas for a missing value, besides the empty one."""

_NAMED = 5  # keys that an error names, if an object is no row

_FILE_FORMAT = b"ARROW1"
"""The beginning of an Arrow file. The ``datasets`` library writes streams, which have another
one."""


def is_pattern(path: str) -> bool:
    """Return whether a path stands for several files."""
    return glob.has_magic(path) and not Path(path).expanduser().exists()


def kind_of(file: Path) -> str:
    """Return the suffix that decides how a file is read, without ``.gz``, empty if unknown."""
    if file.suffix == ".gz":
        suffix = Path(file.stem).suffix
        return suffix if suffix in _TEXT else ""
    return file.suffix if file.suffix in KINDS else ""


def find_files(path: str) -> list[Path]:
    """Return the file of a path, or those of a pattern in the order of their names."""
    if not is_pattern(path):
        return [Path(path).expanduser()]
    found = glob.glob(str(Path(path).expanduser()), recursive=True)
    files = sorted(file for file in map(Path, found) if file.is_file())
    if not files:
        raise DataError(f"data.path: no file matches '{path}'")
    return files


def check_file(file: Path) -> str:
    """Return the kind of a file. Raises ``DataError`` if it does not exist or its type is
    unknown."""
    if not file.is_file():
        raise DataError(f"data.path: no file '{file}'{_near(file)}")
    kind = kind_of(file)
    if not kind:
        known = ", ".join(KINDS)
        raise DataError(f"data.path: '{file}' is of no known type (known: {known})")
    return kind


def read_file(file: Path) -> list[Record]:
    """Return all rows of a file. Raises ``DataError``."""
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
    """Return rows as dictionaries by column. Raises ``DataError`` on other values."""
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
    # The first of these separators in the header counts: Excel's depends on the country, and some
    # spreadsheets write spaces after commas.
    header = data.split(b"\n", 1)[0].decode(errors="replace")
    separator = next((each for each in ("\t", ",", ";") if each in header), ",")
    table = polars.read_csv(data, infer_schema=False, null_values=_NO_VALUE, separator=separator)
    names = {name: name.strip() for name in table.columns}
    return table.rename(names) if len({*names.values()}) == len(names) else table


def _read_bytes(file: Path) -> bytes:
    # Excel and PowerShell write UTF-16.
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


_PROCEDURAL_SIZE = 1000

_KEYS = {
    "files": ("a file", ()),
    "task": ("a task of reasoning-gym", ("options", "seed")),
    "function": ("a function", ("options",)),
    "dataset": ("a dataset", ("split", "options")),
}  # kinds of sources: their names in errors, and the keys that only some kinds read

_NOT_HERE = "data.path: there is no file or folder '{}'"

_NAMED_FILES = 3  # files that are named one by one if a source has several


@dataclass(frozen=True, slots=True)
class Records:
    """A source's rows as they are, in order. ``parts``: names with their rows: the files of a
    pattern or a list."""

    name: str
    parts: Sequence[tuple[str, list[Record]]]

    @property
    def rows(self) -> list[tuple[str, Record]]:
        """Return each row after its place, for errors."""
        return [
            (f"{name}, row {number}", record)
            for name, records in self.parts
            for number, record in enumerate(records)
        ]


def check_places(config: DataConfig) -> None:
    """Raise ``DataError`` for missing files and folders, before anything is read. The hub is not
    asked."""
    path = config.path
    if _kind(path) == "files":
        for each in [path] if isinstance(path, str) else path:
            for file in find_files(each):
                check_file(file)
    elif _kind(path) == "dataset":
        _check_folder(str(path), config)


def read_records(config: DataConfig) -> Records:
    """Return all records of ``config.path``, in order. A missing value in any notation becomes
    None. Raises ``DataError``."""
    records = _read_all(config)
    for _, record in records.rows:
        for name, value in record.items():
            if is_missing(value):
                record[name] = None
    return records


def _read_all(config: DataConfig) -> Records:
    path = config.path
    what, read = _KEYS[_kind(path)]
    for key in _of_some():
        if key not in read and getattr(config, key) != _default(key):
            raise DataError(
                f"data.{key}: {getattr(config, key)!r} has no effect if data.path is {what}: "
                "remove it"
            )
    if isinstance(path, list):
        return _files(path)
    if is_pattern(path):
        return _files([path])
    return Records(path, [(path, _read(path, config))])


def from_other(config: DataConfig, path: str) -> DataConfig:
    """Return the configuration for another source, without the keys that it does not read."""
    _, read = _KEYS[_kind(path)]
    unread = {key: _default(key) for key in _of_some() if key not in read}
    return config.model_copy(update={**unread, "path": path})


def _of_some() -> Set[str]:
    return {key for _, read in _KEYS.values() for key in read}


def _default(key: str) -> Any:
    return DataConfig.model_fields[key].default


def _kind(path: str | list[str]) -> str:
    if isinstance(path, list) or is_pattern(path):
        return "files"
    if path.startswith("rg:"):
        return "task"
    place, _, name = path.rpartition(":")
    dotted = all(part.isidentifier() for part in place.split("."))
    if name.isidentifier() and (place.endswith(".py") or dotted):
        return "function"
    file = Path(path).expanduser()
    return "files" if file.is_file() or kind_of(file) else "dataset"


def _read(path: str, config: DataConfig) -> list[Record]:
    kind = _kind(path)
    if kind == "task":
        return _reasoning_gym(path.removeprefix("rg:"), config)
    if kind == "function":
        place, _, name = path.rpartition(":")
        return _call(place, name, config)
    return read_file(Path(path).expanduser()) if kind == "files" else _dataset(path, config)


def _files(paths: Sequence[str]) -> Records:
    files = [file for path in paths for file in find_files(path)]
    if not files:
        raise DataError("data.path: the list of files is empty")
    names = [str(file) for file in files[:_NAMED_FILES]]
    more = f" and {len(files) - len(names)} more" if len(files) > len(names) else ""
    return Records(", ".join(names) + more, [(str(file), read_file(file)) for file in files])


def _dataset(path: str, config: DataConfig) -> list[Record]:
    import datasets

    folder = Path(path).expanduser()
    if not _check_folder(path, config):
        _check_hub(path)
    try:
        if (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file():
            dataset = _saved(
                datasets.load_from_disk(str(folder), **config.options), path, config.split
            )
        else:
            name = str(folder) if folder.is_dir() else path
            dataset = datasets.load_dataset(name, split=config.split, **config.options)
        _check_features(path, getattr(dataset, "features", None) or {})
        return checked(iter(dataset), path)
    except DataError:
        raise
    except Exception as error:  # the hub client raises the errors of many libraries
        here = "is a folder, but" if folder.is_dir() else "is no file here and"
        raise DataError(
            f"data.path: '{path}' {here} cannot be loaded as a hub dataset "
            f"(split '{config.split}'): {one_line(error)}"
        ) from None


def _check_folder(path: str, config: DataConfig) -> bool:
    # Whether the dataset is local. Otherwise it may be on the hub, unless its path excludes that.
    if Path(path).expanduser().is_dir() or {"data_files", "data_dir"} & set(config.options):
        return True
    if only_here(path):
        raise DataError(_NOT_HERE.format(path))
    return False


def _check_hub(path: str) -> None:
    # Refuse a missing dataset before a library tries for half a minute.
    from datasets import config as places

    from rollpacker.hub import answers

    missing = _NOT_HERE.format(path)
    try:
        online = answers(path, "dataset")
    except ValueError as error:
        raise DataError(f"{missing}, and {error}") from None
    if not online and not (places.HF_DATASETS_CACHE / path.replace("/", "___")).is_dir():
        raise DataError(
            f"{missing}, and the hub, which may have a dataset of that name, cannot be reached"
        )


def _saved(loaded: Any, path: str, split: str) -> Any:
    # ``save_to_disk`` writes one dataset, or one for each split.
    if isinstance(loaded, Mapping):
        if split not in loaded:
            raise DataError(f"data.split: '{path}' has no split '{split}', only {list(loaded)}")
        return loaded[split]
    if split not in ("train", str(loaded.split)):
        raise DataError(f"data.split: '{path}' was saved without splits: leave data.split unset")
    return loaded


def _check_features(path: str, features: Mapping[str, Any]) -> None:
    # Refuse pictures and sounds before a library decodes them.
    for name, feature in features.items():
        if any(kind in repr(feature) for kind in ("Image(", "Video(", "Audio(")):
            raise DataError(
                f"{path}: column '{name}' holds images, videos or sounds, but models are trained "
                "on text alone: remove the column if the prompts do not need it"
            )


def _reasoning_gym(task: str, config: DataConfig) -> list[Record]:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        close = difflib.get_close_matches(task, DATASETS, n=1)
        hint = f"; did you mean 'rg:{close[0]}'?" if close else ""
        raise DataError(f"data.path: reasoning-gym has no task '{task}'{hint}")
    size = config.size or _PROCEDURAL_SIZE
    try:
        dataset = reasoning_gym.create_dataset(task, **config.options, size=size, seed=config.seed)
        entries = [dataset[i] for i in range(size)]
    except (AssertionError, TypeError, ValueError) as error:
        raise DataError(f"data.options: task '{task}': {one_line(error)}") from None
    return [
        {
            "question": entry["question"],
            "answer": entry["answer"],
            "metadata": entry["metadata"],
            "rg_task": task,
            "rg_options": config.options,
        }
        for entry in entries
    ]


def _call(place: str, name: str, config: DataConfig) -> list[Record]:
    source = f"{place}:{name}"
    try:
        function = find(source, "data.path")
    except ValueError as error:
        raise DataError(str(error)) from None
    try:
        records = _of_frame(function(**config.options))
        if not isinstance(records, Iterable) or isinstance(records, str | bytes | Mapping):
            raise TypeError(f"expected rows, it returned {type(records).__name__}")
        return checked(records, source)
    except DataError:
        raise
    except Exception as error:  # the user's code may raise anything
        raise DataError(f"data.path: {source}: {one_line(error)}") from None


def _of_frame(rows: Any) -> Any:
    if hasattr(rows, "to_dicts"):
        return rows.to_dicts()
    return rows.to_dict("records") if hasattr(rows, "iterrows") else rows
