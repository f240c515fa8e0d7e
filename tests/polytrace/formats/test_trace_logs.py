"""Reading logs: our own runs and journals, verl's rollout dumps, TRL's completion tables."""

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from trace_lines import dump

from rollpacker.core import decisions as d
from rollpacker.core import events as e
from rollpacker.core.journal import JournalWriter
from rollpacker.core.sample_table import REQUIRED, part
from rollpacker.core.types import AttemptId, EngineId, Prompt, PromptId, RoundKind
from rollpacker.polytrace import formats
from rollpacker.polytrace.schema import SAMPLES, TraceError


def start(attempt: int, prompt: str, index: int = 0, worker: int = 0) -> d.StartAttempt:
    return d.StartAttempt(
        attempt=AttemptId(attempt), prompt=PromptId(prompt), index=index, engine=EngineId(worker)
    )


def begin(step: int) -> e.StepStarted:
    return e.StepStarted(step=step, engines=(EngineId(0),), replicas=(), remaining={})


def finished(attempt: int, tokens: int) -> e.AttemptFinished:
    return e.AttemptFinished(attempt=AttemptId(attempt), tokens=tokens, finish_reason="stop")


def accepted(prompt: str, *attempts: int) -> d.AcceptGroup:
    ids = tuple(AttemptId(each) for each in attempts)
    return d.AcceptGroup(prompt=PromptId(prompt), attempts=ids, informative=True)


def write_journal(folder: Path) -> None:
    """Two attempts of p race, one of q is dropped; a resume; deferred r; one never ends."""
    deferred = {"id": "r", "domain": "code", "tokens": 9}
    journal = JournalWriter(folder / "journal.jsonl")
    journal.meta({"settings": {"cap": 50}, "state": {"tail": {"queue": []}}})
    begun = d.BeginRound(step=4, round=RoundKind.SHORT)
    journal.record(1.0, begin(4), [begun])
    drawn = tuple(Prompt(id=PromptId(each), domain="math", tokens=7) for each in "pq")
    started = [start(0, "p"), start(1, "p", 1, 1), start(2, "q")]
    journal.record(2.0, e.PromptsDrawn(prompts=drawn), started)
    journal.record(3.0, finished(0, 20), [])
    moved = e.AttemptMigrated(attempt=AttemptId(1), engine=EngineId(0), tokens=8)
    journal.record(3.1, moved, [])
    aborting = [accepted("p", 0), d.AbortAttempt(attempt=AttemptId(1))]
    journal.record(3.5, e.AttemptGraded(attempt=AttemptId(0), reward=0.5), aborting)
    journal.record(3.6, e.AttemptAborted(attempt=AttemptId(1), tokens=11), [])
    dropped = d.DropGroup(prompt=PromptId("q"), attempts=(AttemptId(2),), reason="equal rewards")
    journal.record(3.7, finished(2, 30), [])
    late = e.AttemptAborted(attempt=AttemptId(2), tokens=3)
    journal.record(3.75, late, [])
    journal.record(3.8, e.AttemptGraded(attempt=AttemptId(2), reward=0.0), [dropped])
    journal.meta({"settings": {"cap": 50}, "state": {"tail": {"queue": [deferred]}}})
    journal.record(5.0, begin(5), [])
    journal.record(5.1, e.PromptsDrawn(prompts=()), [start(3, "r"), start(4, "r", 1)])
    failed = e.AttemptFailed(attempt=AttemptId(3), error="out of memory")
    journal.record(6.0, failed, [])
    journal.close()


def test_a_journal_tells_its_attempts(tmp_path: Path) -> None:
    write_journal(tmp_path)
    notes: list[str] = []
    frame = formats.read(tmp_path / "journal.jsonl", note=notes.append).samples
    assert frame.schema == SAMPLES
    columns = ("step", "prompt", "index", "domain", "prompt_tokens", "response_tokens", "state")
    assert frame.select(columns).rows() == [
        (4, "p", 0, "math", 7, 20, "kept"),
        (4, "p", 1, "math", 7, 11, "aborted"),
        (4, "q", 0, "math", 7, 30, "filtered"),
        (5, "r", 0, "code", 9, 0, "aborted"),
    ]
    assert frame["reward_s"].to_list()[0] == pytest.approx(0.5)
    assert frame["dp_rank"].to_list()[:2] == [0, 0]
    assert frame["truncated"].to_list() == [False, None, False, None]
    assert set(frame["cap"]) == {50}
    assert "1 attempts were still running" in notes[0]
    assert formats.read(tmp_path).samples.equals(frame.with_columns(task=pl.lit(tmp_path.name)))


def test_a_wrong_journal_is_named(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    meta = '{"meta": {"settings": {}, "state": {}}, "version": 2}'
    path.write_text(f'{meta}\n{{"t": 1, "event": {{}}}}\n')
    with pytest.raises(TraceError, match=r"journal.jsonl, line 2: kind: missing"):
        formats.read(path)
    assert len(formats.problems(path)) == 1


def write_samples(folder: Path, *states: str) -> None:
    rows = [
        {
            "prompt": "p",
            "attempt": attempt,
            "sample_index": attempt,
            "step": 4,
            "round_kind": "short",
            "worker": 1,
            "weights_version": 4,
            "prompt_tokens": 7,
            "tokens": 20 + attempt,
            "finish_reason": None if state == "failed" else "stop",
            "state": state,
            "start_s": 2.0,
            "end_s": 3.0,
            "reward": 0.5,
            "grade_s": 0.25,
        }
        for attempt, state in enumerate(states)
    ]
    pl.DataFrame(rows, schema=REQUIRED).write_parquet(part(folder, 4), mkdir=True)


def test_a_run_folder_is_read_from_its_table(tmp_path: Path) -> None:
    write_journal(tmp_path)
    (tmp_path / "config.yaml").write_text("rewards:\n- function: math\n- function: f.py:g\n")
    write_samples(tmp_path, "kept", "aborted", "dropped", "failed")
    frame = formats.read(tmp_path, task="mine").samples
    assert frame.schema == SAMPLES
    assert frame["state"].to_list() == ["kept", "aborted", "filtered", "aborted"]
    assert frame["truncated"].to_list() == [False, False, False, None]
    row = frame.row(0, named=True)
    extra = json.loads(row.pop("extra"))["run"]
    assert extra["attempt"] == 0
    assert extra["round_kind"] == "short"
    assert row == {
        "task": "mine",
        "step": 4,
        "prompt": "p",
        "index": 0,
        "domain": "math",
        "prompt_tokens": 7,
        "response_tokens": 20,
        "cap": 50,
        "truncated": False,
        "state": "kept",
        "dp_rank": 1,
        "turns": None,
        "tools": None,
        "reward": 0.5,
        "reward_s": 0.25,
        "reward_kind": "math+f.py:g",
        "start_s": 2.0,
        "end_s": 3.0,
    }


def test_a_lone_samples_table_is_enough(tmp_path: Path) -> None:
    write_samples(tmp_path, "kept", "kept")
    whole = formats.read(tmp_path).samples
    part = next((tmp_path / "samples").iterdir())
    alone = formats.read(part).samples
    assert whole.drop("task").equals(alone.drop("task"))
    assert alone["cap"].to_list() == [None, None]
    frame = pl.read_parquet(part)
    for bad, text in (
        (pl.lit(-1, pl.Int32()).alias("tokens"), "row 1: tokens: expected 0 to 2147483647, got -1"),
        (pl.lit("lost").alias("state"), "state: unknown 'lost'; known: kept"),
    ):
        frame.with_columns(bad).write_parquet(tmp_path / "bad.parquet")
        with pytest.raises(TraceError, match=text):
            formats.read(tmp_path / "bad.parquet")


# --- verl ---------------------------------------------------------------------------------


def rollout(**more: Any) -> dict[str, Any]:
    return {"input": "user\nWhat?", "output": "x" * 41, "gts": "4", "score": 1, "step": 2} | more


def test_verl_dumps_give_approximate_lengths_and_say_so(tmp_path: Path) -> None:
    dump(tmp_path / "2.jsonl", rollout(), rollout(score=0.0), rollout(input="other", acc=True))
    dump(tmp_path / "10.jsonl", {"input": "user\nWhat?", "output": "", "score": None})
    notes: list[str] = []
    frame = formats.read(tmp_path, note=notes.append).samples
    assert frame["step"].to_list() == [2, 2, 2, 10]
    assert frame["index"].to_list() == [0, 1, 0, 0]
    assert frame["response_tokens"].to_list() == [11, 11, 11, 0]
    assert frame["prompt_tokens"].to_list()[:1] == [3]
    assert frame["reward"].to_list() == [1.0, 0.0, 1.0, None]
    assert frame["prompt"][0] == frame["prompt"][3] != frame["prompt"][2]
    assert json.loads(frame["extra"][2]) == {"verl": {"gts": "4", "acc": True}}
    assert len(notes) == 1
    assert "4 of 4 responses are approximated" in notes[0]
    assert "4 characters" in notes[0]


def test_verl_token_counts_are_used_where_they_are(tmp_path: Path) -> None:
    lines = [rollout(response_length=900, prompt_length=80), rollout(response_ids=[5, 6, 7])]
    dump(tmp_path / "1.jsonl", *lines)
    notes: list[str] = []
    frame = formats.read(tmp_path, note=notes.append).samples
    assert frame["response_tokens"].to_list() == [900, 3]
    assert frame["prompt_tokens"].to_list() == [80, 3]
    assert notes == []


def test_wrong_verl_lines_are_named(tmp_path: Path) -> None:
    path = dump(tmp_path / "dump.jsonl", rollout(), rollout(score="high"))
    with pytest.raises(TraceError, match=r"dump.jsonl, line 2: score: expected a number"):
        formats.read(path)
    line = rollout()
    del line["step"]
    with pytest.raises(TraceError, match="line 1: step: missing, and the file's name has none"):
        formats.read(dump(path, line))


# --- TRL ----------------------------------------------------------------------------------


def completions(folder: Path, step: int, **more: Any) -> Path:
    columns: dict[str, Any] = {
        "step": [step] * 4,
        "prompt": ["a", "a", "b", "b"],
        "completion": ["w" * 4 * (step + at) for at in range(4)],
        "accuracy": [1.0, 0.0, float("nan"), 1.0],
        "format": [0.5, 0.5, 0.5, None],
        "advantage": [1.0, -1.0, -1.0, 1.0],
        **more,
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"completions_{step:05d}.parquet"
    pl.DataFrame(columns).write_parquet(path)
    return path


def test_trl_tables_are_read_and_rewards_added_up(tmp_path: Path) -> None:
    completions(tmp_path / "completions", 5)
    completions(tmp_path / "completions", 10, mode=["eval"] * 4)
    notes: list[str] = []
    frame = formats.read(tmp_path, note=notes.append).samples
    assert frame["task"].unique().to_list() == ["completions"]
    assert frame["step"].to_list() == [5] * 4 + [10] * 4
    assert frame["response_tokens"].to_list() == [5, 6, 7, 8, 10, 11, 12, 13]
    assert frame["index"].to_list() == [0, 1, 0, 1] * 2
    assert frame["prompt"].n_unique() == 2
    assert frame["reward"].to_list()[:4] == [1.5, 0.5, 0.5, 1.0]
    assert frame["domain"].to_list() == [None] * 4 + ["validation"] * 4
    assert json.loads(frame["extra"][0])["trl"]["advantage"] == 1.0
    assert "8 of 8 responses are approximated" in notes[0]
    assert "sum of accuracy, format" in notes[1]


def test_a_batch_that_trl_logged_again_counts_once(tmp_path: Path) -> None:
    first = completions(tmp_path, 1)
    pl.read_parquet(first).with_columns(step=pl.lit(2)).write_parquet(
        tmp_path / "completions_00002.parquet"
    )
    notes: list[str] = []
    assert formats.read(tmp_path, note=notes.append).samples.height == 4
    assert "the same completions as in completions_00001.parquet" in notes[0]


def test_chat_messages_and_token_ids_count(tmp_path: Path) -> None:
    chat = [[{"role": "user", "content": "12345678"}]] * 4
    ids = [[1, 2, 3]] * 4
    path = completions(tmp_path, 1, prompt=chat, completion=chat, completion_ids=ids)
    notes: list[str] = []
    frame = formats.read(path, note=notes.append).samples
    assert frame["prompt_tokens"].to_list() == [2] * 4
    assert frame["response_tokens"].to_list() == [3] * 4
    assert len(notes) == 1


def test_tables_of_nothing_known_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pl.DataFrame({"a": [1]}).write_parquet(path)
    with pytest.raises(TraceError, match="not a trace: it has columns a"):
        formats.read(path)
    with pytest.raises(TraceError, match="column step is missing"):
        formats.read(path, format="trl")
