"""``rollpacker mux token``: who may ask the daemon for what."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated, Literal, TextIO

import typer
from rich.table import Table

from rollpacker.cli.mux.daemon import STATE, State
from rollpacker.cli.output import Json, console, print_found, print_json

token_app = typer.Typer(
    help="Bearer tokens of people and agents, on the daemon's machine.", no_args_is_help=True
)
Name = Annotated[str, typer.Argument(metavar="NAME", help="Whose it is.")]


@token_app.command()
def add(
    name: Name,
    role: Annotated[
        Literal["read", "submit", "node", "operate"],
        typer.Option(help="read looks; submit has jobs; node is for agents; operate does all."),
    ],
    team: Annotated[str, typer.Option(help="Of submit: whose jobs; default: all.")] = "",
    to: Annotated[
        Path | None, typer.Option(help="New file for it, only yours; else it is printed.")
    ] = None,
    state: State = STATE,
    as_json: Json = False,
) -> None:
    """Make a token: it is kept nowhere else. It counts at once.

    Example: rollpacker mux token add alice --role submit --team math --to alice.token
    """
    from rollpacker.rollmux.service.http.tokens import Token, add_token

    known = _file(state)
    if to is None:
        text = add_token(known, Token(name=name, role=role, team=team))
        print_found({"name": name, "token": text}, as_json, text)
        return
    with _new(to) as file:
        try:
            file.write(add_token(known, Token(name=name, role=role, team=team)) + "\n")
        except (OSError, ValueError):
            to.unlink()
            raise
    print_found({"name": name, "file": str(to)}, as_json, f"token {name}: in {to}")


@token_app.command("list")
def list_tokens(state: State = STATE, as_json: Json = False) -> None:
    """Show whose tokens there are.

    Example: rollpacker mux token list
    """
    from rollpacker.rollmux.service.http.tokens import read_tokens

    found = read_tokens(_file(state))
    if as_json:
        rows = [{"name": e.name, "role": e.role, "team": e.team, "made_s": e.made_s} for e in found]
        print_json({"tokens": rows})
        return
    view = Table("name", "role", "team", "made")
    for each in found:
        made = time.strftime("%Y-%m-%d %H:%M", time.localtime(each.made_s))
        view.add_row(each.name, each.role, each.team, made)
    console.print(view)


@token_app.command()
def revoke(name: Name, state: State = STATE, as_json: Json = False) -> None:
    """Let nobody in with a token any more, from now on.

    Example: rollpacker mux token revoke alice
    """
    from rollpacker.rollmux.service.http.tokens import revoke_token

    revoke_token(_file(state), name)
    print_found({"name": name, "revoked": True}, as_json, f"token {name}: revoked")


def _new(path: Path) -> TextIO:
    """A file that others cannot read: commands take no other."""
    try:
        return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w")
    except OSError as error:
        raise ValueError(f"--to {path}: {error.strerror}") from error


def _file(state: Path) -> Path:
    from rollpacker.rollmux.service.http.tokens import FILE

    if not state.is_dir():
        raise ValueError(
            f"--state {state}: no such folder; a daemon makes it: rollpacker mux serve"
        )
    return state / FILE
