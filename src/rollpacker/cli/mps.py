"""``rollpacker mps``: CUDA MPS, with which a judge computes beside the actor."""

from __future__ import annotations

import typer

from rollpacker.cli.output import Json, print_found

mps_app = typer.Typer(
    help="NVIDIA's daemon that lets processes compute on one GPU at the same time.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@mps_app.command()
def start(as_json: Json = False) -> None:
    """Start the daemon; runs that start afterwards use it.

    Example: rollpacker mps start
    """
    from rollpacker.reward.judge import mps

    _tell("started" if mps.start() else "running", as_json)


@mps_app.command()
def stop(as_json: Json = False) -> None:
    """Stop the daemon, when no run uses it any more.

    Example: rollpacker mps stop
    """
    from rollpacker.reward.judge import mps

    mps.stop()
    _tell("stopped", as_json)


@mps_app.command()
def status(as_json: Json = False) -> None:
    """Say whether the daemon runs.

    Example: rollpacker mps status
    """
    from rollpacker.reward.judge import mps

    _tell("running" if mps.is_running() else "stopped", as_json)


def _tell(state: str, as_json: bool) -> None:
    print_found({"state": state}, as_json, f"CUDA MPS: {state}")
