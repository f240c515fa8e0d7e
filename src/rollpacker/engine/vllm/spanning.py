"""A vLLM engine over several processes: how its members find each other.

On a CPU, members that are killed leave shared memory under the name of their meeting's file;
whoever laid them out removes it (``runtime.leftovers``).
"""

# pyright: reportMissingImports=false, reportUntypedBaseClass=false

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from vllm.distributed import parallel_state
from vllm.v1.executor.abstract import Executor
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher, UniProcExecutor

from rollpacker.engine.base import Span
from rollpacker.engine.vllm.kv_blocks import Budget, Budgeted

_HERE = {"VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
"""An engine never leaves its machine. Read as groups are made; the trainer's go elsewhere."""


def executor(span: Span, device: str, budget: Budget | None) -> type[Executor]:
    """vLLM's executor of one member, which is told its place instead of reading variables."""

    class Alone(Budgeted, UniProcExecutor):
        pass

    index = None if device == "cpu" else torch.device(device).index
    place = (f"file://{span.meeting}", span.rank, span.rank if index is None else index)

    class Member(Budgeted, ExecutorWithExternalLauncher):
        def _distributed_args(self) -> tuple[str, int, int]:
            return place

    # Left to itself vLLM takes the first device.
    chosen = Alone if span.size == 1 and device in ("cpu", "cuda:0") else Member
    chosen.budget = budget
    return chosen


@contextmanager
def at_home(span: Span, device: str) -> Iterator[None]:
    """Build a member of an engine here: groups stay on this machine and agree on their names."""
    if span.size == 1:
        yield
        return
    # Names count the groups that a process has had, and members may have had different ones.
    parallel_state._group_name_counter.clear()
    if device == "cpu":
        # A vocabulary that is cut in parts is looked up by a function that would be compiled.
        torch.compiler.set_stance("force_eager")
    kept = {name: os.environ.get(name) for name in _HERE}
    os.environ.update(_HERE)
    try:
        yield
    finally:
        for name, value in kept.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
