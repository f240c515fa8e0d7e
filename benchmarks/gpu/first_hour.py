"""The first hour of a GPU, in one command: vLLM step by step, and the gains of our choices.

    python -m benchmarks.gpu.first_hour --out first-hour.jsonl [--parts engine train] [--device cpu]

Each part is a process of its own with a deadline, and appends a JSON line for each fact to OUT at
once, so a part that hangs loses nothing. The most telling parts come first. On a CPU everything is
small: that rehearses the script, and its times mean nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from benchmarks._run import COMMAND, flags, metrics, write_lines
from benchmarks.gpu.models import forget, hardware, random_model, synchronize, write_checkpoint

SCRIPT = "benchmarks.gpu.first_hour"
SIZE = {"cuda": "0.5B", "cpu": "tiny"}
LIMIT_S = {
    "versions": 20,
    "engine": 240,
    "train": 240,
    "tasks": 60,
    "lora": 150,
    "copies": 30,
    "draws": 40,
    "mesh": 40,
    "decode": 90,
}
"""Seconds of each part, in the order in which they run."""
Fact = dict[str, Any]


def versions(device: str) -> Iterator[Fact]:
    """What there is."""
    from rollpacker.job.ask.doctor import versions as of_packages

    del device
    yield hardware() | of_packages()
    with contextlib.suppress(OSError):
        said = subprocess.run(["nvidia-smi"], capture_output=True, text=True, timeout=15)
        yield {"nvidia_smi": said.stdout}


def engine(device: str) -> Iterator[Fact]:
    """What ``doctor --run`` tries, with vLLM: start, weights, sleep, drafts, rates."""
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "job.yaml"
        job.write_text(yaml.safe_dump(job_of(Path(folder), device, "exact", "vllm", 0)))
        yield from trial_of(job, Path(folder), "vllm")


def trial_of(job: Path, folder: Path, kind: str) -> Iterator[Fact]:
    """The report of the command, which is there step by step."""
    done = subprocess.run(
        [*COMMAND, "doctor", str(job), "--run"], cwd=folder, capture_output=True, text=True
    )
    report = folder / "rollpacker-doctor.json"
    if not report.exists():
        yield {"error": (done.stderr or done.stdout)[-400:]}
        return
    for step in json.loads(report.read_text(encoding="utf-8"))["steps"]:
        yield {"engine": kind, "status": done.returncode} | step


def job_of(folder: Path, device: str, mode: str, kind: str, rank: int) -> Fact:
    """A job on one device, of a random model whose responses end by chance."""
    model, small = folder / "model", device == "cpu"
    mean = 8 if small else 96
    if not model.exists():
        if small:  # vLLM's attention on a CPU has no narrow heads
            narrow = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
            write_checkpoint(model, "tiny", device, mean_length=mean, **narrow)
        else:
            write_checkpoint(model, SIZE[device], device, mean_length=mean)
        rows = ({"id": str(i), "prompt": f"{i:04d}" * 16, "answer": ""} for i in range(512))
        write_lines(folder / "rows.jsonl", rows)
        (folder / "reward.py").write_text(
            "def even(completion_ids, **_):\n"
            "    return [sum(t % 2 == 0 for t in ids) / len(ids) for ids in completion_ids]\n"
        )
    tree: Fact = {
        "output": str(folder / f"{mode}-{kind}-{rank}"),
        "steps": 4,
        "model": {"path": str(model), "lora_rank": rank},
        "data": {"path": str(folder / "rows.jsonl")},
        "rewards": [{"function": f"{folder / 'reward.py'}:even"}],
        "rollout": {
            "prompts_per_step": 2 if small else 32,
            "num_generations": 2 if small else 8,
            "max_completion_length": 16 * mean,
            "tail_batching": {"mode": mode},
        },
        "train": {"learning_rate": 1e-6},
        "devices": {"kind": device, "per_node": 1},
        "checkpoint": {"every": 0},
    }
    if small:  # a GPU chooses by itself
        tree["engine"] = {"kind": kind}
    elif kind == "mini":
        tree["engine"] = {"kind": "mini"}
    return tree


def train(device: str) -> Iterator[Fact]:
    """``rollpacker train`` in ``off`` and ``exact``, with what the job gets by itself."""
    yield from runs_of(device, (("off", "vllm", 0), ("exact", "vllm", 0)))


def lora(device: str) -> Iterator[Fact]:
    """The same with adapters, and ``exact`` with the built-in engine."""
    yield from runs_of(device, (("exact", "vllm", 16), ("exact", "mini", 0)))


def runs_of(device: str, runs: tuple[tuple[str, str, int], ...]) -> Iterator[Fact]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for mode, kind, rank in runs:
            tree = job_of(folder, device, mode, kind, rank)
            file = folder / "job.yaml"
            file.write_text(yaml.safe_dump(tree))
            told = folder / "said.txt"
            with told.open("w") as out:
                process = subprocess.Popen(
                    [*COMMAND, "train", str(file)], stdout=out, stderr=subprocess.STDOUT
                )
                peak = watched(process)
            fact: Fact = {"mode": mode, "engine": kind, "lora_rank": rank, "peak_gb": peak}
            if process.returncode:
                yield fact | {"error": told.read_text(errors="replace")[-600:]}
                continue
            used = yaml.safe_load((Path(tree["output"]) / "config.yaml").read_text())
            fact["engine"] = used["engine"]["kind"]  # mini, where vLLM is not installed
            lines = [line for line in told.read_text().splitlines() if "leaves out" in line]
            for row in metrics(Path(tree["output"])):
                kept = {
                    name: value
                    for name, value in row.items()
                    if name.startswith(("timing_s", "sampler", "bubble")) or name == "step_time"
                }
                yield fact | {"chosen": lines[:1], "step": row["step"]} | kept


def watched(process: subprocess.Popen[bytes]) -> float:
    """Wait for it; the most memory of the first GPU that was taken meanwhile, GB."""
    ask = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    peak = 0.0
    while process.poll() is None:
        with contextlib.suppress(OSError, ValueError, subprocess.TimeoutExpired):
            said = subprocess.run(ask, capture_output=True, text=True, timeout=5).stdout
            peak = max(peak, float(said) / 1e3)
        time.sleep(0.5)
    return peak


def tasks(device: str) -> Iterator[Fact]:
    """Gradients of as many tokens in tasks of 1k, 4k and 16k."""
    from rollpacker.config import TrainConfig
    from rollpacker.core.types import AttemptId, Group, PromptId, Sample
    from rollpacker.train.trainer import Trainer

    small = device == "cpu"
    length, count = (32, 16) if small else (1000, 64)
    nobody: Any = None  # a checkpoint alone needs the tokenizer
    for size in ("tiny",) if small else ("0.5B", "1.5B"):
        model = random_model(size, device)
        for budget in (1024, 4096, 16384):
            config = TrainConfig(learning_rate=1e-6, micro_batch_tokens=budget)
            trainer = Trainer(model, nobody, config, temperature=1.0, max_length=length)
            sample = Sample(
                prompt=PromptId("p"),
                index=0,
                prompt_tokens=np.ones(8, np.int32),
                tokens=np.ones(length, np.int32),
                logprobs=np.zeros(length, np.float32),
                reward=1.0,
                attempt=AttemptId(0),
                weights_version=0,
                finish_reason="stop",
            )
            group = Group(
                prompt=PromptId("p"),
                samples=(sample,),
                advantages=np.ones(1, np.float32),
            )
            each = max(1, budget // length)
            trainer.accumulate([group] * each)
            synchronize(device)
            begun = time.perf_counter()
            for _ in range(-(-count // each)):
                trainer.accumulate([group] * each)
            synchronize(device)
            seconds = time.perf_counter() - begun
            done = -(-count // each) * each * length
            yield {"model": size, "task_tokens": budget, "tokens_per_s": done / seconds}
            del trainer


def copies(device: str) -> Iterator[Fact]:
    """Weights from a card to /dev/shm and back, pageable and page-locked."""
    size = 1 << (22 if device == "cpu" else 31)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        mapped = torch.from_file(file.name, shared=True, size=size, dtype=torch.uint8)
        for locked in (False, True):
            if locked and device == "cuda":
                cuda: Any = torch.cuda.cudart()
                cuda.cudaHostRegister(mapped.data_ptr(), size, 0)
            for way, (to, of) in {"out": (mapped, source), "in": (source, mapped)}.items():
                begun = time.perf_counter()
                to.copy_(of)
                synchronize(device)
                rate = size / 1e9 / (time.perf_counter() - begun)
                yield {"way": way, "page_locked": locked, "gb_per_s": rate}


def draws(device: str) -> Iterator[Fact]:
    """Our sampler, of logits in float32 and bfloat16."""
    from rollpacker.engine.sampling.race import RowDraws
    from rollpacker.engine.sampling.rows import draw_by_torch

    vocabulary = 512 if device == "cpu" else 151_936
    for rows in (1, 64, 256, 1024):
        for dtype in (torch.float32, torch.bfloat16):
            for top_p in (1.0, 0.9):
                logits = torch.randn(rows, vocabulary, device=device).to(dtype)
                given = RowDraws(
                    temperature=np.ones(rows, np.float32),
                    top_k=np.zeros(rows, np.int32),
                    top_p=np.full(rows, top_p, np.float32),
                    uniform=np.random.default_rng(0).random(rows),
                )
                draw_by_torch(logits, given)
                synchronize(device)
                begun = time.perf_counter()
                for _ in range(5):
                    draw_by_torch(logits, given)
                synchronize(device)
                took = (time.perf_counter() - begun) / 5
                yield {"rows": rows, "dtype": str(dtype), "top_p": top_p, "ms": 1e3 * took}


def mesh(device: str) -> Iterator[Fact]:
    """A reduction in a process group of ours, of one process."""
    from datetime import timedelta

    import torch.distributed as dist

    from rollpacker.train.mesh import add_up, store_at

    with tempfile.TemporaryDirectory() as folder:
        wait = timedelta(seconds=30)
        store = store_at(f"{folder}/meeting", 1, wait)
        if device == "cuda":
            options: Any = dist.ProcessGroupNCCL.Options()
            options._timeout = wait
            group: Any = dist.ProcessGroupNCCL(store, 0, 1, options)
        else:
            group = dist.ProcessGroupGloo(store, 0, 1, wait)
        values = torch.arange(8.0, device=device)
        add_up(values, group)
        yield {"reduced": values.tolist()}


def decode(device: str) -> Iterator[Fact]:
    """The built-in engine and transformers' ``generate``, to compare with vLLM's rates."""
    from benchmarks.gpu.decode import generate_rate, mini_rate

    small = device == "cpu"
    for size in ("tiny",) if small else ("0.5B", "7B"):
        model = random_model(size, device)
        for batch in (8,) if small else (64, 256):
            for name, rate in {"mini": mini_rate, "generate": generate_rate}.items():
                found = rate(model, batch, 16, device)
                yield {"model": size, "batch": batch, "engine": name, "tokens_per_s": found}
                forget(device)
        del model


PARTS: dict[str, Callable[[str], Iterator[Fact]]] = {
    "versions": versions,
    "engine": engine,
    "train": train,
    "tasks": tasks,
    "lora": lora,
    "copies": copies,
    "draws": draws,
    "mesh": mesh,
    "decode": decode,
}


def append(out: Path, fact: Fact) -> None:
    """A fact, kept at once."""
    with out.open("a", encoding="utf-8") as file:
        file.write(json.dumps(fact, default=str) + "\n")
        file.flush()
        os.fsync(file.fileno())


def run_one(part: str, device: str, out: Path) -> None:
    """A part in this process."""
    begun = time.monotonic()
    for fact in PARTS[part](device):
        append(out, {"part": part, "at_s": round(time.monotonic() - begun, 2)} | fact)


def apart(part: str, device: str, out: Path, limit_s: float) -> str:
    """A part in a process of its own; what went wrong, or nothing."""
    command = [sys.executable, "-m", SCRIPT, "--alone", part]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [*command, "--device", device, "--out", str(out)],
            stdout=errors,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(limit_s)
            errors.seek(0)
            return f"exit code {code}: {errors.read()[-600:]}" if code else ""
        except subprocess.TimeoutExpired:
            return f"stopped: its {limit_s:.0f} s were over"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def main() -> None:
    arguments = flags(
        __doc__,
        out=(Path("first-hour.jsonl"), "appended to"),
        parts={"nargs": "+", "choices": tuple(PARTS), "default": list(PARTS)},
        device={"choices": ("cuda", "cpu"), "default": "cuda"},
        until=(900.0, "seconds of all parts"),
        alone=("", "a part in this process"),
    ).parse_args()
    if arguments.alone:
        run_one(arguments.alone, arguments.device, arguments.out)
        return
    begun = time.monotonic()
    for part in arguments.parts:
        limit = min(LIMIT_S[part], arguments.until - (time.monotonic() - begun))
        start = time.monotonic()
        wrong = apart(part, arguments.device, arguments.out, limit) if limit > 5 else "not reached"
        took = time.monotonic() - start
        if wrong:
            append(arguments.out, {"part": part, "error": wrong})
        print(f"{part}: {took:.0f} s {wrong}", flush=True)


if __name__ == "__main__":
    main()
