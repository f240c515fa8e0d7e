"""Members that fall silent keep nobody waiting for ever."""

from scheduler_world import reborn

from rollpacker.core.types import Phase
from rollpacker.rollmux.model import decisions as do
from rollpacker.rollmux.model import events as ev
from rollpacker.rollmux.model.jobs import JobSpec
from rollpacker.rollmux.model.settings import Settings
from rollpacker.rollmux.scheduler.scheduler import Scheduler


class World:
    """Jobs that share r0 and t0, and what the scheduler said."""

    def __init__(self) -> None:
        self.scheduler = Scheduler(Settings())
        self.now = 0.0
        self.permits: dict[str, do.Permit] = {}
        for name in "ab":
            spec = JobSpec(id=name, worst_rollout_s=10.0, worst_train_s=10.0, slo=100.0)
            self.post(ev.JobArrived(spec=spec))
        assert set(self.scheduler.cluster.nodes) == {"r0", "t0"}

    def post(self, event: ev.Event) -> None:
        for made in self.scheduler.handle(self.now, event):
            if isinstance(made, do.Permit):
                self.permits[made.job] = made

    def ask(self, job: str, phase: Phase = "rollout") -> bool:
        self.post(ev.PermitRequested(job=job, phase=phase))
        return job in self.permits

    def finish(self, job: str, seconds: float = 5.0) -> None:
        permit = self.permits.pop(job)
        done = ev.PhaseFinished(job=job, phase=permit.phase, seconds=seconds, token=permit.token)
        self.post(done)

    def wait(self, until: float) -> None:
        """As the daemon does: it says that time has passed when it was asked to."""
        while (look := self.scheduler.next_look()) <= until:
            self.now = max(self.now, look)
            self.post(ev.TimePassed())
            assert self.scheduler.next_look() > self.now
        self.now = until


def late_member() -> World:
    """Job a, which is in a hurry, trains while b, which is not, could roll out."""
    world = World()
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
    world.scheduler = reborn(world.scheduler)
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
