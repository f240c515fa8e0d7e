"""Several updates on one round: the ratio is to the weights that sampled, however they sampled."""

from typing import Any

import numpy as np
import pytest
from runtime_jobs import Workshop, metrics, run

from rollpacker.config import RolloutConfig
from rollpacker.core.types import AttemptId, Group, PromptId, ReplicaId, Sample
from rollpacker.runtime.step.updates import share_out

RATIO = "trained_tokens/ratio"
NUCLEUS = {"rollout__top_p": 0.7, "rollout__top_k": 9}
SEVERAL: dict[str, dict[str, Any]] = {
    "updates": {"devices__per_node": 2, "train__updates_per_step": 2},
    "long_rounds": {
        "devices__per_node": 1,
        "rollout__prompts_per_step": 2,
        "rollout__tail_batching": {
            "mode": "race",
            "eta_prompts": 2.0,
            "eta_responses": 1.0,
            "long_round_steps": 2,
        },
    },
}
shop = Workshop.fixture(rows=12)


@pytest.mark.wide
@pytest.mark.parametrize("name", SEVERAL)
def test_ratios_are_one_where_the_weights_stand_still(shop: Workshop, name: str) -> None:
    """With a nucleus the sampler's own probabilities are up to three times the trainer's."""
    tree = SEVERAL[name] | NUCLEUS | {"train__learning_rate": 1e-12, "epochs": 1}
    folder, _ = run(shop.config(name, **tree))
    steps = [step for step in metrics(folder) if RATIO in step]
    assert steps
    assert [step[RATIO] for step in steps] == pytest.approx([1.0] * len(steps), abs=1e-4)
    assert not any(step["clip_ratio/region_mean"] for step in steps)
    assert any(step["timing_s/score"] > 0 for step in steps)
    if name == "long_rounds":
        assert any(step["tail/round_kind"] == "long" for step in steps)
    if name == "updates":
        apart = [step["trained_tokens/abs_logprob_difference"] for step in steps]
        assert min(apart) > 0.01  # the two distributions differ


def test_a_correction_has_the_trainers_own_in_every_update(shop: Workshop) -> None:
    """Without one the sampler's stand for them in the second update, which measures nothing."""
    tree = SEVERAL["updates"] | {"epochs": 1}
    plain, _ = run(shop.config("plain", **tree))
    corrected, _ = run(shop.config("corrected", **tree, train__sampler_correction__kind="truncate"))
    for folder, scored in ((plain, False), (corrected, True)):
        steps = [step for step in metrics(folder) if RATIO in step]
        assert steps
        assert all((step.get("timing_s/score", 0) > 0) == scored for step in steps)
        # Of the same weights, whatever the updates before did.
        assert max(step["sampler/abs_logprob_difference"] for step in steps) < 1e-4
    assert max(step["trained_tokens/abs_logprob_difference"] for step in steps) > 1e-4


def test_which_samplers_know_the_whole_softmax() -> None:
    assert RolloutConfig().full_softmax
    assert RolloutConfig(temperature=0.0, top_p=0.5, top_k=3).full_softmax
    assert not RolloutConfig(top_p=0.5).full_softmax
    assert not RolloutConfig(top_k=3).full_softmax


def test_shares_are_alike_in_tokens_and_hold_every_group_once() -> None:
    groups = [_group(n, length) for n, length in enumerate((5, 9, 1, 7, 3, 3))]
    shares = share_out(groups, [ReplicaId(0), ReplicaId(2)])
    loads = {w: sum(len(s.tokens) for g in share for s in g.samples) for w, share in shares.items()}
    assert loads == {0: 15, 2: 13}
    names = sorted(g.prompt for share in shares.values() for g in share)
    assert names == [f"p{n}" for n in range(6)]
    assert list(share_out(groups[:1], [ReplicaId(3), ReplicaId(1)])) == [1]


def _group(number: int, length: int) -> Group:
    tokens = np.ones(length, np.int32)
    sample = Sample(
        prompt=PromptId(f"p{number}"),
        index=0,
        attempt=AttemptId(number),
        prompt_tokens=tokens,
        tokens=tokens,
        logprobs=tokens.astype(np.float32),
        finish_reason="stop",
        weights_version=0,
        reward=0.0,
    )
    return Group(prompt=sample.prompt, samples=(sample,), advantages=np.ones(1, np.float32))
