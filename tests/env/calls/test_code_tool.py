"""The tool ``python``: what the model is shown of a program."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from case_files import read_table
from rollpacker.config import EnvironmentConfig
from rollpacker.env.base import EpisodeError
from rollpacker.env.calls.call import Call, Parsed
from rollpacker.env.code_tool import CodeTool, shown
from rollpacker.env.messages import to_message
from rollpacker.env.tools import ToolsFactory
from rollpacker.sandbox import StoppedError
from rollpacker.sandbox.running import Execution


@pytest.fixture(scope="module")
def tool() -> Iterator[CodeTool]:
    made = CodeTool(step_timeout_s=12.0)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("code", "expected"), read_table(__file__, "test_what_a_program_writes_is_shown")
)
def test_what_a_program_writes_is_shown(tool: CodeTool, code: str, expected: str) -> None:
    assert asyncio.run(tool.python(code)) == expected


def test_a_program_cannot_reach_what_is_outside(tool: CodeTool) -> None:
    found = asyncio.run(tool.python("print(open('/etc/passwd').read())"))
    assert "Error: PermissionError" in found
    assert "root" not in found


def test_much_output_is_cut_in_its_middle(tool: CodeTool) -> None:
    found = asyncio.run(tool.python("print('a' * 50_000 + 'b' * 50_000)"))
    assert len(found) < 8200
    assert found.startswith("aaa")
    assert found.endswith("bbb")
    assert "\n... (92000 characters left out) ...\n" in found


def test_nothing_is_kept_between_programs(tool: CodeTool) -> None:
    async def both() -> list[str]:
        return [await tool.python("x = 1"), await tool.python("print(x)")]

    assert "NameError" in asyncio.run(both())[1]


def test_programs_of_many_episodes_run_together(tool: CodeTool) -> None:
    async def many() -> list[str]:
        return await asyncio.gather(*(tool.python(f"print({each})") for each in range(20)))

    assert asyncio.run(many()) == [str(each) for each in range(20)]


def test_a_program_that_nobody_waits_for_is_stopped(
    tool: CodeTool, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, stopped = threading.Event(), threading.Event()

    def output(_program: str, _timeout_s: float, stop: Callable[[], bool]) -> str:
        begun.set()
        for _ in range(100_000):
            if stop():
                stopped.set()
                raise StoppedError
            time.sleep(0.001)
        return "nobody stopped it"

    monkeypatch.setattr(tool._interpreter, "output", output)

    async def given_up() -> None:
        task = asyncio.create_task(tool.python("while True: pass"))
        await asyncio.to_thread(begun.wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(given_up())
    assert stopped.is_set()


def test_a_stopped_program_ends_soon(tool: CodeTool) -> None:
    asked = iter([False, True])
    with pytest.raises(StoppedError):
        tool._interpreter.output("while True: pass", 1.0, lambda: next(asked))


def execution(**changes: Any) -> Execution:
    fields = {"end": "exit", "code": 0, "cpu_s": 0.0, "wall_s": 0.0}
    written = {"stdout": b"", "result": b"", "stderr": b"", "flooded": False}
    return Execution(**(fields | written | changes))


def test_ends_are_told() -> None:
    assert shown(execution(end="tle_idle")) == "Error: the program waited too long and was stopped"
    assert shown(execution(end="signal", code=11)) == "Error: the program was killed by signal 11"
    cut = shown(execution(stdout=b"\xff", flooded=True))
    assert cut == "�\nError: the output was too long and was cut"
    assert shown(execution(code=1, result=b"{")) == "Error: exit status 1"


def test_a_sandbox_that_is_gone_is_the_episode_s_error() -> None:
    tool = CodeTool(step_timeout_s=12.0)
    tool.close()
    with pytest.raises(EpisodeError, match=r"^tool 'python': the sandbox is closed"):
        asyncio.run(tool.python("print(1)"))


def test_it_is_a_tool_like_others() -> None:
    factory = ToolsFactory(EnvironmentConfig(kind="tools", path=["python"], step_timeout_s=12.0))
    (schema,) = factory.tools
    assert schema["function"]["name"] == "python"
    assert list(schema["function"]["parameters"]["properties"]) == ["code"]
    reply = to_message(Parsed("", (Call("python", {"code": "print(2 + 3)"}),)), "")

    async def episode() -> str:
        turn = await factory.make().step(reply)
        await factory.close()
        return turn.messages[0]["content"]

    assert asyncio.run(episode()) == "5"
