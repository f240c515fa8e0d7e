"""A tiny driver for the rollout policy: performs decisions, lets a caller choose what happens."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection

from rollpacker.config import RolloutConfig
from rollpacker.core import decisions as do
from rollpacker.core import events as ev
from rollpacker.core.types import (
    AttemptId,
    EngineId,
    GroupPart,
    Prompt,
    PromptId,
    ReplicaId,
    RoundKind,
)
from rollpacker.policy.engines.fleet import Layout
from rollpacker.policy.engines.hardware import EngineProfile, Hardware, RowCosts, measured
from rollpacker.policy.rollout import RolloutPolicy
from rollpacker.policy.rounds.tail_batching import NO_VARIANCE
from rollpacker.policy.settings import RolloutSettings, StreamingRules


def local_machine(workers: int, replica: int = 1) -> Hardware:
    """Engines of one device each, and replicas of ``replica`` devices."""
    latency = {1: 1e-3, 64: 2e-3}
    profile = EngineProfile(kv_tokens=10_000, latency=latency, prefill_token_s=1e-4)
    return measured({1: profile}, devices=workers, node_size=workers, replica_devices=replica)


def settings(
    rollout: dict,
    sizes: dict[str, int],
    *,
    stream: bool = True,
    asynchronous: bool = True,
    ordered: bool = False,
    updates: int = 1,
    tail_engines: int = 0,
    replica_engines: int = 0,
    layout: Layout = "colocated",
    machine: Hardware | None = None,
    rows: RowCosts | None = None,
    turns: bool = False,
) -> RolloutSettings:
    config = RolloutConfig.model_validate(rollout)
    return RolloutSettings(
        rollout=config,
        seed=0,
        sizes=sizes,
        cap=100,
        latency={1: 1e-3, 64: 2e-3},
        asynchronous_grading=asynchronous,
        rules=StreamingRules(
            stream=stream,
            ordered=ordered,
            updates=updates,
            tail_engines=tail_engines,
            replica_engines=replica_engines,
            layout=layout,
            task_tokens=config.streaming.group_tokens or 1024,
            turns=turns,
        ),
        machine=machine,
        rows=rows,
    )


class World:
    """Holds what the policy has set going; checks every decision as it comes.

    Args:
        given: of the policy.
        workers: engines, and replicas.
        talks: attempts act before their first turn and after each; they hold their engine.
    """

    def __init__(self, given: RolloutSettings, workers: int = 2, *, talks: bool = False) -> None:
        self.settings = given
        self.talks = talks
        self.policy = RolloutPolicy(given)
        self.workers = [EngineId(i) for i in range(workers)]
        self.size = given.rules.replica_engines or 1
        self.separate = given.rules.layout == "separate"
        self.replicas = [ReplicaId(i) for i in range(0, workers, 1 if self.separate else self.size)]
        self.fresh = {d: deque(self._prompts(d, n)) for d, n in given.sizes.items()}
        self.now = 0.0
        self.step = -1
        self.epoch_trained: Counter[PromptId] = Counter()
        self.dropped: set[PromptId] = set()
        self.first: dict[PromptId, int] = {}
        self.turns: Counter[AttemptId] = Counter()
        self.steps: Counter[AttemptId] = Counter()
        self.goes: Counter[AttemptId] = Counter()
        self._soon: list[ev.Event] = []
        self.used: set[AttemptId] = set()
        self.log: list[tuple[ev.Event, list[do.Decision]]] = []
        self.over = True
        self.clear()

    def clear(self) -> None:
        self.running: dict[AttemptId, EngineId] = {}
        self.acting: dict[AttemptId, int] = {}
        self.charged: Counter[PromptId] = Counter()
        self.index: dict[AttemptId, tuple[PromptId, int]] = {}
        self.grading: set[AttemptId] = set()
        self.graded: dict[AttemptId, float] = {}
        self.stopping: dict[AttemptId, int] = {}
        self.moving: dict[AttemptId, EngineId] = {}
        self.published: list[int] = []
        self.gradients: list[tuple[ReplicaId, tuple[GroupPart, ...]]] = []
        self.summed: dict[tuple[PromptId, int], ReplicaId] = {}
        self.accepted: dict[PromptId, tuple[AttemptId, ...]] = {}
        self.deferred: list[PromptId] = []
        self.rollout_over = False
        self.offered = False
        self.ahead: dict[EngineId, do.Speculate] = {}
        self.applying: do.ApplyUpdate | None = None
        self.updated: set[tuple[PromptId, int]] = set()
        self.asleep: set[EngineId] = set()
        self.lying_down: set[EngineId] = set()
        self.waking: set[EngineId] = set()

    @property
    def decoding(self) -> set[AttemptId]:
        """Those whose next turn is sampled."""
        return self.running.keys() - self.acting.keys()

    @property
    def undecided(self) -> set[PromptId]:
        """Prompts of the step of which nothing is said yet."""
        prompts = {prompt for prompt, _ in self.index.values()}
        return prompts - self.accepted.keys() - self.dropped - set(self.deferred)

    def next_epoch(self) -> None:
        """Every prompt was kept once, or dropped."""
        prompts = {p.id for name, n in self.settings.sizes.items() for p in self._prompts(name, n)}
        assert self.epoch_trained.keys() | self.dropped == prompts
        assert not self.epoch_trained.keys() & self.dropped
        assert set(self.epoch_trained.values()) <= {1}
        self.fresh = World(self.settings, 1).fresh
        for past in (self.epoch_trained, self.dropped, self.first):
            past.clear()

    @staticmethod
    def _prompts(domain: str, count: int) -> list[Prompt]:
        return [Prompt(id=PromptId(f"{domain}{i}"), domain=domain, tokens=5) for i in range(count)]

    @property
    def partial(self) -> bool:
        return self.settings.rollout.tail_batching.mode == "partial"

    @property
    def responses(self) -> int:
        return self.settings.rollout.num_generations

    def remaining(self) -> dict[str, int]:
        return {domain: len(prompts) for domain, prompts in self.fresh.items()}

    def epoch_over(self) -> bool:
        return not any(self.fresh.values()) and not self.policy.queue

    def start(self) -> None:
        assert self.over
        self.step += 1
        self.clear()
        self.over = False
        self.available = sum(map(len, self.fresh.values())) + self.policy.queue
        self.tell(
            ev.StepStarted(
                step=self.step,
                engines=tuple(self.workers),
                replicas=tuple(self.replicas),
                remaining=self.remaining(),
            )
        )

    def tell(self, event: ev.Event) -> None:
        self.now += 1.0
        self._charge(event)
        made = self.policy.handle(self.now, event)
        self.log.append((event, made))
        answers: list[ev.Event] = []
        for decision in made:
            answer = self.perform(decision)
            if answer is not None:
                answers.append(answer)
        for answer in answers:
            self.tell(answer)
        while self._soon:
            self.tell(self._soon.pop(0))

    def _charge(self, event: ev.Event) -> None:
        """Failures of a prompt that are its own."""
        failed = isinstance(event, ev.AttemptFailed | ev.GradingFailed) or (
            isinstance(event, ev.EpisodeFailed) and not event.blameless
        )
        if failed and event.attempt in self.index:
            self.charged[self.index[event.attempt][0]] += 1

    def perform(self, decision: do.Decision) -> ev.Event | None:
        match decision:
            case do.DrawPrompts():
                return self._draw(decision)
            case do.StartAttempt():
                self._start(decision)
            case do.GradeAttempt():
                assert decision.attempt in self.index
                assert decision.attempt not in self.running
                self.grading.add(decision.attempt)
            case do.AbortAttempt():
                self._abort(decision.attempt)
            case do.AcceptGroup():
                self._accept(decision)
            case do.MigrateAttempts():
                self._migrate(decision)
            case do.AccumulateGradients():
                self._accumulate(decision)
            case do.SleepEngine():
                self._sleep(decision.engine)
            case do.StepEnvironment() | do.ContinueAttempt():
                self._talk(decision)
            case _:
                self._note(decision)
        return None

    def _migrate(self, decision: do.MigrateAttempts) -> None:
        for attempt in decision.attempts:
            assert self.moving.get(attempt, self.running[attempt]) == decision.source
            self.moving[attempt] = decision.target
            if attempt in self.acting:
                self._soon.append(self._moved(attempt))

    def _talk(self, decision: do.StepEnvironment | do.ContinueAttempt) -> None:
        attempt = decision.attempt
        assert attempt in self.acting, "it is not its environment's turn"
        if isinstance(decision, do.StepEnvironment):
            self.steps[attempt] += 1
        else:
            assert decision.engine == self.running[attempt]
            assert decision.engine in self.workers, "it goes on where nothing is"
            del self.acting[attempt]
            self.goes[attempt] += 1

    def _note(self, decision: do.Decision) -> None:
        match decision:
            case do.BeginRound():
                self.kind = decision.round
            case do.DropGroup():
                self._drop(decision)
            case do.DeferPrompt():
                self.deferred.append(decision.prompt.id)
            case do.FinishRollout():
                assert not self.running, "the rollout ended with attempts running"
                assert not self.stopping, "the rollout ended before aborts were confirmed"
                self.rollout_over = True
                if self.partial:
                    self._check_count()
            case do.ApplyUpdate():
                self._apply(decision)
            case do.PublishWeights():
                assert self.over, "published before the last update"
                assert decision.version == self.step + 1
                self.published.append(decision.version)
            case do.Speculate():
                assert decision.engine in self.workers
                assert self.kind is not RoundKind.SHORT, "drafts where responses race"
                assert not self.rollout_over
                self.ahead[decision.engine] = decision
            case do.OfferTail():
                assert not self.offered, "offered twice"
                assert not self.rollout_over
                self.offered = True
            case _:
                raise AssertionError(decision)

    def _drop(self, decision: do.DropGroup) -> None:
        if decision.reason != NO_VARIANCE:
            most = self.settings.rollout.max_retries * self.responses
            assert self.charged[decision.prompt] > most, "given up too early"
        self.dropped.add(decision.prompt)

    def _sleep(self, engine: EngineId) -> None:
        assert self.settings.rules.turns
        assert engine in self.workers
        assert engine not in self.asleep | self.lying_down, "told to sleep twice"
        bound = [self.moving.get(a, at) for a, at in self.running.items()]
        assert engine not in bound, "an engine sleeps with attempts"
        self.lying_down.add(engine)

    def _check_count(self) -> None:
        """Every step has as many groups as it may: seats of prompts that were dropped are taken."""
        most = self.settings.rollout.prompts_per_step
        begun = {prompt for prompt, _ in self.index.values()}
        lost = begun & self.dropped
        if not lost:
            assert len(self.accepted) == min(self.available, most)
        elif len(self.fresh) == 1:
            assert len(self.accepted) == min(most, len(begun - lost))

    def _draw(self, decision: do.DrawPrompts) -> ev.PromptsDrawn:
        drawn: list[Prompt] = []
        for domain, count in decision.counts.items():
            assert count <= len(self.fresh[domain]), "drew more than there is"
            drawn += [self.fresh[domain].popleft() for _ in range(count)]
        return ev.PromptsDrawn(prompts=tuple(drawn))

    def _start(self, decision: do.StartAttempt) -> None:
        assert decision.attempt not in self.used, "an attempt id came twice"
        assert decision.engine in self.workers, "started on a dead worker"
        if decision.engine in (self.asleep | self.lying_down) - self.waking:
            down = self.asleep | self.lying_down
            assert {*self.workers} <= down, "others are awake"
            self.waking.add(decision.engine)
        self.used.add(decision.attempt)
        self.running[decision.attempt] = decision.engine
        if self.talks:
            self.acting[decision.attempt] = -1
        self.first.setdefault(decision.prompt, self.step)
        self.index[decision.attempt] = (decision.prompt, decision.index)

    def _abort(self, attempt: AttemptId) -> None:
        if attempt in self.running:
            del self.running[attempt]
            self.moving.pop(attempt, None)
            self.acting.pop(attempt, None)
        else:
            waits = not self.settings.asynchronous_grading
            assert waits or attempt in self.grading, "aborted what was over"
            self.grading.discard(attempt)
        self.stopping[attempt] = 3

    def _accept(self, decision: do.AcceptGroup) -> None:
        assert decision.prompt not in self.accepted
        owners = {self.index[a][0] for a in decision.attempts}
        assert owners == {decision.prompt}
        assert all(a in self.graded for a in decision.attempts)
        indices = [self.index[a][1] for a in decision.attempts]
        assert indices == sorted(set(indices)), "samples of a group are distinct and ordered"
        age = self.step - self.first.pop(decision.prompt)
        tail = self.settings.rollout.tail_batching
        assert not self.partial or age <= tail.max_staleness, "trained on too late"
        self.accepted[decision.prompt] = decision.attempts
        self.epoch_trained[decision.prompt] += 1

    def _accumulate(self, decision: do.AccumulateGradients) -> None:
        assert decision.replica in self.replicas, "gradients on a dead replica"
        assert self.rollout_over or not self._decodes_on(decision.replica)
        if self.settings.rules.turns:
            beside = {*self._beside(decision.replica)} & {*self.workers}
            assert beside <= self.asleep, "gradients beside an engine that has its memory"
        for part in decision.parts:
            assert part.prompt in self.accepted, "gradients of a group that was not accepted"
            for place in range(part.start, part.stop):
                sample = (part.prompt, place)
                assert sample not in self.summed, "gradients summed twice"
                assert sample not in self.updated
                self.summed[sample] = decision.replica
        if not self.settings.rules.stream:
            assert self.rollout_over, "streamed although streaming is off"
        self.gradients.append((decision.replica, decision.parts))

    def _decodes_on(self, replica: ReplicaId) -> bool:
        """Whether an engine on a replica's devices has attempts that are not to move away."""
        engines = self._beside(replica)
        return any(self.moving.get(a, engine) in engines for a, engine in self.running.items())

    def _beside(self, replica: ReplicaId) -> Collection[int]:
        return range(replica, replica + self.size) if not self.separate else ()

    def _apply(self, decision: do.ApplyUpdate) -> None:
        assert self.rollout_over
        assert not self.lying_down, "updated while an engine lies down"
        if self.settings.rules.turns and not self.separate and self.accepted:
            beside = {e for r in self.replicas for e in self._beside(r)} & {*self.workers}
            assert beside <= self.asleep, "updated beside an engine that has its memory"
        assert not self.gradients, "updated before all gradients were summed"
        self.updated |= self.summed.keys()
        if decision.last:
            kept = {(p, i) for p, group in self.accepted.items() for i in range(len(group))}
            assert self.updated == kept, "a kept sample missed the update"
        self.applying = decision

    # What a caller may let happen -----------------------------------------------------------

    def finish(
        self, attempt: AttemptId, tokens: int = 7, reason: str = "stop", **drafts: int
    ) -> None:
        if self.running[attempt] in self.waking:
            self.confirm_wake(self.running[attempt])
        del self.running[attempt]
        self.moving.pop(attempt, None)
        if self.talks:
            del self.acting[attempt]
        self.tell(
            ev.AttemptFinished(attempt=attempt, tokens=tokens, finish_reason=reason, **drafts)
        )

    def end_turn(self, attempt: AttemptId, tokens: int = 5, reason: str = "stop") -> None:
        if self.moving.get(attempt) in self.workers:
            self.tell(self._moved(attempt))
        self.moving.pop(attempt, None)
        turn = self.acting[attempt] = self.turns[attempt]
        self.turns[attempt] += 1
        self.tell(ev.TurnFinished(attempt=attempt, turn=turn, tokens=tokens, finish_reason=reason))

    def reply(self, attempt: AttemptId) -> None:
        turn = self.acting[attempt]
        self.tell(ev.EnvironmentReplied(attempt=attempt, turn=turn, tokens=3, seconds=0.5))
        assert attempt not in self.acting, "nobody has told it to go on"

    def fail(self, attempt: AttemptId, event: ev.Event) -> list[do.Decision]:
        """What is decided of one that has failed."""
        for holder in (self.running, self.moving, self.acting):
            holder.pop(attempt, None)
        self.grading.discard(attempt)
        place = len(self.log)
        self.tell(event)
        return self.log[place][1]

    def grade(self, attempt: AttemptId, reward: float) -> None:
        self.grading.discard(attempt)
        self.graded[attempt] = reward
        self.tell(ev.AttemptGraded(attempt=attempt, reward=reward))

    def confirm_abort(self, attempt: AttemptId) -> None:
        self.tell(ev.AttemptAborted(attempt=attempt, tokens=self.stopping.pop(attempt)))

    def confirm_move(self, attempt: AttemptId) -> None:
        if self.talks and self.moving[attempt] not in self.workers:
            self.fail(attempt, ev.AttemptFailed(attempt=attempt, error="engine"))
        else:
            self.tell(self._moved(attempt))

    def _moved(self, attempt: AttemptId) -> ev.AttemptMigrated:
        """One that moves; it need not be stopped where it does not decode."""
        self.running[attempt] = self.moving.pop(attempt)
        return ev.AttemptMigrated(attempt=attempt, engine=self.running[attempt], tokens=2)

    def sum_gradients(self, place: int) -> None:
        replica, parts = self.gradients.pop(place)
        self.tell(ev.GradientsAccumulated(replica=replica, parts=parts, seconds=0.01))

    def confirm_sleep(self, engine: EngineId) -> None:
        self.lying_down.discard(engine)
        self.asleep.add(engine)
        self.tell(ev.EngineSlept(engine=engine))

    def confirm_wake(self, engine: EngineId) -> None:
        if engine in self.lying_down:
            self.confirm_sleep(engine)
        self.waking.discard(engine)
        self.asleep.discard(engine)
        self.tell(ev.EngineFormed(engine=engine))

    def apply(self) -> None:
        assert self.applying is not None
        done, self.applying = self.applying, None
        self.summed.clear()
        self.over = done.last
        self.tell(ev.UpdateApplied(step=self.step, update=done.update))
        assert (self.step + 1 in self.published) == self.over, "the last update publishes, no other"

    def lose(self, worker: EngineId) -> None:
        """An engine dies with the replica on its device."""
        self.lose_devices([worker], [ReplicaId(worker)])

    def lose_devices(self, engines: Collection[EngineId], replicas: Collection[ReplicaId]) -> None:
        """These engines and these replicas die together."""
        self.workers = [engine for engine in self.workers if engine not in engines]
        self.lying_down -= {*engines}
        self.waking -= {*engines}
        self.replicas = [replica for replica in self.replicas if replica not in replicas]
        for attempt in [a for a, w in self.running.items() if w in engines]:
            for holder in (self.running, self.moving, self.acting):
                holder.pop(attempt, None)
        self.gradients = [task for task in self.gradients if task[0] not in replicas]
        if replicas and self.applying:  # which has changed no weight yet
            self.updated -= self.summed.keys()
            self.applying = None
        self.summed = {p: r for p, r in self.summed.items() if r not in replicas}
        self.tell(ev.DevicesLost(engines=tuple(engines), replicas=tuple(replicas)))

    def idle(self) -> bool:
        return not (
            self.running
            or self.grading
            or self.stopping
            or self.gradients
            or self.applying
            or self.lying_down
        )

    def finish_all(self) -> None:
        """Whatever state a step is in, it can be brought to its end."""
        for _ in range(10_000):
            if self.over:
                return
            if self.acting:
                self.finish(min(self.acting))
            elif self.decoding:
                (self.end_turn if self.talks else self.finish)(min(self.decoding))
            elif self.grading:
                self.grade(min(self.grading), float(len(self.graded) % 2))
            elif self.stopping:
                self.confirm_abort(min(self.stopping))
            elif self.lying_down:
                self.confirm_sleep(min(self.lying_down))
            elif self.gradients:
                self.sum_gradients(0)
            elif self.applying:
                self.apply()
        raise AssertionError("the step does not end")
