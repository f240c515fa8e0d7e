"""A run of one step with an environment, written by hand: every time in it is known.

Seconds; ``w`` waits for the environment, ``d`` decodes:

    engine 0   attempt 0   w 0-1, d 1-3, w 3-6, d 6-8, w 8-9      kept
               attempt 1   w 0-1, d 1-4, w 4-5, d 5-5.5           kept
    engine 1   attempt 2   w 0-1, d 1-2, w 2-7, d 7-10            kept, moved to 0 at 4
               attempt 3   w 0-0.5                                aborted
               attempt 4   w 0-1, d 1-1.5, w 1.5-5, d 5-5.25      kept, moved to 0 at 5

The rollout ends at 10, the step at 12. Engine 0 has nothing to decode in 0-1, 4-5 and 5.5-6, all of
it by tools; engine 1 in 0-1 and 2-5 by tools, and in 5-10 since nothing is there.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import yaml

from rollpacker.core import decisions as do
from rollpacker.core import events as ev
from rollpacker.core import sample_table as schema
from rollpacker.core.codec import dumps
from rollpacker.core.journal import JournalWriter
from rollpacker.core.types import AttemptId, EngineId, PromptId, RoundKind

ENGINES = (EngineId(0), EngineId(1))
HELD = {0: 0, 1: 0, 2: 1, 3: 1, 4: 1}
"""The engine that each attempt starts on."""
CALLED = [
    {"role": "user", "content": "use the tool"},
    {
        "role": "assistant",
        "content": 'I "add"\nthem',
        "tool_calls": [
            {
                "id": "a",
                "type": "function",
                "function": {"name": "add", "arguments": '{"é": [1, 2]}'},
            }
        ],
    },
    {"role": "tool", "name": "add", "content": "3"},
    {"role": "assistant", "content": "It is 3."},
]
MISSED = [
    {
        "role": "assistant",
        "content": "",
        "text": "<tool_call>{add</tool_call>",
        "bad_calls": [{"place": 0, "error": "the call is no valid JSON", "id": "b"}],
    },
    {"role": "tool", "content": [{"type": "text", "text": "what was "}, {"text": "that?"}]},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "look", "arguments": {"at": "sky"}}}],
    },
]
SAID = {0: CALLED, 1: MISSED, 2: [{"role": "assistant", "content": "left <b>alone</b>"}] * 2}
TURNS = {
    0: ([4, 2], [7, 0], [3.0, 1.0], 1, 0),
    1: ([5, 1], [3, 0], [1.0, 0.0], 2, 1),
    2: ([9, 8], [2, 0], [5.0, 0.0], 0, 0),
    3: ([], [], [], 0, 0),
    4: ([1, 1], [6, 0], [3.5, 0.0], 0, 0),
}
ENDS = {0: 9.0, 1: 5.5, 2: 10.0, 3: 0.5, 4: 5.25}


def _start(attempt: int) -> do.StartAttempt:
    prompt = PromptId(f"p{attempt // 2}")
    return do.StartAttempt(
        attempt=AttemptId(attempt), prompt=prompt, index=attempt, engine=ENGINES[HELD[attempt]]
    )


def _turned(attempt: int, turn: int) -> tuple[ev.TurnFinished, do.StepEnvironment]:
    """The model has ended a turn."""
    event = ev.TurnFinished(
        attempt=AttemptId(attempt),
        turn=turn,
        tokens=sum(TURNS[attempt][0][: turn + 1]),
        finish_reason="stop",
    )
    return event, do.StepEnvironment(attempt=event.attempt)


def _replied(attempt: int, turn: int, engine: int) -> tuple[ev.EnvironmentReplied, do.Decision]:
    """Its environment has answered: it goes on."""
    event = ev.EnvironmentReplied(attempt=AttemptId(attempt), turn=turn, tokens=5, seconds=1.0)
    return event, do.ContinueAttempt(attempt=event.attempt, engine=ENGINES[engine])


def _moved(attempt: int) -> tuple[ev.AttemptMigrated]:
    return (ev.AttemptMigrated(attempt=AttemptId(attempt), engine=ENGINES[0], tokens=1),)


def _over(attempt: int) -> tuple[ev.AttemptFinished, do.GradeAttempt]:
    event = ev.AttemptFinished(
        attempt=AttemptId(attempt), tokens=sum(TURNS[attempt][0]), finish_reason="stop"
    )
    return event, do.GradeAttempt(attempt=event.attempt)


def _journal(path: Path) -> None:
    started = ev.StepStarted(step=0, engines=ENGINES, replicas=(), remaining={})
    full = do.BeginRound(step=0, round=RoundKind.FULL)
    graded = ev.AttemptGraded(attempt=AttemptId(2), reward=1.0)
    lines: list[tuple[float, tuple[Any, ...]]] = [
        (0.0, (started, do.DrawPrompts(counts={}))),
        (0.0, (ev.PromptsDrawn(prompts=()), full, *map(_start, HELD))),
        (0.5, (ev.AttemptAborted(attempt=AttemptId(3), tokens=0),)),
        *((1.0, _replied(attempt, -1, HELD[attempt])) for attempt in (0, 1, 2, 4)),
        (1.5, _turned(4, 0)),
        (2.0, _turned(2, 0)),
        (3.0, _turned(0, 0)),
        (4.0, _turned(1, 0)),
        (4.0, _moved(2)),
        # The reply has overtaken what tells of the move.
        (5.0, _replied(4, 0, 0)),
        (5.0, _replied(1, 0, 0)),
        (5.125, _moved(4)),
        (5.25, _turned(4, 1)),
        (5.25, _over(4)),
        (5.5, _turned(1, 1)),
        (5.5, _over(1)),
        (6.0, _replied(0, 0, 0)),
        (7.0, _replied(2, 0, 0)),
        (8.0, _turned(0, 1)),
        (9.0, _over(0)),
        (10.0, _turned(2, 1)),
        (10.0, _over(2)),
        (10.0, (graded, do.FinishRollout(step=0, round=RoundKind.FULL))),
    ]
    journal = JournalWriter(path)
    journal.meta({"settings": {}, "state": {}})
    for now, (event, *decisions) in lines:
        journal.record(now, event, decisions)
    journal.close()


def _rows() -> pl.DataFrame:
    rows = [
        {
            "prompt": f"p{attempt // 2}",
            "attempt": attempt,
            "sample_index": attempt,
            "step": 0,
            "round_kind": "full",
            "worker": 1 if attempt == 3 else 0,
            "weights_version": 0,
            "prompt_tokens": 5,
            "tokens": sum(turns[0]),
            "reward": None if attempt == 3 else 1.0,
            "finish_reason": None if attempt == 3 else "stop",
            "state": "aborted" if attempt == 3 else "kept",
            "start_s": 0.0,
            "end_s": ENDS[attempt],
            "grade_s": None if attempt == 3 else 0.0,
            "truncated": None if attempt == 3 else False,
            "prompt_text": f"prompt {attempt // 2}",
            "completion": None if attempt == 3 else f"as one text {attempt}",
            **dict(zip(schema.TURNS, turns, strict=False)),
            "messages": dumps(SAID[attempt]).decode() if attempt in SAID else None,
        }
        for attempt, turns in TURNS.items()
    ]
    kinds = schema.REQUIRED | schema.TEXTS | schema.TURNS
    return pl.DataFrame(rows, schema=kinds)


def make_episodes(folder: Path) -> Path:
    """Write the run folder and return it."""
    folder.mkdir(parents=True)
    _journal(folder / "journal.jsonl")
    _rows().write_parquet(folder / "samples" / "step-000000.parquet", mkdir=True)
    task = {"step": 0, "prompts": 2, "start_s": 10.5, "end_s": 11.5, "kind": "accumulate"}
    tasks = "".join(json.dumps(task | {"worker": worker}) + "\n" for worker in (0, 1))
    (folder / "workers.jsonl").write_text(tasks, encoding="utf-8")
    metrics = {
        "step": 0,
        "start_s": 0.0,
        "step_time": 12.0,
        "timing_s/rollout": 10.0,
        "timing_s/train": 2.0,
        "environment/turns": 2.0,
        "environment/wait_s": 3.375,
    }
    (folder / "metrics.jsonl").write_text(json.dumps(metrics) + "\n", encoding="utf-8")
    (folder / "summary.json").write_text('{"steps": 1}', encoding="utf-8")
    config = {"environment": {"kind": "python", "path": ["games.py:Game"]}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    return folder
