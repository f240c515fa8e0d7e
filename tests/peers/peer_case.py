"""The same groups for everybody: a tiny model at three sets of weights, and cases by option."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from rollpacker.config import TrainConfig
from rollpacker.core.types import AttemptId, Group, PromptId, Sample
from rollpacker.train.algorithms import build
from rollpacker.train.local import LocalTrainer

VOCABULARY, CAP, PROMPTS, SIZE = 23, 24, 6, 4
COUNT = PROMPTS * SIZE
LIMIT = 1e-5
"""Largest difference of a gradient's entries over its largest entry."""


@dataclass(frozen=True)
class Case:
    """One algorithm with its options, as each of the three calls it.

    Args:
        name: of the row in docs/peers.md.
        ours: the section ``train``.
        trl: arguments of TRL's configuration; None where it has no such thing.
        verl: see ``test_verl.py``; None where it has no such thing.
        drift: scale of the update since the responses were sampled; 0 is on-policy.
        unscored: one response has no reward.
    """

    name: str
    ours: dict[str, Any]
    trl: dict[str, Any] | None = None
    verl: dict[str, Any] | None = None
    drift: float = 0.5
    unscored: bool = True


def _grpo(**options: Any) -> dict[str, Any]:
    return {"algorithm": {"kind": "grpo", **options}}


_TRL = {"loss_type": "dapo", "beta": 0.0}
_SMALL = {"std_epsilon": 1e-4}
"""TRL's; verl's is the default."""
_BETA = {"beta": 0.2}

TRL_CASES = (
    Case("grpo, on-policy", _grpo(**_SMALL), _TRL, drift=0.0),
    Case("grpo", _grpo(**_SMALL), _TRL),
    Case(
        "grpo, loss_type=sequence_mean",
        _grpo(**_SMALL, loss_type="sequence_mean"),
        _TRL | {"loss_type": "grpo"},
    ),
    Case(
        "grpo, scale_rewards=batch",
        _grpo(**_SMALL, scale_rewards="batch"),
        _TRL | {"scale_rewards": "batch"},
    ),
    Case("grpo, scale_rewards=none", _grpo(scale_rewards="none"), _TRL | {"scale_rewards": "none"}),
    Case("grpo, delta=1.5", _grpo(**_SMALL, delta=1.5), _TRL | {"delta": 1.5}),
    Case(
        "grpo, mask_truncated_completions",
        _grpo(**_SMALL) | {"mask_truncated_completions": True},
        _TRL | {"mask_truncated_completions": True},
    ),
    Case(
        "grpo, sequence_mean, mask_truncated_completions",
        _grpo(**_SMALL, loss_type="sequence_mean") | {"mask_truncated_completions": True},
        _TRL | {"loss_type": "grpo", "mask_truncated_completions": True},
    ),
    Case("grpo, beta, on-policy", _grpo(**_SMALL) | _BETA, _TRL | _BETA, drift=0.0),
    Case("grpo, beta", _grpo(**_SMALL) | _BETA, _TRL | _BETA),
    Case(
        "grpo, beta, kl_bias_correction=false",
        _grpo(**_SMALL) | _BETA | {"kl_bias_correction": False},
        _TRL | _BETA | {"use_bias_correction_kl": False},
    ),
    Case(
        "dr_grpo",
        {"algorithm": {"kind": "dr_grpo"}} | _BETA,
        _TRL | _BETA | {"loss_type": "dr_grpo", "scale_rewards": "none"},
    ),
    Case(
        "dr_grpo, mask_truncated_completions",
        {"algorithm": {"kind": "dr_grpo"}, "mask_truncated_completions": True},
        _TRL
        | {"loss_type": "dr_grpo", "scale_rewards": "none", "mask_truncated_completions": True},
    ),
    Case("dapo", {"algorithm": {"kind": "dapo", **_SMALL}}, _TRL | {"epsilon_high": 0.28}),
    Case("rloo", {"algorithm": {"kind": "rloo"}}, {"beta": 0.0}, drift=0.1),
    Case(
        "reinforce_pp, whiten=batch",
        {"algorithm": {"kind": "reinforce_pp", "whiten": "batch"}},
        _TRL | {"scale_rewards": "batch"},
    ),
    Case(
        "gspo",
        {"algorithm": {"kind": "gspo", **_SMALL}} | _BETA,
        _TRL
        | _BETA
        | {
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "epsilon": 3e-4,
            "epsilon_high": 4e-4,
        },
        drift=0.002,
    ),
)

_VERL = {"advantage": "grpo", "loss": "vanilla", "mode": "token-mean", "clip_ratio_c": 1e9}
VERL_CASES = (
    Case("grpo, on-policy", _grpo(), verl=_VERL, drift=0.0, unscored=False),
    Case("grpo", _grpo(), verl=_VERL, unscored=False),
    Case(
        "grpo, loss_type=sequence_mean",
        _grpo(loss_type="sequence_mean"),
        verl=_VERL | {"mode": "seq-mean-token-mean"},
        unscored=False,
    ),
    Case(
        "grpo, scale_rewards=none",
        _grpo(scale_rewards="none"),
        verl=_VERL | {"std": False},
        unscored=False,
    ),
    Case("grpo, delta=1.5", _grpo(delta=1.5), verl=_VERL | {"clip_ratio_c": 1.5}, unscored=False),
    Case(
        "grpo, mask_truncated_completions",
        _grpo() | {"mask_truncated_completions": True},
        verl=_VERL,
        unscored=False,
    ),
    Case(
        "grpo, beta, kl_bias_correction=false",
        _grpo() | _BETA | {"kl_bias_correction": False},
        verl=_VERL,
        unscored=False,
    ),
    Case(
        "dr_grpo",
        {"algorithm": {"kind": "dr_grpo"}},
        verl=_VERL | {"std": False, "mode": "seq-mean-token-sum-norm"},
        unscored=False,
    ),
    Case(
        "dapo",
        {"algorithm": {"kind": "dapo", "delta": 1.5}},
        verl=_VERL | {"clip_ratio_high": 0.28, "clip_ratio_c": 1.5},
        unscored=False,
    ),
    Case(
        "rloo, on-policy",
        {"algorithm": {"kind": "rloo"}},
        verl=_VERL | {"advantage": "rloo", "mode": "seq-mean-token-sum"},
        drift=0.0,
        unscored=False,
    ),
    Case(
        "reinforce_pp",
        {"algorithm": {"kind": "reinforce_pp"}},
        verl=_VERL | {"advantage": "reinforce_plus_plus_baseline"},
        unscored=False,
    ),
    Case(
        "reinforce_pp, mask_truncated_completions",
        {"algorithm": {"kind": "reinforce_pp"}, "mask_truncated_completions": True},
        verl=_VERL | {"advantage": "reinforce_plus_plus_baseline"},
        unscored=False,
    ),
    Case(
        "gspo",
        {"algorithm": {"kind": "gspo"}},
        verl=_VERL
        | {
            "loss": "gspo",
            "mode": "seq-mean-token-mean",
            "clip_ratio_low": 3e-4,
            "clip_ratio_high": 4e-4,
        },
        drift=0.002,
        unscored=False,
    ),
)


@dataclass(frozen=True)
class Weights:
    """State dicts of the model.

    Args:
        reference: what the run began with.
        sampler: what the responses were sampled by.
        now: what is trained.
    """

    reference: dict[str, torch.Tensor]
    sampler: dict[str, torch.Tensor]
    now: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Found:
    """A gradient by parameter name, advantages (N,), and metrics."""

    gradient: dict[str, torch.Tensor]
    advantages: np.ndarray
    metrics: dict[str, float] = field(default_factory=dict)


def make_model() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    shape = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
        tie_word_embeddings=False,
    )
    model = Qwen2ForCausalLM(shape)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0) if parameter.ndim > 1 else parameter.add_(
                0.1 * torch.randn_like(parameter)
            )
    return model.eval()


def make_tokenizer() -> PreTrainedTokenizerFast:
    words = {"<pad>": 0, "<eos>": 1} | {f"w{i}": i for i in range(2, VOCABULARY)}
    inner = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>")


def moved(state: dict[str, torch.Tensor], scale: float, seed: int) -> dict[str, torch.Tensor]:
    """Every weight moved by ``scale`` of its tensor's root mean square, at random."""
    draw = torch.Generator().manual_seed(seed)
    return {
        name: w + scale * w.square().mean().sqrt() * torch.randn(w.shape, generator=draw)
        for name, w in state.items()
    }


def weights(model: torch.nn.Module, drift: float) -> Weights:
    first = copy.deepcopy(model.state_dict())
    sampler = moved(first, 0.05, seed=1)
    return Weights(reference=first, sampler=sampler, now=moved(sampler, drift, seed=2))


def samples(unscored: bool) -> list[Sample]:
    """Group 5 has equal rewards; of group 0 one is cut off and, if asked, one without reward."""
    rng = np.random.default_rng(7)
    rows: list[Sample] = []
    for number in range(COUNT):
        group, index = divmod(number, SIZE)
        if index == 0:
            prompt = rng.integers(2, VOCABULARY, rng.integers(3, 9)).astype(np.int32)
        cut_off = index == 3 and group % 2 == 0
        length = CAP if cut_off else int(rng.integers(1, CAP))
        tokens = rng.integers(2, VOCABULARY, length).astype(np.int32)
        tokens[-1] = 2 if cut_off else 1
        reward: float | None = 0.5 if group == 5 else float(rng.integers(0, 5)) / 4 + 0.3 * index
        if unscored and number == 1:
            reward = None
        rows.append(
            Sample(
                prompt=PromptId(f"p{group}"),
                index=index,
                attempt=AttemptId(number),
                prompt_tokens=prompt,
                tokens=tokens,
                logprobs=np.zeros(length, np.float32),
                finish_reason="length" if cut_off else "stop",
                weights_version=0,
                reward=reward,
            )
        )
    return rows


def ours(case: Case) -> Found:
    """Our gradient and advantages of a case."""
    config = TrainConfig.model_validate(case.ours)
    model = make_model()
    state = weights(model, case.drift)
    trainer = LocalTrainer(
        model, make_tokenizer(), config, temperature=1.0, max_length=CAP, total_updates=1
    )
    model.load_state_dict(state.sampler)
    groups = rewarded(config, samples(case.unscored))
    if case.drift:
        old = trainer.score(groups)
        groups = [
            replace(
                g,
                samples=tuple(
                    replace(s, old_logprobs=old.get((s.prompt, s.index))) for s in g.samples
                ),
            )
            for g in groups
        ]
    model.load_state_dict(state.now)
    partial = trainer.accumulate(groups)
    gradient = {n: p.grad / partial.normaliser for n, p in model.named_parameters()}
    advantages = np.concatenate([group.advantages for group in groups])
    return Found(gradient, advantages, trainer.apply(partial).metrics)


def rewarded(config: TrainConfig, rows: list[Sample]) -> list[Group]:
    """Groups with their advantages."""
    algorithm = build(config.algorithm)
    parts = [rows[i : i + SIZE] for i in range(0, COUNT, SIZE)]
    found = [
        algorithm.reward(
            np.array([s.reward for s in part], np.float64),
            np.array([len(s.tokens) for s in part]),
            CAP,
            np.array(
                [config.mask_truncated_completions and s.finish_reason == "length" for s in part]
            ),
        )
        for part in parts
    ]
    return [
        Group(prompt=part[0].prompt, samples=tuple(part), advantages=advantages)
        for part, advantages in zip(parts, algorithm.batch_advantages(found), strict=True)
    ]


def largest(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Largest difference over the largest entry."""
    assert one.keys() == other.keys()
    top = max(float(g.abs().max()) for g in other.values())
    assert top > 1e-4
    return max(float((one[n] - other[n]).abs().max()) for n in one) / top


def check_reach(case: Case, found: Found, ratios: np.ndarray, advantages: np.ndarray) -> None:
    """The batch reaches every clip and mask that the case is about.

    ``ratios`` and ``advantages`` are those of each token that counts.
    """
    clip = {side: found.metrics[f"clip_ratio/{side}_mean"] for side in ("low", "high", "region")}
    if case.drift:
        assert 0.0 < clip["low"] < 0.5
        assert 0.0 < clip["high"] < 0.5
    else:
        assert clip["region"] == 0.0
    delta = case.ours["algorithm"].get("delta")
    if delta is not None:
        assert ((ratios > delta) & (advantages < 0)).sum() > 5
    rows = samples(case.unscored)
    cut_off = np.array([row.finish_reason == "length" for row in rows])
    assert 0 < cut_off.sum() < COUNT
    assert found.advantages[cut_off].any()
    assert (case.unscored) == any(row.reward is None for row in rows)
