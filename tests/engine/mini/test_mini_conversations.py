"""Conversations in any order, with little KV: their tokens are those of each turn by itself."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from engine_models import build, drain, prompt, request
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from rollpacker.config import MiniEngineConfig
from rollpacker.engine.base import Request, Speculation
from rollpacker.engine.mini import MiniEngine

MODEL = build("qwen2")
SELDOM, SOMETIMES = (11, 22, 33), tuple(range(0, 101, 8))
"""Stop tokens: a turn has about thirty tokens, or eight."""
ATTEMPTS, TURNS = 8, 4
NONE = np.zeros(0, np.int32)


def make(kv_tokens: int, running: int = 4) -> MiniEngine:
    return MiniEngine(MODEL, config=MiniEngineConfig(max_running=running, kv_tokens=kv_tokens))


def turn_of(attempt: int, text: np.ndarray, *, alone: bool = False, stays: bool = True) -> Request:
    """The next turn of a conversation whose response so far is ``text``; ids of a group share a
    prompt: some end with a block, some within one."""
    kind = attempt % 3
    return request(
        attempt,
        prompt((16, 21, 37)[kind], kind),
        group=f"alone {attempt}" if alone else str(kind),
        seed=100 + attempt,
        generated=text,
        logprobs=np.zeros(len(text), np.float32),
        stays=stays,
        max_tokens=120,
        stop_token_ids=SELDOM if attempt % 2 else SOMETIMES,
        temperature=0.0 if attempt == 5 else 1.0,
    )


def reply_to(attempt: int, turn: int) -> np.ndarray:
    """What the environment says: nothing, less than a block, or several."""
    return prompt((3, 0, 17, 35)[(attempt + turn) % 4], 10 * attempt + turn)


@cache
def text_before(attempt: int, turn: int) -> np.ndarray | None:
    """The response that a turn begins with; None when the conversation is over before."""
    if turn == 0:
        return NONE
    last = expected(attempt, turn - 1)
    if turn == TURNS or last is None or last.finish_reason != "stop":
        return None
    text = np.concatenate([last.tokens, reply_to(attempt, turn - 1)])
    return text if len(text) < 120 else None


@cache
def expected(attempt: int, turn: int):
    """The output of a turn by itself, on an engine that has kept nothing."""
    text = text_before(attempt, turn)
    if text is None:
        return None
    engine = lonely()
    engine.submit([turn_of(attempt, text, stays=False)])
    (output,) = drain(engine).values()
    assert engine.stats().cached_tokens == 0
    return output


@cache
def lonely() -> MiniEngine:
    return make(512, running=1)


def same(output, other) -> None:
    assert output.finish_reason == other.finish_reason
    assert output.tokens.tobytes() == other.tokens.tobytes()
    # Those of tokens that came along are as they came.
    assert output.logprobs.tobytes() == other.logprobs.tobytes()


class Conversations(RuleBasedStateMachine):
    """Attempts begin, stop, go on, and are aborted, in any order, with little KV."""

    @initialize(
        running=st.integers(1, 8),
        kv=st.sampled_from([160, 192, 240, 304, 2048]),
        below=st.sampled_from([0, 0, 6]),
    )
    def begin_empty(self, running: int, kv: int, below: int) -> None:
        self.engine = make(kv, running)
        self.below = below
        self.engine.speculate(Speculation(below=below, most=8))
        self.blocks = kv // 16
        self.places = dict.fromkeys(range(ATTEMPTS), 0)
        self.ready = set(range(ATTEMPTS))
        self.asked = self.rules = 0

    def submit(self, attempt: int, text: np.ndarray) -> None:
        self.ready.discard(attempt)
        asked = turn_of(attempt, text)
        self.asked += len(asked.prompt) + len(text)
        self.engine.submit([asked])

    def ended(self, outputs) -> None:
        for output in outputs:
            attempt = output.attempt
            place = self.places[attempt]
            same(output, expected(attempt, place))
            if text_before(attempt, place + 1) is None:
                del self.places[attempt]
            else:
                self.places[attempt] = place + 1
                self.ready.add(attempt)

    @precondition(lambda self: self.ready)
    @rule(data=st.data())
    def go_on(self, data) -> None:
        some = st.lists(st.sampled_from(sorted(self.ready)), min_size=1, unique=True)
        for attempt in data.draw(some):
            self.submit(attempt, text_before(attempt, self.places[attempt]))

    @rule(steps=st.sampled_from([1, 3, 8, 30]))
    def decode(self, steps: int) -> None:
        self.rules += 1
        for _ in range(steps):
            self.ended(self.engine.step())

    @precondition(lambda self: self.rules % 4 == 3)
    @rule(attempts=st.sets(st.integers(0, ATTEMPTS - 1), max_size=3))
    def abort(self, attempts: set[int]) -> None:
        """What was held moves, as it is, to the end of the queue; the others lose their KV."""
        held = attempts & self.places.keys() - self.ready
        outputs = self.engine.abort(sorted(attempts))
        assert {o.attempt for o in outputs} == held
        for output in outputs:
            place = self.places[output.attempt]
            whole = expected(output.attempt, place)
            size = len(output.tokens)
            assert output.tokens.tobytes() == whole.tokens[:size].tobytes()
            again = turn_of(output.attempt, output.tokens)
            self.asked += len(again.prompt) + size
            self.engine.submit([replace(again, logprobs=output.logprobs)])

    @precondition(lambda self: self.rules % 8 == 7 and not self.engine.busy())
    @rule(sleeps=st.booleans())
    def load(self, sleeps: bool) -> None:
        if sleeps:
            self.engine.sleep()
            self.engine.wake()
        self.engine.load_weights(None, 0)
        self.engine.speculate(Speculation(below=self.below, most=8))
        assert self.engine._blocks.free == self.blocks

    @invariant()
    def counts_agree(self) -> None:
        blocks, stats = self.engine._blocks, self.engine.stats()
        parked = self.engine._scheduler.parked
        turns = [*parked._away.values(), *parked._back.values()]
        running = {b for s in self.engine._scheduler.running.values() for b in s.blocks}
        cached = {
            block
            for prefix in self.engine._scheduler._prefixes.values()
            for block in (*prefix.blocks, *([] if prefix.tail is None else [prefix.tail]))
        }
        kept = {block for turn in turns for block in turn.blocks}
        assert blocks.free == self.blocks - len(running | cached | kept)
        assert blocks.spare == len(kept - running - cached)
        assert stats.kv_used == pytest.approx(len(running | cached) / self.blocks)
        assert self.engine.busy() == bool(stats.running + stats.waiting)
        if stats.preemptions == 0:
            assert stats.cached_tokens + stats.prefill_tokens <= self.asked

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.ended(drain(self.engine).values())
        assert self.engine.stats().kv_used == 0.0
        self.engine.abort(range(ATTEMPTS))
        assert self.engine._blocks.free == self.blocks


def test_any_conversations_with_little_room() -> None:
    few = settings(max_examples=settings().max_examples // 2, stateful_step_count=40)
    run_state_machine_as_test(Conversations, settings=few)


@settings(max_examples=settings().max_examples // 5)
@given(
    order=st.permutations([a for a in range(ATTEMPTS) for _ in range(TURNS)]),
    gaps=st.lists(st.integers(0, 9), min_size=ATTEMPTS * TURNS, max_size=ATTEMPTS * TURNS),
    kv=st.sampled_from([160, 256, 2048]),
)
def test_what_is_not_found_is_run(order, gaps, kv) -> None:
    """Once, but where it is thrown out; where there is room, all that was kept is found."""
    engine, asked, kept = make(kv), 0, 0
    places = dict.fromkeys(range(ATTEMPTS), 0)
    for attempt, gap in zip(order, gaps, strict=True):
        if attempt not in engine._scheduler.held:
            place = places[attempt]
            text = text_before(attempt, place)
            if text is not None:
                places[attempt] += 1
                each = turn_of(attempt, text, alone=True)
                engine.submit([each])
                asked += len(each.prompt) + len(text)
                if place:
                    kept += len(each.prompt) + len(expected(attempt, place - 1).tokens) - 1
        for _ in range(gap):
            engine.step()
    drain(engine)
    stats = engine.stats()
    run = stats.prefill_tokens + stats.cached_tokens
    assert run == asked or (stats.preemptions and run > asked)
    assert stats.cached_tokens <= kept
    if kv == 2048:
        assert stats.cached_tokens == kept
