"""From token ids to the texts that people read."""

from __future__ import annotations

from typing import Any

from rollpacker.core.types import PromptId
from rollpacker.runtime.attempts.attempts import Trajectory


def backend(tokenizer: Any) -> Any:
    """What decodes: the wrapper of transformers costs more than the decoding itself."""
    return getattr(tokenizer, "backend_tokenizer", tokenizer)


class Texts:
    """The texts of a step's attempts; each prompt is decoded once.

    Args:
        tokenizer: of transformers.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._decode = backend(tokenizer).decode
        self._prompts: dict[PromptId, str] = {}

    def begin(self) -> None:
        """A step begins: forget the last one's prompts."""
        self._prompts.clear()

    def prompt(self, attempt: Trajectory) -> str:
        """The prompt as the model saw it, special tokens included."""
        if attempt.conversation is not None and attempt.conversation.changed:
            return self._read(attempt)
        text = self._prompts.get(attempt.prompt)
        if text is None:
            text = self._prompts[attempt.prompt] = self._read(attempt)
        return text

    def _read(self, attempt: Trajectory) -> str:
        return self._decode(attempt.prompt_tokens.tolist(), skip_special_tokens=False)

    def completion(self, attempt: Trajectory) -> str | None:
        """The response, as the rewards were given it; None of an attempt that gave nothing back."""
        if attempt.output is None:
            return None
        return self._decode(attempt.output.tokens.tolist(), skip_special_tokens=True)
