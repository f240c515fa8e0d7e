"""The whole state of a scheduler as JSON, and back: it goes on with the same decisions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollpacker.rollmux.cluster import Cluster, Group, Home, Job, Node
from rollpacker.rollmux.jobs import JobSpec
from rollpacker.rollmux.seat import Seat, State

_JOB = (
    "started",
    "done",
    "solo_s",
    "rollout_s",
    "going",
    "asked",
    "token",
    "tail_reached",
    "looked_at",
)
_SEAT = (
    "r",
    "t",
    "target",
    "anchor",
    "solo",
    "busy",
    "position",
    "expected_end",
    "late_at",
)


def cluster_to_json(cluster: Cluster) -> dict[str, Any]:
    """Jobs, groups, nodes and pins."""
    return {
        "numbers": list(cluster.numbers),
        "nodes": [
            [node.name, node.pool, node.group, node.held, list(node.pins.items())]
            for node in cluster.nodes.values()
        ],
        "groups": [_group_to_json(group) for group in cluster.groups.values()],
        "jobs": [_job_to_json(cluster, job) for job in cluster.jobs.values()],
    }


def load_cluster(cluster: Cluster, state: Mapping[str, Any]) -> None:
    """Restore ``cluster_to_json`` into an empty cluster."""
    cluster.numbers[:] = state["numbers"]
    for name, pool, group, held, pins in state["nodes"]:
        cluster.nodes[name] = Node(name, pool, group, held, dict(pins))
    for data in state["groups"]:
        group = _group(data)
        cluster.groups[group.id] = group
        cluster.changed.add(group.id)
    for data in state["jobs"]:
        job = _job(data)
        cluster.jobs[job.spec.id] = job
        job.seat = _seat_of(cluster, job.home, data["seat"])
        job.next_seat = _seat_of(cluster, job.destination, data["next_seat"])


def _seat_of(cluster: Cluster, home: Home | None, index: int) -> Seat | None:
    return None if home is None or index < 0 else cluster.groups[home.group].seats[index]


def _group_to_json(group: Group) -> dict[str, Any]:
    return {
        "id": group.id,
        "epoch": group.epoch,
        "nodes": [list(names) for names in group.nodes],
        "bits": list(group.bits.items()),
        "last": [list(turn) for turn in group.last],
        "seats": [
            {
                "job": seat.job,
                "masks": list(seat.masks),
                "stretch": list(seat.stretch),
                "rounds": list(seat.rounds),
                "state": seat.state.name,
            }
            | {name: getattr(seat, name) for name in _SEAT}
            for seat in group.seats
        ],
    }


def _group(data: Mapping[str, Any]) -> Group:
    group = Group(data["id"])
    group.epoch = data["epoch"]
    group.nodes = (list(data["nodes"][0]), list(data["nodes"][1]))
    group.bits = dict(data["bits"])
    group.last = [(turn[0], turn[1]) for turn in data["last"]]
    for each in data["seats"]:
        masks, stretch = each["masks"], each["stretch"]
        seat = Seat(
            each["job"],
            (masks[0], masks[1]),
            each["r"],
            each["t"],
            stretch=(stretch[0], stretch[1]),
        )
        seat.rounds, seat.state = list(each["rounds"]), State[each["state"]]
        for name in _SEAT:
            setattr(seat, name, each[name])
        group.seats.append(seat)
    return group


def _index(cluster: Cluster, home: Home | None, seat: Seat | None) -> int:
    if home is None or seat is None:
        return -1
    return next(n for n, each in enumerate(cluster.groups[home.group].seats) if each is seat)


def _job_to_json(cluster: Cluster, job: Job) -> dict[str, Any]:
    return {name: getattr(job, name) for name in _JOB} | {
        "spec": job.spec.to_json(),
        "ring": [list(pair) for pair in job.observed.ring],
        "count": job.observed.count,
        "home": _home_to_json(job.home),
        "destination": _home_to_json(job.destination),
        "seat": _index(cluster, job.home, job.seat),
        "next_seat": _index(cluster, job.destination, job.next_seat),
    }


def _home_to_json(home: Home | None) -> dict[str, Any] | None:
    return None if home is None else {"group": home.group, "nodes": [list(n) for n in home.nodes]}


def _home(data: Mapping[str, Any] | None) -> Home | None:
    if data is None:
        return None
    return Home(data["group"], (tuple(data["nodes"][0]), tuple(data["nodes"][1])))


def _job(data: Mapping[str, Any]) -> Job:
    job = Job(JobSpec.from_json(data["spec"]), data["started"])
    for name in _JOB:
        setattr(job, name, data[name])
    for rollout_s, train_s in data["ring"]:
        job.observed.add(rollout_s, train_s)
    job.observed.count = data["count"]
    job.home, job.destination = _home(data["home"]), _home(data["destination"])
    return job
