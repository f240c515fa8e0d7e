"""What tools return is text for the model, and a tool that never does is the run's affair."""

import asyncio
import dataclasses
import enum
from collections import deque
from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import other_trainers
import pytest
from pool_driving import Driver, pool_of
from pydantic import BaseModel
from tool_replies import call, reply

from rollpacker.env.adapters import TrlEnvironment, observed, schemas
from rollpacker.env.base import ToolFaults, Turn
from rollpacker.env.calls.values import NoTextError, as_text
from rollpacker.env.tools import ToolsEnvironment, tools_of
from waiting import soon


@dataclasses.dataclass
class Point:
    x: int
    more: Any = None


class Price(BaseModel):
    amount: Decimal
    of: tuple[str, ...] = ()


class Colour(enum.Enum):
    RED = "red"


RESULTS: list[tuple[Any, str]] = [
    ("text", "text"),
    (None, "null"),
    ({"é": [1, None, True]}, '{"é": [1, null, true]}'),
    (np.int64(3), "3"),
    (np.float32(0.5), "0.5"),
    (np.bool_(True), "true"),
    (np.array([[1, 2], [3, 4]]), "[[1, 2], [3, 4]]"),
    (np.array(7), "7"),
    (Decimal("12.50"), "12.50"),
    (Decimal("1e999999"), "1E+999999"),
    (date(2026, 1, 2), "2026-01-02"),
    (datetime(2026, 1, 2, 3, tzinfo=UTC), "2026-01-02T03:00:00+00:00"),
    ({3, 10, 2}, "[2, 3, 10]"),
    (frozenset({"b", "a"}), '["a", "b"]'),
    ({1, "a"}, '["a", 1]'),
    ("é".encode(), "é"),
    (Point(1, {"at": date(2026, 1, 2)}), '{"x": 1, "more": {"at": "2026-01-02"}}'),
    (Price(amount=Decimal("0.5"), of=("a",)), '{"amount": "0.5", "of": ["a"]}'),
    ({"a": np.float64(1.0), (1, 2): {4}}, '{"a": 1.0, "[1, 2]": [4]}'),
    (
        {np.int64(1): Colour.RED, None: 1, date(2026, 1, 2): b""},
        '{"1": "red", "null": 1, "2026-01-02": ""}',
    ),
    (Colour.RED, "red"),
    (PurePosixPath("/a"), "/a"),
    (deque([1, Decimal(2)]), '[1, "2"]'),
    ({"a": 1}.values(), "[1]"),
    (np.array(["2026-01-02"], "datetime64[D]"), '["2026-01-02"]'),
]


def step(tool: Callable[..., Any], text: str, faults: ToolFaults | None = None) -> Turn:
    return asyncio.run(ToolsEnvironment(tools_of([tool], ""), faults).step(reply(text)))


@pytest.mark.parametrize(("result", "text"), RESULTS, ids=range(len(RESULTS)))
def test_what_has_an_obvious_form_is_shown_in_it(result: Any, text: str) -> None:
    def give() -> Any:
        """Give it."""
        return result

    turn = step(give, call("give"))
    assert [message["content"] for message in turn.messages] == [text]
    assert turn.failed_calls == 0


HOLDS_ITSELF = Point(1)
HOLDS_ITSELF.more = [HOLDS_ITSELF]
ODD = {
    "object": object(),
    "generator": (each for each in ()),
    "type": Point,
    "bytes that are no text": b"\xff",
    "Point, nested too deep": HOLDS_ITSELF,
    "complex": {"deep": [1j]},
}


@pytest.mark.parametrize("kind", ODD)
def test_what_has_none_fails_and_is_told_to_the_user_once(kind: str) -> None:
    with pytest.raises(NoTextError, match=f"^{kind}$"):
        as_text(ODD[kind])

    def give() -> Any:
        """Give it."""
        return ODD[kind]

    faults = ToolFaults()
    turn = step(give, call("give") * 2, faults)
    shown = f"Error: give returned {kind}, which cannot be shown"
    assert [message["content"] for message in turn.messages] == [shown] * 2
    assert turn.failed_calls == 2
    line = f"environment.path: tool 'give': it returned {kind}: let it return text or a JSON value"
    assert faults.said() == [line]
    assert faults.said() == []
    assert faults.broken is None


def test_what_an_environment_shows_is_written_alike() -> None:
    assert observed(np.array([1, 2])) == "[1, 2]"
    assert observed({"board": np.eye(1)}) == '{"board": [[1.0]]}'
    assert observed(None) == ""
    assert observed({"x": 1j}) == '{"x": "1j"}'


# Names -----------------------------------------------------------------------------------------


def named(function: str, args: str, kwargs: str) -> str:
    """Say what it is given.

    Args:
        function: One.
        args: Another.
        kwargs: A third.
    """
    return function + args + kwargs


def of_itself(self: str) -> str:
    """Say what it is given.

    Args:
        self: What.
    """
    return self


def test_arguments_may_have_any_name() -> None:
    turn = step(named, call("named", function="a", args="b", kwargs="c"))
    assert turn.messages[0]["content"] == "abc"
    made = {"name": "of_itself", "arguments": {"self": "x"}}
    turn = step(of_itself, f"<tool_call>{made}</tool_call>".replace("'", '"'))
    assert turn.messages[0]["content"] == "x"


class Keeper(other_trainers.Counter):
    """Keeps the row that it is begun with."""

    def reset(self, **row: Any) -> None:
        self.row = row


class Taker(other_trainers.Counter):
    """Takes one column."""

    def reset(self, function: str) -> None:
        self.row = function


@pytest.mark.parametrize(("made", "kept"), [(Keeper, {"function": "f", "args": 1}), (Taker, "f")])
def test_columns_may_have_any_name(made: type, kept: Any) -> None:
    instance = made()
    environment = TrlEnvironment(instance, schemas(made, ""))
    asyncio.run(environment.reset({"function": "f", "args": 1, "self": 2}))
    assert instance.row == kept


# Tools that only fail --------------------------------------------------------------------------


def down(what: str) -> Any:
    """Look it up.

    Args:
        what: It.
    """
    if what == "answer":
        return what
    if what == "odd":
        return object()
    raise ConnectionError("refused")


TOOLS = tools_of([down, of_itself], "")


async def ask(faults: ToolFaults, prompt: str, what: str) -> None:
    environment = ToolsEnvironment(TOOLS, faults)
    await environment.reset({"prompt": prompt})
    await environment.step(reply(call("down", what=what)))


def failed(*asked: tuple[str, str]) -> str | None:
    """Why the run ends when these prompts have been asked for these things."""

    async def all_of_them() -> str | None:
        faults = ToolFaults()
        for prompt, what in asked:
            await ask(faults, prompt, what)
        return faults.broken

    return asyncio.run(all_of_them())


def test_a_tool_that_always_raises_is_broken() -> None:
    asked = [(f"prompt {n % 4}", "it") for n in range(32)]
    assert failed(*asked[:31]) is None
    error = failed(*asked)
    assert error is not None
    assert error.startswith("environment.path: tool 'down' failed 32 of 32: ")
    assert "test_tool_results.py" in error
    assert "in down: ConnectionError: refused: fix it" in error
    assert "\n" not in error


def test_an_answer_speaks_for_a_tool() -> None:
    asked = [(f"prompt {n % 4}", "it") for n in range(31)]
    assert failed(*asked, ("prompt 1", "answer"), *asked) is None


def test_one_prompt_may_ask_for_what_cannot_be_had() -> None:
    assert failed(*[("the same", "it")] * 100) is None


def test_calls_that_are_wrong_are_the_model_s() -> None:
    async def wrong() -> str | None:
        faults = ToolFaults()
        for n in range(100):
            environment = ToolsEnvironment(TOOLS, faults)
            await environment.reset({"prompt": str(n)})
            await environment.step(reply(call("down", which="it") + call("up") + "<tool_call>"))
        return faults.broken

    assert asyncio.run(wrong()) is None


def test_a_tool_whose_results_cannot_be_shown_is_broken_sooner() -> None:
    asked = [("a", "odd"), ("b", "odd"), ("b", "odd"), ("c", "odd")]
    assert failed(*asked[:3]) is None
    error = failed(*asked)
    assert error is not None
    assert "tool 'down' failed 4 of 4: it returned object: let it return" in error


BROKEN = """
def odd(what: str):
    '''Give an odd thing.

    Args:
        what: Nothing.
    '''
    return object()
"""


def test_the_run_hears_of_it(tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text(BROKEN)

    async def told() -> None:
        driver = Driver(pool)
        for prompt in "abc":
            episode = await driver.begun(prompt=prompt)
            turn = (await driver.told(episode, call("odd", what="x"))).answer
            assert (turn.calls, turn.failed_calls) == (1, 1)
            if prompt == "a":
                assert await soon(pool.said) == [
                    "environment.path: tool 'odd': it returned object: let it return text or a "
                    "JSON value"
                ]
        await soon(lambda: pool.broken)

    pool = pool_of(f"{file}:odd", kind="tools")
    try:
        pool.wait_ready()
        asyncio.run(told())
        assert pool.broken is not None
        assert pool.broken.startswith("environment.path: tool 'odd' failed 3 of 3: it returned")
    finally:
        pool.close()
