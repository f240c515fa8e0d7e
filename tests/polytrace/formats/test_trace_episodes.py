"""Multi-turn runs as traces: their turns are read, written in the suite's format, read again."""

import json
from dataclasses import astuple
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trace_lines import load

from rollpacker.core import decisions as do
from rollpacker.core import events as ev
from rollpacker.core.attempts import RecordedTurn
from rollpacker.core.journal import JournalWriter
from rollpacker.core.sample_table import REQUIRED, part
from rollpacker.core.sample_table import TURNS as TURN_COLUMNS
from rollpacker.core.types import AttemptId, EngineId, Prompt, PromptId, RoundKind
from rollpacker.polytrace import formats
from rollpacker.polytrace.describe import characterize
from rollpacker.polytrace.schema import Trace
from rollpacker.sim.workload import workload
from rollpacker.sim.workload.source import of_trace

PROMPT = 70
OPENING_S = 0.25


class Story:
    """The journal of one step, in which attempts follow one another."""

    def __init__(self, folder: Path) -> None:
        self.journal = JournalWriter(folder / "journal.jsonl")
        self.journal.meta({"settings": {"cap": 500}, "state": {}})
        started = ev.StepStarted(step=3, engines=(EngineId(0),), replicas=(), remaining={})
        self.tell(0.0, started, do.BeginRound(step=3, round=RoundKind.FULL))
        self.now = 0.0
        self.attempts = 0

    def tell(self, now: float, event: ev.Event, *made: do.Decision) -> None:
        self.journal.record(now, event, made)

    def wait(self, seconds: float) -> float:
        self.now += seconds
        return self.now

    def start(self, prompt: str, index: int) -> AttemptId:
        """Its environment begins."""
        attempt = AttemptId(self.attempts)
        self.attempts += 1
        drawn = (Prompt(id=PromptId(prompt), domain="math", tokens=PROMPT),)
        started = do.StartAttempt(
            attempt=attempt, prompt=PromptId(prompt), index=index, engine=EngineId(0)
        )
        self.tell(self.now, ev.PromptsDrawn(prompts=drawn), started)
        self.reply(attempt, -1, RecordedTurn(0, OPENING_S))
        return attempt

    def turn(self, attempt: AttemptId, number: int, tokens: int, turn: RecordedTurn) -> None:
        self.wait(turn.latency_s or 0.0)
        ended = ev.TurnFinished(attempt=attempt, turn=number, tokens=tokens, finish_reason="stop")
        self.tell(self.now, ended, do.StepEnvironment(attempt=attempt))

    def reply(self, attempt: AttemptId, number: int, turn: RecordedTurn) -> None:
        replied = ev.EnvironmentReplied(
            attempt=attempt, turn=number, tokens=turn.added, seconds=turn.wait_s
        )
        go_on = do.ContinueAttempt(attempt=attempt, engine=EngineId(0))
        self.tell(self.wait(turn.wait_s), replied, go_on)

    def episode(self, prompt: str, index: int, turns: list[RecordedTurn]) -> AttemptId:
        """A whole one."""
        attempt = self.start(prompt, index)
        tokens = 0
        for number, turn in enumerate(turns):
            tokens += turn.tokens
            self.turn(attempt, number, tokens, turn)
            if number + 1 < len(turns):
                self.reply(attempt, number, turn)
        self.wait(turns[-1].wait_s)
        ended = ev.AttemptFinished(attempt=attempt, tokens=tokens, finish_reason="stop")
        self.tell(self.now, ended, do.GradeAttempt(attempt=attempt))
        return attempt


TURNS = [
    RecordedTurn(30, 0.5, 45, 2.0),
    RecordedTurn(12, 0.125, 20, 1.0),
    RecordedTurn(7, 0.0625, 0, 0.5),
]
READ = [
    {"prompt_tokens": 70, "completion_tokens": 30, "finish_reason": "tool_calls", "latency_s": 2.0},
    {"prompt_tokens": 145, "completion_tokens": 12, "finish_reason": "tool_calls", "latency_s": 1},
    {"prompt_tokens": 177, "completion_tokens": 7, "finish_reason": "stop", "latency_s": 0.5},
]
CALLS = [
    {"turn": 0, "name": "environment", "latency_s": 0.5, "tokens": 45, "status": None},
    {"turn": 1, "name": "environment", "latency_s": 0.125, "tokens": 20, "status": None},
]


def with_cached(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """How much the prefix cache had, no run tells."""
    return [turn | {"cached_tokens": None} for turn in turns]


def test_a_journal_tells_the_turns(tmp_path: Path) -> None:
    story = Story(tmp_path)
    story.episode("p", 0, TURNS)
    story.journal.close()
    (row,) = formats.read(tmp_path).samples.iter_rows(named=True)
    assert row["turns"] == with_cached(READ)
    assert row["tools"] == CALLS
    assert (row["response_tokens"], row["prompt_tokens"], row["truncated"]) == (49, 70, False)
    extra = json.loads(row["extra"])["run"]
    assert (extra["opening_s"], extra["ending_s"]) == (OPENING_S, 0.0625)


def test_attempts_that_stop_keep_what_they_had(tmp_path: Path) -> None:
    """In the middle of a turn, while the environment acts, by its failure, and before it began."""
    story = Story(tmp_path)
    middle, acting, failed = (story.start("p", index) for index in range(3))
    for attempt in (middle, acting, failed):
        story.turn(attempt, 0, 30, TURNS[0])
    story.reply(middle, 0, TURNS[0])
    story.tell(story.wait(1.0), ev.AttemptAborted(attempt=middle, tokens=34))
    story.tell(story.wait(1.0), ev.AttemptAborted(attempt=acting, tokens=30))
    story.tell(story.wait(1.0), ev.EpisodeFailed(attempt=failed, error="it hung"))
    fresh = do.StartAttempt(attempt=AttemptId(9), prompt=PromptId("p"), index=3, engine=EngineId(0))
    story.tell(story.now, ev.PromptsDrawn(prompts=()), fresh)
    story.tell(story.now, ev.AttemptAborted(attempt=AttemptId(9), tokens=0))
    story.journal.close()
    frame = formats.read(tmp_path).samples
    assert frame["state"].to_list() == ["aborted"] * 4
    assert frame["response_tokens"].to_list() == [34, 30, 30, 0]
    tokens = [[t["completion_tokens"] for t in turns] for turns in frame["turns"].to_list()[:3]]
    assert tokens == [[30, 4], [30], [30]]
    calls = [[call["tokens"] for call in calls] for calls in frame["tools"].to_list()[:3]]
    assert calls == [[45], [], []]
    assert frame["turns"].to_list()[3] is None


def write_table(
    folder: Path, *attempts: tuple[AttemptId, list[RecordedTurn]], tokens: int = 0
) -> None:
    """As a run does; ``tokens`` beyond those of whole turns."""
    rows = [
        {
            "prompt": "p",
            "attempt": attempt,
            "sample_index": attempt,
            "step": 3,
            "round_kind": "full",
            "worker": 0,
            "weights_version": 3,
            "prompt_tokens": PROMPT,
            "tokens": tokens + sum(turn.tokens for turn in turns),
            "finish_reason": "stop",
            "state": "kept",
            "start_s": 0.0,
            "end_s": 9.0,
            "reward": 0.5,
            "turn_tokens": [turn.tokens for turn in turns] or None,
            "added_tokens": [turn.added for turn in turns] or None,
            "wait_s": [turn.wait_s for turn in turns] or None,
        }
        for attempt, turns in attempts
    ]
    pl.DataFrame(rows, schema=REQUIRED | TURN_COLUMNS).write_parquet(part(folder, 3), mkdir=True)


def test_a_table_has_the_turns_and_the_journal_their_times(tmp_path: Path) -> None:
    story = Story(tmp_path)
    attempt = story.episode("p", 0, TURNS)
    story.journal.close()
    (tmp_path / "config.yaml").write_text("rewards: []\nenvironment: {kind: tools}\n")
    write_table(tmp_path, (attempt, TURNS), (AttemptId(1), [TURNS[2]]), (AttemptId(2), []))
    whole, one, none = formats.read(tmp_path).samples.iter_rows(named=True)
    assert whole["turns"] == with_cached(READ)
    assert whole["tools"] == CALLS
    extra = json.loads(whole["extra"])["run"]
    assert (extra["opening_s"], extra["ending_s"]) == (OPENING_S, 0.0625)
    assert whole["reward_kind"] == "environment"
    assert one["turns"] == with_cached([READ[2] | {"prompt_tokens": 70, "latency_s": None}])
    assert (one["tools"], none["turns"], none["tools"]) == ([], None, None)


def test_a_table_alone_tells_a_stopped_turn(tmp_path: Path) -> None:
    write_table(tmp_path, (AttemptId(0), TURNS[:1]), tokens=4)
    (row,) = formats.read(tmp_path).samples.iter_rows(named=True)
    assert [turn["completion_tokens"] for turn in row["turns"]] == [30, 4]
    assert row["tools"] == CALLS[:1]
    assert row["response_tokens"] == 34


def in_suite(trace: Trace, folder: Path) -> Trace:
    """Written in the suite's format and read again."""
    notes: list[str] = []
    formats.write(trace, folder, "multiturn", note=notes.append)
    assert formats.problems(folder) == []
    return formats.read(folder)


def test_the_suites_lines_have_the_totals(tmp_path: Path) -> None:
    story = Story(tmp_path)
    story.episode("p", 0, TURNS)
    story.journal.close()
    in_suite(formats.read(tmp_path), tmp_path / "out")
    ((line,),) = load(tmp_path / "out").values()
    assert line["response_loss_mask_rle"] == [[1, 30], [0, 45], [1, 12], [0, 20], [1, 7]]
    assert (line["final_response_len"], line["final_response_loss_len"]) == (114, 49)
    assert line["final_total_len"] == 184
    assert (line["turn_count"], line["tool_call_count"], line["prompt_len"]) == (3, 2, 70)


SECONDS = st.integers(0, 64).map(lambda n: n / 64)
TURN = st.builds(
    RecordedTurn,
    tokens=st.integers(1, 90),
    wait_s=SECONDS,
    added=st.integers(0, 50),
    latency_s=SECONDS,
)


@settings(max_examples=settings().max_examples // 4)
@given(made=st.lists(st.lists(TURN, min_size=1, max_size=5), min_size=1, max_size=6))
def test_any_turns_come_back(
    made: list[list[RecordedTurn]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("run")
    story = Story(folder)
    for place, turns in enumerate(made):
        story.episode(f"p{place % 2}", place // 2, turns)
    story.journal.close()
    trace = formats.read(folder)
    for turns, row in zip(made, trace.samples.iter_rows(named=True), strict=True):
        found = [
            (t["completion_tokens"], c["latency_s"], c["tokens"], t["latency_s"])
            for t, c in zip(row["turns"], row["tools"], strict=False)
        ]
        assert found == [astuple(turn) for turn in turns[:-1]]
        assert row["turns"][-1]["completion_tokens"] == turns[-1].tokens
        assert row["response_tokens"] == sum(turn.tokens for turn in turns)
    columns = ["step", "index", "prompt_tokens", "response_tokens", "cap", "turns", "tools"]
    again = in_suite(trace, folder / "out")
    assert again.samples.select(columns).equals(trace.samples.select(columns))
    once_more = in_suite(again, folder / "more")
    assert load(folder / "more") == load(folder / "out")
    assert once_more.samples.equals(again.samples.with_columns(task=once_more.samples["task"]))


def test_its_waits_are_characterised_and_simulated(tmp_path: Path) -> None:
    story = Story(tmp_path)
    for prompt in range(4):
        attempts = tuple(
            story.episode(f"p{prompt}", index, TURNS[: 1 + (prompt + index) % 3])
            for index in range(4)
        )
        group = do.AcceptGroup(prompt=PromptId(f"p{prompt}"), attempts=attempts, informative=True)
        story.tell(story.now, ev.AttemptGraded(attempt=attempts[-1], reward=1.0), group)
    story.journal.close()
    trace = formats.read(tmp_path)
    (report,) = characterize(trace).values()
    counts = [1 + (prompt + index) % 3 for prompt in range(4) for index in range(4)]
    waited = sum([0.0, 0.5, 0.625][count - 1] for count in counts)
    engine = sum([2.0, 3.0, 3.5][count - 1] for count in counts)
    assert report.tool_latency_share == pytest.approx(waited / (waited + engine))
    source = of_trace(trace)
    played = {turns for prompt in source.recorded for turns in prompt.turns}
    assert played == {
        (workload.ScriptedTurn(30),),
        (workload.ScriptedTurn(30, 0.5, 45), workload.ScriptedTurn(12)),
        (
            workload.ScriptedTurn(30, 0.5, 45),
            workload.ScriptedTurn(12, 0.125, 20),
            workload.ScriptedTurn(7),
        ),
    }
    assert source.turns is not None
