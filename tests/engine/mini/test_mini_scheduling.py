"""Scheduling never changes a result: bit by bit."""

from __future__ import annotations

import numpy as np
import pytest
from engine_models import build, drain, prompt, request
from hypothesis import given, settings
from hypothesis import strategies as st

from rollpacker.config import MiniEngineConfig
from rollpacker.engine.mini import MiniEngine
from rollpacker.engine.mini.runner import shape_of
from rollpacker.engine.mini.torch_runner import TorchRunner

MODEL = build("qwen2")
REQUESTS = [
    request(
        i,
        prompt(3 + 9 * (i % 4), i % 4),
        group=str(i % 4),
        seed=1000 + i,
        max_tokens=4 + 11 * (i % 5),
        stop_token_ids=(7, 8, 9, 10, 11),
        top_p=0.8 if i == 3 else 1.0,
    )
    for i in range(16)
]


def make(path: str, max_running: int, kv_tokens: int) -> MiniEngine:
    config = MiniEngineConfig(max_running=max_running, kv_tokens=kv_tokens)
    if path == "numba":
        return MiniEngine(MODEL, config=config, deterministic=True)
    runner = TorchRunner(MODEL, shape_of(MODEL), block_size=16, deterministic=True)
    return MiniEngine(MODEL, config=config, runner=runner)


@pytest.fixture(scope="module")
def alone():
    """Every request by itself."""
    results = {}
    for path in ("numba", "torch"):
        engine = make(path, 1, 512)
        results[path] = {}
        for each in REQUESTS:
            engine.submit([each])
            results[path] |= drain(engine)
    return results


def assert_same(output, expected):
    assert output.finish_reason == expected.finish_reason
    assert output.tokens.tobytes() == expected.tokens.tobytes()
    assert output.logprobs.tobytes() == expected.logprobs.tobytes()


def run_schedule(engine: MiniEngine, order, gaps, migrate) -> dict:
    """Submit in an order with steps in between; some attempts move to a second engine."""
    outputs = {}
    for place, index in enumerate(order):
        engine.submit([REQUESTS[index]])
        for _ in range(gaps[place]):
            outputs |= {o.attempt: o for o in engine.step()}
    for partial in engine.abort(migrate):
        original = REQUESTS[partial.attempt]
        engine.submit(
            [
                request(
                    partial.attempt,
                    original.prompt,
                    group=original.group,
                    seed=original.seed,
                    generated=partial.tokens,
                    logprobs=partial.logprobs,
                    max_tokens=original.params.max_tokens,
                    top_p=original.params.top_p,
                    stop_token_ids=original.params.stop_token_ids,
                )
            ]
        )
    return outputs | drain(engine)


@settings(max_examples=settings().max_examples // 5)
@given(
    order=st.permutations(range(16)),
    gaps=st.lists(st.integers(0, 6), min_size=16, max_size=16),
    migrate=st.sets(st.integers(0, 15), max_size=6),
    max_running=st.integers(1, 16),
    kv_tokens=st.integers(96, 600),
)
def test_any_schedule_gives_the_same_bits(alone, order, gaps, migrate, max_running, kv_tokens):
    engine = make("numba", max_running, kv_tokens)
    outputs = run_schedule(engine, order, gaps, migrate)
    assert outputs.keys() == alone["numba"].keys()
    for attempt, output in outputs.items():
        assert_same(output, alone["numba"][attempt])
    assert engine.stats().kv_used == 0.0


def test_torch_path_is_deterministic_too(alone):
    engine = make("torch", 7, 240)
    order = np.random.default_rng(0).permutation(16).tolist()
    outputs = run_schedule(engine, order, [2] * 16, {1, 3, 5})
    for attempt, output in outputs.items():
        assert_same(output, alone["torch"][attempt])


def test_tight_kv_preempts_and_finishes():
    def outputs(kv_tokens: int):
        engine = make("numba", 16, kv_tokens)
        engine.submit(
            [request(i, prompt(3), seed=i, max_tokens=60, ignore_stop=True) for i in range(8)]
        )
        return drain(engine), engine.stats().preemptions

    roomy, none = outputs(1024)
    tight, some = outputs(160)
    assert (none, some > 0) == (0, True)
    for attempt, output in tight.items():
        assert_same(output, roomy[attempt])


def test_a_group_prefills_its_prompt_once():
    engine = make("numba", 8, 4096)
    engine.submit([request(i, prompt(40), group="g", seed=i) for i in range(12)])
    drain(engine)
    assert engine.stats().prefill_tokens == 40


def test_what_can_never_fit_is_refused():
    engine = make("numba", 4, 64)
    with pytest.raises(ValueError, match="do not fit 64"):
        engine.submit([request(0, prompt(50), max_tokens=15)])
    engine.submit([request(1, prompt(50), max_tokens=14, ignore_stop=True)])
    assert len(drain(engine)[1].tokens) == 14
    with pytest.raises(ValueError, match="do not fit 256"):
        make("numba", 4, 4096).submit([request(0, prompt(250), max_tokens=7)])


@pytest.mark.parametrize("token", [-1, 101])
def test_ids_that_the_model_lacks_are_refused(token):
    engine = make("numba", 4, 64)
    alien = np.array([3, token, 5], np.int32)
    with pytest.raises(ValueError, match=r"in 0\.\.100"):
        engine.submit([request(0, alien)])
    with pytest.raises(ValueError, match=r"in 0\.\.100"):
        engine.submit([request(0, prompt(3), generated=alien, logprobs=np.zeros(3, np.float32))])
    assert not engine.busy()


def test_exactly_full_kv_with_a_group():
    engine = make("numba", 4, 64)
    engine.submit(
        [
            request(i, prompt(33), group="g", seed=i, max_tokens=31, ignore_stop=True)
            for i in range(4)
        ]
    )
    assert {len(o.tokens) for o in drain(engine).values()} == {31}


def test_groups_have_one_prompt():
    engine = make("numba", 4, 256)
    engine.submit([request(0, prompt(5), group="g")])
    with pytest.raises(ValueError, match="two different prompts"):
        engine.submit([request(1, prompt(6), group="g")])


def test_a_block_size_that_a_cpu_has_not_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^engine\.block_size=32: on a CPU a block has 16 tokens"):
        MiniEngine(MODEL, config=MiniEngineConfig(block_size=32))
