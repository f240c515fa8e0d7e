"""A driver's end of a socket and a worker's: what must hold whatever lies between them."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from threading import Thread
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollpacker.runtime.ipc.link import HEAD, Link, Wire, encode
from waiting import in_loop

Pair = Callable[[], tuple[socket.socket, socket.socket]]


def tcp() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    return ours, theirs


PAIRS: dict[str, Pair] = {"unix": socket.socketpair, "tcp": tcp}


class Ends:
    """Both ends, and what the driver's has heard."""

    def __init__(self, pair: Pair) -> None:
        ours, theirs = pair()
        self.raw = theirs
        self.link, self.wire = Link(ours), Wire(theirs)
        self.heard: list[Any] = []
        self.gone = self.signs = 0
        self._more = asyncio.Event()

    def open(self) -> None:
        self.link.open(asyncio.get_running_loop(), self._hear, self._lose, self._sign)

    def _hear(self, message: Any) -> None:
        self.heard.append(message)
        self._more.set()

    def _lose(self) -> None:
        self.gone += 1
        self._more.set()

    def _sign(self) -> None:
        self.signs += 1
        self._more.set()

    async def until(self, reached: Callable[[], object]) -> None:
        async with asyncio.timeout(30):
            while not reached():
                self._more.clear()
                await self._more.wait()


@asynccontextmanager
async def ends(pair: Pair) -> AsyncIterator[Ends]:
    both = Ends(pair)
    both.open()
    try:
        yield both
    finally:
        both.link.close()
        both.wire.close()


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
@in_loop
async def test_long_messages_in_both_directions_at_once_arrive(pair: Pair) -> None:
    long = np.arange(1 << 20)
    said: list[Any] = []
    async with ends(pair) as both:
        sender = Thread(target=lambda: [both.wire.send((n, long)) for n in range(4)])
        sender.start()
        for n in range(4):
            both.link.send((n, long))
        # The worker reads only when it has said everything.
        reader = Thread(target=lambda: said.extend(both.wire.recv() for _ in range(4)))
        await both.until(lambda: len(both.heard) == 4)
        sender.join(5)
        reader.start()
        while reader.is_alive():
            await asyncio.sleep(0.01)
        for heard in (said, both.heard):
            assert [n for n, _ in heard] == [0, 1, 2, 3]
            assert all((array == long).all() for _, array in heard)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.sampled_from([0, 1, 30, 5_000, 65_530, 70_000, 300_000]), max_size=12),
    cuts=st.lists(st.integers(1, 100_000), max_size=12),
)
@in_loop
async def test_messages_arrive_whole_however_they_are_cut(
    sizes: list[int], cuts: list[int]
) -> None:
    messages = [(n, bytes(size)) for n, size in enumerate(sizes)]
    data = b"".join(HEAD.pack(len(e)) + bytes(e) for e in map(encode, messages))
    async with ends(socket.socketpair) as both:
        both.raw.setblocking(False)
        loop, start = asyncio.get_running_loop(), 0
        for cut in [*cuts, len(data)]:
            await loop.sock_sendall(both.raw, data[start : start + cut])
            start += cut
            await asyncio.sleep(0)
        await both.until(lambda: len(both.heard) == len(messages))
        assert both.heard == messages


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
@in_loop
async def test_the_end_of_the_other_side_is_told_once_and_after_what_it_said(pair: Pair) -> None:
    async with ends(pair) as both:
        both.wire.send("last words")
        both.wire.close()
        await both.until(lambda: both.gone)
        assert both.heard == ["last words"]
        both.link.send("to nobody")
        both.link.sever()
        assert both.gone == 1


@in_loop
async def test_an_end_within_a_message_is_an_end() -> None:
    async with ends(socket.socketpair) as both:
        both.raw.sendall(HEAD.pack(1000) + b"half")
        both.wire.close()
        await both.until(lambda: both.gone)
        assert not both.heard
        assert both.signs


def test_a_worker_learns_that_its_driver_has_gone() -> None:
    ours, theirs = socket.socketpair()
    wire = Wire(theirs)
    ours.sendall(HEAD.pack(9)[:-1])
    ours.close()
    with pytest.raises(EOFError):
        wire.recv()
    with pytest.raises(BrokenPipeError):
        wire.send("x")
    wire.close()


@in_loop
async def test_a_listener_may_close_the_link_between_two_messages() -> None:
    both = Ends(socket.socketpair)
    heard: list[int] = []

    def hear(message: int) -> None:
        heard.append(message)
        both.link.close()

    for n in range(3):
        both.wire.send(n)
    both.link.open(asyncio.get_running_loop(), hear, both._lose)
    await asyncio.sleep(0.05)
    assert heard == [0]
    assert not both.gone
    both.wire.close()


_FROZEN = """
import socket, sys, time
end = socket.socket(fileno=int(sys.argv[1]))
end.send(b"!")
while end.recv(1 << 16):
    pass
"""


@in_loop
async def test_a_frozen_reader_keeps_nobody_waiting() -> None:
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-S", "-c", _FROZEN, str(theirs.fileno())]
    with subprocess.Popen(command, pass_fds=[theirs.fileno()]) as reader:
        theirs.close()
        assert ours.recv(1) == b"!"
        os.kill(reader.pid, signal.SIGSTOP)
        link = Link(ours)
        gone = asyncio.Event()
        link.open(asyncio.get_running_loop(), lambda _: None, gone.set)
        for _ in range(8):
            link.send(bytes(1 << 20))
        await asyncio.sleep(0)  # not one of them waited
        reader.kill()
        await asyncio.wait_for(gone.wait(), 10)
