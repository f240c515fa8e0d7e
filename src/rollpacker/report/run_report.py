"""The report of one run: ``report.html`` from the files of its folder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import polars as pl
import yaml

from rollpacker.config.reading import masked
from rollpacker.report.drawing import figures, page
from rollpacker.report.drawing.figures import (
    LengthCurves,
    length_curves,
    length_facts,
    number,
    present,
)
from rollpacker.report.drawing.gantt_data import Gantt
from rollpacker.report.drawing.page import Grid, Page, Section, Tile, count, plain, seconds, share
from rollpacker.report.reading.run_folder import RunFolder, load_run
from rollpacker.report.sections import (
    aborted_section,
    agreement_section,
    browser_section,
    environment_facts,
    environment_section,
    program_section,
    stale_tiles,
)

_REWARD = "Reward"
MAX_TABLE_ROWS = 1_500


def write_report(run: Path, say: Callable[[str], None] = lambda _line: None) -> Path:
    """Write ``RUN/report.html``, self-contained, and return its path. ``say`` gets a line for
    damaged sample files, whose rows are left out. Raises ``ReportError`` (a ``ValueError``) with
    one line on any other missing or damaged file."""
    return page.write_page(_page(load_run(run, say)), run / "report.html")


def _page(run: RunFolder) -> Page:
    gantt = Gantt(run)
    curves = length_curves(run.samples, config_value(run, "rollout", "max_completion_length"))
    lost = figures.lost_tokens(run.samples)
    facts = run_facts(run, gantt, curves, lost)
    emulated = config_value(run, "devices", "emulate") is not None
    # Random tokens and their rewards must not look like a real run's.
    browser = [] if emulated else [browser_section(run.path, run.samples)]
    learned = [] if emulated else [_learning(run)]
    tiles = _tiles(run, gantt, facts)
    return Page(
        title=f"{'EMULATED run' if emulated else 'Run'} report: {run.path.resolve().name}",
        subtitle=_subtitle(run),
        tiles=[tile for tile in tiles if not (emulated and tile.name == _REWARD)],
        sections=[
            *([_missing(run)] if run.missing else []),
            *([_emulated(run)] if emulated else []),
            *learned,
            *agreement_section(run),
            _time(run, facts),
            *_responses(gantt, curves, lost, facts),
            *browser,
            _steps(run, gantt),
            _config(run),
        ],
        facts=facts,
    )


def _responses(
    gantt: Gantt, curves: LengthCurves | None, lost: pl.DataFrame, facts: dict[str, Any]
) -> list[Section]:
    run, sections = gantt.run, [_gantt(gantt, facts)] if gantt.windows else []
    if curves is not None:
        sections.append(_lengths(curves, facts))
    if not run.samples.is_empty():
        sections.append(aborted_section(lost, facts))
    more = (program_section(run.samples), environment_section(run, gantt, facts))
    return [*sections, *(section for section in more if section is not None)]


def config_value(run: RunFolder, *keys: str) -> Any:
    """Return a value of the run's config. None if a key is missing."""
    node: Any = run.config
    for key in keys:
        node = node.get(key) if isinstance(node, dict) else None
    return node


def mode_of(run: RunFolder) -> str:
    """Return the run's tail-batching mode. ``exact`` if the config has none."""
    return config_value(run, "rollout", "tail_batching", "mode") or "exact"


def ends(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Return the means of the first and of the last tenth."""
    if not values:
        return None, None
    tenth = max(1, len(values) // 10)
    return sum(values[:tenth]) / tenth, sum(values[-tenth:]) / tenth


def run_facts(
    run: RunFolder, gantt: Gantt, curves: LengthCurves | None, lost: pl.DataFrame
) -> dict[str, Any]:
    """Return the report's numbers, unrounded: seconds, tokens and shares from 0 to 1."""
    step_s = present(run.metrics, "step_time")
    bubbles = gantt.bubbles
    kept = run.samples.filter(pl.col("state") == "kept")
    lost_tokens = sum(int(lost[name].sum()) for name in figures.LOST)
    kept_tokens = int(kept["tokens"].sum())
    reward = ends(present(run.metrics, "reward"))
    accuracy = [value for _, value in figures.accuracies(run.metrics, run.summary)]
    return {
        "steps": len(run.metrics),
        "prompts_trained": kept.select("step", "prompt").n_unique(),
        "reward_first": reward[0],
        "reward_last": reward[1],
        "accuracy_first": accuracy[0] if accuracy else None,
        "accuracy_last": accuracy[-1] if len(accuracy) > 1 else None,
        "wall_s": sum(step_s),
        "mean_step_s": sum(step_s) / len(step_s) if step_s else None,
        "rollout_s": sum(present(run.metrics, "timing_s/rollout")),
        "train_s": sum(present(run.metrics, "timing_s/train")),
        "rollout_idle_s": _sum(bubbles, "rollout_idle_s"),
        "rollout_bubble": _ratio(_sum(bubbles, "rollout_idle_s"), _sum(bubbles, "rollout_s")),
        "step_bubble": _ratio(_sum(bubbles, "step_idle_s"), _sum(bubbles, "step_s")),
        "workers": len(gantt.workers),
        "kept_tokens": kept_tokens,
        "lost_tokens": lost_tokens,
        "lost_share": _ratio(lost_tokens, lost_tokens + kept_tokens),
        **length_facts(curves),
        "marked_steps": gantt.marked(),
        "drafted": int(sum(present(run.metrics, "speculation/drafted"))),
        "accepted": int(sum(present(run.metrics, "speculation/accepted"))),
        "last_tokens_per_verification": _drafted_last(run.metrics),
        **environment_facts(run, gantt),
    }


def _drafted_last(metrics: figures.Metrics) -> float | None:
    tokens = present(metrics, "speculation/last_tokens_per_verification")
    steps = present(metrics, "speculation/last_verifications")
    total = sum(steps)
    return sum(n * each for n, each in zip(steps, tokens, strict=True)) / total if total else None


def _counted(gantt: Gantt) -> str:
    kinds = Counter(gantt.run.place(worker).kind for worker in gantt.workers)
    return " and ".join(f"{n} {kind}{'s' * (n > 1)}" for kind, n in sorted(kinds.items()))


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _sum(frame: pl.DataFrame, name: str) -> float:
    return float(frame[name].sum())


def _subtitle(run: RunFolder) -> str:
    parts = [
        f"tail batching: {mode_of(run)}",
        f"model {config_value(run, 'model', 'path')}",
        f"data {config_value(run, 'data', 'path')}",
        f"{config_value(run, 'train', 'algorithm', 'kind') or 'grpo'}",
    ]
    return " · ".join(parts) + ("" if run.summary else " · this run has not finished")


def _tiles(run: RunFolder, gantt: Gantt, facts: dict[str, Any]) -> list[Tile]:
    first, last = facts["accuracy_first"], facts["accuracy_last"]
    accuracy = Tile("Held-out accuracy", f"{plain(first)} → {plain(last)}", "sampled")
    lag = max(present(run.metrics, "policy_version_max_lag"), default=0)
    return [
        Tile(
            _REWARD,
            f"{plain(facts['reward_first'])} → {plain(facts['reward_last'])}",
            "first and last tenth of the steps",
        ),
        *([accuracy] if last is not None else []),
        Tile(
            "Steps",
            count(facts["steps"]),
            f"{count(facts['prompts_trained'])} groups, policy lag {lag:.0f}",
        ),
        Tile("Wall time", seconds(facts["wall_s"]), f"{seconds(facts['mean_step_s'])} per step"),
        Tile(
            "Bubble",
            share(facts["step_bubble"]),
            f"idle time of {_counted(gantt)}, {share(facts['rollout_bubble'])} of the rollouts"
            + (f" ({share(facts['tools_bubble'])} by tools)" if "turns" in facts else ""),
        ),
        Tile("Kept / true length", plain(facts["kept_vs_true_len"]), "1 means no length bias"),
        *stale_tiles(run),
        Tile(
            "Tokens thrown away",
            share(facts["lost_share"]),
            f"{count(facts['lost_tokens'])} of "
            f"{count(facts['lost_tokens'] + facts['kept_tokens'])}",
        ),
        *_ahead(facts),
    ]


def _ahead(facts: dict[str, Any]) -> list[Tile]:
    if not facts["drafted"]:
        return []
    last = facts["last_tokens_per_verification"]
    right = f"{count(facts['accepted'])} of {count(facts['drafted'])} drafted tokens were accepted"
    how = "tokens per decode step with a draft, of the response that ends a rollout"
    return [Tile("Decoded ahead", plain(1.0 if last is None else last), f"{how} ({right})")]


def _emulated(run: RunFolder) -> Section:
    nodes = config_value(run, "devices", "nodes") or 1
    devices = nodes * config_value(run, "devices", "per_node")
    text = (
        f"{devices} emulated devices: responses have forced lengths and random tokens, work takes "
        "the time that a calibration gives, and nothing was trained. All seconds of this page are "
        "emulated. Scheduling, grading processes and logs are real."
    )
    if said := run.summary.get("emulated"):
        late, use = said["lateness_ms"], said["driver_utilisation"]
        text += (
            f" Factor {said['factor']:g}. Actions ran late by {late['p50']:.1f} ms (median), "
            f"{late['p99']:.1f} ms (99%, {share(said['lateness_share'])} of a rollout), at most "
            f"{late['max']:.1f} ms of the clock. Driver utilisation {use:.2f}: "
        )
        text += (
            "driver and devices kept up."
            if said["honest"]
            else "TOO SLOW: driver or devices were slower than real ones. Lower the factor."
        )
    return Section("emulated", "Emulated devices", text)


def _missing(run: RunFolder) -> Section:
    lost = sum(run.missing.values())
    text = (
        f"{count(lost)} of {count(lost + run.samples.height)} responses are missing, of steps "
        f"{_ranges(run.missing)}. Their part of samples/ was damaged, or removed by "
        "samples.max_gb. Lengths, charts and texts below leave them out, rewards and times do not."
    )
    return Section("missing", "Missing responses", text)


def _ranges(steps: Iterable[int]) -> str:
    spans: list[list[int]] = []
    for step in sorted(steps):
        if spans and step == spans[-1][1] + 1:
            spans[-1][1] = step
        else:
            spans.append([step, step])
    return ", ".join(f"{a} to {b}" if b > a else f"{a}" for a, b in spans)


def _learning(run: RunFolder) -> Section:
    accuracy = figures.accuracies(run.metrics, run.summary)
    text = "The bold line should rise, and the faint one should not fall suddenly. "
    if accuracy:
        text += (
            "Accuracy is measured on held-out problems. Trust it more than the reward, which "
            "counts kept responses only."
        )
    else:
        text += (
            "No held-out accuracy was measured: set eval.fraction, or eval.data, to see it here."
        )
    figure = figures.learning(run.metrics, accuracy)
    return Section("learning", "Learning", text, figure=figure)


def _time(run: RunFolder, facts: dict[str, Any]) -> Section:
    rollout, train, wall = facts["rollout_s"], facts["train_s"], facts["wall_s"]
    text = (
        f"Rollout took {share(_ratio(rollout, wall))} of the wall time and training after it "
        f"{share(_ratio(train, wall))}. A step far above its neighbours waited for something: look "
        "it up below. The rollout's bar includes gradients that were streamed during it."
    )
    return Section(
        "time", "Where each step's time went", text, figure=figures.time_split(run.metrics)
    )


_TOGETHER = (
    "Each bar is a response in its decode slot, and the strip on top of each worker is its "
    "gradient work. In yellow time a worker had neither",
    " (pale bars were moved here to finish it on fewer workers)",
    "worker",
)
"""The meaning of the bars, an addition about the tail, and the unit of idle time."""
_SEPARATE = (
    "An engine's bars are responses in their decode slots, a replica's bars its gradient work, on "
    "devices of their own. Yellow is idle time",
    "",
    "device",
)


def _gantt(gantt: Gantt, facts: dict[str, Any]) -> Section:
    marked = facts["marked_steps"]
    bars, tail, idle = _SEPARATE if gantt.run.places else _TOGETHER
    text = (
        f"{bars}: over the whole run {share(facts['rollout_bubble'])} of the rollouts' {idle} time "
        f"({seconds(facts['rollout_idle_s'])}) and {share(facts['step_bubble'])} of the steps'. "
        f"The long bars are the tail{tail}. The longest step is step {marked['longest']}."
    )
    if "turns" in facts:
        text += (
            f" {seconds(facts['tools_idle_s'])} of the rollouts' idle time "
            f"({share(facts['tools_bubble'])}) are by tools, drawn in violet: all responses of the "
            "worker waited for their environments (hatched). In the remaining "
            f"{seconds(facts['rollout_idle_s'] - facts['tools_idle_s'])} it had no response."
        )
    charts = [gantt.chart(step) for step in gantt.chosen()]
    if len(charts) < len(gantt.windows):
        text += f" {len(charts)} of {len(gantt.windows)} steps can be chosen."
    data = {"charts": charts, "marked": marked, "shown": marked["median"], "select": True}
    return Section("gantt", "Workers and the bubble", text, gantt=data)


def _lengths(curves: LengthCurves, facts: dict[str, Any]) -> Section:
    ratio = facts["kept_vs_true_len"]
    verdict = (
        "The curves agree: responses in updates are as long as those that the model writes."
        if ratio >= 0.95
        else "The kept curve falls faster: long responses are missing from the updates. "
        "Modes 'exact' and 'prompts' (rollout.tail_batching.mode) lower this bias."
    )
    text = (
        f"Kept responses have {facts['kept_mean_tokens']:.1f} tokens on average, all responses "
        f"an estimated {facts['true_mean_tokens']:.1f} (ratio {ratio:.3f}). "
        f"{share(facts['kept_truncated'])} of the kept and an estimated "
        f"{share(facts['true_truncated'])} of all are truncated. {verdict} The estimate is "
        "Kaplan-Meier: an aborted response counts as at least as long as its tokens so far."
    )
    return Section(
        "lengths", "Response lengths: kept and estimated true", text, figure=figures.lengths(curves)
    )


def _steps(run: RunFolder, gantt: Gantt) -> Section:
    every = max(1, -(-len(run.metrics) // MAX_TABLE_ROWS))
    header = ("step", "round", "reward", "accuracy", "step time", "rollout", "train", "bubble")
    header += ("in rollout", "length", "clipped", "kept/true", "lost tokens", "queue")
    rows: list[tuple[str, ...]] = []
    for line in run.metrics[::every]:
        value = {name: number(line, name) for name in line}
        rows.append(
            (
                str(line["step"]),
                str(line.get("tail/round_kind", "–")),
                plain(value.get("reward")),
                share(value.get("eval/sampled_accuracy")),
                seconds(value.get("step_time")),
                seconds(value.get("timing_s/rollout")),
                seconds(value.get("timing_s/train")),
                *(share(part) for part in reversed(gantt.shares.get(line["step"], (None, None)))),
                count(value.get("completions/mean_length")),
                share(value.get("completions/clipped_ratio")),
                plain(value.get("tail/kept_vs_true_len")),
                count(value.get("tail/aborted_tokens")),
                count(value.get("tail/long_queue")),
            )
        )
    text = (
        "One row per step, with the numbers of metrics.jsonl. bubble: share of the workers' time "
        "in which they neither decoded nor trained, as in the step's log line. in rollout: the "
        "same for its rollout. length: mean of the kept responses. queue: prompts that wait for a "
        "long round."
    )
    if every > 1:
        text += f" Every {every}th step is listed."
    return Section("steps", "Steps", text, table=Grid(header=header, rows=rows))


def _config(run: RunFolder) -> Section:
    text = "The resolved configuration. A run with this file repeats this one."
    if "train" not in run.config:
        text = "The keys of rollpacker. The host trainer has its own for losses and updates."
    shown = masked(run.config)
    code = run.config_text if shown == run.config else yaml.safe_dump(shown, sort_keys=False)
    return Section("config", "Configuration", text, code=code)
