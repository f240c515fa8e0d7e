"""The same groups for everybody, and a tiny model at three sets of weights."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from peer_options import Case
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from rollpacker.config import TrainConfig
from rollpacker.core.types import AttemptId, Group, PromptId, Sample
from rollpacker.train.algorithms import build
from rollpacker.train.trainer import Trainer

VOCABULARY, CAP, PROMPTS, SIZE = 23, 24, 6, 4
COUNT = PROMPTS * SIZE
LIMIT = 1e-5
"""Largest difference of a gradient's entries over its largest entry."""


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


def sampled(case: Case) -> list[Sample]:
    """The samples, with what the sampler says of their tokens where that matters."""
    rows = samples(case.unscored)
    if not case.noise:
        return rows
    model, rng = make_model(), np.random.default_rng(11)
    model.load_state_dict(weights(model, case.drift).sampler)
    found: list[Sample] = []
    for row in rows:
        ids = torch.from_numpy(np.concatenate((row.prompt_tokens, row.tokens))).long()
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0, len(row.prompt_tokens) - 1 : -1]
        exact = logits.log_softmax(-1).gather(1, ids[len(row.prompt_tokens) :, None])[:, 0]
        off = case.noise * rng.standard_normal(len(row.tokens))
        found.append(replace(row, logprobs=(exact.numpy() + off).astype(np.float32)))
    return found


def ours(case: Case) -> Found:
    """Our gradient and advantages of a case."""
    config = TrainConfig.model_validate(case.ours)
    model = make_model()
    state = weights(model, case.drift)
    trainer = Trainer(
        model, make_tokenizer(), config, temperature=1.0, max_length=CAP, total_updates=1
    )
    model.load_state_dict(state.sampler)
    groups = rewarded(config, sampled(case))
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
    if case.noise:
        assert 0.05 < found.metrics["sampler/outside"] < 0.95
    rows = samples(case.unscored)
    cut_off = np.array([row.finish_reason == "length" for row in rows])
    assert 0 < cut_off.sum() < COUNT
    assert found.advantages[cut_off].any()
    assert (case.unscored) == any(row.reward is None for row in rows)
