"""Finds the micro-batch layout of a model by comparing with its own forward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rollpacker.core.types import AttemptId, PromptId, Sample
from rollpacker.errors import first_line
from rollpacker.train.model import packing
from rollpacker.train.model.forward import BatchLayout, PackedForward, decoder_of, mixers_of
from rollpacker.train.model.packing import Item, Packing
from rollpacker.train.model.token_logprobs import Head

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_NEAR = 8  # tokens that windows and chunks reach during a comparison, fewer than the sequences have
_LENGTHS = ((5, 9), (5, 14), (11, 6))
"""Tokens of compared prompts and responses. The first two share a prompt."""
_REACHES = ("sliding_window", "attention_chunk_size")
# Nats, in float32 and in shorter types: mean error of logprobs, and effect of another sequence.
_OFF, _OFF_ROUNDED = 1e-3, 0.2
_LEAK, _LEAK_ROUNDED = 1e-3, 0.05
_HEAD_OFF = 1e-3  # largest relative error of a head's logits, or two roundings of a shorter type
_LARGE = 100.0  # a logit beyond all bounds that heads have


@dataclass(frozen=True, slots=True)
class ModelFit:
    """The layout with which a model is correct, and whether responses may share their prompt."""

    layout: BatchLayout
    shares_prompts: bool

    def packing(self, wanted: Packing) -> Packing:
        """The packing for ``train.packing``. Raises ``ValueError`` if the model cannot do it."""
        if self.shares_prompts:
            return wanted
        if wanted == "prompt_shared":
            raise ValueError(
                "train.packing=prompt_shared: responses of this model cannot share their prompt, "
                "as not only attention by positions reads it: use auto or padded"
            )
        return "padded"


def fit_of(model: PreTrainedModel) -> ModelFit:
    """Compare a few short sequences, each alone and all in one micro-batch. Raises ``ValueError``,
    in one line, if no layout gives the model's own results, and as ``check_head``."""
    check_head(model)
    problems: list[str] = []
    layouts: tuple[BatchLayout, ...] = ("wrapped" if mixers_of(model) else "flat", "rows")
    if getattr(model.config.get_text_config(), "attn_temperature_tuning", False):
        # Llama 4 scales queries by their index, in steps longer than the compared sequences.
        layouts = ("rows",)
    with torch.no_grad(), _near(model):
        items = _items(model)
        alone = torch.cat([_alone(model, item) for item in items])
        for layout in layouts:
            problem = _problem(model, layout, items, alone, shared=False)
            if not problem:
                able = layout == "flat"
                return ModelFit(
                    layout, able and not _problem(model, layout, items, alone, shared=True)
                )
            problems.append(f"{layout}: {problem}")
    raise _refusal(model, "; ".join(problems))


def _refusal(model: PreTrainedModel, why: str) -> ValueError:
    kind: Any = model.config.model_type
    return ValueError(f"{kind} models cannot be trained here: {why}")


def check_head(model: PreTrainedModel) -> None:
    """Compare ``Head.of`` a model with the model's own logits of the same hidden states. The states
    are those of a short sequence, plain and scaled up beyond any bound. Raises ``ValueError``, in
    one line, if they differ by more than the head's own rounding."""
    limit = max(_HEAD_OFF, 2 * torch.finfo(model.dtype).eps)
    try:
        most = max(float((ours - own).norm() / own.norm()) for own, ours in _both_logits(model))
    except Exception as error:  # any error of an unfamiliar model
        raise _refusal(model, f"its head: {first_line(error)}") from error
    if not most <= limit:
        raise _refusal(
            model,
            "its logits do not follow from its hidden states by weight, bias, factor and bound of "
            f"its head: they are off by {most:.2g} of their size",
        )


@torch.no_grad()
def _both_logits(model: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    tokens = torch.from_numpy(_items(model)[0].sample.tokens).long().to(model.device)[None]
    head, given = Head.of(model), []
    hidden = decoder_of(model)(input_ids=tokens, use_cache=False).last_hidden_state[0]
    yield model(input_ids=tokens, use_cache=False).logits[0].float(), head.logits(hidden)
    most = float(replace(head, bias=None, cap=0.0).logits(hidden).abs().max())

    def grow(_: Any, args: Any) -> Any:
        given.append(args[0] * (_LARGE / most))
        return (given[0], *args[1:])

    handle = model.get_output_embeddings().register_forward_pre_hook(grow)
    try:
        own = model(input_ids=tokens, use_cache=False).logits[0].float()
    finally:
        handle.remove()
    yield own, head.logits(given[0][0])


@contextmanager
def _near(model: PreTrainedModel) -> Iterator[None]:
    configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    kept = [
        (config, name, value)
        for config in configs.values()
        for name in _REACHES
        if isinstance(value := getattr(config, name, None), int) and value > _NEAR
    ]
    try:
        for config, name, _ in kept:
            setattr(config, name, _NEAR)
        yield
    finally:
        for config, name, value in kept:
            setattr(config, name, value)


def _items(model: Any, changed: int | None = None) -> list[Item]:
    config = model.config.get_text_config()
    top = min(1000, config.vocab_size)
    rng, other = np.random.default_rng(0), np.random.default_rng(1)
    prompts: dict[int, Any] = {}
    items: list[Item] = []
    for number, (before, length) in enumerate(_LENGTHS):
        prompt = prompts.setdefault(before, rng.integers(top // 2, top, before).astype(np.int32))
        drawn = [each.integers(top // 2, top, length).astype(np.int32) for each in (rng, other)]
        sample = Sample(
            prompt=PromptId(str(before)),
            index=number,
            attempt=AttemptId(number),
            prompt_tokens=prompt,
            tokens=drawn[number == changed],
            logprobs=np.zeros(length, np.float32),
            finish_reason="stop",
            weights_version=0,
        )
        items.append(Item(sample, 1.0, len(prompts)))
    return items


def _alone(model: Any, item: Item) -> torch.Tensor:
    sample = item.sample
    whole = np.concatenate((sample.prompt_tokens, sample.tokens))
    tokens = torch.tensor(whole, dtype=torch.int64, device=model.device)[None]
    logits = model(input_ids=tokens, use_cache=False).logits[0, item.prompt_length - 1 : -1]
    chosen = tokens[0, item.prompt_length :, None]
    return torch.log_softmax(logits.float(), dim=-1).gather(1, chosen)[:, 0]


def _problem(
    model: Any, layout: BatchLayout, items: list[Item], alone: torch.Tensor, *, shared: bool
) -> str:
    rounded = model.dtype != torch.float32
    off, leak = (_OFF_ROUNDED, _LEAK_ROUNDED) if rounded else (_OFF, _LEAK)
    forward = PackedForward(model, layout)
    try:
        found = _packed(model, forward, items, shared)
        other = _packed(model, forward, _items(model, changed=1), shared)
    except Exception as error:  # any error of an unfamiliar model
        return first_line(error)
    finally:
        forward.release()
    difference = float((found - alone).abs().mean())
    if not difference <= off:
        return f"log-probabilities are off by {difference:.2g} nats"
    start, end = _LENGTHS[0][1], _LENGTHS[0][1] + _LENGTHS[1][1]
    apart = (found - other).abs()
    most = float(torch.cat((apart[:start], apart[end:])).max())
    return "" if most <= leak else f"one sequence changes another's by {most:.2g} nats"


def _packed(model: Any, forward: PackedForward, items: list[Item], shared: bool) -> torch.Tensor:
    return forward.logprobs(packing.build(items, shared, model.device), 1.0)[0]
