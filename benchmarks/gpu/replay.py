"""A trace's rounds at their recorded lengths on one ``mini`` engine: ``off`` and ``race``.

    python -m benchmarks.gpu.replay --device cuda --trace search.parquet

Both keep as many responses of as many prompts. ``off`` decodes the first of them to their ends, as
``exact`` would: one engine alone has nobody to give the tail to (its gain is in the section
``grpo``). It runs twice, and the second counts: the first finds kernels that nobody has loaded.
``race`` starts 1.25 times as many prompts and responses and stops when enough are complete. Turns
of a conversation are replayed as one response; lengths are scaled so that the longest fits.
"""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np

from benchmarks.gpu.models import Section, random_model
from rollpacker.config import MiniEngineConfig
from rollpacker.core.types import AttemptId, PromptId
from rollpacker.engine.base import Request, SamplingParams
from rollpacker.engine.mini import MiniEngine
from rollpacker.polytrace import formats
from rollpacker.polytrace.model.turns import Scale, TraceResponse, TraceTurn
from rollpacker.polytrace.model.workload import generate, load_model
from rollpacker.polytrace.schema import Trace
from rollpacker.trace_replay.plan import StepPlan, plan
from rollpacker.trace_replay.replayer import Replayer

LONGEST = {"cuda": 768, "cpu": 48}
SHAPE = {"cuda": "0.5B", "cpu": "tiny"}
SIZE = {"cuda": (20, 10), "cpu": (5, 5)}
"""Prompts and responses of each that a generated trace starts."""
ETA = 1.25


def read(path: str | None, device: str) -> Trace:
    """The given trace, or one drawn from the built-in model of math responses."""
    if path is not None:
        from pathlib import Path

        return formats.read(Path(path), note=lambda _: None)
    prompts, responses = SIZE[device]
    return generate(load_model("math"), steps=1, prompts=prompts, responses=responses)


def first_step(trace: Trace, longest: int) -> tuple[StepPlan, float]:
    """The first step, every response one turn, the longest ``longest`` tokens; and the factor."""
    task = min(trace.tasks)
    whole = plan(trace, task, steps=1, note=lambda _: None)[0]
    scale = Scale(tokens=min(1.0, longest / whole.longest), time=0.0)
    step = plan(trace, task, steps=1, scale=scale, note=lambda _: None)[0]
    groups = tuple(tuple(single(each) for each in group) for group in step.groups)
    return StepPlan(step=step.step, groups=groups), scale.tokens


def single(response: TraceResponse) -> TraceResponse:
    first = response.turns[0]
    return TraceResponse(turns=(TraceTurn(prompt=first.prompt, tokens=max(1, response.tokens)),))


def kept(step: StepPlan) -> tuple[int, int]:
    """Prompts and responses of each that a round keeps of those that ``race`` starts."""
    responses = min(len(group) for group in step.groups)
    return max(1, math.floor(len(step.groups) / ETA)), max(1, math.floor(responses / ETA))


def race(engine: MiniEngine, step: StepPlan, vocabulary: int) -> dict[str, Any]:
    """Decode all, stop when enough prompts have enough responses."""
    prompts, responses = kept(step)
    rng = np.random.default_rng(0)
    owner: dict[AttemptId, int] = {}
    requests: list[Request] = []
    for number, group in enumerate(step.groups):
        tokens = rng.integers(0, vocabulary, max(r.turns[0].prompt for r in group), np.int32)
        for response in group:
            attempt = AttemptId(len(owner))
            owner[attempt] = number
            params = SamplingParams(max_tokens=response.turns[0].tokens, ignore_stop=True)
            requests.append(
                Request(
                    attempt=attempt,
                    group=PromptId(f"race/{number}"),
                    prompt=tokens,
                    params=params,
                    seed=int(attempt),
                )
            )
    done = [0] * len(step.groups)
    before, begun, keeps = engine.stats(), time.perf_counter(), 0
    engine.submit(requests)
    while sum(count >= responses for count in done) < prompts:
        # Owners first: what ends beside the response that fills its group is aborted no more.
        ended = [(owner.pop(output.attempt), output) for output in engine.step()]
        for number, output in ended:
            done[number] += 1
            if done[number] <= responses:
                keeps += len(output.tokens)
            if done[number] == responses:
                rest = [a for a, n in owner.items() if n == number]
                engine.abort(rest)
                for attempt in rest:
                    del owner[attempt]
    engine.abort(list(owner))
    after = engine.stats()
    return {
        "rollout_s": time.perf_counter() - begun,
        "decode_steps": after.steps - before.steps,
        "generated_tokens": after.generated_tokens - before.generated_tokens,
        "kept_tokens": keeps,
    }


def main() -> None:
    section = Section(__doc__)
    section.parser.add_argument("--trace", help="a public trace; default: one that is generated")
    arguments = section.parse()
    device = arguments.device
    step, scale = first_step(read(arguments.trace, device), LONGEST[device])
    model = random_model(SHAPE[device], device)
    config = MiniEngineConfig(max_running=min(256, len(step.responses)))
    engine = MiniEngine(model, config=config)
    vocabulary = model.config.vocab_size
    prompts, responses = kept(step)
    plain = StepPlan(step=step.step, groups=tuple(g[:responses] for g in step.groups[:prompts]))
    replayer = Replayer(engine, vocabulary=vocabulary)
    replayer.warm_up()
    common = {"shape": SHAPE[device], "responses": prompts * responses, "length_scale": scale}
    replayer.run(plain)
    replayed = replayer.run(plain)
    base = replayed.rollout_s
    found = {
        "rollout_s": base,
        "decode_steps": replayed.decode_steps,
        "generated_tokens": replayed.generated_tokens,
        "kept_tokens": replayed.generated_tokens,
    }
    section.row(mode="off", **common, **found)
    if section.left() < 0:
        section.row(mode="race", error="not reached: the section's time was over")
        return
    found = race(engine, step, vocabulary)
    section.row(mode="race", **common, **found, speedup=base / found["rollout_s"])


if __name__ == "__main__":
    main()
