"""Reading PolyTrace's files: rows, ids, caps, filters, copies."""

from pathlib import Path

import pytest
from trace_lines import dapo, dump, load, multiturn, packed, polytrace_folder

from rollpacker.polytrace import formats
from rollpacker.polytrace.schema import SAMPLES, TraceError


def test_packed_lengths_give_one_row_a_response(tmp_path: Path) -> None:
    trace = formats.read(polytrace_folder(tmp_path / "math"))
    assert trace.samples.schema == SAMPLES
    assert trace.tasks == ["math"]
    assert trace.samples["step"].unique(maintain_order=True).to_list() == [0, 2, 10]
    first = trace.samples.row(0, named=True)
    assert (first["prompt"], first["index"], first["dp_rank"]) == ("0/4/0", 0, 1)
    assert (first["prompt_tokens"], first["response_tokens"]) == (100, 10)
    assert first["cap"] is None
    assert first["truncated"] is None
    assert trace.reward_batches["reward_time_s"].to_list() == [77.25, 77.25]


def test_dynamic_sampling_counts_prompts_over_ranks_not_lines(tmp_path: Path) -> None:
    """The file begins with rank 4; indices 1 and 2 are rank 0's second and rank 4's first."""
    trace = formats.read(polytrace_folder(tmp_path))
    kept = trace.samples.filter(state="kept")["prompt"].unique(maintain_order=True).to_list()
    filtered = trace.samples.filter(state="filtered")["prompt"].unique(maintain_order=True)
    assert kept == ["0/4/0", "0/0/1", "2/0/5", "2/0/3"]
    assert filtered.to_list() == ["0/4/1", "0/0/0", "10/0/0"]
    assert trace.filters["used_prompt_indices"].to_list() == [[1], []]


def test_a_filter_of_another_size_is_not_applied(tmp_path: Path) -> None:
    dump(tmp_path / "packed_lengths_step_0.jsonl", packed())
    dump(tmp_path / "dapo_filter_indices.jsonl", dapo(0, 7))
    notes: list[str] = []
    trace = formats.read(tmp_path, note=notes.append)
    assert set(trace.samples["state"]) == {"kept"}
    assert "7 prompts, the trace has 1" in notes[0]


def test_a_cap_is_inferred_from_piled_up_lengths_and_said(tmp_path: Path) -> None:
    dump(tmp_path / "packed_lengths_step_0.jsonl", packed(output=[16000, 16000, 16000, 900]))
    notes: list[str] = []
    frame = formats.read(tmp_path, note=notes.append).samples
    assert frame["cap"].to_list() == [16000] * 4
    assert frame["truncated"].to_list() == [True, True, True, False]
    assert "taken as 16000" in notes[0]


def test_prompts_of_a_repeated_epoch_keep_their_ids(tmp_path: Path) -> None:
    dump(tmp_path / "packed_lengths_step_0.jsonl", *(packed(0, 0, i) for i in range(9)))
    dump(
        tmp_path / "packed_lengths_step_1.jsonl",
        *(packed(1, 0, i, output=[7, 8]) for i in reversed(range(9))),
    )
    frame = formats.read(tmp_path).samples
    assert frame["prompt"].n_unique() == 9
    out = tmp_path / "out"
    formats.write(formats.read(tmp_path), out, "polytrace")
    assert load(out)["packed_lengths_step_1.jsonl"] == load(tmp_path)["packed_lengths_step_1.jsonl"]


def test_multiturn_counts_generated_tokens_only(tmp_path: Path) -> None:
    lines = [multiturn(sample=0), multiturn(sample=1, finish_reason="length")]
    dump(tmp_path / "multiturn_workload_step_0.jsonl", *lines)
    frame = formats.read(tmp_path, task="search").samples
    assert frame["response_tokens"].to_list() == [171, 171]
    assert frame["prompt"].to_list() == ["0/0", "0/0"]
    assert frame["index"].to_list() == [0, 1]
    assert frame["cap"].to_list() == [7096 - 317] * 2
    assert frame["truncated"].to_list() == [False, True]
    assert frame["turns"][0][1]["latency_s"] == 0.25
    assert frame["tools"][0][0] == {
        "turn": 0,
        "name": "search",
        "latency_s": 0.5,
        "tokens": 900,
        "status": "success",
    }


def test_multiturn_lines_without_ids_are_prompts_of_their_own(tmp_path: Path) -> None:
    line = {"step": 0, "prompt_len": 3, "turns": [{"completion_tokens": 4}], "tool_calls": []}
    dump(tmp_path / "multiturn_workload_step_0.jsonl", line, line)
    notes: list[str] = []
    trace = formats.read(tmp_path, note=notes.append)
    assert trace.samples["prompt"].n_unique() == 2
    assert "2 lines without prompt_group_id" in notes[0]
    formats.write(trace, tmp_path / "out", "multiturn")
    assert load(tmp_path / "out")["multiturn_workload_step_0.jsonl"] == [line, line]


def test_steps_that_two_runs_share_count_once(tmp_path: Path) -> None:
    shared = [packed(0, 0, i) for i in range(6)]
    dump(tmp_path / "a" / "packed_lengths_step_0.jsonl", *shared)
    dump(tmp_path / "b" / "packed_lengths_step_0.jsonl", *reversed(shared))
    dump(tmp_path / "b" / "packed_lengths_step_1.jsonl", *(packed(1, 0, i) for i in range(6)))
    notes: list[str] = []
    frame = formats.read(tmp_path, note=notes.append).samples
    counts = frame.group_by("task", "step", maintain_order=True).len().rows()
    assert counts == [("a", 0, 18), ("b", 1, 18)]
    assert len(notes) == 1
    assert "step 0 is the same as in a" in notes[0]


def test_lines_repeated_within_a_folder_count_once(tmp_path: Path) -> None:
    dump(tmp_path / "packed_lengths_step_0.jsonl", packed(), packed(local_index=1))
    dump(tmp_path / "packed_lengths_step_0 (1).jsonl", packed(), packed(local_index=2))
    notes: list[str] = []
    frame = formats.read(tmp_path, note=notes.append).samples
    assert frame["prompt"].unique(maintain_order=True).to_list() == ["0/0/0", "0/0/2", "0/0/1"]
    assert "1 lines repeat" in notes[0]


def test_different_prompts_at_one_place_stay_apart(tmp_path: Path) -> None:
    lines = [packed(output=[1, 2]), packed(output=[3, 4])]
    dump(tmp_path / "packed_lengths_step_0.jsonl", *lines)
    trace = formats.read(tmp_path)
    assert trace.samples["prompt"].n_unique() == 2
    formats.write(trace, tmp_path / "out", "packed_lengths")
    assert load(tmp_path / "out")["packed_lengths_step_0.jsonl"] == lines


def test_prompts_of_validation_are_told_apart(tmp_path: Path) -> None:
    lines = packed(), packed(local_index=1, validate=True)
    dump(tmp_path / "packed_lengths_step_0.jsonl", *lines)
    notes: list[str] = []
    frame = formats.read(tmp_path, note=notes.append).samples
    assert frame["domain"].to_list() == [None] * 3 + ["validation"] * 3
    assert "1 prompts of validation" in notes[0]


def test_a_trace_beside_its_own_import_does_not_count_twice(tmp_path: Path) -> None:
    folder = polytrace_folder(tmp_path)
    trace = formats.read(folder)
    formats.write(trace, folder / "t.parquet", "native")
    with pytest.raises(TraceError, match="native and of polytrace"):
        formats.read(folder)
    assert formats.read(folder, format="polytrace").samples.equals(trace.samples)
    assert formats.read(folder / "t.parquet").samples.equals(trace.samples)
