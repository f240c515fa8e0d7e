"""What decoding ahead would bring on the responses of a log, for ``rollpacker estimate``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from rollpacker.polytrace.formats.lines import Note
    from rollpacker.polytrace.formats.said import Said
    from rollpacker.sim.estimate import Drafts

Encode = Callable[[str], list[int]]

_NEEDS = "needs rollpacker[train]"
_ENOUGH = 20_000_000
"""Characters, or four times as many token ids, that are looked at: a minute."""


def rehearsed(
    path: Path, tokenizer: str | None, note: Note, task: str | None = None
) -> Drafts | None:
    """Drafts on a trace's own responses; None where their tokens are not known.

    Args:
        path: the trace.
        tokenizer: folder of a tokenizer or of a model, or its name on the hub; default: that of a
            run's own model.
        note: told why nothing can be measured.
        task: of a trace that has several.

    Raises ``ValueError`` where ``tokenizer`` is none, or what it is for is not installed.
    """
    from rollpacker.polytrace.formats.said import responses

    encode = _encoder(path, tokenizer, note)
    steps = _steps(responses(path, task), encode)
    first = next(steps, None)
    if first is None:
        if tokenizer is not None:
            note(f"{path}: no texts in it: --tokenizer has nothing to do")
        return None
    try:
        return _measured(first, steps)
    except ImportError:
        note(f"{path}: what could be decoded ahead is not measured: that {_NEEDS}")
        return None


def _encoder(path: Path, tokenizer: str | None, note: Note) -> Encode | None:
    own = _own_model(path) if tokenizer is None else None
    if tokenizer is None and own is None:
        return None
    try:
        return _load(tokenizer or str(own))
    except (ValueError, OSError) as error:
        if tokenizer is not None:
            raise ValueError(f"--tokenizer {tokenizer}: {error}") from None
        note(f"{path}: its texts are not looked at: {own}: {error}")
        return None


def _load(name: str) -> Encode:
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise ValueError(f"it {_NEEDS}") from None
    from rollpacker.hub import model_arguments

    tokenizer: Any = AutoTokenizer.from_pretrained(**model_arguments(name))
    return lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]


def _own_model(path: Path) -> str | None:
    """That of a run's folder."""
    file = path / "config.yaml"
    if not file.is_file():
        return None
    tree: Any = yaml.safe_load(file.read_text(encoding="utf-8"))
    try:
        return str(tree["model"]["path"])
    except (KeyError, TypeError):
        return None


def _steps(given: Iterator[Said], encode: Encode | None) -> Iterator[dict[str, list[list[int]]]]:
    """Token ids of every response by prompt, step by step, of those that can be known."""
    looked_at = 0
    for _, responses in groupby(given, key=lambda each: each.step):
        groups: dict[str, list[list[int]]] = {}
        for each in responses:
            if isinstance(each.said, str):
                if encode is None:
                    continue
                looked_at += len(each.said)
                groups.setdefault(each.prompt, []).append(encode(each.said))
            else:
                looked_at += 4 * len(each.said)
                groups.setdefault(each.prompt, []).append(each.said)
        if groups:
            yield groups
        if looked_at > _ENOUGH:
            return


def _measured(
    first: dict[str, list[list[int]]], steps: Iterator[dict[str, list[list[int]]]]
) -> Drafts:
    import numpy as np

    from rollpacker.core.types import PromptId
    from rollpacker.engine.mini.rehearsal import Rehearsal
    from rollpacker.sim.ahead import Ahead
    from rollpacker.sim.estimate import Drafts

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
    return Drafts(cases=(case,), source=f"measured on the responses that end the log's {where}")
