"""Requests to a daemon over HTTP, until they are answered.

Every POST carries an idempotency key and is repeated with the same key until an answer comes, so
what was asked for happens once, whatever is lost on the way or restarted at the other end.
"""

from __future__ import annotations

import http.client
import json
import ssl
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rollpacker.rollmux.service.http.token_file import read_token

SOCKET_S = 10.0
_UNAUTHORIZED = 401
_AGAIN = (408, 503)
"""The request did not arrive whole, or nobody knows what became of it."""
_PAUSE_S = (0.05, 1.0)
_NO_HTTP = (ssl.SSLError, http.client.BadStatusLine, ConnectionResetError)
"""What comes of plain HTTP to a daemon with TLS, or the other way round."""
_SCHEME = "; does --url (mux.url) say http:// where it speaks TLS, or https:// where it does not?"
_KEPT_S = 60.0
"""Of a connection between two requests: less than the daemon has patience."""


class MuxError(RuntimeError):
    """The daemon refused; ``status`` and ``answer`` (its JSON object) say why."""

    def __init__(self, status: int, answer: Mapping[str, Any]) -> None:
        super().__init__(str(answer.get("error", f"HTTP status {status}")))
        self.status = status
        self.answer = answer
        self.code = str(answer.get("code", ""))


class UnreachableError(ConnectionError):
    """No answer came in time; what was asked for may or may not have happened."""


class AilingDaemonError(UnreachableError):
    """The daemon answered, but could not do it in time: its disk may be full."""


def new_key() -> str:
    """An idempotency key."""
    return uuid.uuid4().hex


class DaemonLink:
    """Talks to one daemon; safe to share between threads.

    Args:
        url: of the daemon, ``http://127.0.0.1:8642``.
        token_file: holds the bearer token; nobody else may read it.
        cafile: certificate to trust, for https.
        patience_s: how long to go on asking when no answer comes.

    Raises ``ValueError`` for a wrong address, token file or certificate.
    """

    def __init__(
        self,
        url: str,
        token_file: str | Path,
        *,
        cafile: str | Path | None = None,
        patience_s: float = 300.0,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(
                f"mux.url (--url) must be http://HOST:PORT or https://HOST:PORT, got {url!r}"
            )
        self._connect: Callable[..., http.client.HTTPConnection] = http.client.HTTPConnection
        if parts.scheme == "https":
            self._connect = partial(http.client.HTTPSConnection, context=_trusted(cafile))
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        self.address = f"{host}:{parts.port}" if parts.port else host
        self._host, self._port = parts.hostname, parts.port
        self.token, self._token_file = _token(token_file), token_file
        self._patience_s = patience_s
        self._answered = False
        """Whether it has ever: then the address is right."""
        self._kept: tuple[http.client.HTTPConnection, float] | None = None
        """A connection for the next request, and until when it is good."""
        self._lock = threading.Lock()

    def call(
        self,
        method: str,
        path: str,
        body: object = None,
        key: str | None = None,
        *,
        wait_s: float = 0.0,
        patience_s: float | None = None,
    ) -> tuple[float, Any]:
        """The time just before the request that was answered was sent, and the answer, an object.

        Args:
            body: JSON; None sends none.
            wait_s: that the daemon may take for its answer.
            patience_s: in place of the usual one.

        Raises ``MuxError``, ``UnreachableError``, and ``ValueError`` for an untrusted certificate.
        """
        patience = self._patience_s if patience_s is None else patience_s
        give_up = time.monotonic() + patience
        pause, longest = _PAUSE_S
        kind, problem = UnreachableError, ""
        while True:
            sent = time.monotonic()
            left = give_up - sent
            try:
                timeout = wait_s + min(SOCKET_S, max(0.1, left))
                status, answer = self._once(method, path, body, key, timeout)
            except ssl.SSLCertVerificationError as error:
                raise ValueError(
                    f"mux.cafile (--cafile): the certificate of {self.address} is not trusted: "
                    f"{error.verify_message}"
                ) from error
            except (OSError, http.client.HTTPException) as error:
                if kind is UnreachableError:
                    problem = f"{type(error).__name__}: {error}"
                if not self._answered and isinstance(error, _NO_HTTP):
                    problem += _SCHEME
            else:
                self._answered = True
                if status < 300:
                    return sent, answer
                if status not in _AGAIN:
                    raise self._refusal(status, answer)
                kind, problem = AilingDaemonError, str(MuxError(status, answer))
            if time.monotonic() + pause >= give_up:
                raise kind(f"{self.address}{path}: {problem}")
            time.sleep(pause)
            pause = min(longest, 2 * pause)

    def _refusal(self, status: int, answer: Mapping[str, Any]) -> MuxError:
        if status != _UNAUTHORIZED:
            return MuxError(status, answer)
        text = f"{self._token_file}: the daemon does not take this token"
        return MuxError(status, {"error": f"mux.token_file (--token-file) {text}"})

    def _once(
        self, method: str, path: str, body: object, key: str | None, timeout: float
    ) -> tuple[int, dict[str, Any]]:
        headers = {
            "Authorization": f"Bearer {self.token.decode()}",
            "Content-Type": "application/json",
        }
        if key is not None:
            headers["Idempotency-Key"] = key
        connection = self._take(timeout)
        try:
            text = None if body is None else json.dumps(body)
            connection.request(method, path, text, headers)
            response = connection.getresponse()
            data = response.read()
        except BaseException:
            connection.close()
            raise
        self._keep(connection)
        return response.status, _parse(data)

    def _take(self, timeout: float) -> http.client.HTTPConnection:
        """The connection that was kept, where nothing has come on it since: the daemon only says
        there that it ends. Else a new one."""
        with self._lock:
            kept, self._kept = self._kept, None
        if kept is not None and kept[0].sock is not None:
            connection, until = kept
            if time.monotonic() < until and not wait([connection.sock], 0):
                connection.sock.settimeout(timeout)
                return connection
            connection.close()
        return self._connect(self._host, self._port, timeout=timeout)

    def _keep(self, connection: http.client.HTTPConnection) -> None:
        """One for the next request, whichever thread's it is."""
        with self._lock:
            if self._kept is None and connection.sock is not None:
                self._kept = connection, time.monotonic() + _KEPT_S
                return
        connection.close()


def _parse(data: bytes) -> dict[str, Any]:
    """The answer's object. Raises ``HTTPException`` when it is none: no answer of the daemon's."""
    if not data:
        return {}
    try:
        answer = json.loads(data)
    except ValueError as error:
        raise http.client.HTTPException(f"not JSON: {data[:80]!r}") from error
    if not isinstance(answer, dict):
        raise http.client.HTTPException(f"not a JSON object: {data[:80]!r}")
    return answer


def _token(path: str | Path) -> bytes:
    try:
        return read_token(Path(path))
    except FileNotFoundError as error:
        raise ValueError(
            f"mux.token_file (--token-file): there is no {path}; a daemon makes its operator's "
            "token in its folder (--state) at its first start"
        ) from error
    except (OSError, ValueError) as error:
        raise ValueError(f"mux.token_file (--token-file): {error}") from error


def _trusted(cafile: str | Path | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=None if not cafile else str(cafile))
    except OSError as error:
        raise ValueError(f"mux.cafile (--cafile) {cafile}: {error}") from error
