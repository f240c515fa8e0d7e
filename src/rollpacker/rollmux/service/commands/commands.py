"""The effect of each request: first checked against the state, then recorded."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from msgspec import convert
from msgspec.structs import replace

from rollpacker.core.codec import dumps, loads, plain
from rollpacker.rollmux.model import events as ev
from rollpacker.rollmux.model.cluster import Job
from rollpacker.rollmux.model.inventory import Machine, Slot
from rollpacker.rollmux.model.jobs import JobSpec
from rollpacker.rollmux.model.program import JobProgram
from rollpacker.rollmux.scheduler.queue import MOST_OF_A_TEAM, why_never
from rollpacker.rollmux.service.api import answers, bodies
from rollpacker.rollmux.service.api.bodies import Post
from rollpacker.rollmux.service.api.roles import Refused
from rollpacker.rollmux.service.commands.writer import Answer, NoPermitYet, Outcome
from rollpacker.rollmux.service.state import daemon_events
from rollpacker.rollmux.service.state.attempts import ProgramRun
from rollpacker.rollmux.service.state.records import JobRecord, Lease
from rollpacker.rollmux.service.state.transaction_log import TransactionLog


def once(core: TransactionLog, request: Post, act: Callable[[], Outcome]) -> Outcome:
    """Carry out a request, or repeat its first answer if its key is known."""
    own_job(core, request)
    entry = core.find(request.key)
    if entry is None:
        return act()
    if entry.request != request.fingerprint:
        raise Refused(422, "Idempotency-Key: another request has used this key")
    if entry.answer is None:
        event = cast(ev.PermitRequested, daemon_events.decode(entry.event))
        return poll(core, event.job, request.key)
    return Answer(entry.status, loads(entry.answer))


def own_job(core: TransactionLog, request: Post) -> None:
    """Raises ``Refused`` if the job or permit belongs to another team or job."""
    name, lease = (
        request.job,
        core.leased.leases.get(-1 if request.token is None else request.token),
    )
    record = core.leased.jobs.get((lease.job if lease else "") if name is None else name)
    if record is not None:
        own_team(request, record.spec.team)
    if lease is not None and request.of not in ("", lease.job):
        text = f"permit {lease.token} belongs to another job, not to {request.of}"
        raise Refused(409, text, code="lost")


def own_team(request: Post, team: str) -> None:
    """Raises ``Refused`` if the sender's token is for another team."""
    if not request.by.may_touch(team):
        whose = f"team {team!r}" if team else "no team: set team (in a run: mux.team)"
        text = f"the token of {request.by} is not for jobs of {whose}"
        raise Refused(403, text, code="forbidden")


def submit(core: TransactionLog, request: Post, body: bodies.NewJob) -> Outcome:
    """Submit a job."""
    spec: JobSpec = convert(body, JobSpec, from_attributes=True)
    _check_fit(spec, body.program, core.settings.memory_cap_gb)
    own_team(request, spec.team)
    if spec.id in core.leased.jobs:
        over = core.leased.jobs[spec.id].ended is not None
        text = (
            f"job {spec.id} has ended, and its id cannot be used again"
            if over
            else f"job {spec.id} exists already"
        )
        raise Refused(409, f"id: {text}", code="exists")
    if core.leased.draining:
        raise Refused(409, "the cluster is draining and takes no new jobs", code="draining")
    queue = core.leased.scheduler.queue
    if sum(job.spec.team == spec.team for job in queue.jobs.values()) >= MOST_OF_A_TEAM:
        whose = f"of team {spec.team}" if spec.team else "without a team"
        text = f"{MOST_OF_A_TEAM} jobs {whose} wait for nodes: submit it when some have started"
        raise Refused(409, text, code="too_many")
    seq = core.leased.seq + 1
    program = body.program
    programs = (program is not None, program is not None and bool(program.members))
    never = why_never(core.leased.scheduler.cluster.inventory, Job(spec, core.now()))
    if never is not None and spec.too_large == "refuse":
        raise Refused(409, f"job {spec.id}: {never}", code="too_large")

    def told() -> answers.Submitted:
        return {"id": spec.id, "seq": seq, "state": core.leased.state(spec.id)}

    arrived = ev.JobArrived(spec=spec, programs=programs, by=request.by.name)
    answer = recorded(core, request, arrived, told, status=201)
    if program is not None:
        core.record(daemon_events.ProgramGiven(job=spec.id, program=program))
    return answer


def _check_fit(spec: JobSpec, program: JobProgram | None, cap_gb: float) -> None:
    for name in ("rollout_memory_gb", "train_memory_gb"):
        if getattr(spec, name) > cap_gb:
            asked = getattr(spec, name)
            text = f"{name}: {asked:g}: must be 0 to {cap_gb:g}, the most of a node"
            raise Refused(400, text)
    if program is not None and not program.command[0]:
        raise Refused(400, "program.command: the first part, the program, must not be empty")


def permit(core: TransactionLog, request: Post, job: str, body: bodies.Ask) -> Outcome:
    """Ask for a phase: a permit, a move that must come first, or not yet.

    A permit's deadline is your clock just before you sent the request plus ``ttl_s``. After a move,
    repeat the request with the same key. After a move for a ``failure`` use a new key, since the
    iteration begins again with a rollout.
    """
    record = job_record(core, job)
    if record.ended is not None or record.ending:
        raise Refused(409, f"job {job} is {core.leased.state(job)}", code="ended")
    if record.move is not None:
        return Answer(200, move_body(record))
    if record.token is not None:
        lease = core.leased.leases[record.token]
        left = _left(core, lease)
        raise Refused(
            409,
            f"job {job} holds permit {lease.token} ({lease.phase}) for {left:.1f} s more",
            code="held",
            token=lease.token,
            ttl_s=left,
        )
    wanted = core.leased.next_phase(job)
    if wanted is None:
        raise Refused(409, f"job {job} has done all its iterations", code="complete", next=None)
    if body.phase != wanted:
        raise Refused(409, f"phase: job {job} must ask for {wanted}", code="order", next=wanted)
    core.record(ev.PermitRequested(job=job, phase=body.phase), **request.known())
    return poll(core, job, request.key)


def poll(core: TransactionLog, job: str, key: str) -> Outcome:
    """The present answer to a recorded permit request."""
    record = core.leased.jobs[job]
    if record.ended is not None or record.ending:
        raise Refused(409, f"job {job} is {core.leased.state(job)}", code="ended")
    if record.move is not None:
        return Answer(200, move_body(record))
    if record.request == key:
        return NoPermitYet(job, key)
    lease = None if record.token is None else core.leased.leases[record.token]
    if lease is not None and lease.key == key:
        untold = lease.fenced or core.quiet
        return NoPermitYet(job, key) if untold else Answer(200, permit_body(core, lease))
    if lease is not None or record.request is not None:
        raise Refused(409, "a newer request replaced this one", code="superseded")
    raise Refused(
        409,
        "the permit of this request has ended: ask with a new Idempotency-Key",
        code="over",
        next=core.leased.next_phase(job),
    )


def permit_body(core: TransactionLog, lease: Lease) -> answers.PermitView:
    """A permit with its remaining time."""
    return {
        "token": lease.token,
        "phase": lease.phase,
        "nodes": list(lease.nodes),
        "ttl_s": _left(core, lease),
        "lease_s": core.ttl,
    }


def move_body(record: JobRecord) -> answers.Moving:
    """A job's pending move."""
    assert record.move is not None
    decision = record.move.decision
    return {
        "move": {
            "id": record.move.id,
            "rollout": list(decision.rollout),
            "train": list(decision.train),
            "reason": decision.reason,
            "memory_gb": dict(decision.memory_gb),
        }
    }


def _left(core: TransactionLog, lease: Lease) -> float:
    return round(max(min(lease.deadline - core.now(), core.ttl), 0.0), 3)


def heartbeat(core: TransactionLog, request: Post, token: int) -> Outcome:
    """Extend a lease to its full time. A repeated key extends nothing."""
    own_job(core, request)
    lease = _lease(core, token)
    if lease.beat != request.key:
        lease.deadline, lease.beat = core.now() + core.ttl, request.key
    left = _left(core, lease)
    beat = answers.BeatAnswer(ttl_s=left, lease_s=core.ttl, release_tail=lease.tail)
    return Answer(200, beat)


def finish(core: TransactionLog, request: Post, token: int, body: bodies.FinishedBody) -> Outcome:
    """Finish the phase."""
    lease = _over_if_fenced(core, token)
    job, phase = lease.job, lease.phase

    def answer() -> answers.DoneAnswer:
        done = core.leased.jobs[job].done
        return {"job": job, "phase": phase, "done": done, "next": core.leased.next_phase(job)}

    event = ev.PhaseFinished(job=job, phase=phase, seconds=body.seconds, token=token)
    return recorded(core, request, event, answer)


def abandon(core: TransactionLog, request: Post, token: int, _: bodies.OfJob) -> Outcome:
    """Give the nodes back with the phase unfinished. The job must ask for the phase again."""
    lease = _over_if_fenced(core, token)
    job = lease.job

    def answer() -> answers.GivenBack:
        return {"job": job, "next": core.leased.next_phase(job)}

    return recorded(core, request, ev.PermitLost(job=job, token=token), answer)


def tail(core: TransactionLog, request: Post, job: str, body: bodies.TailBody) -> Outcome:
    """About 80% of the responses of the running rollout are done."""
    record, token = job_record(core, job), body.token
    lease = _lease(core, token)
    if record.token != token or lease.phase != "rollout":
        raise Refused(409, f"token: {token} is not a running rollout of job {job}", code="lost")

    def answer() -> answers.TailTold:
        return {"release_tail": lease.tail}

    return recorded(core, request, ev.TailReached(job=job), answer)


def moved(core: TransactionLog, request: Post, job: str, body: bodies.MovedBody) -> Outcome:
    """The state is loaded on the new nodes."""
    record = job_record(core, job)
    if record.move is None or record.move.id != body.move:
        current = None if record.move is None else record.move.id
        raise Refused(409, f"move: the current move of job {job} is {current}", move=current)
    return recorded(core, request, ev.MoveFinished(job=job), dict)


def end(core: TransactionLog, request: Post, job: str) -> Outcome:
    """The job is done or cancelled."""
    record = job_record(core, job)
    told, status = answers.EndedAnswer(state="ended"), 200
    if record.ending or (record.ended is None and record.token is not None):
        told, status = answers.EndedAnswer(state="ending"), 202
    if record.ended is not None or record.ending:
        return Answer(status, told)
    return recorded(core, request, the_end(record), lambda: told, status=status)


def the_end(record: JobRecord) -> daemon_events.Recorded:
    """The event that ends a live job, at once or with its permit."""
    if record.token is None:
        return ev.JobEnded(job=record.spec.id)
    return daemon_events.EndFenced(job=record.spec.id, token=record.token)


def change(core: TransactionLog, request: Post, job: str, body: bodies.Change) -> Outcome:
    """Hold the job, release it, or change its priority inside its team.

    A held job loses nothing. It finishes its iteration, and then its program must end as if another
    team had taken the nodes back. After its release it gets nodes again.
    """
    record = job_record(core, job)
    if record.ended is not None or record.ending:
        raise Refused(409, f"job {job} is {core.leased.state(job)}", code="ended")
    live = core.leased.scheduler.cluster.jobs[job]

    def answer() -> answers.Changed:
        state, priority = core.leased.state(job), live.spec.priority
        return {"state": state, "held": live.held, "priority": priority}

    event = ev.JobChanged(job=job, held=body.held, priority=body.priority)
    return recorded(core, request, event, answer)


def drain(core: TransactionLog, request: Post, body: bodies.Drain) -> Outcome:
    """Refuse new jobs, or accept them again. Live jobs continue."""

    def answer() -> answers.Drained:
        return {"draining": body.draining, "jobs": len(core.leased.scheduler.cluster.jobs)}

    return recorded(core, request, daemon_events.DrainSet(draining=body.draining), answer)


def recorded(
    core: TransactionLog,
    request: Post,
    event: daemon_events.Recorded,
    answer: Callable[[], Mapping[str, Any]],
    status: int = 200,
) -> Outcome:
    """Record an event, and answer."""
    entry = core.record(event, **request.known(), status=status, answer=answer)
    return Answer(status, loads(entry.answer or "{}"))


def job_record(core: TransactionLog, job: str) -> JobRecord:
    """A job's record. Raises ``Refused`` if the job is unknown."""
    record = core.leased.jobs.get(job)
    if record is None:
        raise Refused(404, f"there is no job {job[:64]!r}", code="unknown")
    return record


def running(core: TransactionLog, job: str) -> ProgramRun:
    """The running attempt of a job. Raises ``Refused``."""
    found = job_record(core, job).running
    if found is None:
        raise Refused(404, f"job {job}: agents run no program of it", code="no_attempt")
    return found


def attempt(core: TransactionLog, job: str, number: int | None) -> ProgramRun:
    """An attempt of a job (the last one for None). Raises ``Refused``."""
    started = job_record(core, job).program
    attempts = [] if started is None else started.attempts
    wanted = [each for each in attempts if number is None or each.number == number]
    if not wanted:
        which = "" if number is None else f" {number}"
        said = "was not started by agents" if started is None else f"has no attempt{which} (yet)"
        raise Refused(404, f"job {job} {said}", code="no_attempt")
    return wanted[-1]


def _lease(core: TransactionLog, token: int) -> Lease:
    lease = core.leased.leases.get(token)
    if lease is None or lease.fenced:
        if lease is None and token >= core.leased.issued:
            raise Refused(404, f"there is no permit {token}", code="unknown")
        raise Refused(409, f"permit {token} is lost: stop, then ask again", code="lost")
    return lease


def _over_if_fenced(core: TransactionLog, token: int) -> Lease:
    """The lease of a permit whose holder stops now. Events that waited for it happen at once."""
    lease = core.leased.leases.get(token)
    if lease is not None and lease.fenced:
        core.leased.over(token)
        core.release_fences(token)
    return _lease(core, token)


_log = logging.getLogger(__name__)
_ROUNDED = 0.97
"""A node may report this share of the inventory's numbers: firmware and kernel take some."""


def register(core: TransactionLog, request: Post, body: bodies.NewNode) -> Outcome:
    """Register a named node as its agent.

    If the node has less than the inventory lists, or failed three times within an hour, it is set
    aside.
    """
    told = {name: getattr(body, name) for name in Machine.__dataclass_fields__}
    machine = Machine(**told)
    if core.settings.nodes != "named":
        raise Refused(
            409, "this cluster rents its nodes: serve with --inventory for named ones", code="cloud"
        )
    _only_agent(core, machine.name, body.agent)
    slot = core.leased.slots.get(machine.name)
    if slot is None or slot.status == "down":
        core.record(ev.NodeJoined(machine=machine if slot is None else slot.machine))
        slot = core.leased.slots[machine.name]
    if (lacks := _lacks(slot.machine, machine)) and slot.status == "open":
        core.record(ev.NodeClosed(node=machine.name, status="set_aside", why=lacks))
    if not slot.agent:
        _heard(core, machine.name, programs=False)
    answer = answers.Registered(status=core.leased.status(machine.name), ttl_s=core.ttl)
    note = daemon_events.AgentJoined(node=machine.name, agent=body.agent)
    return recorded(core, request, note, lambda: answer)


def _heard(core: TransactionLog, node: str, *, programs: bool) -> None:
    """Note the agent's kind: jobs with programs need named nodes whose agents start some."""
    slot = core.leased.slots.get(node)
    if slot is not None and slot.agent != ("programs" if programs else "heard"):
        core.record(ev.AgentHeard(node=node, programs=programs))


def _only_agent(core: TransactionLog, node: str, agent: str) -> None:
    """Raises ``Refused`` if another agent reports the node, since both would start its programs."""
    if (known := core.leased.agent(node)) in (None, "", agent):
        return
    ago = core.now() - core.leased.agents[node]
    text = (
        f"node {node[:64]}: another agent reported it {ago:.1f} s ago. Stop one of them, or use "
        "another --node"
    )
    _log.warning("%s (agent %.8s was refused, %.8s is heard)", text, agent or "(none)", known)
    raise Refused(409, text, code="taken")


def _lacks(listed: Machine, reported: Machine) -> str:
    if reported.pool != listed.pool:
        return f"its agent reports a {reported.pool} node"
    found = [
        f"{getattr(reported, name):g} {what}, not {getattr(listed, name):g}"
        for name, what in (("memory_gb", "GB of memory"), ("devices", "devices"))
        if getattr(reported, name) < _ROUNDED * getattr(listed, name)
    ]
    return f"its agent reports {' and '.join(found)}" if found else ""


def node_closed(core: TransactionLog, request: Post, node: str, body: bodies.Closed) -> Outcome:
    """Take nothing new on the node.

    Jobs on a draining node get others between two iterations, as soon as some are free.
    """
    _named(core, node)
    event = ev.NodeClosed(node=node, status=body.status, why=body.reason)
    return recorded(core, request, event, lambda: _on(core, node))


def node_opened(core: TransactionLog, request: Post, node: str) -> Outcome:
    """Use the node again."""
    if _named(core, node).status == "down":
        raise Refused(409, f"node {node} is down: its agent must report it", code="failed")
    return recorded(core, request, ev.NodeOpened(node=node), lambda: _on(core, node))


def node_removed(core: TransactionLog, request: Post, node: str) -> Outcome:
    """Remove the node from the inventory."""
    if _named(core, node).used:
        raise Refused(409, f"node {node}: jobs are on it, so drain it first", code="used")
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
    """Report the node. After its first report, an agent's silence counts as a failure.

    An agent that starts programs gets the list of those for its node.
    """
    _node(core, node)
    _only_agent(core, node, body.agent)
    _heard(core, node, programs=body.attempts is not None)
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
    """Record ended attempts and begin new ones. Returns all that must run or stop."""
    leased = core.leased
    for each in seen:
        if each.code is not None:
            _seen_end(core, node, each, each.code)
    held = leased.scheduler.cluster.nodes.get(node)
    for job in sorted(held.pins) if held is not None else ():
        record, started = leased.jobs[job], leased.jobs[job].program
        if started is not None and started.outcome == "failed" and not record.ending:
            # Its last node failed under the job, so nobody saw the end of its program there.
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
    """A process of an attempt has ended. The driver's end is the attempt's end."""
    record = core.leased.jobs.get(seen.job)
    running = None if record is None else record.running
    if running is None or running.number != seen.number:
        return
    if node == running.node:
        # The job may have returned to these nodes.
        stopped = seen.stopped and not running.broken
        told = stopped or core.leased.gang(seen.job) != running.nodes
        _ended(core, seen.job, code, told=told)
    elif node in running.members and code and not running.broken:
        core.record(daemon_events.MemberFailed(job=seen.job, node=node, code=code))


def _told(core: TransactionLog, record: JobRecord, node: str) -> answers.WantedAttempt | None:
    """The entry of an attempt on a node (None after an error, so that only this program ends)."""
    try:
        wanted = _wanted(core, record, node)
        dumps(wanted)
    except Exception:
        _log.exception("job %s: its program cannot be sent to node %s", record.spec.id, node)
        return None
    return wanted


def _wanted(core: TransactionLog, record: JobRecord, node: str) -> answers.WantedAttempt:
    """The entry of an attempt on a node. Only its driver must stop, and it stops the others."""
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
    core.record(daemon_events.AttemptEnded(job=job, code=code, told=told))
    record = core.leased.jobs[job]
    over = record.program is not None and record.program.outcome
    if over and record.ended is None and not record.ending:
        core.record(the_end(record))


_LONGEST_WHY = 200


def node_failed(core: TransactionLog, request: Post, node: str, body: bodies.FailedBody) -> Outcome:
    """The node and all its state are lost."""
    if node in core.leased.failed:
        return Answer(200, answers.NodeGone(state="failed", jobs=[]))
    _node(core, node, failing_too=True)
    jobs = core.leased.hit_by(node)

    def answer() -> answers.NodeGone:
        state = "failed" if node in core.leased.failed else "failing"
        return {"state": state, "jobs": jobs}

    why = body.reason[:_LONGEST_WHY] or f"{request.by.name} reported its failure"
    entry = core.fail_node(node, why, **request.known(), answer=answer)
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
