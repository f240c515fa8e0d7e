"""What ``environment.path`` names, and whose environment it is."""

import asyncio
from typing import Any

import other_trainers
import pytest

from case_files import read_table
from rollpacker.config import ConfigError, EnvironmentConfig, parse
from rollpacker.env.adapters import (
    GymEnvironment,
    OpenenvEnvironment,
    SkyrlEnvironment,
    TrlEnvironment,
    kind_of,
)
from rollpacker.env.base import EpisodeError, Factory
from rollpacker.env.load import PythonFactory, load
from rollpacker.env.tools import ToolsFactory


def config(name: str, **options: Any) -> EnvironmentConfig:
    return EnvironmentConfig(kind="python", path=[f"other_trainers:{name}"], options=options)


KINDS = read_table(__file__, "KINDS")


@pytest.mark.parametrize("name", KINDS)
def test_kinds_are_told_apart_by_their_methods(name: str) -> None:
    made = getattr(other_trainers, name)
    assert kind_of(made) == KINDS[name]
    if name != "Squares":
        assert kind_of(made()) == KINDS[name]


ADAPTERS = {
    "Ours": other_trainers.Ours,
    "Counter": TrlEnvironment,
    "Silent": TrlEnvironment,
    "Guess": GymEnvironment,
    "made_by_a_function": GymEnvironment,
    "Squares": SkyrlEnvironment,
    "made_of_a_row": SkyrlEnvironment,
    "MoveClient": OpenenvEnvironment,
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_each_episode_has_one_of_its_own(name: str) -> None:
    factory = load(config(name))
    made = [factory.make() for _ in range(3)]
    assert {type(each) for each in made} == {ADAPTERS[name]}
    assert len({id(each) for each in made}) == 3
    instances = {id(vars(each).get("_instance") or vars(each).get("_client")) for each in made}
    assert len(instances) == (1 if name in ("Ours", "Squares", "made_of_a_row") else 3)


def test_an_async_function_makes_one_when_it_is_needed() -> None:
    factory = load(config("made_later", most=3))

    async def made() -> Any:
        return await factory.make()  # type: ignore[misc]

    environment = asyncio.run(made())
    assert isinstance(environment, GymEnvironment)
    assert environment._instance.most == 3


def test_an_async_function_makes_none_with_tools() -> None:
    factory = load(config("tools_made_later"))

    async def made() -> Any:
        return await factory.make()  # type: ignore[misc]

    with pytest.raises(EpisodeError, match=r"is async and makes a Counter: .* a plain function$"):
        asyncio.run(made())


def test_options_are_the_class_s_arguments() -> None:
    assert load(config("Ours", greeting="Hi")).make().greeting == "Hi"  # type: ignore[attr-defined]


def test_tools_are_known_before_an_episode_begins() -> None:
    names = [schema["function"]["name"] for schema in load(config("Counter")).tools]
    assert names == ["increment", "look"]
    assert load(config("Guess")).tools == ()


@pytest.mark.parametrize(
    ("name", "options", "wrong"), read_table(__file__, "test_what_is_wrong_is_said")
)
def test_what_is_wrong_is_said(name: str, options: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ValueError, match=f"^environment.path: 'other_trainers:{name}' {wrong}"):
        load(config(name, **options))


@pytest.mark.parametrize("seconds", [0, -1])
def test_no_time_to_start_is_refused(seconds: int) -> None:
    environment = {"kind": "tools", "path": "a.py:f", "start_timeout_s": seconds}
    job = {"model": {"path": "m"}, "data": {"path": "rg:gcd"}, "environment": environment}
    with pytest.raises(ConfigError, match=r"start_timeout_s': must be greater than 0"):
        parse(job)


def test_paths_are_explained() -> None:
    text = "^environment.path: unknown function 'gem': expected path/to/file.py:name or package.mod"
    with pytest.raises(ValueError, match=text):
        load(EnvironmentConfig(kind="python", path=["gem"]))
    with pytest.raises(ValueError, match="has no function 'Gues': did you mean 'Guess'"):
        load(config("Gues"))


def test_what_cannot_be_made_later_is_the_episode_s_error(monkeypatch: pytest.MonkeyPatch) -> None:
    factory = load(config("Guess"))

    def gone(self: Any, most: int = 1) -> None:
        raise SystemExit("no server")

    monkeypatch.setattr(other_trainers.Guess, "__init__", gone)
    with pytest.raises(EpisodeError, match=r"cannot be made: .*SystemExit: no server$"):
        factory.make()


def test_a_tool_that_lacks_a_docstring_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(other_trainers.Counter.look, "__doc__", None)
    with pytest.raises(
        ValueError, match=r"_trainers:Counter': look cannot be a tool: .* docstring"
    ):
        load(config("Counter"))


@pytest.mark.parametrize("made", [ToolsFactory, PythonFactory])
def test_factories_have_what_the_process_asks_for(made: type) -> None:
    members = {name for name in vars(Factory) if not name.startswith("_")}
    assert members <= {*dir(made), "tools"}


def test_an_option_of_the_row_s_name_is_the_user_s() -> None:
    """skyrl-gym's are given the row as ``extras``, unless they are given something else so."""
    factory = PythonFactory(config("Squares", extras={"goal": 7}))

    async def begun() -> Any:
        return await factory.make().reset({"goal": 9, "prompt": "Go."})

    assert asyncio.run(begun()).prompt[-1]["content"] == "The goal is 7."
