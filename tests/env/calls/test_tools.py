"""Kind ``tools``: functions as tools, their arguments, results and failures."""

import asyncio
import enum
import sys
import threading
from pathlib import Path
from typing import Any, Literal

import pytest
from tool_replies import call, reply

from case_files import read_table
from rollpacker.config import EnvironmentConfig
from rollpacker.env.base import EpisodeError, Turn
from rollpacker.env.tools import ToolsEnvironment, ToolsFactory, mistake, schema_of, tools_of


def add(a: int, b: int = 3) -> int:
    """Add two numbers.

    Args:
        a: One.
        b: The other.
    """
    return a + b


async def wait(text: str) -> str:
    """Give back a text, later.

    Args:
        text: Which.
    """
    await asyncio.sleep(0)
    return text


def fail(how: str) -> Any:
    """Fail.

    Args:
        how: In which way.
    """
    if how == "episode":
        raise EpisodeError("the server is gone")
    if how == "loop":
        loop: list[Any] = []
        loop.append(loop)
        return loop
    if how == "half":
        return "a\ud800b"
    raise {"exit": SystemExit, "stop": StopIteration, "type": TypeError}[how]("so\nit is")


TOOLS = tools_of([add, wait, fail], "environment.path")


def step(text: str) -> Turn:
    return asyncio.run(ToolsEnvironment(TOOLS).step(reply(text)))


def texts(turn: Turn) -> list[str]:
    return [message["content"] for message in turn.messages]


def test_a_reply_without_calls_ends_the_episode() -> None:
    assert step("It is 5.") == Turn(done=True)


def test_calls_are_run_in_their_order_and_answered_by_id() -> None:
    text = call("add", a=2) + call("wait", text="so") + call("add", a=1, b=1)
    turn = step(text)
    assert texts(turn) == ["5", "so", "2"]
    assert (turn.calls, turn.failed_calls, turn.done) == (3, 0, False)
    made = reply(text)["tool_calls"]
    assert [message["tool_call_id"] for message in turn.messages] == [each["id"] for each in made]
    assert [message["name"] for message in turn.messages] == ["add", "wait", "add"]
    assert {message["role"] for message in turn.messages} == {"tool"}


FAULTS = {
    call("subtract", a=2): "Error: there is no tool 'subtract': there is add, wait, fail",
    call("add", a=2, c=3): "Error: add: there is no argument 'c': it takes a, b",
    call("add", b=3): "Error: add: the argument 'a' is missing",
    call("add", a="2"): "Error: add: the argument 'a' must be of type integer",
    call("fail", how="type"): "Error: TypeError: so it is",
    call("fail", how="exit"): "Error: RuntimeError: it raised SystemExit: so it is",
    call("fail", how="stop"): "Error: RuntimeError: it raised StopIteration: so it is",
    call("fail", how="loop"): "Error: ValueError: Circular reference detected",
    "<tool_call>add(2)</tool_call>": "Error: the call is no valid JSON: Expecting value at "
    "character 0",
}


@pytest.mark.parametrize("text", FAULTS)
def test_a_call_that_fails_tells_the_model_why(text: str) -> None:
    turn = step(text + call("add", a=2))
    assert texts(turn) == [FAULTS[text], "5"]
    assert (turn.calls, turn.failed_calls, turn.done) == (2, 1, False)


def test_a_long_name_is_shown_in_short() -> None:
    (text,) = texts(step(call("x" * 5000)))
    assert len(text) < 200


def test_half_a_character_can_be_written() -> None:
    (text,) = texts(step(call("fail", how="half")))
    assert text == "a?b"
    (text,) = texts(step('<tool_call>{"name": "\\ud800"}</tool_call>'))
    text.encode()


def test_an_episode_s_error_is_no_call_s() -> None:
    with pytest.raises(EpisodeError, match="the server is gone"):
        step(call("fail", how="episode"))


def test_plain_functions_run_beside_the_loop() -> None:
    threads: list[threading.Thread] = []

    def where() -> None:
        """Say where it is."""
        threads.append(threading.current_thread())

    turn = asyncio.run(ToolsEnvironment(tools_of([where], "")).step(reply(call("where"))))
    assert texts(turn) == ["null"]
    assert threads[0] is not threading.main_thread()


# Schemas ---------------------------------------------------------------------------------------


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


def paint(
    colour: Colour,
    how: Literal["thin", "thick"] = "thin",
    at: list[int] | None = None,
    scale: float = 1.0,
    each: dict[str, int] | None = None,
    corner: tuple[int, str] = (0, ""),
    thing: Any = None,
    name: int | str = 0,
    flag: bool = False,
) -> None:
    """Paint.

    Args:
        colour: Which.
        how: In which way.
        at: Where.
        scale: How large.
        each: Of each.
        corner: In which.
        thing: What.
        name: Its name.
        flag: Whether.
    """


PAINT = schema_of(paint, "")


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"how": "thick", "at": [1, 2], "scale": 2, "each": {"a": 1}, "corner": [1, "a"]},
        {"at": None, "each": None, "thing": [{}], "name": "x", "scale": 1.5, "flag": True},
        {"at": [], "each": {}, "name": 7},
    ],
)
def test_arguments_that_fit(arguments: dict[str, Any]) -> None:
    assert mistake(PAINT, {"colour": "red"} | arguments) is None


@pytest.mark.parametrize(
    ("arguments", "wrong"), read_table(__file__, "test_arguments_that_do_not_fit")
)
def test_arguments_that_do_not_fit(arguments: dict[str, Any], wrong: str) -> None:
    found = mistake(PAINT, {"colour": "red"} | arguments)
    assert found is not None
    assert found.endswith(wrong)


def test_a_tool_without_arguments_takes_none() -> None:
    def look() -> str:
        """Look."""
        return ""

    assert mistake(schema_of(look, ""), {"a": 1}) == "there is no argument 'a': it takes none"


def no_docstring(a: int) -> int:
    return a


def no_hint(a) -> int:
    """Do.

    Args:
        a: One.
    """
    return a


def no_description(a: int) -> int:
    """Do."""
    return a


def any_names(**names: int) -> None:
    """Do.

    Args:
        names: Some.
    """


@pytest.mark.parametrize(
    ("function", "lack"),
    [
        (no_docstring, "no_docstring cannot be a tool: .* it has no docstring"),
        (no_hint, "no_hint cannot be a tool: Argument a is missing a type hint"),
        (no_description, "no_description cannot be a tool: .* no description for the argument 'a'"),
        (any_names, "any_names cannot be a tool: its argument names cannot be given by name"),
        (Colour, "Colour is a class: a tool is a function"),
    ],
)
def test_what_a_function_lacks_is_said(function: Any, lack: str) -> None:
    with pytest.raises(ValueError, match=f"^environment.path: {lack}"):
        schema_of(function, "environment.path")


# The factory -----------------------------------------------------------------------------------

MODULE = '''
def double(a: int) -> int:
    """Double a number.

    Args:
        a: Which.
    """
    return 2 * a
'''


def config(*path: str) -> EnvironmentConfig:
    return EnvironmentConfig(kind="tools", path=list(path))


@pytest.fixture
def module(tmp_path: Path) -> str:
    file = tmp_path / "tools_of_a_test.py"
    file.write_text(MODULE, encoding="utf-8")
    return str(file)


def test_functions_are_found_by_their_paths(module: str) -> None:
    factory = ToolsFactory(config(f"{module}:double", f"{__name__}:add"))
    assert [schema["function"]["name"] for schema in factory.tools] == ["double", "add"]

    async def episode() -> Turn:
        await factory.open()
        environment = factory.make()
        assert list(await environment.reset({})) == []
        turn = await environment.step(reply(call("double", a=4)))
        await environment.close()
        await factory.close()
        return turn

    assert texts(asyncio.run(episode())) == ["8"]


@pytest.mark.parametrize(
    ("path", "wrong"),
    [
        (["calculator"], "unknown tool 'calculator': expected python, path/to/file.py:name or"),
        (["math:nothing"], "'math' has no function 'nothing'"),
        (["no.module:name"], "cannot import 'no.module': there is no module 'no'"),
        ([f"{__name__}:add", f"{__name__}:add"], "two tools are named 'add'"),
        (["math:pi"], "'pi' in 'math' is no function but a float"),
    ],
)
def test_what_is_wrong_with_a_path_is_said(path: list[str], wrong: str) -> None:
    assert __name__ in sys.modules
    with pytest.raises(ValueError, match=f"^environment.path: {wrong}"):
        ToolsFactory(config(*path))
