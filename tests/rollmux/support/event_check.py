"""An independent checker of event logs: it knows the rules and nothing of the scheduler."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from event_check_nodes import EPSILON, NodeChecker


@dataclass(frozen=True, slots=True)
class Violation:
    """A broken rule, the line of the log (1 is the meta line; 0: the whole log), and what broke."""

    rule: str
    line: int
    t: float
    what: str


@dataclass(slots=True)
class _Job:
    spec: dict[str, Any]
    nodes: set[str] = field(default_factory=set)
    old_nodes: set[str] = field(default_factory=set)
    placed_at: float | None = None
    gone: bool = False
    done: int = 0
    next_phase: str = "rollout"
    permit: dict[str, Any] | None = None
    running: dict[str, Any] | None = None
    started_at: float = 0.0
    took_s: float = 0.0
    """Of the running phase so far, under permits that were lost."""
    stranded: bool = False
    stopped_at: float | None = None
    """Since when its promise counts no time."""
    uncounted_s: float = 0.0
    held: bool = False

    def solo_s(self, count: int) -> float:
        return sum(self.spec["solo_s"][:count])

    @property
    def live(self) -> bool:
        """Whether the log was written while the job ran: it need not be over."""
        return bool(self.spec.get("live"))

    def alone_s(self, event: dict[str, Any]) -> float:
        """What the phase that ends took alone; 0 where the log does not say."""
        if "seconds" in event:
            return float(event["seconds"])
        known = self.spec.get(f"{event['phase']}_s")
        return float(known[min(self.done, len(known) - 1)]) if known else 0.0


class Checker:
    """Feed it the meta line, then events in order; ``finish`` gives the verdict."""

    def __init__(self, meta: dict[str, Any]) -> None:
        self._jobs = {spec["id"]: _Job(spec) for spec in meta["jobs"]}
        self._nodes = NodeChecker(meta, self._bad)
        self._busy: dict[str, str] = {}
        self._epochs: dict[int, int] = {}
        self._tokens: set[int] = set()
        self._line = 1
        self._now = 0.0
        self.violations: list[Violation] = []

    def feed(self, line: int, event: dict[str, Any]) -> None:
        """One event."""
        self._line = line
        t = float(event["t"])
        if t < self._now - EPSILON:
            self._bad("time", f"{t} comes after {self._now}")
        self._now = max(t, self._now)
        name = event.get("job")
        if name is not None and name not in self._jobs:
            self._bad("unknown_job", f"{name} is not in the meta line")
            return
        kind = event["kind"]
        if kind in _OF_JOBS:
            _OF_JOBS[kind](self, self._jobs[event["job"]], event)
        elif kind in _OF_NODES:
            _OF_NODES[kind](self, event)
        else:
            self._bad("unknown_kind", f"{kind!r}")

    def finish(self) -> list[Violation]:
        """What is left over at the end."""
        self._line = 0
        for name, job in self._jobs.items():
            if job.placed_at is None and not job.live and not job.gone:
                self._bad("lost_job", f"{name} was never placed")
            elif job.placed_at is not None and not job.gone and not job.live:
                self._bad("lost_job", f"{name} never departed, {job.done} iterations done")
        for node, pins in self._nodes.pins.items():
            left = sorted(name for name in pins if not self._jobs[name].live)
            if left:
                self._bad("leaked_node", f"{node} still holds {', '.join(left)}")
        return self.violations

    def _bad(self, rule: str, what: str) -> None:
        self.violations.append(Violation(rule, self._line, self._now, what))

    def _place(self, job: _Job, event: dict[str, Any]) -> None:
        if job.placed_at is not None:
            self._bad("double_placement", f"{event['job']} was placed before")
        job.placed_at = self._now
        if job.spec.get("slo_since", "admission") == "admission":
            job.uncounted_s += self._now - float(job.spec["arrival_s"])
        self._take(job, event)

    def _team(self, name: str) -> str:
        return str(self._jobs[name].spec.get("team", ""))

    def _wait(self, job: _Job, event: dict[str, Any]) -> None:
        if job.placed_at is not None and not job.stranded:
            self._bad("lost_nodes", f"{event['job']} waits though no node of it failed")
        if job.placed_at is not None:
            self._abandon(event["job"], job)

    def _suspend(self, job: _Job, event: dict[str, Any]) -> None:
        name = event["job"]
        if job.running is not None or job.permit is not None or job.next_phase != "rollout":
            self._bad("move_mid_iteration", f"{name} is suspended inside an iteration")
        if not job.held and not self._nodes.borrows(job.spec.get("team", ""), self._team):
            self._bad("reclaim", f"{name} loses nodes that are its team's own")
        self._nodes.unpin(name, job.nodes | job.old_nodes)
        job.nodes, job.old_nodes = set(), set()
        job.stopped_at = self._now

    def _change(self, job: _Job, event: dict[str, Any]) -> None:
        if event["held"] is not None:
            job.held = event["held"]
            self._stop_or_go_on(job)

    def _stop_or_go_on(self, job: _Job) -> None:
        """The clock of a job whose node failed stands still while it is held."""
        if job.stranded and job.held and job.stopped_at is None:
            job.stopped_at = self._now
        elif job.stranded and not job.held and job.stopped_at is not None:
            job.uncounted_s += self._now - job.stopped_at
            job.stopped_at = None

    def _take(self, job: _Job, event: dict[str, Any]) -> None:
        if job.held:
            self._bad("held", f"{event['job']} gets nodes")
        self._nodes.pin(event["job"], job.spec, event, job.nodes)
        job.nodes = set(event["nodes"])

    def _move(self, job: _Job, event: dict[str, Any]) -> None:
        name = event["job"]
        if job.placed_at is None or job.gone:
            self._bad("lost_job", f"{name} moves but is not there")
        if job.stranded:
            self._abandon(name, job)
        elif job.running is not None or job.permit is not None or job.next_phase != "rollout":
            self._bad("move_mid_iteration", f"{name} moves inside an iteration")
        if job.stopped_at is not None:
            job.uncounted_s += self._now - job.stopped_at
            job.stopped_at = None
        job.old_nodes |= job.nodes
        job.stranded = False
        self._take(job, event)

    def _abandon(self, name: str, job: _Job) -> None:
        """A node died: the iteration is lost."""
        self._free(name)
        job.running = job.permit = None
        job.took_s = 0.0
        job.next_phase = "rollout"
        self._nodes.unpin(name, job.nodes | job.old_nodes)
        job.nodes = set()
        job.old_nodes = set()

    def _permit(self, job: _Job, event: dict[str, Any]) -> None:
        name, phase = event["job"], event["phase"]
        if job.permit is not None or job.running is not None:
            self._bad("double_permit", f"{name} holds a permit already")
        job.permit = event
        token = event.get("token")
        if token is not None:
            if token in self._tokens:
                self._bad("token", f"token {token} was given out before")
            self._tokens.add(token)
        if phase != job.next_phase:
            self._bad("alternation", f"{name} may {phase}, its next is {job.next_phase}")
        group, epoch = event["group"], event["epoch"]
        if epoch < self._epochs.get(group, epoch):
            self._bad("epoch", f"group {group} is past epoch {epoch}")
        self._epochs[group] = max(epoch, self._epochs.get(group, epoch))

    def _start(self, job: _Job, event: dict[str, Any]) -> None:
        name, phase, nodes = event["job"], event["phase"], set(event["nodes"])
        if job.running is not None:
            self._bad("double_start", f"{name} runs already")
        job.running, job.started_at = event, self._now
        for node in nodes:
            if node in self._nodes.dead:
                self._bad("dead_node", f"{name} starts on {node}, which is down")
        if not nodes <= job.nodes:
            self._bad("residency", f"{name} starts where it has no memory")
        if phase == "sync":
            return
        if job.permit is None or job.permit["phase"] != phase:
            self._bad("no_permit", f"{name} starts its {phase} without a permit")
        elif set(job.permit["nodes"]) != nodes:
            self._bad("no_permit", f"{name} starts on other nodes than permitted")
        for node in nodes:
            other = self._busy.get(node)
            if other is not None:
                self._bad("exclusive", f"{name} starts on {node}, where {other} runs")
            self._busy[node] = name

    def _tail_release(self, job: _Job, event: dict[str, Any]) -> None:
        if job.running is None or job.running["phase"] != "rollout":
            self._bad("tail", f"{event['job']} releases a tail but runs no rollout")
        self._free(event["job"])

    def _free(self, name: str) -> None:
        for node in [node for node, owner in self._busy.items() if owner == name]:
            del self._busy[node]

    def _end(self, job: _Job, event: dict[str, Any]) -> None:
        name, phase = event["job"], event["phase"]
        if job.running is None or job.running["phase"] != phase:
            self._bad("no_start", f"{name} ends a {phase} that did not start")
            return
        job.running = None
        if phase == "sync":
            self._nodes.unpin(name, job.old_nodes - job.nodes)
            job.old_nodes = set()
            return
        self._free(name)
        job.permit = None
        job.took_s += self._now - job.started_at
        if event.get("lost"):
            return
        # A phase whose permit was lost may go on under the next one.
        took, alone, job.took_s = job.took_s, job.alone_s(event), 0.0
        # Clocks of two machines drift apart.
        if took < alone * (1.0 - 1e-4) - 1e-3:
            self._bad("too_fast", f"{name}: {took:.3f} s for {alone:.3f} s alone")
        if phase == "train":
            job.done += 1
        job.next_phase = "rollout" if phase == "train" else "train"

    def _depart(self, job: _Job, event: dict[str, Any]) -> None:
        name, spec = event["job"], job.spec
        # It may be cancelled while it waits for its first nodes.
        placed = job.placed_at is not None or event.get("cancelled")
        if job.gone or not placed:
            self._bad("lost_job", f"{name} departs but is not there")
            return
        job.gone = True
        self._nodes.unpin(name, job.nodes | job.old_nodes)
        if event.get("cancelled"):
            return
        wanted = spec["iterations"]
        if wanted is not None and (job.done != wanted or job.running is not None):
            self._bad("iterations", f"{name} departs after {job.done} of {wanted}")
        elapsed = self._now - float(spec["arrival_s"]) - job.uncounted_s
        allowed = float(spec["slo"]) * job.solo_s(job.done)
        if elapsed > allowed * (1.0 + 1e-9) + EPSILON:
            self._bad("slo", f"{name} took {elapsed:.1f} s, allowed {allowed:.1f} s")

    def _node_down(self, event: dict[str, Any]) -> None:
        for node in event["nodes"]:
            self._nodes.dead.add(node)
            for name in self._nodes.pins.pop(node, {}):
                self._jobs[name].stranded = True
                # Of what it has on other nodes nothing is of use any more.
                self._abandon(name, self._jobs[name])
                self._stop_or_go_on(self._jobs[name])

    def _rebase(self, event: dict[str, Any]) -> None:
        group, epoch = event["group"], event["epoch"]
        if epoch <= self._epochs.get(group, -1):
            self._bad("epoch", f"group {group} goes from epoch {self._epochs[group]} to {epoch}")
        self._epochs[group] = epoch


_OF_JOBS: dict[str, Callable[[Checker, _Job, dict[str, Any]], None]] = {
    "place": Checker._place,
    "move": Checker._move,
    "evict": Checker._move,
    "permit": Checker._permit,
    "start": Checker._start,
    "tail_release": Checker._tail_release,
    "end": Checker._end,
    "wait": Checker._wait,
    "suspend": Checker._suspend,
    "change": Checker._change,
    "depart": Checker._depart,
}
_OF_NODES: dict[str, Callable[[Checker, dict[str, Any]], None]] = {
    "node_down": Checker._node_down,
    "node_up": lambda checker, event: checker._nodes.up(event),
    "node_closed": lambda checker, event: checker._nodes.closed(event),
    "node_opened": lambda checker, event: checker._nodes.opened(event),
    "node_removed": lambda checker, event: checker._nodes.removed(event),
    "rebase": Checker._rebase,
}


def check_lines(lines: Iterable[str], name: str = "log") -> list[Violation]:
    """Check a log given as lines. Raises ``ValueError`` where it is not one."""
    checker: Checker | None = None
    for number, line in enumerate(lines, start=1):
        try:
            event = json.loads(line)
            if checker is None:
                if event["kind"] != "meta":
                    raise ValueError("expected the meta line first")
                checker = Checker(event)
            else:
                checker.feed(number, event)
        except (KeyError, TypeError, ValueError) as error:
            what = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise ValueError(f"{name}, line {number}: {what}") from error
    if checker is None:
        raise ValueError(f"{name}: empty, no meta line")
    return checker.finish()


def check_file(path: Path) -> list[Violation]:
    """Check an event log. Raises ``ValueError`` where it is not one."""
    with path.open(encoding="utf-8") as file:
        return check_lines(file, str(path))
