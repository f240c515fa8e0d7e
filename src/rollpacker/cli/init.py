"""``rollpacker init``: a first job file."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollpacker.cli.convert import CommandLine, translate
from rollpacker.cli.output import Shown, print_aside, shown

if TYPE_CHECKING:
    from rollpacker.job.ask.draft import Wishes


@shown
def init(
    model: Annotated[str | None, typer.Option(help="Folder or hub name of the model.")] = None,
    data: Annotated[
        str | None, typer.Option(help="File, hub name, rg:TASK or package.module:function.")
    ] = None,
    reward: Annotated[
        str | None, typer.Option(help="math, code, rg, FILE.py:NAME or MODULE:NAME.")
    ] = None,
    eval_data: Annotated[
        str | None, typer.Option(help="Held-out problems, in the same forms as --data.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="Steps (default: one pass over the data).", min=1)
    ] = None,
    source: Annotated[
        Path | None,
        typer.Option("--from", metavar="FILE", help="Translate a verl or TRL configuration."),
    ] = None,
    world: Annotated[
        int | None, typer.Option(help="With --from: processes that TRL ran on.", min=1)
    ] = None,
    out: Annotated[Path, typer.Option(help="File to write.")] = Path("job.yaml"),
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
) -> Shown:
    """Write a commented job file that `rollpacker train` accepts as it is.

    Asks five questions on a terminal, unless model, data and reward are given. With --from it
    translates a verl or TRL configuration: YAML, verl's launch script or TRL's Python script.

    Example: rollpacker init --model Qwen/Qwen2.5-0.5B-Instruct --data problems.jsonl --reward math
    """
    if os.path.lexists(out) and not force:
        raise ValueError(f"{out} exists: choose another file with --out, or use --force")
    asked = CommandLine(
        model=model, data=data, reward=reward, held_out=eval_data, steps=steps, world=world
    )
    if source is not None:
        return _translated(source, asked, out, force)
    if world is not None:
        raise ValueError("--world needs --from")
    from rollpacker.job.ask.draft import draft
    from rollpacker.runtime.record.progress import Progress

    text, warnings = draft(_wishes(asked), Progress())
    _write(text, out, force)
    return Shown({"file": str(out), "warnings": warnings}, _lines(warnings, out))


def _wishes(asked: CommandLine) -> Wishes:
    from rollpacker.job.ask.draft import Wishes

    model, data, reward, held_out = asked.model, asked.data, asked.reward, asked.held_out
    steps = asked.steps
    if model is None or data is None or reward is None:
        missing = [n for n, v in (("model", model), ("data", data), ("reward", reward)) if not v]
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise ValueError(
                f"give {', '.join(f'--{name}' for name in missing)}: init asks on a terminal only"
            )
        model = model or _ask("Model (folder or hub name)")
        data = data or _ask("Prompts (json, jsonl, parquet, csv, hub name or rg:TASK)")
        guess = "rg" if data.startswith("rg:") else "math"
        reward = reward or _ask("Reward (math, code, rg, FILE.py:NAME)", guess)
        if held_out is None:
            held_out = _ask("Held-out problems, empty for none", "")
        steps = steps or int(_ask("Steps, 0 for one pass over the prompts", 0))
    return Wishes(model=model, data=data, reward=reward, held_out=held_out or "", steps=steps or 0)


def _translated(source: Path, asked: CommandLine, out: Path, force: bool) -> Shown:
    job = translate(source, asked)
    _write(job.text, out, force)
    data = {
        "file": str(out),
        "framework": job.table.framework,
        "translated": job.translated,
        "ignored": job.ignored,
        "unsupported": job.refused,
        "warnings": job.warnings,
    }
    at = f" (listed at the end of {out})" if job.ignored else ""
    counts = (
        f"{source} ({job.table.framework}): {len(job.translated)} keys translated, "
        f"{len(job.ignored)} ignored{at}, {len(job.refused)} set by hand"
    )
    return Shown(data, _lines(job.by_hand + job.warnings, out, counts))


def _lines(warnings: list[str], out: Path, *lines: str) -> Iterator[str]:
    for warning in warnings:
        print_aside(f"WARNING {warning}")
    yield from lines
    yield (
        f"wrote {out}; next: rollpacker doctor {out} (elsewhere: --device H100 --gpus 8), "
        f"then rollpacker train {out}"
    )


def _write(text: str, out: Path, force: bool) -> None:
    """Without ``force``, fail if the file exists by now."""
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        with out.open("w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ValueError(f"{out} exists: --force overwrites it") from None


def _ask(question: str, default: str | int | None = None) -> str:
    return str(typer.prompt(question, default=default, err=True)).strip()
