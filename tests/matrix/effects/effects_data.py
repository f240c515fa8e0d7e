"""What ``model`` and ``data`` do: which rows are read, and what the model is shown of them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import program_jobs
import torch
from matrix_runs import Ran, loaded
from matrix_table import described, effect
from program_jobs import RIGHT, WRONG
from runtime_jobs import CHAT_TEMPLATE, Workshop, write_byte_model, write_model, write_rows
from transformers import Qwen2Config, Qwen2ForCausalLM

from rollpacker.demo.model import VOCABULARY, build_tokenizer

LONG = "x" * 900
ROWS = [f"q{i}" for i in range(16)]
SYSTEM, SHOT, MOOD, TEMPLATE = "Be brief.", ("1+1", "2"), "calm", "Say {prompt} {now}"
SHOTS = [{"role": "user", "content": SHOT[0]}, {"role": "assistant", "content": SHOT[1]}]
GCD = {"max_numbers": 2, "max_value": 5}


def prepare(shop: Workshop) -> None:
    """Files of the runs below."""
    write_byte_model(shop.folder / "bytes")
    write_model(shop.folder / "other", seed=1)
    (shop.folder / "bytes" / "chat_template.jinja").write_text("{{ mood }}" + CHAT_TEMPLATE)
    rows = [
        {
            "id": name,
            "prompt": "a decoy",
            "answer": "a decoy",
            "question": LONG if number == 1 else f"Q{number:02d}",
            "solution": str(number),
            "topic": "a" if number < 8 else "b",
        }
        for number, name in enumerate(ROWS)
    ]
    lines(shop.folder / "odd.jsonl", rows)
    lines(shop.folder / "known.jsonl", [{"question": "Q02"}])
    write_rows(shop.folder / "many.jsonl", 120)
    wordy = [{"id": f"p{i}", "prompt": f"{i:03d}" * 30, "answer": ""} for i in range(4)]
    lines(shop.folder / "wordy.jsonl", wordy)
    holes = [{"id": f"p{i}", "prompt": f"{i:03d}", "answer": "1"} for i in range(4)]
    del holes[2]["answer"]
    lines(shop.folder / "holes.jsonl", holes)
    write_deep_model(shop.folder / "deep")
    write_rows(shop.folder / "several.jsonl", 24)
    write_rows(shop.folder / "held_out.jsonl", 6)
    program_jobs.write_rows(shop.folder / "tested.jsonl", 11)
    program_jobs.write_model(shop.folder / "programs", {RIGHT: 6, WRONG: 2})
    (shop.folder / "hub").mkdir()
    for split in ("train", "validation"):
        named = [{"id": f"{split}{i}", "prompt": f"{i:03d}", "answer": ""} for i in range(4)]
        lines(shop.folder / "hub" / f"{split}.jsonl", named)


def write_deep_model(folder: Path) -> None:
    """Its activations are larger than everything else that a worker has."""
    shape = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=12,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(shape).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)


def lines(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


# --- a chat model over a file with columns of its own; sampling and rewards as well --------------

described(
    "chat",
    {
        "output": "{here}/elsewhere/chat",
        "model.path": "{here}/bytes",
        "model.chat_template_kwargs": {"mood": MOOD},
        "data.path": "{here}/odd.jsonl",
        "data.size": 13,
        "data.exclude": "{here}/known.jsonl",
        "data.overlong": "skip",
        "data.input_key": "question",
        "data.label_key": "solution",
        "data.domain_key": "topic",
        "data.system_prompt": SYSTEM,
        "data.shots": SHOTS,
        "data.prompt_template": TEMPLATE,
        "data.shuffle": False,
        "data.drop_last": True,
        "rewards.0.name": "prize",
        "rewards.0.needs_group": True,
        "rewards.0.options": {"note": "hello"},
        "rewards.1.function": "{here}/{name}.py:bonus",
        "rewards.1.domains": ["b"],
        "rewards.1.weight": 2.0,
        "rollout.prompts_per_step": 5,
        "rollout.num_generations": 6,
        "rollout.max_completion_length": 24,
        "rollout.top_k": 2,
        "engine.max_running": 2,
    },
)
TRAINABLE = [0, *range(3, 14)]
"""Rows of ``chat``: without a long one, an excluded one and what is beyond ``size``."""


@effect("data.domain_key", run="chat", instead={"rewards.1.domains": []})
def _(ran: Ran) -> None:
    """Each step has its share of both domains, although the file has one after the other."""
    assert set(ran.kept["prompt"]) < set(ROWS)
    for step in range(len(ran.metrics)):
        numbers = [int(prompt[1:]) for prompt in ran.trained(step)]
        assert sum(number < 8 for number in numbers) in (2, 3)


@effect("data.shuffle", run="chat")
def _(ran: Ran) -> None:
    """Earlier rows of a domain are in earlier steps."""
    first, second = ([int(prompt[1:]) for prompt in ran.trained(step)] for step in (0, 1))
    for domain in (range(8), range(8, 16)):
        early = [number for number in first if number in domain]
        assert max(early, default=-1) < min(n for n in second if n in domain)


@effect(
    "model.chat_template_kwargs",
    "data.system_prompt",
    "data.shots",
    "data.prompt_template",
    run="chat",
)
def _(ran: Ran) -> None:
    """The conversation as the template has it, to the letter."""
    turns = [("system", SYSTEM), ("user", SHOT[0]), ("assistant", SHOT[1])]
    turns.append(("user", TEMPLATE.replace("{prompt}", "Q00")))
    text = "".join(f"<|im_start|>{role}\n{said}<|im_end|>\n" for role, said in turns)
    text = f"{MOOD}{text}<|im_start|>assistant\n"
    assert dict(ran.table.select("prompt", "prompt_text").rows()).get("q0") == text


# --- other sources, and prompts as they are ------------------------------------------------------

described(
    "procedural",
    {
        "model.path": "{here}/bytes",
        "data.path": "rg:gcd",
        "data.options": GCD,
        "data.seed": 7,
        "data.size": 5,
        "rollout.max_completion_length": 16,
        "rollout.num_generations": 8,
        "rollout.top_p": 0.01,
        "engine.kv_tokens": 176,
    },
)


@effect("data.options", "data.seed", run="procedural")
def _(ran: Ran) -> None:
    import reasoning_gym

    wanted = reasoning_gym.create_dataset("gcd", **GCD, size=5, seed=7)
    prompts = {p for call in ran.called("seen") for p in call["prompts"]}
    assert prompts == {entry["question"] for entry in wanted}


# --- the model -----------------------------------------------------------------------------------


@effect("model.dtype=bfloat16", run="bfloat16")
def _(ran: Ran) -> None:
    """It is trained, saved in its type, and follows masters of float32."""
    saved, masters = ran.tensors(2), ran.optimizer(2, "master")
    assert {tensor.dtype for tensor in saved.values()} == {torch.bfloat16}
    assert {tensor.dtype for tensor in masters.values()} == {torch.float32}
    before = ran.first_weights
    assert any(not torch.equal(saved[n], before[n].bfloat16()) for n in saved)


def adapter(ran: Ran) -> dict[str, torch.Tensor]:
    folder = ran.folder / "checkpoint-3" / "adapter"
    assert folder.exists()
    return loaded(folder)


@effect("model.lora_rank", run="adapters")
def _(ran: Ran) -> None:
    """Adapters of that rank were trained, and the base weights are in place but for them."""
    tensors = adapter(ran)
    inner = [tensor for name, tensor in tensors.items() if "lora_B" in name]
    assert {tensor.shape[1] for tensor in inner} == {3}
    assert all(bool(tensor.abs().max() > 0) for tensor in inner)
    before, after = ran.first_weights, ran.tensors(3)
    assert torch.equal(before["model.norm.weight"], after["model.norm.weight"])


@effect("model.lora_alpha", run="adapters")
def _(ran: Ran) -> None:
    """The checkpoint is the first weights and ``alpha / rank`` times the adapters' product."""
    tensors, before, after = adapter(ran), ran.first_weights, ran.tensors(3)
    for name, b in tensors.items():
        if "lora_B" not in name:
            continue
        layer = name.removeprefix("base_model.model.").removesuffix(".lora_B.weight")
        product = b @ tensors[name.replace("lora_B", "lora_A")]
        moved = after[f"{layer}.weight"] - before[f"{layer}.weight"]
        assert torch.allclose(moved, 12.0 / 3 * product, atol=1e-6)


def epoch_order(ids: list[str], seed: int, epoch: int) -> list[str]:
    """The documented order: sorted by a hash keyed by seed and epoch."""
    key = f"{seed}/{epoch}".encode()
    return sorted(ids, key=lambda i: hashlib.blake2b(i.encode(), key=key, digest_size=8).digest())
