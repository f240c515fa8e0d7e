"""Faults by kind against a daemon in virtual time, and the promises that are held against it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from mux_chaos_node import ITERATIONS, Node, Program, Wire
from mux_world import SHARED, TTL, World

from rollpacker.rollmux.model.inventory import Machine
from rollpacker.rollmux.model.settings import Team
from rollpacker.rollmux.service.commands import commands
from rollpacker.rollmux.service.state.state_record import encode, state_of

SETTINGS = replace(
    SHARED,
    cold_s=6.0,
    nodes="named",
    teams=(Team(name="math", rollout=2, train=2), Team(name="code")),
)
NODES = 4
"""Of either pool."""
STEP_S = 0.5
PATIENCE_S = 4 * TTL + 60.0
"""In which a job with nodes and a willing program gets a permit: a lease that runs out, the longest
pause before a restart as far as it is used here, and the phases of a group's other members."""


NUMBERS = {"issued", "scheduler.token"}
"""Pieces of the state with the number of the next permit: every start has an epoch of its own."""


class HastyWorld(World):
    """Nobody pulls the plug of a machine here: no commit has to wait for the disk."""

    def open(self) -> None:
        super().open()
        self.store._db.execute("PRAGMA synchronous=OFF")


class Chaos:
    """A daemon with agents, jobs that come and go, and a fault every few seconds.

    Args:
        every_s: between two faults, on average.
        share: of requests that are repeated; as many answers are lost, as many come late.
    """

    def __init__(
        self, folder: Path, seed: int, *, every_s: float = 4.0, share: float = 0.04
    ) -> None:
        self.rng = random.Random(seed)
        self.faults: Counter[str] = Counter()
        names = [(f"{pool}-{n}", pool) for pool in ("rollout", "train") for n in range(NODES)]
        machines = [Machine(name=name, pool=pool, memory_gb=1536.0) for name, pool in names]
        self.world = HastyWorld(folder, SETTINGS, machines)
        self.world.machines = ()  # what was removed is not to come back
        self.wire = Wire(self.world, self.rng, self.faults, share)
        self.wire.restart = self.restart
        self.nodes = {name: Node(self.wire, name, pool) for name, pool in names}
        self.every_s = every_s
        self.jobs: list[str] = []
        self.cancelled: set[str] = set()
        self.numbers: dict[str, int] = {}
        self.waiting: dict[str, float] = {}
        self.longest_s = 0.0
        self.histories: dict[tuple[str, int], list[tuple[str, int]]] = {}

    @property
    def leased(self) -> Any:
        return self.world.core.leased

    def restart(self, down_s: float) -> None:
        before = encode(state_of(self.leased))
        self.world.restart(down_s)
        after = encode(state_of(self.leased))
        assert {n for n in before | after if before.get(n) != after.get(n)} <= NUMBERS
        self.waiting.clear()  # every lease has its full time again

    def run(self, seconds: float, faults: bool = True) -> None:
        end = self.world.time + seconds
        while self.world.time < end:
            self.step(faults)

    def step(self, faults: bool) -> None:
        self.world.wait(STEP_S)
        if faults and self.rng.random() < STEP_S / self.every_s:
            name = self.rng.choice(list(FAULTS))
            if FAULTS[name](self):
                self.faults[name] += 1
        if (
            faults
            and self.rng.random() < STEP_S / 15.0
            and len(self.leased.scheduler.cluster.jobs) < 12
        ):
            self.submit()
        for node in self.rng.sample(list(self.nodes.values()), len(self.nodes)):
            node.step()
        self.wire.deliver()
        self.look()

    def submit(self) -> None:
        name = f"job-{len(self.jobs)}"
        spec = {"id": name, "worst_rollout_s": 20.0, "worst_train_s": 20.0}
        spec |= {"slo": self.rng.choice([4.0, 20.0]), "team": self.rng.choice(["math", "code", ""])}
        spec |= {
            "rollout_nodes": self.rng.choice([1, 1, 2]),
            "iterations": self.rng.randint(*ITERATIONS),
        }
        restarts = self.rng.choice([1, 3, 50])
        spec["program"] = {"command": ["train"], "restarts": restarts, "stop_s": 3.0}
        status, told = self.wire.post(commands.submit, None, spec)
        assert status == 201, told
        self.jobs.append(name)

    def programs(self) -> list[Program]:
        return [program for node in self.nodes.values() for program in node.live()]

    def look(self) -> None:
        """What has to hold at any time."""
        self._nodes_are_held_once()
        self._attempts_are_single()
        self._nobody_waits_for_ever()
        for node in self.nodes.values():
            for key, program in node.programs.items():
                self.histories[key] = program.history

    def _nodes_are_held_once(self) -> None:
        held: dict[str, int] = {}
        for program in self.programs():
            mine = program.holding
            if mine is None or mine.until <= self.world.time:
                continue
            lease = self.leased.leases.get(mine.token)
            assert lease is not None, (program, "works after its permit is over")
            for node in () if lease.tail else mine.nodes:
                assert node not in held, (node, held[node], mine.token)
                held[node] = mine.token

    def _attempts_are_single(self) -> None:
        going = [p for n in self.nodes.values() if not n.frozen for p in n.live()]
        assert not [job for job, many in Counter(p.job for p in going).items() if many > 1]
        for job in self.leased.jobs:
            attempts = self.leased.jobs[job].program.attempts
            numbers = [each.number for each in attempts]
            assert (
                numbers == list(range(numbers[0], numbers[0] + len(numbers))) if numbers else True
            )
            assert all(each.ended is not None for each in attempts[:-1])
            assert all(a.ended <= b.began for a, b in pairwise(attempts))
            last = numbers[-1] if numbers else 0
            assert last >= self.numbers.get(job, 0)
            self.numbers[job] = last

    def _nobody_waits_for_ever(self) -> None:
        now, willing = self.world.time, {}
        for job in self.leased.scheduler.cluster.jobs:
            record, node = self.leased.jobs[job], self.leased.lead(job)
            if node is None or record.token is not None or self.disturbed(job):
                continue
            willing[job] = self.waiting.get(job, now)
            waited = now - willing[job]
            self.longest_s = max(self.longest_s, waited)
            assert waited < PATIENCE_S, (job, self.leased.state(job), record, self.world.time)
        self.waiting = willing

    def disturbed(self, job: str) -> bool:
        """Whether a fault of this moment keeps it, or another one of its group, from working; or
        one of these has the nodes for itself until its promise is safe."""
        cluster, now = self.leased.scheduler.cluster, self.world.time
        homes = [cluster.jobs[job].home, cluster.jobs[job].destination]
        seats = [s for home in homes if home is not None for s in cluster.groups[home.group].seats]
        if any(seat.alone and seat.job != job for seat in seats):
            return True
        members = {seat.job for seat in seats} | {job}
        leads = [self.leased.lead(member) for member in members]
        nodes = [self.nodes[lead] for lead in leads if lead is not None]
        if None in leads or any(node.back_at > now or node.frozen for node in nodes):
            return True
        return any(p.stopped_until > now for p in self.programs() if p.job in members)

    def settle(self) -> None:
        """No more faults: every job comes to its end in bounded time."""
        self.wire.share = 0.0
        for node in list(self.nodes.values()):
            node.back_at = 0.0
        for name in self.leased.slots:
            if self.leased.slots[name].status != "down":
                self.world.post(commands.node_opened, name)
        for name in list(self.leased.scheduler.cluster.jobs):
            if not self.leased.jobs[name].ending:
                self.world.post(commands.change, name, {"held": False})
        deadline = self.world.time + 3600.0
        while self.leased.scheduler.cluster.jobs or self.leased.programs.jobs:
            self.step(False)
            down = [n for n, s in self.leased.slots.items() if s.status == "set_aside"]
            for name in down:
                self.world.post(commands.node_opened, name)
            assert self.world.time < deadline, self.leased.scheduler.cluster.jobs.keys()


def _any_program(chaos: Chaos) -> Program | None:
    found = [program for program in chaos.programs() if program.ends_at is None]
    return chaos.rng.choice(found) if found else None


def _any_node(chaos: Chaos) -> Node:
    return chaos.rng.choice(list(chaos.nodes.values()))


def _kill_daemon(chaos: Chaos) -> bool:
    chaos.restart(0.0)
    return True


def _daemon_away(chaos: Chaos) -> bool:
    chaos.restart(chaos.rng.uniform(1.0, 3 * TTL))
    return True


def _agent_silent(chaos: Chaos) -> bool:
    _any_node(chaos).silent(chaos.rng.uniform(TTL, 3 * TTL))
    return True


def _agent_restarted(chaos: Chaos) -> bool:
    node = _any_node(chaos)
    node.joined = False
    node.silent(chaos.rng.uniform(0.5, 4.0))
    return True


def _machine_crashes(chaos: Chaos) -> bool:
    _any_node(chaos).crash(chaos.rng.uniform(1.0, 2 * TTL))
    return True


def _node_failed(chaos: Chaos) -> bool:
    _any_node(chaos).fail()
    return True


def _closed(status: str) -> Callable[[Chaos], bool]:
    def close(chaos: Chaos) -> bool:
        name = _any_node(chaos).name
        closed = sum(slot.status != "open" for slot in chaos.leased.slots.values())
        if name not in chaos.leased.slots or closed > len(chaos.nodes) // 4:
            return False
        body = {"status": status, "reason": "chaos"}
        return chaos.wire.post(commands.node_closed, name, body)[0] == 200

    return close


def _opened(chaos: Chaos) -> bool:
    closed = [n for n, s in chaos.leased.slots.items() if s.status not in ("open", "down")]
    for name in closed:
        chaos.wire.post(commands.node_opened, name)
    return bool(closed)


def _removed(chaos: Chaos) -> bool:
    """Drained nodes that are empty leave; their agents bring them back."""
    for name, slot in list(chaos.leased.slots.items()):
        if slot.status in ("draining", "cordoned") and not slot.used:
            status, _ = chaos.wire.post(commands.node_removed, name)
            return status == 200
    return False


def _error(chaos: Chaos) -> bool:
    program = _any_program(chaos)
    if program is not None:
        program.code = chaos.rng.choice([1, 3])
    return program is not None


def _killed(chaos: Chaos) -> bool:
    program = _any_program(chaos)
    if program is not None:
        program.code = 137
    return program is not None


def _stopped(chaos: Chaos) -> bool:
    holders = [p for p in chaos.programs() if p.holding is not None]
    if holders:
        program = chaos.rng.choice(holders)
        program.stopped_until = chaos.world.time + chaos.rng.uniform(1.0, 3 * TTL)
    return bool(holders)


def _ended(chaos: Chaos) -> bool:
    live = list(chaos.leased.scheduler.cluster.jobs)
    if not live or chaos.rng.random() < 0.6:
        return False
    name = chaos.rng.choice(live)
    chaos.cancelled.add(name)
    status, told = chaos.wire.post(commands.end, name, {})
    assert status in (200, 202), told
    return True


def _held(chaos: Chaos) -> bool:
    """Half of the time it lets a job go that is held already."""
    live = chaos.leased.scheduler.cluster.jobs
    held = [name for name, job in live.items() if job.held]
    hold = not held or chaos.rng.random() < 0.5
    name = chaos.rng.choice(list(live) if hold else held) if live else None
    if name is None or chaos.leased.jobs[name].ending:
        return False
    return chaos.wire.post(commands.change, name, {"held": hold})[0] == 200


FAULTS: dict[str, Callable[[Chaos], bool]] = {
    "daemon killed": _kill_daemon,
    "daemon away": _daemon_away,
    "agent silent": _agent_silent,
    "agent restarted": _agent_restarted,
    "machine lost": _machine_crashes,
    "node failed": _node_failed,
    "node cordoned": _closed("cordoned"),
    "node drained": _closed("draining"),
    "nodes opened": _opened,
    "node removed": _removed,
    "program fails": _error,
    "program killed": _killed,
    "program stopped": _stopped,
    "job ended": _ended,
    "job held or released": _held,
}
