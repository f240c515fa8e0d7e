"""The description of the API holds: real answers are of the described form, all codes are named."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints, is_typeddict

import msgspec
import pytest
import yaml
from mux_fleet import Daemon, Link

from rollpacker.rollmux import service
from rollpacker.rollmux.service.http.routes import ROUTES, Route, described

SPEC = {"worst_rollout_s": 60.0, "worst_train_s": 60.0, "slo": 1.0, "iterations": 9}
STREAMS = ("/v1/journal", "/v1/events", "/v1/metrics")


def test_every_route_says_what_it_does_and_answers() -> None:
    rows = {name: row for name, row in ROUTES.items() if row.answer is not None}
    assert len(rows) > 25
    for name, row in rows.items():
        assert row.act.__doc__, name
        assert isinstance(row.answer, str) == (name.split(" ")[1] in STREAMS), name
        assert name.startswith("GET") or 404 in row.errors or "{" not in name, name


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


def texts(row: Route) -> dict[int, str]:
    return {
        status: text if isinstance(text, str) else text[0] for status, text in row.errors.items()
    }


def test_every_code_is_described() -> None:
    told = " ".join(text for row in ROUTES.values() for text in texts(row).values())
    told += str(described()["paths"]["/v1/status"]["get"]["responses"]["default"])
    assert len(codes()) > 10
    assert [code for code in sorted(codes()) if f"`{code}`" not in told] == []


def fits(found: Any, kind: Any) -> bool:
    """Whether an answer has the fields of a type, and no other."""
    if not is_typeddict(kind):
        msgspec.convert(found, kind)
        return True
    hints = get_type_hints(kind)
    for name, value in found.items():
        if name not in hints:
            return False
        for inner in (hints[name], *get_args(hints[name])):
            if is_typeddict(inner):
                each = value if isinstance(value, list) else [value] * (value is not None)
                if not all(fits(one, inner) for one in each):
                    return False
    msgspec.convert(found, kind)
    return True


class Checked:
    """A link whose answers are held against the description."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._count = 0
        self.seen: set[str] = set()

    def ask(self, method: str, template: str, body: Any = None, **names: Any) -> Any:
        self._count += 1
        path = template.format(**names)
        status, found = self._link.once(method, path, body, f"key-{self._count}")
        name = f"{method} {template.partition('?')[0]}"
        row = ROUTES[name]
        told = row.errors.get(status)
        if status == row.status:
            kinds = row.answer if isinstance(row.answer, tuple) else (row.answer,)
            assert isinstance(row.answer, str) or any(fits(found, kind) for kind in kinds), found
        elif isinstance(told, tuple):
            assert told[1] is None or fits(found, told[1]), found
        else:
            assert told is not None, f"{path}: {status} {found}"
            assert f"`{found.get('code', '')}`" in told, found
        if status < 400:
            self.seen.add(name)
        return found


@pytest.fixture
def checked(tmp_path: Path) -> Iterator[Checked]:
    nodes = [{"name": "h20-[0-1]", "pool": "rollout"}, {"name": "h800-[0-1]", "pool": "train"}]
    teams = [{"name": "math", "rollout": 1, "train": 1}]
    (tmp_path / "nodes.yaml").write_text(yaml.safe_dump({"nodes": nodes, "teams": teams}))
    daemon = Daemon(tmp_path / "state", ttl=60.0, inventory=tmp_path / "nodes.yaml")
    daemon.start()
    yield Checked(Link(daemon.port, daemon.token))
    daemon.stop()


def test_answers_are_what_is_described(checked: Checked) -> None:
    get, post = "GET", "POST"
    program = {"program": {"command": ["true"], "environment": {"A": "1"}}}
    checked.ask(post, "/v1/nodes/{node}/heartbeat", {"attempts": []}, node="h20-0")
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
    checked.ask(post, "/v1/nodes/{node}/heartbeat", {"attempts": []}, node=node)
    new = {"name": "h800-2", "pool": "train"}
    checked.ask(post, "/v1/nodes", new)
    checked.ask(post, "/v1/nodes", new | {"name": "h800-3"})
    look(checked)
    move = checked.ask(post, permits, asks, job="a")["move"]
    look(checked)
    checked.ask(post, "/v1/jobs/{job}/moved", {"move": move["id"]}, job="a")
    for held in (True, False):
        checked.ask(post, "/v1/jobs/{job}/change", {"held": held, "priority": 1}, job="a")
        look(checked)
    for name in ("a", "c"):
        checked.ask(post, "/v1/jobs/{job}/end", {}, job=name)
    checked.ask(post, "/v1/jobs/{job}/change", {}, job="a")
    checked.ask(post, "/v1/nodes/{node}/remove", {}, node="h800-3")
    token = {"name": "alice", "role": "submit", "team": "math"}
    checked.ask(post, "/v1/tokens", token)
    checked.ask(get, "/v1/tokens")
    checked.ask(post, "/v1/tokens/revoke", {"name": "alice"})
    checked.ask(post, "/v1/tokens/revoke", {"name": "alice"})
    checked.ask(post, "/v1/drain", {"draining": True})
    checked.ask(post, "/v1/jobs", SPEC | {"id": "late"})
    look(checked)
    assert {name for name, row in ROUTES.items() if row.answer is not None} - checked.seen == set()


def look(checked: Checked) -> None:
    """Everything that can be looked at."""
    for path in ("/v1/status", "/v1/timeline", "/v1/jobs", "/v1/health", *STREAMS):
        checked.ask("GET", path)
    for job in ("a", "b", "c", "none"):
        checked.ask("GET", "/v1/jobs/{job}", job=job)
    for node in ("h20-0", "h800-0", "none"):
        checked.ask("GET", "/v1/nodes/{node}", node=node)
