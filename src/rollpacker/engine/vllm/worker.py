"""vLLM's worker, with our verification of drafts in the place of its own."""

# pyright: reportMissingImports=false, reportUntypedBaseClass=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import vllm
from vllm.platforms import current_platform

from rollpacker.engine.drafts.speculator import LONGEST_DRAFT
from rollpacker.engine.vllm.sampling import Verifier

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as Worker
else:
    from vllm.v1.worker.gpu_worker import Worker

_NAMES = ("rejection_sampler", "effective_drafter_max_model_len", "uniform_decode_query_len")


class Nothing:
    """A proposer of drafts that has none: the scheduler hands in ours."""

    def __init__(self, _config: Any) -> None: ...

    def load_model(self, *_arguments: Any) -> None:
        """There is none."""

    def propose(self, sampled: Sequence[Any], *_about: Any, **_more: Any) -> list[list[int]]:
        """No tokens for any sequence."""
        return [[] for _ in sampled]


class Verifying(Worker):
    """A worker whose runner verifies drafts."""

    def init_device(self) -> None:
        """As vLLM's."""
        super().init_device()
        _verify_here(self.model_runner)


def _verify_here(runner: Any) -> None:
    """Raises ``ValueError`` where vLLM's runner is not the one that this was written for."""
    missing = [name for name in _NAMES if not hasattr(runner, name)]
    if missing:
        raise ValueError(
            f"vLLM {vllm.__version__} has no {missing[0]} in its model runner, where drafts are "
            "verified: take vLLM 0.32, or set rollout.speculation.mode=off"
        )
    runner.rejection_sampler = Verifier(runner, runner.rejection_sampler)
    # Else the runner takes zeros for drafts of everybody near the context's end.
    runner.effective_drafter_max_model_len += LONGEST_DRAFT
    # Graphs are for steps of one token each: those with drafts are uneven.
    for each in (runner, runner.cudagraph_dispatcher):
        each.uniform_decode_query_len = 1
