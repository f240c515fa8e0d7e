"""Sampling of many rows at once on their device: compiled on a CPU, in torch elsewhere."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from rollpacker.engine.sampling.compiled import draw_compiled
from rollpacker.engine.sampling.race import (
    CHUNK,
    SHARE,
    RowDraws,
    chunks,
    keys,
    numbers,
    places,
    times,
)

_ROWS = 128  # drawn at a time, as weights of a large vocabulary take much memory

Found = tuple[torch.Tensor, torch.Tensor]


def draw_rows(logits: torch.Tensor, draws: RowDraws) -> Found:
    """Sample each row of ``logits`` (n, vocabulary) as ``race.draw_token`` does, up to rounding.
    Returns tokens, int64, and logprobs, float32, each (n,), on the device of ``logits``."""
    if logits.device.type != "cpu":
        return draw_by_torch(logits, draws)
    rows, size = np.arange(len(logits), dtype=np.int32), logits.shape[1]
    tokens, logprobs = draw_compiled(logits.float().numpy(), size, rows, draws)
    return torch.from_numpy(tokens).long(), torch.from_numpy(logprobs)


def draw_by_torch(logits: torch.Tensor, draws: RowDraws) -> Found:
    """``draw_rows`` on any device."""
    cuts = [slice(start, start + _ROWS) for start in range(0, len(logits), _ROWS)]
    parts = [_draw(logits[cut], draws.of(cut)) for cut in cuts]
    if len(parts) == 1:
        return parts[0]
    tokens, logprobs = zip(*parts, strict=True)
    return torch.cat(tokens), torch.cat(logprobs)


def _draw(logits: torch.Tensor, draws: RowDraws) -> Found:
    limited = (draws.temperature > 0) & ((draws.top_p < 1) | (draws.top_k > 0))
    if not limited.any():
        return _from_all(logits, draws)
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(len(logits), device=logits.device)
    for which, draw in ((limited, _restricted), (~limited, _from_all)):
        if which.any():
            at = torch.from_numpy(np.flatnonzero(which)).to(logits.device)
            tokens[at], logprobs[at] = draw(logits[at], draws.of(which))
    return tokens, logprobs


def _from_all(logits: torch.Tensor, draws: RowDraws) -> Found:
    """In float32, as logits in bfloat16 would shift logprobs by 0.03. Temperature 0 is greedy."""
    logits = logits.float()
    told = torch.from_numpy(draws.temperature)[:, None].to(logits.device)
    scale = told.where(told > 0, 1.0)
    top, likeliest = logits.max(-1, keepdim=True)
    rows, size = logits.shape
    whole = chunks(size) * CHUNK if size > CHUNK else size
    weights = torch.zeros((rows, whole), device=logits.device)
    torch.sub(logits, top, out=weights[:, :size]).div_(scale).exp_()
    first, mass = _first(weights, _ring(draws.uniform, size, logits.device))
    tokens = first.where(told > 0, likeliest)
    logprobs = (logits.gather(1, tokens) - top) / scale - mass.log()
    return tokens[:, 0], logprobs[:, 0]


def _first(weights: torch.Tensor, ring: torch.Tensor) -> Found:
    if weights.shape[1] <= CHUNK:
        return (weights / ring).argmax(-1, keepdim=True), weights.sum(-1, keepdim=True)
    by_chunk = weights.unflatten(1, (-1, CHUNK))
    sums = by_chunk.sum(-1)
    chunk = (sums / ring[:, CHUNK:]).argmax(-1, keepdim=True)
    running = by_chunk.take_along_dim(chunk[..., None], 1)[:, 0]
    place = (running / ring[:, :CHUNK]).argmax(-1, keepdim=True)
    return chunk * CHUNK + place, sums.sum(-1, keepdim=True)


def _restricted(logits: torch.Tensor, draws: RowDraws) -> Found:
    scale, share = (
        torch.from_numpy(each.astype(np.float64)).to(logits.device)
        for each in (draws.temperature, draws.top_p)
    )
    most = torch.from_numpy(draws.top_k).to(logits.device)
    weights = logits.double().div_(scale[:, None])
    weights.sub_(weights.amax(-1, keepdim=True)).exp_()
    size = weights.shape[1]
    ids = _most_likely(weights, most, share)
    kept = weights.gather(1, ids.clamp(max=size - 1)).masked_fill_(ids == size, 0.0)
    ids.clamp_(max=size - 1)
    ring, mass = _ring(draws.uniform, size, weights.device), kept.cumsum(-1)
    running = kept
    if size > CHUNK:
        chunk = ids // CHUNK
        sums = _sums(mass, chunk)
        winner = (sums / ring.gather(1, CHUNK + chunk)).argmax(-1, keepdim=True)
        running = kept.where(chunk == chunk.gather(1, winner), 0.0)
    place = (running / ring.gather(1, ids % CHUNK)).argmax(-1, keepdim=True)
    logprobs = (kept.gather(1, place) / mass[:, -1:]).log()
    return ids.gather(1, place)[:, 0], logprobs[:, 0].float()


def _sums(mass: torch.Tensor, chunk: torch.Tensor) -> torch.Tensor:
    """Sums of the chunks' weights, each at the chunk's last id, with 0 elsewhere."""
    ends = torch.ones_like(chunk, dtype=torch.bool)
    ends[:, :-1] = chunk[:, 1:] != chunk[:, :-1]
    at_ends = mass.where(ends, 0.0)
    before = torch.zeros_like(mass)
    before[:, 1:] = at_ends.cummax(-1).values[:, :-1]
    return (at_ends - before).clamp_(min=0.0)


def _ring(uniform: NDArray[np.float64], vocabulary: int, device: torch.device) -> torch.Tensor:
    key, place = keys(uniform)[:, None], places(vocabulary)
    if device.type == "cpu":
        return torch.from_numpy(times(key, place))
    told = (torch.from_numpy(each).to(device) for each in (key, place))
    return numbers(*told).double().add_(0.5).mul_(SHARE).log_().neg_()


def _most_likely(weights: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The kept ids by weight, then id. Each row is sorted by id, and padded with the vocabulary's
    size."""
    size = weights.shape[1]
    limit = torch.where((top_k > 0) & (top_k < size), top_k, size)
    total = weights.sum(-1)
    # Tokens below this share add up to less than 1 - top_p: none of them is in the nucleus.
    share = (total * (1.0 - top_p) / size)[:, None]
    likely = (weights >= share).sum(-1, dtype=torch.int32)
    longest = int(torch.where(limit < size, limit, likely).max())
    ordered, ids = weights.topk(min(longest + 1, size))
    mass = ordered.cumsum(-1)
    last = (limit.clamp(max=longest) - 1)[:, None]
    whole = torch.where(limit < size, mass.gather(1, last)[:, 0], total)
    nucleus = torch.searchsorted(mass, (top_p * whole)[:, None])[:, 0] + 1
    count = torch.where(top_p < 1.0, torch.minimum(nucleus, limit), limit).clamp(max=longest)
    least = ordered.gather(1, count[:, None] - 1)
    ids.masked_fill_(torch.arange(ids.shape[1], device=ids.device) >= count[:, None], size)
    # Among more equal weights than are kept, topk has taken arbitrary ones.
    tied = (ordered >= least).sum(-1) > count
    if bool(tied.any()):
        ids[tied] = _lowest(weights[tied], least[tied], count[tied], ids.shape[1])
    return ids.sort(-1).values


def _lowest(
    weights: torch.Tensor, least: torch.Tensor, count: torch.Tensor, width: int
) -> torch.Tensor:
    above, equal = weights > least, weights == least
    places = (count - above.sum(-1))[:, None]
    kept = above | (equal & (equal.cumsum(-1, dtype=torch.int32) <= places))
    every = torch.arange(weights.shape[1], device=weights.device)
    found = torch.where(kept, every, weights.shape[1])
    return found.topk(width, largest=False).values
