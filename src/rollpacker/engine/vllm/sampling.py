"""Our seeds in vLLM: which tokens come next is drawn here, and its model runner is told.

It knows nothing of vLLM: ``first_runner`` is where its runner asks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rollpacker.core.types import NO_DRAFTS, Drafted
from rollpacker.engine.base import Request, uniforms
from rollpacker.engine.drafts.speculator import LONGEST_DRAFT
from rollpacker.engine.sampling.race import RowDraws
from rollpacker.engine.sampling.rows import draw_rows
from rollpacker.engine.stops import StopWatcher

_CHUNK = LONGEST_DRAFT + 1

Drawn = list[tuple[int, float]]


@dataclass(slots=True, eq=False)
class VllmAttempt:
    """An attempt that vLLM runs.

    Args:
        request: as submitted.
        key: vLLM's name of it.
        tokens: the response so far, earlier engines' part included.
        logprobs: of these.
        watcher: looks for its stop strings.
        drawn: tokens and logprobs of the current step; vLLM may still drop them (the prompt's
            prefill was partial), so the next token is told by ``tokens``, not by calls.
        slot: of its text among those that draft, -1 without.
        drafts: what they brought.
    """

    request: Request
    key: str
    tokens: list[int]
    logprobs: list[float]
    watcher: StopWatcher | None
    drawn: Drawn = field(default_factory=list[tuple[int, float]])
    slot: int = -1
    drafts: Drafted = NO_DRAFTS
    _stream: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    _start: int = -1

    def uniforms(self, count: int = 1) -> NDArray[np.float64]:
        """The seed's numbers for the next tokens, at most ``LONGEST_DRAFT + 1``."""
        at = len(self.tokens)
        start = at - at % _CHUNK
        if start != self._start:
            self._stream, self._start = uniforms(self.request.seed, start, 2 * _CHUNK), start
        return self._stream[at - start : at - start + count]


def draw(logits: torch.Tensor, rows: Sequence[VllmAttempt], counts: Sequence[int]) -> list[Drawn]:
    """Tokens and their logprobs for the next ``counts`` places of each row, as ``mini`` draws
    them; ``logits`` (their sum, vocabulary)."""
    params = [row.request.params for row in rows]
    numbers = [row.uniforms(count) for row, count in zip(rows, counts, strict=True)]
    draws = RowDraws(
        temperature=np.repeat(np.array([p.temperature for p in params], np.float32), counts),
        top_k=np.repeat(np.array([p.top_k for p in params], np.int32), counts),
        top_p=np.repeat(np.array([p.top_p for p in params], np.float32), counts),
        uniform=np.concatenate(numbers),
    )
    tokens, logprobs = draw_rows(logits, draws)
    drawn = list(zip(tokens.tolist(), logprobs.tolist(), strict=True))
    ends = np.cumsum(counts).tolist()
    of_row = [drawn[end - count : end] for end, count in zip(ends, counts, strict=True)]
    for row, some in zip(rows, of_row, strict=True):
        row.drawn = some
    return of_row


def keep(row: VllmAttempt, drawn: Drawn, draft: Sequence[int]) -> Drawn:
    """What an attempt takes of a step in which these were drawn, one more than its draft has: what
    would come without a draft, which is known up to the first that is not the draft's."""
    right = 0
    while right < len(draft) and drawn[right][0] == draft[right]:
        right += 1
    row.drawn = drawn[: right + 1]
    if draft:
        more = 1, len(draft), right
        row.drafts = Drafted(*(a + b for a, b in zip(row.drafts, more, strict=True)))
    return row.drawn


def one_hot(logits: torch.Tensor, places: Sequence[int], drawn: Sequence[Drawn]) -> torch.Tensor:
    """Leave vLLM's greedy sampler one choice in these rows, one for each token that was drawn."""
    tokens = [token for of_row in drawn for token, _ in of_row]
    rows, ids = torch.tensor([list(places), tokens], device=logits.device)
    logits.index_fill_(0, rows, 0.0)
    logits[rows, ids] = 1.0
    return logits


def row_of(params: Any) -> VllmAttempt:
    """Whose sampling parameters these are."""
    return (params.extra_args or {})["row"]
