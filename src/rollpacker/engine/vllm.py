"""Real vLLM, in-process. The only module that imports it."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

KV_BYTES = 1 << 30


def forced_lengths(
    model_path: str, prompt: Sequence[int], lengths: Sequence[int], concurrency: int, dtype: str
) -> dict[str, float]:
    """Sample responses of exactly these lengths at temperature 1 with logprobs; what it cost.

    The engine runs in this process on the threads it is given, all requests queued at once and at
    most ``concurrency`` of them running. Building and one warm-up request are not counted.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import SamplingParams, TokensPrompt  # pyright: ignore[reportMissingImports]
    from vllm.engine.arg_utils import EngineArgs  # pyright: ignore[reportMissingImports]
    from vllm.v1.engine.llm_engine import LLMEngine  # pyright: ignore[reportMissingImports]

    arguments = EngineArgs(
        model=model_path,
        dtype=dtype,
        enforce_eager=True,
        block_size=32,
        kv_cache_memory_bytes=KV_BYTES,
        distributed_executor_backend="uni",
        max_num_seqs=concurrency,
        skip_tokenizer_init=True,
        disable_log_stats=True,
    )
    engine: Any = LLMEngine.from_engine_args(arguments)

    def submit(name: str, length: int) -> None:
        params = SamplingParams(
            max_tokens=length, ignore_eos=True, temperature=1.0, logprobs=0, detokenize=False
        )
        engine.add_request(name, TokensPrompt(prompt_token_ids=list(prompt)), params)

    submit("warm-up", 4)
    _drain(engine)
    wall, cpu = time.perf_counter(), time.process_time()
    for i, length in enumerate(lengths):
        submit(str(i), length)
    steps, generated = _drain(engine)
    return {
        "generated_tokens": generated,
        "wall_s": time.perf_counter() - wall,
        "cpu_s": time.process_time() - cpu,
        "steps": steps,
    }


def _drain(engine: Any) -> tuple[int, int]:
    steps = generated = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                generated += len(output.outputs[0].token_ids)
        steps += 1
    return steps, generated
