"""From a decision to decode to the event of its end: attempts on the engines."""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from rollpacker.core import decisions as do
from rollpacker.core import events as ev
from rollpacker.core.types import NO_DRAFTS, AttemptId, EngineId, PromptId, sampling_seed
from rollpacker.engine.base import Output, Request, SamplingParams, Speculation
from rollpacker.runtime.attempts.attempts import GENERATING, Trajectory, TrajectoryStage
from rollpacker.runtime.attempts.carried import KnownResponse
from rollpacker.runtime.attempts.problems import Problems
from rollpacker.runtime.ipc.clock import Clock
from rollpacker.runtime.messages import messages as msg
from rollpacker.runtime.pool.in_process import Workers
from rollpacker.runtime.step.episodes import Answered, Episodes
from rollpacker.runtime.step.step import Formation, StepRecord

_KEPT = 1 << 22
"""Most tokens of earlier visits: 16 MB."""

Texts = tuple[NDArray[np.int32], ...]


class DraftSources:
    """What was said to each prompt, in this step and at its last visit.

    Args:
        kept: most tokens of earlier visits; the oldest are forgotten first.
    """

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
        """What was said at the prompt's last visit."""
        return self._before.get(prompt, ())

    def siblings(self, prompt: PromptId) -> Texts:
        """What was said to it in this step, for one that goes on where that is not known."""
        return tuple(self._now.get(prompt, ()))


_AT_ONCE = 1024
"""Requests sent before reports are heard."""


class Decoding:
    """Starts, stops and moves attempts, and turns what engines report into events.

    Args:
        workers: the engines.
        problems: the prompts.
        known: what there is of a sample of a prompt from before, if anything.
        params: how responses are sampled.
        seed: the run's.
        lockstep: engines that have reported wait for ``proceed``.
        hints: texts that engines may take drafts from; None where they draft nothing.
        episodes: the attempts' environments; None where they have none.
        post: takes the events.
        clock: seconds since the run began.
    """

    def __init__(
        self,
        workers: Workers,
        problems: Problems,
        known: Callable[[PromptId, int], KnownResponse | None],
        params: SamplingParams,
        seed: int,
        *,
        lockstep: bool,
        hints: DraftSources | None,
        post: Callable[..., None],
        clock: Clock,
        episodes: Episodes | None = None,
    ) -> None:
        self._workers = workers
        self._problems = problems
        self._known = known
        self._params = params
        self._seed = seed
        self._outbox = EngineOutbox(workers, self._request, lockstep=lockstep)
        self.send, self.proceed = self._outbox.send, self._outbox.proceed
        self.speculate, self.sleep = self._outbox.speculate, self._outbox.sleep
        self._hints = hints
        self._episodes = episodes
        self._post = post
        self._clock = clock
        self._record = StepRecord(step=0, start_s=0.0)

    def begin(self, record: StepRecord) -> None:
        self._record = record
        if self._hints is not None:
            self._hints.begin()
        self._outbox.begin()

    # What is to be done; ``send`` sends it -----------------------------------------------------

    def start(self, decision: do.StartAttempt) -> None:
        """Begin a response, or go on with it; nothing is to be done where it is known."""
        now = self._clock()
        attempt = self._record.attempts[decision.attempt] = Trajectory(
            id=decision.attempt,
            prompt=decision.prompt,
            index=decision.index,
            engine=decision.engine,
            prompt_tokens=self._problems.tokens[decision.prompt],
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
            self._episodes.begin(attempt, self._problems)

    def step_environment(self, decision: do.StepEnvironment) -> None:
        """Give an attempt's environment the turn that has ended."""
        assert self._episodes is not None
        self._episodes.step(self._record.attempts[decision.attempt])

    def go_on(self, decision: do.ContinueAttempt) -> None:
        """Sample an attempt's next turn."""
        attempt = self._record.attempts[decision.attempt]
        attempt.stage, attempt.since_s = TrajectoryStage.RUNNING, self._clock()
        attempt.engine = decision.engine
        self._outbox.add(attempt)

    def abort(self, attempt: Trajectory) -> None:
        """Stop one whose response is not there; its end is an event when the engine has said so,
        or at once where its environment is at work or no engine has it yet."""
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
        """Its episode, if it has one, is not wanted any more."""
        if self._episodes is not None:
            self._episodes.close(attempt)

    def _forget(self, attempt: Trajectory) -> None:
        """The engine need not keep what it has of an attempt's turns."""
        if attempt.stays:
            self._outbox.stop(attempt.engine, attempt.id)

    def migrate(self, decision: do.MigrateAttempts) -> None:
        """Stop these; when they have, they go on elsewhere."""
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

    def form(self, decision: do.FormEngine) -> None:
        """Put devices together when what they decode is told to stop."""
        self._outbox.form(decision)
        formation = Formation(engine=decision.engine, members=decision.members, at_s=self._clock())
        self._record.formed.append(formation)

    def _request(self, attempt: Trajectory) -> Request:
        """From its start, or from what an engine that it has left made of it."""
        # One that goes on in a later step goes on with the random numbers of its first.
        draw = attempt.oldest(self._record.draw)
        request = Request(
            attempt=attempt.id,
            group=attempt.prompt,
            prompt=attempt.prompt_tokens,
            params=self._params,
            seed=sampling_seed(self._seed, draw, attempt.prompt, attempt.index),
        )
        begun = attempt.begun
        if self._episodes is not None:
            request = self._episodes.request(request, attempt)
        elif begun is not None:
            request = replace(request, generated=begun.tokens, logprobs=begun.logprobs)
        if self._hints is None:
            return request
        if begun is not None:
            return replace(request, hints=self._hints.siblings(attempt.prompt))
        # Once for each group.
        return (
            request
            if attempt.index
            else replace(request, hints=self._hints.earlier(attempt.prompt))
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
        """What it ran is over; returns what ends with it, but for its loss itself."""
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
        """An attempt is over because it was told to be: now, unless its response was there."""
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
                "weights or activations of the model are not finite; lower train.learning_rate, or "
                "resume from an earlier checkpoint"
            )
        if attempt.stage is TrajectoryStage.STOPPING:
            attempt.output = output
            return self.aborted(attempt)
        talk = attempt.conversation
        if talk is None:
            return self._ended(attempt, output)
        if not talk.over:
            return self._turned(attempt, output)
        # It is from before an interruption: the policy has heard of none of its turns.
        return self._ended(attempt, output, talk.wait_s, len(talk.turns))

    def _turned(self, attempt: Trajectory, output: Output) -> ev.TurnFinished:
        """Its environment is next; the policy has the word."""
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
        """The response is there, after so many seconds of its environment, and turns, that the
        policy has not heard of."""
        attempt.output, attempt.end_s = output, self._clock()
        attempt.stage = TrajectoryStage.GRADING
        if self._hints is not None:
            self._hints.finished(attempt.prompt, output.tokens)
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
        """A migrating attempt has left its old engine: hand it to the new one, or, where that has
        died meanwhile, back to the old one, where the policy has it still."""
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
        """Environments have answered. Raises ``ValueError`` when no others can."""
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
    """Messages for the engines.

    Args:
        workers: the engines.
        request: makes an attempt's request when it is sent.
        lockstep: engines that have reported wait for ``proceed``.
    """

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
        self._forming: list[do.FormEngine] = []
        self._speculating: list[do.Speculate] = []
        self._tired: list[EngineId] = []

    def begin(self) -> None:
        self._attempts.clear()
        self._waits = False
        self._forming.clear()
        self._speculating.clear()
        self._tired.clear()
        for engine in self._workers.engines:
            self._workers.to_engine(engine, msg.BeginStep())

    def add(self, attempt: Trajectory) -> None:
        """An attempt is to decode on its engine."""
        self._attempts[attempt.engine][attempt.id] = attempt

    def drop(self, attempt: Trajectory) -> bool:
        """It is not; whether it was not sent yet."""
        waiting = self._attempts.get(attempt.engine, {})
        return waiting.pop(attempt.id, None) is not None

    def stop(self, engine: EngineId, attempt: AttemptId) -> None:
        """An engine is to forget an attempt."""
        self._stopping[engine].append(attempt)

    def form(self, decision: do.FormEngine) -> None:
        """Put devices together when what they decode is told to stop."""
        self._forming.append(decision)

    def speculate(self, decision: do.Speculate) -> None:
        """When its devices are put together, before its first attempts."""
        self._speculating.append(decision)

    def sleep(self, decision: do.SleepEngine) -> None:
        """When what an engine decodes was told to stop."""
        self._tired.append(decision.engine)

    def wait(self) -> None:
        """In lockstep, send nothing until ``proceed``."""
        self._waits = self._lockstep

    def send(self) -> None:
        """Send what was gathered, one message for each engine.

        Of very many requests the first now, and the others when reports have had their turn.
        """
        if self._waits:
            return
        if self._forming:
            self._stop()
            for decision in self._forming:
                self._workers.form(decision.engine, decision.members)
            self._forming.clear()
        for decision in self._speculating:
            how = Speculation(
                below=decision.below,
                most=decision.most,
                free=decision.free,
                row_cost=decision.row_cost,
            )
            self._workers.to_engine(decision.engine, msg.DecodeAhead(how=how))
        self._speculating.clear()
        sent = 0
        while self._attempts and (self._lockstep or sent < _AT_ONCE):
            sent += self._submit(next(iter(self._attempts)))
        self._stop()
        for engine in self._tired:
            self._workers.to_engine(engine, msg.Sleep())
        self._tired.clear()
        if self._attempts:
            asyncio.get_running_loop().call_soon(self.send)

    def _stop(self) -> None:
        for engine, attempts in self._stopping.items():
            self._submit(engine)
            self._workers.to_engine(engine, msg.Abort(attempts=attempts))
        self._stopping.clear()

    def _submit(self, engine: EngineId) -> int:
        """Send an engine its requests; returns how many."""
        attempts = self._attempts.pop(engine, {})
        if attempts:
            requests = [self._request(attempt) for attempt in attempts.values()]
            self._workers.to_engine(engine, msg.Submit(requests=requests))
        return len(attempts)

    def hold(self, engine: EngineId) -> None:
        """In lockstep: it has reported, and waits."""
        if self._lockstep:
            self._held.add(engine)

    def proceed(self) -> None:
        """In lockstep: what finished has been dealt with, decode on."""
        if self._waits:
            self._waits = False
            self.send()
        for engine in sorted(self._held):
            self._workers.to_engine(engine, msg.Proceed())
        self._held.clear()
