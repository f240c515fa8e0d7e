"""``rollpacker eval``: the accuracy of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollpacker.cli.output import Overrides, Shown, shown, table_of

if TYPE_CHECKING:
    from rollpacker.config import DataConfig


def check_here(model: str, *data: DataConfig | None) -> None:
    """Raises ``ValueError`` for a missing model folder or missing data, before slow imports.

    It does not ask the hub.
    """
    from rollpacker.data.read import check_places
    from rollpacker.hub import check_model

    try:
        check_model(model)
    except ValueError as error:
        raise ValueError(f"model.path={model}: {error}") from None
    for each in data:
        if each is not None:
            check_places(each)


@shown
def evaluate(
    checkpoint: Annotated[
        str, typer.Argument(metavar="CHECKPOINT", help="Folder or hub name of a model.")
    ],
    path: Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file with eval.")],
    overrides: Overrides = None,
    num_generations: Annotated[
        int | None, typer.Option(help="Answers to each problem (default: the config's).", min=1)
    ] = None,
) -> Shown:
    """Measure a checkpoint on a config's held-out problems: accuracy, pass@k and maj@k.

    Example: rollpacker eval runs/math/checkpoint-200 job.yaml --num-generations 8
    """
    from rollpacker import config

    loaded = config.load(path, overrides or [])
    if loaded.eval is not None:
        check_here(checkpoint, loaded.eval.data or loaded.data)
    from rollpacker.job.ask.assess import assess
    from rollpacker.runtime.record.progress import Progress

    result = assess(loaded, checkpoint, num_generations, Progress())
    view = table_of("k", "pass@k", "maj@k", left=0)
    for k, value in result["pass_at"].items():
        both = value, result["maj_at"][k]
        view.add_row(str(k), *("-" if each is None else f"{each:.1%}" for each in both))
    lines = [
        view,
        f"accuracy {result['accuracy']:.1%} on {result['problems']} problems, "
        f"{result['num_generations']} answers to each, mean length {result['mean_length']:.0f} "
        f"tokens, {result['clipped_ratio']:.0%} cut off",
        f"maj@k counts {result['votes_by']} of each answer",
    ]
    if result["ungraded"]:
        lines.append(f"{result['ungraded']} answers got no reward and are left out")
    return Shown(result, lines)
