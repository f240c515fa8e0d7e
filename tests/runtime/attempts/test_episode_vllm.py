"""Turns on vLLM engines: the samples of a run with ``mini``."""

import pytest
from runtime_jobs import metrics, run, times_trained, write_byte_model
from test_episode_runs import TALKING, Talkshop, responses

pytestmark = pytest.mark.cluster
TWO = {"devices": {"per_node": 2, "pin": False, "kind": "cpu"}, "epochs": 1}


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Talkshop:
    shop = Talkshop(tmp_path_factory.mktemp("episodes-vllm"))
    shop.model = write_byte_model(shop.folder / "wide", hidden=64)
    return shop


def test_a_conversation_is_the_one_that_mini_has(shop: Talkshop) -> None:
    ours, _ = run(shop.config("mini", "exact", **TALKING, **TWO))
    theirs, _ = run(shop.config("vllm", "exact", engine={"kind": "vllm"}, **TALKING, **TWO))
    one, other = responses(ours), responses(theirs)
    assert one.keys() == other.keys()
    assert sum(one[key] == other[key] for key in one) >= len(one) - 1  # rounding may decide once
    assert set(times_trained(theirs).values()) == {1}
    for row in metrics(theirs):
        assert row["environment/turns"] > 1
        assert row["trained_tokens/abs_logprob_difference"] < 1e-4
