"""``rollpacker mux submit|logs|wait|end``: one job, from its specification to its end."""

from __future__ import annotations

import base64
import codecs
import hashlib
import sys
import time
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, TextIO

import typer
from rich.table import Table

from rollpacker.cli.mux.daemon import Daemon, duration, missed, of_daemon
from rollpacker.cli.output import Note, Shown, print_note, shown, table_of
from rollpacker.terminal import coloured

Job = Annotated[str, typer.Argument(metavar="JOB", help="Its id.")]
_LOOK_S = 1.0
_PHASES = 6
_HISTORY = ("jobs", "ended", "iterations", "node_hours", "missed")
_TAIL = 64 * 1024  # bytes at the end of a log that are shown first with `--follow`


@shown
@of_daemon
def submit(
    daemon: Daemon,
    spec: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="A run's configuration, or a job's specification."),
    ],
    key: Annotated[
        str | None, typer.Option(help="Idempotency key: a repeat with it does not submit again.")
    ] = None,
) -> Shown:
    """Submit a job to the daemon. Agents start its program as soon as it has nodes.

    A run whose job has ended is submitted as NAME.2, and continues from its last checkpoint.

    Example: rollpacker mux submit job.yaml
    """
    from rollpacker.rollmux.service.job.submission import read_submission

    found = _submitted(daemon, read_submission(spec), key)
    queued = found["state"] == "queued"
    waits = f", waits for nodes: {daemon.command('status')}" if queued else ""
    lines = [
        f"job {found['id']} submitted{waits}",
        f"wait for its end: {daemon.command('wait', found['id'])}",
    ]
    if found.get("program") is None:
        end = daemon.command("end", found["id"])
        lines.append(f"it has no program: start its driver, or it keeps its nodes until {end}")
    with suppress(ValueError, RuntimeError):  # the job is submitted even if the note fails
        _note_no_guarantee(daemon, found["id"])
    return Shown(found, lines)


@of_daemon
def logs(
    daemon: Daemon,
    job: Job,
    attempt: Annotated[int | None, typer.Option(help="Attempt number (default: the last).")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow it to its end.")] = False,
) -> None:
    """Print the output of a job's program, as far as agents have sent it.

    Example: rollpacker mux logs my-job --follow
    """
    at, show = -_TAIL if follow else 0, _shown_by(sys.stdout)
    while True:
        query = f"at={at}" + ("" if attempt is None else f"&attempt={attempt}")
        try:
            found = daemon.get(f"/v1/jobs/{_quoted(job)}/log?{query}")
        except ValueError as error:
            if not follow or not _is_to_start(daemon, job, error):
                raise
            time.sleep(_LOOK_S)
            continue
        data = base64.b64decode(found["data"])
        show(data)
        at, attempt = found["at"] + len(data), found["attempt"]
        if not at and not follow:
            yet = "" if found["over"] else " yet"
            print_note(f"attempt {attempt} has printed nothing{yet}")
        if found["over"] or (not data and not follow):
            return
        if not data:
            time.sleep(_LOOK_S)


def _shown_by(out: TextIO) -> Callable[[bytes], None]:
    """Write a program's output: unchanged to a file, without control characters to a terminal."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def show(data: bytes) -> None:
        if out.isatty():
            out.write(coloured(decoder.decode(data)))
        else:
            out.buffer.write(data)
        out.flush()

    return show


@shown
@of_daemon
def wait(daemon: Daemon, job: Job) -> Shown:
    """Wait until a job and its program have ended, and exit with the program's code.

    Example: rollpacker mux wait my-job
    """
    while _goes_on(found := daemon.get(f"/v1/jobs/{_quoted(job)}")):
        time.sleep(_LOOK_S)
    with suppress(ValueError, RuntimeError):  # the result is known even if the daemon is away
        if later := _later(daemon, found):
            goes_on = daemon.command("wait", later)
            print_note(f"{job} has ended, and its run continues as {later}: {goes_on}")
    program = found["program"]
    outcome = "ended" if program is None else program["outcome"]
    failed = f". Its output: {daemon.command('logs', job)}" if outcome == "failed" else ""
    code = 0
    if program is not None and outcome != "done":
        code = next((each["code"] for each in program["attempts"][::-1] if each["code"]), 1)
    return Shown(found, filter(None, (f"job {job}: {outcome}{failed}", missed(found))), code)


@shown
@of_daemon
def end(
    daemon: Daemon,
    jobs: Annotated[list[str] | None, typer.Argument(metavar="JOB...", help="Their ids.")] = None,
    every: Annotated[bool, typer.Option("--all", help="All live jobs.")] = False,
    team: Annotated[str, typer.Option(help="With --all: only jobs of this team.")] = "",
) -> Shown:
    """End jobs and stop their programs. Their nodes are free when their permits have ended.

    Example: rollpacker mux end my-job
    """
    if every == bool(jobs) or (team and not every):
        raise ValueError("name jobs to end, or give --all, with --team for jobs of one team")
    names = jobs or [
        job["id"]
        for job in daemon.get("/v1/status")["jobs"]
        if not team or job["spec"]["team"] == team
    ]
    found, wrong = _on_each(daemon, names, "end", {})
    told = [f"job {name}: {each['state']}" for name, each in found.items()]
    failed = {"failed": wrong} if wrong else {}
    one = found[names[0]] if len(names) == 1 and not every else {"jobs": found} | failed
    lines = [*told, *map(Note, wrong.values())] or ["there are no such jobs"]
    return Shown(one, lines, code=int(bool(wrong)))


Jobs = Annotated[list[str], typer.Argument(metavar="JOB...", help="Their ids.")]


@shown
@of_daemon
def hold(daemon: Daemon, jobs: Jobs) -> Shown:
    """Take jobs off their nodes after their iterations, and give them none.

    Example: rollpacker mux hold my-job
    """
    return _changed(daemon, jobs, {"held": True})


@shown
@of_daemon
def release(daemon: Daemon, jobs: Jobs) -> Shown:
    """Give held jobs nodes again.

    Example: rollpacker mux release my-job
    """
    return _changed(daemon, jobs, {"held": False})


@shown
@of_daemon
def priority(
    daemon: Daemon,
    job: Job,
    number: Annotated[int, typer.Argument(help="Jobs of a team with a higher one go first.")],
) -> Shown:
    """Change a job's priority inside its team.

    Example: rollpacker mux priority my-job 2
    """
    return _changed(daemon, [job], {"priority": number})


def _on_each(
    daemon: Daemon, jobs: list[str], action: str, body: dict[str, Any]
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Return the answers by job, and the errors of jobs among several that were not changed."""
    found, wrong = dict[str, dict[str, Any]](), dict[str, str]()
    for job in jobs:
        try:
            found[job] = daemon.post(f"/v1/jobs/{_quoted(job)}/{action}", body)
        except (ValueError, RuntimeError) as error:
            if len(jobs) == 1:
                raise
            wrong[job] = f"job {job} is as it was: {error}"
    return found, wrong


def _changed(daemon: Daemon, jobs: list[str], what: dict[str, Any]) -> Shown:
    found, wrong = _on_each(daemon, jobs, "change", what)
    told: list[str] = []
    for job, each in found.items():
        rest = f", priority {each['priority']}" if "priority" in what else ""
        if each["held"] and each["state"] != "held":
            rest += ", held when its iteration is over"
        told.append(f"job {job}: {each['state']}{rest}")
    lines = [*told, *map(Note, wrong.values())]
    failed = {"failed": wrong} if wrong else {}
    return Shown({"jobs": found} | failed, lines, code=int(bool(wrong)))


@shown
@of_daemon
def show(daemon: Daemon, job: Job) -> Shown:
    """Show a job: nodes, queue, SLO, phases, program, and the reason why it waits.

    Example: rollpacker mux show my-job
    """
    found = daemon.get(f"/v1/jobs/{_quoted(job)}")
    recent = daemon.get(f"/v1/timeline?window_s=86400&job={_quoted(job)}")["phases"][-_PHASES:]
    return Shown(found | {"phases": recent}, _all_of(daemon, found, recent))


def _all_of(daemon: Daemon, found: dict[str, Any], recent: list[dict[str, Any]]) -> Iterator[Table]:
    spec, now = found["spec"], found["arrived_s"] + found["elapsed_s"]
    wanted = spec["iterations"] or spec["expected_iterations"]
    rows = [
        ("state", ", ".join(filter(None, (found["state"], found["outcome"])))),
        ("team, priority", f"{spec['team'] or 'none'}, {spec['priority']}"),
        ("submitted", _submission(found)),
        ("iterations", f"{found['done']}{f' of {wanted}' if wanted else ''}"),
        ("SLO", f"{spec['slo']:g}, {found['slo_state']}, {found['slo_slack_s']:.0f} s left"),
        ("nodes", " ".join((*found["rollout_nodes"], *found["train_nodes"]))),
        ("waits for", "; ".join(_waits_for(daemon, found))),
    ]
    rows += [
        (f"{each['phase']}", f"{duration(now - each['start'])} ago, {each['outcome']}")
        for each in recent
    ]
    attempts = (found["program"] or {"attempts": []})["attempts"]
    for each in attempts:
        code = "runs" if each["ended"] is None else f"ended with {each['code']}"
        rows.append((f"attempt {each['number']}", f"{each['node']}: {code}"))
    if found["program"] is not None and found["program"]["nodes_lost"]:
        rows.append(("nodes lost", f"{found['program']['nodes_lost']} in a row, 3 end the job"))
    view = Table(title=found["id"], show_header=False)
    for row in rows:
        if row[1]:
            view.add_row(*row)
    yield view


def _submission(job: dict[str, Any]) -> str:
    by = f"by {job['by']}" if job["by"] else ""
    ago = f"{duration(job['elapsed_s'])} ago" if job["ended_s"] is None else ""
    return " ".join(filter(None, (ago, by)))


def _waits_for(daemon: Daemon, job: dict[str, Any]) -> list[str]:
    found: list[str] = []
    if (queue := job["queue"]) is not None:
        found.append(f"nodes, {queue['position']} of {queue['of']}: {queue['reason']}")
    if job["held"]:
        off = "" if job["state"] == "held" else "the end of its iteration; then "
        found.append(f"{off}its release: {daemon.command('release', job['id'])}")
    if job["state"] == "waiting":
        found.append(f"its turn to {job['next']}")
    if job["move"] is not None:
        found.append("its own move: " + " ".join((*job["move"]["rollout"], *job["move"]["train"])))
    known = {node["name"]: node for node in daemon.get("/v1/status")["nodes"]}
    started, names = job["program"], {*job["rollout_nodes"], *job["train_nodes"]} & known.keys()
    agents = "" if started is None else " with an agent that starts programs"
    for node in sorted(names):
        if known[node].get("status") == "draining":
            found.append(f"another node{agents}: {node} is draining")
    if started is None or not started["program"]["members"]:
        names &= set() if started is None else {started["lead"]}
    for node in sorted(names):
        if known[node]["reported_s"] is None:
            found.append(
                f"an agent on {node}: rollpacker mux agent --node {node} --programs FOLDER"
            )
    return found


@shown
@of_daemon
def history(
    daemon: Daemon,
    by: Annotated[
        Literal["user", "team", "day", "job"], typer.Option(help="A row for each of these.")
    ] = "team",
) -> Shown:
    """Show usage by jobs: numbers, iterations, node hours of phases alone, missed SLOs.

    Example: rollpacker mux history --by day
    """
    jobs = daemon.get("/v1/jobs")["jobs"]
    rows: dict[str, dict[str, float]] = {}
    for job in jobs:
        spec = job["spec"]
        day = time.strftime("%Y-%m-%d", time.localtime(job["arrived_s"]))
        user, team = job["by"] or "unknown", spec["team"] or "none"
        row = {"user": user, "team": team, "day": day, "job": job["id"]}[by]
        told = rows.setdefault(row, dict.fromkeys(_HISTORY, 0.0))
        hours = job["solo_s"] * max(spec["rollout_nodes"], spec["train_nodes"]) / 3600
        ended = job["ended_s"] is not None
        late = ended and job["slo_state"] == "missed"
        for name, value in zip(_HISTORY, (1, ended, job["done"], hours, late), strict=True):
            told[name] += value
    view = table_of(by, "jobs", "ended", "iterations", "node hours", "SLO missed")
    for name, told in sorted(rows.items()):
        view.add_row(name, *(f"{value:.0f}" for value in told.values()))
    return Shown({by: rows}, [view])


def _submitted(daemon: Daemon, body: dict[str, Any], key: str | None) -> dict[str, Any]:
    """Submit under the first name that no job of the same owner has had.

    Each name has its own key, derived from ``key``, so that a repeated request finds the same job.
    """
    name, number, first = body.get("id"), 1, key
    while True:
        try:
            return daemon.post("/v1/jobs", body, key)
        except ValueError as error:
            if getattr(error.__cause__, "code", "") != "exists" or not body.get("owner"):
                raise
            known = daemon.get(f"/v1/jobs/{_quoted(body['id'])}")
            if known["spec"]["owner"] != body["owner"] or _goes_on(known):
                raise
        number += 1
        body = body | {"id": f"{name}.{number}"}
        if first is not None:
            # The hash has a length that the daemon accepts.
            key = hashlib.blake2b(f"{first} {number}".encode(), digest_size=16).hexdigest()


def _later(daemon: Daemon, job: dict[str, Any]) -> str | None:
    """The live job that continues this job's run (None if there is none)."""
    owner = job["spec"]["owner"]
    live = daemon.get("/v1/status")["jobs"] if owner else []
    return next((each["id"] for each in live if each["spec"]["owner"] == owner), None)


def _note_no_guarantee(daemon: Daemon, job: str) -> None:
    """Print a note for a team without a guarantee, whose name may be misspelt."""
    owners = [
        team["name"]
        for team in daemon.get("/v1/status")["teams"]
        if any(team["guaranteed"].values())
    ]
    team = daemon.get(f"/v1/jobs/{_quoted(job)}")["spec"]["team"]
    if owners and team not in owners:
        whose = f"team {team}" if team else "jobs without a team"
        print_note(f"no nodes are guaranteed to {whose}. The inventory has {', '.join(owners)}")


def _is_to_start(daemon: Daemon, job: str, error: ValueError) -> bool:
    """Whether there is no log only because the program has not started yet."""
    if getattr(error.__cause__, "code", "") != "no_attempt":
        return False
    found = daemon.get(f"/v1/jobs/{_quoted(job)}")
    return found["program"] is not None and _goes_on(found)


def _goes_on(job: dict[str, Any]) -> bool:
    attempts = (job["program"] or {"attempts": []})["attempts"]
    return job["state"] != "ended" or any(each["ended"] is None for each in attempts)


def _quoted(job: str) -> str:
    return urllib.parse.quote(job, safe="")
