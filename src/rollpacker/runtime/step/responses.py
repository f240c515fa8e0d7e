"""Responses of a step: decoded, answered by environments, and graded. ``Decoding`` and ``Grading``
start the policy's decisions and turn their outcomes into events."""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rollpacker.core import decisions as do
from rollpacker.core import events as ev
from rollpacker.core.types import NO_DRAFTS, AttemptId, EngineId, PromptId, sampling_seed
from rollpacker.data.base import Row
from rollpacker.engine.base import Output, Request, SamplingParams, Speculation
from rollpacker.reward.base import Grade
from rollpacker.runtime.attempts.attempts import GENERATING, Problems, Trajectory, TrajectoryStage
from rollpacker.runtime.attempts.carried import KnownResponse
from rollpacker.runtime.ipc.clock import Clock
from rollpacker.runtime.messages import messages as msg
from rollpacker.runtime.pool.in_process import Workers
from rollpacker.runtime.step.episodes import Answered, Episodes
from rollpacker.runtime.step.step import Formation, StepRecord

_REQUESTS = 1024
"""Requests that are sent before the next reports are read."""
_GRADED = 512
"""Responses that the rewards get at once. A round in lockstep is graded as one batch."""

Known = Callable[[PromptId, int], KnownResponse | None]
"""Finds an earlier response to a sample of a prompt."""
EngineChange = do.FormEngine | do.Speculate | do.SleepEngine
Post = Callable[..., None]


class Graders(Protocol):
    """Turns responses into rewards."""

    @property
    def broken(self) -> str | None:
        """Why the run cannot go on."""
        ...

    @property
    def needs_group(self) -> bool:
        """Whether the responses of a prompt must be graded together."""
        ...

    def listen(self, take: Callable[[Sequence[Grade]], None]) -> AbstractContextManager[None]: ...

    def begin_step(self, step: int, epoch: float | None = None) -> None: ...

    def grade(
        self, attempts: Sequence[Trajectory], rows: Mapping[PromptId, Row], *, training: bool = True
    ) -> None:
        """Start grading without waiting. ``needs_group``: one prompt's responses in a call."""
        ...

    def recall(self, prompt: PromptId, grade: Grade) -> None: ...

    def cancel(self, attempt: AttemptId) -> None: ...

    def pending(self) -> Mapping[AttemptId, float]:
        """Awaited attempts, with the seconds that each has waited."""
        ...

    def end_step(self) -> list[str]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Everything that samples and grades responses, in training steps and evaluations alike.

    Args:
        lockstep: engines with a report wait until all finished responses are graded
            (``deterministic``).
        episodes: the attempts' environments, if they have any.
    """

    workers: Workers
    problems: Problems
    rewards: Graders
    params: SamplingParams
    seed: int
    clock: Clock
    lockstep: bool
    episodes: Episodes | None = None


_KEPT = 1 << 22
"""The most tokens of earlier visits: 16 MB."""

Texts = tuple[NDArray[np.int32], ...]


class DraftSources:
    """Responses to each prompt, in this step and at its last visit, for drafts. ``kept``: the most
    tokens of earlier visits. The oldest are forgotten first."""

    def __init__(self, kept: int = _KEPT) -> None:
        self._most = kept
        self._tokens = 0
        self._now: dict[PromptId, list[NDArray[np.int32]]] = defaultdict(list)
        self._before: dict[PromptId, Texts] = {}

    def begin(self) -> None:
        for prompt, texts in self._now.items():
            self._forget(prompt)
            self._before[prompt] = tuple(texts)
            self._tokens += sum(map(len, texts))
        self._now.clear()
        while self._tokens > self._most:
            self._forget(next(iter(self._before)))

    def _forget(self, prompt: PromptId) -> None:
        self._tokens -= sum(map(len, self._before.pop(prompt, ())))

    def finished(self, prompt: PromptId, tokens: NDArray[np.int32]) -> None:
        self._now[prompt].append(tokens)

    def earlier(self, prompt: PromptId) -> Texts:
        return self._before.get(prompt, ())

    def siblings(self, prompt: PromptId) -> Texts:
        """The responses of this step, for an attempt that goes on at an engine without them."""
        return tuple(self._now.get(prompt, ()))


class Decoding:
    """Starts, stops and moves attempts, and turns engines' reports into events. ``drafts``: texts
    for drafts. None without speculative decoding."""

    def __init__(self, setup: Setup, known: Known, drafts: DraftSources | None, post: Post) -> None:
        self._setup, self._known, self._drafts, self._post = setup, known, drafts, post
        self._workers, self._clock, self._episodes = setup.workers, setup.clock, setup.episodes
        self._outbox = EngineOutbox(setup.workers, self._request, lockstep=setup.lockstep)
        self.send, self.proceed = self._outbox.send, self._outbox.proceed
        self._record = StepRecord(step=0, start_s=0.0)

    def begin(self, record: StepRecord) -> None:
        self._record = record
        if self._drafts is not None:
            self._drafts.begin()
        self._outbox.begin()

    # What is to be done; ``send`` sends it -----------------------------------------------------

    def start(self, decision: do.StartAttempt) -> None:
        """Begin a response, or go on with an earlier one. A known response ends at once."""
        now = self._clock()
        attempt = self._record.attempts[decision.attempt] = Trajectory(
            id=decision.attempt,
            prompt=decision.prompt,
            index=decision.index,
            engine=decision.engine,
            prompt_tokens=self._setup.problems.tokens[decision.prompt],
            start_s=now,
            since_s=now,
        )
        known = self._known(decision.prompt, decision.index)
        if known is not None:
            known.restore(attempt)
            output = known.output_of(decision.attempt, self._record.step)
            if output.finish_reason != "abort":
                self._outbox.wait()
                self._post(self._finished(output))
                return
            attempt.output = attempt.begun = output
        if self._episodes is None:
            self._outbox.add(attempt)
        else:
            attempt.since_s = None
            self._episodes.begin(attempt, self._setup.problems)

    def step_environment(self, attempt: Trajectory) -> None:
        assert self._episodes is not None
        self._episodes.step(attempt)

    def go_on(self, attempt: Trajectory, engine: EngineId) -> None:
        attempt.stage, attempt.since_s = TrajectoryStage.RUNNING, self._clock()
        attempt.engine = engine
        self._outbox.add(attempt)

    def abort(self, attempt: Trajectory) -> None:
        """Stop an attempt without a response. It ends when the engine has confirmed that, or at
        once if no engine has it."""
        acting = attempt.stage is TrajectoryStage.ACTING
        unsent = self._outbox.drop(attempt)
        if unsent and attempt.begun is not None:
            attempt.output = replace(attempt.begun, drafts=NO_DRAFTS)  # they are in ``earlier``
        self._close(attempt)
        if attempt.stage is TrajectoryStage.RUNNING and not unsent:
            self._outbox.stop(attempt.engine, attempt.id)
        attempt.stage = TrajectoryStage.STOPPING
        if acting or unsent:
            self._forget(attempt)
            self._post(self.aborted(attempt))

    def _close(self, attempt: Trajectory) -> None:
        if self._episodes is not None:
            self._episodes.close(attempt)

    def _forget(self, attempt: Trajectory) -> None:
        if attempt.stays:
            self._outbox.stop(attempt.engine, attempt.id)

    def migrate(self, decision: do.MigrateAttempts) -> None:
        for id_ in decision.attempts:
            attempt = self._record.attempts[id_]
            if attempt.stage is TrajectoryStage.RUNNING:
                attempt.stage, attempt.target = TrajectoryStage.MIGRATING, decision.target
                self._outbox.stop(decision.source, id_)
            elif attempt.stage is TrajectoryStage.MIGRATING:
                attempt.target = decision.target
            elif attempt.stage is TrajectoryStage.ACTING:
                self._forget(attempt)
                attempt.engine = decision.target
                tokens = attempt.tokens
                self._post(ev.AttemptMigrated(attempt=id_, engine=decision.target, tokens=tokens))

    def change(self, decision: EngineChange) -> None:
        self._outbox.changes.append(decision)
        if isinstance(decision, do.FormEngine):
            formation = Formation(
                engine=decision.engine, members=decision.members, at_s=self._clock()
            )
            self._record.formed.append(formation)

    def _request(self, attempt: Trajectory) -> Request:
        # An attempt that was carried over keeps the random numbers of its first step.
        draw = attempt.oldest(self._record.draw)
        request = Request(
            attempt=attempt.id,
            group=attempt.prompt,
            prompt=attempt.prompt_tokens,
            params=self._setup.params,
            seed=sampling_seed(self._setup.seed, draw, attempt.prompt, attempt.index),
        )
        begun = attempt.begun
        if self._episodes is not None:
            request = self._episodes.request(request, attempt)
        elif begun is not None:
            request = replace(request, generated=begun.tokens, logprobs=begun.logprobs)
        if self._drafts is None:
            return request
        if begun is not None:
            return replace(request, hints=self._drafts.siblings(attempt.prompt))
        # One attempt of each group has the drafts of all.
        return (
            request
            if attempt.index
            else replace(request, hints=self._drafts.earlier(attempt.prompt))
        )

    # What happened -----------------------------------------------------------------------------

    def take(self, engine: EngineId, report: msg.EngineReport) -> None:
        match report:
            case msg.Finished():
                self._outbox.hold(engine)
                self._post(*(self._finished(output) for output in report.outputs))
            case msg.Aborted():
                self._post(*map(self._stopped, report.outputs))
            case msg.Failed():
                self._post(*(self._failed(a, report.error) for a in report.attempts))
            case msg.WeightsLoaded():
                self._post(ev.EngineFormed(engine=engine))
            case msg.Slept():
                self._post(ev.EngineSlept(engine=engine))

    def lose(self, engine: EngineId) -> list[ev.Event]:
        """End the attempts of a lost engine. Returns their events, without the loss itself."""
        attempts = [a for a in self._record.attempts.values() if a.engine == engine]
        events: list[ev.Event] = [
            self.aborted(attempt)
            for attempt in attempts
            if attempt.stage is TrajectoryStage.STOPPING
        ]
        for attempt in attempts:
            if attempt.stage in GENERATING:
                self._close(attempt)
                attempt.stage, attempt.verdict = TrajectoryStage.OVER, "failed"
                attempt.end_s = self._clock()
        return events

    def aborted(self, attempt: Trajectory) -> ev.AttemptAborted:
        """End an aborted attempt, at this time unless its response was there before."""
        if attempt.end_s is None:
            attempt.end_s = self._clock()
        attempt.stage, attempt.verdict = TrajectoryStage.OVER, "aborted"
        return ev.AttemptAborted(attempt=attempt.id, tokens=attempt.tokens)

    def _finished(self, output: Output) -> ev.Event:
        attempt = self._record.attempts[output.attempt]
        if output.weights_version != self._record.step:
            raise AssertionError(
                f"attempt {attempt.id} was sampled by weights {output.weights_version} "
                f"in step {self._record.step}"
            )
        if not math.isfinite(float(output.logprobs.sum())):
            raise ValueError(
                f"step {self._record.step}: a token of prompt {attempt.prompt} has no probability: "
                "weights or activations of the model are not finite. Lower train.learning_rate, or "
                "resume from an earlier checkpoint."
            )
        if attempt.stage is TrajectoryStage.STOPPING:
            attempt.output = output
            return self.aborted(attempt)
        talk = attempt.conversation
        if talk is None:
            return self._ended(attempt, output)
        if not talk.over:
            return self._turned(attempt, output)
        # It is from before an interruption, so the policy does not know its turns.
        return self._ended(attempt, output, talk.wait_s, len(talk.turns))

    def _turned(self, attempt: Trajectory, output: Output) -> ev.TurnFinished:
        assert attempt.conversation is not None
        moving = (
            attempt.stage is TrajectoryStage.MIGRATING and attempt.target in self._workers.engines
        )
        attempt.end_turn(self._clock(), output)
        if moving and attempt.target is not None:
            attempt.engine = attempt.target
            tokens = attempt.tokens
            self._post(ev.AttemptMigrated(attempt=attempt.id, engine=attempt.engine, tokens=tokens))
        attempt.stage = TrajectoryStage.ACTING
        return ev.TurnFinished(
            attempt=attempt.id,
            turn=len(attempt.conversation.turns) - 1,
            tokens=attempt.tokens,
            finish_reason=output.finish_reason,
        )

    def _ended(
        self, attempt: Trajectory, output: Output, seconds: float = 0.0, turns: int = 0
    ) -> ev.AttemptFinished:
        """The response is complete. The policy does not know ``seconds`` and ``turns`` yet."""
        attempt.output, attempt.end_s = output, self._clock()
        attempt.stage = TrajectoryStage.GRADING
        if self._drafts is not None:
            self._drafts.finished(attempt.prompt, output.tokens)
        drafts = attempt.drafts
        return ev.AttemptFinished(
            attempt=attempt.id,
            tokens=attempt.tokens,
            finish_reason=output.finish_reason,
            verifications=drafts.verifications,
            drafted=drafts.drafted,
            accepted=drafts.accepted,
            seconds=seconds,
            turns=turns,
            carried=attempt.stale,
        )

    def _stopped(self, output: Output) -> ev.Event:
        attempt = self._record.attempts[output.attempt]
        if attempt.stage is TrajectoryStage.STOPPING:
            attempt.output = output
            return self.aborted(attempt)
        assert attempt.target is not None
        return self._continue(attempt, output, attempt.target)

    def _continue(self, attempt: Trajectory, output: Output, target: EngineId) -> ev.Event:
        """Move a stopped attempt to its new engine. If that has died, it returns to the old one,
        where the policy still has it."""
        if target not in self._workers.engines:
            target = attempt.engine
        attempt.move(target, self._clock(), output)
        self._outbox.add(attempt)
        put_in = 0 if attempt.conversation is None else attempt.conversation.put_in
        tokens = len(output.tokens) - put_in
        return ev.AttemptMigrated(attempt=attempt.id, engine=target, tokens=tokens)

    def _failed(self, id_: AttemptId, error: str) -> ev.Event:
        attempt = self._record.attempts[id_]
        self._close(attempt)
        attempt.end_s = self._clock()
        if attempt.stage is TrajectoryStage.STOPPING:
            return self.aborted(attempt)
        attempt.stage, attempt.verdict = TrajectoryStage.OVER, "failed"
        self._record.faults.append(f"attempt {id_} of prompt {attempt.prompt}: {error}")
        return ev.AttemptFailed(attempt=id_, error=error)

    def answered(self, answers: Sequence[Answered]) -> None:
        """Take answers of environments. Raises ``ValueError`` if no others can come."""
        assert self._episodes is not None
        if (broken := self._episodes.broken) is not None:
            raise ValueError(broken)
        self._post(*(self._answered(each) for each in answers))

    def _answered(self, answered: Answered) -> ev.Event:
        attempt, conversation = answered.attempt, answered.attempt.conversation
        assert conversation is not None
        if answered.error:
            attempt.stage, attempt.verdict, attempt.end_s = (
                TrajectoryStage.OVER,
                "failed",
                self._clock(),
            )
            self._forget(attempt)
            self._record.faults.append(f"environment of prompt {attempt.prompt}: {answered.error}")
            return ev.EpisodeFailed(
                attempt=attempt.id, error=answered.error, blameless=answered.blameless
            )
        if answered.over:
            self._forget(attempt)
            return self._ended(attempt, attempt.whole(self._record.step), answered.seconds)
        return ev.EnvironmentReplied(
            attempt=attempt.id,
            turn=len(conversation.turns) - 1,
            tokens=answered.tokens,
            seconds=answered.seconds,
        )


class EngineOutbox:
    """Messages for the engines. ``lockstep``: engines with a report wait for ``proceed``."""

    def __init__(
        self, workers: Workers, request: Callable[[Trajectory], Request], *, lockstep: bool
    ) -> None:
        self._workers = workers
        self._request = request
        self._lockstep = lockstep
        self._held: set[EngineId] = set()
        self._waits = False
        self._attempts: dict[EngineId, dict[AttemptId, Trajectory]] = defaultdict(dict)
        self._stopping: dict[EngineId, list[AttemptId]] = defaultdict(list)
        self.changes: list[EngineChange] = []

    def begin(self) -> None:
        self._attempts.clear()
        self._waits = False
        self.changes.clear()
        for engine in self._workers.engines:
            self._workers.to_engine(engine, msg.BeginStep())

    def add(self, attempt: Trajectory) -> None:
        self._attempts[attempt.engine][attempt.id] = attempt

    def drop(self, attempt: Trajectory) -> bool:
        """Drop an attempt. Returns whether it was not sent yet."""
        waiting = self._attempts.get(attempt.engine, {})
        return waiting.pop(attempt.id, None) is not None

    def stop(self, engine: EngineId, attempt: AttemptId) -> None:
        self._stopping[engine].append(attempt)

    def wait(self) -> None:
        """In lockstep, send nothing until ``proceed``."""
        self._waits = self._lockstep

    def send(self) -> None:
        """Send the gathered messages, one for each engine. If there are very many requests, the
        rest follows after the next reports."""
        if self._waits:
            return
        changes = list(self.changes)
        self.changes.clear()
        formed = [each for each in changes if isinstance(each, do.FormEngine)]
        if formed:  # its members must hold nothing
            self._stop()
        for each in formed:
            self._workers.form(each.engine, each.members)
        for each in changes:
            if isinstance(each, do.Speculate):
                how = Speculation(
                    below=each.below, most=each.most, free=each.free, row_cost=each.row_cost
                )
                self._workers.to_engine(each.engine, msg.DecodeAhead(how=how))
        sent = 0
        while self._attempts and (self._lockstep or sent < _REQUESTS):
            sent += self._submit(next(iter(self._attempts)))
        self._stop()
        for each in changes:
            if isinstance(each, do.SleepEngine):
                self._workers.to_engine(each.engine, msg.Sleep())
        if self._attempts:
            asyncio.get_running_loop().call_soon(self.send)

    def _stop(self) -> None:
        for engine, attempts in self._stopping.items():
            self._submit(engine)
            self._workers.to_engine(engine, msg.Abort(attempts=attempts))
        self._stopping.clear()

    def _submit(self, engine: EngineId) -> int:
        attempts = self._attempts.pop(engine, {})
        if attempts:
            requests = [self._request(attempt) for attempt in attempts.values()]
            self._workers.to_engine(engine, msg.Submit(requests=requests))
        return len(attempts)

    def hold(self, engine: EngineId) -> None:
        if self._lockstep:
            self._held.add(engine)

    def proceed(self) -> None:
        """In lockstep, let engines decode on after all their reports were handled."""
        if self._waits:
            self._waits = False
            self.send()
        for engine in sorted(self._held):
            self._workers.to_engine(engine, msg.Proceed())
        self._held.clear()


class Grading:
    """Sends responses to the rewards and turns grades into events. In lockstep, grades become
    events when all sent responses are graded, in a fixed order."""

    def __init__(self, setup: Setup, known: Known, post: Post) -> None:
        self._setup, self._known, self._post = setup, known, post
        self._rewards, self._clock, self._lockstep = setup.rewards, setup.clock, setup.lockstep
        self._record = StepRecord(step=0, start_s=0.0)
        self._waiting: list[Trajectory] = []
        self._grades: list[Grade] = []

    def begin(self, record: StepRecord) -> None:
        self._record = record
        epoch = self._setup.problems.source.passed if record.training else None
        self._rewards.begin_step(record.step, epoch)

    def add(self, attempt: Trajectory) -> None:
        self._waiting.append(attempt)

    def send(self) -> None:
        """Grade finished responses. If a reward compares responses, grade whole groups."""
        self._waiting = [a for a in self._waiting if a.stage is TrajectoryStage.GRADING]
        if not self._waiting:
            return
        if self._rewards.needs_group:
            self._send_groups()
            return
        most = len(self._waiting) if self._lockstep else _GRADED
        waiting, self._waiting = self._waiting[:most], self._waiting[most:]
        self._give([attempt for attempt in waiting if not self._recall(attempt)])
        if not self._lockstep:
            self._post_grades()

    def _give(self, attempts: Sequence[Trajectory]) -> None:
        self._rewards.grade(attempts, self._setup.problems.rows, training=self._record.training)

    def _send_groups(self) -> None:
        if not self._record.training:
            alone, self._waiting = self._waiting, []
            for attempt in alone:
                self._give([attempt])
            return
        # Nothing is sent before all responses of one engine step are known.
        attempts = self._record.attempts.values()
        unfinished = {a.prompt for a in attempts if a.stage in GENERATING}
        for prompt in {attempt.prompt: None for attempt in self._waiting}:
            if prompt not in unfinished:
                self._give([a for a in self._waiting if a.prompt == prompt])
                self._waiting = [a for a in self._waiting if a.prompt != prompt]

    def _recall(self, attempt: Trajectory) -> bool:
        known = self._known(attempt.prompt, attempt.index)
        grade = None if known is None else known.grade_of(attempt.id)
        if grade is None:
            return False
        self._rewards.recall(attempt.prompt, grade)
        self._grades.append(grade)
        return True

    def take(self, grades: Sequence[Grade]) -> None:
        """Take grades. Raises ``ValueError`` if no others can come."""
        if (broken := self._rewards.broken) is not None:
            raise ValueError(broken)
        self._grades.extend(grades)
        if not self._lockstep:
            self._post_grades()
        if self._waiting:
            self.send()

    def settle(self) -> bool:
        """In lockstep, post events when nothing is being graded. Returns whether that is so."""
        if self._rewards.pending():
            return False
        self._grades.sort(key=lambda grade: grade.attempt)
        self._post_grades()
        return True

    def _post_grades(self) -> None:
        events = [e for grade in self._grades for e in self._events(grade)]
        self._grades.clear()
        self._post(*events)

    def _events(self, grade: Grade) -> list[ev.AttemptGraded | ev.GradingFailed]:
        attempt = self._record.attempts.get(grade.attempt)
        if attempt is None or attempt.stage is not TrajectoryStage.GRADING:
            return []
        attempt.graded_s = self._clock()
        attempt.rewards, attempt.runs = grade.rewards, grade.runs
        attempt.extra, attempt.metrics = grade.extra, grade.metrics
        if grade.error is not None:
            attempt.stage, attempt.verdict = TrajectoryStage.OVER, "failed"
            self._record.faults.append(f"reward of prompt {attempt.prompt}: {grade.error}")
            return [ev.GradingFailed(attempt=attempt.id, error=grade.error)]
        attempt.stage, attempt.reward = TrajectoryStage.GRADED, grade.reward
        return [ev.AttemptGraded(attempt=attempt.id, reward=grade.reward)]
