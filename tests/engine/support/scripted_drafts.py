"""Drafts that are right, wrong or both, and what may not change by any of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from engine_models import VOCABULARY, drain, prompt, request

from rollpacker.core.types import PromptId
from rollpacker.engine.base import Speculation
from rollpacker.engine.drafts import Drafter

STOP = 7
HOWS, LENGTHS_OF_DRAFTS = ("right", "wrong", "random"), (1, 8, 16, 63)


def ask(number: int, **params) -> object:
    """Of every kind: greedy, restricted, with stop tokens, short and beyond a chunk of uniforms."""
    return request(
        number,
        prompt(3 + 9 * (number % 4), number % 4),
        group=str(number % 4),
        seed=1000 + number,
        **{
            "max_tokens": (90, 140, 5, 1, 65)[number % 5],
            "temperature": (1.0, 0.7, 0.0)[number % 3],
            "top_p": 0.8 if number % 7 == 3 else 1.0,
            "top_k": 5 if number % 7 == 4 else 0,
            "stop_token_ids": (STOP,) if number % 2 else (),
        }
        | params,
    )


class Letters:
    """A tokenizer whose tokens are letters of many alphabets."""

    def decode(self, tokens: list[int]) -> str:
        return "".join(chr(0x100 + token) for token in tokens)


class Scripted(Drafter):
    """Drafts what it is told: ``right`` of every tokens of a draft, the others are not."""

    def __init__(self, texts: dict[int, np.ndarray], how: str) -> None:
        super().__init__()
        self._how = how
        self._random = np.random.default_rng(0)
        self.tell(texts)

    def tell(self, texts: dict[int, np.ndarray]) -> None:
        """What the responses, each a group of its own, will be; with their prompts."""
        self._texts = {int(self.scope(PromptId(str(n)))): text for n, text in texts.items()}

    def draft(self, scopes, texts, rows, spans, most, least, stops):
        del texts, least, stops
        drafts = np.zeros((len(rows), max(1, most.max())), np.int32)
        for place, row in enumerate(rows):
            text = self._texts[int(scopes[row])][spans[1][row] + spans[2][row] :][: most[place]]
            drafts[place, : len(text)] = text
        if self._how == "wrong":
            drafts = (drafts + 1) % VOCABULARY
        if self._how == "random":
            wrong = self._random.random(drafts.shape) < 0.3
            drafts = np.where(wrong, (drafts + 1) % VOCABULARY, drafts).astype(np.int32)
            most = self._random.integers(0, most + 1).astype(np.int32)
        return drafts, np.zeros_like(drafts), np.asarray(most, np.int32)


def same(output, expected) -> None:
    assert output.tokens.tobytes() == expected.tokens.tobytes()
    assert output.logprobs.tobytes() == expected.logprobs.tobytes()
    assert output.finish_reason == expected.finish_reason


def alone_in_group(each):
    return replace(each, group=PromptId(str(each.attempt)))


def assert_texts_serve(engine, each, text) -> None:
    """A sibling's text serves its group at once, and all others after the weights have changed."""
    engine.speculate(Speculation(below=12, most=8))
    engine.submit([replace(each, hints=[text])])
    assert drain(engine)[1].drafts.accepted > 0.5 * len(text)
    engine.load_weights(None, 1)
    engine.submit([alone_in_group(each)])
    assert drain(engine)[1].drafts.drafted == 0, "it was told to only until weights came"
    engine.load_weights(None, 2)
    engine.speculate(Speculation(below=12, most=8))
    engine.submit([replace(each, group=PromptId("another"))])
    assert drain(engine)[1].drafts.accepted > 0.5 * len(text)
