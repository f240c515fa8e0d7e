"""Members that fall silent keep nobody waiting for ever."""

import json
from dataclasses import replace

import pytest

from rollpacker.core.types import Phase
from rollpacker.rollmux.model import decisions as do
from rollpacker.rollmux.model import events as ev
from rollpacker.rollmux.model.jobs import JobSpec
from rollpacker.rollmux.model.settings import PLAIN, Settings
from rollpacker.rollmux.scheduler.scheduler import Scheduler

RR = replace(PLAIN, cold_s=30.0)


class World:
    """Jobs that share r0 and t0, and what the scheduler said."""

    def __init__(self, how: Settings, names: str = "ab", **spec: object) -> None:
        self.scheduler = Scheduler(how)
        self.now = 0.0
        self.permits: dict[str, do.Permit] = {}
        self.turns: list[tuple[int, str, int, int]] = []
        for name in names:
            wanted = {"worst_rollout_s": 10.0, "worst_train_s": 10.0, "slo": 100.0} | spec
            self.post(ev.JobArrived(spec=JobSpec(id=name, **wanted)))
        assert set(self.scheduler.cluster.nodes) == {"r0", "t0"}

    def post(self, event: ev.Event) -> None:
        for made in self.scheduler.handle(self.now, event):
            if isinstance(made, do.Permit):
                self.permits[made.job] = made
                self.turns.append((made.epoch, made.phase, made.round, made.position))

    def ask(self, job: str, phase: Phase = "rollout") -> bool:
        self.post(ev.PermitRequested(job=job, phase=phase))
        return job in self.permits

    def finish(self, job: str, seconds: float = 5.0) -> None:
        permit = self.permits.pop(job)
        done = ev.PhaseFinished(job=job, phase=permit.phase, seconds=seconds, token=permit.token)
        self.post(done)

    def lose(self, job: str) -> None:
        self.post(ev.PermitLost(job=job, token=self.permits.pop(job).token))

    def iterate(self, job: str) -> None:
        for phase in ("rollout", "train"):
            assert self.ask(job, phase), (job, phase)
            self.finish(job)

    def wait(self, until: float) -> None:
        """As the daemon does: it says that time has passed when it was asked to."""
        while (look := self.scheduler.next_look()) <= until:
            self.now = max(self.now, look)
            self.post(ev.TimePassed())
            assert self.scheduler.next_look() > self.now
        self.now = until


@pytest.mark.parametrize("phase", ["rollout", "train"])
def test_who_loses_a_permit_is_set_aside_until_it_asks(phase: Phase) -> None:
    world = World(RR)
    assert world.ask("a")
    if phase == "train":
        world.finish("a")
        assert world.ask("a", "train")
    world.lose("a")
    for _ in range(3):
        world.iterate("b")
    if not world.ask("a", phase):
        assert world.ask("b")
        world.finish("b")
    assert world.permits["a"].phase == phase


def test_a_permit_that_is_asked_for_again_has_another_turn() -> None:
    world = World(RR)
    for _ in range(3):
        assert world.ask("a") or world.ask("b")
        world.lose("a" if "a" in world.permits else "b")
    assert len(world.turns) == len(set(world.turns))


def test_who_has_done_all_its_iterations_is_waited_for_no_more() -> None:
    world = World(RR, "a", iterations=1)
    world.post(
        ev.JobArrived(spec=JobSpec(id="b", worst_rollout_s=10.0, worst_train_s=10.0, slo=100.0))
    )
    world.iterate("a")
    for _ in range(3):
        world.iterate("b")


@pytest.mark.parametrize("phase", ["rollout", "train"])
def test_a_job_that_dies_between_phases_is_set_aside_after_a_while(phase: Phase) -> None:
    world = World(RR)
    world.iterate("a")
    if phase == "train":
        world.iterate("b")
        assert world.ask("a")
        world.finish("a")
        assert world.ask("b")
        world.finish("b")
        assert not world.ask("b", "train")
    else:
        world.iterate("b")
        assert not world.ask("b")
    world.wait(29.0)
    assert "b" not in world.permits
    world.wait(31.0)
    assert "b" in world.permits
    world.finish("b")
    assert world.ask("a", phase)


def late_member() -> World:
    """Job a, which is in a hurry, trains while b, which is not, could roll out."""
    world = World(Settings())
    assert world.ask("a")
    world.finish("a")
    assert world.ask("a", "train")
    seat = world.scheduler.cluster.jobs["a"].seat
    assert seat is not None
    seat.promise(1.0, since=seat.anchor)
    world.now = 5.0
    return world


def test_a_node_is_held_for_a_member_that_comes_and_not_for_one_that_is_late() -> None:
    world = late_member()
    assert not world.ask("b")
    world.wait(12.0)
    assert "b" not in world.permits
    world.wait(20.0)
    assert "b" in world.permits
    assert world.now < world.scheduler.next_look()


def test_what_is_late_survives_a_restart() -> None:
    world = late_member()
    assert not world.ask("b")
    before = world.scheduler.next_look()
    assert 10.0 <= before < 20.0
    state = json.loads(json.dumps(world.scheduler.state_dict()))
    world.scheduler = Scheduler(world.scheduler.settings)
    world.scheduler.load_state_dict(state)
    assert world.scheduler.next_look() == before
    world.wait(20.0)
    assert "b" in world.permits


def test_a_node_is_held_for_a_member_that_was_to_ask_at_once_and_does_not() -> None:
    world = late_member()
    assert not world.ask("b")
    world.finish("a")
    assert "b" not in world.permits
    at = world.scheduler.next_look()
    assert world.now < at < world.now + 10.0
    world.wait(at)
    assert "b" in world.permits
