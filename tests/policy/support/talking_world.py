"""The tiny driver of ``policy_world`` for attempts of several turns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from policy_world import World

from rollpacker.core import decisions as do
from rollpacker.core import events as ev
from rollpacker.core.types import AttemptId, EngineId, PromptId, ReplicaId
from rollpacker.policy.rounds.tail_batching import NO_VARIANCE
from rollpacker.policy.settings import RolloutSettings


class Talking(World):
    """Its attempts act before their first turn and after each, where they hold their engine.

    Args:
        given: of the policy.
        workers: engines, and replicas.
    """

    def __init__(self, given: RolloutSettings, workers: int = 2) -> None:
        self.acting: dict[AttemptId, int] = {}
        self.turns: Counter[AttemptId] = Counter()
        self.steps: Counter[AttemptId] = Counter()
        self.goes: Counter[AttemptId] = Counter()
        self.charged: Counter[PromptId] = Counter()
        self._soon: list[ev.Event] = []
        super().__init__(given, workers)

    def clear(self) -> None:
        super().clear()
        self.acting.clear()
        self.charged.clear()

    @property
    def decoding(self) -> set[AttemptId]:
        """Those whose next turn is sampled."""
        return self.running.keys() - self.acting.keys()

    @property
    def undecided(self) -> set[PromptId]:
        """Prompts of the step of which nothing is said yet."""
        prompts = {prompt for prompt, _ in self.index.values()}
        return prompts - self.accepted.keys() - self.dropped - set(self.deferred)

    def tell(self, event: ev.Event) -> None:
        super().tell(event)
        while self._soon:
            super().tell(self._soon.pop(0))

    def perform(self, decision: do.Decision) -> ev.Event | None:
        match decision:
            case do.StepEnvironment():
                assert decision.attempt in self.acting, "it is not its environment's turn"
                self.steps[decision.attempt] += 1
            case do.ContinueAttempt():
                self._go_on(decision)
            case do.MigrateAttempts():
                super().perform(decision)
                for attempt in self.acting.keys() & set(decision.attempts):
                    self._soon.append(self._moved(attempt))
            case do.DropGroup():
                self._check_dropped(decision)
                super().perform(decision)
            case _:
                answer = super().perform(decision)
                if isinstance(decision, do.StartAttempt):
                    self.acting[decision.attempt] = -1
                if isinstance(decision, do.AbortAttempt):
                    self.acting.pop(decision.attempt, None)
                return answer
        return None

    def _go_on(self, decision: do.ContinueAttempt) -> None:
        attempt = decision.attempt
        assert decision.engine in self.workers, "it goes on where nothing is"
        assert decision.engine == self.running[attempt]
        del self.acting[attempt]
        self.goes[attempt] += 1

    def _moved(self, attempt: AttemptId) -> ev.AttemptMigrated:
        """One that moves; it need not be stopped where it does not decode."""
        self.running[attempt] = self.moving.pop(attempt)
        return ev.AttemptMigrated(attempt=attempt, engine=self.running[attempt], tokens=2)

    def _check_dropped(self, decision: do.DropGroup) -> None:
        if decision.reason != NO_VARIANCE:
            most = self.settings.rollout.max_retries * self.responses
            assert self.charged[decision.prompt] > most, "given up too early"

    # What a caller may let happen ----------------------------------------------------------------

    def end_turn(self, attempt: AttemptId, tokens: int = 5, reason: str = "stop") -> None:
        if self.moving.get(attempt) in self.workers:
            self.tell(self._moved(attempt))
        self.moving.pop(attempt, None)
        turn = self.acting[attempt] = self.turns[attempt]
        self.turns[attempt] += 1
        self.tell(ev.TurnFinished(attempt=attempt, turn=turn, tokens=tokens, finish_reason=reason))

    def reply(self, attempt: AttemptId) -> None:
        turn = self.acting[attempt]
        event = ev.EnvironmentReplied(attempt=attempt, turn=turn, tokens=3, seconds=0.5)
        self.tell(event)
        assert attempt not in self.acting, "nobody has told it to go on"

    def finish(
        self, attempt: AttemptId, tokens: int = 7, reason: str = "stop", **drafts: int
    ) -> None:
        del self.acting[attempt]
        super().finish(attempt, tokens, reason, **drafts)

    def fail(
        self, attempt: AttemptId, event: ev.Event, *, charge: bool = True
    ) -> list[do.Decision]:
        """What is decided of one that has failed."""
        self.charged[self.index[attempt][0]] += charge
        self.running.pop(attempt, None)
        self.moving.pop(attempt, None)
        self.acting.pop(attempt, None)
        self.grading.discard(attempt)
        place = len(self.log)
        self.tell(event)
        return self.log[place][1]

    def confirm_move(self, attempt: AttemptId) -> None:
        if self.moving[attempt] in self.workers:
            super().confirm_move(attempt)
        else:
            self.fail(attempt, ev.AttemptFailed(attempt=attempt, error="engine"))

    def lose_devices(self, engines: Collection[EngineId], replicas: Collection[ReplicaId]) -> None:
        for attempt in [a for a, engine in self.running.items() if engine in engines]:
            self.acting.pop(attempt, None)
        super().lose_devices(engines, replicas)


def finish_all(world: Talking) -> None:
    """Whatever state a step is in, it can be brought to its end."""
    for _ in range(10_000):
        if world.over:
            return
        if world.acting:
            world.finish(min(world.acting))
        elif world.decoding:
            world.end_turn(min(world.decoding))
        elif world.grading:
            world.grade(min(world.grading), float(len(world.graded) % 2))
        elif world.stopping:
            world.confirm_abort(min(world.stopping))
        elif world.lying_down:
            world.confirm_sleep(min(world.lying_down))
        elif world.gradients:
            world.sum_gradients(0)
        elif world.applying:
            world.apply()
    raise AssertionError("the step does not end")
