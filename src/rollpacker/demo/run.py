"""The main job on a laptop: warm start, GRPO in each mode on the same prompts, a report."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers.utils import logging

from rollpacker.config import RunConfig, parse
from rollpacker.demo.cluster import run_cluster
from rollpacker.demo.contention import Contention
from rollpacker.demo.warm_start import default_cache, place_of, warm_start
from rollpacker.job import train
from rollpacker.report.compare import write_comparison
from rollpacker.runtime.record.progress import Progress

RECOMMENDED = "exact"
MODES = ("off", RECOMMENDED, "race")
SCOPE = (
    "Two cores show that every mode learns, how much it decodes, and the time saved while few long "
    "responses run. Racing pays if a decode step costs the same for any number of sequences, as on "
    "a GPU. To predict each mode's gain on your cluster: rollpacker estimate --from YOUR_LOGS"
)
_PLAIN_EVERY = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Size and data of the runs. The defaults are the short job of docs/benchmarks.md.

    Args:
        steps: GRPO updates in each mode.
        held_out: problems of the evaluation.
        prompts: per step, of 8 responses each.
        least: fewest lines of reasoning that a problem needs.
        learning_rate: of Adam. Fewer responses per step need a lower one.
    """

    steps: int = 135
    held_out: int = 500
    prompts: int = 16
    least: int = 1
    learning_rate: float = 3e-4


DEMO = Size(steps=36, prompts=6, least=32, learning_rate=2e-4)
"""Long reasoning with few sequences per engine, so that two cores have a tail to gain from. With
more steps or fewer prompts, some steps hold only prompts that every response solves."""
QUICK = replace(DEMO, steps=24, held_out=200)


def run_demo(out: Path, size: Size, say: Callable[[str], None]) -> dict[str, Any]:
    """Run everything below ``out``, and return the summary, which is also in ``out/demo.json``.
    Raises ``ValueError`` if ``out`` holds a demo already."""
    if (out / "demo.json").exists():
        raise ValueError(f"{out} holds a demo already: choose another folder with --out")
    model = told_warm_start(say)
    runs: dict[str, Path] = {}
    contention = Contention()
    for mode in MODES:
        say(f"GRPO, mode '{mode}': {size.steps} steps of {size.prompts} prompts x 8 responses")
        runs[mode] = train(
            demo_config(model, out / mode, mode, size), progress=Progress(every=_PLAIN_EVERY)
        )
    summary = compare({mode: _summary(run) for mode, run in runs.items()})
    summary["other_load"] = contention.share()
    say("emulated: three steps of a 7B model on 16 GPUs in each mode")
    summary["cluster"] = run_cluster(out / "emulated", MODES, Progress(every=_PLAIN_EVERY))
    summary["report"] = str(write_comparison(runs, summary, out / "report.html"))
    (out / "demo.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    return summary


def free_folder(folder: Path) -> Path:
    """Return the folder, or its first numbered neighbour, that is missing or empty."""
    found, number = folder, 1
    while found.exists() and not (found.is_dir() and not any(found.iterdir())):
        number += 1
        found = folder.with_name(f"{folder.name}-{number}")
    return found


def told_warm_start(say: Callable[[str], None]) -> Path:
    """Return the demo's model, and log progress if it must be trained first."""
    logging.disable_progress_bar()  # transformers draws one for each checkpoint, in logs too

    def progress(done: int, steps: int, loss: float) -> None:
        if done % 500 == 0 or done == steps:
            say(f"warm start: {done} of {steps} supervised steps, loss {loss:.3f}")

    cache = default_cache()
    place = Path("~", cache.relative_to(Path.home()))
    if place_of(cache).is_dir():
        say(f"warm start: a 0.2M-parameter model that reasons about gcd, from {place}")
    else:
        say(f"warm start: a 0.2M-parameter model learns to reason about gcd (kept in {place})")
    return warm_start(cache, progress=progress)


def demo_config(
    model: Path, out: Path, mode: str, size: Size, overrides: Mapping[str, Any] | None = None
) -> RunConfig:
    """Return a job of this size in one mode (the recipe is in docs/benchmarks.md)."""
    return parse(
        {
            "output": str(out),
            "steps": size.steps,
            "model": {"path": str(model)},
            "data": {
                "path": "rollpacker.demo.task:train_rows",
                "options": {"size": size.prompts * size.steps, "least": size.least},
            },
            "rewards": [{"function": "rg", "options": {"require_think_end": True}}],
            "rollout": {
                "prompts_per_step": size.prompts,
                "num_generations": 8,
                "max_completion_length": 600,
                "tail_batching": {"mode": mode},
            },
            "train": {
                "learning_rate": size.learning_rate,
                "warmup_steps": 5,
                "micro_batch_tokens": 1000,
            },
            "eval": {
                "data": {
                    "path": "rollpacker.demo.task:heldout_rows",
                    "options": {"size": size.held_out},
                }
            },
            "checkpoint": {"every": 0},
            **(overrides or {}),
        },
        source="demo",
    )


def compare(summaries: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the demo's result from the runs' summaries by mode. ``off`` must be among them."""
    modes = {mode: _mode(summary) for mode, summary in summaries.items()}
    off, best = modes["off"], modes[RECOMMENDED]
    before = summaries["off"]["before"]
    return {
        "before": {
            "sampled_accuracy": before["eval/sampled_accuracy"],
            "greedy_accuracy": before["eval/greedy_accuracy"],
        },
        "modes": modes,
        "speedup": {
            "wall": off["train_wall_s"] / best["train_wall_s"],
            "decode_steps": off["decode_steps"] / best["decode_steps"],
        },
        "recommended_mode": RECOMMENDED,
        "scope": SCOPE,
    }


def _mode(summary: Mapping[str, Any]) -> dict[str, Any]:
    after, timing, tail = summary["after"], summary["timing_s"], summary["tail"]
    return {
        "sampled_accuracy": after["eval/sampled_accuracy"],
        "greedy_accuracy": after["eval/greedy_accuracy"],
        "train_wall_s": timing["steps"],
        "rollout_wall_s": timing["rollout"],
        "rollout_cpu_s": timing["decode_cpu"],
        "decode_steps": summary["decode_steps"],
        "decoded_tokens": summary["decoded_tokens"],
        "kept_tokens": summary["kept_tokens"],
        "kept_vs_true_len": tail["kept_vs_true_len"],
        "clipped_ratio": after["eval/sampled_clipped_ratio"],
        "prompts_trained": summary["prompts_trained"],
    }


def _summary(run: Path) -> dict[str, Any]:
    return json.loads((run / "summary.json").read_text(encoding="utf-8"))


def table(summary: Mapping[str, Any]) -> Sequence[tuple[str, ...]]:
    """Return the result as rows of text: a header, then one row per measure."""
    modes: Mapping[str, Mapping[str, Any]] = summary["modes"]
    before = summary["before"]
    rows = [("", "before", *modes)]
    for key, label in (("sampled_accuracy", "sampled accuracy"), ("greedy_accuracy", "greedy")):
        rows.append((label, f"{before[key]:.3f}", *(f"{m[key]:.3f}" for m in modes.values())))
    for key, label, form in (
        ("train_wall_s", "training wall time, s", "{:.1f}"),
        ("rollout_wall_s", "of which rollout, s", "{:.1f}"),
        ("decode_steps", "decode steps", "{:,}"),
        ("decoded_tokens", "decoded tokens", "{:,}"),
        ("kept_tokens", "kept tokens", "{:,}"),
        ("kept_vs_true_len", "kept / true length", "{:.2f}"),
        ("clipped_ratio", "truncated after", "{:.1%}"),
        ("prompts_trained", "prompts trained", "{:,}"),
    ):
        rows.append((label, "", *(form.format(mode[key]) for mode in modes.values())))
    return rows
