"""Advantages and losses against plain implementations of the papers' formulas."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import get_args

import numpy as np
import pytest
import torch
from tiny_models import MAX_LENGTH, group_batch, make_model, padded_logprobs, with_environment

from rollpacker.config import (
    AlgorithmConfig,
    DAPOConfig,
    DrGRPOConfig,
    GRPOConfig,
    GSPOConfig,
    ReinforcePPConfig,
    RLOOConfig,
    TrainConfig,
)
from rollpacker.train.algorithms import ALGORITHMS, build
from rollpacker.train.losses import SUMS, batch_loss
from rollpacker.train.trainer import Trainer

KINDS = {config.model_fields["kind"].default: config() for config in ALGORITHMS}
CONFIGS = KINDS | {
    "grpo_sequence": GRPOConfig(loss_type="sequence_mean"),
    "grpo_unscaled": GRPOConfig(scale_rewards="none"),
    "grpo_batch": GRPOConfig(scale_rewards="batch", delta=1.4),
    "reinforce_pp_batch": ReinforcePPConfig(whiten="batch"),
    "reinforce_pp_responses": ReinforcePPConfig(whiten="responses"),
}
_OF_ADVANTAGES = ("grpo_unscaled", "reinforce_pp_batch", "reinforce_pp_responses")
GRADIENTS = [
    pytest.param(name, marks=pytest.mark.wide if name in _OF_ADVANTAGES else ()) for name in CONFIGS
]
"""For what comes of a loss: that of three is their kind's, with other advantages."""
REWARDS = np.array([1.0, 0.0, 0.5, 1.0])
LENGTHS = np.array([10, 20, 30, 40])


def test_every_algorithm_can_be_configured_and_built():
    assert set(get_args(get_args(AlgorithmConfig)[0])) == set(ALGORITHMS)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("base", [0.1, 0.3, 1.0, 1e6])
def test_equal_rewards_give_exactly_no_advantage(name, base):
    rewards = np.full(7, base) + base * np.arange(7) * 1e-8  # rounding
    found = build(CONFIGS[name]).reward(rewards, np.arange(1, 8), MAX_LENGTH).advantages
    assert found.dtype == np.float32
    assert not found.any()


@pytest.mark.parametrize("name", KINDS)
def test_rewards_closer_than_the_configured_range_count_as_equal(name):
    rewards = np.array([0.2, 0.2005, 0.2])
    lengths = np.array([3, 4, 5])
    assert build(KINDS[name]).reward(rewards, lengths, MAX_LENGTH).advantages.any()
    least = build(KINDS[name], min_reward_range=1e-3)
    assert not least.reward(rewards, lengths, MAX_LENGTH).advantages.any()
    assert least.reward(np.array([0.0, 1e-3]), lengths[:2], MAX_LENGTH).advantages.any()


@pytest.mark.parametrize("name", CONFIGS)
def test_a_response_without_reward_has_no_advantage_and_no_part_in_the_others(name):
    """TRL's meaning of rewards that are all None."""
    algorithm = build(CONFIGS[name])
    lengths = np.array([4, 5, 9])
    with_none = algorithm.reward(np.array([1.0, np.nan, 0.0]), lengths, MAX_LENGTH)
    without = algorithm.reward(np.array([1.0, 0.0]), lengths[[0, 2]], MAX_LENGTH)
    found = algorithm.batch_advantages([with_none])[0]
    expected = algorithm.batch_advantages([without])[0]
    assert found[1] == 0.0
    np.testing.assert_array_equal(found[[0, 2]], expected)
    nothing = algorithm.reward(np.full(3, np.nan), lengths, MAX_LENGTH)
    assert not np.concatenate(algorithm.batch_advantages([nothing])).any()


def test_advantages_are_the_papers():
    def of(config):
        return build(config).reward(REWARDS, LENGTHS, MAX_LENGTH).advantages

    centred = REWARDS - REWARDS.mean()
    scaled = centred / REWARDS.std(ddof=1)
    for config in (GRPOConfig(), DAPOConfig(), GSPOConfig()):
        np.testing.assert_allclose(of(config), scaled, rtol=1e-4)
    for config in (GRPOConfig(scale_rewards="none"), DrGRPOConfig(), ReinforcePPConfig()):
        np.testing.assert_allclose(of(config), centred, rtol=1e-6)
    wide = GRPOConfig(std_epsilon=0.5)
    np.testing.assert_allclose(of(wide), centred / (REWARDS.std(ddof=1) + 0.5), rtol=1e-6)
    others = [np.delete(REWARDS, i).mean() for i in range(4)]
    np.testing.assert_allclose(of(RLOOConfig()), REWARDS - others, rtol=1e-6)


def test_true_and_false_are_names_of_scales():
    assert GRPOConfig.model_validate({"scale_rewards": True}).scale_rewards == "group"
    assert GRPOConfig.model_validate({"scale_rewards": False}).scale_rewards == "none"


def test_dapo_punishes_overlong_responses_softly():
    algorithm = build(DAPOConfig(overlong_buffer=20, overlong_penalty=0.5))
    found = algorithm.punishment(np.array([5, 20, 25, 30, 40, 45]), 40)
    np.testing.assert_allclose(found, [0, 0, -0.125, -0.25, -0.5, -0.5])
    equal = algorithm.reward(np.ones(2), np.array([10, 40]), 40).advantages
    assert equal[0] > 0 > equal[1]


def _batch(config, *rewards):
    algorithm = build(config)
    assert algorithm.needs_batch
    parts = [algorithm.reward(np.asarray(r, float), LENGTHS, 40) for r in rewards]
    assert algorithm.batch_advantages([]) == []
    flat = algorithm.reward(np.full(4, 0.1), LENGTHS, 40)
    assert not np.concatenate(algorithm.batch_advantages([flat])).any()
    return np.concatenate(algorithm.batch_advantages(parts)), parts


def test_batch_scales():
    """TRL's over all rewards, verl's over all tokens, and that of version 0.1.0."""
    rewards = (REWARDS, 3 * REWARDS, np.ones(4))
    centred = np.concatenate([r - r.mean() for r in rewards])
    grpo = (GRPOConfig(scale_rewards="batch", std_epsilon=e) for e in (1e-6, 0.0))
    for config in (*grpo, ReinforcePPConfig(whiten="batch")):
        found, _ = _batch(config, *rewards)
        expected = centred / np.concatenate(rewards).std(ddof=1)
        np.testing.assert_allclose(found, expected, rtol=1e-3)
        assert not found[-4:].any()
    found, _ = _batch(ReinforcePPConfig(whiten="responses"), *rewards)
    np.testing.assert_allclose(found, centred / np.sqrt(np.mean(centred**2)), rtol=1e-5)
    found, _ = _batch(ReinforcePPConfig(), *rewards)
    tokens = np.repeat(centred, np.tile(LENGTHS, 3))
    np.testing.assert_allclose(found, (centred - tokens.mean()) / tokens.std(ddof=1), rtol=1e-5)
    assert found[-4:].all()


def _token_loss(logp, old, a, config):
    low = config.epsilon
    high = getattr(config, "epsilon_high", low)
    r = torch.exp(logp - old)
    first = r if config.delta is None else r.clamp(max=config.delta)
    return -torch.minimum(first * a, r.clamp(1 - low, 1 + high) * a), r


def _response_loss(ratio, a, config):
    low = config.epsilon
    high = getattr(config, "epsilon_high", low)
    return -min(ratio * a, ratio.clamp(1 - low, 1 + high) * a)


def _tokens(logp, old, a, kl, config):
    loss, r = _token_loss(logp, old, a, config)
    return (loss + 0.1 * r * kl).sum(), len(logp)


def _sequence_mean(logp, old, a, kl, config):
    loss, r = _token_loss(logp, old, a, config)
    return (loss + 0.1 * r * kl).mean(), 1


def _dr_grpo(logp, old, a, kl, config):
    return _tokens(logp, old, a, kl, config)[0], MAX_LENGTH


def _rloo(logp, old, a, kl, config):
    r = torch.exp(logp - old)
    return _response_loss(r.prod(), a, config) + 0.1 * (r * kl).sum(), 1


def _gspo(logp, old, a, kl, config):
    r = torch.exp((logp - old).mean())
    return _response_loss(r, a, config) + 0.1 * (r * kl).mean(), 1


FORMULAS = {
    "grpo": _tokens,
    "grpo_sequence": _sequence_mean,
    "dr_grpo": _dr_grpo,
    "dapo": _tokens,
    "rloo": _rloo,
    "reinforce_pp": _tokens,
    "gspo": _gspo,
}
"""Loss of one response, and its part of the divisor, straight from the papers, by configuration or
by kind. A new algorithm adds its own."""


def plain_loss(name, config, model, reference, groups, updates):
    """The whole batch's loss; ``reference`` for the KL term of weight 0.1."""
    formula = FORMULAS.get(name) or FORMULAS[config.kind]
    total, divisor = torch.zeros(()), 0.0
    samples = [sample for group in groups for sample in group.samples]
    pairs = [(sample.prompt_tokens, sample.tokens) for sample in samples]
    with torch.no_grad():
        references = padded_logprobs(reference, pairs)
    advantages = np.concatenate([group.advantages for group in groups]).tolist()
    found = zip(padded_logprobs(model, pairs), references, strict=True)
    for sample, a, (logp, ref) in zip(samples, advantages, found, strict=True):
        chosen = np.arange(len(logp)) if sample.loss_mask is None else sample.loss_mask.nonzero()[0]
        logp, ref = logp[chosen], ref[chosen]
        old = logp.detach() if updates == 1 else torch.from_numpy(sample.logprobs)[chosen]
        kl = torch.exp(ref - logp) - (ref - logp) - 1
        loss, part = formula(logp, old, a, kl, config)
        total, divisor = total + (loss if len(chosen) else 0.0), divisor + part
    return total / divisor


@cache
def _by_the_formula(name, updates, masked):
    """Groups, their loss and its gradients; the reference's weights are those of seed 5."""
    model = make_model()
    groups = group_batch(model, CONFIGS[name], off=0.3, old=updates > 1)
    if masked:
        groups = with_environment(groups)
    expected = plain_loss(name, CONFIGS[name], model, make_model(seed=5), groups, updates)
    expected.backward()
    return groups, expected.item(), {n: p.grad for n, p in model.named_parameters()}


def test_a_clip_counts_on_the_side_of_its_bound():
    ratios = torch.tensor([1.5, 1.0, 0.5, 0.5, 1.5])
    batch = SimpleNamespace(
        old_logprobs=torch.zeros(5),
        sampler_logprobs=torch.zeros(5),
        advantages=torch.tensor([1.0, -1.0]),
        lengths=torch.tensor([2, 3]),
        owner=torch.tensor([0, 0, 1, 1, 1]),
        fresh=None,
    )
    config = TrainConfig()
    found = batch_loss(batch, ratios.log(), torch.zeros(5), None, build(GRPOConfig()), config)
    sums = dict(zip(SUMS, found.sums.tolist(), strict=True))
    assert (sums["clip_low"], sums["clip_high"]) == (2.0, 1.0)


@pytest.mark.parametrize("name", GRADIENTS)
@pytest.mark.parametrize("updates", [1, 2])
@pytest.mark.parametrize(
    ("masked", "packing"), [(False, "auto"), (True, "padded"), (True, "prompt_shared")]
)
def test_loss_and_gradient_equal_the_plain_formula(name, updates, masked, packing, tokenizer):
    model, other = make_model(), make_model(seed=5)
    groups, expected, wanted = _by_the_formula(name, updates, masked)
    norm = torch.stack([g.norm() for g in wanted.values()]).norm()

    config = TrainConfig(
        algorithm=CONFIGS[name], beta=0.1, updates_per_step=updates, packing=packing
    )
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    model.load_state_dict(other.state_dict())
    trainer = Trainer(model, tokenizer, config, temperature=1.0, max_length=MAX_LENGTH)
    with torch.no_grad():
        for n, p in model.named_parameters():
            p.copy_(start[n])
    partial = trainer.accumulate(groups)
    for n, p in model.named_parameters():
        difference = (p.grad / partial.normaliser - wanted[n]).norm() / norm
        assert difference < 1e-5, n
    update = trainer.apply(partial)
    assert update.metrics["loss"] == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert update.grad_norm == pytest.approx(float(norm), rel=1e-5)
    clipped = update.metrics["clip_ratio/region_mean"]
    assert (clipped == 0.0) if updates == 1 else (0.0 < clipped < 1.0)
    sides = update.metrics["clip_ratio/low_mean"] + update.metrics["clip_ratio/high_mean"]
    assert clipped == pytest.approx(sides)
    assert update.metrics["kl"] > 0
