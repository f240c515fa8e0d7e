"""Other trainers' environments, played through their adapters."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import other_trainers
import pytest
from tool_replies import call, reply

from rollpacker.env.adapters import (
    GymEnvironment,
    OpenenvEnvironment,
    SkyrlEnvironment,
    TrlEnvironment,
    action_class,
    prompt_of,
    schemas,
    seed_of,
)
from rollpacker.env.base import EpisodeError, Opening, Turn

PROMPT = [{"role": "system", "content": "Play."}, {"role": "user", "content": "Go."}]
ROW: Mapping[str, Any] = {"prompt": PROMPT, "goal": 9, "name": "you"}


def play(act: Callable[[], Awaitable[Any]]) -> Any:
    return asyncio.run(act())  # type: ignore[arg-type]


def answer(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


# TRL -------------------------------------------------------------------------------------------


def trl(made: type = other_trainers.Counter) -> tuple[Any, TrlEnvironment]:
    instance = made()
    return instance, TrlEnvironment(instance, schemas(made, ""))


def test_trl_s_methods_are_tools_and_its_reward_is_the_episode_s() -> None:
    counter, environment = trl()

    async def episode() -> list[Any]:
        return [
            await environment.reset(ROW),
            await environment.step(reply(call("increment", by=8) + call("increment"))),
            await environment.step(reply(call("look"))),
            await environment.step(reply(call("get_reward") + call("_hidden") + call("close"))),
            await environment.step(reply("Done.")),
            await environment.final_reward(),
            await environment.close(),
        ]

    opening, turn, look, hidden, last, reward, _ = play(episode)
    assert opening == Opening(prompt=[PROMPT[0], {"role": "user", "content": "Go. Count to 9."}])
    assert [message["content"] for message in turn.messages] == ["8", "9"]
    assert (turn.calls, turn.failed_calls) == (2, 0)
    assert look.messages[0]["content"] == "9"
    assert hidden.failed_calls == 3
    assert last == Turn(done=True)
    assert reward == 1.0
    assert counter.closed
    assert PROMPT[1]["content"] == "Go."


def test_trl_s_environment_may_have_nothing_to_say() -> None:
    _, environment = trl(other_trainers.Silent)

    async def episode() -> Any:
        return await environment.reset(ROW), await environment.final_reward()

    assert play(episode) == (Opening(), None)


def test_trl_s_reset_gives_text_and_its_reward_is_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    for said in (7, ["text"]):
        monkeypatch.setattr(other_trainers.Counter, "reset", lambda self, said=said, **row: said)
        with pytest.raises(EpisodeError, match=f"reset returned {type(said).__name__}, not text"):
            play(lambda: trl()[1].reset(ROW))
    monkeypatch.setattr(other_trainers.Counter, "get_reward", lambda self: "much")
    with pytest.raises(EpisodeError, match="what get_reward returned is 'much', not a number"):
        play(lambda: trl()[1].final_reward())


# gem -------------------------------------------------------------------------------------------


def gym(instance: Any) -> GymEnvironment:
    return GymEnvironment(instance, asyncio.Lock())


def test_gem_s_observations_are_the_user_s() -> None:
    game = other_trainers.Guess()
    environment = gym(game)

    async def episode() -> list[Any]:
        opening = await environment.reset(ROW)
        wrong = await environment.step(answer("0"))
        right = await environment.step(answer(f"<think>So.</think>{game.number}"))
        await environment.close()
        return [opening, wrong, right]

    opening, wrong, right = play(episode)
    first = {"role": "user", "content": "Go.Guess from 1 to 100."}
    assert opening == Opening(prompt=[PROMPT[0], first])
    assert wrong == Turn(messages=user('{"hint": "no"}'), reward=-0.5)
    assert right == Turn(reward=1.0, done=True)
    assert game.closed


def test_an_episode_that_is_cut_off_is_over() -> None:
    environment = gym(other_trainers.Guess())

    async def episode() -> Turn:
        await environment.reset({})
        return await environment.step(answer("stop"))

    assert play(episode) == Turn(reward=0.0, done=True)


def test_calls_are_part_of_the_action() -> None:
    taken: list[str] = []

    class Reader(other_trainers.Guess):
        def step(self, action: str) -> Any:
            taken.append(action)
            return "", 0.0, True, {}

    text = "I add." + call("add", a=2)
    turn = play(lambda: gym(Reader()).step(reply(text)))
    assert turn == Turn(reward=0.0, done=True)
    assert taken == [text]


def test_all_responses_to_a_row_have_one_task_and_rows_differ() -> None:
    async def numbers(rows: list[Mapping[str, Any]]) -> list[int]:
        alone = asyncio.Lock()
        games = [other_trainers.Guess(10**9) for _ in rows]
        made = [GymEnvironment(game, alone) for game in games]
        await asyncio.gather(*(e.reset(row) for e, row in zip(made, rows, strict=True)))
        return [game.number for game in games]

    rows = [dict(ROW, id=number % 2) for number in range(20)]
    found = asyncio.run(numbers(rows))
    assert len({*found}) == 2
    assert found[::2] == [found[0]] * 10


def test_one_begins_at_a_time_as_the_seed_is_the_process_s() -> None:
    entered: list[threading.Event] = []

    class Watching(other_trainers.Guess):
        def reset(self, seed: int | None = None) -> Any:
            mine = threading.Event()
            for other in entered:
                other.set()
            entered.append(mine)
            self.met = mine.wait(0.2)  # another one while this one begins
            entered.remove(mine)
            return super().reset(seed)

    async def begin() -> list[bool]:
        alone = asyncio.Lock()
        games = [Watching() for _ in range(2)]
        await asyncio.gather(*(GymEnvironment(game, alone).reset(ROW) for game in games))
        return [game.met for game in games]

    assert asyncio.run(begin()) == [False, False]


def test_a_game_that_answers_otherwise_is_named() -> None:
    class Odd(other_trainers.Guess):
        def step(self, action: str) -> Any:
            return "observation"

    with pytest.raises(EpisodeError, match="step returned str, not a tuple of observation, reward"):
        play(lambda: gym(Odd()).step(answer("")))


# skyrl-gym -------------------------------------------------------------------------------------


def squares(**options: Any) -> SkyrlEnvironment:
    return SkyrlEnvironment(lambda **extras: other_trainers.Squares(**options, **extras), True)


def test_skyrl_s_environment_is_made_of_its_row() -> None:
    environment = squares()

    async def episode() -> list[Any]:
        return [
            await environment.reset(ROW),
            await environment.step(answer("3")),
            await environment.step(answer("9")),
            await environment.close(),
        ]

    opening, wrong, right, _ = play(episode)
    assert opening == Opening(prompt=[*PROMPT, *user("The goal is 9.")])
    assert wrong == Turn(messages=user("No."), reward=0.0)
    assert right == Turn(reward=1.0, done=True, metrics={"steps": 2.0})


def test_a_prompt_that_stays_is_not_rendered_again() -> None:
    assert play(lambda: squares(env_config="plain").reset(ROW)) == Opening()


def test_a_row_without_what_it_needs_is_the_episode_s_error() -> None:
    with pytest.raises(KeyError, match="goal"):
        play(lambda: squares().reset({}))


# OpenEnv ---------------------------------------------------------------------------------------


def test_openenv_s_actions_are_the_reply_s_text_or_json() -> None:
    client = other_trainers.MoveClient()
    environment = OpenenvEnvironment(client)

    async def episode() -> list[Any]:
        return [
            await environment.reset(ROW),
            await environment.step(answer("<think>Hm.</think>\nforward ")),
            await environment.step(answer('{"text": "back", "speed": "fast"}')),
            await environment.step(answer('{"text": "back", "speed": 2}')),
            await environment.close(),
        ]

    opening, first, wrong, last, _ = play(episode)
    said = {"role": "user", "content": "Go.Say something."}
    assert opening == Opening(prompt=[PROMPT[0], said])
    assert client.kwargs == {"seed": seed_of(ROW)}
    assert first == Turn(messages=user("Go on."), reward=0.5)
    assert (wrong.calls, wrong.failed_calls, wrong.done) == (1, 1, False)
    assert "Error: this is no action: ValidationError" in wrong.messages[0]["content"]
    assert last == Turn(reward=0.5, done=True)
    moves = other_trainers.Move
    assert client.actions == [moves(text="forward"), moves(text="back", speed=2)]
    assert client.closed


def test_a_client_of_plain_objects_takes_json_alone() -> None:
    client = other_trainers.Client()
    environment = OpenenvEnvironment(client)

    async def episode() -> list[Turn]:
        deep = '{"go": ' * 100 + "1" + "}" * 100
        said = ("forward", "[1]", deep, '{"go": 1}')
        return [await environment.step(answer(text)) for text in said]

    text, listed, deep, done = play(episode)
    for wrong in (text, listed, deep):
        assert wrong.failed_calls == 1
        assert wrong.messages[0]["content"].endswith("ValueError: expected a JSON object")
    assert done.reward == 0.5
    assert client.actions == [{"go": 1}]


def test_the_class_of_actions_is_the_client_s() -> None:
    assert action_class(other_trainers.MoveClient()) is other_trainers.Move
    assert action_class(other_trainers.Client()) is None


def test_a_client_that_answers_otherwise_is_named() -> None:
    class Odd(other_trainers.Client[Any, Any, Any]):
        async def reset(self, **kwargs: Any) -> Any:
            return "observation"

    with pytest.raises(EpisodeError, match="the client returned str, which has no observation"):
        play(lambda: OpenenvEnvironment(Odd()).reset(ROW))


# Rows ------------------------------------------------------------------------------------------


def test_prompts_of_rows() -> None:
    assert prompt_of(ROW) == PROMPT
    assert prompt_of({"prompt": "Go."}) == user("Go.")
    assert prompt_of({"question": "Go."}) == prompt_of({"prompt": ["Go."]}) == []


def test_seeds_of_rows() -> None:
    assert seed_of({"seed": 7, "a": 1}) == 7
    assert seed_of({"a": 1, "b": 2}) == seed_of({"b": 2, "a": 1}) != seed_of({"a": 1, "b": 3})
    assert all(0 <= seed_of({"seed": seed}) < 2**31 for seed in (-1, 2**40, True, "x"))


def test_without_a_prompt_of_messages_what_is_said_is_a_message() -> None:
    opening = play(lambda: gym(other_trainers.Guess()).reset({"question": "?"}))
    assert opening == Opening(messages=user("Guess from 1 to 100."))
