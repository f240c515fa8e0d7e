"""OpenAI's chat API on this machine, for the programs of one process: a server, many sessions."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from typing import Any

import msgspec

from rollpacker.connection_limits import Places
from rollpacker.env.agent.server.http import (
    ClientConnection,
    HttpRequest,
    HttpResponse,
    RefusedError,
    completion,
    models,
)
from rollpacker.env.agent.server.session import Session

_HOST = "127.0.0.1"
_BACKLOG = 1024
_STRANGERS, _KNOWN, _OF_ONE = 64, 3072, 8
"""Limits of connections, below the number of files that a process of environments may open."""
_MOST_PARTS = 500_000
_CHAT, _MODELS = "/v1/chat/completions", "/v1/models"
_RETRIES = "x-stainless-retry-count"  # the header in which OpenAI's clients count retries


class Endpoint:
    """The server. It finds a session by its key, a secret that only its program has."""

    def __init__(self) -> None:
        self._server: asyncio.Server | None = None
        self._sessions: dict[str, Session] = {}
        self._places = Places(strangers=_STRANGERS, known=_KNOWN, each=_OF_ONE)

    async def open(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: ClientConnection(self._handle, self._key, self._places),
            _HOST,
            0,
            backlog=_BACKLOG,
        )

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"http://{_HOST}:{self._server.sockets[0].getsockname()[1]}/v1"

    def begin(self) -> tuple[str, Session]:
        key, session = f"sk-{secrets.token_hex(24)}", Session()
        self._sessions[key] = session
        return key, session

    def end(self, key: str) -> None:
        """Forget a session, and close the connections that its program left."""
        self._sessions.pop(key, None)
        self._places.dismiss(key)

    async def close(self) -> None:
        if self._server is None:
            return
        self._server.close()
        self._places.close()
        await self._server.wait_closed()

    async def _handle(self, request: HttpRequest) -> HttpResponse:
        try:
            return await self._served(request)
        except RefusedError as error:
            return error.response()
        except RecursionError:
            return RefusedError(400, "the body is nested too deep", "malformed").response()

    async def _served(self, request: HttpRequest) -> HttpResponse:
        session = self._sessions[self._key(request.headers)]
        if request.path == _CHAT:
            _check_method(request, "POST")
            again = request.headers.get(_RETRIES, "0") != "0"
            return await _chat(session, _body(request.body), again=again)
        if request.path == _MODELS or request.path.startswith(f"{_MODELS}/"):
            _check_method(request, "GET")
            return models(request.path.removeprefix(_MODELS).removeprefix("/"))
        raise RefusedError(404, f"{request.path:.80} is not served: ask {_CHAT}", "not_found")

    def _key(self, headers: Mapping[str, str]) -> str:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or key.strip() not in self._sessions:
            raise RefusedError(
                401, "unknown key: use the one in OPENAI_API_KEY as it is", "invalid_api_key"
            )
        return key.strip()


async def _chat(session: Session, body: Mapping[str, Any], *, again: bool) -> HttpResponse:
    asked = session.ask(body, again=again)
    try:
        reply = await asyncio.shield(asked.reply)
    except asyncio.CancelledError:
        asked.heard = False
        raise
    if isinstance(reply, RefusedError):
        raise reply
    return completion(reply, body)


def _body(text: bytes) -> Mapping[str, Any]:
    # Decoding many small parts takes long, and all other programs of this process wait for it.
    if sum(map(text.count, (b",", b"[", b"{"))) > _MOST_PARTS:
        raise RefusedError(413, f"the body has more than {_MOST_PARTS} parts", "too_large")
    try:
        body = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RefusedError(400, f"the body is not JSON: {error}", "malformed") from None
    if not isinstance(body, dict):
        raise RefusedError(400, "the body is not a JSON object", "malformed")
    return body


def _check_method(request: HttpRequest, method: str) -> None:
    if request.method != method:
        raise RefusedError(405, f"{request.path} is for {method}", "method_not_allowed")
