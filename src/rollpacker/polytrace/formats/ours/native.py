"""The native form of a trace: one parquet of responses, with the small tables in its metadata."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterable
from pathlib import Path

import polars as pl
from polars.exceptions import ComputeError, PolarsError

from rollpacker.errors import first_line
from rollpacker.polytrace.formats.files import read_table
from rollpacker.polytrace.schema import (
    FILTERS,
    REWARD_BATCHES,
    SAMPLES,
    VERSION,
    Trace,
    TraceError,
)

KEY = "rollpacker_trace"
_REWARDS = "rollpacker_reward_batches"
_FILTERS = "rollpacker_filters"


def write(trace: Trace, path: Path) -> None:
    """Write ``trace`` and replace ``path`` at once. Raises ``OSError`` and ``TraceError``."""
    if missing := sorted(set(SAMPLES) - set(trace.samples.columns)):
        raise TraceError(f"the trace to write has no column {', '.join(missing)}")
    metadata = {
        KEY: str(VERSION),
        _REWARDS: json.dumps(trace.reward_batches.to_dicts()),
        _FILTERS: json.dumps(trace.filters.to_dicts()),
    }
    buffer = io.BytesIO()
    frame = trace.samples.select(pl.col(name).cast(kind) for name, kind in SAMPLES.items())
    frame.write_parquet(buffer, compression="zstd", metadata=metadata)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_bytes(buffer.getvalue())
    os.replace(partial, path)


def read(path: Path) -> Trace:
    """Read a file of ``write``. Raises ``TraceError``."""
    metadata = header(path)
    if KEY not in metadata:
        raise TraceError(f"{path}: no native trace (its metadata lacks {KEY})")
    if metadata[KEY] != str(VERSION):
        raise TraceError(
            f"{path}: schema version {metadata[KEY]}, this rollpacker reads version {VERSION}"
        )
    frame = read_table(path, sorted(SAMPLES))
    wrong = [name for name, kind in SAMPLES.items() if frame.schema[name] != kind]
    if wrong:
        kind = frame.schema[wrong[0]]
        raise TraceError(f"{path}: column {wrong[0]}: expected {SAMPLES[wrong[0]]}, got {kind}")
    return Trace(
        samples=frame.select(list(SAMPLES)),
        reward_batches=_table(path, metadata, _REWARDS, REWARD_BATCHES),
        filters=_table(path, metadata, _FILTERS, FILTERS),
    )


def header(path: Path) -> dict[str, str]:
    """Return the key-value metadata of a parquet file. Raises ``TraceError`` for other files."""
    try:
        return pl.read_parquet_metadata(path)
    except (ComputeError, PolarsError) as error:
        raise TraceError(f"{path}: not a parquet file ({first_line(error)})") from error


def _table(
    path: Path, metadata: dict[str, str], key: str, columns: dict[str, pl.DataType]
) -> pl.DataFrame:
    try:
        rows = json.loads(metadata.get(key, "[]"))
        return pl.DataFrame(rows, schema=columns)
    except (ValueError, TypeError, PolarsError) as error:
        raise TraceError(f"{path}: metadata {key} cannot be read ({first_line(error)})") from error


def concat(traces: Iterable[Trace]) -> Trace:
    """Join the rows of several traces, in their order."""
    tables = zip(*(trace.tables for trace in traces), strict=True)
    return Trace.of(pl.concat(parts) for parts in tables)
