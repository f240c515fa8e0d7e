"""Our seeds in vLLM: a logits processor samples, and leaves vLLM's greedy sampler one choice."""

# pyright: reportMissingImports=false, reportUntypedBaseClass=false

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from rollpacker.engine.base import Request, SamplingParams, uniforms
from rollpacker.engine.nucleus_rows import plain_draws, restricted_draws
from rollpacker.engine.stops import StopWatcher

_CHUNK = 64


@dataclass(slots=True, eq=False)
class VllmAttempt:
    """An attempt that vLLM runs.

    Args:
        request: as submitted.
        key: vLLM's name of it.
        tokens: the response so far, earlier engines' part included.
        logprobs: of these.
        watcher: looks for its stop strings.
        drawn: token and logprob of the current step; vLLM may still drop them (the prompt's
            prefill was partial), so the next token is told by ``tokens``, not by calls.
    """

    request: Request
    key: str
    tokens: list[int]
    logprobs: list[float]
    watcher: StopWatcher | None
    drawn: tuple[int, float] = (0, 0.0)
    _stream: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    _start: int = -1

    def uniform(self) -> float:
        """The seed's number for the next token."""
        at = len(self.tokens)
        start = at - at % _CHUNK
        if start != self._start:
            self._stream, self._start = uniforms(self.request.seed, start, _CHUNK), start
        return float(self._stream[at - start])


class Seeded(LogitsProcessor):
    """Draws one token for each row of a batch; vLLM hands it the rows as ``extra_args``."""

    def __init__(self, _config: Any, _device: torch.device, _is_pin_memory: bool) -> None:
        self._rows: dict[int, VllmAttempt] = {}

    def is_argmax_invariant(self) -> bool:
        """It decides the argmax."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the batch's rows."""
        if batch_update is None:
            return
        rows = self._rows
        for index in batch_update.removed:
            rows.pop(index, None)
        for index, params, _, _ in batch_update.added:
            rows[index] = (params.extra_args or {})["row"]
        for source, target, way in batch_update.moved:
            moved, other = rows.pop(source, None), rows.pop(target, None)
            if moved is not None:
                rows[target] = moved
            if other is not None and way is MoveDirectionality.SWAP:
                rows[source] = other

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits (n, vocabulary) become one-hot."""
        rows = [self._rows[i] for i in range(len(logits))]
        tokens, logprobs = draw(logits, rows)
        values = zip(tokens.tolist(), logprobs.tolist(), strict=True)
        for row, drawn in zip(rows, values, strict=True):
            row.drawn = drawn
        logits.zero_()
        return logits.scatter_(1, tokens[:, None], 1.0)


def draw(logits: torch.Tensor, rows: Sequence[VllmAttempt]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and their logprobs, each (n,), by inverse CDF in float64, as ``mini`` draws them."""
    device = logits.device
    numbers = np.array([(r.uniform(), r.request.params.temperature) for r in rows])
    uniform, temperature = torch.from_numpy(numbers.T).to(device).unbind()
    temperature = temperature.float()
    limited = [i for i, row in enumerate(rows) if _limited(row.request.params)]
    if len(limited) == len(rows):
        return _restricted(logits, rows, temperature, uniform)
    tokens, logprobs = plain_draws(logits, temperature, uniform)
    if limited:
        at = torch.tensor(limited, device=device)
        those = [rows[i] for i in limited]
        tokens[at], logprobs[at] = _restricted(logits[at], those, temperature[at], uniform[at])
    return tokens, logprobs


def _limited(params: SamplingParams) -> bool:
    return params.temperature > 0 and (params.top_p < 1 or params.top_k > 0)


def _restricted(
    logits: torch.Tensor,
    rows: Sequence[VllmAttempt],
    temperature: torch.Tensor,
    uniform: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """By top-k and top-p."""
    params = [row.request.params for row in rows]
    top_k = torch.tensor([p.top_k for p in params], device=logits.device)
    top_p = torch.tensor([p.top_p for p in params], device=logits.device).double()
    tokens, logprobs = restricted_draws(logits, temperature, top_k, top_p, uniform)
    return tokens, logprobs.float()
