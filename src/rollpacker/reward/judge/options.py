"""Options of the judge: what follows ``options:`` of a reward ``function: judge``."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from rollpacker.config import Config


class JudgeOptions(Config):
    """Which model judges, what it is asked and how its answer becomes a score in [0, 1]."""

    model: str | None = None
    """Folder or hub name of a causal language model with its tokenizer."""
    mode: Literal["logits", "generate"] = "logits"
    """``logits`` compares two answer tokens; ``generate`` decodes an answer and parses it."""
    template: str = "reference"
    """``reference``, ``no_reference``, ``few_shot``, a text with ``{prompt}``, ``{completion}``
    and ``{reference}``, or a file with such a text."""
    chat: bool | None = None
    """Send the prompt as a chat turn; default: where the tokenizer can, but for ``few_shot``."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Extra arguments of the tokenizer's chat template, as ``enable_thinking: false``."""
    reference_key: str = "answer"
    """Column of the reference answer."""
    after: str | None = None
    """Judge only what follows the last such mark, as ``</think>``; default: all of it."""
    yes: str | None = None
    """Mode ``logits``: answer that means right; default: the template's own."""
    no: str | None = None
    """Mode ``logits``: answer that means wrong; default: the template's own."""
    score: Literal["sigmoid", "threshold"] = "sigmoid"
    """Mode ``logits``: the score of a difference of logits."""
    threshold: float = 0.0
    """Mode ``logits``: difference (nats) that scores 1/2, or above which the score is 1."""
    parser: str = "yes_no"
    """Mode ``generate``: ``yes_no``, ``brackets`` (``[[7]]``), ``json:FIELD`` or
    ``regex:PATTERN``."""
    low: float = 0.0
    """Number that the parsers turn into 0."""
    high: float = 10.0
    """Number that the parsers turn into 1."""
    max_new_tokens: int = Field(default=32, ge=1)
    """Mode ``generate``: longest answer."""
    max_tokens: int = Field(default=0, ge=0)
    """Longest prompt of the judge; 0 for the model's context."""
    overlong: Literal["error", "tail"] = "error"
    """Longer prompts fail, or lose the beginning of the response."""
    max_concurrency: int = Field(default=64, ge=1)
    """Most responses in a batch."""
    batch_tokens: int = Field(default=16_384, ge=1)
    """Most padded tokens in a batch of several responses."""
    resident: int | Literal["auto", "all"] = "auto"
    """Layers that stay on the device; ``auto`` follows the lengths that wait and the memory that
    is free (all of them on CPU)."""
    memory_gb: float | None = Field(default=None, gt=0.0)
    """Device memory that the judge may use; default: what is free."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the weights; ``auto`` is the checkpoint's."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the judge computes."""
    threads: int = Field(default=1, ge=1)
    """CPU threads."""

    @model_validator(mode="after")
    def _consistent(self) -> JudgeOptions:
        if self.low >= self.high:
            raise ValueError(f"low must be below high, got low={self.low} and high={self.high}")
        if isinstance(self.resident, int) and self.resident < 0:
            raise ValueError(f"resident must not be negative, got {self.resident}")
        return self
