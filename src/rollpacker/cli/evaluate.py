"""``rollpacker eval``: how good a checkpoint is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollpacker.cli.output import Json, Overrides, console, print_json, print_plain, table_of


def evaluate(
    checkpoint: Annotated[
        str, typer.Argument(metavar="CHECKPOINT", help="Folder or hub name of a model.")
    ],
    path: Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file with eval.")],
    overrides: Overrides = None,
    num_generations: Annotated[
        int | None, typer.Option(help="Answers to each problem; default: the config's.", min=1)
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure a checkpoint on a config's held-out problems: accuracy, pass@k and maj@k.

    Example: rollpacker eval runs/math/checkpoint-200 job.yaml --num-generations 8
    """
    from rollpacker import config

    loaded = config.load(path, overrides or [])
    if loaded.eval is not None:
        from rollpacker.cli.first_look import check_here

        check_here(checkpoint, loaded.eval.data or loaded.data)
    from rollpacker.job.ask.assess import assess
    from rollpacker.runtime.record.progress import Progress

    result = assess(loaded, checkpoint, num_generations, Progress())
    if as_json:
        print_json(result)
        return
    view = table_of("k", "pass@k", "maj@k", left=0)
    for k, value in result["pass_at"].items():
        view.add_row(str(k), *(_percent(each) for each in (value, result["maj_at"][k])))
    console.print(view)
    print_plain(
        f"accuracy {result['accuracy']:.1%} on {result['problems']} problems, "
        f"{result['num_generations']} answers to each, mean length {result['mean_length']:.0f} "
        f"tokens, {result['clipped_ratio']:.0%} cut off"
    )
    print_plain(f"maj@k counts {result['votes_by']} of each answer")
    if result["ungraded"]:
        print_plain(f"{result['ungraded']} answers got no reward and are left out")


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
