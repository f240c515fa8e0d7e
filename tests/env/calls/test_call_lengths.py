"""Long replies, which a model that is being trained writes: reading takes time in proportion."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest
from call_texts import ONE, SCHEMA

from rollpacker.config.rewards import CallFormat
from rollpacker.env.calls.calls import FORMATS, parse

pytestmark = pytest.mark.wide

FILLS = (" ", "\n", "[", "{", "1", "x", "\\", "x ")
QUICK = 0.02
"""Seconds in which nothing is in proportion to anything."""
TIMES = 8
"""The longer text is as often as long; squares would make it 64."""


def seconds(text: str, form: CallFormat) -> float:
    """Of the processor."""
    begin = time.process_time()
    parse(text, form, tools=[SCHEMA])
    return time.process_time() - begin


def check(form: CallFormat, head: str, fill: str, end: str, length: int) -> None:
    short, long = (head + fill * (size // len(fill)) + end for size in (length // TIMES, length))
    taken = seconds(long, form)
    if taken < QUICK:
        return
    least = min(seconds(short, form) for _ in range(3))
    assert min(taken, seconds(long, form)) < 2.5 * TIMES * least, (head, fill, end)


def heads(form: CallFormat) -> Iterator[str]:
    """A call up to each of its words and marks, and all of it."""
    text = ONE[form]
    return (text[: found.start()] for found in re.finditer(r"\w+|[^\w\s]+|\Z", text))


@pytest.mark.parametrize("form", FORMATS)
def test_much_of_the_same_inside_of_a_call(form: CallFormat) -> None:
    for head in heads(form):
        for fill in FILLS:
            check(form, head, fill, "~", 16_000)


def test_an_id_that_is_not_there() -> None:
    for fill in FILLS:
        check("mistral_v11", "[TOOL_CALLS]add[CALL_ID]", fill, "~", 16_000)


@pytest.mark.parametrize("form", FORMATS)
def test_many_calls_that_are_cut(form: CallFormat) -> None:
    for head in list(heads(form))[1::6]:
        check(form, "", head, "", 256_000)
