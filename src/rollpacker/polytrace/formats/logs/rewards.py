"""The reward of a log that has a column for each reward function, beside other numbers."""

from __future__ import annotations

import re
from collections.abc import Sequence

import polars as pl

from rollpacker.polytrace.formats.files.lines import Record
from rollpacker.polytrace.formats.logs import counts

_ADVANTAGES = {"advantage", "advantages"}
_METRIC = re.compile(
    r"(?:^|[_/])(?:kl|entropy|loss|lr|time|seconds|lengths?|len|tokens?|count|num|id|idx|index|step"
    r"|seed|epoch|turns?|temperature|logprobs?|mask|ratio|rank|level|size)(?:[_/]|$)",
    re.IGNORECASE,
)
"""Names of columns with numbers that are no rewards."""
_SAME = 1e-3


def numbers(record: Record) -> dict[str, float | None]:
    """Of a response, the numbers that may be rewards, and its advantage."""
    return {
        name: counts.score(value, name)
        for name, value in record.items()
        if type(value) in (int, float) and not _METRIC.search(name)
    }


def summed(frame: pl.DataFrame, names: Sequence[str]) -> tuple[pl.Expr, list[str]]:
    """The reward of each row, and the columns that it is the sum of.

    Args:
        frame: ``step``, ``prompt`` and ``numbers``, values in the order of ``names``.
        names: of all columns with numbers, in the log's order, in which rewards go first.
    """
    values = {n: pl.col("numbers").list.get(i, null_on_oob=True) for i, n in enumerate(names)}
    given = [name for name in names if name not in _ADVANTAGES]
    chosen = [name for name in given if _is_named(name)] or given
    for advantage in values.keys() & _ADVANTAGES:
        before = names[: names.index(advantage)]
        chosen = _told(frame.select("step", "prompt", **values), before, advantage) or chosen
    known = [values[name] for name in chosen] or [pl.lit(None, pl.Float64())]
    some = pl.any_horizontal(each.is_not_null() for each in known)
    return pl.when(some).then(pl.sum_horizontal(known)), chosen


def _is_named(column: str) -> bool:
    return "reward" in column.lower()


def _told(table: pl.DataFrame, names: Sequence[str], advantage: str) -> list[str]:
    """The first columns, whose sum rises and falls within groups as advantages do; of those behind
    them that never do, rewards by their name or by being the same in all groups. None where
    advantages tell nothing."""
    sums = {f"first {k}": pl.sum_horizontal(names[: k + 1]) for k in range(len(names))}
    groups = table.with_columns(**sums).group_by("step", "prompt")
    told = pl.col(advantage).max() - pl.col(advantage).min() > _SAME
    fits = groups.agg(told.alias("told"), *(pl.corr(k, advantage) for k in sums))
    fits = fits.filter("told").select(pl.col(k).fill_nan(0.0).fill_null(0.0).mean() for k in sums)
    found = [fit or 0.0 for fit in fits.row(0)] if sums else []
    if not found or max(found) <= 0.0:
        return []
    alike = [place for place, fit in enumerate(found) if fit >= max(found) - _SAME]
    least, named = alike[0] + 1, any(map(_is_named, names))
    same = {name: table[name].drop_nulls().n_unique() == 1 for name in names}
    rest = [names[k] for k in alike[1:] if (_is_named(names[k]) if named else same[names[k]])]
    return [*names[:least], *rest]
