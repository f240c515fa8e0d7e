"""Round trips between a driver's end of a channel and a worker's, in another process.

    python -m benchmarks.driver.channel [--trips 2000]

A Unix socket as on one machine, TCP over loopback as from another node. Medians of round trips of
a small message and of 17 KB (a response of 1,400 tokens), and the driver's CPU time for each.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
import statistics
import time
from typing import Any

import numpy as np

from benchmarks._run import flags
from rollpacker.runtime.ipc.link import Link
from rollpacker.runtime.ipc.wire import Wire


def tcp() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    for end in (ours, theirs):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return ours, theirs


def echo(wire: Wire) -> None:
    try:
        while True:
            wire.send(wire.recv())
    except (EOFError, OSError):
        return


async def trips(end: socket.socket, message: Any, count: int) -> tuple[float, float]:
    """Median seconds of a round trip, and CPU seconds of this process for one."""
    link, loop = Link(end), asyncio.get_running_loop()
    answers: asyncio.Queue[Any] = asyncio.Queue()
    link.open(loop, answers.put_nowait, lambda: None)
    seconds: list[float] = []
    before = time.process_time()
    for number in range(count + 100):
        if number == 100:  # the first ones warm up
            before = time.process_time()
        start = time.perf_counter()
        link.send(message)
        await answers.get()
        seconds.append(time.perf_counter() - start)
    used = time.process_time() - before
    link.close()
    return statistics.median(seconds[100:]), used / count


def main() -> None:
    count = flags(__doc__, trips=2000).parse_args().trips
    long = np.zeros(1400, np.int32), np.zeros(2800, np.float32), "17 KB"
    for name, pair in {"unix": socket.socketpair, "tcp": tcp}.items():
        for what, message in {"small": "message", "17 KB": long}.items():
            ours, theirs = pair()
            worker = multiprocessing.get_context("fork").Process(target=echo, args=(Wire(theirs),))
            worker.start()
            theirs.close()
            median, used = asyncio.run(trips(ours, message, count))
            worker.join()
            print(f"{name:5} {what:6} p50 {1e6 * median:6.0f} us, driver {1e6 * used:5.0f} us CPU")


if __name__ == "__main__":
    main()
