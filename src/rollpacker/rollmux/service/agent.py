"""A node's agent: reports it as alive, reports it as failed, and empties it when it is given up.

    python -m rollpacker.rollmux.service.agent --url URL --token-file FILE --node r0 \\
        --check 'nvidia-smi' --on-failed 'systemctl stop rollpacker.slice'
"""

from __future__ import annotations

import argparse
import shlex
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

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
    """

    def __init__(
        self,
        client: MuxClient,
        node: str,
        *,
        healthy: Callable[[], str | None] = lambda: None,
        on_failed: Callable[[], None] = lambda: None,
        retry_s: float = 5.0,
    ) -> None:
        self._client = client
        self._node = node
        self._healthy = healthy
        self._on_failed = on_failed
        self._retry_s = retry_s
        self.stop = threading.Event()

    def run(self) -> str | None:
        """Report until stopped (None), or until the node has failed: why."""
        ttl_s: float | None = None
        while not self.stop.is_set():
            problem = self._healthy()
            if problem is not None:
                self._on_failed()
                self._report(problem)
                return problem
            try:
                # Before the first answer the daemon does not count on this node: no hurry.
                ttl_s = self._client.node_alive(self._node, patience_s=ttl_s)
            except MuxError as error:
                if error.status == _GONE:
                    self._on_failed()
                    return str(error)
                if error.status != _UNKNOWN:
                    raise
                # Not in use yet, or given back: nobody counts on it.
                ttl_s = None
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run an agent; 0 when it was stopped, 1 when its node has failed."""
    parser = argparse.ArgumentParser(description="Reports a node to a RollMux daemon.")
    parser.add_argument("--url", required=True)
    parser.add_argument("--token-file", required=True, type=Path)
    parser.add_argument("--cafile", type=Path, help="certificate to trust (https)")
    parser.add_argument("--node", required=True)
    parser.add_argument("--check", default="", help="command that exits with 0 while all is well")
    parser.add_argument("--on-failed", default="", help="command that empties the node")
    args = parser.parse_args(arguments)
    check, empty = shlex.split(args.check), shlex.split(args.on_failed)

    def on_failed() -> None:
        if empty:
            check_command(empty)

    agent = NodeAgent(
        MuxClient(args.url, args.token_file, cafile=args.cafile),
        args.node,
        healthy=lambda: check_command(check) if check else None,
        on_failed=on_failed,
    )
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda _number, _frame: agent.stop.set())
    return 0 if agent.run() is None else 1


if __name__ == "__main__":
    raise SystemExit(main())
