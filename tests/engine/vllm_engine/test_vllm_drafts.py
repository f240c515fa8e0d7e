"""vLLM decodes ahead: bit by bit what it samples without drafts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from engine_models import build, drain
from rounding import assert_same
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

from rollpacker.config import MiniEngineConfig, ModelConfig, VllmEngineConfig
from rollpacker.engine.base import Speculation

pytestmark = pytest.mark.cluster

REQUESTS = [ask(n) for n in range(64)]
EACH = [alone_in_group(each) for each in REQUESTS]


@pytest.fixture(scope="module")
def make(folder):
    def make(drafter=None, tokenizer=None, verifies=None, **config):
        from rollpacker.engine.vllm import VllmEngine

        settings = VllmEngineConfig(**{"max_running": 64, "kv_tokens": 64 * 256} | config)
        parts = {"drafter": drafter, "tokenizer": tokenizer, "verifies": verifies}
        engine = VllmEngine(ModelConfig(path=str(folder)), config=settings, **parts)
        engine.load_weights(build("wide").named_parameters(), 0)
        return engine

    return make


@pytest.fixture(scope="module")
def plain(make):
    """What is sampled a token at a time."""
    engine = make()
    assert engine.info().speculates
    steps = engine.stats().steps
    engine.submit(EACH)
    found = drain(engine)
    assert engine.stats().steps - steps == max(len(o.tokens) for o in found.values())
    assert not any(o.drafts.drafted for o in found.values())
    return found


def texts_of(outputs):
    return {r.attempt: np.concatenate([r.prompt, outputs[r.attempt].tokens]) for r in REQUESTS}


def test_without_drafts_it_samples_what_mini_does(plain):
    from rollpacker.engine.mini import MiniEngine

    model = build("wide")
    other = MiniEngine(model, config=MiniEngineConfig(max_running=64, kv_tokens=64 * 256))
    other.submit(EACH)
    assert_same(model, EACH, plain, drain(other))


def test_one_that_does_not_verify_samples_the_same(make, plain):
    """As on GPUs, and of models whose layers keep a state."""
    engine = make(verifies=False)
    assert not engine.info().speculates
    engine.speculate(Speculation(below=64, most=16))
    engine.submit(EACH)
    for attempt, output in drain(engine).items():
        same(output, plain[attempt])
        assert not output.drafts.drafted


@pytest.mark.parametrize("how", HOWS)
def test_any_draft(make, plain, how):
    engine = make(Scripted(texts_of(plain), how))
    for most in LENGTHS_OF_DRAFTS:
        engine.load_weights(None, most)
        engine.speculate(Speculation(below=64, most=most))
        before = engine.stats()
        engine.submit(EACH)
        outputs = drain(engine)
        for attempt, output in outputs.items():
            same(output, plain[attempt])
            assert output.drafts.accepted <= output.drafts.drafted
        longest = max(len(o.tokens) for o in outputs.values())
        now = engine.stats()
        steps = now.steps - before.steps
        assert now.generated_tokens - before.generated_tokens == sum(
            len(o.tokens) for o in outputs.values()
        )
        assert now.preemptions == 0
        if how == "right":
            assert steps <= 2 + -(-longest // (most + 1))
            assert max(o.drafts.tokens for o in outputs.values()) > most / 2
        if how == "wrong":
            assert steps == longest
            assert not any(o.drafts.accepted for o in outputs.values())


def test_any_draft_where_all_ask_the_same(make):
    """One setting at a time, of all requests; the mixture is above."""
    drafter = Scripted({}, "random")
    engine = make(drafter)
    settings = [
        {"temperature": 1.0},
        {"temperature": 0.7},
        {"temperature": 1.0, "top_p": 0.8},
        {"temperature": 1.0, "top_k": 5},
        {"temperature": 0.0},
    ]
    for version, setting in enumerate(settings, start=1):
        own = {"top_p": 1.0, "top_k": 0, "max_tokens": 100, "stop_token_ids": ()} | setting
        requests = [alone_in_group(ask(n, **own)) for n in range(64)]
        engine.load_weights(None, 2 * version)
        engine.speculate(Speculation(below=0, most=0))
        engine.submit(requests)
        plain = drain(engine)
        assert not any(o.drafts.drafted for o in plain.values())
        texts = {r.attempt: np.concatenate([r.prompt, plain[r.attempt].tokens]) for r in requests}
        drafter.tell(texts)
        engine.load_weights(None, 2 * version + 1)
        engine.speculate(Speculation(below=64, most=16))
        engine.submit(requests)
        outputs = drain(engine)
        for attempt, output in outputs.items():
            assert output.tokens.tobytes() == plain[attempt].tokens.tobytes(), setting
            assert output.logprobs.tobytes() == plain[attempt].logprobs.tobytes(), setting
        assert sum(o.drafts.accepted for o in outputs.values()) > 64 * 20
        assert sum(o.drafts.drafted - o.drafts.accepted for o in outputs.values()) > 64


def test_its_own_drafts_with_moves_and_few_blocks(make, plain):
    """Late submissions, preemptions, aborts half way, hints: its table."""
    engine = make(kv_tokens=640, max_running=40)
    engine.speculate(Speculation(below=40, most=16, row_cost=0.001))
    random = np.random.default_rng(1)
    outputs = {}
    for place in random.permutation(len(REQUESTS)):
        hints = [plain[place].tokens] if place % 3 else []
        engine.submit([replace(REQUESTS[place], hints=hints)])
        for _ in range(random.integers(0, 4)):
            outputs |= {o.attempt: o for o in engine.step()}
    for partial in engine.abort(range(0, 64, 3)):
        moved = {"generated": partial.tokens, "logprobs": partial.logprobs}
        hints = [plain[partial.attempt].tokens]
        engine.submit([replace(REQUESTS[partial.attempt], **moved, hints=hints)])
    outputs |= drain(engine)
    assert outputs.keys() == plain.keys()
    for attempt, output in outputs.items():
        same(output, plain[attempt])
    assert sum(o.drafts.accepted for o in outputs.values()) > 500
    assert engine.stats().kv_used == 0.0


def test_drafts_take_nothing_from_who_runs(make, plain):
    """Wrong ones where blocks are few: not one more is thrown out for them."""
    found = []
    for drafter in (None, Scripted(texts_of(plain), "wrong")):
        engine = make(drafter, kv_tokens=1280)
        if drafter is not None:
            engine.speculate(Speculation(below=64, most=16))
        engine.submit(EACH)
        outputs = drain(engine)
        for attempt, output in outputs.items():
            same(output, plain[attempt])
        found.append((engine.stats().preemptions, engine.stats().steps))
        del engine
    assert found[0] == found[1]


def test_rows_are_those_that_ran(make, plain):
    """And where nothing is drafted, those of requests, also of those that others make room for."""
    engine = make()
    engine.submit(EACH)
    outputs = drain(engine)
    alone = sum(len(o.tokens) - 1 for o in outputs.values())
    assert engine.stats().rows <= alone
    drafted = make(Scripted(texts_of(plain), "wrong"))
    drafted.speculate(Speculation(below=64, most=1))
    drafted.submit(EACH)
    outputs = drain(drafted)
    tokens = sum(o.drafts.drafted for o in outputs.values())
    assert drafted.stats().rows == engine.stats().rows + tokens
    assert drafted.stats().prefill_tokens == engine.stats().prefill_tokens


def test_stop_strings_inside_a_draft(make, plain):
    free = {a: o.tokens for a, o in plain.items() if len(o.tokens) > 40}
    asked = []
    for attempt, tokens in free.items():
        stop = (Letters().decode(tokens[20:22].tolist()),)
        each = EACH[attempt]
        asked.append(replace(each, params=replace(each.params, stop=stop)))
    one, steps = make(tokenizer=Letters()), []
    one.submit(asked)
    wanted = drain(one)
    steps.append(one.stats().steps)
    del one
    other = make(Scripted(texts_of(plain), "right"), tokenizer=Letters())
    other.speculate(Speculation(below=64, most=16))
    other.submit(asked)
    for attempt, output in drain(other).items():
        same(output, wanted[attempt])
        assert len(output.tokens) <= 22
    assert other.stats().steps < steps[0]


def test_what_siblings_and_past_rounds_said_is_drafted(make, plain):
    assert_texts_serve(make(), REQUESTS[1], plain[1].tokens)


def test_drafts_longer_than_its_uniforms_are_refused(make):
    with pytest.raises(ValueError, match="at most 63"):
        make().speculate(Speculation(below=1, most=64))
