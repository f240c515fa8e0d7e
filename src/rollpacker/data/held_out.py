"""Rows held out of training: those that a file names, or a share that is the same in every run of
a seed."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Literal

from rollpacker.config import DataConfig
from rollpacker.core.types import PromptId
from rollpacker.data.base import DataError, Row
from rollpacker.data.columns.layouts import prompt_of
from rollpacker.data.columns.messages import MissingError, is_missing, parse_prompt
from rollpacker.data.columns.schema import columns_of, prompt_layout
from rollpacker.data.identity import canonical, own_id
from rollpacker.data.read import from_other, read_records

Why = Literal["prompt", "id"]


@dataclass(slots=True, kw_only=True)
class Excluded:
    """What a file excludes, and how many rows it did.

    Args:
        prompts: what the prompts of its rows ask.
        ids: those of its rows that have no prompt. An id beside a prompt counts for nothing, as
            files number their rows, and numbers of different files are equal.
        beside: ids of rows that have a prompt.
    """

    prompts: Set[str] = frozenset()
    ids: Set[str] = frozenset()
    beside: Set[str] = frozenset()
    dropped: dict[Why, int] = field(default_factory=dict[Why, int])
    kept: int = 0
    """Rows whose id is one of ``beside``."""

    def takes(self, row: Row) -> bool:
        """Whether a row is left out; it is counted."""
        if not (self.prompts or self.ids):
            return False
        own = own_id(row.columns)
        why: Why | None = "prompt" if asked(row.prompt) in self.prompts else None
        if why is None and own is not None:
            why = "id" if str(own) in self.ids else None
            self.kept += why is None and str(own) in self.beside
        if why is not None:
            self.dropped[why] = self.dropped.get(why, 0) + 1
        return why is not None

    def notes(self, file: str | None) -> list[str]:
        """What to say of it."""
        found: list[str] = []
        if self.dropped:
            ways = " and ".join(f"{count} by {why}" for why, count in self.dropped.items())
            total = sum(self.dropped.values())
            found.append(f"{total} rows dropped that are in {file} ({ways})")
        if self.kept:
            found.append(
                f"{self.kept} rows kept whose id is in {file} with another prompt (a file of ids "
                "alone drops by id)"
            )
        return found


def excluded_by(config: DataConfig) -> Excluded:
    """What ``config.exclude`` holds. Raises ``DataError``."""
    if not config.exclude:
        return Excluded()
    other = from_other(config, config.exclude).model_copy(update={"exclude": None, "size": 0})
    rows = read_records(other).rows
    layout = prompt_layout(columns_of(record for _, record in rows), other)
    prompts: set[str] = set()
    ids: set[str] = set()
    beside: set[str] = set()
    for where, record in rows:
        own = own_id(record)
        prompt = None if layout is None else prompt_of(record, layout, where)
        if not is_missing(prompt):
            try:
                prompts.add(asked(parse_prompt(prompt, where)[0]))
            except MissingError:
                prompt = None
        if own is not None:
            (ids if is_missing(prompt) else beside).add(str(own))
        elif is_missing(prompt):
            raise DataError(f"data.exclude: {where} has neither an id nor a prompt")
    return Excluded(prompts=prompts, ids=ids, beside=beside)


def asked(prompt: str | list[dict[str, Any]]) -> str:
    """What a prompt asks, whatever its system turn and its spaces: the same for a text and for a
    user's turn that says it."""
    if isinstance(prompt, str):
        return " ".join(prompt.split())
    turns = [turn for turn in prompt if turn["role"] != "system"]
    if len(turns) == 1 and turns[0]["role"] == "user":
        return " ".join(str(turns[0]["content"]).split())
    return canonical(_plain(turns))


def _plain(turns: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        turn | {"content": " ".join(turn["content"].split())}
        if isinstance(turn.get("content"), str)
        else turn
        for turn in turns
    ]


def hold_out(rows: Sequence[Row], fraction: float, seed: int) -> tuple[list[Row], list[Row]]:
    """Split ``rows`` into those to train on and about ``fraction`` of them held out, in order.

    Whether a row is held out depends on the seed and the row's id alone, so that runs with more
    rows, and later ones, agree. Rows that ask the same stay together: what is measured was not
    trained on. Raises ``DataError`` when either part would be empty.
    """
    key = f"held out/{seed}".encode()
    limit = int(fraction * 2**64)
    first: dict[str, PromptId] = {}
    parts: tuple[list[Row], list[Row]] = ([], [])
    for row in rows:
        name = first.setdefault(asked(row.prompt), row.id)
        digest = hashlib.blake2b(name.encode(), key=key, digest_size=8).digest()
        parts[int.from_bytes(digest) < limit].append(row)
    training, held_out = parts
    if not held_out:
        raise DataError(
            f"eval.fraction={fraction:g} holds out none of {len(rows)} rows: raise it, or name "
            "problems in eval.data"
        )
    if not training:
        raise DataError(f"eval.fraction={fraction:g} leaves none of {len(rows)} rows: lower it")
    return training, held_out
