"""From a decision to decode to the event of its end: attempts on the simulated engines."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from rollpacker.core import decisions as do
from rollpacker.core import events as ev
from rollpacker.core.types import AttemptId, EngineId, FinishReason
from rollpacker.sim.world.agenda import Agenda
from rollpacker.sim.world.machines import WorldCosts
from rollpacker.sim.world.step import SimulatedAttempt, SimulatedStep
from rollpacker.sim.world.worker import SimWorker


class SimulatedDecoding:
    """Starts, stops and moves attempts, and turns what becomes of them into events.

    While the environment of an attempt is at work, what is decided of it takes effect at once.

    Args:
        touch: told of a worker that is about to change.
        settle: told that something has happened by itself: when this instant is over, workers that
            were touched plan anew.
    """

    def __init__(
        self,
        agenda: Agenda,
        engines: Mapping[EngineId, SimWorker],
        *,
        costs: WorldCosts,
        cap: int,
        touch: Callable[[SimWorker], SimWorker],
        post: Callable[..., None],
        settle: Callable[[], None],
    ) -> None:
        self._agenda = agenda
        self._engines = engines
        self._costs = costs
        self._cap = cap
        self._touch = touch
        self._post = post
        self._settle = settle
        self._now = SimulatedStep(number=-1, start_s=0.0)
        self._stopping: dict[EngineId, list[AttemptId]] = defaultdict(list)
        self._forming: dict[EngineId, tuple[EngineId, ...]] = {}

    def begin(self, step: SimulatedStep) -> None:
        """A step begins."""
        self._now = step

    # What is to be done ------------------------------------------------------------------------

    def start(self, attempt: SimulatedAttempt) -> None:
        """Begin a response, or go on with it."""
        if attempt.course.so_far == attempt.course.tokens:
            self._post(self._finished(attempt))
        elif attempt.course.opens:
            self._act(attempt)
            self._wait(attempt)
        else:
            self._touch(self._engines[attempt.engine]).submit(attempt.course)

    def step_environment(self, decision: do.StepEnvironment) -> None:
        """Give an attempt's environment the turn that has ended."""
        self._wait(self._now.attempts[decision.attempt])

    def go_on(self, decision: do.ContinueAttempt) -> None:
        """Decode an attempt's next turn."""
        known = self._now.attempts[decision.attempt]
        self._leave(known)
        known.engine, known.decoding = decision.engine, True
        self._touch(self._engines[known.engine]).submit(known.course)

    def abort(self, attempt: SimulatedAttempt) -> None:
        """Stop one whose response is not there."""
        if attempt.acting:
            self._leave(attempt)
            self._post(self._aborted(attempt, attempt.course.before))
            return
        if attempt.target is None:
            self._stopping[attempt.engine].append(attempt.course.attempt)
        attempt.stopping, attempt.target = True, None

    def migrate(self, decision: do.MigrateAttempts) -> None:
        """Stop these; when they have, they go on elsewhere."""
        for attempt in decision.attempts:
            known = self._now.attempts[attempt]
            if known.acting:
                self._post(self._moved(known, decision.target))
            elif known.decoding and not known.stopping:
                if known.target is None:
                    self._stopping[known.engine].append(attempt)
                known.target = decision.target

    def send(self) -> None:
        """Tell the workers what is to stop, each of them once."""
        stopping, self._stopping = self._stopping, defaultdict(list)
        for engine, attempts in stopping.items():
            self._touch(self._engines[engine]).stop(attempts)

    def form(self, decision: do.FormEngine) -> None:
        """The engine is there when all that its members decode has stopped."""
        self._forming[decision.engine] = decision.members
        self.form_idle()
        if decision.engine in self._forming:
            self._engines[decision.engine].form()

    def form_idle(self) -> None:
        """Form the engines whose members are all idle."""
        for lead, members in list(self._forming.items()):
            others = [member for member in members if member != lead]
            if self._engines[lead].held or not all(self._engines[m].idle for m in others):
                continue
            del self._forming[lead]
            devices = len(members) * self._costs.fleet.tp
            self._touch(self._engines[lead]).set_engine(self._costs.engine(devices), devices)
            self._post(ev.EngineFormed(engine=lead))

    # Environments ------------------------------------------------------------------------------

    def _act(self, attempt: SimulatedAttempt) -> None:
        """Its environment has the word."""
        attempt.decoding, attempt.acting = False, True
        self._engines[attempt.engine].wait(attempt.course.attempt)

    def _leave(self, attempt: SimulatedAttempt) -> None:
        """Its environment is not waited for any more."""
        attempt.acting = False
        self._engines[attempt.engine].leave(attempt.course.attempt)

    def _wait(self, attempt: SimulatedAttempt) -> None:
        """For its environment, as long as this turn takes."""
        self._agenda.after(attempt.course.turn.tool_s, lambda: self._answered(attempt))

    def _answered(self, attempt: SimulatedAttempt) -> None:
        if not attempt.acting:
            return
        course, number, turn = attempt.course, attempt.course.number, attempt.course.turn
        if course.answer():
            replied = ev.EnvironmentReplied(
                attempt=course.attempt,
                turn=number,
                tokens=turn.added,
                seconds=round(turn.tool_s, 6),
            )
            self._post(replied)
        else:
            self._leave(attempt)
            self._now.last_end_s = self._agenda.now
            self._post(self._finished(attempt, round(turn.tool_s, 6)))
        self._settle()

    # What happened -----------------------------------------------------------------------------

    def ended(self, done: Sequence[AttemptId], stopped: Mapping[AttemptId, int]) -> None:
        """A decode step has ended, with it turns of these attempts, and these have stopped."""
        self._post(*map(self._end, done))
        if stopped:
            self._post(*(self._stop(attempt, tokens) for attempt, tokens in stopped.items()))

    def _end(self, id_: AttemptId) -> ev.Event:
        """What an attempt had to decode is there."""
        attempt = self._now.attempts[id_]
        tools = attempt.course.end_turn()
        if not tools:
            self._now.last_end_s = self._agenda.now
        if attempt.stopping:
            return self._aborted(attempt, attempt.course.before)
        if not tools:
            return self._finished(attempt)
        self._act(attempt)
        if attempt.target is not None:
            self._post(self._moved(attempt, attempt.target))
        course = attempt.course
        return ev.TurnFinished(
            attempt=id_,
            turn=course.number,
            tokens=course.before,
            finish_reason=self._reason(course.before),
        )

    def _moved(self, attempt: SimulatedAttempt, target: EngineId) -> ev.AttemptMigrated:
        """One that waits for its environment goes on elsewhere."""
        id_ = attempt.course.attempt
        self._engines[attempt.engine].leave(id_)
        attempt.engine, attempt.target = target, None
        self._engines[target].wait(id_)
        return ev.AttemptMigrated(attempt=id_, engine=target, tokens=attempt.course.before)

    def _aborted(self, attempt: SimulatedAttempt, tokens: int) -> ev.AttemptAborted:
        attempt.decoding = False
        return ev.AttemptAborted(attempt=attempt.course.attempt, tokens=tokens)

    def _finished(self, attempt: SimulatedAttempt, seconds: float = 0.0) -> ev.AttemptFinished:
        attempt.decoding, attempt.target = False, None
        # Of all that the engine has decoded since it last finished one.
        drafts = self._engines[attempt.engine].drafts()
        return ev.AttemptFinished(
            attempt=attempt.course.attempt,
            tokens=attempt.course.tokens,
            finish_reason=self._reason(attempt.course.tokens),
            verifications=drafts.verifications,
            drafted=drafts.drafted,
            accepted=drafts.accepted,
            seconds=seconds,
            carried=attempt.stale,
        )

    def _reason(self, tokens: int) -> FinishReason:
        return "length" if tokens >= self._cap else "stop"

    def _stop(self, id_: AttemptId, tokens: int) -> ev.Event:
        """An attempt has left its engine: it is over, or goes on elsewhere."""
        attempt = self._now.attempts[id_]
        if attempt.target is None:
            return self._aborted(attempt, tokens)
        attempt.engine, attempt.target = attempt.target, None
        self._touch(self._engines[attempt.engine]).submit(attempt.course)
        return ev.AttemptMigrated(attempt=id_, engine=attempt.engine, tokens=tokens)
