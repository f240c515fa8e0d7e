"""``rollpacker mux node`` and ``mux token``: named nodes and tokens."""

from __future__ import annotations

import os
import time
import urllib.parse
from pathlib import Path
from typing import Annotated, Any, Literal, TextIO

import typer
from rich.table import Column, Table

from rollpacker.cli.mux.daemon import Daemon, duration, of_daemon
from rollpacker.cli.output import Shown, shown

node_app = typer.Typer(help="Nodes of an inventory.", no_args_is_help=True)
Node = Annotated[str, typer.Argument(metavar="NODE", help="Its name.")]
Reason = Annotated[str, typer.Option(help="A reason for users.")]


@node_app.command("list")
@shown
@of_daemon
def list_nodes(daemon: Daemon) -> Shown:
    """Show all nodes, with their state, status and jobs.

    Example: rollpacker mux node list
    """
    nodes = daemon.get("/v1/status")["nodes"]
    view = Table(
        "node", "pool", "state", "status", Column("jobs", overflow="fold"), "rack", "agent"
    )
    for node in nodes:
        status, machine = node.get("status", ""), node.get("machine", {})
        since = "" if node.get("status_s") is None else f" for {duration(node['status_s'])}"
        why = since + (f": {node['why']}" if node.get("why") else "")
        jobs = " ".join(node["memory_gb"])
        heard = node["reported_s"]
        view.add_row(
            *(node["name"], node["pool"], node["state"], status + why, jobs),
            *(machine.get("rack", ""), "none" if heard is None else f"{duration(heard)} ago"),
        )
    return Shown({"nodes": nodes}, [view])


@node_app.command()
@shown
@of_daemon
def cordon(daemon: Daemon, node: Node, reason: Reason = "") -> Shown:
    """Put no more jobs on a node. Its jobs stay.

    Example: rollpacker mux node cordon h20-07 --reason "slow link"
    """
    return _changed(daemon, node, "close", {"status": "cordoned", "reason": reason})


@node_app.command()
@shown
@of_daemon
def drain(daemon: Daemon, node: Node, reason: Reason = "") -> Shown:
    """Put no more jobs on a node, and move its jobs after their iterations.

    Example: rollpacker mux node drain h20-07 --reason "new cables"
    """
    return _changed(daemon, node, "close", {"status": "draining", "reason": reason})


@node_app.command()
@shown
@of_daemon
def uncordon(daemon: Daemon, node: Node) -> Shown:
    """Use a node again.

    Example: rollpacker mux node uncordon h20-07
    """
    return _changed(daemon, node, "open", {})


@node_app.command()
@shown
@of_daemon
def remove(daemon: Daemon, node: Node) -> Shown:
    """Take an unused node out of the inventory.

    Example: rollpacker mux node remove h20-07
    """
    return _changed(daemon, node, "remove", {})


def _changed(daemon: Daemon, node: str, what: str, body: dict[str, Any]) -> Shown:
    found = daemon.post(f"/v1/nodes/{urllib.parse.quote(node, safe='')}/{what}", body)
    status, jobs = found.get("status", "removed"), found.get("jobs", [])
    on = f", still on it: {' '.join(jobs)}" if jobs else ""
    again = daemon.command("node", "uncordon", node)
    back = f"; to use it again: {again}" if what == "close" else ""
    return Shown(found, [f"node {node}: {status}{on}{back}"])


token_app = typer.Typer(help="Bearer tokens of users and agents.", no_args_is_help=True)
Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of its holder.")]


@token_app.command()
@shown
@of_daemon
def add(
    daemon: Daemon,
    name: Name,
    role: Annotated[
        Literal["read", "submit", "node", "operate"],
        typer.Option(help="read looks, submit has jobs, node is for agents, operate may do all."),
    ],
    team: Annotated[str, typer.Option(help="For submit: team of its jobs (default: all).")] = "",
    to: Annotated[Path | None, typer.Option(help="New private file (otherwise printed).")] = None,
) -> Shown:
    """Make a token, valid at once. The daemon does not store it.

    Example: rollpacker mux token add alice --role submit --team math --to alice.token
    """
    asked = {"name": name, "role": role, "team": team}
    if to is None:
        text = daemon.post("/v1/tokens", asked)["token"]
        return Shown({"name": name, "token": text}, [text])
    with _new(to) as file:
        try:
            file.write(daemon.post("/v1/tokens", asked)["token"] + "\n")
        except (OSError, RuntimeError, ValueError):
            to.unlink()
            raise
    return Shown({"name": name, "file": str(to)}, [f"token {name}: in {to}"])


@token_app.command("list")
@shown
@of_daemon
def list_tokens(daemon: Daemon) -> Shown:
    """Show all tokens with their holders.

    Example: rollpacker mux token list
    """
    found = daemon.get("/v1/tokens")
    view = Table("name", "role", "team", "made")
    for each in found["tokens"]:
        made = time.strftime("%Y-%m-%d %H:%M", time.localtime(each["made_s"]))
        view.add_row(each["name"], each["role"], each["team"], made)
    return Shown(found, [view])


@token_app.command()
@shown
@of_daemon
def revoke(daemon: Daemon, name: Name) -> Shown:
    """Revoke a token at once.

    Example: rollpacker mux token revoke alice
    """
    daemon.post("/v1/tokens/revoke", {"name": name})
    return Shown({"name": name, "revoked": True}, [f"token {name}: revoked"])


def _new(path: Path) -> TextIO:
    """A private file, since commands accept no other token file."""
    try:
        return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w")
    except OSError as error:
        raise ValueError(f"--to {path}: {error.strerror}") from error
