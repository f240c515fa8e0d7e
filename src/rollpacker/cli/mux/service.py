"""``rollpacker mux serve|status|drain``: the daemon as a whole."""

from __future__ import annotations

import json
import time
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import RenderableType
from rich.table import Table

from rollpacker.cli.mux.daemon import STATE, Daemon, State, TokenFile, duration, missed, of_daemon
from rollpacker.cli.output import Shown, print_plain, shown

_LOOKS, _LOOK_S = 4, 0.2  # retries for forecasts of waiting jobs, and seconds between them

_ENDED = 10


def serve(
    state: State = STATE,
    host: Annotated[str, typer.Option(help="Address to bind.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one.", min=0, max=65535)] = 8642,
    ttl: Annotated[float, typer.Option(help="Seconds of a permit's lease.")] = 30.0,
    settings: Annotated[
        str | None, typer.Option(help="Scheduler settings as a JSON object (a new database only).")
    ] = None,
    inventory: Annotated[
        Path | None,
        typer.Option(help="Named nodes and teams in YAML (without it nodes are rented)."),
    ] = None,
    token_file: TokenFile = None,
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate chain.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its key.")] = None,
) -> None:
    """Run the daemon: HTTP API and dashboard.

    Example: rollpacker mux serve --state runs/mux --inventory nodes.yaml
    """
    from rollpacker.rollmux.service.serve import ServeOptions
    from rollpacker.rollmux.service.serve import serve as run

    options = ServeOptions(
        state=state,
        host=host,
        port=port,
        ttl=ttl,
        settings=None if settings is None else _settings(settings),
        inventory=inventory,
        token_file=token_file,
        tls_cert=tls_cert,
        tls_key=tls_key,
    )

    def ready(url: str, token: Path) -> None:
        # Flushed at once, since scripts wait for this line.
        print(f"listening on {url}, token in {token}", flush=True)

    run(options, ready)


def backup(
    to: Annotated[Path, typer.Argument(help="The file to make.")],
    state: State = STATE,
) -> None:
    """Copy the daemon's database into a new file, while the daemon runs.

    Example: rollpacker mux backup /backups/mux-monday.sqlite
    """
    from rollpacker.rollmux.service.store import backup as copied

    count = copied(state / "mux.sqlite", to)
    print_plain(f"{to}: the database up to entry {count}")


def restore(
    copy: Annotated[Path, typer.Argument(help="A copy made by mux backup.")],
    state: State = STATE,
) -> None:
    """Replace the database by a copy. Stop the daemon before, and start it afterwards.

    Example: rollpacker mux restore /backups/mux-monday.sqlite
    """
    from rollpacker.rollmux.service.store import restore as put_back

    state.mkdir(parents=True, exist_ok=True, mode=0o700)
    count = put_back(copy, state / "mux.sqlite")
    print_plain(f"{state}: the database up to entry {count}. No permit is granted for one lease")


def _settings(text: str) -> Any:
    from rollpacker.core.codec import read_record
    from rollpacker.rollmux.model.settings import Settings

    try:
        return read_record(json.loads(text), Settings)
    except ValueError as error:
        kind = "not JSON: " if isinstance(error, json.JSONDecodeError) else ""
        raise ValueError(f"--settings: {kind}{error}") from error


@shown
@of_daemon
def status(daemon: Daemon) -> Shown:
    """Show the cluster: nodes, groups, jobs, results of the last jobs, and cost.

    Example: rollpacker mux status
    """
    found = _status(daemon)
    return Shown(found, _in_words(found))


def _in_words(found: dict[str, Any]) -> Iterator[RenderableType]:
    teams = len(found["teams"]) > 1
    columns = ("state", "group", "nodes", "done", "SLO")
    view = Table("job", *(("team",) if teams else ()), *columns)
    for job in found["jobs"]:
        view.add_row(
            job["id"],
            *((job["spec"]["team"],) if teams else ()),
            _state(job),
            "" if job["group"] is None else f"{job['group']}",
            " ".join((*job["rollout_nodes"], *job["train_nodes"])),
            _done(job),
            f"{job['slo_state']}, {job['slo_slack_s']:.0f} s left",
        )
    yield view
    for job in sorted(
        (each for each in found["jobs"] if each["queue"]), key=lambda job: job["queue"]["position"]
    ):
        yield f"waits: {_place_in_queue(job)}"
    silent = {node["name"] for node in found["nodes"] if node["reported_s"] is None}
    for job in filter(_not_started, found["jobs"]):
        yield f"not started: {job['id']}: {_why_not_started(job['program']['lead'], silent)}"
    for job in found["ended"][-_ENDED:]:
        yield f"ended: {_end(job, found['now'])}"
    for team in found["teams"]:
        whose = f"team {team['name']}" if team["name"] else "jobs without a team"
        shares = (
            f"{team['used'][pool]:.1f} of {team['guaranteed'][pool]:g} {pool} nodes"
            for pool in ("rollout", "train")
        )
        yield f"{whose}: {', '.join(shares)}"
    yield _nodes_line(found) + (", draining" if found["draining"] else "")


def _status(daemon: Daemon) -> dict[str, Any]:
    """The status with forecasts, which a small cluster has a moment after the first request."""
    for _ in range(_LOOKS):
        found = daemon.get("/v1/status")
        waiting = [job["queue"] for job in found["jobs"] if job["queue"]]
        if not waiting or any(queue["starts_in_s"] is not None for queue in waiting):
            return found
        time.sleep(_LOOK_S)
    return daemon.get("/v1/status")


def _done(job: dict[str, Any]) -> str:
    exact, expected = job["spec"]["iterations"], job["spec"]["expected_iterations"]
    if exact is None and expected is None:
        return f"{job['done']}"
    return f"{job['done']}/{exact}" if exact is not None else f"{job['done']}/~{expected}"


def _end(job: dict[str, Any], now: float) -> str:
    attempts = (job["program"] or {"attempts": []})["attempts"]
    code = attempts[-1]["code"] if attempts else None
    left = f" (exit code {code})" if job["outcome"] == "failed" and code else ""
    broken = f", {text}" if (text := missed(job)) else ""
    ago = duration(max(now - job["ended_s"], 0.0))
    return f"{job['id']}, {job['outcome']}{left} after {_done(job)} iterations{broken}, {ago} ago"


def _not_started(job: dict[str, Any]) -> bool:
    program = job["program"]
    return program is not None and bool(program["lead"]) and not program["attempts"]


def _why_not_started(lead: str, silent: Container[str]) -> str:
    if lead in silent:
        return f"{lead} has no agent: rollpacker mux agent --node {lead} --programs FOLDER ..."
    return f"{lead}'s agent starts it soon, or needs --programs FOLDER to start programs"


def _state(job: dict[str, Any]) -> str:
    """A job's state. A running program that has not asked for nodes counts as busy."""
    attempts = (job["program"] or {"attempts": []})["attempts"]
    if job["state"] == "idle" and attempts and attempts[-1]["ended"] is None:
        begun = job["done"] or job["next"] == "train"
        return f"at work on {attempts[-1]['node']}" if begun else "starting"
    return job["state"]


def _place_in_queue(job: dict[str, Any]) -> str:
    queue = job["queue"]
    return f"{queue['position']} of {queue['of']}: {job['id']}, {_start(queue)}; {queue['reason']}"


def _start(queue: dict[str, Any]) -> str:
    if queue["starts_in_s"] is None:
        return "not known when"
    when = f"starts in about {duration(queue['starts_in_s'])}"
    if queue["starts_between_s"] is None:
        return when
    least, most = queue["starts_between_s"]
    first, last = duration(least), "never" if most is None else duration(most)
    return when if first == last else f"{when} ({first} to {last})"


def _nodes_line(found: dict[str, Any]) -> str:
    groups = f"in {len(found['groups'])} groups"
    used = sum(node["group"] is not None for node in found["nodes"])
    if found["named"]:
        closed = sum(node["status"] != "open" for node in found["nodes"])
        shut = f", {closed} closed" if closed else ""
        return f"{used} of {len(found['nodes'])} nodes used {groups}{shut}"
    cost = found["cost_per_h"]
    return f"{used} nodes {groups}, ${cost['now']:.2f}/h (every job alone: ${cost['solo']:.2f}/h)"


@shown
@of_daemon
def drain(
    daemon: Daemon,
    undo: Annotated[bool, typer.Option("--undo", help="Take new jobs again.")] = False,
) -> Shown:
    """Take no new jobs. Live ones continue. To empty one node: rollpacker mux node drain.

    Example: rollpacker mux drain
    """
    found = daemon.post("/v1/drain", {"draining": not undo})
    now = "new jobs are taken" if undo else "no new jobs are taken (again with: drain --undo)"
    return Shown(found, [f"{now}, {found['jobs']} live jobs continue"])
