"""One engine with and without drafts, alternating: the same tokens, CPU seconds, steps.

    python -m benchmarks.engine.speculation sums --model FOLDER     # SmolLM2 of examples/smollm2
    python -m benchmarks.engine.speculation long --model FOLDER     # up to --tokens a response
    python -m benchmarks.engine.speculation noise                   # a flat softmax
    python -m benchmarks.engine.speculation sums --model FOLDER --engine vllm --dtype float32

The engine is told what the policy of a run would tell it at a round's start, and the policy what
the engine's worker would tell it at a round's end.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks._run import flags, listed
from rollpacker.config import MiniEngineConfig, ModelConfig, RolloutConfig, VllmEngineConfig
from rollpacker.core import decisions as do
from rollpacker.core import events as ev
from rollpacker.core.types import NO_DRAFTS, AttemptId, EngineId, PromptId
from rollpacker.demo.model import build_model
from rollpacker.engine.base import Engine, Output, Request, SamplingParams, Speculation
from rollpacker.engine.latency import StepTimes
from rollpacker.engine.mini import MiniEngine
from rollpacker.policy.engines.latency import LatencyCurve, RowCosts
from rollpacker.policy.engines.speculation import Speculating
from rollpacker.policy.ledger import Ledger

LONG = (
    "Explain step by step how to solve 3x + 7 = 22, and check the answer.",
    "A train leaves at 9:15 and arrives at 11:40 after 130 km. Find its speed, step by step.",
    "List the prime numbers below 60 and say of each why it is prime.",
    "Write out the multiplication table of 7 up to 15 and add up all its results.",
)
SUMS = (
    ("4 - 1 - 7", "4 - 1 = 3, 3 - 7 = -4. Answer: -4"),
    ("5 + 3", "5 + 3 = 8. Answer: 8"),
)


class Told:
    """What the policy says, from round to round, and how far drafts were right."""

    def __init__(self, rows: RowCosts) -> None:
        self._policy = Speculating(RolloutConfig(), rows, Ledger())
        self.times = StepTimes()

    def rule(self) -> Speculation:
        (said,) = self._policy.begin([EngineId(0)])
        assert isinstance(said, do.Speculate)
        return Speculation(below=said.below, most=said.most, free=said.free, row_cost=said.row_cost)

    def hear(self, outputs: list[Output]) -> None:
        timed = tuple(self.times.latency().items())
        self._policy.timed(ev.DecodeTimed(step=0, rows=timed))
        for output in outputs:
            drafts = output.drafts
            event = ev.AttemptFinished(
                attempt=output.attempt,
                tokens=len(output.tokens),
                finish_reason=output.finish_reason,
                verifications=drafts.verifications,
                drafted=drafts.drafted,
                accepted=drafts.accepted,
            )
            self._policy.finished(event, None)  # type: ignore[arg-type]


def prompts_of(task: str, tokenizer: Any, count: int, number: int) -> list[list[int]]:
    if task == "noise":
        rng = np.random.default_rng(number)
        return [rng.integers(2, 18, 24).tolist() for _ in range(count)]
    if task == "long":
        asked = [[{"role": "user", "content": LONG[i % len(LONG)]}] for i in range(count)]
    else:
        rng = np.random.default_rng(number)
        shots = [
            message
            for question, answer in SUMS
            for message in (
                {"role": "user", "content": f"Solve {question} ="},
                {"role": "assistant", "content": answer},
            )
        ]
        asked = []
        for _ in range(count):
            terms = " + ".join(str(n) for n in rng.integers(1, 99, rng.integers(2, 6)))
            asked.append([*shots, {"role": "user", "content": f"Solve {terms} ="}])
    return [
        tokenizer(
            tokenizer.apply_chat_template(each, tokenize=False, add_generation_prompt=True)
        ).input_ids
        for each in asked
    ]


def one_round(
    engine: Engine, requests: list[Request], version: int, told: Told | None
) -> tuple[float, float, int, list[Output]]:
    """Wall and CPU seconds, steps, and outputs in order of their end."""
    engine.load_weights(None, version)
    before = engine.stats().steps
    wall, cpu = time.perf_counter(), time.process_time()
    if told is not None:
        engine.speculate(told.rule())
    engine.submit(requests)
    outputs: list[Output] = []
    rows, began = engine.stats().rows, wall
    while engine.busy():
        outputs += engine.step()
        ran, now = engine.stats().rows - rows, time.perf_counter()
        if told is not None and ran:
            told.times.add(ran, now - began)
        rows, began = rows + ran, now
    took = time.perf_counter() - wall, time.process_time() - cpu
    if told is not None:
        told.hear(outputs)
    return *took, engine.stats().steps - before, outputs


def main() -> None:
    dtype = ("bfloat16", "float32 with vLLM: in bfloat16 a draft moves a token in 60")
    sizes = {"prompts": 4, "responses": 4, "tokens": 600, "rounds": 3}
    parser = flags(__doc__, model=str, engine="mini", dtype=dtype, **sizes)
    parser.add_argument("task", choices=("sums", "long", "noise"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer, stops = _model(arguments)
    room = arguments.prompts * arguments.responses * (arguments.tokens + 512)
    engine = build(arguments.engine, model, arguments.model, room)
    told = Told(LatencyCurve(engine.info().latency).rows())
    print(f"the engine is told {told.rule()}")
    ratios: dict[str, list[float]] = {"wall": [], "CPU": [], "steps": []}
    drafts, last, lengths = NO_DRAFTS, [], []
    for number in range(arguments.rounds + 1):
        asked = prompts_of(arguments.task, tokenizer, arguments.prompts, number)
        params = SamplingParams(max_tokens=arguments.tokens, stop_token_ids=stops)
        requests = [
            Request(
                attempt=AttemptId(p * arguments.responses + r),
                group=PromptId(f"{number}-{p}"),
                prompt=np.array(asked[p], np.int32),
                params=params,
                seed=10_000 * number + p * arguments.responses + r,
            )
            for p in range(arguments.prompts)
            for r in range(arguments.responses)
        ]
        found = {}
        order = ("plain", "ahead") if number % 2 else ("ahead", "plain")
        for name in order:
            found[name] = one_round(engine, requests, number, told if name == "ahead" else None)
        texts = [{o.attempt: o.tokens.tolist() for o in found[n][3]} for n in ("plain", "ahead")]
        assert texts[0] == texts[1], "a token differs"
        if number:  # the first round is to get warm
            for place, name in enumerate(ratios):
                ratios[name].append(found["ahead"][place] / found["plain"][place])
            for output in found["ahead"][3]:
                drafts = drafts.plus(output.drafts)
                lengths.append(len(output.tokens))
            last.append(found["ahead"][3][-1].drafts.tokens)
    print(f"{len(lengths)} responses, the same tokens; mean length {statistics.mean(lengths):.0f}")
    for name, found_ratios in ratios.items():
        print(f"{name}: ahead / plain {listed(found_ratios)}")
    print(
        f"tokens of a verification {drafts.tokens:.2f}, of the response that ends the round "
        f"{statistics.median(last):.2f}; drafted {drafts.drafted}, accepted {drafts.accepted}"
    )


def build(kind: str, model: Any, folder: str, room: int) -> Engine:
    """An engine with the weights of ``model``, whose checkpoint vLLM reads from its folder."""
    if kind == "mini":
        return MiniEngine(model, config=MiniEngineConfig(max_running=256, kv_tokens=room))
    from rollpacker.engine.vllm import VllmEngine

    config = VllmEngineConfig(max_running=256, kv_tokens=room)
    dtype = str(model.dtype).removeprefix("torch.")
    engine = VllmEngine(ModelConfig.model_validate({"path": folder, "dtype": dtype}), config=config)
    engine.load_weights(model.named_parameters(), 0)
    return engine


def _model(arguments: argparse.Namespace) -> tuple[Any, Any, tuple[int, ...]]:
    if arguments.task == "noise":
        flat = build_model(0)
        with torch.no_grad():
            flat.lm_head.weight.mul_(0.01)  # a flat softmax
        return flat.eval(), None, ()
    if arguments.model is None:
        raise SystemExit("--model is needed: the folder that examples/smollm2/prepare.py prints")
    model = AutoModelForCausalLM.from_pretrained(
        arguments.model, dtype=getattr(torch, arguments.dtype)
    ).eval()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    return model, tokenizer, (tokenizer.eos_token_id,)


if __name__ == "__main__":
    main()
