"""A driver of the scheduler without time, for tests: anything may happen in any order."""

from hypothesis import strategies as st

from rollpacker.core.codec import dumps_finite, load, loads
from rollpacker.rollmux.model import decisions as do
from rollpacker.rollmux.model import events as ev
from rollpacker.rollmux.model.inventory import POOL_NAMES, Fixed
from rollpacker.rollmux.model.jobs import JobSpec
from rollpacker.rollmux.scheduler.scheduler import Scheduler
from rollpacker.rollmux.scheduler.snapshot import SchedulerSnapshot


def reborn(scheduler: Scheduler) -> Scheduler:
    """Another one with the same state, which went through JSON."""
    named = isinstance(scheduler.cluster.inventory, Fixed)
    another = Scheduler(scheduler.settings, Fixed() if named else None)
    another.restore(load(loads(dumps_finite(scheduler.snapshot())), SchedulerSnapshot))
    return another


class World:
    """A driver without time: whoever holds something may go on in any order."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.now = 0.0
        self.permits: dict[str, do.Permit] = {}
        self.moving: set[str] = set()
        self.idle: dict[str, str] = {}
        self.held: set[str] = set()
        self.tokens: list[int] = []
        self.tails: set[str] = set()
        self.waiting: set[str] = set()
        """Jobs that had nodes and have none now."""
        self.had_nodes: set[str] = set()
        self.count = 0

    def post(self, event: ev.Event) -> None:
        self.now += 7.0
        for made in self.scheduler.handle(self.now, event):
            placed = isinstance(made, do.Place | do.Move)
            assert not (placed and self.scheduler.cluster.jobs[made.job].held)
            self.perform(made)
        self.check()

    def perform(self, made: do.Decision) -> None:
        if isinstance(made, do.Permit):
            assert made.job not in self.permits
            assert made.job not in self.moving
            self.permits[made.job] = made
            self.tokens.append(made.token)
            self.tails.discard(made.job)
        elif isinstance(made, do.Move):
            self.permits.pop(made.job, None)
            self.idle.pop(made.job, None)
            self.waiting.discard(made.job)
            self.moving.add(made.job)
        elif isinstance(made, do.Suspend):
            assert made.job not in self.permits
            self.idle.pop(made.job, None)
            self.waiting.add(made.job)
        elif isinstance(made, do.Wait) and made.job in self.had_nodes:
            for where in (self.permits, self.idle):
                where.pop(made.job, None)
            self.moving.discard(made.job)
            self.tails.discard(made.job)
            self.waiting.add(made.job)
        elif isinstance(made, do.Place):
            self.had_nodes.add(made.job)
        elif isinstance(made, do.AcquireNodes):
            assert not self.held & set(made.nodes)
            self.held |= set(made.nodes)
        elif isinstance(made, do.ReleaseNodes):
            assert set(made.nodes) <= self.held
            self.held -= set(made.nodes)
        elif isinstance(made, do.ReleaseTail):
            self.tails.add(made.job)

    def check(self) -> None:
        cluster = self.scheduler.cluster
        assert self.tokens == sorted(set(self.tokens))
        assert {node.name for node in cluster.nodes.values() if node.held} == self.held
        for node in cluster.nodes.values():
            assert node.pins, f"{node.name} is leaked"
            assert node.used_gb <= cluster.inventory.memory_gb(node.name) + 1e-6
            assert node.name in cluster.groups[node.group].nodes[node.pool]
        busy = [
            name
            for permit in self.permits.values()
            for name in permit.nodes
            if permit.job not in self.tails
        ]
        assert len(busy) == len(set(busy)), "two phases on a node"
        for job in cluster.jobs.values():
            assert (job.waits_since is None) != (job.home is None and job.destination is None)
        if isinstance(cluster.inventory, Fixed):
            slots = cluster.inventory.slots
            assert {name for name, slot in slots.items() if slot.used} == set(cluster.nodes)
            for node in cluster.nodes.values():
                assert slots[node.name].machine.pool == POOL_NAMES[node.pool]
                for pin in node.pins:
                    needs = cluster.jobs[pin].programs[node.pool]
                    assert slots[node.name].agent == "programs" or not needs
        for group in cluster.groups.values():
            assert group.seats or any(
                cluster.nodes[name].pins for pool in group.nodes for name in pool
            )

    def arrive(self, data: st.DataObject) -> None:
        self.count += 1
        spec = JobSpec(
            id=f"j{self.count}",
            worst_rollout_s=data.draw(st.floats(20, 900)),
            worst_train_s=data.draw(st.floats(20, 500)),
            rollout_nodes=data.draw(st.sampled_from([1, 1, 2])),
            train_nodes=data.draw(st.sampled_from([1, 1, 2])),
            slo=data.draw(st.floats(1.0, 3.0)),
            iterations=data.draw(st.sampled_from([None, 3, 500])),
            expected_iterations=data.draw(st.sampled_from([None, 2, 400])),
            rollout_memory_gb=data.draw(st.floats(100, 900)),
            team=data.draw(st.sampled_from(["", "a", "b"])),
            priority=data.draw(st.integers(0, 2)),
            too_large="wait",
        )
        programs = data.draw(st.booleans())
        alone = not programs or data.draw(st.booleans())
        self.post(ev.JobArrived(spec=spec, programs=(programs, not alone)))
        self.idle[spec.id] = "rollout"

    def ask(self, name: str) -> None:
        self.post(ev.PermitRequested(job=name, phase=self.idle.pop(name)))

    def finish(self, name: str, share: float) -> None:
        permit = self.permits.pop(name)
        spec = self.scheduler.cluster.jobs[name].spec
        worst = spec.worst_rollout_s if permit.phase == "rollout" else spec.worst_train_s
        self.idle[name] = "train" if permit.phase == "rollout" else "rollout"
        self.post(
            ev.PhaseFinished(
                job=name, phase=permit.phase, seconds=worst * share, token=permit.token
            )
        )

    def arrived(self, name: str) -> None:
        self.moving.discard(name)
        self.idle[name] = "rollout"
        self.post(ev.MoveFinished(job=name))

    def lose(self, name: str) -> None:
        permit = self.permits.pop(name)
        self.idle[name] = permit.phase
        self.tails.discard(name)
        self.post(ev.PermitLost(job=name, token=permit.token))

    def change(self, name: str, data: st.DataObject) -> None:
        held, priority = data.draw(st.sampled_from([(True, None), (False, None), (None, 3)]))
        self.post(ev.JobChanged(job=name, held=held, priority=priority))

    def end(self, name: str) -> None:
        for where in (self.permits, self.idle):
            where.pop(name, None)
        self.moving.discard(name)
        self.waiting.discard(name)
        self.tails.discard(name)
        self.post(ev.JobEnded(job=name))

    def node_event(self, data: st.DataObject) -> None:
        """An owner does something with a named node."""
        inventory = self.scheduler.cluster.inventory
        assert isinstance(inventory, Fixed)
        slot = inventory.slots[data.draw(st.sampled_from(sorted(inventory.slots)))]
        name = slot.machine.name
        can: list[ev.Event] = [ev.NodeOpened(node=name)]
        can += [ev.NodeClosed(node=name, status=how) for how in ("cordoned", "draining")]
        can += [ev.NodeJoined(machine=slot.machine)] * 3
        can += [ev.AgentHeard(node=name, programs=True)] * 2
        if not slot.used:
            can.append(ev.NodeRemoved(node=name))
        event = data.draw(st.sampled_from(can))
        if slot.status == "down" and isinstance(event, ev.NodeOpened):
            return
        self.post(event)
        if isinstance(event, ev.NodeRemoved):
            self.post(ev.NodeJoined(machine=slot.machine))

    def _usual(self) -> list[tuple[str, str]]:
        can = [("arrive", "")] if len(self.scheduler.cluster.jobs) < 12 else []
        can += [("ask", name) for name in self.idle] * 3
        can += [("finish", name) for name in self.permits] * 4
        can += [("tail", name) for name, p in self.permits.items() if p.phase == "rollout"]
        can += [("arrived", name) for name in self.moving] * 2
        return can

    def _rare(self) -> dict[int, list[tuple[str, str]]]:
        """By a number of 0 to 19; others are usual."""
        rare = {
            0: [("end", name) for name in self.scheduler.cluster.jobs],
            1: [("fail", node) for node in sorted(self.held)],
            2: [("lose", name) for name in self.permits],
            3: [("wait", "")] if self.scheduler.next_look() < 1e9 else [],
        }
        rare[6] = [("change", name) for name in self.scheduler.cluster.jobs]
        if isinstance(self.scheduler.cluster.inventory, Fixed):
            rare |= {4: [("node", "")], 5: [("node", "")]}
        return rare

    def step(self, data: st.DataObject) -> None:
        """Any one thing that may happen now."""
        can = self._rare().get(data.draw(st.integers(0, 19))) or self._usual()
        if not can:
            return
        what, name = data.draw(st.sampled_from(can))
        {
            "arrive": lambda: self.arrive(data),
            "finish": lambda: self.finish(name, data.draw(st.sampled_from([0.3, 0.6, 0.9, 1.0]))),
            "tail": lambda: self.post(ev.TailReached(job=name)),
            "wait": self.wait,
            "fail": lambda: self.fail(name),
            "node": lambda: self.node_event(data),
            "change": lambda: self.change(name, data),
            "ask": lambda: self.ask(name),
            "arrived": lambda: self.arrived(name),
            "lose": lambda: self.lose(name),
            "end": lambda: self.end(name),
        }[what]()

    def wait(self) -> None:
        """Until the scheduler wants to look again."""
        self.now = max(self.now, self.scheduler.next_look())
        self.post(ev.TimePassed())
        assert self.scheduler.next_look() > self.now

    def fail(self, name: str) -> None:
        """A node that is in use dies."""
        self.held.discard(name)
        self.tails -= set(self.scheduler.cluster.nodes[name].pins)
        self.post(ev.NodeFailed(node=name))
