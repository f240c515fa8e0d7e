"""Where the final answer stands in a text."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from rollpacker.reward.math import prose
from rollpacker.reward.math.latex import braces, without_markup

BOX, TAG, MARK, SENTENCE, BOLD, LAST = (
    r"\boxed{}",
    "<answer>",
    "####",
    "the sentence that gives the answer",
    "bold at the end",
    "the last formula or number",
)
"""Rules, the strongest first."""

_BOX = re.compile(r"\\+boxed\s*(?:\{|(?=[^\s{}]))")
_UNBRACED = re.compile(r"\\[A-Za-z]+(?:\{[^{}]*\})*|[^\s$\\{}.,;]+")
_BETWEEN = re.compile(
    r"(?:[\s$,;&]|\\[()\[\],;: ]|\\q?quad|\\text\s*\{\s*,?\s*(?:and|or)\s*\}|and|or"
    r"|[或和与、，]|[a-zA-Z]\s*=)*"
)
_JOINS = re.compile(r"[,;、，]|and|or|[或和与]")
_TAG = re.compile(
    r"<\s*(?:final_?)?answer\s*>(.*?)(?:<\s*/\s*(?:final_?)?answer\s*>|\Z)",
    re.IGNORECASE | re.DOTALL,
)
_MARK = re.compile(r"(?m)####[ \t]*([^\n#]*)$")
_STARTS = re.compile(r"[-+\d$\\(\[{.*_`€£¥½-¾√π\uff10-\uff19]|[A-J][).\s]*$")
_NUMBERED = re.compile(r"\d+[.)]\s+[A-Za-z]{2,}|\([a-z]\)\s")
_FEW_WORDS = 5


@dataclass(frozen=True, slots=True)
class Found:
    """A final answer and the rule that found it."""

    answer: str
    rule: str


def extract(text: str) -> Found | None:
    """The final answer of a response: the first of the rules that finds one, its last place.

    An answer tag is all of the text; what stands before ``</think>`` is no part of it.
    """
    text = without_markup(text.rpartition("</think>")[2])
    tagged = [match[1] for match in _TAG.finditer(text) if match[1].strip()]
    within = tagged[-1].strip() if tagged else text
    for rule, find in _RULES:
        if (answer := find(within)) is not None and answer.strip():
            if tagged and rule in (BOLD, LAST) and prose.words(within) <= _FEW_WORDS:
                break
            return Found(answer.strip(), rule)
    return Found(within, TAG) if tagged else None


def of_gold(text: str) -> str:
    """The answer in a row's column, which may be a solution that ends in it."""
    for find in (_box, _mark, _tagged, prose.counted):
        if answer := find(text):
            return answer.strip()
    return text.strip()


def _tagged(text: str) -> str | None:
    match = _TAG.search(text)
    return match[1] if match else None


def _box(text: str) -> str | None:
    """What is in the last box that holds something, with those that a list joins to it."""
    boxes: list[tuple[int, int, str]] = []
    pairs = braces(text)
    for match in _BOX.finditer(text):
        if match[0].endswith("{"):
            end = pairs.get(match.end() - 1)
            if end is not None:
                boxes.append((match.start(), end + 1, text[match.end() : end]))
        elif unbraced := _UNBRACED.match(text, match.end()):
            boxes.append((match.start(), unbraced.end(), unbraced[0]))
    boxes = [box for box in boxes if box[2].strip() and not _BOX.match(box[2].lstrip())]
    if not boxes:
        return None
    answers = [boxes[-1][2].strip()]
    for earlier, later in zip(reversed(boxes[:-1]), reversed(boxes[1:]), strict=True):
        between = text[earlier[1] : later[0]]
        if not (_BETWEEN.fullmatch(between) and _JOINS.search(between)):
            break
        if earlier[2].strip() not in answers:
            answers.insert(0, earlier[2].strip())
    return ", ".join(answers)


def _mark(text: str) -> str | None:
    """GSM8K's ``####``: the rest of its line. A heading of Markdown is none."""
    for match in reversed(list(_MARK.finditer(text))):
        said, after = match[1].strip(), text[match.end() :]
        plain = said.lstrip("*_` ")
        if not plain:
            continue
        heading = not _STARTS.match(plain) or _NUMBERED.match(plain)
        if heading and after.strip():
            continue
        return prose.clause(said)
    return None


_RULES: tuple[tuple[str, Callable[[str], str | None]], ...] = (
    (BOX, _box),
    (MARK, _mark),
    (SENTENCE, prose.stated),
    (BOLD, prose.bold),
    (LAST, prose.last),
)
