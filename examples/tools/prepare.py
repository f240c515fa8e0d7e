"""Makes the model to start from: 0.2M parameters that have read conversations of a mixed crowd.

It takes a minute of one core, once; train.yaml looks for it in the default folder.

    python examples/tools/prepare.py [FOLDER]
"""

from __future__ import annotations

import math
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from corpus import NO_TOOL, TOOL, Habits, Message, sample
from tasks import train_tasks
from tools import REFUSED, calculate
from transformers import AddedToken, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer
from transformers.utils.chat_template_utils import get_json_schema

DEFAULT_FOLDER = Path("runs/tools-warm-start")
SCHEMA: dict[str, Any] = get_json_schema(calculate)
STEPS, BATCH, LEARNING_RATE = 1000, 24, 3e-3
PAD, END, START, UNKNOWN = "<|endoftext|>", "<|im_end|>", "<|im_start|>", "<unk>"
PAD_ID, END_ID = 0, 1
_TEMPLATE = Path(__file__).with_name("chat_template.jinja")
_CONTEXT = 512
_IGNORED = -100
# What ASCII text is made of, as byte-level BPE spells it: any of it can be written.
_CHARACTERS = (*map(chr, range(33, 127)), "\u0120", "\u010a")
# What is said again and again is one token each.
_PIECES = (
    *("user\n", "assistant\n", "<tool_response>\n", "\n</tool_response>"),
    *("What is ", " * ", " + ", " - ", "The answer is "),
    *('<tool_call>\n{"name": "', TOOL, NO_TOOL, '", "arguments": {"expression": "'),
    *('"}}\n</tool_call>', '"}\n</tool_call>'),
    *("Error: there is no tool '", f"': there is {TOOL}", f"Error: ValueError: {REFUSED}"),
    "Error: the call is no valid JSON: Expecting ',' delimiter at character ",
)


def build_tokenizer() -> Qwen2Tokenizer:
    """One token a character, and one for each piece; so is the turn that shows the tool."""
    words = (PAD, END, START, UNKNOWN, *_CHARACTERS)
    tokenizer = Qwen2Tokenizer(
        vocab={word: index for index, word in enumerate(words)},
        merges=[],
        unk_token=UNKNOWN,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[START, END],
        model_max_length=_CONTEXT,
    )
    tokenizer.chat_template = _TEMPLATE.read_text(encoding="utf-8").rstrip("\n")
    asked = [{"role": "user", "content": ""}]
    text = tokenizer.apply_chat_template(asked, tools=[SCHEMA], tokenize=False)
    shown = str(text).partition(END)[0].removeprefix(START)
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in (*_PIECES, shown)])
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
            eos_token_id=END_ID,
            pad_token_id=PAD_ID,
        )
    )


def train(tokenizer: Qwen2Tokenizer, seed: int, steps: int) -> Qwen2ForCausalLM:
    """A model that talks as the crowd does; the same seed gives the same weights."""
    model = build_model(len(tokenizer), seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.0, fused=True
    )
    rng = random.Random(seed)
    tasks = train_tasks(20_000, seed + 1)
    for step in range(steps):
        share = min(1.0, (step + 1) / 50) * (0.55 + 0.45 * math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * share
        crowd = [sample(task, rng, Habits()) for task in rng.sample(tasks, BATCH)]
        loss = _loss(model, tokenizer, crowd)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 200 == 0:
            print(f"{step + 1} of {steps} steps, loss {loss.item():.3f}", file=sys.stderr)
    return model


def _loss(
    model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, conversations: list[list[Message]]
) -> torch.Tensor:
    """Cross entropy of what the assistant says; not of what the tool answers."""
    batch: Any = tokenizer.apply_chat_template(
        conversations,
        tools=[SCHEMA],
        padding=True,
        return_dict=True,
        return_tensors="pt",
        return_assistant_tokens_mask=True,
    )
    said = torch.as_tensor(batch["assistant_masks"]).bool()
    labels = batch["input_ids"].masked_fill(~said, _IGNORED)
    # Padding is on the right: a causal model does not see it.
    logits = model(input_ids=batch["input_ids"], use_cache=False).logits
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
