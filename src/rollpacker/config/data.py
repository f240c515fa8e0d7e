"""The model that is trained, and its prompts."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from rollpacker.config.base import Config, Fixed


class ModelConfig(Config):
    """The [model](compatibility.md) that is trained."""

    path: Fixed[str]
    """Folder or hub name of a causal language model with tokenizer."""
    dtype: Fixed[Literal["float32", "bfloat16"]] = "float32"
    """Type of weights in forward, backward and checkpoints. bfloat16 keeps float32 masters."""
    lora_rank: Fixed[int] = Field(default=0, ge=0)
    """Rank of LoRA [adapters](compatibility.md#adapters) on linear layers. 0 trains all weights.
    Checkpoints hold the merged model, and the adapters in ``adapter/``."""
    lora_alpha: Fixed[float] = 32.0
    """LoRA scale, divided by the rank."""
    chat_template_kwargs: Fixed[dict[str, Any]] = {}
    """Extra arguments of the tokenizer's chat template."""


class DataConfig(Config):
    """Prompts and answers: [data](data.md)."""

    path: Fixed[str | list[str]]
    """A file (json, jsonl, csv, tsv, parquet, arrow, and text formats also as ``.gz``), a
    pattern, or a list of both. Also a hub dataset, a folder of ``save_to_disk``, ``rg:<task>``
    (reasoning-gym), or ``package.module:function`` that returns rows."""
    split: Fixed[str] = "train"
    """Split of a dataset."""
    options: Fixed[dict[str, Any]] = {}
    """Keyword options of the task or function."""
    size: Fixed[int] = Field(default=0, ge=0)
    """Rows to take, 0 for all. A procedural task then has 1,000."""
    seed: Fixed[int] = 0
    """Seed of a procedural task."""
    input_key: Fixed[str | None] = None
    """Column of the prompt, if it is not detected."""
    label_key: Fixed[str | None] = None
    """Column of the answer, if it is not detected."""
    domain_key: Fixed[str | None] = None
    """Column of the task domain. Quotas are kept per domain."""
    system_prompt: Fixed[str | None] = None
    """System turn put before each prompt, in place of its own."""
    shots: Fixed[list[dict[str, str]]] = []
    """Chat turns (``role``, ``content``) between system turn and prompt."""
    prompt_template: Fixed[str | None] = None
    """Text around ``{prompt}``: the prompt, or the user's last chat message."""
    chat: Fixed[bool | None] = None
    """Apply the chat template. Default: to chat messages, and to text if the tokenizer has a
    template. With false, messages must be one user turn."""
    shuffle: Fixed[bool] = True
    """Shuffle every epoch with the run's seed."""
    drop_last: Fixed[bool] = False
    """Drop prompts that do not fill an epoch's last step."""
    overlong: Fixed[Literal["error", "skip"]] = "error"
    """Handling of a prompt that leaves no room for a response in the model's context."""
    missing: Fixed[Literal["error", "skip"]] = "error"
    """Handling of a row without prompt, answer or domain."""
    exclude: Fixed[str | None] = None
    """A data file, or one of ids, whose prompts are never drawn (held-out problems)."""
