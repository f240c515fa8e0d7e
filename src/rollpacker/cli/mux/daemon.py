"""The daemon that a command uses: its options, requests, and numbers as text."""

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
    Path | None, typer.Option(help="File with the bearer token (default: token in the folder).")
]
Cafile = Annotated[Path | None, typer.Option(help="Certificate to trust (TLS).")]
STATE = Path("runs/mux")
URL = "http://127.0.0.1:8642"
_PATIENCE_S = 3.0


T = TypeVar("T")


def of_daemon(command: Callable[..., T]) -> Callable[..., T]:
    """Replace a command's first argument, a daemon, by the options that define it."""
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
    """Requests to a daemon. Its errors become ``ValueError`` and ``RuntimeError``."""

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
                "mux serve). For another daemon give --url, --token-file and, with TLS, --cafile"
            )
        self._link = DaemonLink(url, file, cafile=cafile, patience_s=_PATIENCE_S)
        options = {"--state": state, "--token-file": token_file, "--cafile": cafile, "--url": url}
        usual = {STATE, None, URL}
        self._options = [
            f"{word}" for pair in options.items() if pair[1] not in usual for word in pair
        ]

    def command(self, *words: str) -> str:
        """``rollpacker mux WORDS`` for this daemon, to copy into a shell."""
        return shlex.join(("rollpacker", "mux", *words, *self._options))

    def get(self, path: str) -> dict[str, Any]:
        return self._call("GET", path)

    def post(self, path: str, body: Any, key: str | None = None) -> dict[str, Any]:
        """Send a POST. ``key`` None makes a new key."""
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
            text = f"no daemon answers: {error}. Start one with rollpacker mux serve"
            raise RuntimeError(text) from error


def _is_missing(file: Path) -> bool:
    try:
        file.stat()
    except OSError as error:  # another user's file exists
        return isinstance(error, FileNotFoundError)
    return False


_MINUTES_S, _HOURS_S = 60.0, 7200.0  # limits from which durations are printed in minutes and hours


def duration(seconds: float) -> str:
    """A duration in a readable unit."""
    if seconds < _MINUTES_S:
        return f"{seconds:.0f} s"
    if seconds < _HOURS_S:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def missed(job: dict[str, Any]) -> str:
    """A text if an ended job missed its SLO, else empty."""
    if job["slo_state"] != "missed":
        return ""
    slowdown = "" if job["slowdown"] is None else f": slowdown {job['slowdown']:.2f}"
    return f"SLO of {job['spec']['slo']:g} missed{slowdown}"
