"""Episodes of Python functions in the place of programs."""

import textwrap
from pathlib import Path
from typing import Any

import pytest
from agent_programs import reply, run

from rollpacker.config import EnvironmentConfig
from rollpacker.env.agent.environment import AgentEnvironment
from rollpacker.env.agent.factory import AgentFactory
from rollpacker.env.base import EpisodeError, Turn

ROW = {"question": "6 * 7?", "answer": "42"}
CLIENT = """
import json, urllib.request

def ask(messages, base_url, api_key):
    head = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    body = json.dumps({"messages": messages}).encode()
    request = urllib.request.Request(f"{base_url}/chat/completions", body, head)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    return json.load(opener.open(request))["choices"][0]["message"]
"""
SOLVES = """
def solve(row, **client):
    messages = [{"role": "user", "content": row["question"]}]
    messages.append(ask(messages, **client))
    messages.append({"role": "user", "content": "Sure?"})
    return {"reward": float(ask(messages, **client)["content"] == row["answer"]), "asked": 2}
"""


def written(folder: Path, body: str) -> list[str]:
    file = folder / f"agent_{folder.name}.py"
    file.write_text(CLIENT + textwrap.dedent(body))
    return [f"{file}:solve"]


def test_a_function_asks_and_returns_its_reward(tmp_path: Path) -> None:
    async def talk(environment: AgentEnvironment) -> list[Any]:
        opening = await environment.reset(ROW)
        return [opening, await environment.step(reply("41")), await environment.step(reply("42"))]

    opening, first, last = run(written(tmp_path, SOLVES), talk)
    assert opening.prompt == [{"role": "user", "content": "6 * 7?"}]
    assert first == Turn(messages=[{"role": "user", "content": "Sure?"}])
    assert last == Turn(done=True, reward=1.0, metrics={"asked": 2.0})


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("def solve(row, **_):\n    raise KeyError('board')", "KeyError: 'board'"),
        ("def solve(row, **_):\n    return object()", "it returned object"),
        ("def solve(row, **_):\n    return 1.0", "ended without a request"),
        ("async def solve(row, **_):\n    raise SystemExit(3)", "SystemExit"),
    ],
)
def test_what_it_does_wrong_is_its_episodes_failure(tmp_path: Path, body: str, words: str) -> None:
    async def talk(environment: AgentEnvironment) -> None:
        with pytest.raises(EpisodeError, match=words):
            await environment.reset(ROW)

    run(written(tmp_path, body), talk)


def test_a_coroutine_is_cancelled_when_its_episode_is_given_up(tmp_path: Path) -> None:
    body = """
        import asyncio, pathlib

        async def solve(row, **client):
            asking = asyncio.to_thread(ask, [{"role": "user", "content": "?"}], **client)
            task = asyncio.ensure_future(asking)
            try:
                await asyncio.sleep(1000.0)
            except asyncio.CancelledError:
                pathlib.Path(row["marker"]).touch()
                raise
    """
    marker = tmp_path / "cancelled"

    async def talk(environment: AgentEnvironment) -> None:
        await environment.reset(ROW | {"marker": str(marker)})
        await environment.close()

    run(written(tmp_path, body), talk)
    assert marker.exists()


def test_a_function_that_is_not_there_is_named(tmp_path: Path) -> None:
    path = written(tmp_path, SOLVES)[0].replace(":solve", ":solved")
    with pytest.raises(ValueError, match=r"environment.path: .* has no function 'solved'"):
        AgentFactory(EnvironmentConfig(kind="agent", path=[path]))
