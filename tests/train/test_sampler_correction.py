"""Importance weights between sampler and trainer, and what is measured of their agreement."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from gang import gradient, make_trainer
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import clone, group_batch, make_model, naive_logprobs, with_environment

from rollpacker.config import GRPOConfig, GSPOConfig, RunConfig, SamplerCorrectionConfig
from rollpacker.config.reading import ConfigError, parse
from rollpacker.train.base import RATIO, Partial
from rollpacker.train.losses import AGREEMENT, agreement, metrics

MODEL = make_model()
LEVELS = ("token", "sequence", "geometric")
KINDS = ("none", "truncate", "mask")
BOUNDS: dict[str, dict[str, float]] = {
    "token": {"low": 0.6, "high": 1.5},
    "sequence": {"low": 0.3, "high": 4.0},
    "geometric": {"low": 0.95, "high": 1.05},
}
"""Within which some ratios of noise of 0.3 nats are, and some are not."""


def correction(kind: str, level: str, **bounds: float) -> SamplerCorrectionConfig:
    return SamplerCorrectionConfig.model_validate(
        {"kind": kind, "level": level, **(bounds or BOUNDS[level])}
    )


def formula(differences: np.ndarray, config: SamplerCorrectionConfig) -> np.ndarray:
    """Weights of one response's tokens, by the papers."""
    ratios = np.exp(differences)
    if config.level == "sequence":
        ratios = np.full(len(ratios), np.prod(ratios))
    elif config.level == "geometric":
        ratios = np.full(len(ratios), np.prod(ratios) ** (1 / len(ratios)))
    match config.kind:
        case "none":
            return np.ones(len(ratios))
        case "truncate":
            return np.minimum(ratios, config.high)
        case _:
            return np.where((config.low <= ratios) & (ratios <= config.high), ratios, 0.0)


@cache
def _moved() -> tuple[Any, list[torch.Tensor], list[torch.Tensor]]:
    """A model away from the first weights, and the log-probabilities of the groups' responses by
    both: sequence by sequence, through transformers' own forward."""
    first, moved = clone(MODEL), clone(MODEL)
    with torch.no_grad():
        for parameter in moved.parameters():
            parameter.add_(0.01 * parameter.sign())
    pairs = [(s.prompt_tokens, s.tokens) for group in _groups() for s in group.samples]
    with torch.no_grad():
        references = [naive_logprobs(first, *pair) for pair in pairs]
    return moved, [naive_logprobs(moved, *pair) for pair in pairs], references


@cache
def _groups() -> list[Any]:
    return group_batch(MODEL, GRPOConfig(), off=0.3)


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_is_that_of_the_formula(kind: str, level: str, old: bool) -> None:
    """With a KL term beside it."""
    config, beta = correction(kind, level), 0.1
    groups = _groups()
    if old:  # the weights that sampled differ from those being trained and from the sampler
        groups = [_aged(group) for group in groups]
    trainer = make_trainer(MODEL, beta=beta, sampler_correction=config)
    with torch.no_grad():
        for parameter in trainer._model.parameters():
            parameter.add_(0.01 * parameter.sign())
    partial = trainer.accumulate(groups)
    loss = torch.zeros(())
    moved, all_logprobs, references = _moved()
    samples = [sample for group in groups for sample in group.samples]
    advantages = [advantage for group in groups for advantage in group.advantages]
    found_by_both = zip(samples, advantages, all_logprobs, references, strict=True)
    for sample, advantage, logprobs, reference in found_by_both:
        now = logprobs.detach()
        anchor = torch.from_numpy(sample.old_logprobs) if old else now
        weights = formula(anchor.double().numpy() - sample.logprobs, config)
        ratio = torch.exp(logprobs - anchor)
        plain, bounded = ratio * advantage, ratio.clamp(0.8, 1.2) * advantage
        losses = -torch.minimum(plain, bounded) * torch.from_numpy(weights).float()
        difference = reference - logprobs
        kl = (torch.exp(difference) - difference - 1) * ratio
        loss = loss + (losses + beta * kl).sum()
    slopes = torch.autograd.grad(loss, list(moved.parameters()), retain_graph=True)
    wanted = torch.cat([each.flatten() for each in slopes])
    found = gradient(trainer)
    assert (found - wanted).abs().max() <= 1e-6 * wanted.abs().max()
    assert partial.sums["loss"] == pytest.approx(float(loss.detach()), rel=1e-4, abs=1e-3)


def _aged(group):
    noise = np.random.default_rng(5)
    return replace(
        group,
        samples=tuple(
            replace(s, old_logprobs=s.logprobs + np.float32(0.3) * noise.normal(size=len(s.tokens)))
            for s in group.samples
        ),
    )


def test_weights_change_what_the_sampler_decides_and_nothing_else() -> None:
    """Where the two agree every kind is the plain gradient; where they do not each is another."""

    def found(off: float, **settings: Any) -> torch.Tensor:
        trainer = make_trainer(MODEL, **settings)
        trainer.accumulate(group_batch(MODEL, GSPOConfig(), off=off))
        return gradient(trainer)

    gspo = {"algorithm": GSPOConfig()}
    plain = found(0.3, **gspo)
    others = [found(0.3, **gspo, sampler_correction=correction(k, v))
              for k in KINDS[1:] for v in LEVELS]  # fmt: skip
    for one, other in itertools.combinations([plain, *others], 2):
        assert (one - other).norm() > 1e-3 * plain.norm()
    exact = found(0.0, **gspo)
    for kind in KINDS[1:]:
        close = found(0.0, **gspo, sampler_correction=correction(kind, "sequence"))
        assert (close - exact).norm() < 1e-5 * exact.norm()
    assert torch.equal(plain, found(0.3, **gspo, sampler_correction=correction("none", "token")))


ERRORS = {
    "none": 76,
    "token, unbounded": 56,
    "sequence, unbounded": 0,
    "truncate, token": 58,
    "truncate, sequence": 12,
    "truncate, geometric": 35,
    "mask, token": 61,
    "mask, sequence": 67,
    "mask, geometric": 40,
}
"""In percent of the largest entry; docs/troubleshooting.md has most of them."""


def test_the_expected_gradient_is_as_far_from_the_trainers_as_the_guide_says() -> None:
    """All responses of two tokens over a vocabulary of four, each as often as it is sampled, by
    logits that are 0.5 off: only with the response's whole ratio is nothing left of the sampler."""
    draw = torch.Generator().manual_seed(3)
    logits = torch.randn(5, 4, generator=draw, dtype=torch.float64, requires_grad=True)
    sampler = (logits.detach() + 0.5 * torch.randn(5, 4, generator=draw)).log_softmax(-1)
    rewards = torch.randn(4, 4, generator=draw, dtype=torch.float64)
    pairs = list(itertools.product(range(4), repeat=2))
    trainer = logits.log_softmax(-1)
    mine, theirs = (
        torch.stack([torch.stack((table[0, a], table[1 + a, b])) for a, b in pairs])
        for table in (trainer, sampler)
    )
    often = theirs.sum(1).exp() * rewards.flatten()
    wanted = slope((mine.sum(1).exp() * rewards.flatten()).sum(), logits)
    owner, lengths = torch.arange(len(pairs)).repeat_interleave(2), torch.full((len(pairs),), 2)
    for name, percent in ERRORS.items():
        kind, _, rest = name.partition(", ")
        config = {"kind": kind, "level": rest or "token"}
        if rest == "unbounded":
            config = {"kind": "truncate", "level": kind, "high": 1e6}
        found = agreement(
            mine.flatten(), theirs.flatten(), owner, lengths, SamplerCorrectionConfig(**config)
        )
        weights = torch.ones(()) if kind == "none" else found.weights.view(-1, 2)
        error = slope((often * (weights * mine).sum(1)).sum(), logits) - wanted
        assert round(float(100 * error.abs().max() / wanted.abs().max())) == percent, name


def slope(value: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(value, logits, retain_graph=True)[0]


# --- what is measured ---------------------------------------------------------------------------

PLAIN = make_trainer(MODEL)
lengths_of = st.lists(st.integers(1, 5), min_size=1, max_size=6)


@given(lengths_of, st.integers(0, 2**32 - 1), st.data())
def test_any_split_of_a_batch_measures_the_same(lengths: list[int], seed: int, data: Any) -> None:
    kind, level = data.draw(st.sampled_from(KINDS)), data.draw(st.sampled_from(LEVELS))
    config = correction(kind, level)
    rng = np.random.default_rng(seed)
    rows = [
        (rng.normal(size=n).astype(np.float32), rng.normal(size=n).astype(np.float32))
        for n in lengths
    ]
    cuts = data.draw(st.lists(st.integers(0, len(rows)), max_size=4).map(sorted))
    ends = [0, *cuts, len(rows)]
    parts = [rows[a:b] for a, b in itertools.pairwise(ends) if b > a]
    order = data.draw(st.permutations(parts))
    total = Partial(normaliser=0.0, tokens=0, sums={})
    for part in order:
        total = total + _partial(part, config)
    whole = _partial(rows, config)
    assert total.sums == pytest.approx(whole.sums, rel=1e-4, abs=1e-5)
    assert total.ranges == whole.ranges
    _check(metrics(total, PLAIN.algorithm, PLAIN._config), rows, config)


def _partial(rows: list[tuple[np.ndarray, np.ndarray]], config: SamplerCorrectionConfig) -> Partial:
    trainer, sampler = (torch.from_numpy(np.concatenate(each)) for each in zip(*rows, strict=True))
    lengths = torch.tensor([len(mine) for mine, _ in rows])
    owner = torch.repeat_interleave(torch.arange(len(rows)), lengths)
    found = agreement(trainer, sampler, owner, lengths, config)
    top, bottom = found.extremes.tolist()
    sums = dict(zip(AGREEMENT, found.sums.tolist(), strict=True))
    trained = dict.fromkeys(("entropy", "ratio", "abs_logprob_difference"), 0.0)
    return Partial(
        normaliser=1.0,
        tokens=len(owner),
        sums=sums | trained | {"tokens_run": float(len(owner))},
        ranges={RATIO: (-bottom, top)},
    )


def _check(
    found: dict[str, float],
    rows: list[tuple[np.ndarray, np.ndarray]],
    config: SamplerCorrectionConfig,
) -> None:
    """Against the definitions, in float64 and without sums."""
    each = [mine.astype(float) - theirs for mine, theirs in rows]
    flat = np.concatenate(each)
    ratios = np.exp(flat)
    free = config.model_copy(update={"kind": "truncate", "high": math.inf})
    levels = np.concatenate([formula(one, free) for one in each])
    weights = np.concatenate([formula(one, config) for one in each])
    weights = levels if config.kind == "none" else weights
    outside = (levels < config.low) | (levels > config.high)
    effective = weights.sum() ** 2 / (len(flat) * np.square(weights).sum() or 1.0)
    wanted = {
        "k3": np.mean(ratios - flat - 1),
        "abs_logprob_difference": np.abs(flat).mean(),
        "ratio_mean": ratios.mean(),
        "ratio_min": ratios.min(),
        "ratio_max": ratios.max(),
        "perplexity_ratio": np.mean([np.exp(-one.mean()) for one in each]),
        "effective_sample_size": effective,
        "outside": outside.mean(),
    }
    for name, value in wanted.items():
        assert found[f"sampler/{name}"] == pytest.approx(value, rel=1e-3, abs=1e-4), name


@pytest.mark.parametrize("packing", ["padded", "prompt_shared"])
@pytest.mark.parametrize("budget", [1, 60, 10_000])
def test_micro_batches_and_replicas_measure_what_one_does(budget: int, packing: str) -> None:
    config = correction("mask", "sequence")
    groups = with_environment(group_batch(MODEL, GRPOConfig(), off=0.3))
    whole = make_trainer(MODEL, micro_batch_tokens=10_000, sampler_correction=config)
    wanted = whole.accumulate(groups)
    cut = make_trainer(MODEL, micro_batch_tokens=budget, packing=packing, sampler_correction=config)
    total = cut.accumulate(groups[:1]) + cut.accumulate(groups[1:4]) + cut.accumulate(groups[4:])
    assert total.sums == pytest.approx(wanted.sums, rel=1e-4, abs=1e-3)
    assert total.ranges[RATIO] == pytest.approx(wanted.ranges[RATIO], rel=1e-4)
    found, update = cut.apply(total).metrics, whole.apply(wanted).metrics
    assert found == pytest.approx(update, rel=1e-3, abs=1e-5)
    assert found["sampler/ratio_min"] < 0.7
    assert found["sampler/ratio_max"] > 1.5


def test_without_a_correction_a_later_update_measures_nothing() -> None:
    """There the old log-probabilities may be the sampler's own."""
    for old, kind in itertools.product((False, True), ("none", "mask")):
        trainer = make_trainer(MODEL, sampler_correction=correction(kind, "token"))
        groups = group_batch(MODEL, GRPOConfig(), off=0.3, old=old)
        found = trainer.apply(trainer.accumulate(groups)).metrics
        assert ("sampler/k3" in found) == (kind == "mask" or not old)
        assert "trained_tokens/abs_logprob_difference" in found


def test_where_every_response_is_masked_nothing_moves() -> None:
    config = correction("mask", "sequence", low=1.0, high=1.0)
    trainer = make_trainer(MODEL, sampler_correction=config)
    update = trainer.apply(trainer.accumulate(group_batch(MODEL, GRPOConfig(), off=0.3)))
    assert update.grad_norm == 0.0
    assert update.metrics["sampler/outside"] == 1.0
    assert update.metrics["sampler/effective_sample_size"] == 0.0


def test_weights_are_finite_however_far_apart() -> None:
    trainer, sampler = torch.tensor([0.0, -500.0]), torch.tensor([-500.0, 0.0])
    owner, lengths = torch.tensor([0, 1]), torch.tensor([1, 1])
    found = agreement(trainer, sampler, owner, lengths, correction("truncate", "token", high=1e30))
    assert found.weights.tolist() == pytest.approx([math.exp(20), math.exp(-20)], rel=1e-5)


JOB: dict[str, Any] = {
    "model": {"path": "m"},
    "data": {"path": "d.jsonl"},
    "rewards": [{"function": "math"}],
    "train": {"sampler_correction": {"kind": "mask"}},
}


@pytest.mark.parametrize("cut", [{"top_p": 0.9}, {"top_k": 5}])
def test_a_sampler_that_cuts_its_softmax_has_no_correction(cut: dict[str, float]) -> None:
    with pytest.raises(ConfigError) as error:
        parse(JOB | {"rollout": cut})
    said = str(error.value)
    assert "\n" not in said.strip()
    assert "train.sampler_correction.kind=mask" in said
    assert "rollout.top_p" in said
    assert "rollout.top_k" in said
    assert isinstance(parse(JOB | {"rollout": cut | {"temperature": 0.0}}), RunConfig)
