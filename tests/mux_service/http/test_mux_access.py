"""Every route with every role and without a token, in its one spelling and in others."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mux_strangers import Place

from rollpacker.rollmux.service.api.roles import OPERATOR
from rollpacker.rollmux.service.commands.commands import poll
from rollpacker.rollmux.service.commands.writer import Writer
from rollpacker.rollmux.service.http.app import App
from rollpacker.rollmux.service.http.logs import Logs
from rollpacker.rollmux.service.http.routes import ROUTES, DaemonParts
from rollpacker.rollmux.service.http.tokens import Tokens
from rollpacker.rollmux.service.state.transaction_log import TransactionLog
from rollpacker.rollmux.service.store import Store
from rollpacker.rollmux.service.views.metrics import Metrics

PEOPLE = ("nobody", "read", "code", "math", "node", "operate")
"""``math`` owns the job that is asked about, ``code`` is another team."""
MAY = {
    "GET /": "######",
    "GET /favicon.ico": "######",
    "GET /assets/{part}": "######",
    "GET /v1/health": "######",
    "GET /v1/openapi.json": ".#####",
    "GET /v1/status": ".#####",
    "GET /v1/timeline": ".#####",
    "GET /v1/metrics": ".#####",
    "GET /metrics": ".#####",
    "GET /v1/events": ".#####",
    "GET /v1/journal": ".....#",
    "POST /v1/jobs": "...#.#",
    "GET /v1/jobs": ".#####",
    "GET /v1/jobs/{job}": ".#####",
    "POST /v1/jobs/{job}/permits": "...###",
    "POST /v1/jobs/{job}/tail": "...###",
    "POST /v1/jobs/{job}/moved": "...###",
    "POST /v1/jobs/{job}/gate": "....##",
    "GET /v1/jobs/{job}/gate": "....##",
    "POST /v1/jobs/{job}/attempts/{number}/log": "....##",
    "GET /v1/jobs/{job}/log": ".#####",
    "POST /v1/permits/{token}/heartbeat": "...###",
    "POST /v1/permits/{token}/finish": "...###",
    "POST /v1/permits/{token}/abandon": "...###",
    "POST /v1/nodes": "....##",
    "GET /v1/nodes/{node}": ".#####",
    "POST /v1/nodes/{node}/heartbeat": "....##",
    "POST /v1/nodes/{node}/failed": "....##",
    "POST /v1/nodes/{node}/close": ".....#",
    "POST /v1/nodes/{node}/open": ".....#",
    "POST /v1/nodes/{node}/remove": ".....#",
    "GET /v1/tokens": ".....#",
    "POST /v1/tokens": ".....#",
    "POST /v1/tokens/revoke": ".....#",
    "POST /v1/drain": ".....#",
    "POST /v1/jobs/{job}/end": "...###",
    "POST /v1/jobs/{job}/change": "...###",
}
BODIES: dict[str, Any] = {
    # Refused for what they ask where they are let in, so that all find the same.
    "POST /v1/jobs": {"id": "mine", "worst_rollout_s": 1.0, "worst_train_s": 1.0, "team": "math"},
    "POST /v1/jobs/{job}/permits": {"phase": "train", "wait_s": 5},
    "POST /v1/jobs/{job}/tail": {"token": 10**6},
    "POST /v1/jobs/{job}/moved": {"move": 10**6},
    "POST /v1/jobs/{job}/gate": {},
    "POST /v1/jobs/{job}/attempts/{number}/log": {"at": 0, "data": ""},
    "POST /v1/permits/{token}/finish": {"seconds": 0},
    "POST /v1/permits/{token}/abandon": {"no": "field"},
    "POST /v1/jobs/{job}/end": {"no": "field"},
    "POST /v1/jobs/{job}/change": {"no": "field"},
    "POST /v1/nodes": {"name": "-", "pool": "train"},
    "POST /v1/nodes/{node}/failed": {"no": "field"},
    "POST /v1/nodes/{node}/close": {"status": "none"},
    "POST /v1/nodes/{node}/remove": {"no": "field"},
    "POST /v1/tokens": {"name": "operator", "role": "read"},
    "POST /v1/tokens/revoke": {"name": "none"},
    "POST /v1/drain": {"draining": False},
}
MEANT: dict[str, Any] = {
    # What would be carried out: somebody else's team asks for that.
    "POST /v1/permits/{token}/finish": {"seconds": 1.0},
    "POST /v1/permits/{token}/abandon": {},
    "POST /v1/jobs/{job}/end": {},
    "POST /v1/jobs/{job}/change": {"held": True},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    made = Place(tmp_path_factory.mktemp("access"))
    yield made
    made.close()


def target(template: str) -> str:
    query = {"/v1/jobs/{job}/gate": "?attempt=1"}
    return f"{template}{query.get(template, '')}"


def test_every_route_with_every_role(place: Place) -> None:
    before = place.job()
    found = {}
    for name in ROUTES:
        method, template = name.split(" ")
        path = place.path(target(template) if method == "GET" else template)
        bodies = dict.fromkeys(PEOPLE, BODIES.get(name)) | {"code": (BODIES | MEANT).get(name)}
        statuses = {who: place.ask(who, method, path, bodies[who])[0] for who in PEOPLE}
        assert 500 not in statuses.values(), name
        assert statuses["nobody"] == 401 or MAY[name].startswith("#"), name
        found[name] = "".join(".#"[statuses[who] not in (401, 403)] for who in PEOPLE)
    print("\n" + "\n".join(f"{line}  {name}" for name, line in found.items()))
    assert found == MAY
    assert place.job() == before


def spellings(path: str) -> Iterator[str]:
    """Others than its own."""
    yield from (f"{path}{end}" for end in ("%0A", "%0D%0A", "%00", "/", "%2F", "%20", ";x", "/."))
    yield from (f"{path}%{end}" for end in ("09", "3F", "23", "C0%AF", "EF%BC%8F", "E2%80%A8"))
    yield from (f"/{path}", f"/.{path}", f"/x/..{path}", f"/%2e%2e{path}", f"http://h{path}")
    yield from (path.upper(), path.replace("/", "//"), path.replace("/", "%2F"), f"{path}\\")
    yield f"{path[:-1]}%{ord(path[-1]):02x}"
    yield f"/%{ord(path[1]):02X}{path[2:]}" if len(path) > 1 else "/%2F"


def numbers(path: str, number: int) -> Iterator[str]:
    """Other ways to write a number in a path."""
    for text in ("+{}", "%2B{}", "0{}", "{}.0", "%20{}", "{}%20", "{}_0", "-{}", "{}e0", "0x{}"):
        yield path.replace(f"/{number}/", f"/{text.format(number)}/")
    yield path.replace(f"/{number}/", f"/{number}{'0' * 40}/")
    digits = "".join(f"%EF%BC%{0x90 + int(digit):X}" for digit in str(number))
    yield path.replace(f"/{number}/", f"/{digits}/")


def test_a_route_has_one_spelling(place: Place) -> None:
    before, count = place.job(), 0
    for name in ROUTES:
        method, template = name.split(" ")
        path = place.path(template)
        others = {*spellings(path)} - {path}
        assert len(others) >= 20, name
        for part, number in (("{token}", place.permit), ("{number}", 1)):
            others |= {*numbers(path, number)} if part in template else set()
        for other in sorted(others):
            for who in PEOPLE:
                status, told = place.ask(who, method, other, BODIES.get(name))
                assert status == (401 if who == "nobody" else 404), (name, other, who, told)
                count += 1
    print(f"\n{count} requests in {len(ROUTES)} routes' other spellings: 401 or 404")
    assert place.job() == before


def test_a_token_is_for_a_team_that_there_is(place: Place) -> None:
    asked = {"name": "typo", "role": "submit", "team": "maths"}
    status, told = place.ask("operate", "POST", "/v1/tokens", asked)
    known = "team: there is no team 'maths'; known teams: math, code"
    assert (status, told["error"]) == (400, known)
    assert "typo" not in str(place.ask("operate", "GET", "/v1/tokens"))


def test_secrets_of_programs_are_the_operators_only(place: Place) -> None:
    for name in ROUTES:
        method, template = name.split(" ")
        if method == "GET" and template != "/v1/journal":
            for who in ("read", "code", "math", "node"):
                assert "hunter2" not in str(place.ask(who, "GET", place.path(target(template))))
    assert "hunter2" in place.ask("operate", "GET", "/v1/journal")[1]


def test_the_key_of_a_gate_is_for_those_who_share_a_token(place: Place) -> None:
    """Whoever has it can run code: no route gives it away, the operator's neither."""
    key = bytes(range(32))
    driver = place.client("node")
    driver.open_gate("mine", 1, "10.0.0.1", 4000, key, ["node-0", "node-1"])
    found = place.client("node").gate("mine", 1)
    assert (found.key, found.host, found.port) == (key, "10.0.0.1", 4000)
    for who in ("other", "operate"):
        said = place.ask(who, "GET", "/v1/jobs/mine/gate?attempt=1")
        assert (said[0], key.hex() in str(said)) == (200, False)
        with pytest.raises(ValueError, match="has another token than this node"):
            place.client(who).gate("mine", 1)
    # What is passed on by somebody else is no gate of the driver's.
    sealed = place.ask("node", "GET", "/v1/jobs/mine/gate?attempt=1")[1]
    moved = sealed | {"host": "10.6.6.6"}
    assert place.ask("other", "POST", "/v1/jobs/mine/gate", moved)[0] == 200
    with pytest.raises(ValueError, match="has another token than this node"):
        place.client("node").gate("mine", 1)
    # Nor is that of another attempt, where somebody else may listen by now.
    driver.open_gate("mine", 2, "10.0.0.1", 4000, key, ["node-0", "node-1"])
    with pytest.raises(ValueError, match="has another token than this node"):
        place.client("node").gate("mine", 1)


def test_teams_own_what_they_may_change() -> None:
    """A route that a team's token may use to change something says whose job it is about."""
    for name, access in ROUTES.items():
        changes = name.startswith("POST") and "submit" in (access.roles or ())
        assert bool(access.owner) == changes, name


@pytest.mark.parametrize("gone", ROUTES)
def test_what_the_table_lacks_is_not_served(gone: str, tmp_path: Path) -> None:
    left = {name: row for name, row in ROUTES.items() if name != gone}
    method, path = gone.split(" ")
    for part, text in {
        "job": "a",
        "node": "a",
        "part": "a.js",
        "token": "1",
        "number": "1",
    }.items():
        path = path.replace(f"{{{part}}}", text)
    store = Store(tmp_path / "mux.sqlite")
    writer = Writer(lambda: TransactionLog(store, None, 30.0), poll)
    daemon = DaemonParts(writer, Metrics(), Logs(tmp_path), Tokens(tmp_path / "t", b"secret"))
    app = App(daemon, lambda _: OPERATOR, lambda *_: None, lambda *_: None, left)
    other = f"{'GET' if method == 'POST' else 'POST'} {gone.split(' ')[1]}"
    assert asked(app, method, path) == (405 if other in left else 404)
    store.close()


def asked(app: App, method: str, path: str) -> int:
    """The status of an operator's request."""
    told: list[Any] = []
    scope = {
        "type": "http", "method": method, "path": path, "raw_path": path.encode(),
        "query_string": b"", "headers": [(b"authorization", b"Bearer x")], "client": None,
    }  # fmt: skip

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        told.append(message)

    asyncio.run(app(scope, receive, send))
    return told[0]["status"]
