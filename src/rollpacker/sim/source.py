"""Where a simulated job's lengths come from: a workload model, or a trace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl

from rollpacker.polytrace import formats
from rollpacker.polytrace.generate import load_model, model_names
from rollpacker.polytrace.lengths import Lengths
from rollpacker.polytrace.redrawn import Redrawn
from rollpacker.polytrace.schema import Trace
from rollpacker.sim.workload import Recorded


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Lengths of a workload.

    Args:
        lengths: distribution that fresh prompts are drawn from.
        recorded: prompts that come first.
        cap: longest response; None when unknown.
        prompt_tokens: mean prompt length; None when unknown.
        prompts, responses: of a step, as recorded; None when unknown.
    """

    lengths: Lengths
    recorded: tuple[Recorded, ...] = ()
    cap: int | None = None
    prompt_tokens: int | None = None
    prompts: int | None = None
    responses: int | None = None


def _silent(_: str) -> None:
    return


def load_source(
    name: str, task: str | None = None, note: Callable[[str], None] = _silent
) -> Source:
    """A source by the name of a model, or the path of a model or of a trace.

    Raises ``ValueError`` with one line that says what is wrong.
    """
    if name in model_names() or name.endswith(".json"):
        return of_model(name)
    return of_trace(formats.read(Path(name), note=note), task)


def of_model(name: str) -> Source:
    """A workload model's."""
    model = load_model(name)
    return Source(
        lengths=model.lengths,
        cap=model.lengths.cap,
        prompts=model.prompts,
        responses=model.responses,
    )


def of_trace(trace: Trace, task: str | None = None) -> Source:
    """A trace's own prompts and lengths. Raises ``ValueError`` without whole responses."""
    tasks = trace.tasks
    if task is None and len(tasks) > 1:
        raise ValueError(f"the trace has the tasks {', '.join(tasks)}: choose one with 'task'")
    if task is not None and task not in tasks:
        raise ValueError(f"task {task!r} is not in the trace; it has {', '.join(tasks)}")
    table = trace.samples.filter(
        (pl.col("task") == (task or tasks[0]))
        & (pl.col("state").is_null() | (pl.col("state") != "aborted"))
    )
    if table.is_empty():
        raise ValueError("the trace has no whole response")
    groups = table.group_by(["step", "prompt"], maintain_order=True).agg(
        pl.col("response_tokens"), pl.col("prompt_tokens").mean()
    )
    lists = [np.array(tokens, np.int32) for tokens in groups["response_tokens"]]
    sizes = [len(tokens) for tokens in lists]
    visits = np.repeat(np.arange(len(lists)), sizes)
    flat = np.concatenate(lists).astype(np.float64)
    steps = table["step"].n_unique()
    cap = table["cap"].max()
    mean = table["prompt_tokens"].mean()
    return Source(
        lengths=Redrawn(flat, visits),
        recorded=tuple(
            Recorded(np.array([[float(number)]]), tokens) for number, tokens in enumerate(lists)
        ),
        cap=int(cap) if isinstance(cap, int) else int(flat.max()),
        prompt_tokens=round(mean) if isinstance(mean, float) else None,
        prompts=max(1, len(lists) // steps),
        responses=int(np.median(sizes)),
    )
