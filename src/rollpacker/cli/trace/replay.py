"""``rollpacker trace replay``: a trace's steps on a real engine or in the simulator."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import RenderableType

from rollpacker.cli.output import Note, Shown, print_note, shown, table_of
from rollpacker.cli.trace.tables import at_least, chosen_task, read_responses

if TYPE_CHECKING:
    from rollpacker.polytrace.model.turns import Scale
    from rollpacker.trace_replay.engine import EngineKind
    from rollpacker.trace_replay.plan import StepPlan


Row = dict[str, Any]
_NO_SUMS = ("step", "peak_running", "rates", "max_tokens_scale", "time_scale")
"""Columns without a sum over steps."""
_SECONDS = {
    "step": "step",
    "step_s": "whole s",
    "rollout_s": "rollout s",
    "tool_wait_s": "tool wait s",
    "reward_s": "reward s",
    "tokens_per_s": "tokens/s",
}
_WORK = {
    "step": "step",
    "responses": "responses",
    "turns": "turns",
    "generated_tokens": "generated",
    "prefill_tokens": "prefilled",
    "decode_steps": "decode steps",
    "peak_running": "peak running",
}


_SHARING = {
    "mini": "a prompt is shared while its group has responses in the engine, and a turn's KV stays "
    "until the next turn as long as there is room",
    "fake": "the engine 'fake' shares no prefixes",
}


@shown
def replay(
    path: Annotated[
        Path, typer.Argument(metavar="TRACE", help="A trace: a file, a folder, or its parent.")
    ],
    model: Annotated[str | None, typer.Option(help="Checkpoint to decode with.")] = None,
    engine: Annotated[
        Literal["mini", "fake"], typer.Option(help="fake decodes in no time.")
    ] = "mini",
    steps: Annotated[int | None, typer.Option(help="First steps (default: all).")] = None,
    task: Annotated[str | None, typer.Option(help="Task to replay, if there are several.")] = None,
    concurrency: Annotated[int, typer.Option(help="Most sequences decoded together.")] = 256,
    time_scale: Annotated[float, typer.Option(help="Factor of tools' and rewards' seconds.")] = 1.0,
    max_tokens_scale: Annotated[
        float, typer.Option(help="Factor of all lengths, including prompts.")
    ] = 1.0,
    out: Annotated[Path | None, typer.Option(help="JSON lines for `trace compare`.")] = None,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Run it in the simulator, without decoding.")
    ] = False,
    calibration: Annotated[
        str | None,
        typer.Option(help="Costs of --simulate (default: chosen by the longest length)."),
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(help="GPUs of --simulate (default: the calibration's).")
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16"], typer.Option(help="Type of the weights.")
    ] = "float32",
    seed: Annotated[int, typer.Option(help="Seed of prompts and sampling.")] = 0,
    format: Annotated[str | None, typer.Option(help="Format of TRACE (default: detected).")] = None,
) -> Shown:
    """Decode a trace again, every response at its recorded length, and time the phases.

    Example: rollpacker trace replay search.parquet --model Qwen/Qwen2.5-0.5B-Instruct --steps 2
    """
    from rollpacker.polytrace.model.turns import Scale

    at_least(1, steps=steps, concurrency=concurrency, gpus=gpus)
    at_least(0, seed=seed)
    _check(time_scale, max_tokens_scale, out)
    if not simulate and (calibration or gpus):
        raise ValueError("--calibration and --gpus need --simulate")
    notes = _unused(model, "simulation" if simulate else engine)
    scale = Scale(tokens=max_tokens_scale, time=time_scale)
    name, plans = _plans(path, format, task, steps, scale, notes)
    made = (
        _simulated(plans, calibration, gpus, concurrency, seed, notes)
        if simulate
        else _replayed(plans, engine, model, concurrency, dtype, scale, seed)
    )
    rows = _written(made, scale, out)
    found = {
        "task": name,
        "engine": "simulator" if simulate else engine,
        "max_tokens_scale": scale.tokens,
        "time_scale": scale.time,
        "steps": rows,
        "total": _total(rows),
        **({} if out is None else {"file": str(out)}),
    }
    notes += _said(found)
    return Shown({**found, "notes": notes}, _lines(found, notes))


def _check(time_scale: float, tokens_scale: float, out: Path | None) -> None:
    if not (math.isfinite(time_scale) and time_scale >= 0.0):
        raise ValueError(f"--time-scale {time_scale}: must be 0 or more")
    if not (math.isfinite(tokens_scale) and tokens_scale > 0.0):
        raise ValueError(f"--max-tokens-scale {tokens_scale}: must be more than 0")
    if out is not None and (out.is_dir() or out.suffix == ".json"):
        raise ValueError(f"--out {out}: name a file of JSON lines, such as replay.jsonl")


def _unused(model: str | None, by: str) -> list[str]:
    idle = {"simulation": "a simulation", "fake": "the engine 'fake'"}
    if model is None or by not in idle:
        return []
    return [f"--model is not used: {idle[by]} decodes nothing"]


def _plans(
    path: Path,
    format: str | None,
    task: str | None,
    steps: int | None,
    scale: Scale,
    notes: list[str],
) -> tuple[str, list[StepPlan]]:
    from rollpacker.trace_replay.plan import plan

    trace = read_responses(path, format, None, notes)
    name = chosen_task(path, trace.tasks, task)
    return name, plan(trace, name, steps=steps, scale=scale, note=notes.append)


def _replayed(
    plans: list[StepPlan],
    kind: EngineKind,
    model: str | None,
    concurrency: int,
    dtype: Literal["float32", "bfloat16"],
    scale: Scale,
    seed: int,
) -> Iterator[Row]:
    from rollpacker.engine.compiling import told_of_compiling
    from rollpacker.trace_replay.engine import build_engine
    from rollpacker.trace_replay.replayer import Replayer

    with told_of_compiling(print_note):
        engine, vocabulary = build_engine(
            kind, model, plans, concurrency=concurrency, dtype=dtype, scale=scale.tokens
        )
        replayer = Replayer(engine, vocabulary=vocabulary, seed=seed)
        replayer.warm_up()
    for plan in plans:
        yield replayer.run(plan).to_dict()


def _simulated(
    plans: list[StepPlan],
    calibration: str | None,
    gpus: int | None,
    concurrency: int,
    seed: int,
    notes: list[str],
) -> Iterator[Row]:
    from rollpacker.trace_replay.simulated import assumptions, replay, replay_costs

    costs = replay_costs(plans, calibration)
    notes += assumptions(plans, costs, gpus)
    for plan in plans:
        yield replay(plan, costs, gpus=gpus, concurrency=concurrency, seed=seed)


def _written(made: Iterable[Row], scale: Scale, out: Path | None) -> list[Row]:
    rows: list[Row] = []
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
    for row in made:
        rows.append({**row, "max_tokens_scale": scale.tokens, "time_scale": scale.time})
        if out is not None:
            with out.open("a" if rows[1:] else "w", encoding="utf-8") as file:
                file.write(json.dumps(rows[-1]) + "\n")
    return rows


def _total(rows: list[Row]) -> Row:
    sums: Row = {name: sum(row[name] for row in rows) for name in rows[0] if name not in _NO_SUMS}
    rollout = sums["rollout_s"]
    if "peak_running" in rows[0]:
        sums["peak_running"] = max(row["peak_running"] for row in rows)
    sums["rates"] = {"tokens_per_s": sums["generated_tokens"] / rollout if rollout else 0.0}
    return sums


def _said(found: dict[str, Any]) -> list[str]:
    said: list[str] = []
    tokens, time, total = found["max_tokens_scale"], found["time_scale"], found["total"]
    if tokens != 1.0:
        said.append(f"scaled: every length is {tokens:g} of the recorded one, including prompts")
    if time != 1.0 and (total.get("tool_wait_s") or total["reward_s"] or time == 0.0):
        said.append(f"scaled: tools and rewards take {time:g} of their recorded seconds")
    if "prefill_tokens" in total:
        prefill, context = total["prefill_tokens"], total["context_tokens"]
        cached = total["cached_tokens"]
        recorded = f". The trace found {cached:,} in its prefix cache" if cached else ""
        kept = f", {total['kept_tokens']:,} were left from the turn before"
        said.append(f"prefilled {prefill:,} of {context:,} prompt tokens{kept}{recorded}")
        said.append(_SHARING[found["engine"]])
    return said


def _lines(found: dict[str, Any], notes: list[str]) -> Iterator[RenderableType]:
    rows = [row | row["rates"] for row in found["steps"]]
    total = {"step": "all"} | found["total"] | found["total"]["rates"]
    for columns in (_SECONDS, _WORK):
        those = {key: title for key, title in columns.items() if key in rows[0]}
        view = table_of(*those.values(), left=0)
        for row in rows if len(rows) == 1 else [*rows, total]:
            view.add_row(*(_cell(row[key]) for key in those))
        yield view
    yield from map(Note, notes)
    if "file" in found:
        yield f"steps: {found['file']}"


def _cell(value: float | str) -> str:
    if isinstance(value, float):
        return f"{value:.3f}" if value < 100 else f"{value:,.0f}"
    return value if isinstance(value, str) else f"{value:,}"
