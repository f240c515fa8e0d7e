"""Supervised warm start: a model that can reason, but usually answers at once.

It sees every problem both answered at once and worked out, the former with more weight. Working it
out is right twice as often, so reinforcement learning has something to find.
"""

from __future__ import annotations

import hashlib
import math
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from rollpacker.demo import model as model_file
from rollpacker.demo import task
from rollpacker.demo.model import EOS_ID, PAD_ID, build_model, build_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Progress = Callable[[int, int, float], None]  # called with (steps done, steps, loss)
_IGNORED = -100


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Training of the warm start.

    Args:
        step_tokens: padded tokens of one update, about.
        problems: distinct training problems, each seen with and without thought.
        learning_rate: peak of AdamW's, which decays to a tenth along a cosine.
        answer_weight: weight of answering at once. With 1.5 the model does so 1.5 / 2.5 of the
            time.
        idle: median of blank lines behind an answer, log-normal with a deviation of 1. They add
            length that does not depend on the problem. 0 for none.
        family: ``model_type`` of transformers.
        settings: of the family's configuration.
    """

    steps: int = 1700
    step_tokens: int = 800
    problems: int = 4000
    learning_rate: float = 3e-3
    warmup_steps: int = 50
    answer_weight: float = 1.5
    idle: float = 0.0
    heads: int = 3
    family: str = "qwen2"
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])


def default_cache() -> Path:
    """Return the folder that keeps warm starts between runs."""
    return Path.home() / ".cache" / "rollpacker" / "demo"


def place_of(folder: Path, seed: int = 1, recipe: Recipe | None = None) -> Path:
    """Return the checkpoint's path below ``folder``, whether or not it exists."""
    return folder / f"warm-start-{cache_key(seed, recipe or Recipe())}"


def warm_start(
    folder: Path, seed: int = 1, progress: Progress | None = None, recipe: Recipe | None = None
) -> Path:
    """Return a checkpoint below ``folder``, which is trained now if it is missing.

    The path carries a key of everything that the weights depend on. A checkpoint gets its final
    name only when it is complete, so an interrupted run leaves no damaged checkpoint.
    """
    recipe = recipe or Recipe()
    target = place_of(folder, seed, recipe)
    if target.is_dir():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix="partial-", dir=folder))
    try:
        tokenizer = build_tokenizer()
        with _one_thread():
            train(tokenizer, seed, recipe, progress).save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        partial.chmod(0o755)
        _publish(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


@contextmanager
def _one_thread() -> Iterator[None]:
    """One thread is as fast as two for so small a model, and does not wait for other work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _publish(partial: Path, target: Path) -> None:
    try:
        partial.rename(target)
    except OSError:
        # Another process was faster; its result is the same.
        if not target.is_dir():
            raise


def cache_key(seed: int, recipe: Recipe) -> str:
    """Hash the seed, the recipe, the sources that use them, and torch's version."""
    digest = hashlib.blake2b(digest_size=8)
    digest.update(repr((seed, astuple(recipe), torch.__version__)).encode())
    for source in (task.__file__, model_file.__file__, __file__):
        digest.update(Path(source).read_bytes())
    return digest.hexdigest()


def train(
    tokenizer: PreTrainedTokenizerBase, seed: int, recipe: Recipe, progress: Progress | None = None
) -> PreTrainedModel:
    """Train a fresh model. The same seed gives the same weights."""
    model = build_model(seed, recipe.heads, recipe.family, **recipe.settings)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=0.0, fused=True
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _schedule(step, recipe))
    batches = _batches(_examples(tokenizer, seed, recipe), random.Random(seed), recipe)
    for step in range(recipe.steps):
        loss = _loss(model, next(batches), recipe.answer_weight)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if progress is not None:
            progress(step + 1, recipe.steps, loss.item())
    return model


def _schedule(step: int, recipe: Recipe) -> float:
    warmup = min(1.0, (step + 1) / recipe.warmup_steps)
    return warmup * (0.55 + 0.45 * math.cos(math.pi * step / recipe.steps))


@dataclass(frozen=True, slots=True)
class _Example:
    prompt: list[int]
    thought: list[int]
    answer: list[int]


def _examples(tokenizer: PreTrainedTokenizerBase, seed: int, recipe: Recipe) -> list[_Example]:
    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    rng = random.Random(seed)

    def idle() -> str:
        if not recipe.idle:
            return ""
        most = model_file.CONTEXT // 4
        return "\n" * min(most, round(rng.lognormvariate(math.log(recipe.idle), 1.0)))

    return [
        _Example(
            encode(row["prompt"]),
            [*encode(task.chain_of_thought(*row["metadata"]["numbers"]) + idle()), EOS_ID],
            [*encode(task.answer_at_once(*row["metadata"]["numbers"]) + idle()), EOS_ID],
        )
        for row in task.train_rows(recipe.problems, seed)
    ]


def _batches(
    examples: list[_Example], rng: random.Random, recipe: Recipe
) -> Iterator[list[_Example]]:
    while True:
        pool = rng.sample(examples, min(len(examples), 512))
        pool.sort(key=lambda example: len(example.thought))
        batches: list[list[_Example]] = [[]]
        for example in pool:
            width = len(example.thought) + len(example.answer) + 2 * len(example.prompt)
            if batches[-1] and (len(batches[-1]) + 1) * width > recipe.step_tokens:
                batches.append([])
            batches[-1].append(example)
        rng.shuffle(batches)
        yield from batches


def _loss(model: PreTrainedModel, batch: list[_Example], answer_weight: float) -> torch.Tensor:
    thoughts = [(example.prompt, example.thought) for example in batch]
    answers = [(example.prompt, example.answer) for example in batch]
    total = _sum_loss(model, thoughts) + answer_weight * _sum_loss(model, answers)
    return total / sum(len(response) for _, response in (*thoughts, *answers))


def _sum_loss(model: PreTrainedModel, pairs: list[tuple[list[int], list[int]]]) -> torch.Tensor:
    # Padding is on the right: a causal model does not see it.
    width = max(len(prompt) + len(response) for prompt, response in pairs)
    tokens = torch.full((len(pairs), width), PAD_ID)
    labels = torch.full((len(pairs), width), _IGNORED)
    for row, (prompt, response) in enumerate(pairs):
        end = len(prompt) + len(response)
        tokens[row, :end] = torch.tensor(prompt + response)
        labels[row, len(prompt) : end] = torch.tensor(response)
    logits = model(input_ids=tokens, use_cache=False).logits
    return F.cross_entropy(
        logits[:, :-1].flatten(0, 1),
        labels[:, 1:].flatten(),
        ignore_index=_IGNORED,
        reduction="sum",
    )
