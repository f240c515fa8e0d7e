"""Replay a trace's steps on a real engine: forced lengths, slept latencies, timed phases."""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollpacker.core.types import AttemptId, PromptId
from rollpacker.engine.base import Engine, EngineStats, Output, Request, SamplingParams
from rollpacker.polytrace.model.turns import TraceResponse, TraceTurn
from rollpacker.trace_replay.plan import StepPlan

Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """One replayed step. ``step_s`` is ``rollout_s`` plus ``reward_s``.

    Args:
        rollout_s: seconds from the first request to the end of the last response.
        tool_wait_s: the part of it in which the engine was empty until a tool answered.
        reward_s: from the end of the rollout to the last reward.
        context_tokens: of all turns' prompts.
        cached_tokens: of these, found in the prefix cache when the trace was recorded.
        kept_tokens: of these, whose KV the engine had kept from the turn before.
        prefill_tokens: run through the model, of prompts and of preempted responses.
        peak_running: most sequences decoded together.
    """

    step: int
    rollout_s: float
    tool_wait_s: float
    reward_s: float
    responses: int
    turns: int
    generated_tokens: int
    context_tokens: int
    cached_tokens: int
    kept_tokens: int
    prefill_tokens: int
    decode_steps: int
    peak_running: int
    preemptions: int

    @property
    def step_s(self) -> float:
        return self.rollout_s + self.reward_s

    def to_dict(self) -> dict[str, Any]:
        """Return the step as JSON. Every top-level key that ends in ``_s`` is a phase. ``rates``
        are generated tokens per second of the rollout and per busy second."""
        busy = self.rollout_s - self.tool_wait_s
        rates = {"tokens_per_s": self.rollout_s, "busy_tokens_per_s": busy}
        return {
            "step": self.step,
            "step_s": self.step_s,
            **{key: value for key, value in asdict(self).items() if key != "step"},
            "rates": {
                name: self.generated_tokens / seconds if seconds > 0.0 else 0.0
                for name, seconds in rates.items()
            },
        }


@dataclass(slots=True, eq=False)
class _Conversation:
    attempt: AttemptId
    response: TraceResponse
    group: PromptId
    opening: Ints
    context: Ints
    place: int = 0

    @property
    def turn(self) -> TraceTurn:
        return self.response.turns[self.place]

    @property
    def goes_on(self) -> bool:
        return any(turn.tokens for turn in self.response.turns[self.place + 1 :])


class Replayer:
    """Runs plans, one step at a time.

    The first turns of a group share its prompt's prefill. Each later turn continues the one before,
    whose KV the engine keeps as long as there is room.

    Args:
        engine: idle. It samples at temperature 1 and stops only at the forced length.
        vocabulary: token ids are drawn below this.
        now: seconds from an arbitrary zero.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        vocabulary: int,
        seed: int = 0,
        now: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.engine = engine
        self.vocabulary = vocabulary
        self.seed = seed
        self.now, self.sleep = now, sleep
        self.attempts = itertools.count(1)

    def warm_up(self) -> None:
        """Run a tiny step, so that the engine compiles before the first timed one."""
        turns = (TraceTurn(prompt=2, tokens=2), TraceTurn(prompt=5, tokens=2))
        self.run(
            StepPlan(step=0, groups=((TraceResponse(turns=turns), TraceResponse(turns=turns)),))
        )

    def run(self, plan: StepPlan) -> Replayed:
        """Replay one step. Raises ``ValueError`` if the engine can never hold a request."""
        return _Step(self, plan).run()


class _Step:
    def __init__(self, owner: Replayer, plan: StepPlan) -> None:
        self._owner, self._plan = owner, plan
        self._engine, self._now, self._sleep = owner.engine, owner.now, owner.sleep
        self._rng = np.random.default_rng([owner.seed, plan.step])
        self._outbox: list[Request] = []
        self._decoding: dict[AttemptId, _Conversation] = {}
        self._timers: list[tuple[float, int, Callable[[float], None]]] = []
        self._set = 0
        self._left = len(plan.responses)
        self._end_s = self._graded_s = -math.inf
        self._tool_wait_s = 0.0
        self._peak = self._sampled = 0

    def run(self) -> Replayed:
        before = self._engine.stats()
        self._sampled = before.generated_tokens
        conversations = self._conversations()
        zero = self._now()
        for conversation in conversations:
            self._begin(conversation, zero)
        self._send()
        while self._left:
            if self._engine.busy():
                self._decode()
            else:
                self._tool_wait_s += self._wait()
            self._fire()
            self._send()
        while self._timers:
            self._wait()
            self._fire()
        if self._plan.batch_reward_s > 0.0:
            self._sleep(self._plan.batch_reward_s)
            self._graded_s = self._now()
        return self._result(before, zero)

    def _conversations(self) -> list[_Conversation]:
        made: list[_Conversation] = []
        for number, group in enumerate(self._plan.groups):
            whole = self._tokens(max(response.turns[0].prompt for response in group))
            for response in group:
                opening = whole[: response.turns[0].prompt]
                name = PromptId(f"{self._plan.step}/{number}/{len(opening)}")
                attempt = AttemptId(next(self._owner.attempts))
                made.append(_Conversation(attempt, response, name, opening, opening))
        return made

    def _tokens(self, count: int) -> Ints:
        return self._rng.integers(0, self._owner.vocabulary, max(0, count), np.int32)

    def _begin(self, conversation: _Conversation, now: float) -> None:
        """Request the current turn. A turn that generates nothing ends at once."""
        turn = conversation.turn
        if turn.tokens == 0:
            self._over(conversation, now)
            return
        self._decoding[conversation.attempt] = conversation
        self._outbox.append(self._request(conversation, turn))

    def _request(self, conversation: _Conversation, turn: TraceTurn) -> Request:
        attempt, opening = conversation.attempt, conversation.opening
        context = conversation.context
        assert len(context) == turn.prompt
        group, prompt = conversation.group, opening
        if len(context) < len(opening):
            group, prompt = PromptId(f"{group}/{attempt}"), context
        carried = context[len(prompt) :]
        return Request(
            attempt=attempt,
            group=group,
            prompt=prompt,
            params=SamplingParams(max_tokens=len(carried) + turn.tokens, ignore_stop=True),
            seed=self._owner.seed << 32 | attempt,
            generated=carried,
            logprobs=np.zeros(len(carried), np.float32),
            stays=conversation.goes_on,
        )

    def _send(self) -> None:
        if self._outbox:
            self._engine.submit(self._outbox)
            self._outbox = []

    def _decode(self) -> None:
        outputs = self._engine.step()
        now = self._now()
        sampled = self._engine.stats().generated_tokens
        self._peak = max(self._peak, sampled - self._sampled)
        self._sampled = sampled
        for output in outputs:
            self._answered(output, now)

    def _answered(self, output: Output, now: float) -> None:
        conversation = self._decoding.pop(output.attempt)
        turn = conversation.turn
        # The engine returns tokens that the request gave as generated at the head of its output.
        prompt = conversation.context[: len(conversation.opening)]
        context = np.concatenate([prompt, output.tokens])
        assert len(context) == turn.prompt + turn.tokens, "the engine kept to the forced length"
        assert output.finish_reason == "length"
        conversation.context = context
        self._over(conversation, now)

    def _over(self, conversation: _Conversation, now: float) -> None:
        seconds = conversation.turn.tool_s
        if seconds > 0.0:
            self._after(now, seconds, lambda then: self._next(conversation, then))
        else:
            self._next(conversation, now)

    def _next(self, conversation: _Conversation, now: float) -> None:
        conversation.place += 1
        if conversation.place < len(conversation.response.turns):
            grown, wanted = conversation.context, conversation.turn.prompt
            added = self._tokens(wanted - len(grown))
            conversation.context = np.concatenate([grown[:wanted], added])
            self._begin(conversation, now)
            return
        self._left -= 1
        self._end_s = max(self._end_s, now)
        if conversation.response.reward_s > 0.0:
            self._after(now, conversation.response.reward_s, self._graded)

    def _graded(self, now: float) -> None:
        self._graded_s = now

    def _after(self, now: float, seconds: float, then: Callable[[float], None]) -> None:
        self._set += 1
        heapq.heappush(self._timers, (now + seconds, self._set, then))

    def _wait(self) -> float:
        start = self._now()
        self._sleep(max(0.0, self._timers[0][0] - start))
        return self._now() - start

    def _fire(self) -> None:
        now = self._now()
        while self._timers and self._timers[0][0] <= now:
            heapq.heappop(self._timers)[2](now)

    def _result(self, before: EngineStats, zero: float) -> Replayed:
        after, turns = self._engine.stats(), self._plan.turns
        generated = after.generated_tokens - before.generated_tokens
        assert generated == sum(turn.tokens for turn in turns), "every length was forced"
        return Replayed(
            step=self._plan.step,
            rollout_s=self._end_s - zero,
            tool_wait_s=self._tool_wait_s,
            reward_s=max(0.0, self._graded_s - self._end_s),
            responses=len(self._plan.responses),
            turns=len(turns),
            generated_tokens=generated,
            context_tokens=sum(turn.prompt for turn in turns if turn.tokens),
            cached_tokens=sum(turn.cached for turn in turns if turn.tokens),
            kept_tokens=after.cached_tokens - before.cached_tokens,
            prefill_tokens=after.prefill_tokens - before.prefill_tokens,
            decode_steps=after.steps - before.steps,
            peak_running=self._peak,
            preemptions=after.preemptions - before.preemptions,
        )
