"""vLLM over two devices: the responses of one, weights that come and go, members that end."""

import tempfile
import time
from dataclasses import replace
from glob import escape
from pathlib import Path

import psutil
import pytest
import torch
from engine_models import assert_new_weights, build, drain, prompt, request
from rounding import assert_same
from vllm_pair import Pair

from rollpacker.config import MiniEngineConfig, ModelConfig, VllmEngineConfig
from rollpacker.engine.base import Span, Speculation
from rollpacker.runtime.messages.shared_weights import MEMORY

pytestmark = pytest.mark.cluster
COUNT = 32


@pytest.fixture(scope="module")
def pair(folder):
    pair = Pair()
    pair.build(folder, max_running=64, kv_tokens=32 * 128)
    yield pair
    pair.close()


@pytest.fixture
def engine(pair, folder):
    if pair.lead is None:
        pair.build(folder, max_running=64, kv_tokens=32 * 128)
    pair.lead.abort(range(100))
    pair.lead.load_weights(list(build("wide").named_parameters()), 0)
    return pair.lead


def requests(**params):
    return [
        request(i, prompt(5 + i % 7, i), seed=100 + i, max_tokens=40, **params)
        for i in range(COUNT)
    ]


def assert_equal(found, asked=(), wanted=None):
    """All tokens but for rounding, by default those of ``mini``."""
    asked = asked or requests()
    assert_same(build("wide"), asked, found, wanted or mini(asked))


def mini(asked):
    from rollpacker.engine.mini import MiniEngine

    config = MiniEngineConfig(max_running=64, kv_tokens=64 * 128)
    engine = MiniEngine(build("wide"), config=config)
    engine.submit(asked)
    return drain(engine)


def test_two_devices_give_what_one_gives(pair, folder):
    from rollpacker.engine.vllm import VllmEngine

    pair.part()
    config = VllmEngineConfig(max_running=64, kv_tokens=64 * 128)
    one = VllmEngine(ModelConfig(path=str(folder)), config=config)
    one.load_weights(list(build("wide").named_parameters()), 0)
    one.submit(requests())
    wanted = drain(one)
    one.close()
    two = pair.build(folder, max_running=64, kv_tokens=32 * 128)
    two.load_weights(list(build("wide").named_parameters()), 0)
    two.submit(requests())
    assert_equal(drain(two), wanted=wanted)


@pytest.mark.parametrize(
    "params",
    [{}, {"top_p": 0.9, "top_k": 20}, {"temperature": 0}],
    ids=["plain", "nucleus", "greedy"],
)
def test_a_seed_gives_the_response_of_mini(engine, params):
    engine.submit(requests(**params))
    assert_equal(drain(engine), requests(**params))


def test_aborted_attempts_go_on_where_they_were(engine):
    engine.submit(requests())
    done = {}
    for _ in range(10):
        done |= {o.attempt: o for o in engine.step()}
    parts = engine.abort(range(0, COUNT, 2))
    more = {p.attempt: {"generated": p.tokens, "logprobs": p.logprobs} for p in parts}
    asked = requests()
    engine.submit(
        [
            request(i, asked[i].prompt, seed=100 + i, max_tokens=40, **given)
            for i, given in more.items()
        ]
    )
    assert_equal(done | drain(engine))


def test_new_weights_reach_the_tied_head_on_both(engine):
    assert_new_weights(engine)


def test_what_is_refused_leaves_both_in_step(engine):
    engine.submit(requests())
    engine.step()
    with pytest.raises(ValueError, match="attempt 3 is already held"):
        engine.submit([request(3, prompt(5))])
    with pytest.raises(ValueError, match="do not fit"):
        engine.submit([request(50, prompt(5), max_tokens=5000)])
    with pytest.raises(RuntimeError, match="held"):
        engine.load_weights(None, 4)
    assert_equal(drain(engine))
    with pytest.raises(ValueError, match="weights hold 'nonsense'"):
        engine.load_weights([("nonsense", torch.zeros(1))], 1)
    engine.load_weights(list(build("wide").named_parameters()), 0)
    engine.submit(requests())
    assert_equal(drain(engine))


def test_idle_members_use_no_cpu(pair, engine):
    processes = psutil.Process(), psutil.Process(pair.child.pid)
    before = [p.cpu_times() for p in processes]
    time.sleep(2)
    after = [p.cpu_times() for p in processes]
    assert sum(a.user + a.system for a in after) - sum(b.user + b.system for b in before) < 0.1


def test_each_device_adds_its_budget_and_few_blocks_change_no_sample(pair, folder):
    engine = pair.build(folder, max_running=64, kv_tokens=208)
    engine.load_weights(list(build("wide").named_parameters()), 0)
    assert engine.info().kv_tokens == 416
    assert engine.info().tensor_parallel == (2,)
    engine.submit(requests())
    found = drain(engine)
    assert engine.stats().preemptions > 0
    assert_equal(found)


def test_a_budget_that_is_not_given_is_the_same_on_both(pair, folder):
    engine = pair.build(folder, max_running=8)
    assert engine.info().kv_tokens == 8 * 256


def shares_memory() -> bool:
    """vLLM's collectives for CPUs need AVX-512; without it, members send what they have."""
    import torch

    return hasattr(torch.ops._C, "init_shm_manager")


def leftovers(meeting: str) -> list[Path]:
    """Shared memory of the members who met there, by the start of its names."""
    return sorted(MEMORY.glob(f"{escape(Path(meeting).name)}*"))


def test_what_a_killed_member_leaves_is_found_and_blocks_nobody(pair, folder):
    engine = pair.build(folder, max_running=4, kv_tokens=256)
    pair.child.kill()
    pair.child.join()
    with pytest.raises(ConnectionError, match="process 1 of the engine has ended"):
        engine.submit([request(0, prompt(5))])
    meeting = pair.meeting
    pair.replace_child()
    left = leftovers(meeting)
    assert len(left) == (2 if shares_memory() else 0)
    again = pair.build(folder, max_running=4, kv_tokens=256)
    again.submit([request(0, prompt(5), ignore_stop=True)])
    assert len(drain(again)[0].tokens) == 20
    assert set(leftovers(meeting)) <= set(left)
    for path in leftovers(meeting):
        path.unlink()
    assert leftovers(meeting) == []


def test_heads_that_cannot_be_shared_out_are_refused(folder):
    from rollpacker.engine.vllm import VllmEngine

    nowhere = str(Path(tempfile.gettempdir()) / "nobody-comes")
    span = Span(size=3, meeting=nowhere)
    refused = r"^engine\.kind=vllm with engine\.tensor_parallel=3 cannot run .*divisible[^\n]*$"
    with pytest.raises(ValueError, match=refused):
        VllmEngine(ModelConfig(path=str(folder)), config=VllmEngineConfig(), span=span)


def test_it_decodes_ahead(engine):
    """Both members draft the same: with the answers as hints, with rows that move half way."""
    asked = requests()
    before = engine.stats().steps
    engine.submit(asked)
    plain = drain(engine)
    took = engine.stats().steps - before
    hinted = [replace(each, hints=[plain[each.attempt].tokens]) for each in asked]
    engine.load_weights(None, 1)
    engine.speculate(Speculation(below=COUNT, most=16, row_cost=0.001))
    before = engine.stats().steps
    engine.submit(hinted)
    engine.step()
    for partial in engine.abort(range(0, COUNT, 4)):
        moved = {"generated": partial.tokens, "logprobs": partial.logprobs}
        engine.submit([replace(hinted[partial.attempt], **moved)])
    found = drain(engine)
    for attempt, output in found.items():
        assert output.tokens.tolist() == plain[attempt].tokens.tolist()
    assert sum(output.drafts.accepted for output in found.values()) > COUNT
    assert engine.stats().steps - before < took
