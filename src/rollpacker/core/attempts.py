"""The one reader of a journal. Times are those at which the policy handled an event."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollpacker.core.journal import prompts_in, read_all

Line = Mapping[str, Any]
Wait = tuple[float, float | None]
_ENDS = ("AttemptFinished", "AttemptAborted", "AttemptFailed", "EpisodeFailed")


@dataclass(slots=True)
class RecordedTurn:
    """``tokens`` were sampled in ``latency_s`` (None: unknown). After ``wait_s`` the environment
    had answered with ``added`` tokens."""

    tokens: int
    wait_s: float = 0.0
    added: int = 0
    latency_s: float | None = None


@dataclass(slots=True)
class RecordedAttempt:
    """One try at one response of one prompt."""

    id: int
    prompt: str
    index: int
    start_s: float
    engine: int
    """The engine that it was started on or migrated to last."""
    stays: tuple[tuple[int, float], ...]
    """Pairs of an engine and the second since which the attempt was there."""
    state: str = "aborted"
    """``kept``, ``dropped``, ``aborted``, or ``carried``: another attempt goes on with it."""
    since_s: float | None = None
    """The second in which it began to decode, or its environment to act."""
    opening_s: float = 0.0
    """Seconds until its environment had begun."""
    turns: tuple[RecordedTurn, ...] = ()
    waits: tuple[Wait, ...] = ()
    """Pairs: when an environment got it, and when it decoded again."""
    acts: bool = False
    """It has an environment."""
    acting: bool = False
    """Its environment is at work."""
    end_s: float | None = None
    tokens: int = 0
    """Sampled tokens, known when it has ended."""
    finish_reason: str | None = None
    graded_s: float | None = None
    reward: float | None = None

    def end_turn(self, now: float, tokens: int) -> None:
        """End a turn, after ``tokens`` sampled tokens in all."""
        assert self.since_s is not None
        sampled = tokens - sum(turn.tokens for turn in self.turns)
        self.turns += (RecordedTurn(sampled, latency_s=now - self.since_s),)
        self.since_s, self.acts, self.acting = now, True, True
        self.waits += ((now, None),)

    def answer(self, seconds: float, added: int) -> None:
        self.acts, self.acting = True, False
        if self.turns:
            self.turns[-1].wait_s, self.turns[-1].added = seconds, added
        else:
            self.opening_s = seconds

    def go_on(self, now: float, engine: int) -> None:
        """Decode again. The event of a migration may come later, so ``engine`` may be new."""
        self.since_s = now
        began = self.waits[-1][0] if self.waits else self.start_s
        self.waits = (*self.waits[:-1], (began, now))
        if self.stays[-1][0] != engine:
            self.stays += ((engine, now),)

    def end(self, now: float, event: Line) -> None:
        assert self.since_s is not None
        known = sum(turn.tokens for turn in self.turns)
        self.end_s, self.tokens = now, event.get("tokens", known)
        self.finish_reason = event.get("finish_reason")
        finished = event["kind"] == "AttemptFinished"
        if not self.acts:
            return
        if not self.acting and self.tokens > known:
            latency_s = now - self.since_s if finished else None
            self.turns += (RecordedTurn(self.tokens - known, latency_s=latency_s),)
        elif self.acting and finished:
            self.answer(now - self.since_s, 0)


@dataclass(slots=True)
class RecordedStep:
    """One step. If it was tried several times, the last try counts."""

    number: int
    start_s: float
    cap: int | None = None
    """Longest response, tokens."""
    round_kind: str | None = None
    rollout_end_s: float | None = None
    attempts: dict[int, RecordedAttempt] = field(default_factory=dict[int, RecordedAttempt])
    started: int = 0
    formed: list[tuple[int, int, float]] = field(default_factory=list[tuple[int, int, float]])
    """The lead of a formed engine, another member of it, and the second since which it decodes."""
    deferred: set[str] = field(default_factory=set[str])


class JournalReader:
    """Follows a journal. Malformed lines raise ``KeyError``, ``TypeError``, ``ValueError`` or
    ``AttributeError``."""

    def __init__(self) -> None:
        self.steps: dict[int, RecordedStep] = {}
        self.prompts: dict[str, Line] = {}
        """All prompts that were drawn, or that the policy held back."""
        self.cap: int | None = None
        self._step: RecordedStep | None = None
        self._carries = False

    def take(self, line: Line) -> None:
        if "meta" in line:
            self._resume(line["meta"])
            return
        now, event = float(line["t"]), line["event"]
        if event["kind"] == "StepStarted":
            kind = None if self._step is None else self._step.round_kind
            self._step = RecordedStep(event["step"], now, self.cap, kind)
            self.steps[event["step"]] = self._step
        elif event["kind"] == "PromptsDrawn":
            self.prompts |= {each["id"]: each for each in event["prompts"]}
        elif self._step is not None:
            self._happened(self._step.attempts, now, event)
        for decision in line["decisions"]:
            if self._step is not None:
                self._decided(self._step, now, decision)

    def _resume(self, meta: Line) -> None:
        """Deferred prompts come back from the policy's state, but running attempts do not go on."""
        self.cap = meta["settings"].get("cap")
        tail = meta["settings"].get("rollout", {}).get("tail_batching", {})
        self._carries = tail.get("mode") == "partial"
        self.prompts |= {each["id"]: each for each in prompts_in(meta["state"])}
        if (step := self._step) is not None:
            step.deferred.clear()
            step.attempts = {n: each for n, each in step.attempts.items() if each.end_s is not None}

    def _happened(self, attempts: dict[int, RecordedAttempt], now: float, event: Line) -> None:
        match event["kind"]:
            case kind if kind in _ENDS:
                attempt = attempts.get(event["attempt"])
                if attempt is not None and attempt.end_s is None:
                    attempt.end(now, event)
            case "AttemptGraded":
                attempt = attempts.get(event["attempt"])
                if attempt is not None and attempt.end_s is not None:
                    attempt.reward, attempt.graded_s = event["reward"], now
            case "AttemptMigrated":
                attempt = attempts[event["attempt"]]
                attempt.engine = event["engine"]
                attempt.stays += ((attempt.engine, now),)
            case "TurnFinished":
                attempts[event["attempt"]].end_turn(now, event["tokens"])
            case "EnvironmentReplied":
                attempts[event["attempt"]].answer(event["seconds"], event["tokens"])
            case _:
                pass

    def _decided(self, step: RecordedStep, now: float, decision: Line) -> None:
        match decision["kind"]:
            case "StartAttempt":
                number, engine = decision["attempt"], decision["engine"]
                step.started += 1
                step.attempts[number] = RecordedAttempt(
                    number,
                    decision["prompt"],
                    decision["index"],
                    now,
                    engine,
                    ((engine, now),),
                    since_s=now,
                )
            case "ContinueAttempt":
                step.attempts[decision["attempt"]].go_on(now, decision["engine"])
            case "AcceptGroup":
                self._settle(step, decision, "kept")
            case "DropGroup":
                self._settle(step, decision, "dropped")
            case _:
                self._arranged(step, now, decision)

    def _arranged(self, step: RecordedStep, now: float, decision: Line) -> None:
        match decision["kind"]:
            case "BeginRound":
                step.round_kind = decision["round"]
            case "DeferPrompt" if self._carries:
                step.deferred.add(decision["prompt"]["id"])
            case "FormEngine":
                lead = decision["engine"]
                others = (member for member in decision["members"] if member != lead)
                step.formed += [(lead, other, now) for other in others]
            case "FinishRollout":
                step.rollout_end_s = now
                for attempt in step.attempts.values():
                    if attempt.prompt in step.deferred:
                        attempt.state = "carried"
            case _:
                pass

    def _settle(self, step: RecordedStep, decision: Line, state: str) -> None:
        for attempt in decision["attempts"]:
            step.attempts[attempt].state = state


def read_journal(path: Path) -> JournalReader:
    """Read a journal, its older segments first. Raises ``ValueError`` that names a bad line."""
    reader = JournalReader()
    for where, line in read_all(path):
        try:
            reader.take(line)
        except KeyError as error:
            raise ValueError(f"{where}: {error.args[0]}: missing or unknown") from error
        except (TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"{where}: not a line of a journal ({error})") from error
    return reader
