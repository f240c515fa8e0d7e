"""Our gradient and advantages against verl's core algorithms, on the same groups."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from peer_case import (
    CAP,
    COUNT,
    LIMIT,
    SIZE,
    Found,
    check_reach,
    largest,
    make_model,
    ours,
    sampled,
    weights,
)
from peer_options import VERL_CASES, Case

pytestmark = pytest.mark.peers

METRICS = {
    "k3": "k3_kl",
    "perplexity_ratio": "ppl_ratio",
    "effective_sample_size": "rollout_is_eff_sample_size",
}
"""verl's names of ours."""


def padded(case: Case) -> dict[str, torch.Tensor]:
    """The batch as verl lays it out: prompts to the left, responses to the right."""
    rows = sampled(case)
    longest = max(len(row.prompt_tokens) for row in rows)
    ids = torch.zeros(COUNT, longest + CAP, dtype=torch.long)
    attention, mask = torch.zeros_like(ids), torch.zeros(COUNT, CAP)
    rewards, sampler = torch.zeros(COUNT, CAP), torch.zeros(COUNT, CAP)
    for i, row in enumerate(rows):
        start, length = longest - len(row.prompt_tokens), len(row.tokens)
        whole = np.concatenate((row.prompt_tokens, row.tokens))
        ids[i, start : longest + length] = torch.from_numpy(whole)
        attention[i, start : longest + length] = 1
        mask[i, :length] = 1
        rewards[i, length - 1] = row.reward
        sampler[i, :length] = torch.from_numpy(row.logprobs)
        if case.ours.get("mask_truncated_completions") and row.finish_reason == "length":
            mask[i] = 0
    named = {"attention": attention, "mask": mask, "rewards": rewards, "sampler": sampler}
    return {"ids": ids, **named}


def logprobs(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Of the responses, shape (N, CAP)."""
    positions = (batch["attention"].cumsum(1) - 1).clamp(min=0)
    out = model(input_ids=batch["ids"], attention_mask=batch["attention"], position_ids=positions)
    responses = batch["ids"][:, -CAP:]
    return out.logits[:, -CAP - 1 : -1].log_softmax(-1).gather(2, responses[..., None])[..., 0]


def theirs(case: Case) -> tuple[Found, np.ndarray, np.ndarray]:
    """verl's gradient; the ratio and the advantage of every token of the loss."""
    from verl.trainer.ppo import core_algos
    from verl.workers.config import ActorConfig

    spec, batch = case.verl, padded(case)
    assert spec is not None
    index = np.repeat(np.arange(COUNT // SIZE), SIZE)
    options = {"norm_adv_by_std_in_grpo": spec.get("std", True)}
    estimate = core_algos.get_adv_estimator_fn(spec["advantage"])
    advantages, _ = estimate(
        batch["rewards"].clone(),
        batch["mask"],
        index=index,
        **(options if spec["advantage"] == "grpo" else {}),
    )
    model = make_model()
    state = weights(model, case.drift)
    with torch.no_grad():
        reference = logprobs(model, batch)
        model.load_state_dict(state.sampler)
        old = logprobs(model, batch)
    model.load_state_dict(state.now)
    now = logprobs(model, batch)
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=SIZE,
        ppo_micro_batch_size_per_gpu=COUNT,
        clip_ratio_low=spec.get("clip_ratio_low", 0.2),
        clip_ratio_high=spec.get("clip_ratio_high", 0.2),
        clip_ratio_c=spec["clip_ratio_c"],
    )
    config.global_batch_info["loss_scale_factor"] = CAP
    weights_of, metrics = importance_weights(case, old, batch)
    loss, _ = core_algos.get_policy_loss_fn(spec["loss"])(
        old, now, advantages, batch["mask"], spec["mode"], config, weights_of
    )
    if case.ours.get("beta"):
        kl = core_algos.kl_penalty(now, reference, "low_var_kl")
        loss = loss + case.ours["beta"] * core_algos.agg_loss(kl, batch["mask"], spec["mode"])
    loss.backward()
    gradient = {n: p.grad for n, p in model.named_parameters()}
    counts = batch["mask"].bool()
    each = advantages.sum(1) / batch["mask"].sum(1)
    ratios = (now - old).exp()[counts].detach().numpy()
    return Found(gradient, each.numpy(), metrics), ratios, advantages[counts].numpy()


def importance_weights(
    case: Case, old: torch.Tensor, batch: dict[str, torch.Tensor]
) -> tuple[torch.Tensor | None, dict[str, float]]:
    """verl's weights and their metrics; nothing where the sampler is not asked."""
    from verl.trainer.ppo import rollout_corr_helper as helper

    if not case.noise:
        return None, {}
    spec = case.verl or {}
    options = {name: spec[name] for name in ("rollout_is", "rollout_is_threshold")}
    found, mask, metrics = helper.compute_rollout_correction_and_rejection_mask(
        old, batch["sampler"], batch["mask"], **options
    )
    assert torch.equal(mask, batch["mask"])
    return found.batch["rollout_is_weights"], metrics


def call(case: Case) -> str:
    """What of verl is called, in its configuration's words."""
    spec = dict(case.verl or {})
    words = [
        f"adv_estimator={spec.pop('advantage')}",
        f"loss_mode={spec.pop('loss')}",
        f"loss_agg_mode={spec.pop('mode')}",
    ]
    if not spec.pop("std", True):
        words.append("norm_adv_by_std_in_grpo=False")
    words += [f"{key}={v if isinstance(v, str) else f'{v:g}'}" for key, v in spec.items()]
    if case.ours.get("beta"):
        words.append(f"kl_loss_coef={case.ours['beta']}, kl_loss_type=low_var_kl")
    return ", ".join(words)


@pytest.mark.parametrize("case", VERL_CASES, ids=lambda case: case.name)
def test_gradient_and_advantages_are_verls(case: Case, record) -> None:
    mine = ours(case)
    peer, ratios, token_advantages = theirs(case)
    check_reach(case, mine, ratios, token_advantages)
    counted = ~np.isnan(peer.advantages)  # a masked response has none with verl
    if case.ours.get("mask_truncated_completions"):
        assert 0 < counted.sum() < COUNT
    else:
        assert counted.all()
    apart = np.abs(mine.advantages - peer.advantages)[counted]
    gradient = largest(mine.gradient, peer.gradient)
    record("verl", case.name, call(case), gradient, float(apart.max()))
    assert apart.max() <= LIMIT * np.abs(peer.advantages[counted]).max()
    assert gradient <= LIMIT
    if case.noise and case.ours.get("beta"):  # else not all tokens are run
        for name, verls in METRICS.items():
            value = peer.metrics[f"rollout_corr/{verls}"]
            assert mine.metrics[f"sampler/{name}"] == pytest.approx(value, rel=1e-4), name
