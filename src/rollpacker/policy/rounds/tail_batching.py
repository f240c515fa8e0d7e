"""Tail batching: short rounds race, and losers wait for a long round (RollPacker, section 3). The
same machine runs plain synchronous rounds: in a full round nothing races."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from heapq import heapify, heapreplace
from typing import Any

from rollpacker.core import decisions as do
from rollpacker.core import events as ev
from rollpacker.core.types import AttemptId, EngineId, Prompt, PromptId, RoundKind
from rollpacker.policy.ledger import Attempt, Ledger, Stage
from rollpacker.policy.rounds.race import (
    Carrying,
    Race,
    Racing,
    RoundPlan,
    RoundState,
    domain_quotas,
    plan_round,
)
from rollpacker.policy.rounds.rule import OwnRule, RoundView
from rollpacker.policy.settings import RolloutSettings


class EnginePlacement:
    """Starts each attempt on the engine with the fewest running attempts. Ties go to the lowest
    id."""

    def __init__(self, ledger: Ledger, engines: Sequence[EngineId]) -> None:
        self._ledger = ledger
        self._engines = engines
        self._retired: set[EngineId] = set()

    @property
    def engines(self) -> list[EngineId]:
        return [engine for engine in self._engines if engine in self._ledger.loads]

    def retire(self, engine: EngineId) -> None:
        """Start nothing there any more. Its attempts are moving, but may die with it."""
        self._retired.add(engine)

    def choose(self) -> Iterator[EngineId]:
        """The least loaded engine at each moment. A retired one only if there is no other. Valid
        while attempts are only started. Raises ``RuntimeError`` when none is left."""
        loads = self._ledger.loads
        order = [(engine in self._retired, loads[engine], engine) for engine in self.engines]
        if not order:
            raise RuntimeError("every worker has died: the run cannot continue")
        heapify(order)
        while True:
            retired, load, engine = order[0]
            if load == loads[engine]:
                yield engine
            else:
                heapreplace(order, (retired, loads[engine], engine))


NO_VARIANCE = "no reward variance"  # the reason for which dynamic sampling drops a group


Engines = Callable[[RoundKind, tuple[EngineId, ...]], Sequence[EngineId]]
"""The live engines that run in a round of this kind."""


class TailBatching:
    """Chooses the prompts and attempts of a step, those that it keeps, and those that wait.
    ``engines`` chooses among the live ones for a round, and ``rule`` is a user's mode."""

    def __init__(
        self,
        settings: RolloutSettings,
        ledger: Ledger,
        engines: Engines,
        rule: OwnRule | None = None,
    ) -> None:
        self._settings = settings
        self._config = settings.rollout
        self._ledger = ledger
        self._engines = engines
        self._rule = rule
        self._next_attempt = 0
        self.queue: deque[Prompt] = deque()
        tail = settings.rollout.tail_batching
        self._carrying = Carrying(tail.max_staleness) if tail.carries else None
        self._placement = EnginePlacement(ledger, ())
        self._remaining: dict[str, int] = {}
        self._audits = 0
        self._round: RoundState | None = None

    def state_dict(self) -> dict[str, Any]:
        state = {
            "next_attempt": self._next_attempt,
            "queue": [asdict(prompt) for prompt in self.queue],
        }
        carrying = self._carrying
        return state if carrying is None else state | {"begun": carrying.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._next_attempt = state["next_attempt"]
        self.queue = deque(Prompt(**item) for item in state["queue"])
        if self._carrying is not None:
            self._carrying.load_state_dict(state["begun"])

    def audited(self) -> Collection[PromptId]:
        return () if self._round is None else self._round.audited

    def retire(self, engine: EngineId) -> None:
        self._placement.retire(engine)

    def start(
        self, event: ev.StepStarted, racing: Racing, audits: int = 0
    ) -> Iterable[do.Decision]:
        assert self._round is None or self._round.finished, "the last round is not over"
        self._remaining = dict(event.remaining)
        plan, due = self._plan(event, racing)
        self._placement = EnginePlacement(self._ledger, self._engines(plan.kind, event.engines))
        self._round = RoundState(step=event.step, plan=plan, due=due)
        self._audits = audits if plan.kind is RoundKind.SHORT else 0
        yield do.BeginRound(step=event.step, round=plan.kind, updates=plan.updates)
        queued = [self.queue.popleft() for _ in range(plan.queued)]
        yield from self._start_prompts(self._round, queued)
        if plan.draws:
            yield self._draw(self._round, plan.draws)

    def _plan(self, event: ev.StepStarted, racing: Racing) -> tuple[RoundPlan, set[PromptId]]:
        config, sizes = self._config, self._settings.sizes
        if self._carrying is not None:
            found = self._carrying.plan(
                event.step,
                prompts=config.prompts_per_step,
                responses=config.num_generations,
                eta_prompts=racing.eta_prompts,
                queue=self.queue,
                sizes=sizes,
                remaining=event.remaining,
            )
            stay = [p for p in self.queue if p.domain not in found.plan.quotas]
            self.queue = deque([*found.queued, *stay])
            return found.plan, found.due
        plan = plan_round(
            prompts=config.prompts_per_step,
            responses=config.num_generations,
            racing=racing,
            queued=len(self.queue),
            sizes=sizes,
            remaining=event.remaining,
            long_steps=config.tail_batching.long_round_steps,
        )
        return plan, set()

    def handle(self, event: ev.Event, of: Attempt | None) -> Iterable[do.Decision]:
        if isinstance(event, ev.EpochEnded):
            self.queue.clear()
            if self._carrying is not None:
                self._carrying.clear()
        current = self._round
        if current is None or current.finished:
            return
        if of is not None:
            yield from self._react(current, of, event)
            if self._ended_early(current):
                current.stopped = True
                yield from self._close(current, [*filter(self._decodes, current.races.values())])
        elif isinstance(event, ev.PromptsDrawn):
            current.waiting_for_prompts = False
            yield from self._start_prompts(current, event.prompts)
        elif isinstance(event, ev.DevicesLost):
            for engine in event.engines:
                yield from self._restart(current, engine)
        yield from self._settle(current)

    def _react(self, current: RoundState, of: Attempt, event: ev.Event) -> Iterable[do.Decision]:
        race = current.races[of.prompt]
        if isinstance(event, ev.AttemptFinished):
            current.longest = max(current.longest, event.tokens)
        match event:
            case ev.TurnFinished():
                yield do.StepEnvironment(attempt=of.id)
            case ev.EnvironmentReplied():
                yield do.ContinueAttempt(attempt=of.id, engine=of.bound)
            case _ if race.done:
                pass
            case ev.AttemptFinished() if self._settings.asynchronous_grading:
                yield do.GradeAttempt(attempt=of.id)
            case ev.AttemptFinished():
                current.waiting[of.id] = of
            case ev.AttemptGraded():
                race.graded.append(of)
                if race.complete:
                    yield from self._complete(current, race)
            case ev.AttemptFailed() | ev.GradingFailed() | ev.EpisodeFailed():
                yield from self._retry(current, race, of, event)
            case _:
                pass

    def _settle(self, current: RoundState) -> Iterable[do.Decision]:
        if not self._settings.asynchronous_grading:
            yield from self._grade_all(current)
        if self._config.dynamic_sampling.enabled:
            yield from self._top_up(current)
        if self._over(current):
            current.finished = True
            yield do.FinishRollout(step=current.step, round=current.plan.kind)

    def _ended_early(self, current: RoundState) -> bool:
        if self._rule is None or not current.plan.stops:
            return False
        if current.waiting_for_prompts or not (current.undecided and current.accepted):
            return False
        seen = RoundView(
            step=current.step,
            accepted=current.taken(None),
            wanted=self._config.prompts_per_step,
            decoding=len(self._ledger.running),
            longest=current.longest,
        )
        return self._rule.ends(seen)

    def _over(self, current: RoundState) -> bool:
        ledger = self._ledger
        return not (
            current.undecided
            or ledger.running
            or ledger.grading
            or ledger.stopping
            or current.waiting
            or current.waiting_for_prompts
        )

    def _draw(self, current: RoundState, counts: dict[str, int]) -> do.DrawPrompts:
        current.waiting_for_prompts = True
        for domain, count in counts.items():
            self._remaining[domain] -= count
        return do.DrawPrompts(counts=counts)

    def _start_prompts(
        self, current: RoundState, prompts: Sequence[Prompt]
    ) -> Iterable[do.StartAttempt]:
        engines = self._placement.choose() if prompts else iter(())
        whole_groups = len(prompts) >= len(self._placement.engines)
        for prompt in prompts:
            race = Race(prompt, wanted=self._config.num_generations, audit=self._audits > 0)
            if race.audit:
                self._audits -= 1
                current.audited[prompt.id] = race
            current.races[prompt.id] = race
            current.undecided += 1
            engine = next(engines)
            for index in range(current.plan.responses):
                yield self._start(race, index, engine if whole_groups else next(engines))
            race.next_index = current.plan.responses

    def _start(self, race: Race, index: int, engine: EngineId | None = None) -> do.StartAttempt:
        attempt = AttemptId(self._next_attempt)
        self._next_attempt += 1
        if engine is None:
            engine = next(self._placement.choose())
        return do.StartAttempt(attempt=attempt, prompt=race.prompt.id, index=index, engine=engine)

    def _grade_all(self, current: RoundState) -> Iterable[do.GradeAttempt]:
        if current.waiting_for_prompts or self._ledger.running or not current.waiting:
            return
        waiting, current.waiting = current.waiting, {}
        for of in sorted(waiting.values(), key=lambda of: (of.place, of.id)):
            yield do.GradeAttempt(attempt=of.id)

    def _complete(self, current: RoundState, race: Race) -> Iterable[do.Decision]:
        informative = race.informative(self._config.min_reward_range)
        if self._config.dynamic_sampling.enabled and not informative:
            yield from self._end(current, race)
            yield do.DropGroup(prompt=race.prompt.id, attempts=race.kept(), reason=NO_VARIANCE)
            yield from self._admit(current)
        elif race.prompt.id in current.due or current.free(*self._seats(current, race)):
            yield from self._accept(current, race)
        else:
            current.ready.append(race)

    def _accept(self, current: RoundState, race: Race) -> Iterable[do.Decision]:
        yield from self._end(current, race)
        informative = race.informative(self._config.min_reward_range)
        yield do.AcceptGroup(prompt=race.prompt.id, attempts=race.kept(), informative=informative)
        current.accepted[race.prompt.domain] += 1
        domain, wanted = self._seats(current, race)
        if wanted is not None and current.taken(domain) >= wanted:
            rivals = current.races.values()
            some = [r for r in rivals if domain in (None, r.prompt.domain)]
            yield from self._close(current, some)
        else:
            yield from self._admit(current)

    def _admit(self, current: RoundState) -> Iterable[do.Decision]:
        for race in list(current.ready):
            if not race.done and current.free(*self._seats(current, race)):
                current.ready.remove(race)
                yield from self._accept(current, race)

    def _seats(self, current: RoundState, race: Race) -> tuple[str | None, int | None]:
        """The domain in which a prompt races, None for all, and the groups wanted of it."""
        if self._config.dynamic_sampling.enabled:
            return None, self._config.prompts_per_step
        return race.prompt.domain, current.plan.quotas.get(race.prompt.domain)

    def _end(self, current: RoundState, race: Race) -> Iterable[do.Decision]:
        self._decide(current, race)
        if not race.audit:
            yield from self._abort(current, race)

    def _decide(self, current: RoundState, race: Race) -> None:
        current.end(race)
        if self._carrying is not None:
            self._carrying.forget(race.prompt.id)

    def _close(self, current: RoundState, races: Sequence[Race]) -> Iterable[do.Decision]:
        for race in races:
            if race.done:
                continue
            current.end(race)
            if not race.audit:
                yield from self._abort(current, race)
            self.queue.append(race.prompt)
            if self._carrying is not None:
                self._carrying.defer(race.prompt.id, current.step)
            yield do.DeferPrompt(prompt=race.prompt)

    def _decodes(self, race: Race) -> bool:
        ended = sum(of.stage is not Stage.RUNNING for of in self._live(race))
        return len(race.graded) + ended < race.wanted

    def _live(self, race: Race) -> Iterator[Attempt]:
        return (of for of in self._ledger.groups[race.prompt.id] if of.stage in _LIVE)

    def _abort(self, current: RoundState, race: Race) -> Iterable[do.AbortAttempt]:
        for of in self._live(race):
            current.waiting.pop(of.id, None)
            yield do.AbortAttempt(attempt=of.id)

    def _retry(
        self,
        current: RoundState,
        race: Race,
        of: Attempt,
        event: ev.AttemptFailed | ev.GradingFailed | ev.EpisodeFailed,
    ) -> Iterable[do.Decision]:
        """Replace an attempt: the same sample if its engine failed, another if its reward or
        environment did."""
        if isinstance(event, ev.EpisodeFailed) and event.blameless:
            yield self._start(race, of.index)
            return
        race.failures += 1
        if race.failures <= self._config.max_retries * self._config.num_generations:
            index = of.index
            if isinstance(event, ev.GradingFailed | ev.EpisodeFailed):
                index, race.next_index = race.next_index, race.next_index + 1
            yield self._start(race, index)
            return
        yield from self._shrink(current, race, event.error)

    def _shrink(self, current: RoundState, race: Race, error: str) -> Iterable[do.Decision]:
        race.wanted = min(race.wanted, len(race.graded) + sum(1 for _ in self._live(race)))
        if race.wanted < min(2, self._config.num_generations):
            self._decide(current, race)
            yield from self._abort(current, race)
            yield do.DropGroup(prompt=race.prompt.id, attempts=(), reason=error)
            yield from self._admit(current)
        elif race.complete:
            yield from self._complete(current, race)

    def _restart(self, current: RoundState, engine: EngineId) -> Iterable[do.Decision]:
        for of in self._ledger.lost_with(engine):
            race = current.races[of.prompt]
            if not race.done or race.audit:
                yield self._start(race, of.index)

    def _top_up(self, current: RoundState) -> Iterable[do.Decision]:
        if current.waiting_for_prompts or current.stopped:
            return
        missing = self._config.prompts_per_step - current.taken(None) - current.undecided
        if missing <= 0 or current.draws >= self._config.dynamic_sampling.max_draws:
            return
        counts = domain_quotas(missing, self._settings.sizes, self._remaining)
        if counts:
            current.draws += 1
            yield self._draw(current, counts)


_LIVE = (Stage.RUNNING, Stage.FINISHED, Stage.GRADING)
