"""A trainer's log as a trace: one row a response, no texts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any, cast

import numpy as np
import polars as pl

from rollpacker.polytrace.formats.files.columns import pack, table
from rollpacker.polytrace.formats.files.lines import Problem, Record
from rollpacker.polytrace.formats.files.reading import Reading
from rollpacker.polytrace.formats.logs import counts, texts
from rollpacker.polytrace.formats.logs.counts import PROMPT_WAYS, RESPONSE_WAYS, values
from rollpacker.polytrace.formats.logs.layouts import LAYOUTS, LogLayout
from rollpacker.polytrace.formats.logs.responses import LoggedResponse, check_text, responses
from rollpacker.polytrace.schema import SAMPLES, Trace

_ROWS_AT_ONCE = 4096
_LONGEST_KEPT = 64
_NO_REWARDS = {
    "step",
    "advantage",
    *(way.partition(":")[2] for way in (*RESPONSE_WAYS, *PROMPT_WAYS)),
}
_METRIC = re.compile(
    r"(?:^|[_/])(?:kl|entropy|loss|lr|time|seconds|lengths?|len|tokens?|count|num|id|idx|index|step"
    r"|seed|epoch|turns?|temperature|logprobs?|advantages?|mask|ratio|rank|level|size)(?:[_/]|$)",
    re.IGNORECASE,
)
"""Names of columns with numbers that are no rewards."""
_CUT = ("length", "truncated", "max_tokens", "max_length")
_ABORTED = ("abort", "aborted", "cancelled")


_WORDS = ("prompt", "domain", "state", "extra")
_NUMBERS = ("step", "prompt_tokens", "response_tokens", "truncated", "dp_rank", "reward")
_CODES = {name: SAMPLES[name] for name in _NUMBERS} | dict.fromkeys(_WORDS, pl.UInt32())
"""Columns that a log can fill, texts as numbers."""
_MOST_EXTRAS = 1 << 16


def read(files: Sequence[Path], reading: Reading, kind: str) -> Trace:
    """One row a response. Raises ``TraceError`` and ``OSError``.

    A prompt's id is a hash of its text. Texts are not kept; other keys are, in ``extra``, where
    they are short and few of them differ. A file with the same responses as another one counts
    once.
    """
    log = _Log(kind, LAYOUTS[kind], reading)
    for path in files:
        log.add(path)
    return log.trace()


@dataclass(slots=True)
class _File:
    """What was read of one file; ``print`` is equal for equal responses."""

    validation: bool
    parts: list[pl.DataFrame] = field(default_factory=list[pl.DataFrame])
    rows: list[Record] = field(default_factory=list[Record])
    guessed: int = 0
    stepless: int = 0
    print: int = 0

    def flush(self, least: int) -> None:
        """Rows as objects take ten times the memory of a table's."""
        if len(self.rows) >= least:
            self.parts.append(table(self.rows, _CODES))
            self.rows = []


@dataclass(slots=True)
class _Log:
    kind: str
    layout: LogLayout
    reading: Reading
    files: list[_File] = field(default_factory=list[_File])
    seen: dict[int, Path] = field(default_factory=dict[int, Path])
    ids: set[str] = field(default_factory=set[str])
    rewards: set[str] = field(default_factory=set[str])
    again: int = 0
    words: dict[str | None, int] = field(default_factory=dict[str | None, int])
    """Each text of a column once: large logs repeat them."""
    extras: set[str] = field(default_factory=set[str])

    def _code(self, word: str | None) -> int:
        return self.words.setdefault(word, len(self.words))

    def _extra(self, record: Record) -> str | None:
        """None where too many differ: what tells each response apart tells nothing of lengths."""
        extra = pack(self.kind, _kept(record, self.layout))
        if len(self.extras) < _MOST_EXTRAS:
            self.extras.add(extra)
        return extra if extra in self.extras else None

    def add(self, path: Path) -> None:
        """A file's responses, unless another file has the same."""
        file = _File(_is_validation(path, self.layout.validation))
        for response in responses(path, self.kind, self.reading):
            if self._is_again(response.record):
                continue
            try:
                self._take(response, file)
            except ValueError as error:
                text = f"{response.where}{error}"
                self.reading.bad(Problem(path, response.line, text))
        file.flush(1)
        if not file.parts:
            return
        first = self.seen.setdefault(file.print, path)
        if first != path:
            self.reading.note(f"{path}: the same completions as in {first.name}: counted once")
        else:
            self.files.append(file)

    def _is_again(self, record: Record) -> bool:
        own = counts.first(record, (self.layout.unique,)) if self.layout.unique else None
        if not isinstance(own, str):
            return False
        known = own in self.ids
        self.ids.add(own)
        self.again += known
        return known

    def _take(self, response: LoggedResponse, file: _File) -> None:
        record, layout = response.record, self.layout
        prompt = texts.prompt_id(texts.identity(response.prompt))
        count = counts.tokens(record, (*layout.tokens, *RESPONSE_WAYS))
        if count is None:
            check_text(response.completion, layout.said)
        length = self._tokens(texts.sampled(response.completion)) if count is None else count
        truncated, state = _ending(record, layout)
        rank = counts.first(record, (layout.rank,)) if layout.rank else None
        file.rows.append(
            {
                "step": response.step or 0,
                "prompt": self._code(prompt),
                "domain": self._code("validation" if file.validation else _domain(record, layout)),
                "prompt_tokens": self._prompt_tokens(response),
                "response_tokens": length,
                "truncated": truncated,
                "state": self._code(state),
                "dp_rank": None if rank is None else counts.whole(rank, layout.rank),
                "reward": self._reward(record),
                "extra": self._code(self._extra(record)),
            }
        )
        file.guessed += count is None
        file.stepless += response.step is None
        said = hash((prompt, texts.said(response.completion), length))
        file.print = hash((file.print, said, None if layout.relogged else response.step))
        file.flush(_ROWS_AT_ONCE)

    def _tokens(self, text: str) -> int:
        """Of a text whose tokens the log does not count."""
        return (self.reading.count or texts.estimate)(text)

    def _prompt_tokens(self, response: LoggedResponse) -> int:
        ways = (*self.layout.prompt_tokens, *PROMPT_WAYS)
        if (found := counts.tokens(response.record, ways)) is not None:
            return found
        if self.layout.prefix is not None:
            return len(cast(list[Any], response.prompt))
        return self._tokens(texts.said(response.prompt))

    def _reward(self, record: Record) -> float | None:
        if self.layout.reward:
            return counts.score(counts.first(record, self.layout.reward), self.layout.reward[0])
        if not self.layout.relogged:
            return None
        found = {
            name: counts.score(value, name)
            for name, value in record.items()
            if isinstance(value, int | float) and not isinstance(value, bool) and _is_reward(name)
        }
        self.rewards |= set(found)
        known = [each for each in found.values() if each is not None]
        return sum(known) if known else None

    def trace(self) -> Trace:
        """All of them; says what is approximated."""
        parts = [part for file in self.files for part in file.parts]
        frame = pl.concat(parts) if parts else table([], _CODES)
        note, task = self.reading.note, self.reading.task
        if guessed := sum(file.guessed for file in self.files):
            by = (
                f"approximated: the log has texts but no token counts, "
                f"{texts.CHARACTERS_PER_TOKEN} characters are taken as a token"
                if self.reading.count is None
                else "counted by the tokenizer: the log has texts but no token counts"
            )
            note(f"{task}: lengths of {guessed} of {frame.height} responses are {by}")
        if stepless := sum(file.stepless for file in self.files):
            note(f"{task}: nothing tells the step of {stepless} responses: taken as step 0")
        if self.again:
            note(f"{task}: {self.again} responses were logged again: counted once")
        if self.rewards:
            columns = ", ".join(sorted(self.rewards))
            weights = "the sum of " if len(self.rewards) > 1 else ""
            note(f"{task}: reward is {weights}{columns}; the log has no weights")
        words = pl.Series(list(self.words), dtype=pl.String())
        return Trace(samples=_whole(frame, words, task))


def _is_reward(column: str) -> bool:
    return column not in _NO_REWARDS and not _METRIC.search(column)


def _whole(frame: pl.DataFrame, words: pl.Series, task: str) -> pl.DataFrame:
    """With all columns of a trace: polars stores one that is the same everywhere as one value."""
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
    """Of each response among those to its prompt in its step, 0 on."""
    keys = frame["step"].to_numpy().astype(np.int64) << 32 | frame["prompt"].to_numpy()
    order = np.argsort(keys, kind="stable")
    firsts = np.flatnonzero(np.diff(keys[order], prepend=-1))
    sizes = np.diff(firsts, append=keys.size)
    places = np.empty(keys.size, np.int32)
    places[order] = np.arange(keys.size) - np.repeat(firsts, sizes)
    return pl.Series(places)


def _is_validation(path: Path, pattern: str) -> bool:
    names = (path.name, *(folder.name for folder in list(path.parents)[:2]))
    return bool(pattern) and any(re.search(pattern, name) for name in names)


def _domain(record: Record, layout: LogLayout) -> str | None:
    if record.get("mode") == "eval":
        return "validation"
    told = counts.first(record, layout.domain)
    return told if isinstance(told, str) else None


def _ending(record: Record, layout: LogLayout) -> tuple[bool | None, str]:
    """Whether it was cut off, and its state."""
    told = values(record, layout.stop)[-1:] if layout.stop else []
    if not told or not isinstance(told[0], str):
        return None, "kept"
    return told[0] in _CUT, "aborted" if told[0] in _ABORTED else "kept"


def _kept(record: Mapping[str, Any], layout: LogLayout) -> Record:
    """What else is told of a response, as far as it is short: texts would fill the memory."""
    used = layout.used
    return {key: value for key, value in record.items() if key not in used and _is_short(value)}


def _is_short(value: object) -> bool:
    if isinstance(value, str):
        return len(value) <= _LONGEST_KEPT
    return isinstance(value, bool | int) or (isinstance(value, float) and isfinite(value))
