"""``rollpacker mux node``: what an owner does with named nodes."""

from __future__ import annotations

import urllib.parse
from typing import Annotated, Any

import typer
from rich.table import Column, Table

from rollpacker.cli.mux.daemon import Daemon, of_daemon
from rollpacker.cli.mux.words import duration
from rollpacker.cli.output import Json, console, print_found, print_json

node_app = typer.Typer(help="Nodes of an inventory.", no_args_is_help=True)
Node = Annotated[str, typer.Argument(metavar="NODE", help="Its name.")]
Reason = Annotated[str, typer.Option(help="For people: why.")]


@node_app.command("list")
@of_daemon
def list_nodes(
    daemon: Daemon,
    as_json: Json = False,
) -> None:
    """Show all nodes: what they are, whether they may be used, who is on them.

    Example: rollpacker mux node list
    """
    nodes = daemon.get("/v1/status")["nodes"]
    if as_json:
        print_json({"nodes": nodes})
        return
    view = Table(
        "node", "pool", "state", "status", Column("jobs", overflow="fold"), "rack", "agent"
    )
    for node in nodes:
        status, machine = node.get("status", ""), node.get("machine", {})
        why = f" ({node['why']})" if node.get("why") else ""
        jobs = " ".join(node["memory_gb"])
        heard = node["reported_s"]
        view.add_row(
            *(node["name"], node["pool"], node["state"], status + why, jobs),
            *(machine.get("rack", ""), "none" if heard is None else f"{duration(heard)} ago"),
        )
    console.print(view)


@node_app.command()
@of_daemon
def cordon(
    daemon: Daemon,
    node: Node,
    reason: Reason = "",
    as_json: Json = False,
) -> None:
    """Put no more jobs on a node; those that are there stay.

    Example: rollpacker mux node cordon h20-07 --reason "slow link"
    """
    body = {"status": "cordoned", "reason": reason}
    _post(daemon, node, "close", body, as_json)


@node_app.command()
@of_daemon
def drain(
    daemon: Daemon,
    node: Node,
    reason: Reason = "",
    as_json: Json = False,
) -> None:
    """Put no more jobs on a node, and move those that are there when their iterations are over.

    Example: rollpacker mux node drain h20-07 --reason "new cables"
    """
    body = {"status": "draining", "reason": reason}
    _post(daemon, node, "close", body, as_json)


@node_app.command()
@of_daemon
def uncordon(
    daemon: Daemon,
    node: Node,
    as_json: Json = False,
) -> None:
    """Use a node again.

    Example: rollpacker mux node uncordon h20-07
    """
    _post(daemon, node, "open", {}, as_json)


@node_app.command()
@of_daemon
def remove(
    daemon: Daemon,
    node: Node,
    as_json: Json = False,
) -> None:
    """Take a node that nobody is on out of the inventory.

    Example: rollpacker mux node remove h20-07
    """
    _post(daemon, node, "remove", {}, as_json)


def _post(daemon: Daemon, node: str, what: str, body: dict[str, Any], as_json: bool) -> None:
    found = daemon.post(f"/v1/nodes/{urllib.parse.quote(node, safe='')}/{what}", body)
    status, jobs = found.get("status", "removed"), found.get("jobs", [])
    on = f", still on it: {' '.join(jobs)}" if jobs else ""
    again = daemon.command("node", "uncordon", node)
    back = f"; to use it again: {again}" if what == "close" else ""
    print_found(found, as_json, f"node {node}: {status}{on}{back}")
