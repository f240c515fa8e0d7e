"""Advantages and losses against plain implementations of the papers' formulas."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import MAX_LENGTH, group_batch, make_model, naive_logprobs

from rollpacker.config import (
    DAPOConfig,
    DrGRPOConfig,
    GRPOConfig,
    GSPOConfig,
    ReinforcePPConfig,
    RLOOConfig,
    TrainConfig,
)
from rollpacker.train.algorithms import build, informative
from rollpacker.train.local import LocalTrainer

CONFIGS = {
    "grpo": GRPOConfig(),
    "grpo_sequence": GRPOConfig(loss_type="sequence_mean"),
    "grpo_unscaled": GRPOConfig(scale_rewards=False),
    "dr_grpo": DrGRPOConfig(),
    "dapo": DAPOConfig(),
    "rloo": RLOOConfig(),
    "reinforce_pp": ReinforcePPConfig(),
    "gspo": GSPOConfig(),
}
REWARDS = np.array([1.0, 0.0, 0.5, 1.0], np.float32)
LENGTHS = np.array([10, 20, 30, 40])


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("base", [0.1, 0.3, 1.0, 1e6])
def test_equal_rewards_give_exactly_no_advantage(name, base):
    rewards = np.full(7, base, np.float32)
    assert not informative(rewards)
    found = build(CONFIGS[name]).advantages(rewards, np.arange(1, 8), MAX_LENGTH)
    assert found.dtype == np.float32
    assert not found.any()


def test_a_group_is_informative_by_the_range_of_its_rewards():
    assert informative(np.array([0.0, 0.002], np.float32))
    assert not informative(np.array([0.0, 0.0005], np.float32))
    assert not informative(np.array([1.0], np.float32))


def test_advantages_are_the_papers():
    def of(config):
        return build(config).advantages(REWARDS, LENGTHS, MAX_LENGTH)

    centred = REWARDS - REWARDS.mean()
    scaled = centred / REWARDS.std(ddof=1)
    for config in (GRPOConfig(), DAPOConfig(), GSPOConfig()):
        np.testing.assert_allclose(of(config), scaled, rtol=1e-4)
    for config in (GRPOConfig(scale_rewards=False), DrGRPOConfig(), ReinforcePPConfig()):
        np.testing.assert_allclose(of(config), centred, rtol=1e-6)
    others = [np.delete(REWARDS, i).mean() for i in range(4)]
    np.testing.assert_allclose(of(RLOOConfig()), REWARDS - others, rtol=1e-6)


def test_dapo_punishes_overlong_responses_softly():
    algorithm = build(DAPOConfig(overlong_buffer=20, overlong_penalty=0.5))
    found = algorithm.punishment(np.array([5, 20, 25, 30, 40, 45]), 40)
    np.testing.assert_allclose(found, [0, 0, -0.125, -0.25, -0.5, -0.5])
    equal = algorithm.advantages(np.ones(2, np.float32), np.array([10, 40]), 40)
    assert equal[0] > 0 > equal[1]


def test_reinforce_pp_normalises_over_the_batch():
    algorithm = build(ReinforcePPConfig())
    assert algorithm.needs_batch
    parts = [algorithm.advantages(r, LENGTHS, 40) for r in (REWARDS, 3 * REWARDS, np.ones(4))]
    found = np.concatenate(algorithm.batch_advantages(parts))
    together = np.concatenate(parts)
    np.testing.assert_allclose(found, together / together.std(), rtol=1e-5)
    assert not found[-4:].any()
    assert algorithm.batch_advantages([]) == []
    assert not np.concatenate(algorithm.batch_advantages([np.zeros(3, np.float32)])).any()


def _plain_loss(name, config, model, reference, groups, updates):
    """The whole batch's loss, straight from the papers; ``reference`` for the KL term."""
    total, divisor = torch.zeros(()), 0.0
    for group in groups:
        for sample, a in zip(group.samples, group.advantages, strict=True):
            logp = naive_logprobs(model, sample.prompt_tokens, sample.tokens)
            old = logp.detach() if updates == 1 else torch.from_numpy(sample.logprobs)
            with torch.no_grad():
                ref = naive_logprobs(reference, sample.prompt_tokens, sample.tokens)
            kl = torch.exp(ref - logp) - (ref - logp) - 1
            length, a = len(logp), float(a)
            low = config.epsilon
            high = getattr(config, "epsilon_high", low)
            if name == "rloo":
                r = torch.exp((logp - old).sum())
                loss = -min(r * a, r.clamp(1 - low, 1 + high) * a) + 0.1 * kl.sum()
                divisor += 1
            elif name == "gspo":
                r = torch.exp((logp - old).sum() / length)
                loss = -min(r * a, r.clamp(1 - low, 1 + high) * a) + 0.1 * kl.mean()
                divisor += 1
            else:
                r = torch.exp(logp - old)
                terms = -torch.minimum(r * a, r.clamp(1 - low, 1 + high) * a) + 0.1 * kl
                loss = terms.mean() if name == "grpo_sequence" else terms.sum()
                divisor += {"grpo_sequence": 1, "dr_grpo": MAX_LENGTH}.get(name, length)
            total = total + loss
    return total / divisor


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("updates", [1, 2])
def test_loss_and_gradient_equal_the_plain_formula(name, updates, tokenizer):
    model, other = make_model(), make_model(seed=5)
    groups = group_batch(model, CONFIGS[name], off=0.3, old=updates > 1)
    plain = make_model()
    expected = _plain_loss(name, CONFIGS[name], plain, other, groups, updates)
    expected.backward()
    wanted = {n: p.grad for n, p in plain.named_parameters()}
    norm = torch.stack([g.norm() for g in wanted.values()]).norm()

    config = TrainConfig(algorithm=CONFIGS[name], beta=0.1, updates_per_step=updates)
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    model.load_state_dict(other.state_dict())
    trainer = LocalTrainer(model, tokenizer, config, temperature=1.0, max_length=MAX_LENGTH)
    with torch.no_grad():
        for n, p in model.named_parameters():
            p.copy_(start[n])
    partial = trainer.accumulate(groups)
    for n, p in model.named_parameters():
        difference = (p.grad / partial.normaliser - wanted[n]).norm() / norm
        assert difference < 1e-5, n
    update = trainer.apply(partial)
    assert update.metrics["loss"] == pytest.approx(float(expected), rel=1e-4, abs=1e-6)
    assert update.grad_norm == pytest.approx(float(norm), rel=1e-5)
    clipped = update.metrics["clip_ratio"]
    assert (clipped == 0.0) if updates == 1 else (0.0 < clipped < 1.0)
    assert update.metrics["kl"] > 0
