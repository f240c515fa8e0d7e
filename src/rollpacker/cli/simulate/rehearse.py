"""Tokens of a log's texts, and the gain of speculative decoding on them, for ``estimate``."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from rollpacker.errors import first_line

if TYPE_CHECKING:
    from rollpacker.polytrace.formats.files import Note, TokenCount
    from rollpacker.polytrace.formats.said import Said
    from rollpacker.sim.estimate import DraftCases

_NEEDS = "needs rollpacker[train]"
_ENOUGH = 5_000_000  # tokens after which no further step is examined (about a minute of work)


def rehearsed(
    path: Path, encode: Encoder, note: Note, task: str | None = None
) -> DraftCases | None:
    """Drafts on a trace's own responses (None and a note if their tokens are unknown).

    Raises ``ValueError`` as ``encode`` does.
    """
    from rollpacker.polytrace.formats.said import responses

    texts_too = encode.given or _own_model(path) is not None
    given = responses(path, task, texts_too=texts_too)
    steps = _steps(given, encode)
    first = next(steps, None)
    if first is None:
        if encode.given:
            note(f"{path}: it has no texts, so --tokenizer has no effect")
        return None
    try:
        return _measured(first, steps)
    except ImportError:
        note(f"{path}: speculative decoding is not measured, since that {_NEEDS}")
        return None


class Encoder:
    """Token ids of texts. The tokenizer is loaded at the first text.

    The default tokenizer is that of a run's model, if its folder is on this machine. If it cannot
    be loaded, a note is printed.
    """

    def __init__(self, path: Path, tokenizer: str | None, note: Note) -> None:
        self._path, self._tokenizer, self._note = path, tokenizer, note

    @property
    def given(self) -> bool:
        return self._tokenizer is not None

    @property
    def count(self) -> TokenCount | None:
        """Counts the tokens of a text with the named tokenizer (None if none is named).

        Raises ``ValueError`` if it cannot be loaded.
        """
        # Loaded now, so that its errors do not look like errors of a line of the log.
        if not self.given or self._known is None:
            return None
        return lambda text: len(self(text) or ())

    def __call__(self, text: str) -> list[int] | None:
        """Token ids (None without a tokenizer). Raises ``ValueError`` for an invalid one."""
        if self._known is None:
            return None
        whole = text.encode(errors="replace").decode()  # replaces lone surrogates
        return self._known(whole, add_special_tokens=False)["input_ids"]

    @cached_property
    def _known(self) -> Any:
        if self._tokenizer is not None:
            try:
                return _load(self._tokenizer)
            except (ValueError, OSError) as error:
                raise ValueError(f"--tokenizer {self._tokenizer}: {first_line(error)}") from None
        own = _own_model(self._path)
        try:
            return None if own is None else _load(own)
        except (ValueError, OSError) as error:
            self._note(
                f"{self._path}: its texts are unread ({first_line(error)}): give --tokenizer"
            )
            return None


def _load(name: str) -> Any:
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise ValueError(f"it {_NEEDS}") from None
    from rollpacker.hub import model_arguments

    return AutoTokenizer.from_pretrained(**model_arguments(name))


def _own_model(path: Path) -> str | None:
    """The model of a run if it is a folder here. A hub is not asked."""
    try:
        tree: Any = yaml.safe_load((path / "config.yaml").read_text(encoding="utf-8"))
        model = str(tree["model"]["path"])
    except (OSError, yaml.YAMLError, KeyError, TypeError):
        return None
    return model if Path(model).is_dir() else None


def _steps(given: Iterator[Said], encode: Encoder) -> Iterator[dict[str, list[list[int]]]]:
    """Token ids of responses by prompt, step by step, without those that are unknown."""
    left = _ENOUGH
    for _, responses in groupby(given, key=lambda each: each.step):
        groups: dict[str, list[list[int]]] = {}
        for each in responses:
            ids = encode(each.said) if isinstance(each.said, str) else each.said
            if ids is not None:
                groups.setdefault(each.prompt, []).append(ids)
                left -= len(ids)
        if groups:
            yield groups
        if left < 0:
            return


def _measured(
    first: dict[str, list[list[int]]], steps: Iterator[dict[str, list[list[int]]]]
) -> DraftCases:
    import numpy as np

    from rollpacker.core.types import PromptId
    from rollpacker.engine.drafts import Rehearsal
    from rollpacker.sim.costs.costs import Ahead
    from rollpacker.sim.estimate import DraftCases

    rehearsal, count = Rehearsal(), 0
    for groups in (first, *steps):
        told = {
            PromptId(prompt): [np.array(text, np.int32) for text in texts]
            for prompt, texts in groups.items()
        }
        rehearsal.step(told)
        count += 1
    case = Ahead(tokens=rehearsal.tokens, drafted=rehearsal.draft)
    where = "step" if count == 1 else f"{count} steps"
    return DraftCases(cases=(case,), source=f"measured on the responses that end the log's {where}")
