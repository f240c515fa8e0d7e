"""Read a trainer's log as a trace: one row per response with its reward, without texts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any, cast

import numpy as np
import polars as pl

from rollpacker.polytrace.formats.files import Copied, Problem, Reading, Record, pack, table
from rollpacker.polytrace.formats.logs import texts
from rollpacker.polytrace.formats.logs.layouts import LAYOUTS, LogLayout
from rollpacker.polytrace.formats.logs.responses import (
    LoggedResponse,
    PromptIds,
    check_text,
    responses,
)
from rollpacker.polytrace.formats.logs.texts import PROMPT_WAYS, RESPONSE_WAYS, values
from rollpacker.polytrace.schema import SAMPLES, Trace

# --- Rewards in a log that has a column for each reward function, beside other numbers

_ADVANTAGES = {"advantage", "advantages"}
_METRIC = re.compile(
    r"(?:^|[_/])(?:kl|entropy|loss|lr|time|seconds|lengths?|len|tokens?|count|num|id|idx|index|step"
    r"|seed|epoch|turns?|temperature|logprobs?|mask|ratio|rank|level|size)(?:[_/]|$)",
    re.IGNORECASE,
)
_SAME = 1e-3


def numbers(record: Record) -> dict[str, float | None]:
    """Return a response's numbers that may be rewards, and its advantage."""
    return {
        name: texts.score(value, name)
        for name, value in record.items()
        if type(value) in (int, float) and not _METRIC.search(name)
    }


def summed(frame: pl.DataFrame, names: Sequence[str]) -> tuple[pl.Expr, list[str]]:
    """Return the reward of each row, and the columns that it is the sum of. ``frame`` has
    ``step``, ``prompt`` and ``numbers``, in the order of ``names``. In a log, reward columns
    come first."""
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
    """Find the reward columns by the advantage: the first columns whose sum correlates with it.
    Later columns that do not change the sum's order are rewards by their name, or if they are
    constant. Empty if advantages carry no information."""
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


_ROWS_AT_ONCE = 4096
_LONGEST_KEPT = 64
_CUT = ("length", "truncated", "max_tokens", "max_length")
_ABORTED = ("abort", "aborted", "cancelled")


_WORDS = ("prompt", "domain", "state", "extra")
_NUMBERS = ("step", "prompt_tokens", "response_tokens", "truncated", "dp_rank", "reward")
_CODES: dict[str, pl.DataType] = {
    **{name: SAMPLES[name] for name in _NUMBERS},
    **dict.fromkeys(_WORDS, pl.UInt32()),
    "guessed": pl.Boolean(),
    "numbers": pl.List(pl.Float64),
}
"""Columns that a log can fill, with texts as numbers, and possible parts of rewards."""
_MOST_EXTRAS = 1 << 16


def read(files: Sequence[Path], reading: Reading, kind: str) -> Trace:
    """Return one row per response. Raises ``TraceError`` and ``OSError``. Texts are not kept.
    Other keys are kept in ``extra`` if they are short and few values differ. Responses that an
    earlier file ends with count once."""
    log = _Log(kind, LAYOUTS[kind], reading, PromptIds(LAYOUTS[kind]))
    for path in files:
        log.add(path)
    return log.trace()


@dataclass(slots=True)
class _Log:
    kind: str
    layout: LogLayout
    reading: Reading
    prompts: PromptIds
    tables: list[pl.DataFrame] = field(default_factory=list[pl.DataFrame])
    rows: list[Record] = field(default_factory=list[Record])
    """The last ones. As objects they take ten times the memory of a table."""
    ids: set[str] = field(default_factory=set[str])
    numbers: dict[str, int] = field(default_factory=dict[str, int])
    again: int = 0
    words: dict[str | None, int] = field(default_factory=dict[str | None, int])
    """Each text of a column once, since large logs repeat them."""
    extras: set[str] = field(default_factory=set[str])

    def _code(self, word: str | None) -> int:
        return self.words.setdefault(word, len(self.words))

    def _extra(self, record: Record) -> str | None:
        """None if too many values differ: they identify responses and say nothing of lengths."""
        extra = pack(self.kind, _kept(record, self.layout))
        if len(self.extras) < _MOST_EXTRAS:
            self.extras.add(extra)
        return extra if extra in self.extras else None

    def add(self, path: Path) -> None:
        """Add a file's responses, except those that an earlier file ends with."""
        copied = Copied(self.reading.repeats, self.reading.task, path)
        for response in responses(path, self.kind, self.reading):
            if self._is_again(response.record):
                continue
            try:
                self._drop(copied.again(response.unit, *self._take(response)))
            except ValueError as error:
                text = f"{response.where}{error}"
                self.reading.bad(Problem(path, response.line, text))
        copied.end()
        for first, count in copied.found.items():
            where = "earlier lines" if first == path else first.name
            self.reading.note(
                f"{path}: {count} responses are the same completions as in {where}: counted once"
            )

    def _drop(self, count: int) -> None:
        tabled = count - len(self.rows)
        del self.rows[len(self.rows) - min(count, len(self.rows)) :]
        while tabled > 0:
            last = self.tables.pop()
            self.tables += [last[:-tabled]] if tabled < last.height else []
            tabled -= last.height

    def _is_again(self, record: Record) -> bool:
        own = texts.first(record, (self.layout.unique,)) if self.layout.unique else None
        if not isinstance(own, str):
            return False
        known = own in self.ids
        self.ids.add(own)
        self.again += known
        return known

    def _take(self, response: LoggedResponse) -> tuple[object, ...]:
        record, layout = response.record, self.layout
        prompt = self.prompts.of(response)
        count = texts.tokens(record, (*layout.tokens, *RESPONSE_WAYS))
        if count is None:
            check_text(response.completion, layout.said)
        length = self._tokens(texts.sampled(response.completion)) if count is None else count
        truncated, state = _ending(record, layout)
        rank = texts.first(record, (layout.rank,)) if layout.rank else None
        rewarded = texts.first(record, layout.reward)
        domain = "validation" if response.validation else _domain(record, layout)
        self.rows.append(
            {
                "step": response.step,
                "prompt": self._code(prompt),
                "domain": self._code(domain),
                "prompt_tokens": self._prompt_tokens(response),
                "response_tokens": length,
                "guessed": count is None,
                "truncated": truncated,
                "state": self._code(state),
                "dp_rank": None if rank is None else texts.whole(rank, layout.rank),
                "reward": texts.score(rewarded, "".join(layout.reward[:1])),
                "numbers": self._numbers(record) if layout.relogged else None,
                "extra": self._code(self._extra(record)),
            }
        )
        if len(self.rows) == _ROWS_AT_ONCE:
            self.tables.append(table(self.rows, _CODES))
            self.rows = []
        said = texts.said(response.completion)
        return prompt, said, length, None if layout.relogged else response.step

    def _tokens(self, text: str) -> int:
        return (self.reading.count or texts.estimate)(text)

    def _prompt_tokens(self, response: LoggedResponse) -> int:
        ways = (*self.layout.prompt_tokens, *PROMPT_WAYS)
        if (found := texts.tokens(response.record, ways)) is not None:
            return found
        if self.layout.prefix is not None:
            return len(cast(list[Any], response.prompt))
        return self._tokens(texts.said(response.prompt))

    def _numbers(self, record: Record) -> list[float | None]:
        found = numbers(record)
        for name in found:
            self.numbers.setdefault(name, len(self.numbers))
        return [found.get(name) for name in self.numbers]

    def trace(self) -> Trace:
        frame = pl.concat([*self.tables, table(self.rows, _CODES)])
        note, task = self.reading.note, self.reading.task
        if guessed := frame["guessed"].sum():
            by = (
                f"approximated: the log has texts but no token counts, "
                f"{texts.CHARACTERS_PER_TOKEN} characters are taken as a token"
                if self.reading.count is None
                else "counted by the tokenizer: the log has texts but no token counts"
            )
            note(f"{task}: lengths of {guessed} of {frame.height} responses are {by}")
        if stepless := frame["step"].null_count():
            note(f"{task}: nothing tells the step of {stepless} responses: taken as step 0")
            frame = frame.with_columns(pl.col("step").fill_null(0))
        if self.again:
            note(f"{task}: {self.again} responses were logged again: counted once")
        if self.numbers and frame["reward"].is_null().all():
            total, columns = summed(frame, list(self.numbers))
            frame = frame.with_columns(reward=total)
            weights = "the sum of " if len(columns) > 1 else ""
            note(f"{task}: reward is {weights}{', '.join(columns)}, since the log has no weights")
        words = pl.Series(list(self.words), dtype=pl.String())
        return Trace(samples=_whole(frame, words, task))


def _whole(frame: pl.DataFrame, words: pl.Series, task: str) -> pl.DataFrame:
    """Add all columns of a trace. Constant ones are literals, which polars stores as one value."""
    columns: dict[str, pl.Expr | pl.Series] = {
        name: pl.lit(None, kind)
        for name, kind in SAMPLES.items()
        if name not in frame.columns or frame[name].null_count() == frame.height
    }
    for name in _WORDS if frame.height else ():
        codes = frame[name]
        same = codes.min() == codes.max()
        columns[name] = pl.lit(words[codes[0]], pl.String()) if same else words.gather(codes)
    columns |= {"task": pl.lit(task), "index": _places(frame)}
    return frame.with_columns(**columns).select(pl.col(n).cast(kind) for n, kind in SAMPLES.items())


def _places(frame: pl.DataFrame) -> pl.Series:
    keys = frame["step"].to_numpy().astype(np.int64) << 32 | frame["prompt"].to_numpy()
    order = np.argsort(keys, kind="stable")
    firsts = np.flatnonzero(np.diff(keys[order], prepend=-1))
    sizes = np.diff(firsts, append=keys.size)
    places = np.empty(keys.size, np.int32)
    places[order] = np.arange(keys.size) - np.repeat(firsts, sizes)
    return pl.Series(places)


def _domain(record: Record, layout: LogLayout) -> str | None:
    told = texts.first(record, layout.domain)
    return told if isinstance(told, str) else None


def _ending(record: Record, layout: LogLayout) -> tuple[bool | None, str]:
    told = values(record, layout.stop)[-1:] if layout.stop else []
    if not told or not isinstance(told[0], str):
        return (told[0] if told and isinstance(told[0], bool) else None), "kept"
    return told[0] in _CUT, "aborted" if told[0] in _ABORTED else "kept"


def _kept(record: Mapping[str, Any], layout: LogLayout) -> Record:
    """Short other keys of a response. Texts would fill the memory."""
    used = layout.used
    return {key: value for key, value in record.items() if key not in used and _is_short(value)}


def _is_short(value: object) -> bool:
    if isinstance(value, str):
        return len(value) <= _LONGEST_KEPT
    return isinstance(value, bool | int) or (isinstance(value, float) and isfinite(value))
