"""Reading raw records: dictionaries by column, whatever the source."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import polars

from rollpacker.config import DataConfig
from rollpacker.data.base import DataError

Record = dict[str, Any]

_READERS = (".json", ".jsonl", ".parquet", ".csv")
_PROCEDURAL_SIZE = 1000


def read_records(config: DataConfig) -> list[Record]:
    """All records of ``config.path``, in order. Raises ``DataError``."""
    path = config.path
    if path.startswith("rg:"):
        return _reasoning_gym(path.removeprefix("rg:"), config)
    place, _, name = path.rpartition(":")
    if name.isidentifier() and (place.endswith(".py") or _is_dotted(place)):
        return _call(place, name, config)
    file = Path(path).expanduser()
    if file.is_file() or file.suffix in _READERS:
        return _read_file(file)
    return _hub(path, config)


def _is_dotted(text: str) -> bool:
    return all(part.isidentifier() for part in text.split("."))


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _read_file(file: Path) -> list[Record]:
    if not file.is_file():
        raise DataError(f"data.path: no file '{file}'{_near(file)}")
    if file.suffix == ".jsonl":
        return _read_jsonl(file)
    if file.suffix == ".json":
        return _read_json(file)
    if file.suffix not in _READERS:
        known = ", ".join(_READERS)
        raise DataError(f"data.path: '{file}' is of no known type; known: {known}")
    try:
        if file.suffix == ".csv":
            return polars.read_csv(file, infer_schema=False).to_dicts()
        return polars.read_parquet(file).to_dicts()
    except (OSError, polars.exceptions.PolarsError) as error:
        raise DataError(f"{file}: cannot be read: {_one_line(error)}") from None


def _near(file: Path) -> str:
    if not file.parent.is_dir():
        return f": no folder '{file.parent}'"
    names = [p.name for p in file.parent.iterdir() if p.suffix in _READERS]
    close = difflib.get_close_matches(file.name, names, n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(repr(n) for n in close)}?" if close else ""


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file}: cannot be read: {_one_line(error)}") from None


def _read_jsonl(file: Path) -> list[Record]:
    records: list[Record] = []
    # str.splitlines would also break at U+2028, which JSON strings may hold.
    for number, line in enumerate(_read_text(file).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
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
        data = json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            return _read_jsonl(file)
        raise DataError(f"{file}, line {error.lineno}: not JSON ({error.msg})") from None
    if isinstance(data, dict) and len(data) == 1:
        data = next(iter(data.values()))
    if not isinstance(data, list):
        found = type(data).__name__
        raise DataError(f"{file}: expected a list of objects, found {found}")
    return _checked(data, str(file))


def _checked(records: Iterable[Any], source: str) -> list[Record]:
    result: list[Record] = []
    for number, record in enumerate(records):
        if not isinstance(record, Mapping):
            found = type(record).__name__
            raise DataError(f"{source}, row {number}: expected an object, found {found}")
        result.append(dict(record))
    return result


def _hub(path: str, config: DataConfig) -> list[Record]:
    import datasets

    try:
        dataset = datasets.load_dataset(path, split=config.split, **config.options)
        return _checked(iter(dataset), path)
    except Exception as error:  # the hub client raises errors of many libraries
        raise DataError(
            f"data.path: '{path}' is no file here and cannot be loaded as a hub dataset "
            f"(split '{config.split}'): {_one_line(error)}"
        ) from None


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
        raise DataError(f"data.options: task '{task}': {_one_line(error)}") from None
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
    function = _import(place, name)
    source = f"{place}:{name}"
    try:
        records = function(**config.options)
        if not isinstance(records, Iterable) or isinstance(records, str | bytes | Mapping):
            raise TypeError(f"expected rows, it returned {type(records).__name__}")
        return _checked(records, source)
    except DataError:
        raise
    except Exception as error:  # the user's code may raise anything
        raise DataError(f"data.path: {source}: {_one_line(error)}") from None


def _import(place: str, name: str) -> Callable[..., Any]:
    try:
        if place.endswith(".py"):
            module = _import_file(Path(place).expanduser())
        else:
            module = importlib.import_module(place)
    except Exception as error:  # importing runs the user's code
        raise DataError(f"data.path: cannot import '{place}': {_one_line(error)}") from None
    function = getattr(module, name, None)
    if not callable(function):
        raise DataError(f"data.path: '{place}' has no function '{name}'")
    return function


def _import_file(file: Path) -> Any:
    if not file.is_file():
        raise FileNotFoundError(f"no file '{file}'")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(file.stem, module)
    spec.loader.exec_module(module)
    return module
