"""OpenAI's own client package, where it is installed."""

import asyncio
import textwrap
from pathlib import Path
from typing import Any

import pytest
from agent_programs import opened, reply, run

from rollpacker.env.agent.environment import AgentEnvironment
from rollpacker.env.base import EpisodeError, Turn
from waiting import soon

pytest.importorskip("openai")

AGENT = Path(__file__).parents[2] / "examples" / "agent" / "agent.py"
ROW = {"question": "What is 6 * 7?", "answer": "42"}


def write(folder: Path, program: str) -> list[str]:
    path = folder / "program.py"
    text = "import asyncio, json, os, sys, openai\nfrom openai import OpenAI\n"
    path.write_text(text + textwrap.dedent(program))
    return [str(path)]


def calculate(expression: Any) -> Any:
    return reply("", ("calculate", {"expression": expression}))


@pytest.mark.parametrize(
    ("expression", "result", "last", "reward"),
    [
        ("6 * 5 + 12", "42", "The answer is 42.", 1.0),
        ("42", "42", "The answer is 142.", 0.0),
        ("2 ** 9999999", "Error: ValueError: only whole numbers", "42", 0.0),
        ([1], "Error: TypeError: ", "", 0.0),
    ],
)
def test_the_example(expression: Any, result: str, last: str, reward: float) -> None:
    async def talk(environment: AgentEnvironment) -> Turn:
        opening = await environment.reset(ROW)
        assert opening.prompt == [{"role": "user", "content": "What is 6 * 7?"}]
        assert [tool["function"]["name"] for tool in opening.tools] == ["calculate"]
        turn = await environment.step(calculate(expression))
        (message,) = turn.messages
        assert (message["role"], turn.calls) == ("tool", 1)
        assert message["content"].startswith(result)
        return await environment.step(reply(last))

    metrics = {"right_calls": float(result == ROW["answer"])}
    for path in (str(AGENT), f"{AGENT}:solve"):
        assert run([path], talk) == Turn(done=True, reward=reward, metrics=metrics)


def test_errors_are_those_of_openai_and_are_not_tried_again(tmp_path: Path) -> None:
    program = """
        client = OpenAI()
        user = {"role": "user", "content": "a"}
        assert client.models.list().data[0].id == "policy"
        assert client.models.retrieve("mine").id == "mine"
        def fails(kind, call):
            try:
                call()
            except kind as error:
                return error
        create = client.chat.completions.create
        error = fails(openai.BadRequestError, lambda: create(model="m", messages=[user], n=2))
        assert "one reply at a time" in error.message, error
        wrong = OpenAI(api_key="wrong").chat.completions.create
        assert fails(openai.AuthenticationError, lambda: wrong(model="m", messages=[user]))
        assert fails(openai.NotFoundError, lambda: client.responses.create(model="m", input="a"))
        said = create(model="m", messages=[user]).choices[0].message
        history = [user, said.model_dump(), user]
        error = fails(openai.APIStatusError, lambda: create(model="m", messages=history))
        open(sys.argv[1], "w").write(f"{error.status_code} {error.code}")
    """
    told = tmp_path / "told"

    async def talk(environment: AgentEnvironment) -> None:
        await environment.reset(ROW)
        turn = await environment.step(reply("b"))
        assert turn.messages == [{"role": "user", "content": "a"}]

    run([*write(tmp_path, program), str(told)], talk)
    assert told.read_text() == "410 episode_over"


def test_streams_and_the_asynchronous_client(tmp_path: Path) -> None:
    program = """
        async def main():
            client = openai.AsyncOpenAI()
            messages = [{"role": "user", "content": "a"}]
            tool = {"type": "function", "function": {"name": "calculate", "parameters": {}}}
            async with client.chat.completions.stream(
                model="m", messages=messages, tools=[tool]
            ) as stream:
                async for event in stream:
                    pass
                said = (await stream.get_final_completion()).choices[0]
            assert said.finish_reason == "tool_calls"
            call = said.message.tool_calls[0]
            assert json.loads(call.function.arguments) == {"expression": "1"}
            messages.append(said.message.model_dump(exclude_none=True))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "1"})
            text = ""
            async for chunk in await client.chat.completions.create(
                model="m", messages=messages, tools=[tool], stream=True
            ):
                text += chunk.choices[0].delta.content or ""
            print(json.dumps({"reward": float(text)}))
        asyncio.run(main())
    """

    async def talk(environment: AgentEnvironment) -> Turn:
        await environment.reset(ROW)
        turn = await environment.step(calculate("1"))
        assert turn.messages[0]["content"] == "1"
        return await environment.step(reply("0.25"))

    assert run(write(tmp_path, program), talk) == Turn(done=True, reward=0.25)


def test_a_client_that_loses_patience_and_asks_again_gets_the_reply(tmp_path: Path) -> None:
    program = """
        client = OpenAI(timeout=0.5, max_retries=100)
        user = {"role": "user", "content": "a"}
        said = client.chat.completions.create(model="m", messages=[user]).choices[0].message
        print(said.content)
    """

    async def talk() -> Turn:
        async with opened(write(tmp_path, program)) as factory:
            environment = factory.make()
            await environment.reset(ROW)
            (session,) = factory._endpoint._sessions.values()
            asked = session._last
            assert asked is not None
            await soon(lambda: not asked.heard)
            await soon(lambda: asked.heard)
            turn = await environment.step(reply("0.5"))
            await environment.close()
            return turn

    assert asyncio.run(talk()) == Turn(done=True, reward=0.5)


def test_a_client_that_is_refused_says_why(tmp_path: Path) -> None:
    program = """
        user = {"role": "user", "content": "a"}
        create = OpenAI().chat.completions.create
        create(model="m", messages=[user])
        create(model="m", messages=[user])
    """

    async def talk(environment: AgentEnvironment) -> None:
        await environment.reset(ROW)
        await environment.step(reply("b"))

    why = r"program\.py exited with code 1: .*neither be shortened nor branched"
    with pytest.raises(EpisodeError, match=why):
        run(write(tmp_path, program), talk)
