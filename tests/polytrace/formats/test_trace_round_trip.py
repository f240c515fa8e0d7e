"""What was imported is exported again: same lines, same keys, same values."""

import os
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trace_lines import Record, dump, load, multiturn, polytrace_folder, turn

from rollpacker.polytrace import formats
from rollpacker.polytrace.formats.files import samples
from rollpacker.polytrace.schema import Trace


def test_polytrace_comes_back_through_the_native_file(tmp_path: Path) -> None:
    source = polytrace_folder(tmp_path / "in" / "math")
    dump(
        tmp_path / "in" / "search" / "multiturn_workload_step_1.jsonl",
        multiturn(1),
        multiturn(1, 0, 1, turns=[], turn_count=0),
        multiturn(1, 1, 0, turns=[turn(0, 5, finish_reason=None, engine_latency_s=2)], new="x"),
    )
    trace = formats.read(source.parent)
    formats.write(trace, tmp_path / "trace.parquet", "native")
    again = formats.read(tmp_path / "trace.parquet")
    for name in ("samples", "reward_batches", "filters"):
        assert getattr(again, name).equals(getattr(trace, name))
    formats.write(again, tmp_path / "out", "polytrace")
    assert load(tmp_path / "out") == load(source.parent)


COUNTS = st.integers(0, 2**31 - 1)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(), inner, max_size=2),
    max_leaves=4,
)
UNKNOWN = st.dictionaries(st.text().map(lambda name: f"x-{name}"), VALUES, max_size=3)
SECONDS = st.floats(0, 1e6) | st.integers(0, 1000)


@st.composite
def any_packed(draw: st.DrawFn) -> Record:
    output = draw(st.lists(COUNTS, min_size=1, max_size=3))
    keys = ("step", "rank", "dp_rank", "local_index", "input")
    optional = {"tp_rank": draw(COUNTS | st.none()), "validate": draw(st.booleans())}
    shown = draw(st.sets(st.sampled_from(sorted(optional))))
    return {
        **{key: draw(st.integers(0, 2) if key != "input" else COUNTS) for key in keys},
        **{key: optional[key] for key in shown},
        "output": output,
        "n_sampling": len(output),
        **draw(UNKNOWN),
    }


@st.composite
def any_multiturn(draw: st.DrawFn) -> Record:
    some = st.fixed_dictionaries(
        {"completion_tokens": st.integers(0, 9)},
        optional={
            "prompt_tokens": COUNTS | st.none(),
            "cached_tokens": COUNTS | st.none(),
            "finish_reason": st.sampled_from(["stop", "length", None]),
            "engine_latency_s": SECONDS | st.none(),
            "x": VALUES,
        },
    )
    call = st.fixed_dictionaries(
        {"tool_name": st.text()},
        optional={"turn": COUNTS, "latency_s": SECONDS | st.none(), "status": st.text()},
    )
    return {
        **draw(
            st.fixed_dictionaries(
                {"step": st.integers(0, 2), "prompt_len": COUNTS},
                optional={"max_model_len": COUNTS, "finish_reason": st.just("stop") | st.none()},
            )
        ),
        "turns": draw(st.lists(some, max_size=3)),
        "tool_calls": draw(st.lists(call, max_size=2)),
        **draw(UNKNOWN),
    }


def by_step(lines: list[Record]) -> dict[int, list[Record]]:
    found: dict[int, list[Record]] = {}
    for line in lines:
        if line not in found.setdefault(line["step"], []) or "prompt_len" in line:
            found[line["step"]].append(line)
    return found


@settings(max_examples=settings().max_examples // 4)
@given(lines=st.lists(any_packed() | any_multiturn(), min_size=1, max_size=6))
def test_any_lines_come_back(lines: list[Record], tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("round")
    kinds = {"packed_lengths": "output", "multiturn_workload": "turns"}
    expected: dict[str, list[Record]] = {}
    for start, key in kinds.items():
        mine = by_step([line for line in lines if key in line])
        for step, some in mine.items():
            expected[f"{start}_step_{step}.jsonl"] = some
            dump(folder / "in" / f"{start}_step_{step}.jsonl", *some)
    formats.write(formats.read(folder / "in"), folder / "t.parquet", "native")
    formats.write(formats.read(folder / "t.parquet"), folder / "out", "polytrace")
    assert load(folder / "out") == expected


def test_a_trace_of_another_source_can_be_written_and_read_again(tmp_path: Path) -> None:
    rows = [
        {
            "task": "code",
            "step": 3,
            "prompt": prompt,
            "index": index,
            "prompt_tokens": 64,
            "response_tokens": 100 + index,
            "cap": 200,
            "truncated": False,
            "state": "aborted" if index else "kept",
            "reward": 1.0,
        }
        for prompt in ("p", "q")
        for index in (0, 1)
    ]
    trace = Trace(samples=samples(rows))
    notes: list[str] = []
    formats.write(trace, tmp_path / "packed", "packed_lengths", note=notes.append)
    formats.write(trace, tmp_path / "turns", "multiturn", note=notes.append)
    columns = ["step", "index", "prompt_tokens", "response_tokens"]
    for folder in ("packed", "turns"):
        again = formats.read(tmp_path / folder).samples
        assert again.select(columns).equals(trace.samples.select(columns))
        assert again["prompt"].n_unique() == 2
    assert formats.problems(tmp_path) == []
    assert formats.read(tmp_path / "turns").samples["cap"].to_list() == [200] * 4
    assert any("no place for reward" in note for note in notes)
    assert any("2 are written as if complete" in note for note in notes)


def test_a_task_s_name_cannot_lead_out_of_the_folder(tmp_path: Path) -> None:
    rows = [
        {"task": name, "step": 0, "prompt": "p", "index": 0, "response_tokens": 1, "state": "kept"}
        for name in ("../../evil", "/abs/x")
    ]
    files = formats.write(Trace(samples=samples(rows)), tmp_path / "out", "packed_lengths")
    assert [path.relative_to(tmp_path / "out").parts[0] for path in files] == ["evil", "abs"]


PUBLIC = os.environ.get("ROLLPACKER_POLYTRACE")


@pytest.mark.skipif(not PUBLIC, reason="ROLLPACKER_POLYTRACE is not set")
def test_the_public_traces_come_back(tmp_path: Path) -> None:
    root = Path(str(PUBLIC))
    trace = formats.read(root)
    formats.write(trace, tmp_path / "t.parquet", "native")
    formats.write(formats.read(tmp_path / "t.parquet"), tmp_path / "out", "polytrace")
    assert load(tmp_path / "out") == load(root)
    assert formats.problems(root) == []
    lengths = trace.samples.group_by("task").agg(pl.col("response_tokens").mean())
    means = dict(lengths.iter_rows())
    assert means["verl_dapo_32b"] == pytest.approx(583.07, abs=0.01)
    assert means["rllm_code_14b"] == pytest.approx(9819.54, abs=0.01)
    assert means["search_r1_7b"] == pytest.approx(201.12, abs=0.01)
    assert means["verl_video_7b"] == pytest.approx(169.92, abs=0.01)
