"""Small real jobs whose model writes programs: each of some whole programs is one token."""

import json
import os
from collections import Counter
from io import StringIO
from pathlib import Path
from typing import Any

import polars as pl
import torch
from rich.console import Console
from transformers import AddedToken, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from rollpacker import config, job
from rollpacker.core import sample_table as samples
from rollpacker.runtime.record.progress import Progress

RIGHT = "a, b = map(int, input().split())\nprint(a + b)"
SLOW = "sum(range(400_000))\n" + RIGHT
WRONG = "print(0)"
CRASH = "raise SystemExit('no idea')"
LOOP = "while True:\n    pass"
IDLE = "import time\ntime.sleep(1000)"
MOST_S = 0.5
"""CPU seconds that a program gets as long as nothing is known of its tests."""


def fenced(program: str) -> str:
    return f"```python\n{program}\n```\n"


def write_model(folder: Path, programs: dict[str, int], *, context: int = 64) -> Path:
    """A random model over digits, an end token and some programs, each as often as it says."""
    words = ("<pad>", "<eos>", *"0123456789")
    tokenizer = Qwen2Tokenizer(
        vocab={word: index for index, word in enumerate(words)},
        merges=[],
        unk_token="<pad>",
        eos_token="<eos>",
        pad_token="<pad>",
        model_max_length=context,
    )
    # A comment makes each copy a token of its own.
    texts = [fenced(f"# {copy}\n{program}") for program, n in programs.items() for copy in range(n)]
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in texts])
    shape = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(shape)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_rows(path: Path, count: int, **columns: Any) -> Path:
    """Problems: add two numbers, three tests each."""
    lines = []
    for i in range(count):
        pairs = [(i, 1), (2, i), (i, i)]
        tests = [{"stdin": f"{a} {b}\n", "stdout": f"{a + b}\n"} for a, b in pairs]
        row = {"id": f"p{i}", "prompt": f"{i:03d}", "answer": "", "tests": tests}
        lines.append(json.dumps(row | columns))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def tree(folder: Path, name: str, **changes: Any) -> dict[str, Any]:
    """A job's configuration; ``changes`` are dotted keys with ``__`` for the dots."""
    found: dict[str, Any] = {
        "seed": 3,
        "output": str(folder / name),
        "epochs": 1,
        "model": {"path": str(folder / "model")},
        "data": {"path": str(folder / "rows.jsonl")},
        "rewards": [{"function": "code"}],
        "grading": {"workers": 2, "code_timeout": {"least_s": 0.1, "most_s": MOST_S}},
        "rollout": {"prompts_per_step": 4, "num_generations": 4, "max_completion_length": 8},
        "train": {"learning_rate": 1e-2},
        "devices": {"per_node": 1, "pin": False, "kind": "cpu"},
        "checkpoint": {"every": 0},
    }
    for key, value in changes.items():
        node = found
        *path, last = key.split("__")
        for part in path:
            node = node.setdefault(part, {})
        node[last] = value
    return found


def run(tree: dict[str, Any], *, resume: bool = False) -> tuple[Path, str]:
    """Train in this process; the folder and what was said."""
    said = StringIO()
    progress = Progress(Console(file=said, width=400))
    return job.train(config.parse(tree), resume=resume, progress=progress), said.getvalue()


def times_trained(folder: Path) -> Counter[str]:
    """How often each prompt was trained on."""
    kept = samples.read(folder).filter(pl.col("state") == "kept")
    return Counter(prompt for _, prompt in kept.select("step", "prompt").unique().iter_rows())


def metrics(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def seconds_old(pid: int) -> float:
    """Since the process was started; 0 when it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    up = float(Path("/proc/uptime").read_text().split()[0])
    return up - int(stat[19]) / os.sysconf("SC_CLK_TCK")
