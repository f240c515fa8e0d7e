"""``rollpacker mux token``: who may ask the daemon for what."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated, Literal, TextIO

import typer
from rich.table import Table

from rollpacker.cli.mux.daemon import Daemon, of_daemon
from rollpacker.cli.output import Json, console, print_found, print_json

token_app = typer.Typer(help="Bearer tokens of people and agents.", no_args_is_help=True)
Name = Annotated[str, typer.Argument(metavar="NAME", help="Whose it is.")]


@token_app.command()
@of_daemon
def add(
    daemon: Daemon,
    name: Name,
    role: Annotated[
        Literal["read", "submit", "node", "operate"],
        typer.Option(help="read looks; submit has jobs; node is for agents; operate does all."),
    ],
    team: Annotated[str, typer.Option(help="Of submit: whose jobs; default: all.")] = "",
    to: Annotated[
        Path | None, typer.Option(help="New file for it, only yours; else it is printed.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Make a token: it is kept nowhere else. It counts at once.

    Example: rollpacker mux token add alice --role submit --team math --to alice.token
    """
    asked = {"name": name, "role": role, "team": team}
    if to is None:
        text = daemon.post("/v1/tokens", asked)["token"]
        print_found({"name": name, "token": text}, as_json, text)
        return
    with _new(to) as file:
        try:
            file.write(daemon.post("/v1/tokens", asked)["token"] + "\n")
        except (OSError, RuntimeError, ValueError):
            to.unlink()
            raise
    print_found({"name": name, "file": str(to)}, as_json, f"token {name}: in {to}")


@token_app.command("list")
@of_daemon
def list_tokens(daemon: Daemon, as_json: Json = False) -> None:
    """Show whose tokens there are.

    Example: rollpacker mux token list
    """
    found = daemon.get("/v1/tokens")
    if as_json:
        print_json(found)
        return
    view = Table("name", "role", "team", "made")
    for each in found["tokens"]:
        made = time.strftime("%Y-%m-%d %H:%M", time.localtime(each["made_s"]))
        view.add_row(each["name"], each["role"], each["team"], made)
    console.print(view)


@token_app.command()
@of_daemon
def revoke(daemon: Daemon, name: Name, as_json: Json = False) -> None:
    """Let nobody in with a token any more, from now on.

    Example: rollpacker mux token revoke alice
    """
    daemon.post("/v1/tokens/revoke", {"name": name})
    print_found({"name": name, "revoked": True}, as_json, f"token {name}: revoked")


def _new(path: Path) -> TextIO:
    """A file that others cannot read: commands take no other."""
    try:
        return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w")
    except OSError as error:
        raise ValueError(f"--to {path}: {error.strerror}") from error
