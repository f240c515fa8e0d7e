"""Exceptions where nobody foresaw them, in every function of the daemon that a request or time
calls: the request pays, and the daemon and all other jobs go on."""

from __future__ import annotations

import asyncio
import inspect
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rollpacker.rollmux.model.inventory import Machine
from rollpacker.rollmux.model.settings import Settings
from rollpacker.rollmux.service.api import bodies
from rollpacker.rollmux.service.api.roles import OPERATOR
from rollpacker.rollmux.service.commands import commands
from rollpacker.rollmux.service.commands import writer as writer_module
from rollpacker.rollmux.service.commands.writer import Writer
from rollpacker.rollmux.service.http import logs, routes
from rollpacker.rollmux.service.http.app import App, Audit
from rollpacker.rollmux.service.http.tokens import FILE, Tokens
from rollpacker.rollmux.service.state.transaction_log import TransactionLog
from rollpacker.rollmux.service.store import Store
from rollpacker.rollmux.service.views import history, metrics, views

MODULES = (bodies, commands, history, logs, metrics, routes, views)
CLASSES = (Audit, TransactionLog, metrics.Metrics, logs.Logs, Tokens, Writer)
LONGEST_S = 60.0
HITS: list[int] = []
PARTS = 4
ENDING = {
    "Writer": {"start", "stop", "_run", "_serve", "_collect", "_deliver", "_fail", "_refuse_all"},
    "TransactionLog": {"close", "leave"},
    "Audit": {"close"},
}
"""Their beginning and end, and what takes up the others' failures."""
UNREACHED = {
    "at the start": {
        "routes._kinds_of", "routes._look", "routes._once", "routes._operation",
        "routes._responses",
    },
    "as time passes (test_mux_setbacks.py)": {
        "TransactionLog._try", "TransactionLog._run_out", "TransactionLog._release",
        "TransactionLog.release_fences",
    },
    "once something has failed (test_mux_setbacks.py)": {
        "TransactionLog._be_heard", "TransactionLog.follow", "TransactionLog.undo",
        "Writer._failed", "Writer._undo",
        "Writer._repair", "Writer._reopen", "Writer._timed_open",
    },
    "of teams, other tokens, leases and moves": {
        "Audit._is_sampled", "Audit._sum_up", "commands._left",
        "commands.move_body", "commands.permit_body",
        "history._add_seconds", "views._team", "views._by_pool",
    },
}  # fmt: skip
NAMED = Settings(nodes="named", warm_s=0.0, cold_s=1.0)
MACHINES = tuple(
    Machine(name=f"{pool[0]}{n}", pool=pool) for pool in ("rollout", "train") for n in (0, 1)
)
SPEC = {"worst_rollout_s": 60.0, "worst_train_s": 60.0, "slo": 9.0, "iterations": 9}
PROGRAM = {"command": ["true"]}


def fail(*_: Any, **__: Any) -> Any:
    """In the place of any function, so without globals of this module."""
    __import__("test_mux_injected").HITS.append(1)
    raise KeyError("injected")


def callbacks() -> list[tuple[Any, str]]:
    """All functions of the modules that answer, and methods of what they stand on."""
    found: list[tuple[Any, str]] = []
    for owner in (*MODULES, *CLASSES):
        for name, each in vars(owner).items():
            own = inspect.isfunction(each) and each.__module__ == _module(owner)
            if own and not name.startswith("__") and name not in ENDING.get(_name(owner), ()):
                found.append((owner, name))
    return found


def _module(owner: Any) -> str:
    return owner.__name__ if isinstance(owner, ModuleType) else owner.__module__


def _name(owner: Any) -> str:
    return owner.__name__.rpartition(".")[2]


FOUND = callbacks()


class Client:
    """Asks the guarded application in this process."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._count = 0

    async def ask(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        """The status and the body: 500 where what is below the guard raises, as uvicorn says."""
        self._count += 1
        target, _, query = path.partition("?")
        headers = [(b"authorization", b"Bearer secret")]
        headers += [(b"idempotency-key", f"key-{self._count}".encode())] * (method == "POST")
        scope = {
            "type": "http", "method": method, "path": target, "raw_path": target.encode(),
            "query_string": query.encode(), "headers": headers, "client": ("127.0.0.1", 1),
            "http_version": "1.1", "scheme": "http", "server": ("127.0.0.1", 2), "root_path": "",
        }  # fmt: skip
        data = json.dumps({} if body is None else body).encode() if method == "POST" else b""
        told: list[Any] = []
        asked = iter([True])

        async def receive() -> Any:
            if not next(asked, False):
                await asyncio.Event().wait()  # it stays
            return {"type": "http.request", "body": data, "more_body": False}

        async def send(message: Any) -> None:
            told.append(message)

        try:
            await self._app(scope, receive, send)
        except Exception:
            return 500, b""
        return told[0]["status"], b"".join(each.get("body", b"") for each in told[1:])

    async def all(self) -> list[int]:
        """Everything that jobs, agents and people ask for."""
        statuses: list[int] = []

        async def ask(method: str, path: str, body: Any = None) -> Any:
            status, said = await self.ask(method, path, body)
            statuses.append(status)
            try:
                return json.loads(said)
            except ValueError:
                return {}

        name = f"job-{self._count}"
        job = f"/v1/jobs/{name}"
        await ask("POST", "/v1/jobs", SPEC | {"id": name, "program": PROGRAM})
        permit = await ask("POST", f"{job}/permits", {"phase": "rollout", "wait_s": 0.0})
        token = permit.get("token", 0)
        await ask("POST", f"/v1/permits/{token}/heartbeat")
        large = {"id": f"large-{self._count}", "rollout_nodes": 9, "too_large": "wait"}
        await ask("POST", "/v1/jobs", SPEC | large)
        await ask("POST", "/v1/jobs", {"id": 1})
        await ask("POST", f"{job}/tail", {"token": token})
        beat = await ask("POST", "/v1/nodes/r0/heartbeat", {"attempts": []})
        seen = [
            {"job": each["job"], "number": each["number"], "code": 0}
            for each in beat.get("attempts", ())
        ]
        await ask("POST", "/v1/nodes/r0/heartbeat", {"attempts": seen})
        gate = {"host": "h", "port": 1, "key": "ab" * 80, "names": []}
        await ask("POST", f"{job}/gate", gate)
        await ask("POST", f"{job}/attempts/1/log", {"at": 0, "data": "aGk="})
        for path in (
            "/v1/jobs", job, f"{job}/log", f"{job}/gate?attempt=1", "/v1/status", "/v1/timeline",
            "/v1/nodes/r0", "/v1/nodes/none", "/metrics", "/v1/events", "/v1/journal", "/v1/health",
            "/", "/favicon.ico", "/v1/openapi.json",
        ):  # fmt: skip
            await ask("GET", path)
        await ask("POST", f"/v1/permits/{token}/abandon")
        await ask("POST", f"{job}/moved", {"move": 1})
        await ask("POST", f"/v1/permits/{token}/finish", {"seconds": 1.0})
        await ask("POST", "/v1/nodes", {"name": "r1", "pool": "rollout"})
        await ask("POST", "/v1/nodes/r1/close", {"status": "cordoned"})
        await ask("POST", "/v1/nodes/r1/open")
        await ask("POST", "/v1/nodes/t1/failed")
        await ask("POST", "/v1/nodes", {"name": "t1", "pool": "train"})
        await ask("POST", "/v1/nodes/none/remove")
        await ask("POST", "/v1/tokens", {"name": "a", "role": "read"})
        await ask("GET", "/v1/tokens")
        await ask("POST", "/v1/tokens/revoke", {"name": "a"})
        await ask("POST", "/v1/drain", {"draining": False})
        await ask("POST", f"{job}/change", {"priority": 1})
        await ask("POST", f"{job}/end")
        await ask("POST", f"/v1/jobs/{large['id']}/end")
        return statuses


@asynccontextmanager
async def opened(folder: Path) -> AsyncIterator[tuple[Writer, Client]]:
    def core() -> TransactionLog:
        store = Store(folder / "mux.sqlite")
        try:
            return TransactionLog(store, NAMED, 30.0, machines=MACHINES)
        except BaseException:
            store.close()
            raise

    writer, counted = Writer(core, commands.poll, lambda: crashed.append(1)), metrics.Metrics()
    crashed: list[int] = []
    # Looked up at each call, as what is injected has to be.
    writer.stats.observe = lambda *told: counted.commit(*told)
    audit = Audit(folder / "audit.jsonl")
    who = Tokens(folder / FILE, b"secret")
    app = App(
        routes.DaemonParts(writer, counted, logs.Logs(folder / "logs"), who),
        lambda header: who.principal(header),
        lambda *told: counted.request(*told),
        lambda *told: audit.note(*told),
    )
    client = Client(app)
    writer.start(asyncio.get_running_loop())
    try:
        yield writer, client
        assert not crashed
        assert writer.alive
    finally:
        await asyncio.to_thread(writer.stop)
        audit.close()


def test_what_is_asked_reaches_what_is_injected(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as (_, client):
            assert await client.ask("GET", "/v1/health") == (200, b'{"status":"ok"}')
            statuses = await client.all()
            assert not [status for status in statuses if status >= 500], statuses
            assert statuses.count(200) > 15

    assert OPERATOR.is_one_of(())
    assert len(FOUND) > 80
    asyncio.run(main())


@pytest.mark.parametrize(
    "part", [0, *(pytest.param(part, marks=pytest.mark.wide) for part in range(1, PARTS))]
)
def test_nothing_that_fails_ends_the_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: int
) -> None:
    missed = set[str]()
    monkeypatch.setattr(writer_module, "_RETRY_S", 0.02)

    async def main() -> None:
        async with opened(tmp_path) as (writer, client):
            async with asyncio.timeout(LONGEST_S):
                assert (await client.ask("POST", "/v1/jobs", SPEC | {"id": "kept"}))[0] == 201
            for owner, name in FOUND[part::PARTS]:
                HITS.clear()
                with monkeypatch.context() as patched:
                    # The table has the functions themselves: their code is replaced.
                    patched.setattr(getattr(owner, name), "__code__", fail.__code__)
                    async with asyncio.timeout(LONGEST_S):
                        await client.all()
                async with asyncio.timeout(LONGEST_S):
                    while not writer.alive:
                        await asyncio.sleep(0.05)
                    status, said = await client.ask("GET", "/v1/jobs/kept")
                assert status == 200, (owner, name)
                assert json.loads(said)["state"] in ("idle", "moving"), (owner, name)
                if not HITS:
                    missed.add(f"{_name(owner)}.{name}")

    asyncio.run(main())
    print(f"\n{len(FOUND[part::PARTS])} functions raised, not reached: {', '.join(sorted(missed))}")
    assert missed <= set[str]().union(*UNREACHED.values())


def test_many_looks_of_one_token_take_turns(tmp_path: Path) -> None:
    """Who works is not to wait for a thousand of them."""

    async def main() -> None:
        async with opened(tmp_path) as (writer, client):
            read, looking, most = writer.read, 0, 0

            async def counted(look: Any) -> Any:
                nonlocal looking, most
                looking += 1
                most = max(most, looking)
                await asyncio.sleep(0.001)
                try:
                    return await read(look)
                finally:
                    looking -= 1

            writer.read = counted  # type: ignore[method-assign]
            looks = [client.ask("GET", "/v1/nodes/r0") for _ in range(50)]
            assert {status for status, _ in await asyncio.gather(*looks)} == {200}
            assert most == 8

    asyncio.run(main())


async def with_attempt(client: Client) -> str:
    """The path to the log of a program that an agent has begun."""
    await client.ask("POST", "/v1/jobs", SPEC | {"id": "noisy", "program": PROGRAM})
    for node in ("r0", "r1"):
        await client.ask("POST", f"/v1/nodes/{node}/heartbeat", {"attempts": []})
    return "/v1/jobs/noisy/attempts/1/log"


def test_a_disk_that_fails_is_the_daemons_fault(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with opened(tmp_path) as (_, client):
            path = await with_attempt(client)
            (tmp_path / "logs").write_text("no folder")
            status, said = await client.ask("POST", path, {"at": 0, "data": "aGk="})
            assert (status, json.loads(said)["code"]) == (503, "unavailable")
            assert "the daemon's disk or network failed" in json.loads(said)["error"]
            numbers = (await client.ask("GET", "/metrics"))[1].decode()
            assert 'status="503"' in numbers
            assert 'status="499"' not in numbers

    asyncio.run(main())
    assert sum("could not be served" in each.getMessage() for each in caplog.records) == 1


def test_a_disk_that_stalls_under_logs_delays_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = threading.Event()
    monkeypatch.setattr(logs.Logs, "add", lambda *_: 2 * others.wait(LONGEST_S))

    async def main() -> None:
        async with opened(tmp_path) as (_, client):
            path = await with_attempt(client)
            stalled = asyncio.create_task(client.ask("POST", path, {"at": 0, "data": "aGk="}))
            await asyncio.sleep(0)
            assert (await client.ask("POST", "/v1/nodes/r0/heartbeat"))[0] == 200
            others.set()
            assert json.loads((await stalled)[1]) == {"have": 2, "full": False}

    asyncio.run(main())


def test_refused_strangers_do_not_fill_the_disk(tmp_path: Path) -> None:
    audit = Audit(tmp_path / "audit.jsonl")
    scope = {"method": "GET", "path": "/v1/status", "headers": [], "client": ("h", 1)}
    for _ in range(1000):
        audit.note(scope, 401)
    audit.note(scope | {"rollmux.by": OPERATOR}, 403)
    audit.close()
    lines = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    assert [line["status"] for line in lines[:-1]] == [401] * 20 + [403]
    assert (lines[-1]["by"], lines[-1]["refused"], lines[-1]["not_written"]) == (None, 1000, 980)
