"""Decoding ahead changes no token: bit by bit, whatever is drafted."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from engine_models import build, drain
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_drafts import (
    HOWS,
    LENGTHS_OF_DRAFTS,
    Letters,
    Scripted,
    alone_in_group,
    ask,
    assert_texts_serve,
    same,
)

from rollpacker.config import MiniEngineConfig
from rollpacker.engine.base import Speculation
from rollpacker.engine.mini import MiniEngine
from rollpacker.engine.mini.runner import shape_of
from rollpacker.engine.mini.torch_runner import TorchRunner

MODEL = build("qwen2")
REQUESTS = [ask(n) for n in range(12)]


def make(kind: str = "numba", *, running: int = 12, kv: int = 4096, drafter=None) -> MiniEngine:
    config = MiniEngineConfig(max_running=running, kv_tokens=kv)
    runner = None
    if kind != "numba":
        alone = kind == "torch-alone"
        runner = TorchRunner(MODEL, shape_of(MODEL), block_size=16, deterministic=alone)
    return MiniEngine(MODEL, config=config, runner=runner, drafter=drafter, tokenizer=Letters())


@pytest.fixture(scope="module")
def plain():
    """What is sampled a token at a time."""
    found = {}
    for kind in ("numba", "torch-alone"):
        engine = make(kind)
        engine.submit(REQUESTS)
        found[kind] = drain(engine)
    return found


OF_TORCH = {("right", 63), ("wrong", 1), ("random", 8)}
"""A row at a time it is slow: what else there is of them takes minutes."""


def marked(kind: str, how: str, most: int) -> object:
    if kind == "numba":
        return pytest.mark.wide if most == 16 else ()
    return () if (how, most) in OF_TORCH else pytest.mark.slow


@pytest.mark.parametrize(
    ("kind", "how", "most"),
    [
        pytest.param(kind, how, most, marks=marked(kind, how, most))
        for kind in ("numba", "torch-alone")
        for how in HOWS
        for most in LENGTHS_OF_DRAFTS
    ],
)
def test_any_draft(plain, kind: str, how: str, most: int) -> None:
    asked = REQUESTS if kind == "numba" else REQUESTS[:6]
    texts = {r.attempt: np.concatenate([r.prompt, plain[kind][r.attempt].tokens]) for r in asked}
    engine = make(kind, drafter=Scripted(texts, how))
    engine.speculate(Speculation(below=12, most=most))
    engine.submit([alone_in_group(each) for each in asked])
    before = engine.stats()
    outputs = drain(engine)
    assert len(outputs) == len(asked)
    for attempt, output in outputs.items():
        same(output, plain[kind][attempt])
        assert output.drafts.accepted <= output.drafts.drafted
    longest = max(len(o.tokens) for o in outputs.values())
    steps = engine.stats().steps - before.steps
    tokens = engine.stats().generated_tokens - before.generated_tokens
    assert tokens == sum(len(o.tokens) for o in outputs.values())
    if how == "right":
        assert steps <= 2 + -(-longest // (most + 1))
        assert max(o.drafts.tokens for o in outputs.values()) > most / 2
    if how == "wrong":
        assert steps == longest
        assert not any(o.drafts.accepted for o in outputs.values())


@settings(max_examples=settings().max_examples // 2)
@given(data=st.data())
def test_any_schedule(plain, data) -> None:
    """Late submissions, preemption, moves with hints, plain steps between: its own drafter."""
    order = data.draw(st.permutations(range(len(REQUESTS))))
    gaps = data.draw(st.lists(st.integers(0, 9), min_size=12, max_size=12))
    engine = make(running=data.draw(st.integers(1, 12)), kv=data.draw(st.sampled_from([192, 4096])))
    outputs = {}
    for place, index in enumerate(order):
        hints = [plain["numba"][index].tokens] if index % 3 else []
        engine.submit([replace(REQUESTS[index], hints=hints)])
        if place % 3 == 0:
            below = data.draw(st.integers(0, 12))
            most = data.draw(st.sampled_from([1, 8, 63]))
            engine.speculate(Speculation(below=below, most=most, row_cost=0.01 * (place % 2)))
        for _ in range(gaps[place]):
            outputs |= {o.attempt: o for o in engine.step()}
    for partial in engine.abort(data.draw(st.sets(st.integers(0, 11)))):
        whole = REQUESTS[partial.attempt]
        hints = [plain["numba"][partial.attempt].tokens]
        moved = {"generated": partial.tokens, "logprobs": partial.logprobs, "hints": hints}
        engine.submit([replace(whole, **moved)])
    outputs |= drain(engine)
    assert outputs.keys() == plain["numba"].keys()
    for attempt, output in outputs.items():
        same(output, plain["numba"][attempt])
    assert engine.stats().kv_used == 0.0


def test_stop_strings_inside_a_draft(plain) -> None:
    free = {a: o.tokens for a, o in plain["numba"].items() if len(o.tokens) > 40}
    for attempt, tokens in free.items():
        stop = (Letters().decode(tokens[20:22].tolist()),)
        texts = {attempt: np.concatenate([REQUESTS[attempt].prompt, tokens])}
        one, other = make(), make(drafter=Scripted(texts, "right"))
        other.speculate(Speculation(below=12, most=16))
        each = replace(REQUESTS[attempt], params=replace(REQUESTS[attempt].params, stop=stop))
        one.submit([alone_in_group(each)])
        other.submit([alone_in_group(each)])
        expected = drain(one)[attempt]
        same(drain(other)[attempt], expected)
        assert len(expected.tokens) <= 22
        assert other.stats().steps < one.stats().steps
        assert other.stats().generated_tokens == one.stats().generated_tokens


def test_batched_torch_samples_nearly_the_same(plain) -> None:
    """Rows of other shapes round otherwise."""
    hinted = [replace(r, hints=[plain["torch-alone"][r.attempt].tokens]) for r in REQUESTS]
    engine = make("torch")
    engine.speculate(Speculation(below=12, most=8))
    engine.submit(hinted)
    outputs = drain(engine)
    equal = total = 0
    for attempt, output in outputs.items():
        expected = plain["torch-alone"][attempt]
        size = min(len(output.tokens), len(expected.tokens))
        agree = output.tokens[:size] == expected.tokens[:size]
        equal, total = equal + int(agree.sum()), total + max(size, len(expected.tokens))
        first = size if agree.all() else int(agree.argmin())
        np.testing.assert_allclose(output.logprobs[:first], expected.logprobs[:first], atol=1e-4)
    assert equal >= 0.999 * total
    assert sum(o.drafts.accepted for o in outputs.values()) > 0.3 * total


def test_what_siblings_and_past_rounds_said_is_drafted(plain) -> None:
    assert_texts_serve(make(), REQUESTS[1], plain["numba"][1].tokens)


def test_drafts_longer_than_its_uniforms_are_refused() -> None:
    with pytest.raises(ValueError, match="at most 63"):
        make().speculate(Speculation(below=1, most=64))
