"""One engine replica with continuous batching, exact in few events.

All running sequences gain one token per step, and a step's time is affine in their context. So
``n`` steps cost ``n * step_s(B, K + B * n / 2)``, and each admission, finish, preemption or abort
costs O(log n).

Rules, as in vLLM: first-come admission while ``K + 8 B + need <= 0.99 capacity`` (or nothing runs)
and ``B < max_running``. If the next tokens do not fit, the latest admitted sequence returns to the
head of the queue and is recomputed. Nothing is admitted in that step.

A turn with a successor may leave its KV behind (``ToolKv``). A change between step boundaries takes
effect at the end of the step in flight. An attempt aborted in flight keeps the tokens of whole
steps only.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Collection
from heapq import heappop, heappush

from rollpacker.sim.costs.costs import ADMIT_SHARE, EngineCosts, Pace, Rule, ahead_terms
from rollpacker.sim.workload.workload import Live, SimulatedRequest, ToolKv


class Decoder:
    """State of one replica, without a clock. Times never decrease.

    After every call, ask ``next_event`` and call ``advance`` at that time. A step in flight at a
    change is counted at once. With speculative decoding ``decode_steps`` counts the tokens of each
    sequence, and ``verifications``, ``drafted`` and ``accepted`` are averages.
    """

    def __init__(self, costs: EngineCosts, *, max_running: int, tool_kv: ToolKv = "cached") -> None:
        if max_running < 1:
            raise ValueError(f"max_running={max_running} must be at least 1")
        self._costs = costs
        self._capacity = costs.capacity
        self._slack = costs.slack
        self._admit_limit = ADMIT_SHARE * costs.capacity
        self._max_running = max_running
        self._terms: dict[int, tuple[float, float]] = {}
        self._held: dict[int, Live] = {}
        self._running: dict[int, Live] = {}
        self._waiting: deque[Live] = deque()
        self._heap: list[tuple[int, int, Live]] = []
        self._groups: dict[str, int] = {}
        self._prefilled: set[str] = set()
        self._tool_kv: ToolKv = tool_kv
        self._cache: OrderedDict[int, int] = OrderedDict()
        self._cached = 0
        self._done: list[tuple[int, int]] = []
        self._boundary = 0.0
        self._in_flight_until = 0.0
        self._end: float | None = None
        self._end_steps = 0
        self._changed = False
        self._context = 0
        self._tickets = 0
        self.preemptions = 0
        self.generated_tokens = 0
        self.decode_steps = 0
        self.peak_kv = 0
        self.busy_s = 0.0
        self.verifications = self.drafted = self.accepted = 0.0
        self._rule: Rule | None = None
        self._saved = 0.0

    def speculate(self, now: float, rule: Rule) -> None:
        """Decode speculatively, from the end of the step in flight on. Each sequence then gains
        several tokens per step. Steps here are then tokens, each a part of a step."""
        self._run_to(now)
        self._stop_at(now)
        self._rule, self._end = rule, None
        self._terms.clear()

    @property
    def steps(self) -> int:
        return round(self.decode_steps - self._saved)

    @property
    def waiting(self) -> int:
        return len(self._held) - len(self._running)

    def submit(self, now: float, request: SimulatedRequest) -> None:
        """Queue a request. Raises ``ValueError`` if it can never fit or its id is held."""
        self._check(request)
        self._run_to(now)
        live = Live(
            attempt=request.attempt,
            group=request.group,
            shared=request.prompt_tokens,
            prompt=request.prompt_tokens + request.earlier,
            returns=request.returns,
            target=request.target_tokens,
            generated=request.generated,
        )
        if self._changed or not self._waiting:
            self._stop_at(now)
            self._changed = True
            self._end = None
        self._held[live.attempt] = live
        self._groups[live.group] = self._groups.get(live.group, 0) + 1
        self._waiting.append(live)

    def _check(self, request: SimulatedRequest) -> None:
        if request.attempt in self._held:
            raise ValueError(f"attempt {request.attempt} is already held")
        if not 0 <= request.generated < request.target_tokens:
            raise ValueError(
                f"attempt {request.attempt}: target_tokens must exceed generated, "
                f"got {request.target_tokens} and {request.generated}"
            )
        most = request.prompt_tokens + request.earlier + request.target_tokens + self._slack
        if most > self._capacity:
            raise ValueError(
                f"attempt {request.attempt} needs {most:.0f} tokens of KV cache, "
                f"the engine has {self._capacity:.0f}: raise its tensor-parallel size"
            )

    def pause(self, now: float) -> float:
        """Return the time at which a present change takes effect: the end of the step in flight,
        or now."""
        self._run_to(now)
        self._stop_at(now)
        return max(now, self._boundary)

    def put_off(self, now: float, seconds: float) -> None:
        self._run_to(now)
        if self._running:
            self._boundary += seconds
            self.busy_s += seconds
            if self._end is not None:
                self._end += seconds

    def abort(self, now: float, attempts: Collection[int]) -> dict[int, int]:
        """Drop attempts, and return their generated tokens by id. Unknown and delivered ids are
        left out."""
        self._run_to(now)
        tokens = {attempt: count for attempt, count in self._done if attempt in attempts}
        if tokens:
            self._done = [item for item in self._done if item[0] not in tokens]
        lives = [self._held[attempt] for attempt in attempts if attempt in self._held]
        if not lives:
            return tokens
        self._stop_at(now)
        in_flight = now < self._in_flight_until
        for live in lives:
            tokens[live.attempt] = self._drop(live, in_flight)
        self._changed = True
        self._end = None
        if not self._running:
            self._heap.clear()
        return tokens

    def _drop(self, live: Live, in_flight: bool) -> int:
        if live.attempt in self._running:
            generated = self.decode_steps - live.start
            self._leave(live, generated)
            if in_flight:
                generated -= 1
                self.generated_tokens -= 1
        else:
            generated = live.generated
            live.gone = True
        self._release(live)
        return generated

    def _leave(self, live: Live, generated: int) -> None:
        del self._running[live.attempt]
        self._context -= live.prompt + generated

    def _release(self, live: Live) -> None:
        del self._held[live.attempt]
        left = self._groups[live.group] - 1
        if left:
            self._groups[live.group] = left
        else:
            del self._groups[live.group]
            self._prefilled.discard(live.group)
            if not self._held:
                self._waiting.clear()

    def next_event(self, now: float) -> float | None:
        """Return the next time to call ``advance``. None if nothing is held."""
        self._run_to(now)
        if self._done:
            return now
        if not self._held:
            return None
        if now < self._boundary and self._must_wait():
            return self._boundary
        return self._end if self._end is not None else self._plan()

    def _must_wait(self) -> bool:
        if self._changed and self.waiting:
            return True
        return self._overfull() or bool(self._running and self._first_finish() <= self.decode_steps)

    def advance(self, now: float) -> list[tuple[int, int]]:
        """Finish attempts that are due: (attempt, tokens), in order of time, then of admission."""
        self._run_to(now)
        done, self._done = self._done, []
        return done

    def _run_to(self, now: float) -> None:
        """Pass all events up to ``now``. Changes at ``now`` still join its boundary."""
        if self._boundary <= now:
            self._finish()
        while self._boundary < now and self._held:
            end = self._end if self._end is not None else self._plan()
            if end > now:
                return
            self._pass(self._end_steps, end)
            self._finish()

    def _stop_at(self, now: float) -> None:
        """Make the first step boundary at or after ``now`` the present one."""
        if self._boundary >= now:
            return
        if not self._running:
            self._boundary = now
            return
        assert self._end is not None
        batch = len(self._running)
        fixed, slope = self._step_terms(batch)
        first = fixed + slope * self._context
        elapsed = now - self._boundary
        root = math.sqrt(first * first + 2.0 * slope * batch * elapsed)
        steps = math.ceil(2.0 * elapsed / (first + root) - 1e-9)
        if steps >= self._end_steps:
            self._pass(self._end_steps, self._end)
        elif steps > 0:
            self._pass(steps, self._boundary + self._steps_s(batch, steps))

    def _step_terms(self, batch: int) -> tuple[float, float]:
        terms = self._terms.get(batch)
        if terms is None:
            costs = self._costs
            terms = (
                (costs.step_s(batch, 0.0), costs.slope)
                if self._rule is None
                else ahead_terms(costs, batch, self._rule)
            )
            self._terms[batch] = terms
        return terms

    def _steps_s(self, batch: int, steps: int) -> float:
        fixed, slope = self._step_terms(batch)
        return steps * (fixed + slope * (self._context + 0.5 * batch * steps))

    def _pass(self, steps: int, end: float) -> None:
        tokens = len(self._running) * steps
        if self._rule is not None:
            self._count(self._rule.pace(len(self._running)), tokens, steps)
        self.decode_steps += steps
        self.generated_tokens += tokens
        self._context += tokens
        self.peak_kv = max(self.peak_kv, self._context)
        self.busy_s += end - self._boundary
        self._boundary = self._in_flight_until = end
        self._end = None
        if self._cache:
            self._evict()

    def _count(self, pace: Pace, tokens: int, steps: int) -> None:
        self._saved += steps - steps / pace.tokens
        if pace.drafted:
            verified = tokens / pace.tokens
            self.verifications += verified
            self.drafted += verified * pace.drafted
            self.accepted += tokens - verified

    def _first_finish(self) -> int:
        heap = self._heap
        while heap[0][1] != heap[0][2].ticket or heap[0][2].attempt not in self._running:
            heappop(heap)
        return heap[0][0]

    def _finish(self) -> None:
        if not self._running or self._heap[0][0] > self.decode_steps:
            return
        while self._running and self._first_finish() <= self.decode_steps:
            live = heappop(self._heap)[2]
            self._leave(live, live.target)
            self._release(live)
            if live.returns and self._tool_kv != "dropped":
                self._cache[live.attempt] = live.prompt + live.target
                self._cached += live.prompt + live.target
            self._done.append((live.attempt, live.target))
            self._changed = True
            self._end = None

    def _plan(self) -> float:
        preempted = self._overfull()
        while self._overfull():
            self._preempt()
        if self._changed and not preempted:
            self._admit()
        batch = len(self._running)
        assert batch > 0
        steps = self._first_finish() - self.decode_steps
        room = self._capacity - self._context - self._slack * batch
        steps = 1 if preempted else max(1, min(steps, math.floor(room / batch)))
        self._end_steps = steps
        self._end = self._boundary + self._steps_s(batch, steps)
        return self._end

    def _overfull(self) -> bool:
        batch = len(self._running)
        return batch > 1 and self._context + (self._slack + 1) * batch > self._capacity

    def _preempt(self) -> None:
        _, live = self._running.popitem()
        live.generated = self.decode_steps - live.start
        self._context -= live.prompt + live.generated
        self._waiting.appendleft(live)
        self._changed = True
        self.preemptions += 1

    def _admit(self) -> None:
        tokens = 0
        waiting, running = self._waiting, self._running
        while waiting and len(running) < self._max_running:
            live = waiting[0]
            need = live.prompt + live.generated
            used = self._context + self._slack * len(running)
            if self._tool_kv == "kept":
                used += self._cached - self._cache.get(live.attempt, 0)
            if not live.gone:
                if running and used + need > self._admit_limit:
                    break
                tokens += self._enter(live, need)
            waiting.popleft()
        self._changed = False
        self.peak_kv = max(self.peak_kv, self._context)
        if tokens:
            seconds = self._costs.prefill_s(tokens)
            self.busy_s += seconds
            self._boundary += seconds

    def _enter(self, live: Live, need: int) -> int:
        self._tickets += 1
        live.ticket = self._tickets
        live.start = self.decode_steps - live.generated
        self._running[live.attempt] = live
        self._context += need
        heappush(self._heap, (live.start + live.target, live.ticket, live))
        found = live.shared if live.group in self._prefilled else 0
        self._prefilled.add(live.group)
        if self._cache:
            own = self._cache.pop(live.attempt, 0)
            self._cached -= own
            found = max(found, own)
            self._evict()
        return need if live.generated else need - found

    def _evict(self) -> None:
        """Evict cached KV if running sequences need the room, oldest first. A sequence loses
        blocks from its end, so that its remaining blocks can still be found."""
        lacking = self._context + self._slack * len(self._running) + self._cached - self._capacity
        while lacking > 0 and self._cache:
            attempt, tokens = next(iter(self._cache.items()))
            given = min(tokens, math.ceil(lacking))
            if given == tokens:
                del self._cache[attempt]
            else:
                self._cache[attempt] = tokens - given
            self._cached -= given
            lacking -= given
