"""Engines and trainers that take turns on a device: messages, replay, and deaths on the way."""

import os
import random
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from runtime_jobs import (
    Workshop,
    checkpoints,
    kept_samples,
    largest_difference,
    run,
    times_trained,
    write_wide_model,
)
from spanning_runs import decided, entries, happened

from rollpacker.core import journal
from rollpacker.policy.rollout import from_journal
from rollpacker.runtime.messages import messages as msg
from rollpacker.runtime.pool.pool import WorkerPool

pytestmark = pytest.mark.cluster
ROLLOUT: dict[str, Any] = {
    "prompts_per_step": 4,
    "num_generations": 4,
    "max_completion_length": 40,
    "streaming": {"scaling": "fixed", "scaling_fraction": 0.6, "group_tokens": 1},
}
ENGINE: dict[str, Any] = {"kind": "vllm", "max_running": 16, "kv_tokens": 1024}
ROUNDING = 1e-5
"""Groups come in another order, and their gradients are summed in it."""
TURNS = (msg.Sleep, msg.LoadWeights, msg.Offload, msg.Onload)
shop = Workshop.fixture(rows=8, model=write_wide_model)


def newest(folder: Path) -> Path:
    return folder / f"checkpoint-{checkpoints(folder)[-1]}"


def settings(turns: str, devices: int = 1, **more: Any) -> dict[str, Any]:
    place = {"per_node": devices, "pin": False, "kind": "cpu", "turns": turns}
    return {"epochs": 1, "rollout": ROLLOUT, "engine": ENGINE, "devices": place} | more


@pytest.fixture(scope="module")
def beside(shop: Workshop) -> Path:
    """Engine and trainer keep their memory."""
    return run(shop.config("beside", **settings("off")))[0]


def recorded(
    monkeypatch: pytest.MonkeyPatch, act: Callable[[int, Any], None] = lambda _n, _m: None
) -> list[tuple[int, str]]:
    """What workers are told, of turns and of gradients, in order; ``act`` sees it before them."""
    found: list[tuple[int, str]] = []
    send = WorkerPool._send

    def heard(self: WorkerPool, workers: Sequence[int], command: Any) -> None:
        if isinstance(command, (*TURNS, msg.Accumulate, msg.Apply, msg.Share)):
            found.extend((number, type(command).__name__) for number in workers)
        send(self, workers, command)
        for number in workers:
            act(number, command)

    monkeypatch.setattr(WorkerPool, "_send", heard)
    return found


@pytest.mark.parametrize(("turns", "devices"), [("engine", 1), ("engine", 2), ("both", 1)])
def test_turns_change_nothing_but_who_has_the_memory(
    shop: Workshop,
    beside: Path,
    monkeypatch: pytest.MonkeyPatch,
    turns: str,
    devices: int,
) -> None:
    told = recorded(monkeypatch)
    name = f"{turns}-{devices}"
    folder, _ = run(shop.config(name, **settings(turns, devices, checkpoint__every=1)))
    one, other = ([row for row in kept_samples(each) if row[0] == 0] for each in (beside, folder))
    assert other == one
    if devices == 1:
        assert largest_difference(newest(folder), newest(beside)) < ROUNDING
    steps = 2
    assert len(decided(folder, "SleepEngine")) == steps * devices
    assert len(happened(folder, "EngineSlept")) == steps * devices
    assert journal.replay(folder / "journal.jsonl", from_journal).differences == []
    slept = set[int]()
    for entry in entries(folder):
        if entry["event"]["kind"] == "StepStarted":
            slept.clear()
        elif entry["event"]["kind"] == "EngineSlept":
            slept.add(entry["event"]["engine"])
        for each in entry["decisions"]:
            assert each["kind"] != "AccumulateGradients" or each["replica"] in slept
    kinds = [kind for _, kind in told]
    assert kinds.index("Sleep") < kinds.index("Accumulate") < kinds.index("Apply")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("turns", ["engine", "both"])
def test_a_death_in_any_state_is_survived(
    shop: Workshop, beside: Path, monkeypatch: pytest.MonkeyPatch, turns: str, seed: int
) -> None:
    """A worker dies as it is told to sleep, to leave, to come back or to load."""
    left, begun, pids = random.Random(seed).randrange(1, 8), False, dict[int, int]()

    def strike(number: int, command: Any) -> None:
        nonlocal left, begun  # a run that has not begun ends with its worker
        begun = begun or isinstance(command, msg.BeginStep)
        if begun and isinstance(command, TURNS):
            left -= 1
            if left == 0 and pids.get(number):
                os.kill(pids[number], signal.SIGKILL)

    recorded(monkeypatch, strike)
    launch = WorkerPool._launch

    async def noted(self: WorkerPool, specs: Any) -> Any:
        found = await launch(self, specs)
        pids.update({n: host.pid for n, host in self._hosts.items()})
        return found

    monkeypatch.setattr(WorkerPool, "_launch", noted)
    again: dict[str, Any] = {"cluster__restarts": 3, "checkpoint__every": 1}
    folder, _ = run(shop.config(f"struck-{turns}-{seed}", **settings(turns), **again))
    assert set(times_trained(folder).values()) == {1}
    assert largest_difference(newest(folder), newest(beside)) < ROUNDING
    assert journal.replay(folder / "journal.jsonl", from_journal).differences == []
