"""Small real jobs: a random Qwen2, a few prompts, reward files, and ways to run them."""

import contextlib
import gc
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from io import StringIO
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
import yaml
from rich.console import Console
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from rollpacker import config, job
from rollpacker.cli import main
from rollpacker.config import RunConfig
from rollpacker.core import sample_table as samples
from rollpacker.demo.model import build_tokenizer
from rollpacker.runtime.record.progress import Progress
from rollpacker.runtime.step.phase_nodes import PhaseNodes

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

REWARDS = """
import json, os, pathlib, signal, time

def ones(completions, **_):
    return [text.count("1") / 4 for text in completions]

def logged(completions, completion_ids, prompts, log):
    with open(log, "a") as file:
        file.write(json.dumps([prompts[0], completion_ids[0]]) + "\\n")
    return ones(completions)

def faulty(completions, prompts, **_):
    number = int(prompts[0])
    if number == 3:
        raise RuntimeError("the judge is ill")
    if number == 4:
        time.sleep(1000)
    if number == 5:
        return ["great"]
    if number == 6:
        os.kill(os.getpid(), signal.SIGKILL)
    return ones(completions)

def forked(parents):
    found = []
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            command = (folder / "cmdline").read_text()
        except OSError:
            continue
        # Others are forked off servers of their own, which preload this.
        ours = "forkserver" in command and "forked_from" not in command
        if parent in parents and ours:
            found.append(int(folder.name))
    return sorted(found)

def driver():
    # Grading processes are forked off a child of it.
    stat = pathlib.Path(f"/proc/{os.getppid()}/stat").read_text()
    return int(stat.rpartition(")")[2].split()[1])

def workers():
    return forked(forked([driver()]))

def assassin(
    completions, prompts, marker="", victims=0, worker=None, at=5, by="SIGKILL", pause=0.0
):
    if int(prompts[0]) == at:
        time.sleep(pause)
    if int(prompts[0]) == at and not os.path.exists(marker):
        if marker:
            open(marker, "w").close()
        # They are forked in the order of their numbers.
        found = workers()
        for pid in found[len(found) - victims :] if worker is None else [found[worker]]:
            os.kill(pid, getattr(signal, by))
        time.sleep(0.5)  # the driver hears of it before this grade ends the rollout
    return ones(completions)

def lingers(completions, prompts, marker, first=5.0, then=0.0, at=5):
    # The file says when it begins to take long over one prompt.
    if int(prompts[0]) == at:
        seconds = then if os.path.exists(marker) else first
        open(marker, "w").close()
        time.sleep(seconds)
    return ones(completions)

def wrong_shape(completions, **_):
    return 0.5
"""


def write_model(folder: Path, seed: int = 0, *, context: int = 256) -> Path:
    """A random model over 18 words, of which one ends a response: lengths are geometric."""
    tokenizer: Any = build_tokenizer()
    return save_model(folder, tokenizer, seed, context, tokenizer.eos_token_id)


def write_wide_model(folder: Path) -> Path:
    """The same with heads of 32, which vLLM's attention on a CPU needs."""
    tokenizer: Any = build_tokenizer()
    return save_model(folder, tokenizer, 0, 256, tokenizer.eos_token_id, hidden=64)


def write_byte_model(
    folder: Path,
    *,
    context: int = 1024,
    chat: bool = True,
    hidden: int = 32,
    end: str = "<|im_end|>",
) -> Path:
    """A random model over all bytes, with a chat template; ``end`` and 23 others of its tokens end
    a response."""
    letters = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spelled = {**{b: chr(b) for b in letters}}
    for byte in range(256):
        spelled.setdefault(byte, chr(256 + len([b for b in range(byte) if b not in letters])))
    words = [*SPECIALS, *(spelled[b] for b in range(256))]
    tokenizer = Qwen2Tokenizer(
        vocab={word: index for index, word in enumerate(words)},
        merges=[],
        unk_token="<|endoftext|>",
        eos_token=end,
        pad_token="<|endoftext|>",
        model_max_length=context,
    )
    if chat:
        tokenizer.chat_template = CHAT_TEMPLATE
    eos = [SPECIALS.index(end), *range(200, 223)]
    return save_model(folder, tokenizer, 0, context, eos, hidden)


def save_model(
    folder: Path, tokenizer: Any, seed: int, context: int, eos: Any, hidden: int = 32
) -> Path:
    shape = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=eos,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(shape)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_rows(path: Path, count: int) -> Path:
    lines = [json.dumps({"id": f"p{i}", "prompt": f"{i:03d}", "answer": "1"}) for i in range(count)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


class Workshop:
    """A folder with a model, prompts and rewards, in which jobs are made."""

    def __init__(
        self, folder: Path, *, rows: int = 11, model: Callable[[Path], Path] = write_model
    ) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.model = model(folder / "model")
        self.data = write_rows(folder / "rows.jsonl", rows)
        self.rewards = folder / "judges.py"
        self.rewards.write_text(REWARDS, encoding="utf-8")

    @staticmethod
    def fixture(rows: int = 11, model: Callable[[Path], Path] = write_model) -> Any:
        """The workshop of a file: ``shop = Workshop.fixture(rows=8)``."""

        @pytest.fixture(scope="module")
        def shop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
            return Workshop(tmp_path_factory.mktemp("shop"), rows=rows, model=model)

        return shop

    def tree(self, name: str, mode: str = "exact", **changes: Any) -> dict[str, Any]:
        """A job's configuration; ``changes`` are dotted keys with ``__`` for the dots.

        One worker, because the start of a worker is nearly all that such a small job costs.
        """
        tree: dict[str, Any] = {
            "seed": 3,
            "output": str(self.folder / name),
            "epochs": 2,
            "model": {"path": str(self.model)},
            "data": {"path": str(self.data)},
            "rewards": [{"function": f"{self.rewards}:ones"}],
            "rollout": {
                "prompts_per_step": 4,
                "num_generations": 3,
                "max_completion_length": 40,
                "tail_batching": {"mode": mode},
            },
            "train": {"learning_rate": 1e-2},
            "devices": {"per_node": 1, "pin": False, "kind": "cpu"},
            "checkpoint": {"every": 0},
            # What is lost stays lost, but in the tests that want it back.
            "cluster": {"restarts": 0},
        }
        for key, value in deepcopy(changes).items():  # they are their callers'
            node = tree
            *path, last = key.split("__")
            for part in path:
                node = node.setdefault(part, {})
            node[last] = value
        return tree

    def config(self, name: str, mode: str = "exact", **changes: Any) -> RunConfig:
        return config.parse(self.tree(name, mode, **changes))

    def file(self, name: str, mode: str = "exact", **changes: Any) -> Path:
        """The configuration as a YAML file."""
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(self.tree(name, mode, **changes)), encoding="utf-8")
        return path


def run(
    config: RunConfig, *, resume: bool = False, phases: PhaseNodes | None = None
) -> tuple[Path, str]:
    """Train in this process, which stays as it was; the folder and what was said."""
    said, collected = StringIO(), gc.get_threshold()
    console = Console(file=said, width=400)
    folder = job.train(config, resume=resume, progress=Progress(console), phases=phases)
    assert gc.get_threshold() == collected
    return folder, said.getvalue()


COMMAND = (sys.executable, "-c", "from rollpacker.cli import main; main()")


def start_cli(*words: object, **options: Any) -> subprocess.Popen[str]:
    """``rollpacker ...`` as the leader of a process group of its own."""
    return subprocess.Popen(
        [*COMMAND, *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"COLUMNS": "200"},
        **options,
    )


def cli(*words: object, timeout: float = 120, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run ``rollpacker ...`` to its end; what is left of it after ``timeout`` is killed."""
    process = start_cli(*words, **options)
    try:
        out, err = process.communicate(timeout=timeout)
    except BaseException:
        kill_group(process)
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def cli_here(*words: object) -> subprocess.CompletedProcess[str]:
    """``rollpacker ...`` in this process, which spares its imports; without what others print."""
    out, err = StringIO(), StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        patch.setattr(sys, "argv", ["rollpacker", *map(str, words)])
        patch.setenv("COLUMNS", "200")
        with pytest.raises(SystemExit) as left:
            main()
    code = left.value.code
    return subprocess.CompletedProcess(sys.argv, int(code or 0), out.getvalue(), err.getvalue())


def kill_group(process: subprocess.Popen[str]) -> None:
    """kill -9 of a driver and its workers at once."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def table(folder: Path, *states: str) -> pl.DataFrame:
    """Rows of the samples table in some states, or all."""
    frame = samples.read(folder)
    return frame.filter(pl.col("state").is_in(states)) if states else frame


def metrics(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def kept_groups(folder: Path) -> dict[tuple[int, str], int]:
    """Kept responses by step and prompt."""
    kept = table(folder, "kept")
    return dict(Counter(zip(kept["step"].to_list(), kept["prompt"].to_list(), strict=True)))


def times_trained(folder: Path) -> Counter[str]:
    """How often each prompt was trained on."""
    return Counter(prompt for _, prompt in kept_groups(folder))


def kept_samples(folder: Path) -> list[tuple[Any, ...]]:
    """What was kept, without anything that depends on time or on attempt numbers."""
    names = ["step", "prompt", "sample_index", "tokens", "reward", "finish_reason"]
    return sorted(table(folder, "kept").select(names).rows())


def weights_digest(checkpoint: Path) -> str:
    """Of the bytes of all safetensors files below a checkpoint."""
    digest = hashlib.blake2b()
    files = sorted(checkpoint.rglob("*.safetensors"))
    assert files
    for path in files:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def largest_difference(one: Path, other: Path) -> float:
    """Of any weight of two checkpoints."""
    from safetensors.torch import load_file

    a, b = (load_file(next(p.rglob("*.safetensors"))) for p in (one, other))
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def checkpoints(folder: Path) -> list[int]:
    return sorted(int(path.name.rpartition("-")[2]) for path in folder.glob("checkpoint-*"))


def one_line(done: subprocess.CompletedProcess[str]) -> str:
    """The only line of standard error, which must be a mistake's."""
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("rollpacker: "), done.stderr
    return lines[0].removeprefix("rollpacker: ")
