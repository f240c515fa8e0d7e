"""``rollpacker mux agent``: the agent of a node."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from rollpacker.cli.mux.daemon import URL, Cafile, Url
from rollpacker.cli.output import print_aside, print_note

if TYPE_CHECKING:
    from rollpacker.rollmux.model.inventory import Machine
    from rollpacker.rollmux.node.agent import NodeAgent
    from rollpacker.rollmux.node.programs import NodePrograms


def agent(
    token_file: Annotated[Path, typer.Option(help="File with a bearer token.")],
    node: Annotated[str, typer.Option(help="This node's name (default: the host's).")] = "",
    url: Url = URL,
    cafile: Cafile = None,
    pool: Annotated[
        Literal["rollout", "train"] | None, typer.Option(help="Join the inventory, in this pool.")
    ] = None,
    memory_gb: Annotated[
        float | None, typer.Option(help="Memory in GB for states of jobs (default: all of it).")
    ] = None,
    devices: Annotated[int | None, typer.Option(help="GPUs (default: all of them).")] = None,
    rack: Annotated[str, typer.Option(help="Rack or island.")] = "",
    label: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="A label that jobs may require.")
    ] = None,
    programs: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Start programs of jobs as this user, with logs here."),
    ] = None,
    check: Annotated[str, typer.Option(help="Command that exits with 0 on a healthy node.")] = "",
    on_failed: Annotated[str, typer.Option(help="Command that empties the node.")] = "",
) -> None:
    """Report this node to the daemon, and start the programs of jobs here.

    Exits with 1 when the node has failed. A signal ends the agent only: programs continue, and the
    next agent with the same --programs finds them.

    Example: rollpacker mux agent --url https://head:8642 --token-file token --pool rollout
    --programs /var/lib/rollmux
    """
    from rollpacker.rollmux.node.agent import NodeAgent, check_command, identity
    from rollpacker.rollmux.service.client.client import MuxClient

    name = node or socket.gethostname()
    checking, emptying = shlex.split(check), shlex.split(on_failed)

    def empty() -> None:
        if emptying:
            check_command(emptying)

    reporter = NodeAgent(
        MuxClient(url, token_file, cafile=cafile),
        name,
        healthy=lambda: check_command(checking) if checking else None,
        on_failed=empty,
        machine=None
        if pool is None
        else found_machine(name, pool, memory_gb, devices, rack, label),
        programs=None
        if programs is None
        else node_programs(programs, url, token_file, cafile, name),
        identity=identity(programs),
        say=_log,
    )
    _report(reporter, name)


def _log(text: str) -> None:
    with suppress(OSError):  # a full disk must not make the node fail
        print_aside(text)


def _report(reporter: NodeAgent, name: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda _number, _frame: reporter.stop.set())
    # In another thread, since a signal handler could wait for the lock that ``set`` takes.
    with ThreadPoolExecutor(1, "reports") as pool:
        problem = pool.submit(reporter.run).result()
    if problem is not None:
        print_note(f"node {name} has failed: {problem}")
        raise typer.Exit(1)


def member(
    job: Annotated[str, typer.Argument(metavar="JOB", help="Its id.")],
    attempt: Annotated[int, typer.Argument(metavar="NUMBER", help="Number of its attempt.")],
    rank: Annotated[int, typer.Argument(help="Rank of this node in the job.")],
    token_file: Annotated[Path, typer.Option(help="File with a bearer token.")],
    url: Url = URL,
    cafile: Annotated[str, typer.Option(help="Trusted TLS certificate (empty for none).")] = "",
) -> None:
    """Serve a run's driver on another node. Agents start this if cluster.address is 'mux'.

    Example: rollpacker mux member job 1 2 --token-file token
    """
    from rollpacker.rollmux.node.join_driver import serve_driver
    from rollpacker.rollmux.service.client.client import MuxClient

    client = MuxClient(url, token_file, cafile=cafile or None)
    try:
        serve_driver(client, job, attempt, rank)
    except (EOFError, OSError) as error:
        raise RuntimeError(f"the driver of {job} is gone: {error}") from error


def found_machine(
    name: str,
    pool: Literal["rollout", "train"],
    memory_gb: float | None = None,
    devices: int | None = None,
    rack: str = "",
    labels: list[str] | None = None,
) -> Machine:
    """This node's description, by options and by what the machine has."""
    from rollpacker.rollmux.model.inventory import Machine

    if wrong := [label for label in labels or () if "=" not in label]:
        raise ValueError(f"--label {wrong[0]}: expected KEY=VALUE")
    all_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    found = sum(path.name[6:].isdigit() for path in Path("/dev").glob("nvidia*"))
    return Machine(
        name=name,
        pool=pool,
        memory_gb=memory_gb or all_gb,
        devices=devices or max(found, 1),
        rack=rack,
        labels=dict(label.split("=", 1) for label in labels or ()),
    )


def node_programs(
    folder: Path, url: str, token_file: Path, cafile: Path | None, node: str
) -> NodePrograms:
    """Starts programs of jobs, and fills in the agent's values."""
    from rollpacker.rollmux.node.programs import NodePrograms

    known = {
        "python": sys.executable,
        "url": url,
        "token_file": str(token_file.resolve()),
        "cafile": "" if cafile is None else str(cafile.resolve()),
        "node": node,
    }
    return NodePrograms(folder, known)
