"""vLLM behind our protocol: the tokens of ``mini``, weights that come and go, what is refused."""

import numpy as np
import pytest
import torch
from engine_models import assert_new_weights, build, drain, prompt, reference_logprobs, request
from rounding import assert_same

from rollpacker.config import MiniEngineConfig, ModelConfig, VllmEngineConfig

pytestmark = pytest.mark.cluster


def vllm(folder, **config):
    from rollpacker.engine.vllm import VllmEngine

    settings = VllmEngineConfig(**{"max_running": 64, "kv_tokens": 64 * 128} | config)
    engine = VllmEngine(ModelConfig(path=str(folder)), config=settings)
    engine.load_weights(build("wide").named_parameters(), 0)
    return engine


def mini(model=None):
    from rollpacker.engine.mini import MiniEngine

    config = MiniEngineConfig(max_running=64, kv_tokens=64 * 128)
    return MiniEngine(model or build("wide"), config=config)


@pytest.fixture
def engine(folder):
    return vllm(folder)


def requests(count, first=0, **params):
    return [
        request(i, prompt(5 + i % 7, i), seed=100 + i, max_tokens=40, **params)
        for i in range(first, first + count)
    ]


@pytest.mark.parametrize(
    ("count", "params"),
    [
        (64, {}),
        (16, {"temperature": 0.7}),
        (16, {"top_p": 0.9, "top_k": 20}),
        (8, {"temperature": 0}),
    ],
    ids=["plain", "cool", "nucleus", "greedy"],
)
def test_a_seed_gives_the_response_of_mini(engine, count, params):
    model, asked = build("wide"), requests(count, **params)
    engine.submit(asked)
    theirs = drain(engine)
    other = mini()
    other.submit(asked)
    ours = drain(other)
    assert_same(model, asked, theirs, ours)


def test_scheduling_changes_no_sample(folder):
    """Few blocks: sequences are thrown out and computed again."""
    asked = requests(50)
    whole = vllm(folder)
    whole.submit(asked)
    wanted = drain(whole)
    assert whole.stats().preemptions == 0
    del whole
    tight = vllm(folder, kv_tokens=416)
    tight.submit(asked)
    found = drain(tight)
    assert tight.stats().preemptions > 0
    assert_same(build("wide"), asked, found, wanted)


def test_no_more_run_than_it_is_told(folder):
    engine = vllm(folder, max_running=2)
    engine.submit(requests(5))
    most = 0
    while engine.busy():
        engine.step()
        most = max(most, engine.stats().running)
    assert most == 2


def test_a_response_may_change_engines_on_its_way(engine):
    asked = requests(32)
    other = mini()
    other.submit(asked)
    wanted = drain(other)
    for first, second in ((engine, mini()), (mini(), engine)):
        first.submit(asked)
        done = {}
        for _ in range(10):
            done |= {o.attempt: o for o in first.step()}
        for part in first.abort(range(32)):
            assert part.finish_reason == "abort"
            source = asked[part.attempt]
            second.submit(
                [
                    request(
                        part.attempt,
                        source.prompt,
                        seed=source.seed,
                        max_tokens=40,
                        generated=part.tokens,
                        logprobs=part.logprobs,
                    )
                ]
            )
        done |= drain(second)
        assert_same(build("wide"), asked, done, wanted)


def test_new_weights_reach_the_tied_head_too(engine):
    assert_new_weights(engine)


def test_wrong_weights_are_refused_and_good_ones_are_taken_after_them(engine):
    model = build("wide")
    good = dict(model.named_parameters())
    with pytest.raises(ValueError, match="weights hold 'nonsense'"):
        engine.load_weights([*good.items(), ("nonsense", torch.zeros(1))], 1)
    with pytest.raises(ValueError, match="weights lack"):
        engine.load_weights(list(good.items())[:3], 1)
    engine.load_weights(good.items(), 2)
    tokens = prompt(9)
    engine.submit([request(0, tokens)])
    output = drain(engine)[0]
    reference = reference_logprobs(model, tokens, output.tokens)
    np.testing.assert_allclose(output.logprobs, reference, atol=1e-4)


def test_the_process_is_left_as_it_was(folder):
    from rollpacker.engine.vllm import VllmEngine

    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    threads = torch.get_num_threads()
    config = VllmEngineConfig(max_running=4, kv_tokens=256)
    engine = VllmEngine(ModelConfig(path=str(folder)), config=config)
    assert torch.equal(torch.rand(3), wanted)
    torch.set_num_threads(2)
    assert torch.get_num_threads() == 2
    torch.set_num_threads(threads)
    assert not engine.busy()


def test_a_model_that_it_cannot_run_is_refused(tmp_path):
    from rollpacker.engine.vllm import VllmEngine

    build("qwen2").config.save_pretrained(tmp_path)  # heads of 16
    with pytest.raises(ValueError, match=r"engine\.kind=vllm cannot run"):
        VllmEngine(ModelConfig(path=str(tmp_path)), config=VllmEngineConfig())


def test_a_budget_below_the_context_is_the_longest_sequence(folder):
    engine = vllm(folder, max_running=4, kv_tokens=96)  # of a context of 256
    info = engine.info()
    assert (info.kv_tokens, info.max_length) == (96, 96)
    engine.submit([request(0, prompt(56), max_tokens=40, ignore_stop=True)])
    with pytest.raises(ValueError, match="do not fit 96"):
        engine.submit([request(1, prompt(57), max_tokens=40)])
    assert len(drain(engine)[0].tokens) == 40


def test_the_smallest_budget_is_one_block(folder):
    assert vllm(folder, kv_tokens=1).info().max_length == 32
