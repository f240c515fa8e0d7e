"""Who is let in at a driver's gate, and who is not."""

import asyncio
import os
import pickle
import resource
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import CHALLENGE, FAILURE, WELCOME, Client  # type: ignore
from threading import Thread
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollpacker.processes.children import allow_files
from rollpacker.runtime.ipc import rendezvous as gates
from rollpacker.runtime.ipc.link import HEAD, encode
from rollpacker.runtime.ipc.rendezvous import Rendezvous, enter
from waiting import in_loop


class Bomb:
    """Tells when it is unpickled."""

    path = ""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (self.path,)


@asynccontextmanager
async def opened() -> AsyncIterator[tuple[Rendezvous, asyncio.Queue[tuple[str, socket.socket]]]]:
    came: asyncio.Queue[tuple[str, socket.socket]] = asyncio.Queue()
    gate = Rendezvous("127.0.0.1", lambda *who: came.put_nowait(who), asyncio.get_running_loop())
    try:
        yield gate, came
    finally:
        gate.close()


async def come(gate: Rendezvous, name: str) -> socket.socket:
    return await asyncio.to_thread(enter, gate.address, gate.key, name)


@in_loop
async def test_who_knows_the_key_talks_both_ways() -> None:
    async with opened() as (gate, came):
        theirs = await come(gate, "node/3")
        name, ours = await asyncio.wait_for(came.get(), 10)
        assert name == "node/3"
        for one, other in ((ours, theirs), (theirs, ours)):
            assert one.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            one.sendall(b"x" * 1000)
            assert other.recv(1000, socket.MSG_WAITALL) == b"x" * 1000
        ours.close()
        theirs.close()


@in_loop
async def test_the_key_of_another_run_opens_nothing_and_is_told_nothing() -> None:
    async with opened() as (gate, came):
        with pytest.raises((AuthenticationError, ConnectionError)):
            await asyncio.to_thread(enter, gate.address, b"k" * 32, "node/0")
        (await come(gate, "node/1")).close()
        assert (await asyncio.wait_for(came.get(), 10))[0] == "node/1"


@in_loop
async def test_a_gate_that_does_not_know_the_key_is_refused_too() -> None:
    """Whoever took the driver's port would be given commands otherwise."""
    async with opened() as (gate, came):
        gate.key, key = b"k" * 32, gate.key
        with pytest.raises((AuthenticationError, ConnectionError)):
            await asyncio.to_thread(enter, gate.address, key, "node/0")
        assert came.empty()


@settings(max_examples=20, deadline=None)
@given(garbage=st.binary(min_size=1, max_size=300))
@in_loop
async def test_garbage_is_let_go(garbage: bytes) -> None:
    async with opened() as (gate, came):
        with socket.create_connection(gate.address) as stranger:
            with suppress(OSError):  # hung up already
                stranger.sendall(garbage)
                stranger.shutdown(socket.SHUT_WR)
            (await come(gate, "node/1")).close()
            assert (await asyncio.wait_for(came.get(), 10))[0] == "node/1"
            assert came.empty()


def test_nothing_of_a_stranger_is_unpickled(tmp_path) -> None:
    Bomb.path = str(tmp_path / "made")
    message = encode(Bomb())
    forms = [
        HEAD.pack(len(message)) + bytes(message),
        len(message).to_bytes(4, "big") + bytes(message),
    ]

    async def main() -> None:
        async with opened() as (gate, came):
            for form in forms:
                with socket.create_connection(gate.address) as stranger:
                    stranger.sendall(form * 3)
            with pytest.raises((AuthenticationError, OSError, EOFError)):
                await asyncio.to_thread(Client, gate.address, "AF_INET", authkey=b"wrong")
            (await come(gate, "node/1")).close()
            await asyncio.wait_for(came.get(), 10)
            assert not (tmp_path / "made").exists()

    asyncio.run(main())
    pickle.loads(message)
    assert (tmp_path / "made").exists(), "the bomb is none"


def test_what_one_node_shows_is_no_use_to_pretend_to_be_the_driver() -> None:
    """Whoever has the driver's port hands one node's challenge to another one, and its answer
    back: both know the key, but not as the driver does."""
    key = os.urandom(32)
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor() as threads:
        address = listener.getsockname()[:2]
        with patch.object(gates, "_ENTERING_S", 1.0):
            nodes = [threads.submit(enter, address, key, f"node/{n}") for n in (1, 2)]
            one, other = (gates._connection(listener.accept()[0]) for _ in nodes)
            one.send_bytes(CHALLENGE + os.urandom(20))
            assert one.recv_bytes()
            one.send_bytes(WELCOME)
            other.send_bytes(one.recv_bytes())
            one.send_bytes(other.recv_bytes())
            assert one.recv_bytes() == FAILURE
            one.close()
            other.close()
            listener.close()
            for node in nodes:
                with pytest.raises((AuthenticationError, OSError)):
                    node.result(30)


@in_loop
async def test_strangers_that_say_nothing_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever shows the key at once has not to make way, however many come together."""
    monkeypatch.setattr(gates, "_FAIR_S", 0.1)
    monkeypatch.setattr(gates, "_AT_DOOR", 64)
    allow_files(5000)
    async with opened() as (gate, came):
        silent = [socket.create_connection(gate.address) for _ in range(2000)]
        names = {f"node/{number}" for number in range(100)}
        for end in await asyncio.gather(*(come(gate, name) for name in names)):
            end.close()
        found = {(await asyncio.wait_for(came.get(), 10))[0] for _ in names}
        assert found == names
        for each in silent:
            each.close()


@in_loop
async def test_who_comes_while_no_file_can_be_opened_is_let_in_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One such moment ended the gate: nodes that were lost never came back."""
    monkeypatch.setattr(gates, "_ENTERING_S", 5.0)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with opened() as (gate, came):
        with socket.socket() as stranger:
            # The one that is waited for has its file already, the next one has none.
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
            try:
                stranger.connect(gate.address)
                await asyncio.sleep(0.2)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            (await come(gate, "node/1")).close()
        assert (await asyncio.wait_for(came.get(), 10))[0] == "node/1"


@in_loop
async def test_who_comes_while_no_thread_can_be_started_is_sent_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gates, "_ENTERING_S", 5.0)

    class Full(Thread):
        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    async with opened() as (gate, came):
        with monkeypatch.context() as full:
            full.setattr(gates, "Thread", Full)
            with pytest.raises(OSError, match=r"hung up|reset"):
                await come(gate, "node/0")
        (await come(gate, "node/1")).close()
        assert (await asyncio.wait_for(came.get(), 10))[0] == "node/1"


@in_loop
async def test_nobody_there_is_an_error_at_once() -> None:
    async with opened() as (gate, _):
        gate.close()
        with pytest.raises(OSError, match="refused"):
            await come(gate, "node/1")


@in_loop
async def test_who_comes_as_it_closes_is_let_go() -> None:
    async with opened() as (gate, came):
        with ThreadPoolExecutor() as pool:
            coming = pool.submit(enter, gate.address, gate.key, "node/1")
            theirs = coming.result(10)  # the loop has no time for it
            gate.close()
            assert await asyncio.wait_for(asyncio.to_thread(theirs.recv, 1), 10) == b""
        assert came.empty()


@in_loop
async def test_an_agent_leaves_that_nobody_welcomes() -> None:
    async with opened() as (gate, came):
        command = [
            sys.executable,
            "-m",
            "rollpacker.runtime.cluster.agent",
            *map(str, gate.address),
        ]
        with subprocess.Popen([*command, "node-0"], stdin=subprocess.PIPE) as agent:
            assert agent.stdin is not None
            agent.stdin.write(f"{gate.key.hex()}\n".encode())
            agent.stdin.flush()
            await asyncio.wait_for(came.get(), 60)
            agent.stdin.close()
            assert agent.wait(30) == 0


def test_a_driver_that_hangs_up_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gates, "_ENTERING_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        Thread(target=lambda: server.accept()[0].close(), daemon=True).start()
        with pytest.raises(ConnectionError):
            enter(server.getsockname()[:2], b"k", "node/0")
