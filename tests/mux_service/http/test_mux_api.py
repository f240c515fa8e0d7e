"""The description of the API holds: real answers are of the described form, all codes are named."""

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from fastapi import FastAPI
from fastapi.routing import APIRoute
from mux_fleet import Daemon, Link
from pydantic import TypeAdapter

from rollpacker.rollmux import service
from rollpacker.rollmux.service.commands.commands import poll
from rollpacker.rollmux.service.commands.writer import Writer
from rollpacker.rollmux.service.http.app import make_app
from rollpacker.rollmux.service.http.logs import Logs
from rollpacker.rollmux.service.state.transaction_log import TransactionLog
from rollpacker.rollmux.service.store import Store
from rollpacker.rollmux.service.views.metrics import Metrics

SPEC = {"worst_rollout_s": 60.0, "worst_train_s": 60.0, "slo": 1.0, "iterations": 9}
STREAMS = ("/v1/journal", "/v1/events", "/v1/metrics")


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> FastAPI:
    folder = tmp_path_factory.mktemp("described")
    store = Store(folder / "mux.sqlite")
    return make_app(
        Writer(lambda: TransactionLog(store, None, 30.0), poll), Metrics(), Logs(folder)
    )


def described(app: FastAPI) -> dict[tuple[str, str], APIRoute]:
    return {
        (method, route.path): route
        for route in app.routes
        if isinstance(route, APIRoute) and route.include_in_schema
        for method in route.methods or ()
    }


def test_every_route_says_what_it_does_and_answers(app: FastAPI) -> None:
    for (method, path), route in described(app).items():
        assert route.description, path
        assert len(route.tags) == 1, path
        told = route.responses[route.status_code or 200]
        assert ("model" in told) == (path not in STREAMS), path
        assert "default" in route.responses, path
        assert method == "GET" or "404" in map(str, route.responses) or "{" not in path, path


def codes() -> set[str]:
    """All that the daemon's code gives for a reason."""
    folder = Path(service.__file__).parent
    calls = [
        node
        for path in folder.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Refused"
    ]
    keywords = [each for call in calls for each in call.keywords if each.arg == "code"]
    return {each.value.value for each in keywords if isinstance(each.value, ast.Constant)}  # type: ignore[misc]


def test_every_code_is_described(app: FastAPI) -> None:
    texts = " ".join(
        told["description"] for each in described(app).values() for told in each.responses.values()
    )
    assert len(codes()) > 10
    assert [code for code in sorted(codes()) if f"`{code}`" not in texts] == []


class Checked:
    """A link whose answers are held against the description."""

    def __init__(self, app: FastAPI, link: Link) -> None:
        self._routes = described(app)
        self._link = link
        self._count = 0
        self.seen: set[tuple[str, str]] = set()

    def ask(self, method: str, template: str, body: Any = None, **names: Any) -> Any:
        self._count += 1
        path = template.format(**names)
        status, found = self._link.once(method, path, body, f"key-{self._count}")
        template = template.partition("?")[0]
        told = self._routes[method, template].responses.get(status)
        assert told is not None, f"{path}: {status} {found}"
        if "model" in told:
            TypeAdapter(told["model"]).validate_json(json.dumps(found))
        if status >= 400:
            assert f"`{found.get('code', '')}`" in told["description"], found
        else:
            self.seen.add((method, template))
        return found


@pytest.fixture
def checked(app: FastAPI, tmp_path: Path) -> Iterator[Checked]:
    nodes = [{"name": "h20-[0-1]", "pool": "rollout"}, {"name": "h800-[0-1]", "pool": "train"}]
    teams = [{"name": "math", "rollout": 1, "train": 1}]
    (tmp_path / "nodes.yaml").write_text(yaml.safe_dump({"nodes": nodes, "teams": teams}))
    daemon = Daemon(tmp_path / "state", ttl=60.0, inventory=tmp_path / "nodes.yaml")
    daemon.start()
    yield Checked(app, Link(daemon.port, daemon.token))
    daemon.stop()


def test_answers_are_what_is_described(app: FastAPI, checked: Checked) -> None:
    get, post = "GET", "POST"
    program = {"program": {"command": ["true"], "environment": {"A": "1"}}}
    for name, more in (("a", program), ("b", {}), ("c", {})):
        checked.ask(post, "/v1/jobs", SPEC | {"id": name, "team": "math"} | more)
    permits, asks = "/v1/jobs/{job}/permits", {"phase": "rollout"}
    permit = checked.ask(post, permits, asks, job="a")
    checked.ask(post, permits, asks, job="a")
    checked.ask(post, permits, asks, job="none")
    checked.ask(post, permits, asks | {"wait_s": 0.1}, job="c")
    checked.ask(post, "/v1/jobs/{job}/tail", {"token": permit["token"]}, job="a")
    checked.ask(post, "/v1/permits/{token}/heartbeat", {}, token=permit["token"])
    look(checked)
    checked.ask(post, "/v1/permits/{token}/finish", {"seconds": 1.0}, token=permit["token"])
    checked.ask(post, "/v1/permits/{token}/finish", {"seconds": 1.0}, token=permit["token"])
    checked.ask(post, permits, asks, job="a")
    permit = checked.ask(post, permits, {"phase": "train"}, job="a")
    checked.ask(post, "/v1/permits/{token}/abandon", {}, token=permit["token"])
    permit = checked.ask(post, permits, {"phase": "train"}, job="a")
    node = checked.ask(get, "/v1/jobs/{job}", job="a")["rollout_nodes"][0]
    checked.ask(post, "/v1/nodes/{node}/remove", {}, node=node)
    log = "/v1/jobs/{job}/log"
    checked.ask(get, log, job="a")
    checked.ask(get, log, job="b")
    told = checked.ask(post, "/v1/nodes/{node}/heartbeat", {"attempts": []}, node=node)
    assert [each["job"] for each in told["attempts"]] == ["a"]
    gate = "/v1/jobs/{job}/gate"
    assert checked.ask(get, f"{gate}?attempt=1", job="a")["code"] == "no_gate"
    opened = {"host": "10.0.0.1", "port": 7, "key": "ab" * 80, "names": ["node-0-0"]}
    checked.ask(post, gate, opened, job="a")
    assert checked.ask(get, f"{gate}?attempt=1", job="a") == opened
    assert checked.ask(get, f"{gate}?attempt=2", job="a")["code"] == "no_gate"
    assert checked.ask(post, gate, opened, job="b")["code"] == "no_attempt"
    printed = {"at": 0, "data": "bm8K"}
    checked.ask(post, "/v1/jobs/{job}/attempts/{number}/log", printed, job="a", number=1)
    assert checked.ask(get, log, job="a")["data"] == "bm8K"
    closed = {"status": "draining", "reason": "new cables"}
    checked.ask(post, "/v1/nodes/{node}/close", closed, node=node)
    checked.ask(post, "/v1/nodes/{node}/close", closed, node="none")
    checked.ask(post, "/v1/nodes/{node}/open", {}, node=node)
    checked.ask(post, "/v1/jobs/{job}/end", {}, job="b")
    checked.ask(post, "/v1/nodes/{node}/failed", {}, node=permit["nodes"][0])
    checked.ask(post, "/v1/nodes/{node}/heartbeat", {}, node=permit["nodes"][0])
    checked.ask(post, "/v1/permits/{token}/abandon", {}, token=permit["token"])
    checked.ask(post, "/v1/nodes/{node}/open", {}, node=permit["nodes"][0])
    checked.ask(post, "/v1/nodes/{node}/heartbeat", {}, node=node)
    new = {"name": "h800-2", "pool": "train"}
    checked.ask(post, "/v1/nodes", new)
    checked.ask(post, "/v1/nodes", new | {"name": "h800-3"})
    look(checked)
    move = checked.ask(post, permits, asks, job="a")["move"]
    look(checked)
    checked.ask(post, "/v1/jobs/{job}/moved", {"move": move["id"]}, job="a")
    for name in ("a", "c"):
        checked.ask(post, "/v1/jobs/{job}/end", {}, job=name)
    checked.ask(post, "/v1/nodes/{node}/remove", {}, node="h800-3")
    checked.ask(post, "/v1/drain", {"draining": True})
    checked.ask(post, "/v1/jobs", SPEC | {"id": "late"})
    look(checked)
    assert described(app).keys() - checked.seen == set()


def look(checked: Checked) -> None:
    """Everything that can be looked at."""
    for path in ("/v1/status", "/v1/timeline", "/v1/jobs", "/v1/health", *STREAMS):
        checked.ask("GET", path)
    for job in ("a", "b", "c", "none"):
        checked.ask("GET", "/v1/jobs/{job}", job=job)
    for node in ("h20-0", "h800-0", "none"):
        checked.ask("GET", "/v1/nodes/{node}", node=node)
