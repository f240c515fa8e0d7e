"""Our seeds in vLLM's second model runner (``vllm/v1/worker/gpu``), as far as it has a place for
them.

No run reaches this: ``environment`` keeps to the first runner, since the second needs Triton and
none of this ever ran on a GPU. It is tested with vLLM's own classes on a CPU, all but its kernels.

A request has a row behind each token of its draft there, logits processors may run beside drafts,
and at temperature 0 a draft is kept up to the first row whose argmax is another token
(``spec_decode/rejection_sampler_utils.py``, ``_rejection_kernel``). Rows that are one-hot where a
token was drawn are all that its verification needs: it keeps what would be sampled without drafts.

A proposer of ours it has no place for yet (0.32):

- ``method: custom_class`` is refused (``VllmConfig._get_v2_model_runner_unsupported_features``),
  and ``spec_decode.init_speculator`` makes vLLM's own only;
- of the scheduler's drafts, which know who stopped and which blocks are free, the runner takes only
  how many there are: which tokens is ``req_states.draft_tokens``, and that is what
  ``runner.speculator.propose()`` said at the end of the step before;
- where the scheduler's ``num_spec_tokens`` is 0, as ours has it, all of that becomes -1.
"""

# pyright: reportMissingImports=false, reportUntypedBaseClass=false

from __future__ import annotations

from itertools import groupby
from typing import Any

import torch
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext, LogitsProcessor

from rollpacker.engine.vllm.names import require
from rollpacker.engine.vllm.sampling import VllmAttempt, draw, keep, one_hot, row_of


class SeededRows(LogitsProcessor):
    """Draws a token for each row of our requests, and leaves vLLM's verification one choice.

    Raises ``ValueError`` where vLLM calls what it needs otherwise.
    """

    def __init__(self, _config: Any, _states: Any) -> None:
        require("second model runner's rows", LogitsContext)
        self._rows: dict[int, VllmAttempt] = {}

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """Who is in a slot from now on; vLLM's own, which warm it up, are none of ours."""
        self._rows.pop(req_idx, None)
        if "row" not in (sampling_params.extra_args or {}):
            return False
        self._rows[req_idx] = row_of(sampling_params)
        return True

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        """Logits (rows, vocabulary) of our requests become one-hot. It waits for the device."""
        fed = ctx.input_ids.tolist()
        places: list[int] = []
        rows: list[VllmAttempt] = []
        drafts: list[list[int]] = []
        end = 0
        for slot, those in groupby(ctx.expanded_idx_mapping.tolist()):
            start, end = end, end + len(list(those))
            row = self._rows.get(slot)
            if row is not None:
                places += range(start, end)
                rows.append(row)
                drafts.append(fed[start + 1 : end])
        if not rows:
            return logits
        some = logits if len(places) == len(logits) else logits[places]
        drawn = draw(some, rows, [1 + len(draft) for draft in drafts])
        for row, found, draft in zip(rows, drawn, drafts, strict=True):
            keep(row, found, draft)
        return one_hot(logits, places, drawn)
