"""A simulated worker: an engine, a training replica, or both in turn on the same devices."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rollpacker.core.types import NO_DRAFTS, AttemptId, Drafted, GroupPart, ReplicaId
from rollpacker.sim.costs.costs import EngineCosts, Rule
from rollpacker.sim.workload.workload import ToolKv, TurnScript
from rollpacker.sim.world.agenda import Agenda
from rollpacker.sim.world.decoder import Decoder


@dataclass(frozen=True, slots=True)
class GradientWork:
    """Gradient work: ``seconds`` on a training replica."""

    replica: ReplicaId
    parts: tuple[GroupPart, ...]
    seconds: float


@dataclass(slots=True)
class StepWork:
    """A worker's work in one step."""

    decode_s: float = 0.0  # device-seconds of decoding and prefill
    train_s: float = 0.0
    decode_steps: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    peak_kv: float = 0.0
    tool_wait_s: float = 0.0  # device-seconds in which all attempts of the engine waited for tools


class SimWorker:
    """Decodes while it has attempts, and computes gradients while it has none.

    A command takes effect at the end of the decode step or gradient task in flight, or when the
    engine is formed. ``on_ended`` takes attempts whose turn ended in a step, and those stopped at
    its end with their tokens.
    """

    def __init__(
        self,
        id: int,
        agenda: Agenda,
        costs: EngineCosts,
        *,
        devices: int,
        max_running: int,
        tool_kv: ToolKv = "cached",
        on_ended: Callable[[int, Sequence[AttemptId], Mapping[AttemptId, int]], None],
        on_accumulated: Callable[[int, GradientWork], None],
    ) -> None:
        self.id = id
        self._agenda = agenda
        self._max_running = max_running
        self._tool_kv: ToolKv = tool_kv
        self._on_ended = on_ended
        self._on_accumulated = on_accumulated
        self._attempts: dict[AttemptId, TurnScript] = {}
        self._at_tools: set[AttemptId] = set()
        self._quiet_since: float | None = None
        self._stopping: list[AttemptId] = []
        self._stop_at = math.inf
        self._inbox: list[Callable[[], None]] = []
        self._forming = False
        self._tasks: deque[GradientWork] = deque()
        self.training = False
        self._trained_at = 0.0
        self._gate = 0.0
        self._due: float | None = None
        self._work = StepWork()
        self._costs = costs
        self.devices = devices
        self._decoder, self._told = self._engine(), NO_DRAFTS

    def _engine(self) -> Decoder:
        return Decoder(self._costs, max_running=self._max_running, tool_kv=self._tool_kv)

    @property
    def held(self) -> int:
        return len(self._attempts)

    @property
    def decoding(self) -> bool:
        return bool(self._attempts)

    @property
    def busy(self) -> bool:
        return self.decoding or self.training or bool(self._tasks)

    @property
    def idle(self) -> bool:
        return not (self._attempts or self._inbox or self._forming)

    def form(self) -> None:
        self._forming = True

    def set_engine(self, costs: EngineCosts, devices: int) -> None:
        """Change the engine and its number of devices. The worker must hold no attempt."""
        assert not self._attempts, "attempts are moved before their engine changes"
        self._note_work()
        self._count_quiet()
        self._costs, self.devices = costs, devices
        self._decoder, self._told = self._engine(), NO_DRAFTS
        self._due = None
        self._forming = False
        self._open()

    def _open(self) -> None:
        inbox, self._inbox = self._inbox, []
        for command in inbox:
            command()

    def begin_step(self, costs: EngineCosts, devices: int) -> None:
        assert not self._tasks
        self.set_engine(costs, devices)
        self._work = StepWork()
        self._gate = 0.0

    def speculate(self, rule: Rule) -> None:
        if self._forming:
            self._inbox.append(lambda: self.speculate(rule))
        else:
            self._decoder.speculate(self._agenda.now, rule)

    def drafts(self) -> Drafted:
        """Return the drafts' results, in whole tokens, since the last call."""
        decoder, told = self._decoder, self._told
        now = Drafted(int(decoder.verifications), int(decoder.drafted), int(decoder.accepted))
        self._told = now
        return Drafted(*(new - old for new, old in zip(now, told, strict=True)))

    def submit(self, course: TurnScript) -> None:
        if self.training or self._forming:
            self._inbox.append(lambda: self.submit(course))
            return
        self._attempts[course.attempt] = course
        self._decoder.submit(self._agenda.now, course.request())
        self._count_quiet()

    def wait(self, attempt: AttemptId) -> None:
        self._at_tools.add(attempt)
        self._count_quiet()

    def leave(self, attempt: AttemptId) -> None:
        self._at_tools.remove(attempt)
        self._count_quiet()

    def _count_quiet(self) -> None:
        now = self._agenda.now
        if self._quiet_since is not None:
            self._work.tool_wait_s += (now - self._quiet_since) * self.devices
            self._quiet_since = None
        if self._at_tools and not self._attempts and not self.training:
            self._quiet_since = now

    def stop(self, attempts: Sequence[AttemptId]) -> None:
        """Stop attempts at the end of the step in flight, in which they may finish."""
        ours = [attempt for attempt in attempts if attempt in self._attempts]
        if ours and not self._stopping:
            self._stop_at = self._decoder.pause(self._agenda.now)
        self._stopping += ours
        if len(ours) < len(attempts):
            rest = [attempt for attempt in attempts if attempt not in self._attempts]
            assert self._inbox, "an attempt that is to stop was never submitted"
            self._inbox.append(lambda: self.stop(rest))

    def put_off(self, seconds: float) -> None:
        """Delay work, because others use its core. Call ``settle`` at the end of this instant."""
        if self.training:
            self._trained_at += seconds
            self._work.train_s += seconds
            return
        self._decoder.put_off(self._agenda.now, seconds)
        if self._stopping:
            self._stop_at += seconds

    def settle(self) -> None:
        """Plan the next event, after all events of this instant."""
        due = self._decoder.next_event(self._agenda.now)
        if self._stopping:
            due = self._stop_at if due is None else min(due, self._stop_at)
        if due is not None and due != self._due:
            self._due = due
            self._agenda.at(due, lambda: self._advance(due))
        self._train()

    def _advance(self, due: float) -> None:
        if self._due != due:
            return
        self._due = None
        over = [AttemptId(a) for a, _ in self._decoder.advance(self._agenda.now)]
        for attempt in over:
            del self._attempts[attempt]
        stopped = self._stop_due()
        if over or stopped:
            self._count_quiet()
            self._on_ended(self.id, over, stopped)
        else:
            self.settle()

    def _stop_due(self) -> dict[AttemptId, int]:
        if not self._stopping or self._stop_at > self._agenda.now:
            return {}
        ours = [attempt for attempt in self._stopping if attempt in self._attempts]
        self._stopping = []
        left = self._decoder.abort(self._agenda.now, ours)
        return {attempt: self._drop(attempt, left[attempt]) for attempt in ours}

    def _drop(self, attempt: AttemptId, generated: int) -> int:
        course = self._attempts.pop(attempt)
        course.generated = generated
        return course.before + generated

    def accumulate(self, task: GradientWork, not_before: float = 0.0) -> None:
        self._gate = max(self._gate, not_before)
        self._tasks.append(task)

    def _train(self) -> None:
        if self.training or self._attempts or self._forming or not self._tasks:
            return
        if self._agenda.now < self._gate:
            self._agenda.at(self._gate, self._train)
            return
        task = self._tasks.popleft()
        self.training = True
        self._count_quiet()
        self._work.train_s += task.seconds
        self._trained_at = self._agenda.now + task.seconds
        self._agenda.at(self._trained_at, lambda: self._trained(task))

    def _trained(self, task: GradientWork) -> None:
        if self._agenda.now < self._trained_at:
            self._agenda.at(self._trained_at, lambda: self._trained(task))
            return
        self._on_accumulated(self.id, task)
        self.training = False
        self._count_quiet()
        self._open()

    def pressure(self) -> tuple[int, float]:
        work, decoder = self._work, self._decoder
        peak = decoder.peak_kv / self._costs.capacity
        return work.preemptions + decoder.preemptions, max(work.peak_kv, peak)

    def _note_work(self) -> None:
        work, decoder = self._work, self._decoder
        work.decode_s += decoder.busy_s * self.devices
        work.decode_steps = max(work.decode_steps, decoder.steps)
        work.generated_tokens += decoder.generated_tokens
        work.preemptions, work.peak_kv = self.pressure()

    def end_step(self) -> StepWork:
        self.set_engine(self._costs, self.devices)
        work, self._work = self._work, StepWork()
        return work
