"""Episodes that are given up, and what is left of them: nothing."""

import asyncio
import gc
import os
import re
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from agent_programs import TIMEOUT_S, descriptors, opened, reply, run, write

from rollpacker.env.agent.environment import AgentEnvironment
from rollpacker.env.agent.program import AgentProgram
from rollpacker.env.agent.reaper import Reaper
from rollpacker.env.base import Opening
from waiting import alive, soon, until

STUBBORN = """
    import signal, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        ask([user(str(os.getpid()))])
    except BaseException:
        pass
    while True:
        time.sleep(1000)
"""


def pid_of(opening: Opening) -> int:
    assert opening.prompt is not None
    return int(opening.prompt[0]["content"])


WAITS = """
    status, text = post({{"messages": [user(str(os.getpid()))]}})
    open({told!r}, "w").write(f"{{status}} {{text}}")
    sys.exit(1)
"""
GOES_ON = """
    import signal, time
    def end(number, frame):
        open({told!r}, "w").write("SIGTERM")
        os._exit(0)
    signal.signal(signal.SIGTERM, end)
    try:
        ask([user(str(os.getpid()))])
    except SystemExit:
        pass
    while True:
        time.sleep(1000)
"""


@pytest.mark.parametrize(
    ("program", "words"), [(WAITS, "410 .*the episode is over.*"), (GOES_ON, "SIGTERM")]
)
def test_a_program_is_told_that_the_episode_is_over(
    tmp_path: Path, program: str, words: str
) -> None:
    async def talk(environment: AgentEnvironment) -> int:
        return pid_of(await environment.reset({}))

    told = tmp_path / "told"
    assert not alive(run(write(tmp_path, program.format(told=str(told))), talk))
    assert re.fullmatch(words, told.read_text(), re.DOTALL)


def test_a_program_that_hangs_is_killed(tmp_path: Path) -> None:
    async def talk(environment: AgentEnvironment) -> int:
        pid = pid_of(await environment.reset({}))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(environment.step(reply("1")), 0.3)
        assert alive(pid)
        start = time.monotonic()
        await environment.close()
        assert time.monotonic() - start < 5.0  # as long as an episode has for its closing
        await environment.close()
        return pid

    assert not alive(run(write(tmp_path, STUBBORN), talk))


def test_a_program_that_never_asks_is_given_up(tmp_path: Path) -> None:
    pids = tmp_path / "pid"

    async def talk(environment: AgentEnvironment) -> None:
        task = asyncio.create_task(environment.reset({}))
        await soon(lambda: pids.exists() and pids.read_text().endswith("."))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    program = f'open({str(pids)!r}, "w").write(f"{{os.getpid()}}."); import time; time.sleep(1000)'
    run(write(tmp_path, program), talk)
    assert not alive(int(pids.read_text()[:-1]))


def test_closing_that_is_cut_off_still_kills(tmp_path: Path) -> None:
    async def talk(environment: AgentEnvironment) -> None:
        pid = pid_of(await environment.reset({}))
        task = asyncio.create_task(environment.close())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await soon(lambda: not alive(pid))

    run(write(tmp_path, STUBBORN), talk)


def test_closing_what_never_began(tmp_path: Path) -> None:
    async def talk(environment: AgentEnvironment) -> None:
        await environment.close()

    run(write(tmp_path, ""), talk)


def test_a_key_is_worth_nothing_after_its_episode(tmp_path: Path) -> None:
    program = "ask([user(json.dumps([HOST, PORT, KEY]))]); reward(1)"

    async def talk() -> int:
        async with opened(write(tmp_path, program)) as factory:
            first = factory.make()
            opening = await first.reset({})
            await first.step(reply("1"))
            await first.close()
            assert opening.prompt is not None
            script = (
                "import json, sys; from http.client import HTTPConnection as C;"
                "host, port, key = json.loads(sys.argv[1]); c = C(host, int(port));"
                "c.request('GET', '/v1/models', headers={'Authorization': 'Bearer ' + key});"
                "sys.exit(c.getresponse().status - 400)"
            )
            argv = [sys.executable, "-c", script, opening.prompt[0]["content"]]
            return await (await asyncio.create_subprocess_exec(*argv)).wait()

    assert asyncio.run(talk()) == 1


def test_keep_alive_pipelining_and_clients_that_wait_for_100(tmp_path: Path) -> None:
    async def talk() -> bytes:
        async with opened(write(tmp_path, "")) as factory:
            key, _ = factory._endpoint.begin()
            port = int(factory._endpoint.url.split(":")[2].split("/")[0])
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            models = f"GET /v1/models HTTP/1.1\r\nAuthorization: Bearer {key}\r\n\r\n".encode()
            writer.write(models + models)
            head = f"POST / HTTP/1.1\r\nAuthorization: Bearer {key}\r\nExpect: 100-continue\r\n"
            writer.write(f"{head}Content-Length: 2\r\n\r\n".encode())
            said = await reader.readuntil(b"100 Continue\r\n\r\n")
            writer.write(b"{}nonsense\r\n\r\n")
            said += await reader.read()
            writer.close()
            return said

    said = asyncio.run(talk())
    statuses = [part.split()[0] for part in said.split(b"HTTP/1.1 ")[1:]]
    assert statuses == [b"200", b"200", b"100", b"404", b"400"]


SOAK = """
    said = ask([user("a")])
    if ROW["way"] == 0:
        ask([user("a"), said, user("b")])
        reward(1)
    elif ROW["way"] == 1:
        sys.exit("broken")
    elif ROW["way"] == 2:
        os.kill(os.getpid(), 9)
    elif ROW["way"] == 3:
        sock = begin({"messages": [user("a"), said, user("b")]})
        import time
        time.sleep(1000)
"""


@pytest.mark.parametrize("count", [60, pytest.param(200, marks=pytest.mark.slow)])
def test_many_episodes_leave_nothing(tmp_path: Path, count: int) -> None:
    """Those that end well, those that crash, and those that are given up at any moment."""
    path = write(tmp_path, SOAK)

    async def episode(factory: Any, number: int, gate: asyncio.Semaphore) -> str:
        async with gate:
            environment = factory.make()
            try:
                if number % 5 == 4:  # given up while it starts
                    async with asyncio.timeout(0.001 * (number % 20)):
                        await environment.reset({"way": 4})
                    return "given up"
                await environment.reset({"way": number % 5})
                turn = await environment.step(reply("1"))
                if number % 5 == 0:
                    turn = await environment.step(reply("2"))
                return "done" if turn.done else "asks"
            except TimeoutError:
                return "given up"
            except Exception as error:
                return str(error).partition(":")[0].removeprefix("program.py ")
            finally:
                await environment.close()

    async def soak(count: int) -> tuple[dict[str, int], int]:
        async with asyncio.timeout(4 * TIMEOUT_S), opened(path) as factory:
            gate = asyncio.Semaphore(16)
            await asyncio.gather(*(episode(factory, i, gate) for i in range(5)))
            before = descriptors()
            ways = await asyncio.gather(*(episode(factory, i, gate) for i in range(count)))
            await soon(lambda: not len(factory._endpoint._places))
            assert len(asyncio.all_tasks()) == 1
            assert not factory._endpoint._sessions
            return {way: ways.count(way) for way in set(ways)}, descriptors() - before

    threads, open_before = threading.active_count(), descriptors()
    others = set(psutil.Process().children(recursive=True))
    ways, grown = asyncio.run(soak(count))
    gc.collect()
    expected = ("done", "exited with code 1", "was killed by signal 9", "asks", "given up")
    assert ways == dict.fromkeys(expected, count // 5)
    assert grown == 0
    assert descriptors() <= open_before
    assert threading.active_count() == threads
    assert set(psutil.Process().children(recursive=True)) <= others


def test_a_reaper_ends_what_it_was_not_told_to_forget() -> None:
    reaper = Reaper()
    argv = [sys.executable, "-S", "-c", "import time; time.sleep(1000)"]
    kept, forgotten = (subprocess.Popen(argv, start_new_session=True) for _ in range(2))
    for each in (kept, forgotten):
        reaper.watch(each.pid)
    reaper.forget(forgotten.pid)
    reaper.close()
    assert kept.wait(TIMEOUT_S) == -9
    assert forgotten.poll() is None
    forgotten.kill()
    forgotten.wait()


def test_a_program_that_has_ended_is_off_the_list() -> None:
    """Its number may be another's by then."""

    class Listed(Reaper):
        def __init__(self) -> None:
            self.said: list[int] = []

        def _say(self, number: int) -> None:
            self.said.append(number)

    async def ended() -> list[int]:
        listed = Listed()
        program = AgentProgram(["true"], stdin=b"", environment={}, reaper=listed)
        await program.ended
        return listed.said

    watched, forgotten = asyncio.run(ended())
    assert 0 < watched == -forgotten


WORKER = """
import asyncio, sys, time
from rollpacker.config import EnvironmentConfig
from rollpacker.env.agent.factory import AgentFactory

async def main():
    factory = AgentFactory(EnvironmentConfig(kind="agent", path=sys.argv[1:]))
    await factory.open()
    made = [factory.make() for _ in range(3)]
    openings = [await each.reset({}) for each in made]
    print(*(opening.prompt[0]["content"] for opening in openings), flush=True)
    time.sleep(1000)

asyncio.run(main())
"""


def test_programs_end_when_the_process_of_environments_is_killed(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", WORKER, *write(tmp_path, STUBBORN)]
    worker = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert worker.stdout is not None
    pids = [int(pid) for pid in worker.stdout.readline().split()]
    children = psutil.Process(worker.pid).children(recursive=True)
    assert len(pids) == 3
    assert all(map(alive, pids))
    os.killpg(worker.pid, 9)
    worker.wait()
    worker.stdout.close()
    assert len(children) == 4
    try:
        until(lambda: not any(alive(child.pid) for child in children))
    finally:
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.kill()
