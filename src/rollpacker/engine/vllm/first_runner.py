"""Our draws and drafts in vLLM's first model runner (``vllm/v1/worker/gpu_model_runner.py``)."""

# pyright: reportMissingImports=false, reportUntypedBaseClass=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.platforms import current_platform
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from rollpacker.engine.drafts import LONGEST_DRAFT
from rollpacker.engine.vllm.drawing import VllmAttempt, draw, keep, one_hot, row_of

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as Worker
else:
    from vllm.v1.worker.gpu_worker import Worker


class Seeded(LogitsProcessor):
    """Draws one token for each row of a batch, and leaves vLLM's greedy sampler one choice. vLLM
    passes the rows in ``extra_args``."""

    def __init__(self, _config: Any, _device: torch.device, _is_pin_memory: bool) -> None:
        self._rows: dict[int, VllmAttempt] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
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
        places = range(len(logits))
        drawn = draw(logits, [self._rows[i] for i in places], [1] * len(places))
        return one_hot(logits, places, drawn)


class Verifier:
    """Replaces vLLM's rejection sampler, except for vLLM's dry runs (``usual``). It draws the token
    behind each token of a draft, and keeps them up to the first that differs from the draft."""

    def __init__(self, runner: Any, usual: Any) -> None:
        self._runner = runner
        self._usual = usual

    def __call__(
        self, metadata: Any, draft_probs: Any, logits: torch.Tensor, sampling: Any
    ) -> SamplerOutput:
        """Tokens (n, 1 + longest draft), int32, padded with -1, from logits (rows, vocabulary).
        Each sequence has one row more than its draft has tokens. A dry run has ``sampling`` of
        another batch."""
        batch = self._runner.input_batch
        if sampling is not batch.sampling_metadata:
            return self._usual(metadata, draft_probs, logits, sampling)
        keys = batch.req_ids
        drafts = batch.spec_token_ids[: len(keys)]
        rows = [row_of(self._runner.requests[key].sampling_params) for key in keys]
        counts = [1 + len(draft) for draft in drafts]
        found = draw(logits, rows, counts)
        if len(logits) == len(rows):
            return _sampled(np.array([[token] for ((token, _),) in found], np.int32))
        sampled = np.full((len(rows), max(counts)), -1, np.int32)
        for place, (row, drawn, draft) in enumerate(zip(rows, found, drafts, strict=True)):
            tokens = [token for token, _ in keep(row, drawn, draft)]
            sampled[place, : len(tokens)] = tokens
        return _sampled(sampled)


def _sampled(tokens: NDArray[np.int32]) -> SamplerOutput:
    return SamplerOutput(sampled_token_ids=torch.from_numpy(tokens), logprobs_tensors=None)


class NoProposer:
    """A proposer of drafts that has none, as the scheduler hands in ours."""

    def __init__(self, _config: Any) -> None: ...

    def load_model(self, *_arguments: Any) -> None: ...

    def propose(self, sampled: Sequence[Any], *_about: Any, **_more: Any) -> list[list[int]]:
        return [[] for _ in sampled]


class Verifying(Worker):
    """A worker whose runner verifies drafts."""

    def init_device(self) -> None:
        super().init_device()
        runner = self.model_runner
        runner.rejection_sampler = Verifier(runner, runner.rejection_sampler)
        # Otherwise the runner reads zeros as the drafts of sequences near the context's end.
        runner.effective_drafter_max_model_len += LONGEST_DRAFT
        # CUDA graphs serve only steps of one token per sequence, as drafts are uneven.
        for each in (runner, runner.cudagraph_dispatcher):
            each.uniform_decode_query_len = 1

    def take_draft_token_ids(self) -> None: ...
