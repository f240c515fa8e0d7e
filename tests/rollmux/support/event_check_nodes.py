"""What an event log says of nodes: who is pinned there, what they are, whether they are open."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

EPSILON = 1e-6
Bad = Callable[[str, str], None]
"""Takes a rule and how it was broken."""


class NodeChecker:
    """Follows the nodes of a log.

    Args:
        meta: the log's first line.
        bad: what to do with a violation.
    """

    def __init__(self, meta: Mapping[str, Any], bad: Bad) -> None:
        self._bad = bad
        self._cap = float(meta["memory_cap_gb"])
        self._machines = {each["name"]: each for each in meta.get("machines", ())}
        self._named = meta.get("nodes", "cloud") == "named"
        self._closed: set[str] = set()
        self._teams = {each["name"]: each for each in meta.get("teams", ())}
        self.pins: dict[str, dict[str, float]] = {}
        """GB on each node by job."""
        self.dead: set[str] = set()

    def pin(
        self, name: str, spec: Mapping[str, Any], event: Mapping[str, Any], had: set[str]
    ) -> None:
        """A job takes nodes; ``had``: those that it had before."""
        if self._named:
            self._check_machines(name, spec, event["nodes"], had)
        if set(event["nodes"]) != set(event["memory_gb"]):
            self._bad("residency", f"{name}: memory_gb is not of its nodes")
        for node, gb in event["memory_gb"].items():
            if node in self.dead:
                self._bad("dead_node", f"{name} was put on {node}, which is down")
            pins = self.pins.setdefault(node, {})
            pins[name] = float(gb)
            total = sum(pins.values())
            cap = float(self._machines.get(node, {}).get("memory_gb", self._cap))
            if total > cap + EPSILON:
                self._bad("memory", f"{node} holds {total:.1f} GB of {cap:g}")

    def _check_machines(
        self, name: str, spec: Mapping[str, Any], nodes: Collection[str], had: set[str]
    ) -> None:
        """Nodes of an inventory: known, open, and what the job asked for."""
        counts = {"rollout": 0, "train": 0}
        for node in nodes:
            machine = self._machines.get(node)
            if machine is None:
                self._bad("unknown_node", f"{name} is put on {node}, which nobody has")
                continue
            counts[machine["pool"]] += 1
            if node in self._closed and node not in had:
                self._bad("closed_node", f"{name} is put on {node}, which is closed")
            wanted = spec.get(f"{machine['pool']}_labels", {})
            lacks = any(machine["labels"].get(key) != wanted[key] for key in wanted)
            if lacks or machine["devices"] < spec.get("node_devices", 1):
                self._bad("unsuitable", f"{name} is put on {node}, which is not what it asked for")
        for pool, count in counts.items():
            most = spec[f"{pool}_nodes"]
            if count != most:
                self._bad("gang", f"{name} gets {count} {pool} nodes, asked for {most}")

    def unpin(self, name: str, nodes: Collection[str]) -> None:
        """A job leaves nodes."""
        for node in nodes:
            self.pins.get(node, {}).pop(name, None)

    def borrows(self, team: str, team_of: Callable[[str], str]) -> bool:
        """Whether a team has more than its own; a node counts for its jobs in equal parts."""
        used = {"rollout": 0.0, "train": 0.0}
        for node, pins in self.pins.items():
            ours = sum(team_of(name) == team for name in pins)
            if ours and node in self._machines:
                used[self._machines[node]["pool"]] += ours / len(pins)
        owned = self._teams.get(team, {"rollout": 0.0, "train": 0.0})
        return any(used[pool] > owned[pool] + EPSILON for pool in used)

    def up(self, event: Mapping[str, Any]) -> None:
        """A machine is there."""
        machine = event["machine"]
        self._machines[machine["name"]] = machine
        self.dead.discard(machine["name"])

    def closed(self, event: Mapping[str, Any]) -> None:
        """Nothing new may come to these."""
        self._closed.update(event["nodes"])

    def opened(self, event: Mapping[str, Any]) -> None:
        """These are used again."""
        self._closed.difference_update(event["nodes"])

    def removed(self, event: Mapping[str, Any]) -> None:
        """These are not in the inventory any more."""
        for node in event["nodes"]:
            if self.pins.get(node):
                self._bad("lost_nodes", f"{node} is removed with jobs on it")
            self._closed.discard(node)
            self._machines.pop(node, None)
