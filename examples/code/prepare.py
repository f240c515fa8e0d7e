"""Makes the model to start from: 0.2M parameters that have read programs of a mixed crowd.

It takes half a minute of one core, once; train.yaml looks for it in the default folder.

    python examples/code/prepare.py [FOLDER]
"""

from __future__ import annotations

import math
import random
import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from corpus import Habits, sample
from problems import COUNT, LARGEST, SUM, Problem, train_problems
from transformers import AddedToken, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

DEFAULT_FOLDER = Path("runs/code-warm-start")
PAD_ID, EOS_ID = 0, 1
STEPS, BATCH, LEARNING_RATE = 600, 24, 3e-3
_CONTEXT = 256
_IGNORED = -100
# Digits and newline as byte-level BPE spells them; everything else is a token by its text.
_BYTES = (*"0123456789", "\u010a")
_QUESTION = (
    "Write f(n): ",
    SUM,
    LARGEST,
    COUNT,
    " for i from ",
    " to n in steps of ",
    " where ",
    " divides i",
    " does not divide i",
    ".",
)
_PROGRAM = (
    *("```python\n", "```", "def f(n): return ", "def f(n):", "sum(", "max((", "max(s, "),
    *("), default=0", ")", "i", " * ", " + ", " for i in range(", ", ", "n"),
    *(" if i % ", "  if i % ", " == ", " != ", ": ", ":"),
    *(" s = ", "  s += ", "  s = ", "s += ", "s = ", " i = ", " while i ", "<= ", "< "),
    *("  i += ", "  i -= ", " return s"),
)


def build_tokenizer() -> Qwen2Tokenizer:
    """Decoding joins tokens without spaces, so every token brings the spaces that it needs."""
    words = ("<pad>", "<eos>", *_BYTES)
    tokenizer = Qwen2Tokenizer(
        vocab={word: index for index, word in enumerate(words)},
        merges=[],
        unk_token="<pad>",
        eos_token="<eos>",
        pad_token="<pad>",
        model_max_length=_CONTEXT,
    )
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in (*_QUESTION, *_PROGRAM)])
    return tokenizer


def build_model(vocabulary: int, seed: int) -> Qwen2ForCausalLM:
    """An untrained float32 model."""
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=vocabulary,
            hidden_size=96,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=3,
            num_key_value_heads=1,
            max_position_embeddings=_CONTEXT,
            tie_word_embeddings=True,
            initializer_range=0.08,
            bos_token_id=None,
            eos_token_id=EOS_ID,
            pad_token_id=PAD_ID,
        )
    )


def train(tokenizer: Qwen2Tokenizer, seed: int, steps: int) -> Qwen2ForCausalLM:
    """A model that writes as the crowd does; the same seed gives the same weights."""
    model = build_model(len(tokenizer), seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.0, fused=True
    )
    rng = random.Random(seed)
    problems = train_problems(12_000, seed + 1)
    for step in range(steps):
        share = min(1.0, (step + 1) / 50) * (0.55 + 0.45 * math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * share
        loss = _loss(model, tokenizer, rng.sample(problems, BATCH), rng)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 200 == 0:
            print(f"{step + 1} of {steps} steps, loss {loss.item():.3f}", file=sys.stderr)
    return model


def _loss(
    model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, problems: list[Problem], rng: random.Random
) -> torch.Tensor:
    habits = Habits()
    prompts = tokenizer([problem.question() for problem in problems])["input_ids"]
    programs = tokenizer([sample(problem, rng, habits) for problem in problems])["input_ids"]
    width = max(len(a) + len(b) + 1 for a, b in zip(prompts, programs, strict=True))
    tokens = torch.full((len(problems), width), PAD_ID)
    labels = torch.full((len(problems), width), _IGNORED)
    for row, (prompt, written) in enumerate(zip(prompts, programs, strict=True)):
        response = [*written, EOS_ID]
        end = len(prompt) + len(response)
        tokens[row, :end] = torch.tensor([*prompt, *response])
        labels[row, len(prompt) : end] = torch.tensor(response)
    logits = model(input_ids=tokens, use_cache=False).logits
    return F.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=_IGNORED
    )


def prepare(folder: Path = DEFAULT_FOLDER, seed: int = 1, steps: int = STEPS) -> Path:
    """Return ``folder`` holding the checkpoint and its tokenizer, making them if need be."""
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="partial-", dir=folder.parent) as scratch:
        partial = Path(scratch) / "checkpoint"
        tokenizer = build_tokenizer()
        train(tokenizer, seed, steps).save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        partial.rename(folder)
    return folder


def main() -> None:
    torch.set_num_threads(1)
    print(prepare(Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT_FOLDER))


if __name__ == "__main__":
    main()
