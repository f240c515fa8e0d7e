"""Find responses of a run with their texts and rewards, without reading all texts at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import polars as pl

from rollpacker.core import sample_table as schema
from rollpacker.core import sample_table as table
from rollpacker.report.reading.conversations import says

Order = Literal["newest", "best", "worst", "longest", "random"]
_SORTED: dict[Order, tuple[Sequence[str], Sequence[bool]]] = {
    "newest": (("step", "attempt"), (True, False)),
    "best": (("reward", "step", "attempt"), (True, True, False)),
    "worst": (("reward", "step", "attempt"), (False, True, False)),
    "longest": (("tokens", "step", "attempt"), (True, True, False)),
}

_SHOWN = ("attempt", "step", "prompt", "sample_index", "reward", "tokens", "state", "round_kind")
_SHOWN += (
    "finish_reason",
    "truncated",
    "advantage",
    *schema.TEXTS,
    *schema.TOKEN_IDS,
    *schema.TURNS,
)
_DIGITS = 6  # decimals of rewards and waits, which are stored as 32-bit floats


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundResponses:
    """Responses that match a query.

    Args:
        rows: each with ``attempt, step, prompt`` (its id), ``sample_index, reward, tokens, state,
            round_kind, finish_reason, truncated, advantage, prompt_text, completion``. ``rewards``:
            by function, null if it does not apply. ``extra``: columns that the functions logged.
            Also ``completion_ids`` if the run kept them, and ``sample_table.TURNS`` with an
            environment.
        matching: number of matches. ``rows`` may be fewer.
        texts: whether any of them has its text.
    """

    rows: list[dict[str, Any]]
    matching: int
    texts: bool


def find(
    run: Path,
    say: Callable[[str], None],
    *,
    step: int | None = None,
    prompt: str | None = None,
    grep: str | None = None,
    order: Order = "newest",
    limit: int = 10,
) -> FoundResponses:
    """Find responses in a run that may still go on.

    Args:
        say: gets a line for damaged files, whose rows are left out.
        prompt: only to this prompt, by its id.
        grep: only with this plain text, case-sensitive, in the response or its conversation.
        order: ``best`` and ``worst`` leave out responses without a reward.
        limit: most rows, 0 for all.

    Raises ``ValueError`` if there is no table of responses.
    """
    if not schema.files(run):
        what = "no samples in it yet" if run.is_dir() else "no such run folder"
        raise ValueError(f"{run}: {what}")
    wanted = [
        *([pl.col("step") == step] if step is not None else []),
        *([pl.col("prompt") == prompt] if prompt is not None else []),
        *([pl.col("reward").is_not_null()] if order in ("best", "worst") else []),
    ]
    keys = table.query(
        run,
        lambda rows: _with_text(rows.filter(*wanted), grep).select(
            "attempt", "step", "reward", "tokens", text=pl.col("completion").is_not_null()
        ),
        say,
    )
    if order == "random":
        ranked = keys.sample(fraction=1.0, shuffle=True)
    else:
        by, descending = _SORTED[order]
        ranked = keys.sort(by, descending=descending)
    chosen = ranked["attempt"].head(limit) if limit else ranked["attempt"]
    return FoundResponses(
        rows=load(run, chosen), matching=keys.height, texts=bool(keys["text"].any())
    )


def _with_text(rows: pl.LazyFrame, grep: str | None) -> pl.LazyFrame:
    if grep is None:
        return rows
    here = pl.col("completion").str.contains(grep, literal=True).fill_null(False)
    if "messages" not in rows.collect_schema().names():
        return rows.filter(here)
    # The JSON is parsed: escapes could hide the text, and keys of the JSON could match it.
    said = pl.when(~here).then(pl.col("messages"))
    found = said.map_elements(lambda text: says(text, grep), return_dtype=pl.Boolean)
    return rows.filter(here | found.fill_null(False))


def load(run: Path, attempts: pl.Series) -> list[dict[str, Any]]:
    """Return the rows of some attempts, in the order of ``attempts``."""
    # The query that found the attempts has reported damaged files.
    found = table.query(
        run,
        lambda rows: rows.filter(pl.col("attempt").is_in(attempts.implode())),
        lambda _line: None,
    )
    names = schema.reward_columns(found)
    logged = [column for column in found.columns if column.startswith(schema.EXTRA)]
    shown = [name for name in _SHOWN if name in found.columns]
    by_attempt = {row["attempt"]: row for row in found.iter_rows(named=True)}
    rows: list[dict[str, Any]] = []
    for attempt in attempts:
        row = by_attempt.get(attempt)
        if row is None:  # gone meanwhile: the run was resumed from an earlier step
            continue
        rewards = {name: _rounded(row[column]) for column, name in names.items()}
        extra = {c.removeprefix(schema.EXTRA): row[c] for c in logged if row[c] is not None}
        one = {name: row[name] for name in shown}
        one |= {name: _rounded(one[name]) for name in ("reward", "advantage")}
        if one.get("wait_s") is not None:
            one["wait_s"] = [_rounded(seconds) for seconds in one["wait_s"]]
        rows.append(one | {"rewards": rewards, "extra": extra})
    return rows


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, _DIGITS)
