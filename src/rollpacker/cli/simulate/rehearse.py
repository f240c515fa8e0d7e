"""Tokens of a log's texts, and what decoding ahead would bring on them, for ``estimate``."""

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
_ENOUGH = 5_000_000
"""Tokens that are looked at, and the rest of the step: about a minute."""


def rehearsed(
    path: Path, encode: Encoder, note: Note, task: str | None = None
) -> DraftCases | None:
    """Drafts on a trace's own responses; None, and a note why, where their tokens are not known.

    Raises ``ValueError`` as ``encode`` does.
    """
    from rollpacker.polytrace.formats.said import responses

    texts_too = encode.given or _own_model(path) is not None
    given = responses(path, task, texts_too=texts_too)
    steps = _steps(given, encode)
    first = next(steps, None)
    if first is None:
        if encode.given:
            note(f"{path}: no texts in it: --tokenizer has nothing to do")
        return None
    try:
        return _measured(first, steps)
    except ImportError:
        note(f"{path}: what could be decoded ahead is not measured: that {_NEEDS}")
        return None


class Encoder:
    """Token ids of texts, by a tokenizer that is loaded for the first of them: by default that of
    a run's model, where its folder is on this machine; a note says where that cannot be loaded."""

    def __init__(self, path: Path, tokenizer: str | None, note: Note) -> None:
        self._path, self._tokenizer, self._note = path, tokenizer, note

    @property
    def given(self) -> bool:
        """Whether a tokenizer is named."""
        return self._tokenizer is not None

    @property
    def count(self) -> TokenCount | None:
        """Counts the tokens of a text with the tokenizer that is named; None where none is.

        Raises ``ValueError`` where it is none, or what it is for is not installed.
        """
        # Loaded now: what is wrong with it is no fault of a line of the log.
        if not self.given or self._known is None:
            return None
        return lambda text: len(self(text) or ())

    def __call__(self, text: str) -> list[int] | None:
        """None where no tokenizer is known. Raises ``ValueError`` for one that is none."""
        if self._known is None:
            return None
        whole = text.encode(errors="replace").decode()  # half a character is none
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
                f"{self._path}: its texts are not looked at: {first_line(error)}: --tokenizer"
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
    """That of a run's folder, if it is a folder here: nobody asked for a hub."""
    try:
        tree: Any = yaml.safe_load((path / "config.yaml").read_text(encoding="utf-8"))
        model = str(tree["model"]["path"])
    except (OSError, yaml.YAMLError, KeyError, TypeError):
        return None
    return model if Path(model).is_dir() else None


def _steps(given: Iterator[Said], encode: Encoder) -> Iterator[dict[str, list[list[int]]]]:
    """Token ids of every response by prompt, step by step, of those that can be known."""
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
