"""Read a ``journal.jsonl`` of ours, with its older segments if they lie beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rollpacker.core.attempts import JournalReader, RecordedAttempt, RecordedTurn, read_journal
from rollpacker.polytrace.formats.files import Reading, Record, pack, samples
from rollpacker.polytrace.schema import Trace, TraceError

NAME = "run"
TOOL = "environment"
"""Name of the environment's calls, one for each answer. Work after the last turn is no call,
because it answered nothing."""
_STATES = {"kept": "kept", "dropped": "filtered", "aborted": "aborted"}


def read(files: Sequence[Path], reading: Reading) -> Trace:
    """Return one row per attempt that has ended. Raises ``TraceError``. Times are those at which
    the policy handled an event, so they include a decision's delay. Attempts that were still
    running at the journal's end are left out."""
    rows = [row for path in files for row in _rows(follow(path), reading)]
    return Trace(samples=samples(rows))


def follow(path: Path) -> JournalReader:
    """Read a journal. Raises ``TraceError``."""
    try:
        return read_journal(path)
    except ValueError as error:
        raise TraceError(str(error)) from error


def _rows(found: JournalReader, reading: Reading) -> Iterator[Record]:
    running = 0
    for step in found.steps.values():
        for attempt in step.attempts.values():
            if attempt.state == "carried":  # another one goes on with it
                continue
            if attempt.end_s is None:
                running += 1
                continue
            prompt = found.prompts.get(attempt.prompt, {})
            row = _row(attempt, prompt.get("tokens")) | {"domain": prompt.get("domain")}
            rest = {"attempt": attempt.id, "round_kind": step.round_kind}
            rest |= {"finish_reason": attempt.finish_reason, **_opening_and_ending(attempt)}
            more = {"step": step.number, "cap": step.cap, "task": reading.task}
            yield row | more | {"extra": pack(NAME, rest)}
    if running:
        reading.note(
            f"{reading.task}: {running} attempts were still running at the journal's end: left out"
        )


def _row(attempt: RecordedAttempt, prompt_tokens: int | None) -> Record:
    assert attempt.end_s is not None
    graded = attempt.graded_s
    row: dict[str, Any] = {
        "prompt": attempt.prompt,
        "index": attempt.index,
        "prompt_tokens": prompt_tokens,
        "response_tokens": attempt.tokens,
        "state": _STATES[attempt.state],
        "dp_rank": attempt.engine,
        "start_s": attempt.start_s,
        "end_s": attempt.end_s,
        "reward": attempt.reward,
        "reward_s": None if graded is None else graded - attempt.end_s,
    }
    if attempt.finish_reason in ("stop", "length"):
        row["truncated"] = attempt.finish_reason == "length"
    if attempt.acts:
        row |= turn_columns(prompt_tokens, attempt.turns, attempt.finish_reason)
    return row


def _opening_and_ending(attempt: RecordedAttempt) -> Record:
    if not attempt.acts:
        return {}
    ending_s = attempt.turns[-1].wait_s if attempt.turns else 0.0
    return {"opening_s": attempt.opening_s, "ending_s": ending_s}


def turn_columns(
    prompt_tokens: int | None, turns: Sequence[RecordedTurn], reason: str | None
) -> Record:
    """Return columns ``turns`` and ``tools`` of a response that ended for this ``reason``."""
    made: list[Record] = []
    calls: list[Record] = []
    context = prompt_tokens or 0
    for place, turn in enumerate(turns):
        last = place + 1 == len(turns)
        made.append(
            {
                "prompt_tokens": context,
                "completion_tokens": turn.tokens,
                "finish_reason": reason if last else "tool_calls",
                "latency_s": None if turn.latency_s is None else round(turn.latency_s, 6),
            }
        )
        if not last:
            waited_s = round(turn.wait_s, 6)
            calls.append({"turn": place, "name": TOOL, "latency_s": waited_s, "tokens": turn.added})
        context += turn.tokens + turn.added
    return {"turns": made, "tools": calls}
