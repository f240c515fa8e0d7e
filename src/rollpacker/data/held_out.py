"""Ids of rows, rows that are the same, and rows held out of training: by a file, or a share."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from rollpacker.config import DataConfig
from rollpacker.core.types import PromptId
from rollpacker.data.base import DataError, Record, Row, whole_text
from rollpacker.data.columns import (
    MissingError,
    columns_of,
    is_blank,
    is_missing,
    parse_prompt,
    prompt_layout,
    prompt_of,
)
from rollpacker.data.read import from_other, read_records

# --- Ids of rows, and rows that are the same

HASHED = "hash of prompt and answer"  # the id of rows without one


def own_id(record: Mapping[str, Any]) -> Any:
    """Return a record's ``id``, or None if it has none."""
    value = record.get("id")
    return None if is_blank(value) else value


def identity(record: Record, prompt: Any, answer: Any, where: str) -> PromptId:
    """Return a row's own id, or a hash. Raises ``DataError``."""
    own = own_id(record)
    if own is not None:
        return PromptId(whole_text(str(own), f"{where}: the id"))
    return _hashed(prompt, answer)


def distinct(rows: Sequence[Row], source: str) -> tuple[list[Row], list[str]]:
    """Return rows whose ids differ, and notes on their ids.

    If different rows share an id, ids only number the rows of one file, and every row gets its hash
    instead. Identical rows get ``#2``, ``#3`` and so on. Raises ``DataError``.
    """
    own = sum(own_id(row.columns) is not None for row in rows)
    shared = _shared(rows)
    if shared is not None:
        rows = [replace(row, id=_hashed(row.prompt, row.answer)) for row in rows]
        notes = [f"id <- {HASHED}, as different rows have the id '{shared}'"]
    elif own:
        notes = ["id <- id" if own == len(rows) else f"id <- id, else {HASHED}"]
    else:
        notes = [f"id <- {HASHED}"]
    result, repeated = _numbered(rows, source)
    if repeated:
        notes.append(f"{repeated} identical rows renamed with #2, #3 ...")
    return result, notes


def canonical(value: Any) -> str:
    """Return the same text for equal values."""
    try:
        return json.dumps(value, sort_keys=True, ensure_ascii=False, default=repr)
    except (TypeError, ValueError, RecursionError):  # keys of several types; not of JSON
        return repr(value)


def _shared(rows: Sequence[Row]) -> PromptId | None:
    first: dict[PromptId, Row] = {}
    for row in rows:
        other = first.setdefault(row.id, row)
        if other is not row:
            one, another = (_text_of(each.prompt, each.answer) for each in (other, row))
            if one != another:
                return row.id
    return None


def _numbered(rows: Sequence[Row], source: str) -> tuple[list[Row], int]:
    copies: dict[PromptId, int] = {}
    result: list[Row] = []
    for row in rows:
        copies[row.id] = number = copies.get(row.id, 0) + 1
        result.append(row if number == 1 else replace(row, id=PromptId(f"{row.id}#{number}")))
    if len({row.id for row in result}) < len(result):
        raise DataError(f"{source}: ids that end in #2 clash with those of repeated rows")
    return result, len(rows) - len(copies)


def _hashed(prompt: Any, answer: Any) -> PromptId:
    data = _text_of(prompt, answer).encode(errors="surrogatepass")
    return PromptId(hashlib.blake2b(data, digest_size=8).hexdigest())


def _text_of(prompt: Any, answer: Any) -> str:
    return f"{canonical(prompt)}\n{canonical(answer)}"


Why = Literal["prompt", "id"]


@dataclass(slots=True, kw_only=True)
class Excluded:
    """The rows that a file excludes, and how many it did.

    ``prompts``: the questions of its prompts. ``ids``: of its rows without a prompt. ``beside``:
    ids of the others, which are ignored, because files number their rows, and numbers of different
    files are equal.
    """

    prompts: Set[str] = frozenset()
    ids: Set[str] = frozenset()
    beside: Set[str] = frozenset()
    dropped: dict[Why, int] = field(default_factory=dict[Why, int])
    kept: int = 0
    """Rows whose id is one of ``beside``."""

    def takes(self, row: Row) -> bool:
        """Return whether a row is left out, and count it."""
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
    """Read ``config.exclude``. Raises ``DataError``."""
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
    """Return a prompt's question, without its system turn and extra spaces. A text and a user's
    turn with that text have the same question."""
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

    The seed and the row's id alone decide, so that larger and later runs agree. Rows with the same
    question stay together, so that no held-out question is trained on. Raises ``DataError`` if
    either part would be empty.
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
