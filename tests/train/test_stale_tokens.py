"""Responses of several weights: the ratio of each token to those that sampled it, or no loss."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from gang import gradient, make_trainer
from tiny_models import group_batch, make_model, naive_logprobs

from rollpacker.config import GRPOConfig, SamplerCorrectionConfig
from rollpacker.core.types import Group, Sample

PACKINGS = ("padded", "prompt_shared")
OLDER, MODEL = make_model(seed=3), make_model()
EPSILON = 0.2


def mixed_groups() -> list[Group]:
    """Each response begun by older weights and ended by the model's own, the last of a group by
    these alone."""
    groups = group_batch(MODEL, GRPOConfig(), count=3, size=4)
    return [replace(g, samples=tuple(map(_mixed, g.samples))) for g in groups]


def _mixed(sample: Sample) -> Sample:
    stale = stale_of(sample)
    with torch.no_grad():
        of = [naive_logprobs(m, sample.prompt_tokens, sample.tokens) for m in (OLDER, MODEL)]
    older, own = (each.numpy().astype(np.float32) for each in of)
    return replace(sample, logprobs=np.where(stale, older, own))


def stale_of(sample: Sample) -> np.ndarray:
    count = 0 if sample.index == 3 else len(sample.tokens) // 2
    return np.arange(len(sample.tokens)) < count


def changed(groups, change):
    return [replace(g, samples=tuple(map(change, g.samples))) for g in groups]


def by_hand(groups, loss) -> torch.Tensor:
    """The gradient of the mean over all tokens of ``loss(now, sampler, advantage, stale)``."""
    model = make_model()
    total, tokens = torch.zeros(()), 0
    for group in groups:
        for sample, advantage in zip(group.samples, group.advantages, strict=True):
            now = naive_logprobs(model, sample.prompt_tokens, sample.tokens)
            sampler = torch.from_numpy(sample.logprobs)
            stale = torch.from_numpy(stale_of(sample))
            total = total + loss(now, sampler, float(advantage), stale).sum()
            tokens += len(now)
    (total / tokens).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def trained(groups, how, **config) -> torch.Tensor:
    trainer = make_trainer(
        MODEL, packing=how, algorithm=GRPOConfig(loss_type="token_mean", epsilon=EPSILON), **config
    )
    partial = trainer.accumulate(groups)
    return gradient(trainer) / partial.normaliser


def ratio_loss(now, sampler, advantage, stale):
    del stale
    ratio = torch.exp(now - sampler)
    clipped = ratio.clamp(1 - EPSILON, 1 + EPSILON)
    return -torch.minimum(ratio * advantage, clipped * advantage)


def masked_loss(now, sampler, advantage, stale):
    del sampler
    return -torch.exp(now - now.detach()) * advantage * ~stale


def truncated_loss(now, sampler, advantage, stale):
    del stale
    weight = torch.exp(now.detach() - sampler).clamp(max=2.0)
    return -torch.exp(now - now.detach()) * advantage * weight


def fresh_loss(now, sampler, advantage, stale):
    del sampler, stale
    return -torch.exp(now - now.detach()) * advantage


@pytest.mark.parametrize("how", PACKINGS)
@pytest.mark.parametrize("kind", ["ratio", "mask", "truncate", "fresh"])
def test_the_gradient_is_the_one_computed_by_hand(how, kind):
    groups, config = mixed_groups(), {}
    loss = {"ratio": ratio_loss, "mask": masked_loss, "truncate": truncated_loss}.get(
        kind, fresh_loss
    )
    given = groups
    if kind == "ratio":
        given = changed(groups, lambda s: replace(s, old_logprobs=s.logprobs))
    elif kind == "mask":
        given = changed(groups, lambda s: replace(s, stale=stale_of(s)) if s.index < 3 else s)
    elif kind == "truncate":
        config["sampler_correction"] = SamplerCorrectionConfig(kind="truncate")
    wanted = by_hand(groups, loss)
    difference = trained(given, how, **config) - wanted
    assert difference.norm() < 1e-6 * max(1.0, float(wanted.norm()))
    plain = by_hand(groups, fresh_loss)
    assert kind == "fresh" or (plain - wanted).norm() > 1e-2 * plain.norm()
