"""Decoding ahead on the demo's task: the same samples, decode steps, CPU seconds and time.

    python -m benchmarks.jobs.speculation --steps 60 --rounds 3 --out runs/speculation
    python -m benchmarks.jobs.speculation --steps 100 --least 32 --prompts 4 --out runs/demo-job
    python -m benchmarks.jobs.speculation --steps 20 --least 48 --prompts 4 --out runs/long
    .venv-vllm/bin/python -m benchmarks.jobs.speculation --engine vllm --out runs/vllm

``--least N`` takes problems only that need so many lines of reasoning, of six tokens each;
``--prompts N`` are those of a step, of 8 responses each. vLLM on a CPU needs heads of 32: its model
has four of them.

Runs alternate: `off` and `exact` without drafts, `exact` with; ratios are of the runs of one round.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from benchmarks._run import flags, listed, metrics, summary, table
from rollpacker.demo.run import Size, demo_config
from rollpacker.demo.warm_start import Recipe, default_cache, warm_start
from rollpacker.job import train

ARMS = {
    "off": ("off", "off"),
    "exact, a token at a time": ("exact", "off"),
    "exact, ahead": ("exact", "auto"),
}
COLUMNS = {
    "decode_steps": "{:.0f}",
    "decode_cpu_s": "{:.2f}",
    "rollout_s": "{:.2f}",
    "step_s": "{:.2f}",
    "mean_length": "{:.0f}",
    "tokens": "{:.2f}",
    "last_tokens": "{:.2f}",
}


def run_arm(
    model: Path, folder: Path, arm: str, size: Size, overrides: dict[str, Any]
) -> dict[str, Any]:
    """One run; what it took in all."""
    mode, speculation = ARMS[arm]
    config = demo_config(model, folder, mode, size, overrides)
    rollout = config.rollout.model_copy(
        update={
            "speculation": config.rollout.speculation.model_copy(update={"mode": speculation}),
        }
    )
    train(config.model_copy(update={"rollout": rollout}))
    found, done = summary(folder), metrics(folder)
    drafting = [step for step in done if step["speculation/drafted"]]
    return {
        "arm": arm,
        "decode_steps": found["decode_steps"],
        "decode_cpu_s": found["timing_s"]["decode_cpu"],
        "rollout_s": found["timing_s"]["rollout"],
        "step_s": found["timing_s"]["steps"],
        "mean_length": _mean(done, "completions/mean_length"),
        "tokens": _mean(drafting, "speculation/tokens_per_verification"),
        "last_tokens": _mean(drafting, "speculation/last_tokens_per_verification"),
    }


def _mean(steps: list[dict[str, Any]], name: str) -> float:
    return statistics.mean(step[name] for step in steps) if steps else 1.0


def medians(rows: list[dict[str, Any]]) -> list[str]:
    return [f.format(statistics.median(row[name] for row in rows)) for name, f in COLUMNS.items()]


def main() -> None:
    arguments = flags(
        __doc__,
        steps=60,
        rounds=3,
        least=1,
        prompts=16,
        engine="mini",
        out=Path("runs/speculation"),
    ).parse_args()
    size = Size(
        steps=arguments.steps, held_out=50, prompts=arguments.prompts, least=arguments.least
    )
    recipe, overrides = Recipe(), dict[str, Any]()
    if arguments.engine == "vllm":
        recipe = Recipe(heads=4)
        overrides["engine"] = {"kind": "vllm", "kv_tokens": 1 << 16}
    model = warm_start(default_cache(), recipe=recipe)
    rows: list[dict[str, Any]] = []
    for number in range(arguments.rounds):
        for arm in ARMS:
            folder = arguments.out / f"{number}-{arm.replace(', ', '-').replace(' ', '-')}"
            row = run_arm(model, folder, arm, size, overrides)
            rows.append({"round": number, **row})
    by_arm = {arm: [row for row in rows if row["arm"] == arm] for arm in ARMS}
    table(["arm", *COLUMNS], ([arm, *medians(mine)] for arm, mine in by_arm.items()))
    for base in ("off", "exact, a token at a time"):
        for name in ("decode_steps", "decode_cpu_s", "rollout_s", "step_s"):
            pairs = zip(by_arm["exact, ahead"], by_arm[base], strict=True)
            print(
                f"{name}: ahead / {base}: {listed([ours[name] / off[name] for ours, off in pairs])}"
            )


if __name__ == "__main__":
    main()
