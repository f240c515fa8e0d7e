"""``rollpacker mux submit|logs|wait|end``: one job, from its specification to its end."""

from __future__ import annotations

import base64
import codecs
import hashlib
import sys
import time
import urllib.parse
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

from rollpacker.cli.mux.daemon import Daemon, of_daemon
from rollpacker.cli.mux.words import missed
from rollpacker.cli.output import Json, print_found, print_note
from rollpacker.terminal import coloured

Job = Annotated[str, typer.Argument(metavar="JOB", help="Its id.")]
_LOOK_S = 1.0
_TAIL = 64 * 1024
"""Bytes of the end of a log that are shown first when it is followed."""


@of_daemon
def submit(
    daemon: Daemon,
    spec: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="A run's configuration, or a job's specification."),
    ],
    key: Annotated[
        str | None, typer.Option(help="Idempotency key: the same one submits once.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Submit a job to the daemon: agents start its program as soon as it has nodes.

    A run whose job is over is submitted as NAME.2, and goes on from its last checkpoint.

    Example: rollpacker mux submit job.yaml
    """
    from rollpacker.rollmux.service.job.submission import read_submission

    found = _submitted(daemon, read_submission(spec), key)
    queued = found["state"] == "queued"
    waits = f", waits for nodes: {daemon.command('status')}" if queued else ""
    over = daemon.command("wait", found["id"])
    print_found(found, as_json, f"job {found['id']} submitted{waits}\nwait for its end: {over}")
    with suppress(ValueError, RuntimeError):  # the job is in, whatever happens to the note
        _note_no_guarantee(daemon, found["id"])


@of_daemon
def logs(
    daemon: Daemon,
    job: Job,
    attempt: Annotated[int | None, typer.Option(help="Of its starts; default: the last.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Until the attempt ends.")] = False,
) -> None:
    """Print what a job's program printed, as agents have sent it.

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
    """Writes what a program printed: to a file as it is, to a terminal with no power over it."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def show(data: bytes) -> None:
        if out.isatty():
            out.write(coloured(decoder.decode(data)))
        else:
            out.buffer.write(data)
        out.flush()

    return show


@of_daemon
def wait(
    daemon: Daemon,
    job: Job,
    as_json: Json = False,
) -> None:
    """Wait until a job and its program are over; exit with the program's code.

    Example: rollpacker mux wait my-job
    """
    while _goes_on(found := daemon.get(f"/v1/jobs/{_quoted(job)}")):
        time.sleep(_LOOK_S)
    with suppress(ValueError, RuntimeError):  # how it ended is known, whoever is away by now
        if later := _later(daemon, found):
            goes_on = daemon.command("wait", later)
            print_note(f"{job} is over, and its run goes on as {later}: {goes_on}")
    program = found["program"]
    outcome = "ended" if program is None else program["outcome"]
    failed = f"; what it printed: {daemon.command('logs', job)}" if outcome == "failed" else ""
    broken = f"\n{text}" if (text := missed(found)) else ""
    print_found(found, as_json, f"job {job}: {outcome}{failed}{broken}")
    if program is not None and outcome != "done":
        codes: list[Any] = [each["code"] for each in program["attempts"] if each["code"]]
        raise typer.Exit(codes[-1] if codes else 1)


@of_daemon
def end(
    daemon: Daemon,
    job: Job,
    as_json: Json = False,
) -> None:
    """End a job: its program is stopped; its nodes are free when its permit is over.

    Example: rollpacker mux end my-job
    """
    found = daemon.post(f"/v1/jobs/{_quoted(job)}/end", {}, None)
    print_found(found, as_json, f"job {job}: {found['state']}")


def _submitted(daemon: Daemon, body: dict[str, Any], key: str | None) -> dict[str, Any]:
    """Under the first name that no job of the same owner has had.

    Each name has a key of its own that follows from ``key``: whoever asks again finds the job.
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
            # Whatever its length is, the daemon takes this one.
            key = hashlib.blake2b(f"{first} {number}".encode(), digest_size=16).hexdigest()


def _later(daemon: Daemon, job: dict[str, Any]) -> str | None:
    """The live job under which a run goes on whose job this was; None without one."""
    owner = job["spec"]["owner"]
    live = daemon.get("/v1/status")["jobs"] if owner else []
    return next((each["id"] for each in live if each["spec"]["owner"] == owner), None)


def _note_no_guarantee(daemon: Daemon, job: str) -> None:
    """A name that is misspelt is a team too, to which nothing is guaranteed."""
    owners = [
        team["name"]
        for team in daemon.get("/v1/status")["teams"]
        if any(team["guaranteed"].values())
    ]
    team = daemon.get(f"/v1/jobs/{_quoted(job)}")["spec"]["team"]
    if owners and team not in owners:
        whose = f"team {team}" if team else "jobs of no team"
        print_note(f"no nodes are guaranteed to {whose}; the inventory has {', '.join(owners)}")


def _is_to_start(daemon: Daemon, job: str, error: ValueError) -> bool:
    """Whether there is no log because the program has not been started yet."""
    if getattr(error.__cause__, "code", "") != "no_attempt":
        return False
    found = daemon.get(f"/v1/jobs/{_quoted(job)}")
    return found["program"] is not None and _goes_on(found)


def _goes_on(job: dict[str, Any]) -> bool:
    attempts = (job["program"] or {"attempts": []})["attempts"]
    return job["state"] != "ended" or any(each["ended"] is None for each in attempts)


def _quoted(job: str) -> str:
    return urllib.parse.quote(job, safe="")
