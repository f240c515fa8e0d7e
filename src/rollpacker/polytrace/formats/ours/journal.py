"""A lone ``journal.jsonl`` of ours, or with its older segments beside it: attempts put together
from events and decisions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rollpacker.core.journal import prompts_in, read_all
from rollpacker.polytrace.formats.files.columns import pack, samples
from rollpacker.polytrace.formats.files.lines import Record
from rollpacker.polytrace.formats.files.reading import Reading
from rollpacker.polytrace.formats.ours import episodes
from rollpacker.polytrace.formats.ours.episodes import RecordedEpisode
from rollpacker.polytrace.schema import Trace, TraceError

NAME = "run"


def read(files: Sequence[Path], reading: Reading) -> Trace:
    """One row an attempt that has ended. Raises ``TraceError``.

    Times are those at which the policy handled an event, so a decision's delay is in them.
    Attempts that were still running at the journal's end are left out.
    """
    rows = [row for path in files for row in _follow(path).rows(reading)]
    return Trace(samples=samples(rows))


def read_episodes(path: Path) -> dict[int, RecordedEpisode]:
    """Turns of attempts that an environment took part in, as far as a journal tells; by attempt.

    Raises ``TraceError``.
    """
    return _follow(path).episodes


def _follow(path: Path) -> _Story:
    story = _Story()
    try:
        for where, line in read_all(path):
            _tell(story, line, where)
    except ValueError as error:
        raise TraceError(str(error)) from error
    return story


def _tell(story: _Story, line: Record, where: str) -> None:
    try:
        if "meta" in line:
            story.resume(line["meta"])
        else:
            story.handle(float(line["t"]), line["event"], line["decisions"])
    except KeyError as error:
        raise TraceError(f"{where}: {error.args[0]}: missing or unknown") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise TraceError(f"{where}: not a line of a journal ({error})") from error


@dataclass(slots=True)
class _Story:
    """What a journal has told so far."""

    step: int = 0
    cap: int | None = None
    carries: bool = False
    """Losers go on in the next step (mode ``partial``)."""
    deferred: set[str] = field(default_factory=set[str])
    begun: list[int] = field(default_factory=list[int])
    """Attempts of the step."""
    round: str | None = None
    prompts: dict[str, Record] = field(default_factory=dict[str, Record])
    attempts: dict[int, Record] = field(default_factory=dict[int, Record])
    episodes: dict[int, RecordedEpisode] = field(default_factory=dict[int, RecordedEpisode])

    def resume(self, meta: Record) -> None:
        """Deferred prompts come back from the policy's state; its attempts do not go on."""
        self.cap = meta["settings"].get("cap")
        tail = meta["settings"].get("rollout", {}).get("tail_batching", {})
        self.carries = tail.get("mode") == "partial"
        self.deferred.clear()
        self.prompts |= {each["id"]: each for each in prompts_in(meta["state"])}
        self._forget_unfinished()

    def _forget_unfinished(self) -> None:
        self.attempts = {key: row for key, row in self.attempts.items() if row["end_s"] is not None}

    def handle(self, now: float, event: Record, decisions: list[Record]) -> None:
        """Take in one line."""
        match event["kind"]:
            case "StepStarted":
                self.step = event["step"]
                self.begun.clear()
            case "PromptsDrawn":
                self.prompts |= {each["id"]: each for each in event["prompts"]}
            case "AttemptFinished" | "AttemptAborted" | "AttemptFailed" | "EpisodeFailed":
                self._end(now, event)
            case "AttemptGraded":
                self._grade(now, event)
            case "AttemptMigrated":
                self.attempts[event["attempt"]]["dp_rank"] = event["engine"]
            case "TurnFinished":
                self._episode(event).end_turn(now, event["tokens"])
            case "EnvironmentReplied":
                self._episode(event).answer(event["seconds"], event["tokens"])
            case _:
                pass
        for decision in decisions:
            self._decide(now, decision)

    def _episode(self, event: Record) -> RecordedEpisode:
        """Of an attempt that turns out to have an environment."""
        row = self.attempts[event["attempt"]]
        return self.episodes.setdefault(event["attempt"], RecordedEpisode(row["start_s"]))

    def _end(self, now: float, event: Record) -> None:
        row = self.attempts.get(event["attempt"])
        if row is None or row["end_s"] is not None:
            return
        row["end_s"] = now
        episode = self.episodes.get(event["attempt"])
        known = 0 if episode is None else sum(turn.tokens for turn in episode.turns)
        row["response_tokens"] = event.get("tokens", known)
        if episode is not None:
            stopped = event["kind"] != "AttemptFinished"
            episode.end(now, row["response_tokens"], stopped=stopped)
        row["finish_reason"] = event.get("finish_reason")
        if row["finish_reason"] in ("stop", "length"):
            row["truncated"] = row["finish_reason"] == "length"

    def _grade(self, now: float, event: Record) -> None:
        row = self.attempts.get(event["attempt"])
        if row is not None and row["end_s"] is not None:
            row["reward"] = event["reward"]
            row["reward_s"] = now - row["end_s"]

    def _decide(self, now: float, decision: Record) -> None:
        match decision["kind"]:
            case "BeginRound":
                self.round = decision["round"]
            case "StartAttempt":
                self.attempts[decision["attempt"]] = self._started(now, decision)
                self.begun.append(decision["attempt"])
                self.episodes.pop(decision["attempt"], None)
            case "ContinueAttempt":
                self.episodes[decision["attempt"]].go_on(now)
            case "AcceptGroup":
                self._settle(decision["attempts"], "kept")
            case "DropGroup":
                self._settle(decision["attempts"], "filtered")
            case "DeferPrompt" if self.carries:
                self.deferred.add(decision["prompt"]["id"])
            case "FinishRollout":
                self._carry_over()
            case _:
                pass

    def _carry_over(self) -> None:
        """Leave out what goes on in the next step, as an attempt that then has all of it."""
        for key in self.begun if self.deferred else ():
            if self.attempts[key]["prompt"] in self.deferred:
                del self.attempts[key]
        self.deferred.clear()

    def _started(self, now: float, decision: Record) -> Record:
        prompt = self.prompts.get(decision["prompt"], {})
        return {
            "step": self.step,
            "prompt": decision["prompt"],
            "index": decision["index"],
            "domain": prompt.get("domain"),
            "prompt_tokens": prompt.get("tokens"),
            "cap": self.cap,
            "state": "aborted",
            "dp_rank": decision["engine"],
            "start_s": now,
            "end_s": None,
            "round_kind": self.round,
        }

    def _settle(self, attempts: list[int], state: str) -> None:
        for attempt in attempts:
            self.attempts[attempt]["state"] = state

    def rows(self, reading: Reading) -> list[Record]:
        """The attempts that have ended."""
        running = len(self.attempts)
        self._forget_unfinished()
        if running > len(self.attempts):
            reading.note(
                f"{reading.task}: {running - len(self.attempts)} attempts were still running at "
                "the journal's end: left out"
            )
        return [self._row(attempt, row, reading.task) for attempt, row in self.attempts.items()]

    def _row(self, attempt: int, row: Record, task: str) -> Record:
        rest: Record = {"attempt": attempt}
        rest |= {key: row.get(key) for key in ("round_kind", "finish_reason")}
        episode = self.episodes.get(attempt)
        if episode is not None:
            rest |= episode.extra
            turns = episode.turns
            row = row | episodes.columns(row["prompt_tokens"], turns, row["finish_reason"])
        return {**row, "task": task, "extra": pack(NAME, rest)}
