"""A job on shared nodes that fail or are waited for in vain, wherever it is in its loop."""

import asyncio
import json
import os
import signal
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from runtime_jobs import Workshop, checkpoints, kept_samples, metrics, times_trained, weights_digest
from test_separate_runs import steps

from rollpacker import job
from rollpacker.core.journal import replay
from rollpacker.core.types import Phase
from rollpacker.policy.rollout import from_journal
from rollpacker.runtime.record.progress import Progress
from rollpacker.runtime.step.phase_nodes import DisplacedError, OwnNodes, Tenant, WaitStoppedError

pytestmark = pytest.mark.wide


class Nodes(OwnNodes):
    """Keeps what it is given."""

    async def open(
        self, tenant: Tenant, fail: Callable[[Exception], None], release_tail: Callable[[], None]
    ) -> None:
        self.tenant, self.fail, self.release_tail = tenant, fail, release_tail


class FailingNodes(Nodes):
    """Its nodes stop all processes, once: after so many requests for a phase."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at
        self.asked = 0
        self.closed: list[bool] = []

    async def begin(self, phase: Phase) -> None:
        self.asked += 1
        if self.asked == self.at:
            for pid in self.tenant.pids:
                os.kill(pid, signal.SIGSTOP)
            error = DisplacedError("a node failed")
            asyncio.get_running_loop().call_later(0.2, self.fail, error)

    async def close(self, *, displaced: bool = False) -> None:
        self.closed.append(displaced)


@pytest.mark.parametrize(
    "at", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)]
)
def test_a_node_may_fail_in_an_evaluation_a_rollout_or_a_training(at: int, tmp_path: Path) -> None:
    workshop = Workshop(tmp_path, rows=8)
    evaluated = {"data": {"path": str(workshop.data)}, "every": 1}
    few: dict[str, Any] = {"epochs": 1, "devices__per_node": 1, "checkpoint__every": 1}
    config = workshop.config("run", eval=evaluated, **few)
    phases = FailingNodes(at)
    said = StringIO()
    folder = job.train(config, progress=Progress(Console(file=said, width=400)), phases=phases)
    assert phases.closed == [True, False]
    assert "a node failed" in said.getvalue()
    assert set(times_trained(folder).values()) == {1}
    assert checkpoints(folder)[-1] == 2


class StoppedWait(OwnNodes):
    """The user gives up while the nodes of the second step are waited for."""

    async def begin(self, phase: Phase) -> None:
        self.asked = getattr(self, "asked", 0) + 1
        if phase == "rollout" and self.asked > 3:
            raise WaitStoppedError("stopped")


def test_an_interrupt_while_waiting_ends_the_run_with_a_checkpoint(tmp_path: Path) -> None:
    workshop = Workshop(tmp_path, rows=8)
    evaluated = {"data": {"path": str(workshop.data)}}
    config = workshop.config("run", epochs=1, eval=evaluated, devices__per_node=1)
    folder = job.train(config, progress=Progress(Console(file=StringIO())), phases=StoppedWait())
    assert checkpoints(folder) == [1]
    summary = (folder / "summary.json").read_text(encoding="utf-8")
    assert '"before"' in summary
    assert '"after"' not in summary


class WantedNodes(Nodes):
    """Another job takes the nodes of the first tail, and of the second step as it begins, when
    both workers are sure to have something left."""

    offered = 0
    rollouts = 0

    async def begin(self, phase: Phase) -> None:
        self.rollouts += phase == "rollout"
        if phase == "rollout" and self.rollouts == 3:  # once for what is before the first step
            asyncio.get_running_loop().call_soon(self.release_tail)

    async def offer_tail(self) -> None:
        self.offered += 1
        self.release_tail()


def test_a_tail_leaves_most_workers_and_changes_no_bit(tmp_path: Path) -> None:
    workshop = Workshop(tmp_path, rows=8)
    few: dict[str, Any] = {"epochs": 1, "deterministic": True, "devices__per_node": 2}
    few["mux__url"] = "http://127.0.0.1:1"
    quiet = Progress(Console(file=StringIO()))
    alone = job.train(workshop.config("alone", **few), progress=quiet, phases=OwnNodes())
    phases = WantedNodes()
    shared = job.train(workshop.config("shared", **few), progress=quiet, phases=phases)
    lines = (shared / "journal.jsonl").read_text(encoding="utf-8").splitlines()
    assert phases.offered == 1
    assert sum('"kind":"TailReleased"' in line for line in lines) == 2
    assert any('"kind":"MigrateAttempts"' in line for line in lines)
    assert replay(shared / "journal.jsonl", from_journal).differences == []
    assert kept_samples(shared) == kept_samples(alone)
    assert weights_digest(shared / "checkpoint-2") == weights_digest(alone / "checkpoint-2")


class WarmNodes:
    """Others have the devices between two phases."""

    launcher = None

    def __init__(self) -> None:
        self.stats: dict[str, float] = {}
        self.kept: list[int] = []

    async def open(
        self, tenant: Tenant, fail: Callable[[Exception], None], release_tail: Callable[[], None]
    ) -> None:
        del fail, release_tail
        self.tenant = tenant

    async def offer_tail(self) -> None:
        pass

    def interrupt(self) -> None:
        pass

    async def close(self, *, displaced: bool = False) -> None:
        del displaced

    async def begin(self, phase: Phase) -> None:
        other: Phase = "train" if phase == "rollout" else "rollout"
        self.kept.append(await self.tenant.offload(other))
        await self.tenant.onload(phase)

    async def end(self) -> None:
        for phase in ("rollout", "train"):
            self.kept.append(await self.tenant.offload(phase))


FSDP = {"kind": "fsdp", "shard": 2}
SEPARATE = {"pin": False, "kind": "cpu", "per_node": 3, "layout": "separate", "training": 2}
QUIET = Progress(Console(file=StringIO()))


@pytest.mark.parametrize(
    "trainer",
    [
        pytest.param({"kind": "local"}, id="local", marks=pytest.mark.slow),
        pytest.param(FSDP, id="fsdp"),
    ],
)
def test_states_that_wait_in_host_memory_change_no_bit(
    trainer: dict[str, Any], tmp_path: Path
) -> None:
    workshop = Workshop(tmp_path, rows=8)
    few: dict[str, Any] = {"epochs": 1, "deterministic": True, "checkpoint__every": 1}
    few |= {"trainer": trainer, "devices": SEPARATE}
    few["mux__url"] = "http://127.0.0.1:1"
    few |= {"eval": {"data": {"path": str(workshop.data)}, "every": 1}}
    alone = job.train(workshop.config("alone", **few), progress=QUIET, phases=OwnNodes())
    phases = WarmNodes()
    warm = job.train(workshop.config("warm", **few), progress=QUIET, phases=phases)
    assert kept_samples(warm) == kept_samples(alone)
    for kinds in steps(warm):
        assert kinds.index("FinishRollout") < kinds.index("AccumulateGradients")
    # Those of a step come with the next one's metrics: there were no nodes to decode on.
    said, sooner = (
        [each.get("eval/sampled_accuracy") for each in metrics(f)] for f in (warm, alone)
    )
    assert said == [None, *sooner[:-1]]
    ends = [json.loads((f / "summary.json").read_text())["after"] for f in (warm, alone)]
    assert ends[0] == ends[1]
    last = [folder / f"checkpoint-{checkpoints(folder)[-1]}" for folder in (warm, alone)]
    assert weights_digest(last[0]) == weights_digest(last[1])
    # A shard of the weights, both moments and the sum of gradients, in float32.
    weights = sum(path.stat().st_size for path in last[0].glob("*.safetensors"))
    assert max(phases.kept) > 3.5 * weights
