"""The text of a response, as rewards, votes, samples and logs all see it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any


def backend(tokenizer: Any) -> Any:
    """What decodes: the wrapper of transformers costs more than the decoding itself."""
    return getattr(tokenizer, "backend_tokenizer", tokenizer)


@dataclass(frozen=True, slots=True)
class ResponseText:
    """Decodes responses. Special tokens stay, since a model may mark its thinking or its calls by
    them; those that begin, end or pad a text do not. It can be pickled.

    Args:
        tokenizer: whose ``decode`` reads token ids.
        unwritten: ids that no text holds.
    """

    tokenizer: Any
    unwritten: frozenset[int]

    @classmethod
    def of(cls, tokenizer: Any, ends: Iterable[int]) -> ResponseText:
        """With a tokenizer of transformers; ``ends``: ids that end a response."""
        own = tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id
        return cls(backend(tokenizer), frozenset(ends).union(i for i in own if i is not None))

    def __call__(self, ids: Sequence[int]) -> str:
        """The text of a response's token ids."""
        written = [each for each in ids if each not in self.unwritten]
        return self.tokenizer.decode(written, skip_special_tokens=False)
