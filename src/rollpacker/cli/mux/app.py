"""``rollpacker mux``: many RL jobs on a rollout pool and a training pool."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.table import Table

from rollpacker.cli.mux.agent import agent, member
from rollpacker.cli.mux.demo import demo
from rollpacker.cli.mux.jobs import (
    end,
    history,
    hold,
    logs,
    priority,
    release,
    show,
    submit,
    wait,
)
from rollpacker.cli.mux.nodes import node_app, token_app
from rollpacker.cli.mux.service import backup, drain, restore, serve, status
from rollpacker.cli.output import Shown, shown

mux_app = typer.Typer(help="Many RL jobs on shared pools.", no_args_is_help=True)
mux_app.add_typer(node_app, name="node")
mux_app.add_typer(token_app, name="token")
for command in (
    *(demo, serve, agent, member, submit, status, show, logs, wait, hold, release, priority),
    *(end, history, drain, backup, restore),
):
    mux_app.command()(command)


@mux_app.command()
@shown
def simulate(
    trace: Annotated[
        str, typer.Option(help="'philly' (synthetic) or a trace file, one JSON job a line.")
    ] = "philly",
    jobs: Annotated[int, typer.Option(help="Jobs of the synthetic trace.", min=1)] = 200,
    days: Annotated[float, typer.Option(help="Days of arrivals.")] = 14.0,
    seed: Annotated[int, typer.Option(help="Seed of the synthetic trace.", min=0)] = 0,
    policy: Annotated[
        Literal["rollmux", "solo"],
        typer.Option(help="This scheduler, or nodes of its own for every job."),
    ] = "rollmux",
    nodes: Annotated[
        Literal["1", "mixed"], typer.Option(help="Gangs of one node, or of 1, 2 and 4.")
    ] = "1",
    slo: Annotated[str, typer.Option(metavar="LOW,HIGH", help="Range of slowdown limits.")] = "1,2",
    cycles: Annotated[
        Literal["mixed", "one"], typer.Option(help="Iterations of 100 to 900 s, or one class.")
    ] = "mixed",
    inventory: Annotated[
        Path | None, typer.Option(help="Nodes and teams (YAML), for which jobs wait.")
    ] = None,
    events: Annotated[Path | None, typer.Option(help="Event log to write.")] = None,
) -> Shown:
    """Simulate a cluster with the daemon's scheduler. The default trace is synthetic.

    Example: rollpacker mux simulate --jobs 200 --days 14 --policy rollmux
    """
    import numpy as np

    from rollpacker.rollmux.record import trace as traces
    from rollpacker.rollmux.record.event_log import EventLog
    from rollpacker.rollmux.scheduler.inventory_file import read
    from rollpacker.rollmux.simulation import cluster_sim

    machines = None if inventory is None else read(inventory)
    if trace == "philly":
        shape = traces.Philly(jobs=jobs, days=days, nodes=nodes, slo=_range(slo), cycles=cycles)
        loaded = traces.philly(shape, np.random.default_rng(seed))
    else:
        loaded = traces.read(Path(trace))
    with ExitStack() as stack:
        file = stack.enter_context(events.open("w", encoding="utf-8")) if events else None
        log = EventLog(file)
        result = cluster_sim.simulate(loaded, policy, log, time.perf_counter, machines)
    name = f"synthetic, {len(loaded)} jobs" if trace == "philly" else trace
    found = {"policy": policy, "trace": name} | result.to_json()
    return Shown(found, [_table(found)])


def _range(text: str) -> tuple[float, float]:
    try:
        low, high = (float(part) for part in text.split(","))
    except ValueError as error:
        raise ValueError(f"--slo {text}: expected LOW,HIGH, for example 1,2") from error
    return low, high


def _table(found: dict[str, Any]) -> Table:
    view = Table(title=f"{found['policy']} on {found['trace']}", show_header=False)
    peak, decision = found["peak_gpus"], found["decision_ms"]
    wait, slow = found["wait_s"], found["slowdown"]
    rows = (
        *_spent(found),
        ("jobs done", f"{found['jobs_done']}"),
        ("waited", f"mean {wait['mean'] / 3600:.1f} h, at most {wait['max'] / 3600:.1f} h"),
        ("slowdown", f"mean {slow['mean']:.2f}, p95 {slow['p95']:.2f}, since submission"),
        ("SLO kept", f"{found['slo_attained']:.1%}, worst {found['worst_slo_ratio']:.3f} of it"),
        ("peak GPUs", f"rollout {peak['rollout']}, training {peak['train']}"),
        ("GPU hours", f"{found['gpu_hours']:.0f}"),
        ("decision", f"p50 {decision['p50']:.3f} ms, p99 {decision['p99']:.3f} ms"),
    )
    for row in rows:
        view.add_row(*row)
    return view


def _spent(found: dict[str, Any]) -> tuple[tuple[str, str], tuple[str, str]]:
    idle = found.get("idle") or found["bubble"]
    shares = ("idle", f"rollout {idle['rollout']:.0%}, training {idle['train']:.0%}")
    if "idle" in found:
        return ("all done after", f"{found['makespan_h']:.0f} h"), shares
    bound = found["lower_bound_cost_per_h"]
    return ("cost", f"${found['cost_per_h']:.0f}/h (no schedule is below ${bound:.0f}/h)"), shares
