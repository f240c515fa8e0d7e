"""The real runtime on a virtual clock: a replica that is lost while an update is under way."""

import asyncio
from collections import Counter
from pathlib import Path

import pytest
from job_scripts import script
from scripted_job import Script
from virtual_runtime import Runtime, VirtualPool

from rollpacker.core import decisions as do
from rollpacker.core import journal
from rollpacker.policy.rollout import RolloutPolicy
from rollpacker.runtime.messages import messages as msg
from rollpacker.runtime.messages.faults import WorkerError
from rollpacker.runtime.pool.pool import Loss

JOB = script("exact", updates=2, steps=3)


class Deadly(VirtualPool):
    """The ``victim`` dies when all three have been told the first command of a ``kind``."""

    kind: type = msg.Score
    victim: int | None = None

    def __init__(self, given: Script, agenda) -> None:
        super().__init__(given, agenda)
        self.told: list[tuple[int, msg.Command]] = []

    def to_replica(self, replica, command) -> None:
        super().to_engine(replica, command)
        self.told.append((replica, command))
        told = sum(isinstance(each, self.kind) for _, each in self.told)
        if self.victim is not None and isinstance(command, self.kind) and told == 3:
            self._agenda.after(0.0, self._lose)

    def _lose(self) -> None:
        del self._workers[self.victim]
        self._awake.discard(self.victim)
        gone = (self.victim,)
        self._listener.lost(Loss(engines=gone, replicas=gone, text="worker died"))


def run(pool: type[Deadly]) -> Runtime:
    runtime = Runtime(JOB, pool, sampler_is_old=False)
    asyncio.run(runtime.steps())
    return runtime


@pytest.mark.parametrize("victim", range(3))
def test_while_scoring_no_weight_has_changed_and_the_run_goes_on(
    victim: int, tmp_path: Path
) -> None:
    runtime = run(type("Pool", (Deadly,), {"victim": victim}))
    assert len(runtime.run.records) == JOB.steps
    live = {n for n in range(3) if n != victim}
    begun = [n for n, (_, each) in enumerate(runtime.pool.told) if isinstance(each, msg.Score)]
    after = runtime.pool.told[begun[2] + 1 :]
    assert {replica for replica, _ in after} == live
    for record in runtime.run.records:
        assert len(record.updates) == 2
        assert len(record.trained) == 6
    # What was lost with the victim's sum is in the first update all the same.
    assert sums(runtime) == sums(run(Deadly))
    told = [command for _, command in runtime.pool.told if isinstance(command, msg.Score)]
    scored = Counter(group.prompt for command in told for group in command.groups)
    assert max(scored.values()) == 2, "only the victim's share is scored again"
    assert replays(runtime, tmp_path)


def sums(runtime: Runtime) -> list[int]:
    """Tokens of each update's gradients; every replica is told the same."""
    totals = [c.total.tokens for _, c in runtime.pool.told if isinstance(c, msg.Apply)]
    return list(dict.fromkeys(totals))


def replays(runtime: Runtime, folder: Path) -> bool:
    writer = journal.JournalWriter(folder / "journal.jsonl")
    writer.meta({})
    for line in runtime.run.journal.lines:
        writer.record(*line)
    writer.close()
    replayed = journal.replay(folder / "journal.jsonl", lambda _meta: RolloutPolicy(JOB.settings()))
    return not replayed.differences


def test_while_weights_change_it_ends() -> None:
    with pytest.raises(WorkerError, match="may have changed some of the weights"):
        run(type("Pool", (Deadly,), {"kind": msg.Apply, "victim": 1}))


class DiesAfterTheUpdate(Deadly):
    """The victim dies when the driver has all three reports of the first update, unread."""

    applied = 0

    def _tell(self, worker, report) -> None:
        super()._tell(worker, report)
        self.applied += isinstance(report, msg.Applied)
        if isinstance(report, msg.Applied) and self.applied == 3:
            self._lose()


@pytest.mark.parametrize("victim", range(3))
def test_an_update_that_all_have_made_holds_though_one_dies_right_after_it(
    victim: int, tmp_path: Path
) -> None:
    runtime = run(type("Pool", (DiesAfterTheUpdate,), {"victim": victim, "kind": int}))
    assert [len(record.updates) for record in runtime.run.records] == [2] * JOB.steps
    assert replays(runtime, tmp_path)


def test_what_waits_for_nodes_is_not_sent_to_who_is_lost_meanwhile() -> None:
    """Nor is the update begun before what was lost is summed again."""
    runtime = Runtime(JOB, Deadly)
    updates = runtime.driver._updates
    updates.begin(runtime.driver.record, lambda _event: pytest.fail("nothing was summed"))
    updates.rollout_over(hold=True)
    for replica in (0, 1):
        updates.perform(do.AccumulateGradients(replica=replica, parts=()))
    updates.perform(do.ApplyUpdate(step=0, update=0, last=True))
    updates.lose(1)
    updates.perform(do.AccumulateGradients(replica=0, parts=()))
    updates.release()
    told = [(replica, type(command)) for replica, command in runtime.pool.told]
    assert told == [(0, msg.Accumulate)] * 2
    assert updates.summing
