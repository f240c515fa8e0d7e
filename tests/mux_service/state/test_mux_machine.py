"""Random requests, silences, failures, restarts: nobody shares a node, no answer changes."""

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from mux_world import TTL, World

from rollpacker.rollmux.service.commands import commands

PICK = st.integers(0, 1000)


@dataclass
class Belief:
    """A permit as its holder sees it."""

    job: str
    nodes: tuple[str, ...]
    until: float


class ServiceMachine(RuleBasedStateMachine):
    """Clients that do anything at any time; what they believe is held against each other."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="mux-machine-"))
        self.world = World(self.folder)
        self.jobs: list[str] = []
        self.asked: dict[str, tuple[str, str]] = {}
        self.beliefs: dict[int, Belief] = {}
        self.tokens: list[int] = []
        self.over: set[int] = set()
        self.answers: list[tuple[Any, Any, Any, str, tuple[int, dict[str, Any]]]] = []

    def once(self, act: Any, what: Any, body: Any) -> tuple[int, dict[str, Any]]:
        key = self.world.key()
        found = self.world.post(act, what, body, key)
        if found[0] in (200, 201, 202) and act is not commands.permit:
            self.answers.append((act, what, body, key, found))
        return found

    def job(self, pick: int) -> str:
        return self.jobs[pick % len(self.jobs)]

    @rule(nodes=st.integers(1, 2), slo=st.sampled_from([1.5, 10.0, 1000.0]))
    def submit(self, nodes: int, slo: float) -> None:
        name = f"j{len(self.jobs)}"
        spec = {"id": name, "worst_rollout_s": 8.0, "worst_train_s": 4.0, "slo": slo}
        spec |= {"rollout_nodes": nodes, "iterations": 3}
        assert self.once(commands.submit, None, spec)[0] == 201
        self.jobs.append(name)

    @precondition(lambda self: self.jobs)
    @rule(pick=PICK, phase=st.sampled_from(["rollout", "train"]), again=st.booleans())
    def ask(self, pick: int, phase: str, again: bool) -> None:
        job = self.job(pick)
        if not again or job not in self.asked:
            self.asked[job] = (self.world.key(), phase)
        key, phase = self.asked[job]
        status, told = self.world.ask(job, phase, key)
        if status == 200 and "token" in told:
            self.believe(job, told)
        elif status == 200:
            moved = {"move": told["move"]["id"]}
            assert self.once(commands.moved, job, moved)[0] == 200

    def believe(self, job: str, permit: dict[str, Any]) -> None:
        token, now = permit["token"], self.world.time
        if token not in self.beliefs:
            assert token not in self.over
            for other, belief in self.beliefs.items():
                shared = set(belief.nodes) & set(permit["nodes"])
                assert belief.until <= now or not shared, (other, belief, permit)
            self.tokens.append(token)
        self.beliefs[token] = Belief(job, tuple(permit["nodes"]), now + permit["ttl_s"])

    def forget(self, token: int) -> None:
        self.beliefs.pop(token, None)
        self.over.add(token)

    @precondition(lambda self: self.tokens)
    @rule(pick=PICK, how=st.sampled_from([commands.finish, commands.abandon]))
    def finish(self, pick: int, how: Any) -> None:
        token = self.tokens[-1 - pick % min(len(self.tokens), 4)]
        body = {"seconds": 5.0} if how is commands.finish else {}
        status, _ = self.once(how, token, body)
        assert status in (200, 409)
        assert not (status == 200 and token in self.over)
        belief = self.beliefs.get(token)
        assert status == 409 or (belief is not None and belief.until >= self.world.time)
        self.forget(token)

    @precondition(lambda self: self.tokens)
    @rule(pick=PICK)
    def beat(self, pick: int) -> None:
        token = self.tokens[-1 - pick % min(len(self.tokens), 4)]
        status, told = self.world.beat(token)
        if status == 200:
            assert token not in self.over
            self.beliefs[token].until = self.world.time + told["ttl_s"]
        else:
            self.forget(token)

    @rule(seconds=st.sampled_from([0.5, 3.0, TTL - 0.5, TTL + 0.5]))
    def wait(self, seconds: float) -> None:
        self.world.wait(seconds)

    @rule(down_s=st.sampled_from([0.0, 1.0, 3 * TTL]))
    def restart(self, down_s: float) -> None:
        self.world.restart(down_s)
        # Leases that are not known to be over have their full time again.
        for token in self.beliefs.keys() & self.world.core.leased.leases.keys():
            self.beliefs[token].until = self.world.time + TTL

    @precondition(lambda self: self.jobs)
    @rule(pick=PICK)
    def end(self, pick: int) -> None:
        assert self.once(commands.end, self.job(pick), {})[0] in (200, 202)

    @precondition(lambda self: self.jobs)
    @rule(pick=PICK, held=st.booleans())
    def hold(self, pick: int, held: bool) -> None:
        job = self.job(pick)
        status, told = self.once(commands.change, job, {"held": held})
        ended = self.world.core.leased.state(job) in ("ending", "ended")
        assert status == (409 if ended else 200)
        assert ended or told["held"] == held

    @rule(pick=PICK)
    def fail_node(self, pick: int) -> None:
        nodes = sorted(self.world.core.leased.scheduler.cluster.nodes)
        if nodes:
            status, _ = self.once(commands.node_failed, nodes[pick % len(nodes)], {})
            assert status in (200, 202)

    @precondition(lambda self: self.answers)
    @rule(pick=PICK)
    def repeat(self, pick: int) -> None:
        """The same request with the same key, whenever: the same answer, and nothing happens."""
        act, what, body, key, found = self.answers[pick % len(self.answers)]
        if self.world.store.find(key) is None:
            return  # it found that there was nothing to do
        self.world.wait(0.0)
        before = self.world.core.leased.seq
        assert self.world.post(act, what, body, key) == found
        assert self.world.core.leased.seq == before

    @invariant()
    def no_job_is_lost(self) -> None:
        leased = self.world.core.leased
        assert list(leased.jobs) == self.jobs
        live = {name for name, record in leased.jobs.items() if record.ended is None}
        assert live == set(leased.scheduler.cluster.jobs)

    def teardown(self) -> None:
        self.world.store.close()
        shutil.rmtree(self.folder)


TestService = ServiceMachine.TestCase
TestService.settings = settings(
    max_examples=settings().max_examples // 4,
    stateful_step_count=40,
    suppress_health_check=list(HealthCheck),
)
