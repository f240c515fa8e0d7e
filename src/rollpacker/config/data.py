"""The model that is trained, and its prompts."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from rollpacker.config.base import Config


class ModelConfig(Config):
    """The model that is trained."""

    path: str
    """Folder or hub name of a causal language model with its tokenizer."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights in forward and backward; bfloat16 keeps float32 master weights."""
    lora_rank: int = Field(default=0, ge=0)
    """Rank of LoRA adapters (peft) on all linear layers, in a mixture of experts on those of its
    attention and other mixers; 0 trains all weights. Responses are sampled from the merged weights,
    a second copy of the linear layers; checkpoints hold the merged model, and the adapters in
    ``adapter/``."""
    lora_alpha: float = 32.0
    """LoRA scale, divided by the rank."""
    chat_template_kwargs: dict[str, Any] = {}
    """Extra arguments of the tokenizer's chat template."""


class DataConfig(Config):
    """Prompts and answers."""

    path: str | list[str]
    """A file (json, jsonl, csv, tsv, parquet, arrow; text also as ``.gz``), a pattern of files
    (``data/*.parquet``) or a list of both, a hub dataset, a folder written by ``save_to_disk``,
    ``rg:<task>`` (reasoning-gym), or ``package.module:function`` that returns rows."""
    split: str = "train"
    """Split of a dataset."""
    options: dict[str, Any] = {}
    """Keyword options of a reasoning-gym task or of the function."""
    size: int = Field(default=0, ge=0)
    """Rows to take, 0 for all; procedural tasks make this many (1,000 when 0)."""
    seed: int = 0
    """Seed of a procedural task."""
    input_key: str | None = None
    """Column of the prompt, when it cannot be detected."""
    label_key: str | None = None
    """Column of the answer, when it cannot be detected."""
    domain_key: str | None = None
    """Column that names the task domain; quotas are kept per domain."""
    system_prompt: str | None = None
    """System turn put before each prompt, in place of its own."""
    shots: list[dict[str, str]] = []
    """Chat turns (``role``, ``content``) put between the system turn and the prompt."""
    prompt_template: str | None = None
    """Text around ``{prompt}``, which stands for the prompt, or for what the user says last in chat
    messages."""
    chat: bool | None = None
    """Apply the chat template; default: to string prompts when the tokenizer has one, and to chat
    messages always. With false, messages must be one turn of the user, whose text is the prompt."""
    shuffle: bool = True
    """Shuffle every epoch with the run's seed."""
    drop_last: bool = False
    """Drop the prompts that do not fill the last step of an epoch."""
    overlong: Literal["error", "skip"] = "error"
    """What to do with a prompt that leaves no room for a response in the model's context."""
    missing: Literal["error", "skip"] = "error"
    """What to do with a row that has no prompt, no answer or no domain."""
    exclude: str | None = None
    """A data file whose prompts are never drawn (for held-out problems), or one of ids alone."""
