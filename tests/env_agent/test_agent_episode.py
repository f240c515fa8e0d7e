"""Whole episodes of real programs."""

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from agent_programs import descriptors, opened, reply, run, write

from rollpacker.config import EnvironmentConfig
from rollpacker.env.agent.environment import AgentEnvironment
from rollpacker.env.agent.factory import AgentFactory
from rollpacker.env.base import Environment, EpisodeError, Message, Opening, Turn
from waiting import alive, soon

ROW = {"question": "6 * 7?", "answer": "42", "odd": "é\n\u2028"}
TOOL = {"type": "function", "function": {"name": "calculate", "parameters": {"type": "object"}}}


async def opening_of(environment: AgentEnvironment) -> Opening:
    return await environment.reset(ROW)


def after(said: Message) -> Callable[[AgentEnvironment], Awaitable[Turn]]:
    """The turn behind the first reply."""

    async def talk(environment: AgentEnvironment) -> Turn:
        await environment.reset(ROW)
        return await environment.step(said)

    return talk


CALCULATOR = """
    TOOL = {"type": "function", "function": {"name": "calculate", "parameters": {"type": "object"}}}
    messages = [user(ROW["question"])]
    while True:
        said = ask(messages, tools=[TOOL], temperature=0.1, max_tokens=1, seed=3, stop=["x"])
        messages.append(said)
        if not said.get("tool_calls"):
            break
        for call in said["tool_calls"]:
            given = json.loads(call["function"]["arguments"])
            result = {"role": "tool", "tool_call_id": call["id"]}
            messages.append(result | {"content": str(eval(given["expression"]))})
    reward(float(said["content"] == ROW["answer"]), messages=len(messages))
"""


def test_a_program_with_a_tool_from_its_first_request_to_its_reward(tmp_path: Path) -> None:
    async def talk(environment: AgentEnvironment) -> list[Any]:
        assert isinstance(environment, Environment)
        opening = await environment.reset(ROW)
        calls = reply("I see.", ("calculate", {"expression": "6*7"}), bad=1)
        first = await environment.step(calls)
        return [opening, first, await environment.step(reply("42"))]

    opening, first, last = run(write(tmp_path, CALCULATOR), talk)
    assert opening.prompt == [{"role": "user", "content": "6 * 7?"}]
    assert opening.tools == [TOOL]
    assert not opening.messages
    result = {"role": "tool", "tool_call_id": "same00000", "content": "42"}
    tool = {"name": "calculate"} | result
    assert first == Turn(messages=[tool], calls=2, failed_calls=1)
    assert last == Turn(done=True, reward=1.0, metrics={"messages": 4.0})


def test_the_row_comes_as_one_line_and_then_the_end(tmp_path: Path) -> None:
    program = """
        assert sys.stdin.read() == ""
        ask([user(json.dumps(ROW))])
    """

    opening = run(write(tmp_path, program), opening_of)
    assert json.loads(opening.prompt[0]["content"]) == ROW


def test_a_program_without_a_reward_has_none(tmp_path: Path) -> None:
    program = 'ask([user("x")]); print("done"); print("{not json")'
    assert run(write(tmp_path, program), after(reply("42"))) == Turn(done=True)


def test_a_refused_request_leaves_the_episode_as_it_was(tmp_path: Path) -> None:
    program = """
        said = ask([user("a")])
        for body in (
            {"messages": [user("b"), said, user("c")]},
            {"messages": [user("a")]},
            {"messages": [user("a"), said, user("c")], "n": 4},
            [],
        ):
            status, text = post(body)
            assert status == 400, status
            print(json.loads(text)["error"]["message"], file=sys.stderr)
        said = ask([user("a"), said, user("c")])
        reward(len(said["content"]))
    """

    async def talk(environment: AgentEnvironment) -> list[Turn]:
        await environment.reset(ROW)
        return [await environment.step(reply("1")), await environment.step(reply("333"))]

    first, last = run(write(tmp_path, program), talk)
    assert first.messages == [{"role": "user", "content": "c"}]
    assert (last.done, last.reward) == (True, 3.0)


def test_two_requests_at_once(tmp_path: Path) -> None:
    program = """
        first = begin({"messages": [user("a")]})
        assert post({"messages": [user("a")], "n": 2})[0] == 400  # by now the first is read
        second, _ = post({"messages": [user("b")]})
        status, text = end(first)
        reward(json.loads(text)["choices"][0]["message"]["content"] == "1", second=second)
    """

    turn = run(write(tmp_path, program), after(reply("1")))
    assert (turn.reward, turn.metrics) == (1.0, {"second": 400.0})


def test_a_connection_that_was_lost_is_made_again(tmp_path: Path) -> None:
    noticed = tmp_path / "noticed"
    program = f"""
        import time
        begin({{"messages": [user("a")]}}).close()
        while not os.path.exists({str(noticed)!r}):
            time.sleep(0.005)
        reward(ask([user("a")])["content"] == "1")
    """

    async def talk(environment: AgentEnvironment) -> Turn:
        await environment.reset(ROW)
        assert environment._session is not None
        asked = environment._session._last
        assert asked is not None
        await soon(lambda: not asked.heard)
        noticed.touch()
        return await environment.step(reply("1"))

    assert run(write(tmp_path, program), talk) == Turn(done=True, reward=1.0)


def test_clients_of_openai_say_that_they_ask_again(tmp_path: Path) -> None:
    program = """
        first = post({"messages": [user("a")]})
        branch = post({"messages": [user("a")]})
        again = post({"messages": [user("a")]}, more="X-Stainless-Retry-Count: 1\\r\\n")
        texts = [json.loads(body)["choices"][0]["message"] for _, body in (first, again)]
        reward(texts[0] == texts[1], branch=branch[0])
    """

    turn = run(write(tmp_path, program), after(reply("1")))
    assert (turn.reward, turn.metrics) == (1.0, {"branch": 400.0})


def test_calls_are_not_counted_where_the_program_takes_none(tmp_path: Path) -> None:
    turn = run(
        write(tmp_path, 'reward(len(ask([user("a")])["content"]) > 5)'),
        after(reply("", ("calculate", {}), bad=1)),
    )
    assert turn == Turn(done=True, reward=1.0)


def test_streams_have_the_whole_reply_in_a_chunk(tmp_path: Path) -> None:
    program = """
        TOOL = {"type": "function", "function": {"name": "f"}}
        options = {"stream": True, "stream_options": {"include_usage": True}, "tools": [TOOL]}
        status, text = post({"messages": [user("a")], **options})
        *chunks, last, nothing = text.split("\\n\\n")
        assert (last, nothing) == ("data: [DONE]", "")
        chunks = [json.loads(chunk.removeprefix("data: ")) for chunk in chunks]
        (first,), (second,), third = (chunk["choices"] for chunk in chunks)
        call = first["delta"]["tool_calls"][0]
        assert call["index"] == 0 and call["function"]["arguments"] == '{"x": 1}', call
        assert first["finish_reason"] is None and second["delta"] == {} and third == []
        assert second["finish_reason"] == "tool_calls"
        assert chunks[2]["usage"]["total_tokens"] == 0
        assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
        reward(first["delta"]["content"] == "I call.")
    """

    assert run(write(tmp_path, program), after(reply("I call.", ("f", {"x": 1})))).reward == 1.0


def test_other_paths_and_keys(tmp_path: Path) -> None:
    program = """
        models = post({}, method="GET", path="/v1/models")
        assert json.loads(models[1])["data"][0]["id"] == "policy", models
        one = post({}, method="GET", path="/v1/models/mine?x=1")
        assert json.loads(one[1])["id"] == "mine", one
        assert post({}, key="sk-wrong")[0] == 401
        assert post({}, key="")[0] == 401
        assert post({}, key="sk-wrong", path="/v1/models")[0] == 401
        assert post({}, path="/v1/responses")[0] == 404
        assert post({}, method="GET")[0] == 405
        assert post('{"messages": ' + 20_000 * "[" + 20_000 * "]" + "}")[0] == 400
        assert post("no json")[0] == 400
        status, text = post({"messages": [user("a")]}, key="sk-wrong")
        assert "OPENAI_API_KEY" in json.loads(text)["error"]["message"]
        ask([user("b")])
    """

    assert run(write(tmp_path, program), opening_of).prompt == [{"role": "user", "content": "b"}]


def test_sessions_are_apart(tmp_path: Path) -> None:
    async def talk() -> list[float | None]:
        async with opened(
            write(tmp_path, 'reward(float(ask([user(ROW["x"])])["content"]))')
        ) as factory:
            made = [factory.make() for _ in range(4)]
            openings = await asyncio.gather(*(e.reset({"x": str(i)}) for i, e in enumerate(made)))
            assert [o.prompt and o.prompt[0]["content"] for o in openings] == list("0123")
            turns = await asyncio.gather(*(e.step(reply(str(i))) for i, e in enumerate(made)))
            await asyncio.gather(*(each.close() for each in made))
            return [turn.reward for turn in turns]

    assert asyncio.run(talk()) == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("import nothing_of_this_name", r"program\.py exited with code 1: .*nothing_of_this_name"),
        ("os.kill(os.getpid(), 9)", r"program\.py was killed by signal 9"),
        ("sys.exit(7)", r"program\.py exited with code 7"),
        ("reward(1)", r"program\.py ended without a request to the model"),
    ],
)
def test_a_program_that_ends_before_it_asks_fails(tmp_path: Path, program: str, why: str) -> None:
    with pytest.raises(EpisodeError, match=why):
        run(write(tmp_path, program), opening_of)


@pytest.mark.parametrize(
    ("cause", "why"),
    [
        ("raise KeyError(3)", "KeyError: 3"),
        ("os.kill(os.getpid(), 9)", "killed by signal 9"),
        ('ask([user("b"), user("c")])', r"program\.py exited with code 1: 400 messages\[0\]"),
    ],
)
def test_a_program_that_ends_badly_fails(tmp_path: Path, cause: str, why: str) -> None:
    program = f'ask([user("a")]); reward(1); {cause}'
    with pytest.raises(EpisodeError, match=why):
        run(write(tmp_path, program), after(reply("1")))


def test_a_program_that_somebody_kills_while_the_model_samples(tmp_path: Path) -> None:
    async def talk(environment: AgentEnvironment) -> None:
        opening = await environment.reset(ROW)
        assert opening.prompt is not None
        os.kill(int(opening.prompt[0]["content"]), 9)
        await environment.step(reply("1"))

    with pytest.raises(EpisodeError, match="was killed by signal 9"):
        run(write(tmp_path, "ask([user(str(os.getpid()))]); ask([user('b')])"), talk)


def test_megabytes_of_output_are_read_and_forgotten(tmp_path: Path) -> None:
    program = """
        junk = "garbage " * 131072
        for _ in range(8):
            print(junk)
            print(junk, file=sys.stderr)
        ask([user("a")])
        for _ in range(8):
            print(junk)
        reward(1)
        sys.stdout.write("more")
    """

    assert run(write(tmp_path, program), after(reply("1"))) == Turn(done=True, reward=1.0)


def test_what_a_program_leaves_behind_ends_with_it_and_holds_nothing_up(tmp_path: Path) -> None:
    program = """
        import subprocess
        child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(1000)"])
        other = subprocess.Popen(
            [sys.executable, "-S", "-c", "import time; time.sleep(1000)"], start_new_session=True
        )
        ask([user("a")])
        reward(1, child=child.pid, other=other.pid)
        sys.stdout.flush()
        os._exit(0)
    """

    async def talk(environment: AgentEnvironment) -> Turn:
        before = descriptors()
        await environment.reset(ROW)
        turn = await environment.step(reply("1"))
        await soon(lambda: not alive(int(turn.metrics["child"])))
        await soon(lambda: not len(environment._endpoint._places))
        assert descriptors() <= before
        return turn

    turn = run(write(tmp_path, program), talk)
    os.kill(int(turn.metrics["other"]), 9)
    assert turn.reward == 1.0


def test_the_program_has_what_clients_need_and_no_proxy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_PROXY", "example.org")
    monkeypatch.setenv("MINE", "here")
    monkeypatch.setenv("HF_TOKEN", "hf_none_of_its_business")
    names = ["OPENAI_BASE_URL", "OPENAI_API_KEY", "NO_PROXY", "no_proxy", "MINE", "HF_TOKEN"]

    opening = run(
        write(tmp_path, f"ask([user(json.dumps([os.environ.get(n) for n in {names}]))])"),
        opening_of,
        variables=["MINE"],
    )
    url, key, proxy, lower, mine, token = json.loads(opening.prompt[0]["content"])
    assert url.startswith("http://127.0.0.1:")
    assert url.endswith("/v1")
    assert len(key) > 40
    assert (proxy, lower, mine) == ("example.org,127.0.0.1", "127.0.0.1", "here")
    assert token is None


def test_a_variable_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'NOT_HERE' is not set here"):
        run(write(tmp_path, ""), AgentEnvironment.close, variables=["NOT_HERE"])


def test_a_program_that_cannot_be_started_fails_its_episode(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("no program")
    program.chmod(0o755)

    with pytest.raises(EpisodeError, match=r"^program cannot be started: Exec format error$"):
        run([str(program)], opening_of)


@pytest.mark.parametrize(
    ("path", "why"),
    [
        (["no/such/agent.py"], "there is no program 'no/such/agent.py'"),
        (["no-such-program"], "there is no program 'no-such-program'"),
        (["python agent.py"], r"no program 'python agent.py': give it .* as a list"),
    ],
)
def test_a_program_that_is_not_there_is_found_at_the_start(path: list[str], why: str) -> None:
    with pytest.raises(ValueError, match=f"environment.path: .*{why}"):
        AgentFactory(EnvironmentConfig(kind="agent", path=path))


def test_a_python_file_runs_as_this_process_does(tmp_path: Path) -> None:
    path = write(tmp_path, 'ask([user(sys.executable + " " + sys.argv[1])])')[-1]

    opening = run([path, "argument"], opening_of)
    assert opening.prompt[0]["content"] == f"{sys.executable} argument"
