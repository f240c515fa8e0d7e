"""Logs of any content: a trace, or one line that says why not; never another exception."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trace_lines import dump

from rollpacker.polytrace import formats
from rollpacker.polytrace.describe import characterize
from rollpacker.polytrace.formats.logs.layouts import LAYOUTS
from rollpacker.polytrace.schema import TraceError

ROLLOUT = {"input": "q", "output": "x" * 40, "score": 1.0, "step": 1}
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=6,
)
KEYS = sorted({key for layout in LAYOUTS.values() for key in (*layout.needs, *layout.used)})


@st.composite
def record_of_some_layout(draw: st.DrawFn) -> dict[str, Any]:
    layout = LAYOUTS[draw(st.sampled_from(sorted(LAYOUTS)))]
    record = {key: draw(VALUES) for key in layout.needs}
    return record | draw(st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=4))


def read_or_refuse(path: Path) -> None:
    try:
        trace = formats.read(path)
    except (TraceError, OSError) as error:
        said = str(error)
    else:
        said = ""
        characterize(trace)
    assert "\n" not in said
    assert all("\n" not in str(each) for each in formats.problems(path))


@settings(max_examples=settings().max_examples, deadline=None)
@given(st.lists(record_of_some_layout(), min_size=1, max_size=3))
def test_records_of_any_values_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, records: list[dict[str, Any]]
) -> None:
    path = tmp_path_factory.mktemp("any") / "step_1.jsonl"
    read_or_refuse(dump(path, *records))


@settings(max_examples=settings().max_examples, deadline=None)
@given(
    st.binary(max_size=60),
    st.sampled_from([b"", b"[", b'{"columns": [', json.dumps(ROLLOUT).encode() + b"\n"]),
    st.sampled_from([".jsonl", ".jsonl.gz", ".jsonl.zst", ".json", ".parquet", ".pt"]),
)
def test_any_bytes_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, tail: bytes, head: bytes, suffix: str
) -> None:
    path = tmp_path_factory.mktemp("any") / f"1{suffix}"
    path.write_bytes(head + tail)
    read_or_refuse(path)
