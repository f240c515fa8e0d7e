"""The event log of a cluster: one JSON object a line, from the simulation and the daemon."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import IO, Any

from rollpacker.core.codec import plain
from rollpacker.rollmux.model import decisions as do
from rollpacker.rollmux.model import events as ev
from rollpacker.rollmux.model.inventory import Machine
from rollpacker.rollmux.model.settings import Settings
from rollpacker.rollmux.record.trace import TraceJob

Line = dict[str, Any]


def head(settings: Settings, jobs: Sequence[Line], machines: Iterable[Machine] = ()) -> Line:
    """The first line: caps, prices, teams, nodes at the start, and each job's request and
    durations."""
    return {
        "kind": "meta",
        "memory_cap_gb": settings.memory_cap_gb,
        "prices": {"rollout": settings.prices.rollout, "train": settings.prices.train},
        "teams": plain(settings.teams),
        "nodes": settings.nodes,
        "machines": plain(list(machines)),
        "jobs": list(jobs),
    }


def line(now: float, kind: str, job: str | None, **more: Any) -> Line:
    """One event."""
    return {"t": now, "kind": kind, "job": job} | more


def lines_of(now: float, what: object) -> list[Line]:
    """Log lines for a decision, a node event, or a change of a job."""
    if isinstance(what, ev.JobChanged):
        return [line(now, "change", what.job, held=what.held, priority=what.priority)]
    return _of_node(now, what) or _of_decision(now, what)


def _of_node(now: float, event: object) -> list[Line]:
    match event:
        case ev.NodeFailed():
            return [line(now, "node_down", None, nodes=[event.node])]
        case ev.NodeJoined():
            return [line(now, "node_up", None, machine=plain(event.machine))]
        case ev.NodeClosed():
            more = {"status": event.status, "why": event.why}
            return [line(now, "node_closed", None, nodes=[event.node], **more)]
        case ev.NodeOpened():
            return [line(now, "node_opened", None, nodes=[event.node])]
        case ev.NodeRemoved():
            return [line(now, "node_removed", None, nodes=[event.node])]
        case _:
            return []


def _of_decision(now: float, made: object) -> list[Line]:
    match made:
        case do.Place():
            return [line(now, "place", made.job, **_home(made))]
        case do.Move():
            kind = "evict" if made.reason == "guard" else "move"
            home = _home(made)
            return [
                line(now, kind, made.job, **home, reason=made.reason),
                line(now, "start", made.job, phase="sync", nodes=home["nodes"]),
            ]
        case do.Permit():
            names = ("phase", "group", "epoch", "position", "token")
            more = {name: getattr(made, name) for name in names} | {"nodes": list(made.nodes)}
            return [line(now, kind, made.job, **more) for kind in ("permit", "start")]
        case do.ReleaseTail():
            nodes = list(made.nodes)
            return [line(now, "tail_release", made.job, phase="rollout", nodes=nodes)]
        case do.Rebase():
            order = list(made.order)
            return [line(now, "rebase", None, group=made.group, epoch=made.epoch, order=order)]
        case do.Wait():
            return [line(now, "wait", made.job)]
        case do.Suspend():
            return [line(now, "suspend", made.job, group=made.group)]
        case do.Depart():
            return [line(now, "depart", made.job, group=made.group)]
        case _:
            return []


def _home(made: do.Place | do.Move) -> Line:
    return {
        "group": made.group,
        "epoch": made.epoch,
        "nodes": [*made.rollout, *made.train],
        "memory_gb": dict(made.memory_gb),
    }


class EventLog:
    """Writes events in order of time. ``file`` None writes nothing."""

    def __init__(self, file: IO[str] | None) -> None:
        self._file = file

    @property
    def wanted(self) -> bool:
        return self._file is not None

    def meta(
        self, settings: Settings, jobs: Iterable[TraceJob], machines: Iterable[Machine] = ()
    ) -> None:
        if self._file is not None:
            self._put(head(settings, [_spec(job) for job in jobs], machines))

    def write(self, now: float, kind: str, job: str | None, **more: Any) -> None:
        if self._file is not None:
            self._put(line(now, kind, job, **more))

    def happened(self, now: float, what: ev.Event | do.Decision) -> None:
        if self._file is not None:
            for each in lines_of(now, what):
                self._put(each)

    def _put(self, data: Line) -> None:
        assert self._file is not None
        self._file.write(json.dumps(data) + "\n")


def _spec(job: TraceJob) -> Line:
    data = job.to_json()
    solo = (job.rollout_s + job.train_s).round(6).tolist()
    return data | {"solo_s": solo}
