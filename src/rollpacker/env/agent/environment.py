"""An episode of a program: started with a row, answered by the model, graded by its output."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from rollpacker.env.agent.program import AgentProgram, Ending
from rollpacker.env.agent.reaper import Reaper
from rollpacker.env.agent.server.endpoint import Endpoint
from rollpacker.env.agent.server.session import ProgramRequest, Session
from rollpacker.env.base import EpisodeError, Message, Opening, Turn, call
from rollpacker.env.calls.values import number
from rollpacker.env.messages import count_calls
from rollpacker.errors import one_line, told

# An episode's worth: how its program ended, and the last thing that it printed.

_KEYS = ("reward", "score")
_LONGEST = 10_000  # bytes of a line that is read as Python
_LAST_LINES = 3
_SHOWN = 300  # characters of the last lines


def verdict(ending: Ending, name: str) -> tuple[float | None, dict[str, float]]:
    """Return the reward that a program printed, or None, and its other numbers by name.

    The reward is in the last output line that is JSON: a number, or an object with ``reward`` (or
    ``score``). A function returns the same. Raises ``EpisodeError`` if the program failed or the
    reward is no finite number.
    """
    if ending.code:
        said = _last_lines(ending.stderr)
        raise EpisodeError(f"{name} {ending.how}{f': {said}' if said else ''}")
    if ending.result is not None:
        return _worth(ending.result, f"{name}: it returned {type(ending.result).__name__},")
    said = _printed(ending.stdout)
    return (None, {}) if said is None else _worth(said, f"{name} printed")


def _worth(said: Any, whose: str) -> tuple[float | None, dict[str, float]]:
    if not isinstance(said, Mapping):
        return _reward(said, whose), {}
    key = _key(said)
    if key is None:
        raise EpisodeError(
            f"{whose} no reward: none of its keys {', '.join(map(repr, said)):.200} is 'reward'"
        )
    numbers = {str(name): number(value) for name, value in said.items() if name != key}
    finite = {name: value for name, value in numbers.items() if value is not None}
    return _reward(said[key], whose), finite


def _key(said: Mapping[Any, Any]) -> str | None:
    return next((key for key in _KEYS if key in said), None)


def _reward(said: Any, whose: str) -> float | None:
    reward = number(said)
    if said is not None and reward is None:
        raise EpisodeError(f"{whose} a reward that is no finite number: {said!r:.40}")
    return reward


def _printed(text: bytes) -> Any:
    lines = [line for line in text.splitlines() if line.strip()]
    for line in reversed(lines):
        said = _decoded(line)
        if isinstance(said, dict) and _key(said) is not None:
            return said
        if isinstance(said, int | float) and not isinstance(said, bool):
            return said
    return _meant(lines[-1]) if lines else None


def _meant(line: bytes) -> Any:
    # The last line if it looks like a reward, in JSON's or Python's notation.
    said = _decoded(line)
    if said is None and len(line) <= _LONGEST:
        with contextlib.suppress(ValueError, SyntaxError, MemoryError, RecursionError):
            said = ast.literal_eval(line.decode())
    first = said[0] if isinstance(said, list | tuple) and said else said
    if isinstance(first, Mapping):
        return said if _key(first) is not None else None
    if isinstance(first, str):
        with contextlib.suppress(ValueError):
            return said if math.isfinite(float(first)) else None
        return None
    return said if isinstance(first, int | float) else None


def _decoded(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _last_lines(text: bytes) -> str:
    lines = [line.strip() for line in text.decode(errors="replace").splitlines() if line.strip()]
    return " / ".join(lines[-_LAST_LINES:])[-_SHOWN:]


# One run of a Python function that is the program: no process is started for it.


class AgentFunction:
    """Calls ``function(row, base_url=..., api_key=...)`` instead of starting a program.

    Make it in an event loop. ``ended`` is a task with the ``Ending``. A stopped coroutine is
    cancelled. A plain function, in a thread of its own, only notices that requests get no answer.
    """

    def __init__(
        self, function: Callable[..., Any], row: Mapping[str, Any], *, base_url: str, api_key: str
    ) -> None:
        work = call(function, dict(row), base_url=base_url, api_key=api_key)
        self.ended = asyncio.get_running_loop().create_task(_live(work))

    async def stop(self, patience: float) -> None:
        """End it, after so many seconds in which it may end by itself."""
        await asyncio.wait({self.ended}, timeout=patience)
        self.ended.cancel()
        await asyncio.wait({self.ended})


async def _live(work: Any) -> Ending:
    try:
        result = await work
    except Exception as error:  # a user's function may raise anything
        return Ending(code=1, how="failed", stdout=b"", stderr=told(error).encode())
    return Ending(code=0, how="returned", stdout=b"", stderr=b"", result=result)


_PATIENCE_S = 0.5
"""Seconds in which a program may clean up after it learned that its episode is over."""


class AgentEnvironment:
    """Runs a program. Its first request is the prompt, and later ones are turns."""

    def __init__(
        self,
        argv: Sequence[str],
        variables: Mapping[str, str],
        name: str,
        *,
        endpoint: Endpoint,
        reaper: Reaper,
        function: Callable[..., Any] | None = None,
    ) -> None:
        self._argv = argv
        self._variables = variables
        self._function = function
        self._name = name
        self._endpoint = endpoint
        self._reaper = reaper
        self._key = ""
        self._session: Session | None = None
        self._program: AgentProgram | AgentFunction | None = None

    async def reset(self, row: Mapping[str, Any]) -> Opening:
        """Start the program with the row, and wait for its first request. Raises ``EpisodeError``
        if it cannot be started, or ends before its first request."""
        self._key, self._session = self._endpoint.begin()
        self._program = self._started(row)
        self._program.ended.add_done_callback(lambda _: self._wake())
        news = await self._news()
        if isinstance(news, ProgramRequest):
            return Opening(prompt=news.new, tools=news.tools)
        verdict(news, self._name)  # raises the program's own failure, which is the better message
        raise EpisodeError(
            f"{self._name} ended without a request to the model: it must use OPENAI_BASE_URL and "
            "OPENAI_API_KEY, as OpenAI's clients do by themselves"
        )

    def _started(self, row: Mapping[str, Any]) -> AgentProgram | AgentFunction:
        if self._function is not None:
            url = self._endpoint.url
            return AgentFunction(self._function, row, base_url=url, api_key=self._key)
        try:
            return AgentProgram(
                self._argv,
                stdin=_line(row),
                environment={**self._variables, **_leading(self._endpoint.url, self._key)},
                reaper=self._reaper,
            )
        except OSError as error:
            raise EpisodeError(f"{self._name} cannot be started: {error.strerror}") from None

    async def step(self, reply: Message) -> Turn:
        """Give the program the reply. Wait for its next request or its end. Raises
        ``EpisodeError``."""
        assert self._session is not None
        calls, failed = _calls(reply) if self._session.calling else (0, 0)
        self._session.answer(reply)
        news = await self._news()
        if isinstance(news, ProgramRequest):
            return Turn(messages=news.new, calls=calls, failed_calls=failed)
        reward, metrics = verdict(news, self._name)
        return Turn(done=True, reward=reward, metrics=metrics, calls=calls, failed_calls=failed)

    async def close(self) -> None:
        """End the program and all processes that it started."""
        if self._session is None:
            return
        patience = _PATIENCE_S if self._session.waiting else 0.0
        self._session.close()
        try:
            if self._program is not None:
                await self._program.stop(patience)
        finally:
            self._endpoint.end(self._key)

    def _wake(self) -> None:
        assert self._session is not None
        self._session.news.set()

    async def _news(self) -> ProgramRequest | Ending:
        assert self._session is not None
        assert self._program is not None
        while True:
            if self._program.ended.done():
                return self._program.ended.result()
            asked = self._session.take()
            if asked is not None:
                return asked
            self._session.news.clear()
            await self._session.news.wait()


def _calls(reply: Message) -> tuple[int, int]:
    # All calls, and those that were not understood. The fate of the others is not known.
    return count_calls(reply), len(reply.get("bad_calls") or ())


def _leading(url: str, key: str) -> dict[str, str]:
    # Variables of OpenAI's clients. A proxy must not handle requests to this machine.
    direct = {
        name: ",".join(filter(None, (os.environ.get(name, ""), "127.0.0.1")))
        for name in ("NO_PROXY", "no_proxy")
    }
    return {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": key, **direct}


def _line(row: Mapping[str, Any]) -> bytes:
    # Raises ``EpisodeError`` that names a column without a JSON form.
    line = bytearray(b"{")
    for name, value in row.items():
        try:
            line += _json(str(name)) + b":" + _json(value) + b","
        except (TypeError, ValueError, RecursionError) as error:
            raise EpisodeError(
                f"data: column '{name}' cannot be given to a program as JSON: {one_line(error)}"
            ) from None
    return bytes(line.removesuffix(b",")) + b"}\n"


def _plain(value: Any) -> Any:
    if callable(getattr(value, "tolist", None)):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__}")


_json = msgspec.json.Encoder(enc_hook=_plain).encode
