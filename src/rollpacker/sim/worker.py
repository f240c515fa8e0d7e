"""A simulated worker: a set of devices with engines, and a training replica."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from rollpacker.core.types import AttemptId, GroupPart, WorkerId
from rollpacker.sim.agenda import Agenda
from rollpacker.sim.costs import EngineCosts
from rollpacker.sim.decoder import Decoder, Request


@dataclass(frozen=True, slots=True)
class Task:
    """Gradient work: ``seconds`` on all of the worker's devices."""

    parts: tuple[GroupPart, ...]
    seconds: float


@dataclass(slots=True)
class Work:
    """What a worker has done in a step."""

    decode_s: float = 0.0
    """Engine-seconds of decoding and prefill, over the number of engines."""
    train_s: float = 0.0
    decode_steps: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    peak_kv: float = 0.0
    """Largest share of an engine's KV cache that was in use."""


class SimWorker:
    """Decodes while it has attempts, accumulates gradients while it has none.

    Attempts of a group go to one engine while the load allows, so that they share its prefill.

    Args:
        id: the worker's.
        agenda: time.
        costs: of one engine.
        engines: engines side by side on the worker's devices.
        max_running: most sequences that an engine decodes together.
        on_finished: takes finished attempts and their tokens.
        on_accumulated: takes a finished task.
    """

    def __init__(
        self,
        id: WorkerId,
        agenda: Agenda,
        costs: EngineCosts,
        *,
        engines: int,
        max_running: int,
        on_finished: Callable[[Iterable[tuple[int, int]]], None],
        on_accumulated: Callable[[WorkerId, Task], None],
    ) -> None:
        self.id = id
        self._agenda = agenda
        self._max_running = max_running
        self._on_finished = on_finished
        self._on_accumulated = on_accumulated
        self._place: dict[AttemptId, int] = {}
        self._load: list[int] = []
        self._tasks: deque[Task] = deque()
        self._training = False
        self._gate = 0.0
        self._dirty: set[int] = set()
        self._due: list[float] = []
        self._work = Work()
        self._decoders: list[Decoder] = []
        self.set_engines(costs, engines)

    @property
    def held(self) -> int:
        """Attempts that it decodes or that wait for it."""
        return len(self._place)

    def set_engines(self, costs: EngineCosts, engines: int) -> None:
        """Another layout of the devices; nothing may be held."""
        assert not self._place, "a worker's layout changes between rounds only"
        self._note_work()
        self._costs = costs
        self._engines = engines
        self._decoders = [Decoder(costs, max_running=self._max_running) for _ in range(engines)]
        self._load = [0] * engines
        self._due = [-1.0] * engines
        self._dirty.clear()

    def begin_step(self) -> None:
        """Forget the last step's work; engines start afresh."""
        assert not self._place
        assert not self._tasks
        self.set_engines(self._costs, self._engines)
        self._work = Work()
        self._gate = 0.0

    def submit(self, request: Request, attempt: AttemptId) -> None:
        """Decode an attempt."""
        place = min(range(len(self._load)), key=self._load.__getitem__)
        self._place[attempt] = place
        self._load[place] += 1
        self._decoders[place].submit(self._agenda.now, request)
        self._dirty.add(place)

    def abort(self, attempts: Collection[AttemptId]) -> dict[int, int]:
        """Stop attempts; their tokens so far. Those that it does not hold are left out."""
        by_engine: dict[int, list[AttemptId]] = {}
        for attempt in attempts:
            if attempt in self._place:
                by_engine.setdefault(self._leave(attempt), []).append(attempt)
        tokens: dict[int, int] = {}
        for place, ours in by_engine.items():
            tokens |= self._decoders[place].abort(self._agenda.now, ours)
            self._dirty.add(place)
        return tokens

    def _leave(self, attempt: AttemptId) -> int:
        place = self._place.pop(attempt)
        self._load[place] -= 1
        return place

    def settle(self) -> None:
        """All that happens at this instant has happened: plan what comes next."""
        while self._dirty:
            place = self._dirty.pop()
            due = self._decoders[place].next_event(self._agenda.now)
            if due is not None and due != self._due[place]:
                self._due[place] = due
                self._agenda.at(due, lambda place=place, due=due: self._advance(place, due))
        self._train()

    def _advance(self, place: int, due: float) -> None:
        if place >= len(self._due) or self._due[place] != due:
            return
        self._due[place] = -1.0
        self._dirty.add(place)
        done = self._decoders[place].advance(self._agenda.now)
        for attempt, _ in done:
            self._leave(AttemptId(attempt))
        if done:
            self._on_finished(done)
        else:
            self.settle()

    def accumulate(self, task: Task, not_before: float = 0.0) -> None:
        """Queue gradient work, to begin at ``not_before`` at the earliest."""
        self._gate = max(self._gate, not_before)
        self._tasks.append(task)

    def _train(self) -> None:
        if self._training or self._place or not self._tasks:
            return
        if self._agenda.now < self._gate:
            self._agenda.at(self._gate, self._train)
            return
        task = self._tasks.popleft()
        self._training = True
        self._work.train_s += task.seconds
        self._agenda.after(task.seconds, lambda: self._trained(task))

    def _trained(self, task: Task) -> None:
        self._training = False
        self._on_accumulated(self.id, task)
        self._train()

    def _note_work(self) -> None:
        for decoder in self._decoders:
            self._work.decode_s += decoder.busy_s / len(self._decoders)
            self._work.decode_steps = max(self._work.decode_steps, decoder.decode_steps)
            self._work.generated_tokens += decoder.generated_tokens
            self._work.preemptions += decoder.preemptions
            share = decoder.peak_kv / self._costs.capacity
            self._work.peak_kv = max(self._work.peak_kv, share)

    def end_step(self) -> Work:
        """What was done since ``begin_step``."""
        self._note_work()
        self._decoders = []
        work, self._work = self._work, Work()
        return work
