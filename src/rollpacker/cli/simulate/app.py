"""``rollpacker simulate``, ``estimate`` and ``calibrate``: jobs on simulated machines."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollpacker.cli.output import (
    ConfigFile,
    Note,
    Overrides,
    Shown,
    print_note,
    run_in,
    shown,
    table_of,
)
from rollpacker.cli.simulate.rehearse import Encoder, rehearsed
from rollpacker.cli.trace.tables import compared, read_responses, recognised

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType
    from rich.table import Table

    from rollpacker.polytrace.formats.files import TokenCount
    from rollpacker.polytrace.schema import Trace
    from rollpacker.sim.estimate import Estimate, EstimatedJob, EstimatedMachine
    from rollpacker.sim.recorded.run_record import RunRecord
    from rollpacker.sim.world.machines import SimulationConfig
    from rollpacker.sim.world.step import JobResult

_TRUSTED = 0.8
"""Accuracy on held-back steps below which an estimate is doubted."""


@shown
def simulate(
    path: ConfigFile,
    overrides: Overrides = None,
    journal: Annotated[Path | None, typer.Option(help="Journal of decisions to write.")] = None,
) -> Shown:
    """Run a job's policies on simulated machines, without decoding or training.

    Example: rollpacker simulate examples/simulate/paper-14b-16k.yaml steps=20
    rollout.tail_batching.mode=race
    """
    from rollpacker import config
    from rollpacker.sim.world.machines import SimulationConfig

    loaded = config.load_as(SimulationConfig, path, overrides or [])
    began = time.perf_counter()
    result = _run(loaded, journal)
    off = result if _is_plain(loaded) else _run(_plain(loaded), None)
    result = replace(result, sim_wall_s=time.perf_counter() - began)
    gain = result.samples_per_s / off.samples_per_s
    said = (
        f"{gain:.2f}x as fast as mode off, which grades while it decodes "
        f"({off.mean_step_s:.4g} s per step)"
    )
    lines = [_steps_table(result), *([] if off is result else [said]), *_summary(result)]
    return Shown({**_as_json(result), "over_off": gain, "off_step_s": off.mean_step_s}, lines)


def _is_plain(config: SimulationConfig) -> bool:
    return config.rollout.tail_batching.mode == "off" and bool(config.asynchronous_grading)


def _plain(config: SimulationConfig) -> SimulationConfig:
    """The baseline: the same job in mode ``off``, graded while it decodes."""
    tail = config.rollout.tail_batching.model_copy(update={"mode": "off"})
    rollout = config.rollout.model_copy(update={"tail_batching": tail})
    return config.model_copy(update={"rollout": rollout, "asynchronous_grading": True})


def _run(config: SimulationConfig, journal: Path | None) -> JobResult:
    from rollpacker.core.journal import JournalWriter
    from rollpacker.sim.costs import calibration
    from rollpacker.sim.workload.source import load_source
    from rollpacker.sim.world.simulator import Simulation

    fitted = calibration.load(config.calibration)
    costs = fitted.moved(config.model, config.device)
    if carried := fitted.carried_over(costs):
        print_note(carried)
    source = load_source(config.workload, config.task, note=print_note)
    if journal is None:
        return Simulation(config, costs, source).run()
    journal.unlink(missing_ok=True)
    writer = JournalWriter(journal)
    simulation = Simulation(config, costs, source, record=writer.record)
    writer.meta(simulation.policy.journal_head())
    result = simulation.run()
    writer.close()
    return result


def _as_json(result: JobResult) -> dict[str, Any]:
    return {
        "step_s": [step.step_s for step in result.steps],
        "rollout_s": [step.rollout_s for step in result.steps],
        "train_s": [step.train_s for step in result.steps],
        "round_kind": [step.kind.value for step in result.steps],
        "mean_step_s": result.mean_step_s,
        "samples_per_s": result.samples_per_s,
        "kept_vs_true_len": result.kept_vs_true_len,
        "stale_tokens": result.stale_share,
        "bubble": result.bubble,
        "tool_wait_s": result.tool_wait_s,
        "preemptions": sum(step.preemptions for step in result.steps),
        "bounds": {
            "packing_s": result.packing_s,
            "single_sequence_s": result.single_sequence_s,
            "tool_wait_s": result.tool_bound_s,
        },
        "sim_wall_s": result.sim_wall_s,
    }


def _steps_table(result: JobResult) -> Table:
    names = ("steps", "step s", "rollout s", "train s", "samples", "decoded tokens")
    view = table_of("rounds", *names)
    for kind in sorted({step.kind for step in result.steps}):
        steps = result.of(kind)
        means = (
            sum(values) / len(steps)
            for values in zip(
                *((s.step_s, s.rollout_s, s.train_s, s.samples, s.decoded_tokens) for s in steps),
                strict=True,
            )
        )
        cells = [f"{value:.4g}" if value < 1000 else f"{value:.0f}" for value in means]
        view.add_row(kind.value, str(len(steps)), *cells)
    return view


def _summary(result: JobResult) -> list[str]:
    tools = (
        f"workers only wait for tools in another {result.tool_wait_s:.4g} s of a step, and one "
        f"response waits for at most {result.tool_bound_s:.4g} s"
    )
    oldest = max(step.oldest for step in result.steps)
    stale = (
        f"{result.stale_share:.0%} of the kept tokens are of earlier weights, and a kept response "
        f"began at most {oldest} steps before"
    )
    return [
        f"{result.mean_step_s:.4g} s a step, {result.samples_per_s:.4g} responses a second, "
        f"workers idle for {result.bubble:.0%} of the time",
        f"kept responses are {result.kept_vs_true_len:.2f} of the true mean length",
        *([stale] if result.stale_share else []),
        f"bounds without races: no rollout is shorter than {result.single_sequence_s:.4g} s "
        f"where a response has all of {result.cap} tokens, nor than {result.packing_s:.4g} s a "
        "step",
        *([tools] if result.tool_bound_s else []),
        f"simulated in {result.sim_wall_s:.1f} s",
    ]


def _unspaced(modes: str | None) -> str | None:
    if modes and modes.endswith(","):  # its rest would be named as extra arguments
        raise ValueError(f"--modes {modes}: no space after a comma")
    return modes


@shown
def estimate(
    path: Annotated[
        Path,
        typer.Option("--from", metavar="PATH", help="A trace, a run's folder or a trainer's logs."),
    ],
    calibration: Annotated[
        str | None,
        typer.Option(help="Costs: a built-in calibration or a file (default: by the lengths)."),
    ] = None,
    gpus: Annotated[int | None, typer.Option(help="GPUs.", min=1)] = None,
    model: Annotated[
        str | None, typer.Option(help="Another model than the calibration's, or a config.json.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="Other GPUs than the calibration's.")] = None,
    steps: Annotated[int | None, typer.Option(help="Steps of each mode.", min=1)] = None,
    modes: Annotated[
        str | None,
        typer.Option(
            callback=_unspaced,
            help="Modes to simulate beside off, separated by commas: exact, auto, prompts, "
            "race, partial, or path/to/file.py:name. Default: all of ours.",
        ),
    ] = None,
    format: Annotated[str | None, typer.Option(help="Format of PATH (default: detected).")] = None,
    task: Annotated[str | None, typer.Option(help="Task of a trace with several.")] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="Tokenizer for a log's texts: counts their tokens if the log does not, and "
            "predicts the gain of speculative decoding on them."
        ),
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Page to write.")] = None,
) -> Shown:
    """Predict the gain of each mode of tail batching on your own response lengths.

    Example: rollpacker estimate --from runs/demo/off
    """
    from rollpacker.sim.estimate import CYCLE, EstimatedMachine
    from rollpacker.sim.estimate import estimate as run

    write_page = None
    if html is not None:
        from rollpacker.report.estimate_report import write_estimate_report as write_page
    notes: list[str] = []
    path = _run_before_log(path, task, notes)
    machine = EstimatedMachine(calibration=calibration, model=model, device=device, gpus=gpus)
    encode = Encoder(path, tokenizer, notes.append)
    trace, job = _job(path, machine, task, notes, encode.count, format)
    chosen = _modes(modes)
    if steps is not None and steps < CYCLE:
        notes.append(
            f"--steps {steps}: the first long round comes within {CYCLE} steps; before it, racing "
            "modes look faster and more biased than they are"
        )
    if modes is not None and "partial" in chosen and job.source.turns is not None:
        notes.append("mode partial is left out: it is not simulated for conversations with tools")
    found = run(_drafting(job, path, encode, notes, task), trace, steps=steps, modes=chosen)
    page = {} if html is None or write_page is None else {"html": str(write_page(found, html))}
    read_as = recognised(path, format)
    lines = (
        *map(Note, notes),
        *_in_words(found, read_as),
        *_to_change(path, found.recommended),
        *(f"{name}: {file}" for name, file in page.items()),
    )
    return Shown({**asdict(found), "read_as": read_as, "notes": notes, **page}, lines)


def _modes(given: str | None) -> tuple[str, ...]:
    from rollpacker.config import parse_as
    from rollpacker.config.rollout import TailBatchingConfig
    from rollpacker.policy.rounds.rule import own_rule
    from rollpacker.sim.estimate import ALL

    if given is None:
        return ALL
    modes = tuple(each.strip() for each in given.split(","))
    for mode in modes:
        own_rule(parse_as(TailBatchingConfig, {"mode": mode}, "--modes"))
    return modes


def _drafting(
    job: EstimatedJob, path: Path, encode: Encoder, notes: list[str], task: str | None
) -> EstimatedJob:
    """Add drafts measured on the job's own texts, if its costs have none yet."""
    if job.cases[0].calibration.ahead.possible:
        if encode.given:
            notes.append("--tokenizer measures no drafts, since the costs have them already")
    elif job.texts and (drafts := rehearsed(path, encode, notes.append, task)):
        return replace(job, drafts=drafts)
    return job


def _run_before_log(path: Path, task: str | None, notes: list[str]) -> Path:
    """The run inside a folder of TRL's trainer, instead of TRL's own log."""
    inner = path if task else run_in(path)
    if inner != path:
        notes.append(f"read {inner}, the run in it. With --task NAME it reads the log beside it")
    return inner


def _job(
    path: Path,
    hardware: EstimatedMachine,
    task: str | None,
    notes: list[str],
    count: TokenCount | None,
    format: str | None,
) -> tuple[Trace, EstimatedJob]:
    from rollpacker.emulate.twin import estimated
    from rollpacker.sim.estimate import ASSUMED, on_own_workers, on_paper_gpus
    from rollpacker.sim.recorded.run_record import is_run, read_run
    from rollpacker.sim.workload.source import of_trace

    trace = read_responses(path, format, None, notes, count)
    source = of_trace(trace, task)
    name = task or trace.tasks[0]
    if hardware == ASSUMED and is_run(path):
        try:
            if (emulated := estimated(path, source, name)) is not None:
                return trace, emulated
            job = on_own_workers(run := read_run(path), source, name)
            notes.extend(_doubt(run))
            return trace, job
        except ValueError as error:
            notes.append(f"{error}. Costs of GPUs are assumed instead")
    return trace, on_paper_gpus(name, source, hardware)


def _doubt(run: RunRecord) -> Iterator[str]:
    """A note if costs that are fitted to half of a run's steps predict the other half badly."""
    from rollpacker.sim.recorded.rerun import held_back

    with suppress(ValueError):  # too few steps to hold any back
        if (accuracy := held_back(run).accuracy_mean) < _TRUSTED:
            yield (
                f"do not rely on this: costs fitted to half of the run's steps predict the others "
                f"to only {accuracy:.0%}; the machine was busy, or the run has too few steps"
            )


def _in_words(found: Estimate, read_as: list[str]) -> Iterator[RenderableType]:
    yield f"read as: {', '.join(read_as)}"
    modes = table_of("mode", "speed-up", "range", "kept", "step s", "decoded", "stale")
    modes.columns[0].overflow = "fold"
    for column in modes.columns[1:]:
        column.no_wrap = True
    for name, mode in found.modes.items():
        modes.add_row(
            name,
            f"{mode.speedup:.2f}x",
            f"{mode.low:.2f} to {mode.high:.2f}",
            f"{mode.kept_vs_true_len:.2f}",
            f"{mode.step_s:.4g}",
            f"{mode.decoded_vs_kept:.2f}",
            f"{mode.stale:.0%}",
        )
    costs = table_of("costs", "", left=2)
    for what, told in found.costs.items():
        costs.add_row(what, told)
    yield modes
    yield (
        "speed-up: over off, for equally many responses. kept: mean length trained on, over the "
        "true mean length. decoded: tokens for each token kept. stale: tokens of earlier weights."
    )
    yield costs
    icc = "unknown" if found.icc is None else f"{found.icc:.2f}"
    yield (
        f"{found.task}: {found.read} responses read, {found.prompts} prompts of "
        f"{found.responses} a step, {found.jobs} jobs of {found.steps} steps simulated for each "
        f"mode, correlation of length within a prompt {icc}"
    )
    yield from (f"recommended: {found.recommended}", *found.sentences)


def _to_change(path: Path, mode: str) -> tuple[str, ...]:
    """How to use the mode in the trainer that wrote this log (empty for other trainers)."""
    from rollpacker.polytrace.formats import detect

    kinds = {kind for source in detect.sources(path, None) for kind in source.files}
    if len(kinds) != 1 or mode == "off":
        return ()
    match kinds.pop():
        case "trl":
            return (
                "in your TRL script, where gradients start after a round (docs/trl.md):",
                "  from rollpacker.trl import GRPOTrainer",
                f'  trainer = GRPOTrainer(..., tail_batching="{mode}")',
            )
        case "verl" if mode in ("race", "prompts"):
            return (
                "with your verl command, whose gradients start after a round, so it gains less "
                "(docs/verl.md):",
                "  VERL_USE_EXTERNAL_MODULES=rollpacker.verl ...",
                "  trainer.v1.trainer_mode=rollpacker +actor_rollout_ref.rollout.agent."
                "agent_loop_manager_class=rollpacker.verl.AgentLoopManager",
                f"  +rollpacker.tail_batching.mode={mode}",
            )
        case "verl":
            return (
                f"inside verl, mode {mode} gains nothing: look at prompts and race (docs/verl.md)",
                "rollpacker init --from CONFIG makes a job of a verl configuration for our trainer",
            )
        case _:
            return ()


@shown
def calibrate(
    path: Annotated[Path, typer.Option("--from", metavar="RUN", help="A run's folder.")],
    out: Annotated[Path | None, typer.Option(help="File; default: RUN/costs.yaml.")] = None,
) -> Shown:
    """Fit a calibration file to a real run, so that `simulate` predicts such runs.

    Example: rollpacker calibrate --from runs/demo/exact --out laptop.yaml
    """
    from rollpacker.sim.costs import calibration
    from rollpacker.sim.recorded import fit_costs, rerun
    from rollpacker.sim.recorded.run_record import read_run

    path = run_in(path)
    run = read_run(path)
    costs = fit_costs.calibrate(run)
    held_back = rerun.held_back(run)
    file = out or path / "costs.yaml"
    calibration.dump(costs, file)
    data = {"file": str(file), "error": 1.0 - held_back.accuracy_mean, **asdict(held_back)}
    view = compared(held_back, "Simulated against measured, on held-out steps")
    return Shown(data, [view, f"whole run: {held_back.total:.1%}", f"calibration: {file}"])
