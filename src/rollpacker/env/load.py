"""Loads the environment that the configuration names: the only place that imports it."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from rollpacker.config import EnvironmentConfig
from rollpacker.env.adapters import (
    GymEnvironment,
    Kind,
    OpenenvEnvironment,
    SkyrlEnvironment,
    TrlEnvironment,
    kind_of,
    schemas,
)
from rollpacker.env.base import KEY, EpisodeError, Factory, ToolFaults
from rollpacker.env.tools import ToolsFactory
from rollpacker.errors import told
from rollpacker.user_code import Parameters, find

OPTIONS = "environment.options"
_LATE: tuple[Kind, ...] = ("ours", "gym", "openenv")
"""Kinds that an async function may make: prompts do not depend on them."""
_EXTRAS = "extras"  # the row, as skyrl-gym's environments take it


def load(config: EnvironmentConfig) -> Factory:
    """Return the factory of a run's environments. Raises ``ValueError`` if there is none."""
    match config.kind:
        case "tools":
            return ToolsFactory(config)
        case "python":
            return PythonFactory(config)
        case "agent":
            from rollpacker.env.agent.factory import AgentFactory

            return AgentFactory(config)


class PythonFactory:
    """Makes episodes with the class or function of ``environment.path``, ours or another trainer's.

    A function is called once to find the kind of its result, unless it is async or makes
    skyrl-gym's, which need a row.

    Raises ``ValueError`` if the kind is unknown, or if it does not take its options.
    """

    def __init__(self, config: EnvironmentConfig) -> None:
        (self._path,) = config.path
        target = find(self._path, KEY)
        self._options = config.options
        parameters = Parameters(self._path, target, KEY, OPTIONS)
        parameters.check_options(self._options)
        parameters.check_given((*self._options, _EXTRAS))
        self._target = target
        self._alone = asyncio.Lock()
        self._spare: list[Any] = []
        self.tools: Sequence[Mapping[str, Any]] = ()
        """JSON schemas of its tools, none if it has none of its own."""
        self.faults = ToolFaults()
        self._kind: Kind | None = self._kind_of(target)
        takes = parameters.take(_EXTRAS) and _EXTRAS not in self._options
        self._extras = self._kind == "skyrl" and takes
        if self._kind is not None:
            self._look_at(self._kind)

    def _kind_of(self, target: Callable[..., Any]) -> Kind | None:
        # None if the kind is known only once an environment is made.
        if inspect.isclass(target):
            return self._known(kind_of(target))
        names = inspect.signature(target).parameters
        if _EXTRAS in names or str(target.__module__).startswith("skyrl_gym."):
            return "skyrl"
        if inspect.iscoroutinefunction(target):
            return None
        self._spare.append(self._made())
        return self._known(kind_of(self._spare[0]))

    def _known(self, kind: Kind | None) -> Kind:
        if kind is None:
            raise ValueError(
                f"{KEY}: '{self._path}' is not an environment: it has neither reset(row) and "
                "step(reply), nor the methods of TRL's, OpenEnv's, skyrl-gym's or gem's"
            )
        return kind

    def _look_at(self, kind: Kind) -> None:
        if kind == "trl":
            made = type(self._spare[0]) if self._spare else self._target
            assert inspect.isclass(made)
            self.tools = schemas(made, f"{KEY}: '{self._path}'")

    def _made(self) -> Any:
        try:
            return self._target(**self._options)
        except (Exception, SystemExit) as error:
            raise ValueError(f"{KEY}: '{self._path}' cannot be made: {told(error)}") from error

    async def open(self) -> None:
        """Do nothing."""

    def make(self) -> Any:
        """Make one episode, awaitable if the function is async."""
        if self._kind is None:
            return self._made_async()
        instance = None if self._kind == "skyrl" else self._one()
        return self._adapted(self._kind, instance)

    def _one(self) -> Any:
        try:
            return self._spare.pop()
        except IndexError:  # another thread may have taken it
            pass
        try:
            return self._made()
        except ValueError as error:
            raise EpisodeError(str(error)) from error

    async def _made_async(self) -> Any:
        instance = await self._target(**self._options)
        kind = kind_of(instance)
        if kind is None or kind not in _LATE:
            raise EpisodeError(
                f"{KEY}: '{self._path}' is async and makes a {type(instance).__name__}: for an "
                "environment with tools of its own, give a plain function"
            )
        return self._adapted(kind, instance)

    def _adapted(self, kind: Kind, instance: Any) -> Any:
        match kind:
            case "ours":
                return instance
            case "trl":
                return TrlEnvironment(instance, self.tools, self.faults)
            case "gym":
                return GymEnvironment(instance, self._alone)
            case "openenv":
                return OpenenvEnvironment(instance)
            case "skyrl":
                return SkyrlEnvironment(partial(self._target, **self._options), self._extras)

    async def close(self) -> None:
        """Do nothing."""
