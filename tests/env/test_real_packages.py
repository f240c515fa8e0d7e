"""The packages whose environments are taken as they are, where they are installed."""

import asyncio
import importlib
import json
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from chat_models import ADD, make_tokenizer
from other_trainers import Counter
from tool_replies import call

from rollpacker.config import EnvironmentConfig
from rollpacker.env.base import Opening, Turn
from rollpacker.env.load import load
from rollpacker.env.template import Template

PROMPT = [{"role": "user", "content": "Play.\n"}]


def config(path: str, **options: Any) -> EnvironmentConfig:
    return EnvironmentConfig(kind="python", path=[path], options=options)


def answer(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def play(act: Callable[[Any], Awaitable[Any]], made: EnvironmentConfig) -> Any:
    async def episode() -> Any:
        factory = load(made)
        await factory.open()
        environment = factory.make()
        try:
            return await act(environment)
        finally:
            await environment.close()
            await factory.close()

    return asyncio.run(episode())


# gem -------------------------------------------------------------------------------------------

GUESS = "gem.envs.game_env.guess_the_number:GuessTheNumberEnv"


async def search(environment: Any) -> list[Turn]:
    """Guess by halves until the game is over."""
    opening = await environment.reset({"prompt": PROMPT, "seed": 3})
    assert isinstance(opening, Opening)
    assert opening.prompt is not None
    assert opening.prompt[0]["content"].startswith("Play.\nYou are playing Guess The Number.")
    low, high, turns = 1, 20, []
    while not turns or not turns[-1].done:
        guess = (low + high) // 2
        turns.append(await environment.step(answer(f"<think>Hm.</think>\\boxed{{{guess}}}")))
        said = turns[-1].messages[0]["content"] if turns[-1].messages else ""
        low, high = (guess + 1, high) if "higher" in said else (low, guess - 1)
    return turns


def test_gem_s_games_are_played_to_their_end() -> None:
    pytest.importorskip("gem.envs")
    turns = play(search, config(GUESS, max_number=20))
    assert turns[-1].reward == 1.0
    assert turns == play(search, config(GUESS, max_number=20))
    by_name = config("gem:make", env_id="game:GuessTheNumber-v0-easy", max_number=20, max_turns=9)
    assert play(search, by_name) == turns


def test_gem_s_wrappers_and_reasoning_gym() -> None:
    pytest.importorskip("gem.envs")
    pytest.importorskip("reasoning_gym")

    async def act(environment: Any) -> Any:
        opening = await environment.reset({"prompt": PROMPT})
        return opening, await environment.step(answer("\\boxed{nothing}"))

    path = "gem.envs.reasoning_gym:ReasoningGymEnv"
    opening, turn = play(act, config(path, name="leg_counting", size=20))
    assert "legs" in opening.prompt[0]["content"]
    assert turn.done
    assert turn.reward is not None


# skyrl-gym -------------------------------------------------------------------------------------

ROW = {"prompt": PROMPT, "reward_spec": {"ground_truth": "12"}, "max_turns": 3}


@pytest.mark.parametrize(
    ("path", "options"),
    [
        ("skyrl_gym.envs.gsm8k.multi_turn_env:GSM8kMultiTurnEnv", {}),
        ("skyrl_gym:make", {"id": "gsm8k_multi_turn"}),
    ],
)
def test_skyrl_gym_s_turns(path: str, options: dict[str, Any]) -> None:
    pytest.importorskip("skyrl_gym.envs")

    async def act(environment: Any) -> list[Any]:
        opening = await environment.reset(ROW)
        texts = ("It may be 7.", "#### 11", "#### 12")
        return [opening, *[await environment.step(answer(text)) for text in texts]]

    opening, nothing, wrong, right = play(act, config(path, **options))
    assert opening == Opening()
    assert nothing.reward == 0.0
    assert "#### ANSWER" in nothing.messages[0]["content"]
    assert 0 < wrong.reward < 0.1
    assert right == Turn(reward=1.0, done=True, metrics={"steps": 3.0})


# OpenEnv ---------------------------------------------------------------------------------------


@contextmanager
def server(app: Any) -> Iterator[str]:
    uvicorn = importlib.import_module("uvicorn")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        running = uvicorn.Server(uvicorn.Config(app, log_level="error"))
        thread = threading.Thread(target=running.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            for _ in range(3000):
                if running.started:
                    break
                time.sleep(0.01)
            assert running.started
            yield f"http://127.0.0.1:{port}"
        finally:
            running.should_exit = True
            thread.join()


def openenv_app() -> tuple[Any, Any]:
    """A server of a game in which what is said is repeated, and a client of it."""
    core = importlib.import_module("openenv.core.env_server")
    clients = importlib.import_module("openenv.core.env_client")
    results = importlib.import_module("openenv.core.client_types")

    class Say(core.Action):
        text: str

    class Heard(core.Observation):
        echo: str

    class Echo(core.Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed: int | None = None, episode_id: Any = None, **_: Any) -> Heard:
            self.turns = 0
            return Heard(echo=f"seed {seed}")

        def step(self, action: Say, timeout_s: Any = None, **_: Any) -> Heard:
            self.turns += 1
            return Heard(echo=action.text, reward=len(action.text), done=self.turns == 2)

        @property
        def state(self) -> Any:
            return core.State(step_count=self.turns)

    class EchoClient(clients.EnvClient[Say, Heard, core.State]):
        def _step_payload(self, action: Say) -> dict[str, Any]:
            return action.model_dump()

        def _parse_result(self, payload: dict[str, Any]) -> Any:
            heard = Heard(**payload["observation"])
            return results.StepResult(heard, payload.get("reward"), payload.get("done", False))

        def _parse_state(self, payload: dict[str, Any]) -> Any:
            return core.State(**payload)

    return core.create_fastapi_app(Echo, Say, Heard), EchoClient


@pytest.mark.parametrize("kind", ["typed", "generic", "sync"])
def test_openenv_s_clients_play_with_their_server(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("openenv.core.env_server", "uvicorn", "fastapi", "websockets"):
        pytest.importorskip(name)
    app, client = openenv_app()
    if kind == "generic":
        client = importlib.import_module("openenv.core").GenericEnvClient

    def make(base_url: str) -> Any:
        made = client(base_url=base_url)
        return made.sync() if kind == "sync" else made

    monkeypatch.setattr("other_trainers.made_by_a_test", make, raising=False)
    text = '{"text": "Hi"}' if kind == "generic" else "Hi"

    async def act(environment: Any) -> list[Any]:
        return [
            await environment.reset({"prompt": PROMPT, "seed": 7}),
            await environment.step(answer(text)),
            await environment.step(answer('{"text": "Hello"}')),
        ]

    with server(app) as url:
        opening, first, last = play(act, config("other_trainers:made_by_a_test", base_url=url))
    assert opening == Opening(prompt=[{"role": "user", "content": "Play.\nseed 7"}])
    assert first == Turn(messages=[{"role": "user", "content": "Hi"}], reward=2.0)
    assert last == Turn(reward=5.0, done=True)


# TRL -------------------------------------------------------------------------------------------


def test_replies_are_read_as_trl_reads_them() -> None:
    utils = pytest.importorskip("trl.chat_template_utils")
    tokenizer = make_tokenizer("qwen3")
    utils.add_response_schema(tokenizer)
    template = Template(make_tokenizer("qwen3"), {})
    text = "I add.\n" + call("add", a=2, b=3) + "\n" + call("add", a=1, b=[1, {"c": "é"}])
    ids = tokenizer(text + "<|im_end|>", add_special_tokens=False)["input_ids"]
    theirs = utils.parse_response(tokenizer, ids, prefix=template.prompt(PROMPT, [ADD]))
    ours = template.reply(ids).message
    assert ours["content"] == theirs["content"].strip()
    calls = [each["function"] for each in ours["tool_calls"]]
    read = [{**each, "arguments": json.loads(each["arguments"])} for each in calls]
    assert read == [each["function"] for each in theirs["tool_calls"]]


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3_instruct_2507"])
def test_what_tools_answer_has_the_tokens_that_trl_gives_it(name: str) -> None:
    trainer = pytest.importorskip("trl.trainer.grpo_trainer")
    tokenizer = make_tokenizer(name)
    theirs = SimpleNamespace(
        processing_class=tokenizer,
        _tokenizer=tokenizer,
        chat_template=None,
        chat_template_kwargs={},
        _is_vlm=False,
    )
    results = [{"role": "tool", "name": "add", "content": text} for text in ("5", "é\n<b>")]
    expected = trainer.GRPOTrainer._get_tool_suffix_ids(theirs, results)
    delta = Template(tokenizer, {}).delta([5, tokenizer.eos_token_id], results, [ADD])
    assert delta == expected


def test_trl_finds_the_tools_that_are_found_here() -> None:
    trainer = pytest.importorskip("trl.trainer.grpo_trainer")
    members = trainer.inspect.getmembers(Counter, predicate=trainer.inspect.isfunction)
    theirs = [name for name, _ in members if not name.startswith("_")]
    ours = [each["function"]["name"] for each in load(config("other_trainers:Counter")).tools]
    assert ours == [each for each in theirs if each not in ("reset", "get_reward", "close")]
