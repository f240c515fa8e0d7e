"""The processes of environments: who fails, whose fault it is, and that nothing is left."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from chat_models import make_tokenizer
from pool_driving import HERE, Driver, children, opened, pool_of

from case_files import read_table
from rollpacker.env.processes.pool import EnvironmentPool
from waiting import soon

Talk = Callable[[Driver], Awaitable[None]]


def run(folder: Path, talk: Talk, **config: Any) -> None:
    async def whole() -> None:
        async with opened(folder, **config) as driver:
            await talk(driver)

    asyncio.run(whole())


async def ended(driver: Driver, episode: int) -> None:
    """It goes on to its end."""
    reply = await driver.told(episode, "end")
    assert (reply.answer.over, reply.answer.reward) == ("stop", 1.0)


ANSWERS = read_table(__file__, "ANSWERS")
"""What an environment does, and what is told of it; nothing where the episode does not fail."""
REWARDS = {"end": 1.0, "true": 1.0, "one": 0.5}


def test_each_fails_for_itself_alone(tmp_path: Path) -> None:
    async def talk(driver: Driver) -> None:
        before = driver.processes()
        episodes = {what: driver.begin() for what in ANSWERS}
        for what, episode in episodes.items():
            assert (await driver.answer(episode)).answer.error == ""
            driver.say(episode, what)
        for what, episode in episodes.items():
            reply = await driver.answer(episode)
            assert not reply.blameless
            assert bool(reply.answer.error) == bool(ANSWERS[what]), (what, reply.answer.error)
            assert ANSWERS[what] in reply.answer.error
            assert reply.answer.reward == REWARDS.get(what)
        await ended(driver, episodes["go on"])
        await ended(driver, episodes["metric"])
        assert driver.processes() == before

    run(tmp_path, talk)


@pytest.mark.parametrize("what", ["half metric", "many calls"])
def test_one_whose_answer_cannot_be_passed_on_is_closed(tmp_path: Path, what: str) -> None:
    """It would have gone on: nobody else would end it."""

    async def talk(driver: Driver) -> None:
        reply = await driver.told(await driver.begun(name="odd"), what)
        assert ("passed on" if what == "half metric" else "calls of a turn") in reply.answer.error
        await soon((tmp_path / "closed-odd").exists, within_s=10.0)

    run(tmp_path, talk)


def test_what_begins_with_too_much_or_an_error_fails(tmp_path: Path) -> None:
    async def talk(driver: Driver) -> None:
        before = driver.processes()
        for what, error in (("raise", "KeyError: 'board'"), ("huge", "reset leads to a prompt")):
            reply = await driver.answer(driver.begin(reset=what))
            assert error in reply.answer.error
        reply = await driver.answer(driver.begin(template={"conversation": []}))
        assert "conversation" in reply.answer.error
        assert driver.processes() == before

    run(tmp_path, talk, step_timeout_s=20.0)


@pytest.mark.parametrize("how", ["hang", "hang in a thread"])
def test_a_process_in_which_one_hangs_ends_when_the_others_have(tmp_path: Path, how: str) -> None:
    async def talk(driver: Driver) -> None:
        (old,) = driver.processes()
        bystander, culprit = await driver.begun(), await driver.begun(close="slow")
        reply = await driver.told(culprit, how)
        assert reply.answer.error == "timed out after 2 s (environment.step_timeout_s)"
        assert not reply.blameless
        assert (await driver.told(bystander, "go on")).answer.error == ""
        assert old in driver.processes()
        await ended(driver, await driver.begun())
        assert len(driver.processes()) == 2, "new ones go elsewhere"
        await ended(driver, bystander)
        assert old not in driver.processes()

    run(tmp_path, talk, step_timeout_s=2.0)


def test_nothing_comes_of_what_is_given_up(tmp_path: Path) -> None:
    async def talk(driver: Driver) -> None:
        acting = await driver.begun(name="acting")
        waiting = await driver.begun(name="waiting")
        driver.say(acting, "hang")
        await soon((tmp_path / "acting-acting").exists)
        driver.pool.close_episode(acting)
        driver.pool.close_episode(waiting)
        driver.pool.close_episode(waiting)
        beginning = driver.begin(name="beginning", reset="hang")
        await soon((tmp_path / "began-beginning").exists)
        driver.pool.close_episode(beginning)
        for name in ("acting", "waiting", "beginning"):
            await soon((tmp_path / f"closed-{name}").exists)
        await ended(driver, await driver.begun())
        assert all(map(driver.silent, (acting, waiting, beginning)))

    run(tmp_path, talk)


def test_no_more_at_a_time_than_is_allowed(tmp_path: Path) -> None:
    async def talk(driver: Driver) -> None:
        episodes = [driver.begin(name=str(number)) for number in range(5)]
        for episode in episodes[:2]:
            await driver.answer(episode)
        driver.pool.close_episode(episodes[2])
        assert (await driver.told(episodes[1], "go on")).answer.error == ""
        assert all(map(driver.silent, episodes[2:]))
        await ended(driver, episodes[0])
        assert (await driver.answer(episodes[3])).answer.error == ""
        driver.pool.close_episode(episodes[1])
        assert (await driver.answer(episodes[4])).answer.error == ""
        assert not (tmp_path / "began-2").exists()
        assert driver.silent(episodes[2])

    run(tmp_path, talk, concurrency=2, processes=2)


DEATHS = {
    "exit": "its process exited with code 3",
    "kill": "its process was killed by signal 9",
    "nonsense": "its process wrote nonsense",
    "flood": "its process wrote more than 64 MiB at once",
    "fork and exit": "its process exited with code 3",
}


def test_giving_up_those_that_wait_costs_each_of_them_alike(tmp_path: Path) -> None:
    async def talk(driver: Driver) -> None:
        waiting, calls = [driver.begin() for _ in range(400)], list[object]()
        sys.setprofile(lambda *call: calls.append(call))
        for episode in waiting[1:]:
            driver.pool.close_episode(episode)
        sys.setprofile(None)
        assert (driver.pool.queued, len(calls) // len(waiting) < 20) == (0, True)

    run(tmp_path, talk, concurrency=1)


def test_who_takes_a_process_down_alone_is_charged_and_others_are_not(tmp_path: Path) -> None:
    async def talk(driver: Driver) -> None:
        for how, error in DEATHS.items():
            bystander, culprit = await driver.begun(), await driver.begun()
            reply = await driver.told(culprit, how)
            assert reply.answer.error.startswith(error), how
            assert not reply.blameless
            assert driver.silent(bystander)
            reply = await driver.told(bystander, "go on")
            assert reply.blameless
            assert error in reply.answer.error
        assert len(driver.processes()) == 1
        assert len(driver.pool.said()) == len(DEATHS)
        assert driver.pool.said() == []

    run(tmp_path, talk)


async def suspects(driver: Driver, first: str, second: str, error: str) -> None:
    """Two act when their process ends; each begins again, and is alone with what it does."""
    episodes = [await driver.begun(key) for key in "ab"]
    for episode, what in zip(episodes, (first, second), strict=True):
        driver.say(episode, what)
    replies = [await driver.answer(episode) for episode in episodes]
    assert [reply.blameless for reply in replies] == [True, True]
    assert all(error in reply.answer.error for reply in replies)
    innocent, guilty = driver.begin("a"), driver.begin("b")
    assert (await driver.answer(innocent)).answer.error == ""
    assert len(driver.processes()) == 2
    bystander = await driver.begun()
    assert (await driver.told(bystander, "go on")).answer.error == ""
    assert driver.silent(guilty), "one at a time"
    await ended(driver, innocent)
    assert (await driver.answer(guilty)).answer.error == ""
    reply = await driver.told(guilty, second)
    assert not reply.blameless
    assert error in reply.answer.error
    await ended(driver, bystander)
    await ended(driver, await driver.begun("a"))
    assert len(driver.processes()) == 1


def test_of_several_that_act_each_begins_again_alone(tmp_path: Path) -> None:
    run(tmp_path, lambda driver: suspects(driver, "hang", "exit", "exited with code 3"))


@pytest.mark.slow
def test_one_that_stops_the_others_too_is_found(tmp_path: Path) -> None:
    run(
        tmp_path,
        lambda driver: suspects(driver, "hang", "block", "hung for 4 s"),
        step_timeout_s=2.0,
    )


@pytest.mark.slow
def test_one_that_does_not_listen_is_ended_with_its_process(tmp_path: Path) -> None:
    async def talk(driver: Driver) -> None:
        reply = await driver.told(await driver.begun(), "hang deaf")
        assert "hung for 4 s" in reply.answer.error
        assert not reply.blameless
        await ended(driver, await driver.begun())

    run(tmp_path, talk, step_timeout_s=2.0)


@pytest.mark.slow
def test_what_one_that_was_given_up_may_have_done_is_nobodys_fault(tmp_path: Path) -> None:
    async def talk(driver: Driver) -> None:
        innocent, culprit = await driver.begun("a"), await driver.begun(name="culprit")
        driver.say(culprit, "block")
        await soon((tmp_path / "acting-culprit").exists)
        driver.pool.close_episode(culprit)
        reply = await driver.told(innocent, "go on")
        assert "hung for 4 s" in reply.answer.error
        assert reply.blameless
        await ended(driver, await driver.begun("a"))

    run(tmp_path, talk, step_timeout_s=2.0)


def test_what_one_that_was_given_up_does_as_it_closes_is_nobodys_fault(tmp_path: Path) -> None:
    """It waited for the model then, and the other was all that acted."""

    async def talk(driver: Driver) -> None:
        innocent, culprit = (
            await driver.begun("a", name="innocent"),
            await driver.begun(close="exit"),
        )
        driver.say(innocent, "hang")
        await soon((tmp_path / "acting-innocent").exists)
        driver.pool.close_episode(culprit)
        reply = await driver.answer(innocent)
        assert "exited with code 3" in reply.answer.error
        assert reply.blameless
        await ended(driver, await driver.begun("a"))

    run(tmp_path, talk)


def test_who_takes_its_process_down_while_nobody_acts_is_found(tmp_path: Path) -> None:
    """It could do so for ever."""

    async def talk(driver: Driver) -> None:
        die = tmp_path / "die"
        innocent, guilty = await driver.begun("a"), await driver.begun("b")
        for blameless in (True, False):
            await driver.told(guilty, "die later")
            die.touch()
            await soon(lambda: bool(driver.pool.said()))
            die.unlink()
            reply = await driver.told(guilty, "go on")
            assert "exited with code 3" in reply.answer.error
            assert reply.blameless == blameless
            if blameless:
                assert (await driver.told(innocent, "go on")).blameless
                await ended(driver, await driver.begun("a"))
                guilty = await driver.begun("b")

    run(tmp_path, talk)


def test_one_that_is_made_when_nobody_wants_it_any_more_is_closed(tmp_path: Path) -> None:
    async def talk(driver: Driver) -> None:
        episode = driver.begin(name="late")
        await soon((tmp_path / "making").exists)
        driver.pool.close_episode(episode)
        (tmp_path / "made").touch()
        await soon((tmp_path / "closed-").exists)
        assert not (tmp_path / "began-late").exists()
        await ended(driver, await driver.begun())

    run(tmp_path, talk, kind="Slow")


@pytest.mark.parametrize("processes", [1, 2])
def test_one_that_cannot_be_loaded_is_said_once(tmp_path: Path, processes: int) -> None:
    file = tmp_path / "broken.py"
    file.write_text("raise RuntimeError('no board')\n", encoding="utf-8")
    said = refused(pool_of(f"{file}:Game", processes=processes))
    assert said.startswith("environment.path: ")
    assert said.count("no board") == 1


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    said = refused(pool_of(f"{tmp_path / 'gone.py'}:Game"))
    assert said.startswith("environment.path: ")
    assert "gone.py" in said


def test_a_model_without_a_chat_template_is_refused() -> None:
    said = refused(pool_of(f"{HERE / 'unruly.py'}:double", make_tokenizer(None), kind="tools"))
    assert said.startswith("environment: the tokenizer of model.path has no chat template")


def refused(pool: EnvironmentPool) -> str:
    """Why a pool cannot begin, in one line."""
    try:
        with pytest.raises(ValueError, match="environment") as said:
            pool.wait_ready()
    finally:
        pool.close()
    assert children() == []
    assert "\n" not in str(said.value)
    return str(said.value)


def test_one_that_dies_at_every_start_is_given_up(tmp_path: Path) -> None:
    file = tmp_path / "dying.py"
    file.write_text("import os\nopen(__file__ + '.log', 'a').write('x')\nos._exit(5)\n")
    assert "do not start: the last exited with code 5" in refused(pool_of(f"{file}:Game"))
    assert 2 <= len((tmp_path / "dying.py.log").read_text()) <= 6


def test_one_that_is_not_loaded_in_time_is_told_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollpacker.env.processes.pool._STARTS", 2)
    file = tmp_path / "slow.py"
    file.write_text("import time\ntime.sleep(1000)\n", encoding="utf-8")
    said = refused(pool_of(f"{file}:Game", start_timeout_s=0.2, step_timeout_s=600.0))
    assert said.endswith("the last did not start in 0.2 s (environment.start_timeout_s)")
