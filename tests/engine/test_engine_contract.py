"""What every engine promises, over all built-in engines."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from engine_models import build, drain, prompt, request

from rollpacker.config import ModelConfig
from rollpacker.config import rollout as configs
from rollpacker.engine.fake import FakeEngine


def mini(runs=None, device="cpu"):
    """Over the runner that ``runs`` makes; imported here, since numba takes its time."""
    from rollpacker.engine.mini import MiniEngine

    model = build("qwen2").to(device)
    config = configs.MiniEngineConfig(max_running=4, kv_tokens=512)
    return MiniEngine(model, config=config, runner=None if runs is None else runs(model))


def on_torch(device="cpu", *, alone: bool):
    from rollpacker.engine.mini.runner import shape_of
    from rollpacker.engine.mini.torch_runner import TorchRunner

    return mini(lambda m: TorchRunner(m, shape_of(m), block_size=8, deterministic=alone), device)


def vllm():
    """With the weights of ``wide``; it reads the shape from a folder."""
    from rollpacker.engine.vllm import VllmEngine

    model = build("wide")
    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        config = configs.VllmEngineConfig(max_running=4, kv_tokens=512)
        engine = VllmEngine(ModelConfig(path=folder), config=config)
    engine.load_weights(model.named_parameters(), 0)
    return engine


def vllm_tp2():
    """The same over two processes: one for all tests, for they take long to come together."""
    engine = pair().lead
    engine.abort(range(100))
    engine.load_weights(list(build("wide").named_parameters()), 0)
    return engine


@cache
def pair():
    from vllm_pair import Pair

    with tempfile.TemporaryDirectory() as folder:
        build("wide").config.save_pretrained(folder)
        pair = Pair()
        pair.build(Path(folder), max_running=4, kv_tokens=256)
    return pair


ENGINES = {
    "fake": lambda: FakeEngine(configs.FakeEngineConfig(lengths=[9, 30, 17]), concurrency=4),
    "mini": mini,
    "torch": lambda: on_torch(alone=False),
    "torch-deterministic": lambda: on_torch(alone=True),
    "cuda": lambda: on_torch("cuda", alone=False),
    "cuda-deterministic": lambda: on_torch("cuda", alone=True),
    "vllm": vllm,
    "vllm-tp2": vllm_tp2,
}
"""Each with room for four attempts at once."""
EXACT = ("fake", "mini", "torch-deterministic", "cuda-deterministic")


_ELSEWHERE = {"vllm": pytest.mark.cluster, "vllm-tp2": pytest.mark.cluster}
_ELSEWHERE |= {"cuda": pytest.mark.gpu, "cuda-deterministic": pytest.mark.gpu}
_DEVICES = {"vllm-tp2": 2}


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=_ELSEWHERE.get(name, ())) for name in ENGINES]
)
def kind(request):
    """One kind after the other: a process has vLLM engines of one size at a time."""
    yield request.param
    if request.param == "vllm-tp2":
        pair().close()


@pytest.fixture
def engine(kind):
    engine = ENGINES[kind]()
    yield engine
    if kind == "vllm":
        engine.close()


@pytest.fixture
def devices(kind):
    return _DEVICES.get(kind, 1)


def test_every_engine_that_can_be_configured_is_held_to_it():
    kinds = get_args(get_args(configs.EngineConfig)[0])
    assert {kind.model_fields["kind"].default for kind in kinds} <= set(ENGINES)


def test_it_says_what_it_can_do(engine, devices):
    info = engine.info()
    assert not engine.busy()
    assert devices in info.tensor_parallel
    assert info.latency
    assert min(info.latency) == 1
    assert all(seconds > 0.0 for seconds in info.latency.values())
    assert info.prefill_token_s >= 0.0
    known = info.context_token_s
    assert known is None or 0.0 <= known < min(info.latency.values())
    assert info.max_length <= info.kv_tokens


def test_the_longest_sequence_is_the_one_that_fits():
    engine = mini()
    longest = engine.info().max_length
    engine.submit([request(0, prompt(5), max_tokens=longest - 5)])
    with pytest.raises(ValueError, match=f"do not fit {longest}"):
        engine.submit([request(1, prompt(5), max_tokens=longest - 4)])


def test_an_engine_with_exact_seeds_does_not_care_what_runs_beside(engine):
    if not engine.info().exact_seeds:
        return
    engine.submit([request(i, prompt(4 + i, i), group=str(i), seed=i) for i in range(9)])
    together = drain(engine)
    for i in range(9):
        engine.submit([request(i, prompt(4 + i, i), group=str(i), seed=i)])
        alone = drain(engine)[i]
        assert alone.tokens.tobytes() == together[i].tokens.tobytes()
        assert alone.logprobs.tobytes() == together[i].logprobs.tobytes()


def test_every_attempt_finishes_once(engine):
    engine.submit([request(i, prompt(5, i % 3), group=str(i % 3), seed=i) for i in range(12)])
    seen = []
    while engine.busy():
        seen += [o.attempt for o in engine.step()]
    assert sorted(seen) == list(range(12))
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.kv_used) == (0, 0, 0.0)
    assert stats.generated_tokens > 0
    assert stats.steps > 0


def test_idle_engine_steps_to_nothing(engine):
    assert engine.step() == []
    assert not engine.busy()
    assert engine.abort([3]) == []


def test_a_step_gives_one_token(engine):
    engine.submit([request(0, prompt(5), ignore_stop=True, max_tokens=3)])
    for left in (True, True, False):
        out = engine.step()
        assert engine.busy() is left
    assert out[0].finish_reason == "length"
    assert len(out[0].tokens) == len(out[0].logprobs) == 3
    assert out[0].tokens.dtype == np.int32
    assert out[0].logprobs.dtype == np.float32


def test_results_do_not_depend_on_company(engine):
    requests = [request(i, prompt(4 + i % 3, i % 3), group=str(i % 3), seed=i) for i in range(9)]
    engine.submit(requests)
    together = drain(engine)
    for each in requests:
        engine.submit([each])
        alone = drain(engine)[each.attempt]
        assert alone.tokens.tolist() == together[each.attempt].tokens.tolist()


def test_seeds_matter(engine):
    engine.submit([request(i, prompt(5), group="g", seed=i, ignore_stop=True) for i in range(4)])
    assert len({tuple(o.tokens) for o in drain(engine).values()}) == 4


def test_abort_returns_the_partial_response(engine):
    engine.submit([request(i, prompt(5), group="g", seed=i, ignore_stop=True) for i in range(6)])
    for _ in range(3):
        engine.step()
    aborted = {o.attempt: o for o in engine.abort([0, 5, 77])}
    assert aborted.keys() == {0, 5}
    assert (len(aborted[0].tokens), len(aborted[5].tokens)) == (3, 0)
    assert {o.finish_reason for o in aborted.values()} == {"abort"}
    rest = drain(engine)
    assert rest.keys() == {1, 2, 3, 4}
    assert all(len(o.tokens) == 20 for o in rest.values())


@pytest.mark.parametrize("after", [1, 7, 15, 16, 19])
def test_migrated_attempts_continue_where_they_were(engine, after):
    whole = request(0, prompt(5), seed=3, ignore_stop=True)
    engine.submit([whole])
    expected = drain(engine)[0]
    engine.submit([whole])
    for _ in range(after):
        engine.step()
    (partial,) = engine.abort([0])
    assert len(partial.tokens) == after
    engine.submit(
        [
            request(
                9,
                prompt(5),
                seed=3,
                ignore_stop=True,
                generated=partial.tokens,
                logprobs=partial.logprobs,
            )
        ]
    )
    resumed = drain(engine)[9]
    assert resumed.tokens.tolist() == expected.tokens.tolist()
    np.testing.assert_allclose(resumed.logprobs, expected.logprobs, atol=1e-4)


def test_an_attempt_that_stopped_goes_on_as_a_fresh_one_would(engine, kind):
    """With tokens behind it that were not sampled."""
    ids, stops = range(4), tuple(range(0, 101, 5))
    texts = [np.zeros(0, np.int32)] * 4

    def turn(first, group, *, stays):
        engine.submit(
            [
                request(
                    first + i,
                    prompt(21),
                    group=group,
                    seed=50 + i,
                    generated=texts[i],
                    logprobs=np.zeros(len(texts[i]), np.float32),
                    stays=stays,
                    max_tokens=90,
                    stop_token_ids=stops,
                )
                for i in ids
            ]
        )
        return drain(engine)

    for reply in (prompt(19, 1), prompt(0), prompt(3, 2)):
        outputs = turn(0, "g", stays=True)
        assert engine.stats().kv_used == 0.0
        fresh = turn(10, "fresh", stays=False)
        for i in ids:
            assert outputs[i].finish_reason == "stop"
            assert outputs[i].tokens[: len(texts[i])].tolist() == texts[i].tolist()
            assert outputs[i].tokens.tolist() == fresh[10 + i].tokens.tolist()
            np.testing.assert_allclose(outputs[i].logprobs, fresh[10 + i].logprobs, atol=1e-4)
            if kind in EXACT:
                assert outputs[i].logprobs.tobytes() == fresh[10 + i].logprobs.tobytes()
        texts = [np.concatenate([outputs[i].tokens, reply]) for i in ids]


def test_an_attempt_that_stopped_is_not_held(engine):
    stops = {"stop_token_ids": tuple(range(101)), "max_tokens": 90}
    engine.submit([request(i, prompt(40), group="g", seed=i, stays=True, **stops) for i in (0, 1)])
    assert {o.finish_reason for o in drain(engine).values()} == {"stop"}
    assert engine.abort([0, 1]) == []
    assert engine.step() == []
    engine.load_weights(None, 1)
    engine.submit([request(0, prompt(40), stays=True, **stops)])
    assert drain(engine)[0].weights_version == 1
    engine.sleep()


def test_versions_are_reported_and_protected(engine):
    engine.load_weights(None, 4)
    engine.submit([request(0, prompt(5))])
    with pytest.raises(RuntimeError, match="held"):
        engine.load_weights(None, 5)
    assert drain(engine)[0].weights_version == 4
    engine.load_weights(None, 5)
    engine.submit([request(1, prompt(5))])
    assert drain(engine)[1].weights_version == 5


def test_user_mistakes_are_named(engine):
    engine.submit([request(0, prompt(5))])
    with pytest.raises(ValueError, match="attempt 0 is already held"):
        engine.submit([request(0, prompt(5))])
    done = np.zeros(20, np.int32)
    with pytest.raises(ValueError, match="attempt 1 has all its max_tokens"):
        engine.submit([request(1, prompt(5), generated=done, logprobs=done.astype(np.float32))])
    assert drain(engine).keys() == {0}


def test_sleep_and_wake(engine, kind):
    """Weights that are not shared may be gone."""
    engine.submit([request(0, prompt(5))])
    before = drain(engine)[0]
    engine.sleep()
    engine.wake()
    engine.load_weights(list(build("wide").named_parameters()) if "vllm" in kind else None, 0)
    engine.submit([request(0, prompt(5))])
    assert drain(engine)[0].tokens.tolist() == before.tokens.tolist()


def test_concurrency_is_bounded(engine):
    engine.submit([request(i, prompt(5), group="g", seed=i, ignore_stop=True) for i in range(7)])
    engine.step()
    assert (engine.stats().running, engine.stats().waiting) == (4, 3)
    drain(engine)
