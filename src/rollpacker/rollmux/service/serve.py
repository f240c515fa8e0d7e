"""The daemon as a process: folder, token, store, server."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import signal
import socket
import ssl
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import uvicorn

from rollpacker.connection_limits import Places
from rollpacker.processes.children import allow_files
from rollpacker.rollmux.model.settings import Settings
from rollpacker.rollmux.scheduler.inventory_file import read
from rollpacker.rollmux.service.commands.commands import poll
from rollpacker.rollmux.service.commands.writer import Writer
from rollpacker.rollmux.service.http.app import MAX_HEADERS, App, Audit
from rollpacker.rollmux.service.http.logs import Logs
from rollpacker.rollmux.service.http.protocol import PatientProtocol
from rollpacker.rollmux.service.http.routes import DaemonParts
from rollpacker.rollmux.service.http.tokens import FILE as TOKENS
from rollpacker.rollmux.service.http.tokens import Tokens, make_token, read_token
from rollpacker.rollmux.service.state.transaction_log import TransactionLog
from rollpacker.rollmux.service.store import Store, StoreError
from rollpacker.rollmux.service.views.metrics import Metrics

DEFAULT_PORT = 8642
_KEEP_ALIVE_S = 75
_HANDSHAKE_S = 10.0
_BACKLOG = 1024
_OURS = ("mux.sqlite*", "token*", "audit.jsonl", "logs", "logs/*.log")
STRANGERS, _KNOWN, _OF_ONE = 256, 2048, 1024
"""Limits of connections: without a token, with tokens, and per token (several agents)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Options of the daemon.

    Args:
        state: folder of the database and the token.
        host: address to bind. Any except a loopback needs TLS.
        port: 0 takes a free one.
        ttl: seconds of a lease.
        settings: settings of the scheduler (None for those in the database).
        inventory: file of nodes and teams (None for rented nodes, or those in the database).
        token_file: file of the operator's token (None for one in ``state``, created if missing).
    """

    state: Path
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    ttl: float = 30.0
    settings: Settings | None = None
    inventory: Path | None = None
    token_file: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None

    def __post_init__(self) -> None:
        """Raises ``ValueError`` on an unprotected address or a lease out of range."""
        if not 1.0 <= self.ttl <= 3600.0:
            raise ValueError(f"--ttl {self.ttl:g}: must be 1 to 3600 seconds")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("--tls-cert and --tls-key: give both or none")
        if not _loopback(self.host) and self.tls_cert is None:
            raise ValueError(
                f"--host {self.host}: other machines can reach it: give --tls-cert and --tls-key"
            )


def _loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def serve(options: ServeOptions, ready: Callable[[str, Path], None]) -> None:
    """Run until SIGINT or SIGTERM. ``ready`` gets the address and the token file.

    Raises ``ValueError`` or ``StoreError`` if the daemon must not start.
    """
    _check_certificate(options)
    _make_private(options.state)
    token_file = options.token_file or options.state / "token"
    if options.token_file is None:
        make_token(token_file)
    elif not token_file.exists():
        raise ValueError(
            f"--token-file {token_file}: no such file. Without --token-file the daemon makes one"
        )
    token = read_token(token_file)
    asyncio.run(_serve(options, token, lambda url: ready(url, token_file)))


def _make_private(state: Path) -> None:
    """Protect present and future files: environments, logs and hashes of tokens."""
    os.umask(0o077)
    state.mkdir(parents=True, exist_ok=True, mode=0o700)
    ours = [path for name in _OURS for path in state.glob(name)]
    whole = {path for path in state.iterdir()} <= {*ours}
    for path in (*ours, *([state] if whole else ())):
        if not path.is_symlink() and path.stat().st_uid == os.geteuid():
            path.chmod(path.stat().st_mode & 0o700)


def _check_certificate(options: ServeOptions) -> None:
    if options.tls_cert is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(options.tls_cert, options.tls_key)
    except OSError as error:
        files = f"--tls-cert {options.tls_cert}, --tls-key {options.tls_key}"
        raise ValueError(f"{files}: {error.strerror or error}") from error


def _open(options: ServeOptions) -> TransactionLog:
    store = Store(options.state / "mux.sqlite")
    settings, machines = options.settings, ()
    try:
        if options.inventory is not None:
            nodes = read(options.inventory)
            settings, machines = nodes.settings(settings or Settings()), nodes.machines
        return TransactionLog(store, settings, options.ttl, machines=machines)
    except BaseException:
        store.close()
        raise


async def _serve(options: ServeOptions, token: bytes, ready: Callable[[str], None]) -> None:
    crashed: list[str] = []
    server: uvicorn.Server | None = None

    def crash() -> None:
        crashed.append("the writer stopped")
        if server is not None:
            server.should_exit = True

    listener = _listen(options)
    writer = Writer(partial(_open, options), poll, crash)
    metrics = Metrics()
    writer.stats.observe = metrics.commit
    tokens = Tokens(options.state / TOKENS, token)
    daemon = DaemonParts(writer, metrics, Logs(options.state / "logs"), tokens)
    audit = Audit(options.state / "audit.jsonl")
    allow_files(STRANGERS + _KNOWN)
    server = _Server(_config(options, App(daemon, tokens.principal, metrics.request, audit.note)))
    writer.start(asyncio.get_running_loop())
    try:
        ready(_url(options, listener))
        await server.serve(sockets=[listener])
    finally:
        await asyncio.to_thread(writer.stop)
        audit.close()
    if crashed:
        raise StoreError(f"{crashed[0]} because of an internal error. Its traceback is above")


def _config(options: ServeOptions, app: App) -> uvicorn.Config:
    # Otherwise strangers could fill the log with invalid requests.
    logging.getLogger("uvicorn").setLevel(logging.ERROR)
    return uvicorn.Config(
        app,  # type: ignore[arg-type]
        host=options.host,
        port=options.port,
        http=partial(PatientProtocol, places=_places()),  # type: ignore[arg-type]
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        h11_max_incomplete_event_size=MAX_HEADERS,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=2,
        ssl_certfile=options.tls_cert,
        ssl_keyfile=options.tls_key,
    )


def _places() -> Places:
    return Places(strangers=STRANGERS, known=_KNOWN, each=_OF_ONE)


def _listen(options: ServeOptions) -> socket.socket:
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    try:
        listener = socket.create_server((options.host, options.port), family=family)
    except OSError as error:
        address = f"{options.host} port {options.port}"
        raise RuntimeError(f"cannot listen on {address}: {error.strerror}") from error
    # Accepted connections inherit it. Otherwise answers wait for delayed acknowledgements.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def _url(options: ServeOptions, listener: socket.socket) -> str:
    host = f"[{options.host}]" if ":" in options.host else options.host
    scheme = "http" if options.tls_cert is None else "https"
    return f"{scheme}://{host}:{listener.getsockname()[1]}"


class _Server(uvicorn.Server):
    """Stops at the first signal, without a traceback, and limits the time of handshakes."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        protocol = partial(
            self.config.http_protocol_class,
            config=self.config,
            server_state=self.server_state,
            app_state={},
        )
        loop, tls = asyncio.get_running_loop(), self.config.ssl
        patience = None if tls is None else _HANDSHAKE_S
        self.servers = [
            await loop.create_server(
                protocol, sock=sock, ssl=tls, ssl_handshake_timeout=patience, backlog=_BACKLOG
            )
            for sock in sockets or ()
        ]
        self.started = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._leave)
        yield

    def _leave(self) -> None:
        self.should_exit = True
