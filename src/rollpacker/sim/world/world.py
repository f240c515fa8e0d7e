"""Perform a policy's decisions in simulated time, as the runtime does in real time."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rollpacker.core import decisions as do
from rollpacker.core import events as ev
from rollpacker.core.pump import Pump, Record
from rollpacker.core.types import AttemptId, EngineId, FinishReason, GroupPart, PromptId, RoundKind
from rollpacker.policy.grading import AdaptiveTimeouts
from rollpacker.policy.rollout import RolloutPolicy
from rollpacker.sim.costs.costs import Rule
from rollpacker.sim.workload.workload import TurnScript, Workload, at_most
from rollpacker.sim.world.agenda import Agenda
from rollpacker.sim.world.grading import SimulatedGrading
from rollpacker.sim.world.machines import SLEEP_S, WorldCosts
from rollpacker.sim.world.step import SimulatedAttempt, SimulatedStep, StepResult, step_result
from rollpacker.sim.world.worker import GradientWork, SimWorker

# --- Attempts on the simulated engines


class SimulatedDecoding:
    """Starts, stops and moves attempts, and turns their results into events.

    While an attempt's environment works, decisions about the attempt take effect at once. ``touch``
    is called with a worker that is about to change, ``settle`` after an event that no decision
    caused.
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
        self._now = step

    # What is to be done ------------------------------------------------------------------------

    def start(self, attempt: SimulatedAttempt) -> None:
        if attempt.course.so_far == attempt.course.tokens:
            self._post(self._finished(attempt))
        elif attempt.course.opens:
            self._act(attempt)
            self._wait(attempt)
        else:
            self._touch(self._engines[attempt.engine]).submit(attempt.course)

    def step_environment(self, decision: do.StepEnvironment) -> None:
        self._wait(self._now.attempts[decision.attempt])

    def go_on(self, decision: do.ContinueAttempt) -> None:
        known = self._now.attempts[decision.attempt]
        self._leave(known)
        known.engine, known.decoding = decision.engine, True
        self._touch(self._engines[known.engine]).submit(known.course)

    def abort(self, attempt: SimulatedAttempt) -> None:
        if attempt.acting:
            self._leave(attempt)
            self._post(self._aborted(attempt, attempt.course.before))
            return
        if attempt.target is None:
            self._stopping[attempt.engine].append(attempt.course.attempt)
        attempt.stopping, attempt.target = True, None

    def migrate(self, decision: do.MigrateAttempts) -> None:
        for attempt in decision.attempts:
            known = self._now.attempts[attempt]
            if known.acting:
                self._post(self._moved(known, decision.target))
            elif known.decoding and not known.stopping:
                if known.target is None:
                    self._stopping[known.engine].append(attempt)
                known.target = decision.target

    def send(self) -> None:
        stopping, self._stopping = self._stopping, defaultdict(list)
        for engine, attempts in stopping.items():
            self._touch(self._engines[engine]).stop(attempts)

    def form(self, decision: do.FormEngine) -> None:
        self._forming[decision.engine] = decision.members
        self.form_idle()
        if decision.engine in self._forming:
            self._engines[decision.engine].form()

    def form_idle(self) -> None:
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
        attempt.decoding, attempt.acting = False, True
        self._engines[attempt.engine].wait(attempt.course.attempt)

    def _leave(self, attempt: SimulatedAttempt) -> None:
        attempt.acting = False
        self._engines[attempt.engine].leave(attempt.course.attempt)

    def _wait(self, attempt: SimulatedAttempt) -> None:
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
        self._post(*map(self._end, done))
        if stopped:
            self._post(*(self._stop(attempt, tokens) for attempt, tokens in stopped.items()))

    def _end(self, id_: AttemptId) -> ev.Event:
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
        attempt = self._now.attempts[id_]
        if attempt.target is None:
            return self._aborted(attempt, tokens)
        attempt.engine, attempt.target = attempt.target, None
        self._touch(self._engines[attempt.engine]).submit(attempt.course)
        return ev.AttemptMigrated(attempt=id_, engine=attempt.engine, tokens=tokens)


class World:
    """Simulated machines under a real policy. ``measure``: report a round's preemptions to the
    policy. ``record`` takes every event with its decisions."""

    def __init__(
        self,
        policy: RolloutPolicy,
        workload: Workload,
        costs: WorldCosts,
        *,
        measure: bool = False,
        record: Record | None = None,
    ) -> None:
        self._workload = workload
        self._costs = costs
        self._cap = policy.settings.cap
        self._measure = measure
        self._train_all = policy.settings.rules.train_all
        self._agenda = Agenda()
        self._pump = Pump(policy, self._perform, lambda: self._agenda.now, record)
        self._engine = costs.engine(costs.fleet.tp)
        self._workers: list[SimWorker] = []
        self._engines = {engine: self._hire() for engine in costs.fleet.engines}
        self._replicas = {
            replica: self._engines[beside[0]] if beside else self._hire()
            for replica, beside in costs.fleet.beside.items()
        }
        self._decoding = SimulatedDecoding(
            self._agenda,
            self._engines,
            costs=costs,
            cap=self._cap,
            touch=self._touch,
            post=self._pump.post,
            settle=self._post,
        )
        self._grading = SimulatedGrading(
            self._agenda,
            costs.rewards,
            costs.kinds,
            AdaptiveTimeouts(costs.timeouts),
            load=self._busy_share,
            on_graded=self._graded,
        )
        self._performers = self._performed_by()
        self._now = SimulatedStep(number=-1, start_s=0.0)
        self._touched: set[int] = set()
        self._settling = False
        self._carries = policy.settings.rollout.tail_batching.carries
        self._carried: dict[tuple[PromptId, int], SimulatedAttempt] = {}
        self._true = Counter[str]()
        self._kept = Counter[str]()

    def _hire(self) -> SimWorker:
        worker = SimWorker(
            len(self._workers),
            self._agenda,
            self._engine,
            devices=self._costs.fleet.tp,
            max_running=self._costs.max_running,
            tool_kv=self._costs.tool_kv,
            on_ended=self._ended,
            on_accumulated=self._accumulated,
        )
        self._workers.append(worker)
        return worker

    @property
    def kept_vs_true_len(self) -> float:
        """Mean length of kept responses over that of all first visits."""
        if not self._kept["samples"] or not self._true["samples"]:
            return 1.0
        kept = self._kept["tokens"] / self._kept["samples"]
        return kept / (self._true["tokens"] / self._true["samples"])

    def run_step(self, number: int) -> StepResult:
        self._now = step = SimulatedStep(number=number, start_s=self._agenda.now)
        self._decoding.begin(step)
        for worker in self._workers:
            worker.begin_step(self._engine, self._costs.fleet.tp)
        self._agenda.after(self._costs.sync_s + self._costs.start_s, self._begin_rollout)
        while not step.over:
            assert self._agenda.run_next(), "nothing is left to happen, and the step is not over"
        work = [worker.end_step() for worker in self._workers]
        return step_result(step, work, self._agenda.now, self._costs.fleet)

    def _begin_rollout(self) -> None:
        step = self._now
        step.rollout_start_s = step.last_end_s = self._agenda.now
        self._post(
            ev.StepStarted(
                step=step.number,
                engines=tuple(self._engines),
                replicas=tuple(self._replicas),
                remaining=self._workload.remaining(),
            )
        )

    def _post(self, *events: ev.Event) -> None:
        self._pump.post(*events)
        if self._touched and not self._settling:
            self._settling = True
            self._agenda.after(0.0, self._settle)

    def _settle(self) -> None:
        self._settling = False
        touched, self._touched = sorted(self._touched), set()
        for worker in touched:
            self._workers[worker].settle()
        self._grading.reload()

    def _touch(self, worker: SimWorker) -> SimWorker:
        self._touched.add(worker.id)
        return worker

    # What the policy decided ------------------------------------------------------------------

    def _performed_by(self) -> dict[type, Callable[[Any], None]]:
        return {
            do.AbortAttempt: self._abort,
            do.AcceptGroup: self._accept,
            do.AccumulateGradients: self._accumulate,
            do.ApplyUpdate: self._apply,
            do.BeginRound: self._begin_round,
            do.ContinueAttempt: self._decoding.go_on,
            do.DeferPrompt: self._defer,
            do.DrawPrompts: self._draw,
            do.DropGroup: self._drop,
            do.FinishRollout: self._end_rollout,
            do.FormEngine: self._decoding.form,
            do.GradeAttempt: self._grade,
            do.MigrateAttempts: self._decoding.migrate,
            do.PublishWeights: self._publish,
            do.SleepEngine: self._sleep,
            do.Speculate: self._speculate,
            do.StartAttempt: self._start,
            do.StepEnvironment: self._decoding.step_environment,
        }

    def _perform(self, decisions: Sequence[do.Decision]) -> None:
        for decision in decisions:
            self._performers[type(decision)](decision)
        self._decoding.send()

    def _begin_round(self, decision: do.BeginRound) -> None:
        self._now.kind = decision.round

    def _draw(self, decision: do.DrawPrompts) -> None:
        self._pump.post(ev.PromptsDrawn(prompts=self._workload.draw(decision.counts)))

    def _start(self, decision: do.StartAttempt) -> None:
        attempt = self._carried.get((decision.prompt, decision.index))
        if attempt is None:
            attempt = self._fresh(decision)
        else:
            course = attempt.course.go_on(decision.attempt)
            attempt = SimulatedAttempt(
                decision.prompt,
                decision.index,
                decision.engine,
                course,
                reward=attempt.reward,
                born=attempt.born,
                stale=course.so_far,
                graded=attempt.graded,
            )
        self._now.attempts[decision.attempt] = attempt
        self._decoding.start(attempt)

    def _fresh(self, decision: do.StartAttempt) -> SimulatedAttempt:
        number = self._now.number
        turns = self._workload.turns(number, decision.prompt, decision.index)
        turns = at_most(turns, self._cap)
        course = TurnScript(decision.attempt, decision.prompt, self._workload.prompt_tokens, turns)
        self._now.longest_tool_s = max(self._now.longest_tool_s, course.tool_s)
        if self._carries or self._now.kind is not RoundKind.LONG:
            self._true["samples"] += 1
            self._true["tokens"] += course.tokens
        return SimulatedAttempt(
            decision.prompt,
            decision.index,
            decision.engine,
            course,
            reward=self._workload.reward(number, decision.prompt, decision.index),
            born=number,
        )

    def _abort(self, decision: do.AbortAttempt) -> None:
        attempt = decision.attempt
        known = self._now.attempts[attempt]
        if known.decoding or known.acting:
            self._decoding.abort(known)
            return
        self._grading.cancel(attempt)
        self._pump.post(ev.AttemptAborted(attempt=attempt, tokens=known.course.tokens))

    def _grade(self, decision: do.GradeAttempt) -> None:
        attempt = decision.attempt
        known = self._now.attempts[attempt]
        if self._costs.reward_phase_s is not None or known.graded:
            self._agenda.after(0.0, lambda: self._graded(attempt))
            return
        domain = self._workload.domain(known.prompt)
        run_s = 0.0
        if self._costs.kinds.get(domain) == "code":
            run_s = self._workload.run_s(known.born, known.prompt, known.index)
        self._grading.submit(attempt, domain, known.prompt, run_s)

    def _accept(self, decision: do.AcceptGroup) -> None:
        step = self._now
        step.groups[decision.prompt] = decision.attempts
        if decision.informative or self._train_all:
            step.trained.add(decision.prompt)
        tokens = sum(step.attempts[a].course.tokens for a in decision.attempts)
        step.samples += len(decision.attempts)
        step.kept_tokens += tokens
        self._kept["samples"] += len(decision.attempts)
        self._kept["tokens"] += tokens
        self._workload.forget(decision.prompt)

    def _accumulate(self, decision: do.AccumulateGradients) -> None:
        task = GradientWork(decision.replica, decision.parts, self._gradient_s(decision.parts))
        gate = 0.0
        if self._costs.reward_phase_s is not None:
            gate = self._now.rollout_end_s + self._costs.reward_phase_s
        self._touch(self._replicas[decision.replica]).accumulate(task, gate)

    def _gradient_s(self, parts: Iterable[GroupPart]) -> float:
        """Groups that the policy calls uninformative have no gradient."""
        step, train = self._now, self._costs.train
        return train.task_s + sum(
            train.sequence_s(step.attempts[attempt].course.context_tokens)
            for part in parts
            if part.prompt in step.trained
            for attempt in step.groups[part.prompt][part.start : part.stop]
        )

    def _drop(self, decision: do.DropGroup) -> None:
        self._workload.forget(decision.prompt)

    def _defer(self, decision: do.DeferPrompt) -> None:
        self._now.deferred.add(decision.prompt.id)

    def _end_rollout(self, decision: do.FinishRollout) -> None:
        del decision
        step = self._now
        step.rollout_end_s = self._agenda.now
        self._carried = step.carried() if self._carries else {}
        if not self._measure:
            return
        self._pump.post(
            ev.RoundMeasured(
                step=step.number,
                preemptions=sum(worker.pressure()[0] for worker in self._engines.values()),
            )
        )

    def _speculate(self, decision: do.Speculate) -> None:
        rule = Rule(
            decision.below, decision.most, decision.free, decision.row_cost, self._costs.ahead
        )
        self._touch(self._engines[decision.engine]).speculate(rule)

    def _sleep(self, decision: do.SleepEngine) -> None:
        self._agenda.after(SLEEP_S, lambda: self._post(ev.EngineSlept(engine=decision.engine)))

    def _apply(self, decision: do.ApplyUpdate) -> None:
        """Without gradients, the update takes no time."""
        if not self._now.summed:
            self._applied(decision)
            return
        self._now.summed = False
        self._agenda.after(self._costs.apply_s, lambda: self._applied(decision))

    def _publish(self, decision: do.PublishWeights) -> None:
        """The next step waits for the weights, so their cost is part of it."""
        self._pump.post(ev.WeightsPublished(version=decision.version))
        self._now.over = True

    # What happened ----------------------------------------------------------------------------

    def _ended(
        self, worker: int, done: Sequence[AttemptId], stopped: Mapping[AttemptId, int]
    ) -> None:
        self._touched.add(worker)
        self._decoding.ended(done, stopped)
        if (driver := self._costs.driver) is not None:
            self._take_core((len(done) + len(stopped)) * driver.ended_s)
        self._decoding.form_idle()
        self._post()

    def _graded(self, attempt: AttemptId) -> None:
        known = self._now.attempts[attempt]
        known.graded = True
        self._post(ev.AttemptGraded(attempt=attempt, reward=known.reward))
        if self._costs.driver is not None and self._costs.reward_phase_s is None:
            self._take_core(self._costs.driver.graded_s)

    def _take_core(self, cpu_s: float) -> None:
        """Driver and graders compute. Workers without a free core are delayed."""
        assert self._costs.driver is not None
        busy = [worker for worker in self._workers if worker.busy]
        delay_s = self._costs.driver.delay_s(len(busy), cpu_s)
        if delay_s:
            for worker in busy:
                self._touch(worker).put_off(delay_s)
            self._post()

    def _accumulated(self, worker: int, task: GradientWork) -> None:
        self._touched.add(worker)
        seconds = round(task.seconds, 6)
        self._now.summed = True
        done = ev.GradientsAccumulated(replica=task.replica, parts=task.parts, seconds=seconds)
        self._post(done)

    def _applied(self, decision: do.ApplyUpdate) -> None:
        self._post(ev.UpdateApplied(step=decision.step, update=decision.update))

    def _busy_share(self) -> float:
        """Share of busy devices. Gradients slow the judge as much as decoding does."""
        fleet = self._costs.fleet
        decoding = sum(worker.devices for worker in self._workers if worker.decoding)
        training = sum(
            len(fleet.replicas[replica])
            for replica, worker in self._replicas.items()
            if worker.training
        )
        return min(1.0, (decoding + training) / len(fleet.devices))
