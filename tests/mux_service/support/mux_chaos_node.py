"""Simulated agents and programs: they speak through the commands that HTTP carries."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from mux_world import TTL, World

from rollpacker.rollmux.service.client.client import SAFE_SHARE
from rollpacker.rollmux.service.commands import commands

STOP_S = 3.0
ITERATIONS = (2, 7)


@dataclass(slots=True)
class Late:
    """A request that arrives again later, out of its order."""

    at: float
    act: Any
    what: Any
    body: dict[str, Any]
    key: str


class Wire:
    """Carries requests to the daemon; some are repeated, some answers are lost, some come late."""

    def __init__(
        self, world: World, rng: random.Random, faults: Counter[str], share: float
    ) -> None:
        self.world = world
        self.rng = rng
        self.faults = faults
        self.share = share
        self.late: list[Late] = []
        self.restart: Any = None

    def post(
        self, act: Any, what: Any, body: dict[str, Any] | None = None, key: str | None = None
    ) -> tuple[int, dict[str, Any]]:
        key, body = key or self.world.key(), body or {}
        fate = self.rng.random() / self.share if self.share else 9.0
        found = self.world.post(act, what, body, key)
        if fate < 1:
            self.faults["repeated request"] += 1
            kept = self.world.store.find(key) is not None and act is not commands.permit
            again = self.world.post(act, what, body, key)
            assert not kept or found[0] >= 300 or again == found, (act, what, found, again)
            found = again
        elif fate < 2:
            self.faults["lost answer"] += 1
            if self.rng.random() < 0.02:
                self.restart(0.0)
            found = self.world.post(act, what, body, key)
        elif fate < 3:
            at = self.world.time + self.rng.uniform(0.5, 3 * TTL)
            self.late.append(Late(at, act, what, body, key))
        return found

    def deliver(self) -> None:
        """What comes late now, in any order; nobody hears the answer."""
        due = [each for each in self.late if each.at <= self.world.time]
        self.late = [each for each in self.late if each.at > self.world.time]
        self.rng.shuffle(due)
        for each in due:
            self.faults["late request"] += 1
            status, _ = self.world.post(each.act, each.what, each.body, each.key)
            assert status < 500


@dataclass(slots=True)
class Holding:
    """A permit as its holder sees it."""

    token: int
    phase: str
    nodes: tuple[str, ...]
    until: float
    begun: float
    done_at: float
    beat_at: float
    tail: bool = False


@dataclass(slots=True)
class Program:
    """One attempt: asks, works, finishes, until its job is done or somebody stops it.

    Args:
        node: where it is.
        code: once it is over.
        stopped_until: somebody has stopped it until then.
        ends_at: when it ends, having been asked to.
    """

    wire: Wire
    job: str
    number: int
    node: str
    code: int | None = None
    stopped_until: float = 0.0
    ends_at: float | None = None
    key: str = ""
    phase: str | None = "rollout"
    holding: Holding | None = None
    history: list[tuple[str, int]] = field(default_factory=list)
    """Phases whose finish was acknowledged, and the iterations done then."""

    @property
    def now(self) -> float:
        return self.wire.world.time

    @property
    def asked(self) -> bool:
        return self.ends_at is not None

    def ask_to_end(self) -> None:
        if self.ends_at is None:
            self.ends_at = self.now + self.wire.rng.uniform(0.0, STOP_S)

    def step(self) -> None:
        """Unless it is over, or stands still."""
        if self.code is not None or self.now < self.stopped_until:
            return
        if self.ends_at is not None and self.now >= self.ends_at:
            self.code = 143
        elif self.holding is not None:
            self._work(self.holding)
        elif self.phase is None:
            self.code = 0
        else:
            self._ask(self.phase)

    def _ask(self, phase: str) -> None:
        self.key = self.key or self.wire.world.key()
        sent = self.now
        status, told = self.wire.post(commands.permit, self.job, {"phase": phase}, self.key)
        if status == 200 and "token" in told:
            self.key = ""
            until = sent + SAFE_SHARE * told["ttl_s"]
            takes = self.wire.rng.uniform(2.0, 8.0)
            nodes = tuple(told["nodes"])
            beat = self.now + TTL / 3
            self.holding = Holding(
                told["token"], told["phase"], nodes, until, sent, self.now + takes, beat
            )
        elif status == 200:
            self.wire.post(commands.moved, self.job, {"move": told["move"]["id"]})
            self.key = self.key if told["move"]["reason"] != "failure" else ""
            self.phase = "rollout" if told["move"]["reason"] == "failure" else phase
        elif status == 409:
            self._refused(phase, told)

    def _refused(self, phase: str, told: dict[str, Any]) -> None:
        code = told["code"]
        assert code in ("over", "order", "complete", "held", "superseded", "ended"), told
        if code == "ended":
            self.code = 5
        elif code != "held":
            self.key = ""
            self.phase = told.get("next", phase)

    def _work(self, mine: Holding) -> None:
        if self.now >= mine.until:
            self._late(mine)
        elif self.now >= mine.done_at:
            self._finish(mine)
        elif self.now >= mine.beat_at:
            self._beat(mine)
        elif mine.phase == "rollout" and not mine.tail and self.wire.rng.random() < 0.1:
            status, told = self.wire.post(commands.tail, self.job, {"token": mine.token})
            mine.tail = status == 200 and told["release_tail"]

    def _beat(self, mine: Holding) -> None:
        sent = self.now
        status, told = self.wire.world.beat(mine.token)
        if status != 200:
            self.holding = None
            return
        mine.until, mine.beat_at = sent + SAFE_SHARE * told["ttl_s"], sent + TTL / 3
        mine.tail = mine.tail or told["release_tail"]

    def _late(self, mine: Holding) -> None:
        """Its lease is over: it says so with its old token, or asks again."""
        self.holding = None
        if self.wire.rng.random() < 0.5:
            self.wire.faults["old token"] += 1
            gone = mine.token not in self.wire.world.core.leased.leases
            status, _ = self.wire.world.beat(mine.token)
            assert not gone or status == 409
            if not gone:
                self.wire.post(commands.abandon, mine.token, {})

    def _finish(self, mine: Holding) -> None:
        body = {"seconds": max(self.now - mine.begun, 0.001)}
        if self.wire.rng.random() < min(0.03, self.wire.share):
            self.wire.post(commands.abandon, mine.token, {})
            self.wire.faults["abandoned phase"] += 1
            self.holding = None
            return
        status, told = self.wire.post(commands.finish, mine.token, body)
        self.holding = None
        if status == 200:
            self.history.append((mine.phase, told["done"]))
            self.phase = told["next"]
        else:
            assert status == 409, told


class Node:
    """An agent and the keepers of what it has started, which live without it too."""

    def __init__(self, wire: Wire, name: str, pool: str) -> None:
        self.wire = wire
        self.name = name
        self.pool = pool
        self.programs: dict[tuple[str, int], Program] = {}
        self.up = True
        self.joined = False
        self.lease_until = 0.0
        self.back_at = 0.0
        self.beat_at = 0.0

    @property
    def now(self) -> float:
        return self.wire.world.time

    @property
    def frozen(self) -> bool:
        """By the keepers: the daemon was not heard for a lease."""
        return self.now >= self.lease_until

    def live(self) -> list[Program]:
        return [each for each in self.programs.values() if each.code is None]

    def silent(self, seconds: float) -> None:
        """Its agent is stopped, dead or cut off for so long."""
        self.back_at = max(self.back_at, self.now + seconds)

    def crash(self, seconds: float) -> None:
        """The machine: nothing is left of what ran."""
        self.programs.clear()
        self.joined = False
        self.lease_until = 0.0
        self.silent(seconds)

    def fail(self) -> None:
        """Its agent sees that it is broken, and says so when nothing runs any more."""
        self.programs.clear()
        self.joined = False
        self.lease_until = 0.0
        self.wire.post(commands.node_failed, self.name, {"reason": "broken"})
        self.silent(2.0)

    def step(self) -> None:
        if self.now >= self.back_at and self.now >= self.beat_at:
            self.beat_at = self.now + 1.0
            self._beat()
        if not self.frozen:
            for program in list(self.programs.values()):
                program.step()

    def _beat(self) -> None:
        if not self.joined:
            body = {"name": self.name, "pool": self.pool, "memory_gb": 1536.0, "devices": 8}
            status, _ = self.wire.post(commands.register, None, body)
            assert status == 200
            self.joined = True
        sent = self.now
        seen = [
            {"job": job, "number": number, "code": program.code, "stopped": program.asked}
            for (job, number), program in self.programs.items()
        ]
        status, told = self.wire.post(commands.node_heartbeat, self.name, {"attempts": seen})
        if status == 410:  # what is here is killed, and the agent starts anew
            self.programs.clear()
            self.joined = False
            self.silent(self.wire.rng.uniform(0.5, 3.0))
        elif status == 404:
            self.programs.clear()
            self.joined = False
        else:
            assert status == 200, told
            self._settle(told["attempts"])
            self.lease_until = sent + SAFE_SHARE * told["ttl_s"]

    def _settle(self, wanted: list[dict[str, Any]]) -> None:
        keep: dict[tuple[str, int], Program] = {}
        for each in wanted:
            name = each["job"], each["number"]
            here = self.programs.get(name)
            if here is None and not each["stop"]:
                here = Program(self.wire, *name, self.name)
            elif here is None:
                here = Program(self.wire, *name, self.name, code=143)
            if each["stop"]:
                here.ask_to_end()
            keep[name] = here
        self.programs = keep
