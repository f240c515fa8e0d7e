"""Our seeds in vLLM: which tokens come next is drawn here, and vLLM's samplers are told."""

# pyright: reportMissingImports=false, reportUntypedBaseClass=false

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from rollpacker.core.types import NO_DRAFTS, Drafted
from rollpacker.engine.base import Request, uniforms
from rollpacker.engine.drafts.speculator import LONGEST_DRAFT
from rollpacker.engine.sampling.rows import RowDraws, draw_rows
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


class Seeded(LogitsProcessor):
    """Draws one token for each row of a batch, and leaves vLLM's greedy sampler one choice; vLLM
    hands it the rows as ``extra_args``."""

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
            rows[index] = row_of(params)
        for source, target, way in batch_update.moved:
            moved, other = rows.pop(source, None), rows.pop(target, None)
            if moved is not None:
                rows[target] = moved
            if other is not None and way is MoveDirectionality.SWAP:
                rows[source] = other

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits (n, vocabulary) become one-hot."""
        rows = [self._rows[i] for i in range(len(logits))]
        tokens = torch.tensor([of_row[0][0] for of_row in draw(logits, rows, [1] * len(rows))])
        logits.zero_()
        return logits.scatter_(1, tokens.to(logits.device)[:, None], 1.0)


class Verifier:
    """In the place of vLLM's rejection sampler: draws behind each token of a draft what would come
    there without it, and keeps that up to the first that is not the draft's.

    Args:
        runner: vLLM's model runner, which has the drafts.
        usual: the sampler whose place it takes, for vLLM's dry runs.
    """

    def __init__(self, runner: Any, usual: Any) -> None:
        self._runner = runner
        self._usual = usual

    def __call__(
        self, metadata: Any, draft_probs: Any, logits: torch.Tensor, sampling: Any
    ) -> SamplerOutput:
        """Tokens (n, 1 + longest draft), int32, filled up with -1.

        Args:
            metadata: of the drafts, vLLM's ``SpecDecodeMetadata``.
            draft_probs: not looked at.
            logits: shape (rows, vocabulary), of each sequence one behind each token of its draft.
            sampling: the batch's; another's where nothing real is sampled.
        """
        batch = self._runner.input_batch
        if sampling is not batch.sampling_metadata:
            return self._usual(metadata, draft_probs, logits, sampling)
        keys = batch.req_ids
        drafts = batch.spec_token_ids[: len(keys)]
        rows = [row_of(self._runner.requests[key].sampling_params) for key in keys]
        counts = [1 + len(draft) for draft in drafts]
        sampled = np.full((len(rows), max(counts)), -1, np.int32)
        found = draw(logits, rows, counts)
        for place, (row, drawn, draft) in enumerate(zip(rows, found, drafts, strict=True)):
            right = 0
            while right < len(draft) and drawn[right][0] == draft[right]:
                right += 1
            row.drawn = drawn[: right + 1]
            sampled[place, : right + 1] = [token for token, _ in row.drawn]
            if draft:
                more = 1, len(draft), right
                row.drafts = Drafted(*(a + b for a, b in zip(row.drafts, more, strict=True)))
        return SamplerOutput(sampled_token_ids=torch.from_numpy(sampled), logprobs_tensors=None)


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


def row_of(params: Any) -> VllmAttempt:
    """Whose sampling parameters these are."""
    return (params.extra_args or {})["row"]
