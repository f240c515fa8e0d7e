"""What the model says, as its environment gets it, turn for turn."""

import asyncio
import json

import pytest
from one_episode import Says, talk
from tool_replies import call

from rollpacker.env.tools import ToolsEnvironment, tools_of


def add(a: dict) -> str:  # pyright: ignore
    """Add.

    Args:
        a: What.
    """
    return str(a)


TOOLS = tools_of([add], "")
YES = [{"role": "user", "content": "Go on."}]


def test_no_two_calls_of_a_conversation_have_one_id() -> None:
    said = call("add", a=2)
    bad = "<tool_call>7</tool_call>"
    environment = Says(turns=[YES] * 4)
    talk("qwen3", environment, said * 2, bad + said, "No call.", said)
    ids = [
        each["id"]
        for message in environment.heard
        for each in (*message.get("tool_calls", ()), *message.get("bad_calls", ()))
    ]
    assert len(ids) == len({*ids}) == 5
    assert {len(each) for each in ids} == {9}
    assert all(each.isalnum() for each in ids)


def test_ids_are_the_same_when_it_is_said_again() -> None:
    first, again = Says(turns=[YES] * 2), Says(turns=[YES] * 2)
    for environment in (first, again):
        talk("qwen3", environment, call("add", a=2), call("add", a=2))
    assert first.heard == again.heard


DEEP = {
    "qwen3": '<tool_call>{"name": "add", "arguments": %s}</tool_call>',
    "llama3_1": '{"name": "add", "parameters": %s}',
}


@pytest.mark.parametrize("name", DEEP)
@pytest.mark.parametrize("text", [False, True])
@pytest.mark.parametrize("depth", [100, *range(900, 1010, 5), 5_000])
def test_arguments_that_are_nested_too_deep_are_no_call(name: str, text: bool, depth: int) -> None:
    arguments = '{"a": ' * depth + "1" + "}" * depth
    environment = Says(turns=[YES])
    said = DEEP[name] % (json.dumps(arguments) if text else arguments)
    answer = talk(name, environment, said)[-1]
    assert answer.error == ""
    (message,) = environment.heard
    assert "tool_calls" not in message
    assert "nested too deep" in message["bad_calls"][0]["error"]
    turn = asyncio.run(ToolsEnvironment(TOOLS).step(message))
    assert (turn.calls, turn.failed_calls) == (1, 1)


def test_arguments_may_be_nested_as_deep_as_anybody_means_it() -> None:
    environment = Says(turns=[YES])
    talk("qwen3", environment, DEEP["qwen3"] % ('{"a": ' * 60 + "1" + "}" * 60))
    turn = asyncio.run(ToolsEnvironment(TOOLS).step(environment.heard[0]))
    assert turn.failed_calls == 0
