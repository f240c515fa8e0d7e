"""A daemon with a job of its own, and everybody who may ask it for something."""

from pathlib import Path
from typing import Any

import yaml
from mux_fleet import Daemon, Link

from rollpacker.rollmux.service.client.client import MuxClient, new_key

SPEC = {"worst_rollout_s": 60.0, "worst_train_s": 60.0, "slo": 9.0, "iterations": 9}
PEOPLE = {
    "read": {"name": "wall", "role": "read"},
    "code": {"name": "bob", "role": "submit", "team": "code"},
    "math": {"name": "alice", "role": "submit", "team": "math"},
    "node": {"name": "agent", "role": "node"},
    "other": {"name": "agent-2", "role": "node"},
}


class Place:
    """Team ``math`` has the job ``mine``, with a program that runs and a permit."""

    def __init__(self, folder: Path) -> None:
        nodes = [{"name": "r[0-1]", "pool": "rollout"}, {"name": "t[0-1]", "pool": "train"}]
        teams = [{"name": team, "rollout": 1, "train": 1} for team in ("math", "code")]
        (folder / "nodes.yaml").write_text(yaml.safe_dump({"nodes": nodes, "teams": teams}))
        self.daemon = Daemon(folder / "state", ttl=60.0, inventory=folder / "nodes.yaml")
        self.daemon.start()
        self.folder = folder
        operator = Link(self.daemon.port, self.daemon.token)
        tokens = {
            who: operator.once("POST", "/v1/tokens", each, new_key())[1]["token"]
            for who, each in PEOPLE.items()
        }
        operator.close()
        tokens |= {"operate": self.daemon.token, "nobody": "no-token-at-all-but-long"}
        self.tokens = tokens
        self.links = {who: Link(self.daemon.port, token) for who, token in tokens.items()}
        self._count = 0
        program = {
            "command": ["true", "rewards.0.options.api_key=hunter2"],
            "environment": {"SECRET": "hunter2"},
        }
        self.ask("node", "POST", "/v1/nodes/r0/heartbeat", {"attempts": []})
        self.ask(
            "math", "POST", "/v1/jobs", SPEC | {"id": "mine", "team": "math", "program": program}
        )
        self.node = self.ask("read", "GET", "/v1/jobs/mine")[1]["rollout_nodes"][0]
        self.ask("node", "POST", f"/v1/nodes/{self.node}/heartbeat", {"attempts": []})
        asked = self.ask("math", "POST", "/v1/jobs/mine/permits", {"phase": "rollout"})
        self.permit: int = asked[1]["token"]

    def ask(self, who: str, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """A request with a key of its own."""
        self._count += 1
        body = {} if body is None and method == "POST" else body
        return self.links[who].once(method, path, body, f"key-{self._count}")

    def client(self, who: str) -> MuxClient:
        """As a job or an agent talks to the daemon."""
        file = self.folder / f"{who}.token"
        file.write_text(self.tokens[who], encoding="utf-8")
        file.chmod(0o600)
        return MuxClient(f"http://127.0.0.1:{self.daemon.port}", file)

    def path(self, template: str) -> str:
        """One that is about the job."""
        part, number = "dashboard.js", 1
        return template.format(
            job="mine", node=self.node, token=self.permit, number=number, part=part
        )

    def job(self) -> dict[str, Any]:
        """What of the job nobody else can change."""
        found = self.ask("operate", "GET", "/v1/jobs/mine")[1]
        kept = ("state", "spec", "done", "next", "rollout_nodes", "train_nodes", "program")
        return {name: found[name] for name in kept} | {"token": found["permit"]["token"]}

    def close(self) -> None:
        """Stop."""
        for link in self.links.values():
            link.close()
        self.daemon.stop()
