"""Performs a policy's decisions in simulated time, as the runtime does in real time."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from rollpacker.core import decisions as do
from rollpacker.core import events as ev
from rollpacker.core.pump import Pump, Record
from rollpacker.core.types import AttemptId, GroupPart, PromptId, RoundKind, WorkerId
from rollpacker.policy.rewards import AdaptiveTimeouts, TimeoutSettings
from rollpacker.policy.rollout import RolloutPolicy
from rollpacker.sim.agenda import Agenda
from rollpacker.sim.costs import EngineCosts, RewardCosts, TrainCosts
from rollpacker.sim.decoder import Request
from rollpacker.sim.grading import Grading, RewardKind
from rollpacker.sim.result import StepResult
from rollpacker.sim.worker import SimWorker, Task
from rollpacker.sim.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldCosts:
    """What everything costs on the simulated machines. Times in seconds.

    Args:
        workers: each owns the devices of the smallest engine.
        worker_devices: how many those are.
        engine: costs of an engine on so many devices.
        max_running: most sequences that an engine decodes together.
        replica: workers of a training replica.
        train: gradient work of one.
        start_s: once per rollout.
        sync_s: new weights to the engines.
        apply_s: reduce and update.
        rewards: of one reward.
        kinds: kind of reward of each domain.
        timeouts: of code rewards.
        reward_phase_s: when set, rewards are no service beside the rollout but a phase of this
            length after it.
    """

    workers: int
    worker_devices: int = 1
    engine: Callable[[int], EngineCosts]
    max_running: int = 1024
    replica: int = 1
    train: TrainCosts
    start_s: float = 0.0
    sync_s: float = 0.0
    apply_s: float = 0.0
    rewards: RewardCosts = field(default_factory=RewardCosts)
    kinds: dict[str, RewardKind] = field(default_factory=dict[str, RewardKind])
    timeouts: TimeoutSettings = field(default_factory=TimeoutSettings)
    reward_phase_s: float | None = None


@dataclass(slots=True)
class _Attempt:
    prompt: PromptId
    index: int
    worker: WorkerId
    request: Request
    decoding: bool = True


@dataclass(slots=True)
class _Step:
    """The record of the step in progress."""

    number: int
    start_s: float
    rollout_start_s: float = 0.0
    kind: RoundKind = RoundKind.FULL
    last_end_s: float = 0.0
    rollout_end_s: float = 0.0
    samples: int = 0
    kept_tokens: int = 0
    over: bool = False
    attempts: dict[AttemptId, _Attempt] = field(default_factory=dict[AttemptId, _Attempt])
    groups: dict[PromptId, tuple[AttemptId, ...]] = field(
        default_factory=dict[PromptId, tuple[AttemptId, ...]]
    )


class World:
    """Simulated machines under a real policy.

    Args:
        policy: decides.
        workload: prompts and lengths.
        costs: seconds of everything.
        cap: longest response, tokens.
        record: takes every event with its decisions (a journal's ``record``).
    """

    def __init__(
        self,
        policy: RolloutPolicy,
        workload: Workload,
        costs: WorldCosts,
        *,
        cap: int,
        record: Record | None = None,
    ) -> None:
        self._workload = workload
        self._costs = costs
        self._cap = cap
        self._agenda = Agenda()
        self._pump = Pump(policy, self._perform, lambda: self._agenda.now, record)
        self._engine = costs.engine(costs.worker_devices)
        self._workers = {
            WorkerId(number): SimWorker(
                WorkerId(number),
                self._agenda,
                self._engine,
                devices=costs.worker_devices,
                max_running=costs.max_running,
                on_finished=self._finished,
                on_accumulated=self._accumulated,
            )
            for number in range(costs.workers)
        }
        self._grading = Grading(
            self._agenda,
            costs.rewards,
            costs.kinds,
            AdaptiveTimeouts(costs.timeouts),
            load=self._decoding_share,
            on_graded=self._graded,
        )
        self._now = _Step(number=-1, start_s=0.0)
        self._touched: set[WorkerId] = set()
        self._stopped: dict[int, int] = {}
        self._true = Counter[str]()
        self._kept = Counter[str]()

    @property
    def kept_vs_true_len(self) -> float:
        """Mean length of what was kept over that of first visits, whatever became of them."""
        if not self._kept["samples"] or not self._true["samples"]:
            return 1.0
        kept = self._kept["tokens"] / self._kept["samples"]
        return kept / (self._true["tokens"] / self._true["samples"])

    def run_step(self, number: int) -> StepResult:
        """One synchronous step, from the weights' arrival to the next ones."""
        self._now = step = _Step(number=number, start_s=self._agenda.now)
        for worker in self._workers.values():
            worker.begin_step(self._engine, self._costs.worker_devices)
        self._agenda.after(self._costs.sync_s + self._costs.start_s, self._begin_rollout)
        while not step.over:
            assert self._agenda.run_next(), "nothing is left to happen, and the step is not over"
        return self._result(step)

    def _begin_rollout(self) -> None:
        step = self._now
        step.rollout_start_s = step.last_end_s = self._agenda.now
        self._post(
            ev.StepStarted(
                step=step.number,
                workers=tuple(self._workers),
                remaining=self._workload.remaining(),
            )
        )

    def _post(self, *events: ev.Event) -> None:
        self._pump.post(*events)
        while self._touched:
            self._workers[self._touched.pop()].settle()

    def _worker(self, id_: WorkerId) -> SimWorker:
        """A worker that is about to change; it plans anew when this instant is over."""
        self._touched.add(id_)
        return self._workers[id_]

    # What the policy decided ------------------------------------------------------------------

    def _perform(self, decisions: Sequence[do.Decision]) -> None:
        aborted: dict[WorkerId, list[AttemptId]] = defaultdict(list)
        for decision in decisions:
            match decision:
                case do.StartAttempt():
                    self._start(decision)
                case do.AbortAttempt():
                    self._abort(decision.attempt, aborted)
                case do.GradeAttempt():
                    self._grade(decision.attempt)
                case do.AccumulateGradients():
                    self._accumulate(decision)
                case do.AcceptGroup():
                    self._accept(decision)
                case _:
                    self._perform_rare(decision)
        for worker, attempts in aborted.items():
            tokens = self._worker(worker).abort(attempts)
            self._pump.post(
                *(ev.AttemptAborted(attempt=a, tokens=tokens.get(a, 0)) for a in attempts)
            )

    def _perform_rare(self, decision: do.Decision) -> None:
        step = self._now
        match decision:
            case do.BeginRound():
                step.kind = decision.round
            case do.DrawPrompts():
                drawn = self._workload.draw(decision.counts)
                self._pump.post(ev.PromptsDrawn(prompts=drawn))
            case do.DropGroup():
                self._workload.forget(decision.prompt)
            case do.DeferPrompt():
                pass
            case do.MigrateAttempts():
                self._migrate(decision)
            case do.RegroupWorkers():
                self._regroup(decision)
            case do.FinishRollout():
                self._end_rollout(step)
            case do.ApplyUpdate():
                self._agenda.after(self._costs.apply_s, lambda: self._applied(decision))
            case _:
                raise AssertionError(f"unknown decision {decision!r}")

    def _start(self, decision: do.StartAttempt) -> None:
        tokens = self._workload.length(self._now.number, decision.prompt, decision.index)
        if self._now.kind is not RoundKind.LONG:
            self._true["samples"] += 1
            self._true["tokens"] += min(tokens, self._cap)
        request = Request(
            attempt=decision.attempt,
            group=decision.prompt,
            prompt_tokens=self._workload.prompt_tokens,
            target_tokens=min(tokens, self._cap),
        )
        self._now.attempts[decision.attempt] = _Attempt(
            decision.prompt, decision.index, decision.worker, request
        )
        self._worker(decision.worker).submit(request, decision.attempt)

    def _abort(self, attempt: AttemptId, aborted: dict[WorkerId, list[AttemptId]]) -> None:
        known = self._now.attempts[attempt]
        if known.decoding:
            aborted[known.worker].append(attempt)
            return
        self._grading.cancel(attempt)
        tokens = known.request.target_tokens
        self._pump.post(ev.AttemptAborted(attempt=attempt, tokens=tokens))

    def _grade(self, attempt: AttemptId) -> None:
        known = self._now.attempts[attempt]
        if self._costs.reward_phase_s is not None:
            self._agenda.after(0.0, lambda: self._graded(attempt))
            return
        domain = self._workload.domain(known.prompt)
        run_s = 0.0
        if self._costs.kinds.get(domain) == "code":
            run_s = self._workload.run_s(self._now.number, known.prompt, known.index)
        self._grading.submit(attempt, domain, known.prompt, run_s)

    def _accept(self, decision: do.AcceptGroup) -> None:
        step = self._now
        step.groups[decision.prompt] = decision.attempts
        tokens = sum(step.attempts[a].request.target_tokens for a in decision.attempts)
        step.samples += len(decision.attempts)
        step.kept_tokens += tokens
        self._kept["samples"] += len(decision.attempts)
        self._kept["tokens"] += tokens
        self._workload.forget(decision.prompt)

    def _accumulate(self, decision: do.AccumulateGradients) -> None:
        task = Task(decision.parts, self._gradient_s(decision.parts))
        gate = 0.0
        if self._costs.reward_phase_s is not None:
            gate = self._now.rollout_end_s + self._costs.reward_phase_s
        self._worker(decision.worker).accumulate(task, gate)

    def _gradient_s(self, parts: Iterable[GroupPart]) -> float:
        step = self._now
        return sum(
            self._costs.train.sequence_s(step.attempts[attempt].request.target_tokens)
            for part in parts
            for attempt in step.groups[part.prompt][part.start : part.stop]
        )

    def _end_rollout(self, step: _Step) -> None:
        step.rollout_end_s = self._agenda.now
        pressure = [worker.pressure() for worker in self._workers.values()]
        self._pump.post(
            ev.RoundMeasured(
                step=step.number,
                preemptions=sum(preemptions for preemptions, _ in pressure),
                peak_kv=max(peak for _, peak in pressure),
                seconds=step.rollout_end_s - step.rollout_start_s,
            )
        )

    def _regroup(self, decision: do.RegroupWorkers) -> None:
        for member in decision.members:
            self._stopped |= self._worker(member).stop()
        devices = len(decision.members) * self._costs.worker_devices
        self._worker(decision.lead).set_engine(self._costs.engine(devices), devices)

    def _migrate(self, decision: do.MigrateAttempts) -> None:
        tokens = self._worker(decision.source).abort(decision.attempts)
        for attempt in decision.attempts:
            if attempt in self._stopped:
                tokens[attempt] = self._stopped.pop(attempt)
        for attempt in decision.attempts:
            known = self._now.attempts[attempt]
            done = tokens.get(attempt)
            if done is None or not known.decoding:
                continue
            old = known.request
            if done >= old.target_tokens:
                self._finish(attempt)
                continue
            known.worker = decision.target
            request = Request(
                attempt=attempt,
                group=old.group,
                prompt_tokens=old.prompt_tokens,
                target_tokens=old.target_tokens,
                generated=done,
            )
            self._worker(decision.target).submit(request, attempt)
            self._pump.post(
                ev.AttemptMigrated(attempt=attempt, worker=decision.target, tokens=done)
            )

    # What happened ----------------------------------------------------------------------------

    def _finished(self, done: Iterable[tuple[int, int]]) -> None:
        for attempt, _ in done:
            self._finish(AttemptId(attempt))
        self._post()

    def _finish(self, attempt: AttemptId) -> None:
        known = self._now.attempts[attempt]
        known.decoding = False
        self._touched.add(known.worker)
        self._now.last_end_s = self._agenda.now
        tokens = known.request.target_tokens
        self._pump.post(
            ev.AttemptFinished(
                attempt=attempt,
                tokens=tokens,
                finish_reason="length" if tokens >= self._cap else "stop",
            )
        )

    def _graded(self, attempt: AttemptId) -> None:
        # Rewards differ within every group, so that each has gradients.
        reward = float(self._now.attempts[attempt].index % 2)
        self._post(ev.AttemptGraded(attempt=attempt, reward=reward))

    def _accumulated(self, worker: WorkerId, task: Task) -> None:
        self._post(
            ev.GradientsAccumulated(worker=worker, parts=task.parts, seconds=round(task.seconds, 6))
        )

    def _applied(self, decision: do.ApplyUpdate) -> None:
        self._post(ev.UpdateApplied(step=decision.step, update=decision.update))
        self._now.over = decision.last

    def _decoding_share(self) -> float:
        busy = sum(worker.held > 0 for worker in self._workers.values())
        return busy / len(self._workers)

    def _result(self, step: _Step) -> StepResult:
        work = [worker.end_step() for worker in self._workers.values()]
        end = self._agenda.now
        seconds = end - step.start_s
        devices = self._costs.worker_devices
        replica = self._costs.replica * devices
        busy = sum(w.decode_s + w.train_s * replica for w in work)
        return StepResult(
            step=step.number,
            kind=step.kind,
            step_s=seconds,
            rollout_s=step.rollout_end_s - step.rollout_start_s,
            grade_wait_s=step.rollout_end_s - step.last_end_s,
            train_s=end - step.rollout_end_s,
            samples=step.samples,
            kept_tokens=step.kept_tokens,
            decoded_tokens=sum(w.generated_tokens for w in work),
            decode_steps=max(w.decode_steps for w in work),
            preemptions=sum(w.preemptions for w in work),
            peak_kv=max(w.peak_kv for w in work),
            bubble=1.0 - busy / (len(work) * devices * seconds) if seconds > 0 else 0.0,
        )
