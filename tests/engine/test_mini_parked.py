"""KV of turns that are over: no result depends on it, and it never stands in the way."""

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
from rollpacker.core.types import EngineId
from rollpacker.engine.base import Request, Speculation
from rollpacker.engine.mini import MiniEngine
from rollpacker.engine.mini.blocks import Blocks
from rollpacker.engine.mini.parked import Parked, Turn
from rollpacker.runtime import messages as msg
from rollpacker.runtime.engine_worker import EngineWorker
from rollpacker.runtime.step import StepRecord

MODEL = build("qwen2")
SELDOM = (11, 22, 33)
SOMETIMES = tuple(range(0, 101, 8))
ALWAYS = tuple(range(101))
"""Stop tokens: a turn has about thirty tokens, or eight, or one."""
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


def one_token(attempt: int, size: int, text: np.ndarray = NONE, **params) -> Request:
    """A turn that stops at its first token: its prompt's KV stays."""
    return request(
        attempt,
        prompt(size, attempt),
        seed=attempt,
        stays=True,
        generated=text,
        logprobs=np.zeros(len(text), np.float32),
        **{"stop_token_ids": ALWAYS, "max_tokens": 60} | params,
    )


def played(engine: MiniEngine, *sizes: int) -> list[np.ndarray]:
    """Turns of attempts 0, 1 and so on, one after the other; their responses."""
    texts = []
    for attempt, size in enumerate(sizes):
        engine.submit([one_token(attempt, size)])
        texts.append(drain(engine)[attempt].tokens)
    return texts


def found(engine: MiniEngine, *asked: Request) -> int:
    before = engine.stats().cached_tokens
    engine.submit(list(asked))
    drain(engine)
    return engine.stats().cached_tokens - before


def test_the_longest_over_goes_first() -> None:
    """Of nine blocks of ten; two are needed, so one turn goes."""
    engine = make(160)
    texts = played(engine, 48, 48, 48)
    engine.submit([one_token(9, 32)])
    drain(engine)
    assert found(engine, one_token(2, 48, texts[2])) == 48
    assert found(engine, one_token(1, 48, texts[1])) == 48
    assert found(engine, one_token(0, 48, texts[0])) == 0


def test_the_last_to_come_back_makes_room_for_those_before() -> None:
    """All of them need a block more, and one is free."""
    engine = make(160)
    texts = played(engine, 48, 48, 48)
    engine.submit([one_token(n, 48, texts[n]) for n in (2, 0, 1)])
    engine.step()
    assert (engine.stats().waiting, engine.stats().cached_tokens) == (1, 2 * 48)
    drain(engine)
    assert engine.stats().cached_tokens == 2 * 48
    assert engine.stats().prefill_tokens == 3 * 48 + 1 + 1 + 49


def test_a_running_sequence_takes_parked_blocks_before_it_would_throw_out_another() -> None:
    engine = make(160)
    texts = played(engine, 48, 48)
    long = [request(n, prompt(5, n), seed=n, max_tokens=70, ignore_stop=True) for n in (7, 8)]
    engine.submit(long)
    outputs = drain(engine)
    assert {len(o.tokens) for o in outputs.values()} == {70}
    assert engine.stats().preemptions == 0
    assert found(engine, one_token(0, 48, texts[0])) == 0


def test_a_prompt_that_a_group_shares_goes_later() -> None:
    engine = make(144)
    texts = played(engine, 48)
    group = [
        request(n, prompt(33), group="g", seed=n, max_tokens=30, ignore_stop=True) for n in (7, 8)
    ]
    before = engine.stats().prefill_tokens
    engine.submit(group)
    while engine.stats().running < 2:
        engine.step()
    for _ in range(25):
        engine.step()
    # 2 shared, a tail, and 2 each, of 9 blocks: what was parked made room for the last of them.
    assert engine.stats().prefill_tokens - before == 33
    assert engine._scheduler._prefixes["g"].cached
    drain(engine)
    assert engine.stats().preemptions == 0
    assert found(engine, one_token(0, 48, texts[0])) == 0


def test_nothing_goes_where_that_would_not_help() -> None:
    """One that waits for a running sequence's blocks takes none of those that are parked."""
    engine = make(160)
    texts = played(engine, 48)
    engine.submit([request(7, prompt(80), seed=7, max_tokens=16, ignore_stop=True)])
    engine.step()
    engine.submit([one_token(8, 90)])
    engine.step()
    assert engine.stats().waiting == 1
    assert engine._blocks.spare == 3
    engine.abort([8])
    assert found(engine, one_token(0, 48, texts[0])) == 48


def test_other_text_finds_nothing() -> None:
    """Another prompt, other tokens, or fewer."""
    engine = make(400)
    (text,) = played(engine, 48)
    changed = (text + 1) % 101
    assert found(engine, one_token(0, 48, changed)) == 0
    engine.submit([one_token(1, 48)])
    (output,) = drain(engine).values()
    other = replace(one_token(1, 48, output.tokens), prompt=prompt(48, 77))
    assert found(engine, other) == 0
    engine.abort([1])
    engine.submit([one_token(1, 48)])
    drain(engine)
    assert found(engine, one_token(1, 48)) == 0
    engine.abort(range(2))
    assert engine._blocks.free == 25


@pytest.mark.parametrize(
    "params", [{"ignore_stop": True, "max_tokens": 1}, {"max_tokens": 1}, {"stays": False}]
)
def test_what_cannot_go_on_is_not_kept(params) -> None:
    """A response that was cut, one that has all its tokens, one that is the last turn."""
    engine = make(400)
    stays = params.pop("stays", True)
    engine.submit([replace(one_token(0, 48, **params), stays=stays)])
    drain(engine)
    assert engine._blocks.free == 25


def test_an_aborted_turn_is_not_kept() -> None:
    engine = make(400)
    engine.submit([one_token(0, 48, ignore_stop=True)])
    engine.step()
    assert len(engine.abort([0])) == 1
    assert engine._blocks.free == 25


@pytest.mark.parametrize("call", ["load", "sleep"])
def test_new_weights_and_sleep_leave_nothing(call: str) -> None:
    engine = make(400)
    texts = played(engine, 48)
    if call == "load":
        engine.load_weights(None, 1)
    else:
        engine.sleep()
        engine.wake()
    assert engine._blocks.free == 25
    assert found(engine, one_token(0, 48, texts[0])) == 0


def test_those_that_are_back_go_last_and_the_next_to_run_never() -> None:
    blocks = Blocks(8)
    parked = Parked(blocks)
    text = prompt(20)
    for attempt in range(4):
        parked.put(attempt, Turn(prompt(20, attempt), text[:1], blocks.take(2)))
    assert (blocks.free, blocks.spare) == (0, 8)
    back = (1, 0, 3)
    for attempt in back:
        parked.come_back(request(attempt, prompt(20, attempt), generated=text, logprobs=text))
    assert parked.find(2) is None
    left = []
    while parked.evict(1):
        left.append([attempt for attempt in back if parked.find(attempt) is not None])
        assert blocks.free == 2 * len(left)
    assert left == [[1, 0, 3], [1, 0], [1]]
    turn = parked.take(1)
    assert (turn.known, blocks.free, blocks.spare) == (20, 6, 0)
    blocks.drop(turn.blocks)
    assert blocks.free == 8


def test_found_tokens_reach_the_record_of_a_step() -> None:
    engine, sent = make(400), []
    worker = EngineWorker(engine, sent.append)

    def work() -> msg.Work:
        worker.commands[msg.LoadWeights](msg.LoadWeights(version=1))
        return sent.pop().work

    texts = played(engine, 48, 40)
    worker.commands[msg.Submit](msg.Submit(requests=[one_token(0, 48, texts[0])]))
    while worker.busy():
        worker.work()
    assert not worker.busy()
    first = work()
    assert first.cached_tokens == 48
    assert work().cached_tokens == 0
    record = StepRecord(step=0, start_s=0.0)
    record.add_work(EngineId(0), first)
    record.add_work(EngineId(0), first)
    assert record.engine()["cached_tokens"] == 96
