"""KV of turns that are over: which is kept and found, and which goes first."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from engine_models import build, drain, prompt, request

from rollpacker.config import MiniEngineConfig
from rollpacker.core.types import EngineId
from rollpacker.engine.base import Request
from rollpacker.engine.mini import MiniEngine
from rollpacker.engine.mini.schedule import Blocks, Parked, ParkedTurn
from rollpacker.runtime.messages import messages as msg
from rollpacker.runtime.step.step import StepRecord
from rollpacker.runtime.worker.engine_worker import EngineWorker

MODEL = build("qwen2")
NONE = np.zeros(0, np.int32)


def make(kv_tokens: int) -> MiniEngine:
    return MiniEngine(MODEL, config=MiniEngineConfig(max_running=4, kv_tokens=kv_tokens))


def one_token(attempt: int, size: int, text: np.ndarray = NONE, **params) -> Request:
    """A turn that stops at its first token: its prompt's KV stays."""
    return request(
        attempt,
        prompt(size, attempt),
        seed=attempt,
        stays=True,
        generated=text,
        logprobs=np.zeros(len(text), np.float32),
        **{"stop_token_ids": tuple(range(101)), "max_tokens": 60} | params,
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
    ("asked", "kept"),
    [
        (one_token(0, 48, ignore_stop=True, max_tokens=1), True),
        (replace(one_token(0, 48), stays=False), False),
    ],
    ids=["cut", "the last"],
)
def test_which_turns_are_kept_until_they_are_given_up(asked: Request, kept: bool) -> None:
    engine = make(400)
    engine.submit([asked])
    drain(engine)
    assert (engine._blocks.free < 25) == kept
    engine.abort([0])
    assert engine._blocks.free == 25
    engine.submit([one_token(1, 48, ignore_stop=True)])
    engine.step()
    assert len(engine.abort([1])) == 1
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
        parked.put(attempt, ParkedTurn(prompt(20, attempt), text[:1], blocks.take(2)))
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
