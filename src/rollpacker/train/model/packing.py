"""Micro-batches without padding in the linear layers.

A micro-batch is a flat run of tokens. Only attention gathers rectangles of rows from it, and
scatters its output back. ``padded`` gives every response a row with its own copy of the prompt.
``prompt_shared`` runs a prompt once, causally, and its responses attend to the prompt's keys.
Tokens of an environment are run, but nothing is predicted there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from rollpacker.config.base import ROUTED
from rollpacker.core.types import Sample

Packing = Literal["auto", "padded", "prompt_shared"]


@dataclass(frozen=True, eq=False)
class Item:
    """One response to train on, with at least one sampled token. Samples of one ``group`` number
    share a prompt."""

    sample: Sample
    advantage: float
    group: int

    @property
    def prompt_length(self) -> int:
        return len(self.sample.prompt_tokens)

    @cached_property
    def trained(self) -> NDArray[np.int64]:
        """Places of the sampled tokens in the response, ascending, shape (T,)."""
        sample = self.sample
        if sample.loss_mask is None:
            return np.arange(len(sample.tokens))
        return np.flatnonzero(sample.loss_mask)

    @property
    def inputs(self) -> int:
        """Response tokens to run: nothing is predicted from the last sampled one on."""
        return int(self.trained[-1])

    def spread(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        whole = np.zeros(len(self.sample.tokens), np.float32)
        whole[self.trained] = values
        return whole


def numbered(samples: Iterable[tuple[Sample, float]]) -> list[Item]:
    """Samples with their advantages as items. Equal prompts of a group share a number, as an
    environment may have replaced some."""
    numbers: dict[tuple[str, bytes], int] = {}
    return [
        Item(s, float(a), numbers.setdefault((s.prompt, s.prompt_tokens.tobytes()), len(numbers)))
        for s, a in samples
    ]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CausalRows:
    """Rows that attend causally to themselves.

    Args:
        gather: flat index of each cell, shape (S, L). Cells beyond a row's end hold any index.
        scatter: cell of each flat token that takes its output here, shape (n,).
    """

    gather: torch.Tensor
    scatter: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PrefixRows:
    """Rows of responses that attend to their prompt and causally to themselves.

    Args:
        queries: flat index of each query, shape (S, R).
        keys: flat index of each key, prompts left, responses right, shape (S, P + R).
        mask: the keys that a query sees, shape (S, 1, R, P + R), bool.
        scatter: cell of each response token, shape (n,).
    """

    queries: torch.Tensor
    keys: torch.Tensor
    mask: torch.Tensor
    scatter: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """The inputs of one forward and backward pass.

    Args:
        tokens: flat inputs, shape (N,), int64. Outputs of ``causal`` come first, then of
            ``prefix``.
        positions: shape (N,).
        causal: rows of whole sequences, or of prompts only if there is a ``prefix``.
        prefix: rows of responses, in ``prompt_shared`` packing.
        sources: flat index from which each sampled token is predicted, shape (T,).
        targets: sampled tokens, responses one after the other, shape (T,), int64.
        owner: response of each target, shape (T,), int64.
        lengths: sampled tokens of each response, shape (S,), int64, at least 1.
        advantages: of each response, shape (S,).
        sampler_logprobs: of ``targets``, shape (T,).
        old_logprobs: under the weights that sampled, shape (T,). None: those being trained.
        fresh: 0 on targets without a loss, else 1, shape (T,). None: all have one.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    causal: CausalRows
    prefix: PrefixRows | None
    sources: torch.Tensor
    targets: torch.Tensor
    owner: torch.Tensor
    lengths: torch.Tensor
    advantages: torch.Tensor
    sampler_logprobs: torch.Tensor
    old_logprobs: torch.Tensor | None = None
    fresh: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Costs:
    """Work of a token in the linear layers, and of a query-key pair in attention (any unit)."""

    linear: float
    attention: float


def costs_of(model: Any) -> Costs:
    """Multiply-adds of a forward pass without embeddings, and with a token's own number of experts.

    A pair counts twice, as attention had half the rate of the matrix products on a CPU. It took 147
    ps per multiply-add of a whole rectangle, they took 71, at lengths of 40 to 600.
    """
    config = model.config.get_text_config()
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    embeddings.add(id(model.get_output_embeddings().weight))
    linear = 0.0
    for name, parameter in model.named_parameters():
        if id(parameter) in embeddings:
            continue
        share = 1.0
        if parameter.ndim == 3 and "experts" in name:
            chosen = next((n for name in ROUTED if (n := getattr(config, name, None))), 0)
            share = chosen / len(parameter) if chosen else 1.0
        linear += parameter.numel() * share
    heads = getattr(config, "num_attention_heads", None) or 0
    width = getattr(config, "head_dim", None) or config.hidden_size // max(heads, 1)
    return Costs(linear=linear, attention=2 * 2 * heads * width * config.num_hidden_layers)


def plan(
    items: Sequence[Item], budget: int, packing: Packing, costs: Costs
) -> tuple[list[list[Item]], bool]:
    """Split responses into micro-batches of about ``budget`` tokens. Also returns whether prompts
    are shared. ``auto`` takes the packing with the lower predicted cost."""
    if packing == "padded":
        return _padded(items, budget), False
    shared = _shared(items, budget)
    if packing == "prompt_shared":
        return shared, True
    padded = _padded(items, budget)
    cheaper = sum(_shared_cost(b, costs) for b in shared) < sum(
        _padded_cost(b, costs) for b in padded
    )
    return (shared, True) if cheaper else (padded, False)


def _padded(items: Sequence[Item], budget: int) -> list[list[Item]]:
    batches: list[list[Item]] = []
    for item in sorted(items, key=lambda i: i.prompt_length + i.inputs):
        length = item.prompt_length + item.inputs
        if not batches or (len(batches[-1]) + 1) * length > budget:
            batches.append([])
        batches[-1].append(item)
    return batches


def _shared(items: Sequence[Item], budget: int) -> list[list[Item]]:
    groups: dict[int, list[Item]] = {}
    for item in items:
        groups.setdefault(item.group, []).append(item)
    units: list[tuple[int, list[Item]]] = []
    for members in groups.values():
        units.extend(_split_group(members, budget))
    batches: list[list[Item]] = []
    used = 0
    for size, unit in sorted(units, key=lambda u: u[1][-1].inputs):
        if not batches or used + size > budget:
            batches.append([])
            used = 0
        batches[-1].extend(unit)
        used += size
    return batches


def _split_group(members: list[Item], budget: int) -> list[tuple[int, list[Item]]]:
    units: list[tuple[int, list[Item]]] = []
    for item in sorted(members, key=lambda i: i.inputs):
        if units and units[-1][0] + item.inputs <= budget:
            size, unit = units[-1]
            units[-1] = (size + item.inputs, [*unit, item])
        else:
            units.append((item.prompt_length + item.inputs, [item]))
    return units


def _padded_cost(batch: list[Item], costs: Costs) -> float:
    lengths = [i.prompt_length + i.inputs for i in batch]
    pairs = len(lengths) * max(lengths) ** 2
    return costs.linear * sum(lengths) + costs.attention * pairs


def _shared_cost(batch: list[Item], costs: Costs) -> float:
    prompts = {i.group: i.prompt_length for i in batch}
    longest_prompt = max(prompts.values())
    longest = max(i.inputs for i in batch)
    tokens = sum(prompts.values()) + sum(i.inputs for i in batch)
    pairs = len(prompts) * longest_prompt**2
    pairs += len(batch) * longest * (longest_prompt + longest)
    return costs.linear * tokens + costs.attention * pairs


def build(batch: Sequence[Item], shared: bool, device: torch.device) -> MicroBatch:
    """The tensors of one micro-batch."""
    flat, causal, prefix = _shared_layout(batch) if shared else _padded_layout(batch)
    lengths = np.array([len(i.trained) for i in batch])
    logprobs = np.concatenate([i.sample.logprobs[i.trained] for i in batch])
    targets = np.concatenate([i.sample.tokens[i.trained] for i in batch])
    flat |= {
        "targets": targets.astype(np.int64),
        "owner": np.repeat(np.arange(len(batch)), lengths),
        "lengths": lengths,
        "advantages": np.array([i.advantage for i in batch], np.float32),
        "sampler_logprobs": logprobs.astype(np.float32),
    }
    old = [i.sample.old_logprobs[i.trained] for i in batch if i.sample.old_logprobs is not None]
    assert len(old) in (0, len(batch)), "responses of one update mix old and new"
    if old:
        flat["old_logprobs"] = np.concatenate(old).astype(np.float32)
    if any(i.sample.stale is not None for i in batch):
        flat["fresh"] = np.concatenate([_fresh(i) for i in batch]).astype(np.float32)

    def put(arrays: Arrays) -> dict[str, Any]:
        return {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}

    return MicroBatch(
        **put(flat),
        causal=CausalRows(**put(causal)),
        prefix=None if prefix is None else PrefixRows(**put(prefix)),
    )


def _fresh(item: Item) -> NDArray[np.generic]:
    stale = item.sample.stale
    return np.ones(len(item.trained)) if stale is None else 1.0 - stale[item.trained]


Arrays = dict[str, NDArray[np.generic]]
Layout = tuple[Arrays, Arrays, Arrays | None]
"""Flat arrays of a ``MicroBatch``, and those of its causal and its prefix rows."""


def _rows(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> tuple[NDArray, NDArray]:
    columns = np.arange(lengths.max(initial=0))
    inside = columns < lengths[:, None]
    return np.where(inside, starts[:, None] + columns, 0), inside


def _starts(lengths: NDArray[np.int64], first: int = 0) -> NDArray[np.int64]:
    return first + np.concatenate(([0], np.cumsum(lengths[:-1])))


def _padded_layout(batch: Sequence[Item]) -> Layout:
    prompts = np.array([i.prompt_length for i in batch])
    inputs = np.array([i.inputs for i in batch])
    lengths = prompts + inputs
    starts = _starts(lengths)
    gather, inside = _rows(starts, lengths)
    pieces = [p for i in batch for p in (i.sample.prompt_tokens, i.sample.tokens[: i.inputs])]
    first = starts + prompts - 1
    sources = np.concatenate([f + i.trained for f, i in zip(first, batch, strict=True)])
    flat = {
        "tokens": np.concatenate(pieces).astype(np.int64),
        "positions": np.nonzero(inside)[1],
        "sources": sources,
    }
    return flat, {"gather": gather, "scatter": np.flatnonzero(inside)}, None


def _shared_layout(batch: Sequence[Item]) -> Layout:
    first_of: dict[int, int] = {}
    for number, item in enumerate(batch):
        first_of.setdefault(item.group, number)
    groups = {group: row for row, group in enumerate(first_of)}
    prompt_items = [batch[n] for n in first_of.values()]
    prompt_lengths = np.array([i.prompt_length for i in prompt_items])
    prompt_starts = _starts(prompt_lengths)
    gather, inside = _rows(prompt_starts, prompt_lengths)

    row = np.array([groups[i.group] for i in batch])
    inputs = np.array([i.inputs for i in batch])
    starts = _starts(inputs, first=int(prompt_lengths.sum()))
    queries, real = _rows(starts, inputs)
    own, longest = prompt_lengths[row], queries.shape[1]
    seen = np.broadcast_to(inside[row][:, None], (len(batch), longest, inside.shape[1]))
    causal = np.broadcast_to(np.tri(longest, dtype=bool), (len(batch), longest, longest))
    last = prompt_starts[row] + own - 1
    sources = [
        np.where(i.trained == 0, p, s + i.trained - 1)
        for i, p, s in zip(batch, last, starts, strict=True)
    ]
    pieces = [i.sample.prompt_tokens for i in prompt_items]
    pieces += [i.sample.tokens[: i.inputs] for i in batch]
    positions = [np.nonzero(inside)[1], np.nonzero(real)[1] + np.repeat(own, inputs)]
    flat = {
        "tokens": np.concatenate(pieces).astype(np.int64),
        "positions": np.concatenate(positions),
        "sources": np.concatenate(sources),
    }
    prefix = {
        "queries": queries,
        "keys": np.concatenate((gather[row], queries), axis=1),
        "mask": np.concatenate((seen, causal), axis=2)[:, None],
        "scatter": np.flatnonzero(real),
    }
    return flat, {"gather": gather, "scatter": np.flatnonzero(inside)}, prefix


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatchShare:
    """One micro-batch of a member. If it does not ``count``, it runs only for the other members'
    collectives."""

    items: list[Item]
    batch: MicroBatch
    counts: bool


def deal(plans: Sequence[list[Item]], member: int, members: int) -> list[tuple[list[Item], bool]]:
    """The micro-batches of one of ``members``, and whether they count.

    Every member has the same number, as each layer's weights are gathered from all of them.
    Neighbours of similar length run at the same time. If the number is uneven, the largest ones are
    cut, and if that is not enough, one is repeated.
    """
    dealt = _evened(plans, members)
    mine = [(plan, True) for plan in dealt[member::members]]
    rounds = -(-len(dealt) // members)
    if len(mine) < rounds:
        mine.append((min(dealt, key=_tokens), False))
    return mine


def _evened(plans: Sequence[list[Item]], members: int) -> list[list[Item]]:
    result = list(plans)
    while len(result) % members:
        number = max(range(len(result)), key=lambda n: (len(result[n]) > 1, _tokens(result[n])))
        if len(result[number]) == 1:
            break
        result[number : number + 1] = _halves(result[number])
    return result


def _halves(plan: list[Item]) -> list[list[Item]]:
    half, seen = _tokens(plan) / 2, 0
    for cut, item in enumerate(plan[:-1], start=1):
        seen += _tokens([item])
        if seen >= half:
            return [plan[:cut], plan[cut:]]
    return [plan[:-1], plan[-1:]]


def _tokens(plan: list[Item]) -> int:
    return sum(item.prompt_length + item.inputs for item in plan)
