"""The factory for environments of ``kind: agent``: a server and a program."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rollpacker.config import EnvironmentConfig
from rollpacker.env.agent.environment import AgentEnvironment
from rollpacker.env.agent.reaper import Reaper
from rollpacker.env.agent.server.endpoint import Endpoint
from rollpacker.env.base import ToolFaults
from rollpacker.user_code import find

_USUAL = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|TERM|TZ|TMPDIR|TEMP|TMP|LANG|LANGUAGE|LC_\w+|XDG_\w+|PYTHON\w*|"
    r"VIRTUAL_ENV|CONDA_PREFIX|LD_LIBRARY_PATH|NODE_PATH|JAVA_HOME|CUDA_VISIBLE_DEVICES|"
    r"ROLLMUX_ATTEMPT|SSL_CERT_(FILE|DIR)|REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE|(?i:(https?|no|all|ftp)_proxy)"
)
"""Variables by which programs find files and services. Variables with keys usually have other
names."""


class AgentFactory:
    """Makes one program per episode that speaks OpenAI's chat API with the model.

    The program reads the row as one line of JSON from its standard input, and finds the model by
    ``OPENAI_BASE_URL`` and ``OPENAI_API_KEY``. The messages and tools of its first request are the
    prompt. A later request holds the whole conversation and new messages. The last line that it
    prints, ``{"reward": 1.0}`` or a number, is the episode's reward. Other numbers there are
    averaged. A Python function in a program's place is called with the row, ``base_url`` and
    ``api_key``, and returns the same.

    The run decides how the model samples. ``temperature``, ``max_tokens``, ``stop``, ``seed``,
    ``tool_choice``, ``response_format`` and the like in a request change nothing. Its tokens are
    not counted: ``usage`` is zero.

    Raises ``ValueError`` if there is no such program.
    """

    tools: Sequence[Mapping[str, Any]] = ()

    def __init__(self, config: EnvironmentConfig) -> None:
        self.faults = ToolFaults()
        self._function = _function(config.path)
        self._argv = [] if self._function is not None else _argv(config.path)
        script = next((each for each in config.path if each.endswith(".py")), config.path[0])
        self._name = Path(script).name
        self._variables = _variables(config.variables)
        self._endpoint = Endpoint()
        self._reaper: Reaper | None = None

    async def open(self) -> None:
        self._reaper = Reaper()
        await self._endpoint.open()

    def make(self) -> AgentEnvironment:
        assert self._reaper is not None
        return AgentEnvironment(
            self._argv,
            self._variables,
            self._name,
            endpoint=self._endpoint,
            reaper=self._reaper,
            function=self._function,
        )

    async def close(self) -> None:
        await self._endpoint.close()
        if self._reaper is not None:
            self._reaper.close()


def _function(path: Sequence[str]) -> Callable[..., Any] | None:
    if len(path) != 1 or ":" not in path[0] or Path(path[0]).exists():
        return None
    return find(path[0], "environment.path")


def _variables(more: Sequence[str]) -> dict[str, str]:
    for name in more:
        if name not in os.environ:
            raise ValueError(f"environment.variables: '{name}' is not set here")
    found = os.environ.items()
    return {name: value for name, value in found if name in more or _USUAL.fullmatch(name)}


def _argv(path: Sequence[str]) -> list[str]:
    # A Python file runs with this process's interpreter.
    program = str(Path(path[0]).expanduser()) if path[0].startswith("~") else path[0]
    script = program.endswith(".py")
    if not (Path(program).is_file() if script else shutil.which(program)):
        together = len(path) == 1 and " " in program
        hint = ": give it and its arguments as a list, [program, argument]" if together else ""
        raise ValueError(f"environment.path: there is no program '{program}'{hint}")
    return [sys.executable, program, *path[1:]] if script else [program, *path[1:]]
