"""An episode of a program: started with a row, answered by the model, worth what it prints."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from rollpacker.env.agent.function import AgentFunction
from rollpacker.env.agent.outcome import verdict
from rollpacker.env.agent.program import AgentProgram, Ending
from rollpacker.env.agent.reaper import Reaper
from rollpacker.env.agent.server.endpoint import Endpoint
from rollpacker.env.agent.server.session import ProgramRequest, Session
from rollpacker.env.base import EpisodeError, Message, Opening, Turn
from rollpacker.env.conversation import count_calls
from rollpacker.errors import one_line

_PATIENCE_S = 0.5
"""For which a program that was told that its episode is over may clean up behind itself."""


class AgentEnvironment:
    """Runs a program, whose first request is the prompt, and whose later ones are turns.

    Args:
        argv: the program and its arguments.
        variables: of its environment, besides what leads it to the model.
        name: how the user calls it.
        endpoint: where it reaches the model.
        reaper: ends it if this process cannot.
        function: called in the place of a program; None: there is one.
    """

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
        """Start the program with the row, and wait for its first request.

        Raises ``EpisodeError`` where it cannot be started, or ends before it has asked for
        anything.
        """
        self._key, self._session = self._endpoint.begin()
        self._program = self._started(row)
        self._program.ended.add_done_callback(lambda _: self._wake())
        news = await self._news()
        if isinstance(news, ProgramRequest):
            return Opening(prompt=news.new, tools=news.tools)
        verdict(news, self._name)  # a failure tells more
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
        """Give the program the reply, and wait for its next request, or its end.

        Raises ``EpisodeError`` where it fails.
        """
        assert self._session is not None
        calls, failed = _calls(reply) if self._session.calling else (0, 0)
        self._session.answer(reply)
        news = await self._news()
        if isinstance(news, ProgramRequest):
            return Turn(messages=news.new, calls=calls, failed_calls=failed)
        reward, metrics = verdict(news, self._name)
        return Turn(done=True, reward=reward, metrics=metrics, calls=calls, failed_calls=failed)

    async def close(self) -> None:
        """End the program, if it has not ended, and whatever it started."""
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
        """The program's next request, or its end."""
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
    """All calls, and those that were not understood; what became of the others is not known."""
    return count_calls(reply), len(reply.get("bad_calls") or ())


def _leading(url: str, key: str) -> dict[str, str]:
    """What OpenAI's clients read; a proxy of this machine does not lead to the server on it."""
    direct = {
        name: ",".join(filter(None, (os.environ.get(name, ""), "127.0.0.1")))
        for name in ("NO_PROXY", "no_proxy")
    }
    return {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": key, **direct}


def _line(row: Mapping[str, Any]) -> bytes:
    """A row as a line of JSON. Raises ``EpisodeError`` that names the column that is none."""
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
    """An array or a number of numpy's, or of another library's."""
    if callable(getattr(value, "tolist", None)):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__}")


_json = msgspec.json.Encoder(enc_hook=_plain).encode
