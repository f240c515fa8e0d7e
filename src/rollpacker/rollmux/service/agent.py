"""A node's agent: reports it as alive, reports it as failed, and empties it when it is given up.

    python -m rollpacker.rollmux.service.agent --url URL --token-file FILE --node r0 \\
        --check 'nvidia-smi' --on-failed 'systemctl stop rollpacker.slice'
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from rollpacker.rollmux.inventory import POOL_NAMES, Machine
from rollpacker.rollmux.service.client import MuxClient
from rollpacker.rollmux.service.link import MuxError, UnreachableError

_CHECK_TIMEOUT_S = 30.0
_GONE = 410
_UNKNOWN = 404


class NodeAgent:
    """Reports one node until it fails or ``stop`` is set.

    Args:
        client: of the daemon.
        node: its name.
        healthy: None while the node works, else what is wrong with it.
        on_failed: stops everything on the node; called once, when the node is given up by either
            side. While the daemon is away nothing is: what runs there is bounded by its leases.
        retry_s: pause while the daemon does not use the node.
        machine: what the node is: it joins the daemon's inventory as this. None in a cloud.
    """

    def __init__(
        self,
        client: MuxClient,
        node: str,
        *,
        healthy: Callable[[], str | None] = lambda: None,
        on_failed: Callable[[], None] = lambda: None,
        retry_s: float = 5.0,
        machine: Machine | None = None,
    ) -> None:
        self._client = client
        self._node = node
        self._healthy = healthy
        self._on_failed = on_failed
        self._retry_s = retry_s
        self._machine = machine
        self.stop = threading.Event()

    def run(self) -> str | None:
        """Report until stopped (None), or until the node has failed: why."""
        ttl_s: float | None = None
        joins = self._machine is not None
        while not self.stop.is_set():
            problem = self._healthy()
            if problem is not None:
                self._on_failed()
                self._report(problem)
                return problem
            try:
                # Before the first answer the daemon does not count on this node: no hurry.
                if joins and self._machine is not None:
                    ttl_s = self._client.register(self._machine)
                    joins = False
                else:
                    ttl_s = self._client.node_alive(self._node, patience_s=ttl_s)
            except MuxError as error:
                if error.status == _GONE:
                    self._on_failed()
                    return str(error)
                if error.status != _UNKNOWN:
                    raise
                # Not in use yet, given back, or removed: nobody counts on it.
                ttl_s = None
                joins = self._machine is not None
                self.stop.wait(self._retry_s)
                continue
            except UnreachableError:
                continue
            self.stop.wait(ttl_s / 3)
        return None

    def _report(self, problem: str) -> None:
        """Say that the node has failed; its silence says so too where nobody hears it."""
        try:
            self._client.node_failed(self._node, problem)
        except UnreachableError:
            return
        except MuxError as error:
            if error.status not in (_GONE, _UNKNOWN):
                raise


def check_command(command: Sequence[str]) -> str | None:
    """Run a health check: None when it exits with 0 in time, else what it said."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_CHECK_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{command[0]}: {error}"
    if done.returncode == 0:
        return None
    said = (done.stderr or done.stdout).strip().splitlines()
    return f"{command[0]} exited with {done.returncode}: {said[-1] if said else 'no output'}"


def _machine(args: argparse.Namespace, parser: argparse.ArgumentParser) -> Machine:
    """What this node is, by what was given and what can be seen."""
    if wrong := [label for label in args.label if "=" not in label]:
        parser.error(f"--label {wrong[0]}: expected KEY=VALUE")
    memory_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    found = sum(path.name[6:].isdigit() for path in Path("/dev").glob("nvidia*"))
    try:
        return Machine(
            name=args.node,
            pool=args.pool,
            memory_gb=args.memory_gb or memory_gb,
            devices=args.devices or max(found, 1),
            rack=args.rack,
            labels=dict(label.split("=", 1) for label in args.label),
        )
    except ValueError as error:
        parser.error(str(error))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run an agent; 0 when it was stopped, 1 when its node has failed."""
    parser = argparse.ArgumentParser(description="Reports a node to a RollMux daemon.")
    parser.add_argument("--url", required=True)
    parser.add_argument("--token-file", required=True, type=Path)
    parser.add_argument("--cafile", type=Path, help="certificate to trust (https)")
    parser.add_argument("--node", required=True)
    parser.add_argument("--pool", choices=POOL_NAMES, help="join the inventory, in this pool")
    parser.add_argument("--memory-gb", type=float, help="for states of jobs; default: all")
    parser.add_argument("--devices", type=int, help="GPUs; default: those that are there")
    parser.add_argument("--rack", default="", help="or island")
    parser.add_argument(
        "--label", action="append", default=[], metavar="KEY=VALUE", help="jobs may ask for it"
    )
    parser.add_argument("--check", default="", help="command that exits with 0 while all is well")
    parser.add_argument("--on-failed", default="", help="command that empties the node")
    args = parser.parse_args(arguments)
    check, empty = shlex.split(args.check), shlex.split(args.on_failed)

    def on_failed() -> None:
        if empty:
            check_command(empty)

    agent = NodeAgent(
        machine=None if args.pool is None else _machine(args, parser),
        client=MuxClient(args.url, args.token_file, cafile=args.cafile),
        node=args.node,
        healthy=lambda: check_command(check) if check else None,
        on_failed=on_failed,
    )
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda _number, _frame: agent.stop.set())
    return 0 if agent.run() is None else 1


if __name__ == "__main__":
    raise SystemExit(main())
