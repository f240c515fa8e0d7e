"""An agent of RollMux on each node of a Ray cluster, as a detached actor that Ray restarts.

    ray start --head                                       # a node without a pool
    ray start --address HEAD:6379 --resources '{"rollout": 1}'
    ray start --address HEAD:6379 --resources '{"train": 1}'
    python examples/mux/ray_agents.py --url https://head:8642 --token-file /shared/node.token \
        --cafile /shared/cert.pem --programs /var/tmp/rollmux

Once more after nodes were added: those that have an agent keep it. ``--stop`` ends them all; what
they started is frozen after a lease. Ray schedules nothing on RollMux's nodes where they have no
other resources: ``ray start --num-cpus 0 --num-gpus 0``.
"""

from __future__ import annotations

import argparse
import os
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import ray  # pyright: ignore[reportMissingImports]
from ray.util.scheduling_strategies import (  # pyright: ignore[reportMissingImports]
    NodeAffinitySchedulingStrategy,
)

from rollpacker.cli.mux.agent import found_machine, node_programs
from rollpacker.rollmux.node.agent import NodeAgent
from rollpacker.rollmux.service.client import MuxClient

NAMESPACE = "rollmux"
POOLS = ("rollout", "train")


class Agent:
    """Reports one node for as long as it lives; Ray starts the next one where it ends."""

    def __init__(self, node: str, pool: Any, args: argparse.Namespace) -> None:
        agent = NodeAgent(
            MuxClient(args.url, args.token_file, cafile=args.cafile),
            node,
            machine=found_machine(node, pool),
            programs=node_programs(
                args.programs / node, args.url, args.token_file, args.cafile, node
            ),
            say=print,
        )

        def report() -> None:
            # The node was given up, or the token is refused: the next agent begins anew.
            try:
                agent.run()
            finally:
                os._exit(1)

        threading.Thread(target=report, daemon=True).start()

    def pid(self) -> int:
        """Of its process; answers once the agent is at work."""
        return os.getpid()


def members() -> list[tuple[str, str, str]]:
    """Name, id and pool of each node that has one; hosts with several are told apart by ids."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    hosts = Counter(node["NodeManagerHostname"] for node in alive)
    found: list[tuple[str, str, str]] = []
    for node in alive:
        host, number = node["NodeManagerHostname"], node["NodeID"]
        name = host if hosts[host] == 1 else f"{host[:48]}-{number[:8]}"
        found += [(name, number, pool) for pool in POOLS if pool in node["Resources"]]
    return found


def start(args: argparse.Namespace) -> None:
    """An agent on each node, unless it has one."""
    for name, number, pool in members():
        placed = NodeAffinitySchedulingStrategy(number, soft=False)
        actor: Any = ray.remote(Agent).options(
            name=f"agent-{name}",
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            num_cpus=0,
            scheduling_strategy=placed,
        )
        ray.get(actor.remote(name, pool, args).pid.remote())
        print(f"{name}: {pool}")


def stop() -> None:
    """End all agents."""
    for each in ray.util.list_named_actors(all_namespaces=True):
        if each["namespace"] == NAMESPACE:
            ray.kill(ray.get_actor(each["name"], NAMESPACE))


def main() -> None:
    parser = argparse.ArgumentParser(description="An agent of RollMux on each node of Ray.")
    parser.add_argument("--address", default="auto", help="of the Ray cluster")
    parser.add_argument("--url", default="http://127.0.0.1:8642", help="of the daemon")
    parser.add_argument("--token-file", type=Path, help="of role node, at this path on each node")
    parser.add_argument("--cafile", type=Path, help="certificate to trust, on each node")
    parser.add_argument("--programs", type=Path, help="folder on each node's own disk")
    parser.add_argument("--stop", action="store_true")
    args = parser.parse_args()
    if not args.stop and (args.token_file is None or args.programs is None):
        parser.error("--token-file and --programs are needed")
    ray.init(address=args.address, log_to_driver=False)
    stop() if args.stop else start(args)


if __name__ == "__main__":
    main()
