"""The report's browser of responses: which of a run's responses are put into its page, and how."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl

from rollpacker.core import sample_table as schema
from rollpacker.report.drawing.page import Section, count, embed
from rollpacker.report.reading.conversations import Message, conversation, turns_of
from rollpacker.report.reading.responses import load

MOST_BYTES = 10_000_000
"""Of all responses in a page."""
PER_KIND = 8
"""Responses of a step in each of the four lists."""
LONGEST = 20_000
"""Characters of a text; of a longer one the middle is left out. The messages of a conversation
share them, but each may have ``_SHORTEST``."""
_SHORTEST = 1_000
KINDS = ("best", "worst", "longest", "random")
_GOLDEN = 0.6180339887498949


def browser_section(run: Path, samples: pl.DataFrame) -> Section:
    """Best, worst, longest and random responses of each step, to be looked through and searched.

    Args:
        run: the folder.
        samples: its table without texts.
    """
    title, id_ = "Responses", "responses"
    chosen = _chosen(samples)
    rows, prompts = _within(run, chosen)
    if samples.is_empty():
        return Section(id_, title, "No response can be shown: their table cannot be read.")
    if not rows:
        text = "No texts were kept: a run with samples.texts=true shows its responses here."
        return Section(id_, title, text)
    data = {
        "rows": rows,
        "prompts": prompts,
        "kinds": KINDS,
        "rewards": list(schema.reward_columns(samples).values()),
    }
    text = (
        f"{count(len(rows))} of {count(samples.height)} responses are in this page: of each step "
        f"the {PER_KIND} best, worst and longest and {PER_KIND} at random"
        + (f", as far as {MOST_BYTES / 1e6:.0f} MB go" if len(rows) < chosen.height else "")
        + ". The search looks through these; 'rollpacker samples RUN --grep TEXT' through all."
    )
    return Section(id_, title, text, browser=data)


def _chosen(samples: pl.DataFrame) -> pl.DataFrame:
    """Columns ``attempt`` and ``KINDS`` (place in that list of its step, or null), the most
    wanted first: one of each kind of every step, then the second ones, with early and late steps
    in turn."""
    reward, tokens = pl.col("reward"), pl.col("tokens")
    keys = {
        "best": -reward,
        "worst": reward,
        "longest": -tokens,
        "random": pl.col("attempt").hash(seed=0),
    }
    places = [key.rank("ordinal").over("step").alias(kind) for kind, key in keys.items()]
    order = samples.sort("attempt").with_columns(places)
    listed = [pl.when(pl.col(kind) <= PER_KIND).then(pl.col(kind)).alias(kind) for kind in KINDS]
    turn = (pl.col("step").rank("dense") * _GOLDEN) % 1.0
    return (
        order.with_columns(listed)
        .with_columns(place=pl.min_horizontal(KINDS), turn=turn)
        .drop_nulls("place")
        .sort("place", "turn", "attempt")
        .select("attempt", *KINDS)
    )


def _within(run: Path, chosen: pl.DataFrame) -> tuple[list[list[Any]], list[str]]:
    """Rows for the page and the prompts that they name by index, ``MOST_BYTES`` of JSON."""
    rows: list[list[Any]] = []
    prompts: dict[str, int] = {}
    left = MOST_BYTES
    for part in chosen.iter_slices(1_000):
        places = dict(zip(part["attempt"], part.select(KINDS).iter_rows(), strict=True))
        for found in load(run, part["attempt"]):
            if found["completion"] is None:
                continue
            prompt = _cut(found["prompt_text"] or "")
            row = _row(found, prompts.get(prompt, len(prompts)), places[found["attempt"]])
            left -= len(embed(row).encode())
            if prompt not in prompts:
                left -= len(embed(prompt).encode()) + 1
            if left < len(rows):  # a comma each
                return rows, list(prompts)
            prompts.setdefault(prompt, len(prompts))
            rows.append(row)
    return rows, list(prompts)


def _row(found: dict[str, Any], prompt: int, places: tuple[int | None, ...]) -> list[Any]:
    """What ``browser.js`` reads by its place; a conversation stands in place of the text."""
    names = ("step", "prompt", "sample_index", "reward", "tokens", "state", "finish_reason")
    row = [*(found[name] for name in names), list(found["rewards"].values()), places, prompt]
    turns, messages = turns_of(found), conversation(found)
    if messages is None:
        row.append(_cut(found["completion"]))
        return [*row, turns, None] if turns else row
    longest = max(LONGEST // len(messages), _SHORTEST)
    return [*row, "", turns, [_said(message, longest) for message in messages]]


def _said(message: Message, longest: int) -> list[Any]:
    about = f"turn {message.turn}: {message.about}" if message.turn else ""
    calls = [(call.name, _cut(call.arguments, longest)) for call in message.calls]
    content = _cut(message.content, longest)
    return [message.role, message.name, about, content, calls, message.errors]


def _cut(text: str, longest: int = LONGEST) -> str:
    if len(text) <= longest:
        return text
    left_out = f"\n[... {len(text) - longest:,} characters are left out here ...]\n"
    return text[: longest // 2] + left_out + text[-longest // 2 :]
