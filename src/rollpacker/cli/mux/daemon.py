"""Which daemon a command speaks to, plain requests, and its numbers in words."""

from __future__ import annotations

import inspect
import shlex
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from rollpacker.cli.output import with_parameters

State = Annotated[Path, typer.Option(help="The daemon's folder: database and token.")]
Url = Annotated[str, typer.Option(help="Address of the daemon.")]
TokenFile = Annotated[
    Path | None, typer.Option(help="File with the bearer token; default: token in the folder.")
]
Cafile = Annotated[Path | None, typer.Option(help="Certificate to trust (TLS).")]
STATE = Path("runs/mux")
URL = "http://127.0.0.1:8642"
_PATIENCE_S = 3.0


T = TypeVar("T")


def of_daemon(command: Callable[..., T]) -> Callable[..., T]:
    """A command whose first argument is a daemon: instead it takes the options that say which."""
    _, *own = inspect.signature(command, eval_str=True).parameters.values()
    which = inspect.signature(Daemon, eval_str=True).parameters

    @wraps(command)
    def run(**given: Any) -> T:
        return command(Daemon(**{name: given.pop(name) for name in which}), **given)

    parameters = (
        each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in (*own, *which.values())
    )
    return with_parameters(run, parameters)


class Daemon:
    """Plain requests to a daemon, with its errors as ours."""

    def __init__(
        self,
        url: Url = URL,
        state: State = STATE,
        token_file: TokenFile = None,
        cafile: Cafile = None,
    ) -> None:
        from rollpacker.rollmux.service.client.client import DaemonLink

        file = token_file or state / "token"
        if token_file is None and _is_missing(file):
            raise ValueError(
                f"there is no {file}: no daemon was started here with --state {state} (rollpacker "
                "mux serve); for one elsewhere say --url, --token-file and, with TLS, --cafile"
            )
        self._link = DaemonLink(url, file, cafile=cafile, patience_s=_PATIENCE_S)
        options = {"--state": state, "--token-file": token_file, "--cafile": cafile, "--url": url}
        usual = {STATE, None, URL}
        self._options = [
            f"{word}" for pair in options.items() if pair[1] not in usual for word in pair
        ]

    def command(self, *words: str) -> str:
        """``rollpacker mux WORDS`` to this daemon, to be copied into a shell."""
        return shlex.join(("rollpacker", "mux", *words, *self._options))

    def get(self, path: str) -> dict[str, Any]:
        """What there is."""
        return self._call("GET", path)

    def post(self, path: str, body: Any, key: str | None = None) -> dict[str, Any]:
        """Ask for something; ``key`` None makes one."""
        from rollpacker.rollmux.service.client.client import new_key

        return self._call("POST", path, body, key or new_key())

    def _call(self, *request: Any) -> dict[str, Any]:
        from rollpacker.rollmux.service.client.client import (
            AilingDaemonError,
            MuxError,
            UnreachableError,
        )

        try:
            return self._link.call(*request)[1]
        except MuxError as error:
            kind = ValueError if error.status < 500 else RuntimeError
            raise kind(f"{self._link.address}: {error}") from error
        except AilingDaemonError as error:
            raise RuntimeError(f"the daemon cannot do it now: {error}") from error
        except UnreachableError as error:
            text = f"no daemon answers: {error}; start one: rollpacker mux serve"
            raise RuntimeError(text) from error


def _is_missing(file: Path) -> bool:
    try:
        file.stat()
    except OSError as error:  # one that is another user's is there
        return isinstance(error, FileNotFoundError)
    return False


_MINUTES_S, _HOURS_S = 60.0, 7200.0
"""From which on a duration is told in them."""


def duration(seconds: float) -> str:
    """In the unit in which people would say it."""
    if seconds < _MINUTES_S:
        return f"{seconds:.0f} s"
    if seconds < _HOURS_S:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def missed(job: dict[str, Any]) -> str:
    """Of a job that is over: that its SLO was missed; empty where it was met."""
    if job["slo_state"] != "missed":
        return ""
    slowdown = "" if job["slowdown"] is None else f": slowdown {job['slowdown']:.2f}"
    return f"SLO of {job['spec']['slo']:g} missed{slowdown}"
