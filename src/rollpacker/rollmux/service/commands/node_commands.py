"""What agents and owners of nodes ask for, as ``commands`` does for jobs."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from msgspec.structs import replace

from rollpacker.core.codec import dumps, loads, plain
from rollpacker.rollmux.model import events as ev
from rollpacker.rollmux.model.inventory import Machine, Slot
from rollpacker.rollmux.service.api import answers, bodies
from rollpacker.rollmux.service.api.bodies import Post
from rollpacker.rollmux.service.api.roles import Refused
from rollpacker.rollmux.service.commands.commands import recorded, the_end
from rollpacker.rollmux.service.commands.writer import Answer, Outcome
from rollpacker.rollmux.service.state import daemon_events
from rollpacker.rollmux.service.state.records import JobRecord
from rollpacker.rollmux.service.state.transaction_log import TransactionLog

_log = logging.getLogger(__name__)
_ROUNDED = 0.97
"""A node may report so much of what the inventory says: firmware and kernel take some."""


def register(core: TransactionLog, request: Post, body: bodies.NewNode) -> Outcome:
    """A named node's agent says what the node is.

    One that has less than the inventory says, or failed three times within an hour, is set aside.
    """
    told = {name: getattr(body, name) for name in Machine.__dataclass_fields__}
    machine = Machine(**told)
    if core.settings.nodes != "named":
        raise Refused(
            409, "this cluster's nodes are a cloud's: serve with --inventory", code="cloud"
        )
    _only_agent(core, machine.name, body.agent)
    slot = core.leased.slots.get(machine.name)
    if slot is None or slot.status == "down":
        core.record(ev.NodeJoined(machine=machine if slot is None else slot.machine))
        slot = core.leased.slots[machine.name]
    if (lacks := _lacks(slot.machine, machine)) and slot.status == "open":
        core.record(ev.NodeClosed(node=machine.name, status="set_aside", why=lacks))
    answer = answers.Registered(status=core.leased.status(machine.name), ttl_s=core.ttl)
    note = daemon_events.AgentJoined(node=machine.name, agent=body.agent)
    return recorded(core, request, note, lambda: answer)


def _only_agent(core: TransactionLog, node: str, agent: str) -> None:
    """Raises ``Refused`` where another one is heard: both would start the same programs."""
    if (known := core.leased.agent(node)) in (None, "", agent):
        return
    ago = core.now() - core.leased.agents[node]
    text = (
        f"node {node[:64]}: another agent reports it, last {ago:.1f} s ago: stop one of them, or "
        "give it a --node of its own"
    )
    _log.warning("%s; agent %.8s was refused, %.8s is heard", text, agent or "(none)", known)
    raise Refused(409, text, code="taken")


def _lacks(listed: Machine, reported: Machine) -> str:
    """What a node has less of than the inventory says."""
    if reported.pool != listed.pool:
        return f"its agent says that it is a {reported.pool} node"
    found = [
        f"{getattr(reported, name):g} {what}, not {getattr(listed, name):g}"
        for name, what in (("memory_gb", "GB of memory"), ("devices", "devices"))
        if getattr(reported, name) < _ROUNDED * getattr(listed, name)
    ]
    return f"its agent reports {' and '.join(found)}" if found else ""


def node_closed(core: TransactionLog, request: Post, node: str, body: bodies.Closed) -> Outcome:
    """Nothing new comes to the node.

    Jobs on a draining one get others between two iterations, as soon as there are some.
    """
    _named(core, node)
    event = ev.NodeClosed(node=node, status=body.status, why=body.reason)
    return recorded(core, request, event, lambda: _on(core, node))


def node_opened(core: TransactionLog, request: Post, node: str) -> Outcome:
    """The node is used again."""
    if _named(core, node).status == "down":
        raise Refused(409, f"node {node} is down: its agent has to report it", code="failed")
    return recorded(core, request, ev.NodeOpened(node=node), lambda: _on(core, node))


def node_removed(core: TransactionLog, request: Post, node: str) -> Outcome:
    """The node leaves the inventory."""
    if _named(core, node).used:
        raise Refused(409, f"node {node}: jobs are on it; drain it first", code="used")
    if jobs := core.leased.programs.on(node):
        text = f"node {node}: the program of job {jobs[0]} is about to end there"
        raise Refused(409, text, code="used")
    told = answers.NodeRemovedAnswer(node=node)
    return recorded(core, request, ev.NodeRemoved(node=node), lambda: told)


def _on(core: TransactionLog, node: str) -> answers.NodeChanged:
    held = core.leased.scheduler.cluster.nodes.get(node)
    jobs = [] if held is None else sorted(held.pins)
    return {"node": node, "status": core.leased.status(node), "jobs": jobs}


def _named(core: TransactionLog, node: str) -> Slot:
    slot = core.leased.slots.get(node)
    if slot is None:
        raise Refused(404, f"the inventory has no node {node[:64]!r}", code="unknown")
    return slot


def node_heartbeat(
    core: TransactionLog, request: Post, node: str, body: bodies.AliveBody
) -> Outcome:
    """The node's agent lives; once it has reported, its silence is a failure.

    Where it starts programs it is told which belong there.
    """
    _node(core, node)
    _only_agent(core, node, body.agent)
    told: answers.AliveAnswer = {"ttl_s": core.ttl}
    if body.attempts is not None:
        told["attempts"] = settled(core, node, body.attempts)
    if core.leased.agent(node) != body.agent:
        note = daemon_events.AgentJoined(node=node, agent=body.agent)
        return recorded(core, request, note, lambda: told)
    core.leased.agents[node] = core.now()
    return Answer(200, told)


def settled(
    core: TransactionLog, node: str, seen: Sequence[bodies.SeenAttempt]
) -> list[answers.WantedAttempt]:
    """Take what has ended, begin what belongs there; all that is to run or to be stopped."""
    leased = core.leased
    for each in seen:
        if each.code is not None:
            _seen_end(core, node, each, each.code)
    held = leased.scheduler.cluster.nodes.get(node)
    for job in sorted(held.pins) if held is not None else ():
        record, started = leased.jobs[job], leased.jobs[job].program
        if started is not None and started.outcome == "failed" and not record.ending:
            # The last node that it had has failed under it: nobody saw an end there.
            core.record(the_end(record))
            continue
        ready_at = None if started is None else started.ready_at()
        if started is None or ready_at is None or ready_at > core.now():
            continue
        if leased.lead(job) == node:
            last = started.attempts[-1].number if started.attempts else 0
            _, *others = leased.gang(job)
            begun = daemon_events.AttemptBegun(
                job=job, number=last + 1, node=node, members=(*others,)
            )
            core.record(begun)
    told = (_told(core, leased.jobs[job], node) for job in leased.programs.on(node))
    return [each for each in told if each is not None]


def _seen_end(core: TransactionLog, node: str, seen: bodies.SeenAttempt, code: int) -> None:
    """A process of an attempt is over; the driver's is the attempt's own."""
    record = core.leased.jobs.get(seen.job)
    running = None if record is None else record.running
    if running is None or running.number != seen.number:
        return
    if node == running.node:
        # Its job may be back here by now.
        stopped = seen.stopped and not running.broken
        told = stopped or core.leased.gang(seen.job) != running.nodes
        _ended(core, seen.job, code, told=told)
    elif node in running.members and code and not running.broken:
        core.record(daemon_events.MemberFailed(job=seen.job, node=node, code=code))


def _told(core: TransactionLog, record: JobRecord, node: str) -> answers.WantedAttempt | None:
    """A program that is on a node; None, so that its agent ends it, where it cannot be told: the
    node's other programs go on."""
    try:
        wanted = _wanted(core, record, node)
        dumps(wanted)
    except Exception:
        _log.exception("job %s: node %s cannot be told of its program", record.spec.id, node)
        return None
    return wanted


def _wanted(core: TransactionLog, record: JobRecord, node: str) -> answers.WantedAttempt:
    """A program that is on a node. Its driver is told to stop, and sees to the others."""
    started = record.program
    assert started is not None
    assert started.running is not None
    running, program = started.running, started.program
    if node != running.node:
        program = replace(program, command=program.members)
    ends = running.broken or core.leased.gang(record.spec.id) != running.nodes
    return {
        "job": record.spec.id,
        "number": running.number,
        "program": plain(program),
        "rank": running.nodes.index(node),
        "nodes": [*running.nodes],
        "stop": ends and node == running.node,
    }


def _ended(core: TransactionLog, job: str, code: int, *, told: bool) -> None:
    """A program is over; where it does not start again, so is its job."""
    core.record(daemon_events.AttemptEnded(job=job, code=code, told=told))
    record = core.leased.jobs[job]
    over = record.program is not None and record.program.outcome
    if over and record.ended is None and not record.ending:
        core.record(the_end(record))


def node_failed(core: TransactionLog, request: Post, node: str, _: bodies.FailedBody) -> Outcome:
    """The node is gone with all that was on it."""
    if node in core.leased.failed:
        return Answer(200, answers.NodeGone(state="failed", jobs=[]))
    _node(core, node, failing_too=True)
    jobs = core.leased.hit_by(node)

    def answer() -> answers.NodeGone:
        state = "failed" if node in core.leased.failed else "failing"
        return {"state": state, "jobs": jobs}

    entry = core.fail_node(node, **request.known(), answer=answer)
    if entry is None:
        return Answer(202, answer())
    return Answer(entry.status, loads(entry.answer or "{}"))


def _node(core: TransactionLog, node: str, failing_too: bool = False) -> None:
    leased = core.leased
    failing = any(fence.node == node for fence in leased.fences)
    if node in leased.failed or (failing and not failing_too):
        raise Refused(410, f"node {node[:64]} has failed", code="failed")
    if not (node in leased.slots or leased.needs(node)):
        if core.settings.nodes == "named":
            raise Refused(404, f"the inventory has no node {node[:64]!r}", code="unlisted")
        raise Refused(404, f"there is no node {node[:64]!r} in use", code="unknown")
