"""Forced-length generation: what an engine makes of one CPU or GPU second."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

EngineKind = Literal["mini", "vllm", "hf"]
_VLLM_KV_BYTES = 1 << 30


def run(
    engine_kind: EngineKind,
    model_path: str,
    prompt: str,
    lengths: list[int],
    concurrency: int,
    dtype: str = "float32",
) -> dict[str, float]:
    """Sample one response of each length at temperature 1 and time it.

    Args:
        engine_kind: ``mini``, ``vllm`` (in-process) or ``hf`` (transformers' ``generate`` in
            static batches of ``concurrency``).
        model_path: checkpoint folder with a tokenizer, or a hub name.
        prompt: the same for all; each request prefills it by itself.
        lengths: response tokens of each request, in order of submission.
        concurrency: most responses decoded together.
        dtype: ``float32`` or ``bfloat16``.

    Returns ``generated_tokens, wall_s, cpu_s, tokens_per_cpu_s, steps``; building, compiling
    and a warm-up are not counted. Raises ``ValueError`` on an empty list, a length below 1 or an
    unknown engine.
    """
    if not lengths or min(lengths) < 1:
        raise ValueError("lengths must hold integers of at least 1, one a line")
    ids = _prompt_ids(model_path, prompt)
    match engine_kind:
        case "mini":
            result = _mini(model_path, ids, lengths, concurrency, dtype)
        case "hf":
            result = _hf(model_path, ids, lengths, concurrency, dtype)
        case "vllm":
            result = _vllm(model_path, ids, lengths, concurrency, dtype)
        case _:
            raise ValueError(f"unknown engine {engine_kind!r}; known: mini, vllm, hf")
    return result | {"tokens_per_cpu_s": result["generated_tokens"] / result["cpu_s"]}


def _prompt_ids(model_path: str, prompt: str) -> list[int]:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_path, trust_remote_code=False)(prompt)["input_ids"]


def _load(model_path: str, dtype: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model: Any = AutoModelForCausalLM.from_pretrained(model_path, dtype=getattr(torch, dtype))
    return model.to(device).eval()


def _mini(
    model_path: str, ids: Sequence[int], lengths: list[int], concurrency: int, dtype: str
) -> dict[str, float]:
    import numpy as np

    from rollpacker.config import MiniEngineConfig
    from rollpacker.core.types import AttemptId, PromptId
    from rollpacker.engine.base import Request, SamplingParams
    from rollpacker.engine.mini import MiniEngine

    engine = MiniEngine(_load(model_path, dtype), config=MiniEngineConfig(max_running=concurrency))
    prompt = np.array(ids, np.int32)

    def submit(index: int, length: int) -> None:
        params = SamplingParams(max_tokens=length, ignore_stop=True)
        engine.submit(
            [
                Request(
                    attempt=AttemptId(index),
                    group=PromptId(str(index)),
                    prompt=prompt,
                    params=params,
                    seed=index,
                )
            ]
        )

    def step() -> int:
        return sum(len(output.tokens) for output in engine.step())

    return _queued(lengths, submit, engine.busy, step)


def _vllm(
    model_path: str, ids: Sequence[int], lengths: list[int], concurrency: int, dtype: str
) -> dict[str, float]:
    """In this process, on the threads that it is given, with logprobs."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import SamplingParams, TokensPrompt  # pyright: ignore
    from vllm.engine.arg_utils import EngineArgs  # pyright: ignore[reportMissingImports]
    from vllm.v1.engine.llm_engine import LLMEngine  # pyright: ignore[reportMissingImports]

    arguments = EngineArgs(
        model=model_path,
        dtype=dtype,
        enforce_eager=True,
        block_size=32,
        kv_cache_memory_bytes=_VLLM_KV_BYTES,
        distributed_executor_backend="uni",
        max_num_seqs=concurrency,
        skip_tokenizer_init=True,
        disable_log_stats=True,
    )
    engine: Any = LLMEngine.from_engine_args(arguments)

    def submit(index: int, length: int) -> None:
        params = SamplingParams(
            max_tokens=length, ignore_eos=True, temperature=1.0, logprobs=0, detokenize=False
        )
        engine.add_request(str(index), TokensPrompt(prompt_token_ids=list(ids)), params)

    def step() -> int:
        return sum(len(o.outputs[0].token_ids) for o in engine.step() if o.finished)

    return _queued(lengths, submit, engine.has_unfinished_requests, step)


def _queued(
    lengths: list[int],
    submit: Callable[[int, int], None],
    busy: Callable[[], bool],
    step: Callable[[], int],
) -> dict[str, float]:
    """What it costs an engine that is given everything at once; ``step`` tells what has ended."""

    def drain() -> tuple[int, int]:
        steps = generated = 0
        while busy():
            generated += step()
            steps += 1
        return steps, generated

    submit(len(lengths), 4)
    drain()
    wall, cpu = time.perf_counter(), time.process_time()
    for index, length in enumerate(lengths):
        submit(index, length)
    steps, generated = drain()
    return _cost(generated, steps, wall, cpu)


def _hf(
    model_path: str, ids: Sequence[int], lengths: list[int], concurrency: int, dtype: str
) -> dict[str, float]:
    import torch

    model = _load(model_path, dtype)

    def generate(rows: int, tokens: int) -> None:
        prompt = torch.tensor([list(ids)] * rows, device=model.device)
        model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=True,
            top_k=0,
            top_p=1.0,
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            eos_token_id=None,
            pad_token_id=0,
        )

    generate(1, 4)
    wall, cpu = time.perf_counter(), time.process_time()
    steps = 0
    for start in range(0, len(lengths), concurrency):
        batch = lengths[start : start + concurrency]
        generate(len(batch), max(batch))
        steps += max(batch)
    return _cost(sum(lengths), steps, wall, cpu)


def _cost(generated: int, steps: int, wall: float, cpu: float) -> dict[str, float]:
    return {
        "generated_tokens": generated,
        "wall_s": time.perf_counter() - wall,
        "cpu_s": time.process_time() - cpu,
        "steps": steps,
    }
