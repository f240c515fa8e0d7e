"""Token ids in, answers out: differences of two logits, or greedy text."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache

from rollpacker.reward.judge.streamed import CausalModel


def logit_differences(
    model: CausalModel, prompts: Sequence[Sequence[int]], yes: int, no: int
) -> list[float]:
    """``logit(yes) - logit(no)`` of the token after each prompt, in nats."""
    # Padding goes behind the prompts: causal attention needs no mask then, so that the fast
    # kernels without one are used, whatever the lengths.
    ids, _ = _padded(model, prompts, "right")
    at = torch.tensor([len(prompt) - 1 for prompt in prompts], device=model.device)
    logits = model.logits(ids, at).float()
    return (logits[:, yes] - logits[:, no]).tolist()


def greedy(
    model: CausalModel,
    prompts: Sequence[Sequence[int]],
    *,
    stop: Collection[int],
    max_new_tokens: int,
) -> list[list[int]]:
    """The likeliest token after each prompt, and again; ends before a ``stop`` token."""
    ids, mask = _padded(model, prompts, "left")
    cache = DynamicCache(config=model.config)
    answers: list[list[int]] = [[] for _ in prompts]
    running = set(range(len(prompts)))
    for _ in range(max_new_tokens):
        at = torch.full((len(prompts),), ids.shape[1] - 1, device=model.device)
        chosen = model.logits(ids, at, mask, cache).argmax(-1)
        for row, token in enumerate(chosen.tolist()):
            if token in stop:
                running.discard(row)
            elif row in running:
                answers[row].append(token)
        if not running:
            break
        ids = chosen.unsqueeze(1)
        mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
    return answers


def _padded(
    model: CausalModel, prompts: Sequence[Sequence[int]], side: str
) -> tuple[Tensor, Tensor]:
    texts = [torch.tensor(prompt, dtype=torch.long) for prompt in prompts]
    ids = pad_sequence(texts, batch_first=True, padding_side=side)
    ones = [torch.ones_like(text) for text in texts]
    mask = pad_sequence(ones, batch_first=True, padding_side=side)
    return ids.to(model.device), mask.to(model.device)
