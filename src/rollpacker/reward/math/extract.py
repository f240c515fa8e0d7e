"""Finds the final answer in a text."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from rollpacker.reward.base import after_thinking
from rollpacker.reward.math import prose
from rollpacker.reward.math.latex import braces, without_markup

BOX, TAG, MARK, JSON, SENTENCE, BOLD, LAST = (
    r"\boxed{}",
    "<answer>",
    "####",
    "JSON",
    "the sentence that gives the answer",
    "bold at the end",
    "the last formula or number",
)  # rules, the strongest first

_BOX = re.compile(r"\\boxed\s*(?:\{|(?=[^\s{}]))")
_UNBRACED = re.compile(r"[^\n$]{1,60}?(?=\$|\n|[.,;]?\s+[A-Za-z(]|[.,;]?\s*$|\\[)\]])")
_BETWEEN = re.compile(
    r"(?:[\s$,;&]|\\[()\[\],;: ]|\\q?quad|\\text\s*\{\s*,?\s*(?:and|or)\s*\}|and|or"
    r"|maybe|perhaps|possibly|also|either|else|otherwise|alternatively|[或和与、，/.|*•-]|[a-zA-Z]\s*="
    rf"|\(?(?:[a-z]|\d)[.)]|(?:case|part|option)\s*\w+:?|und|et|и|y|と|{prose.PERHAPS})*",
    re.IGNORECASE,
)
_GOES_ON = re.compile(
    r"[.!?。\n=→]|\\[lR]?(?:ong)?(?:to|arrow|rightarrow)|\b(?:wait|no|so|then|hence|thus|therefore|but|gives?|is|are"
    r"|equals|becomes?|simplifies|which|that|i\.e|namely|actually|instead|rather|correct(?:ed)?|now|next"
    r"|since|because|checks?|by)\b",
    re.IGNORECASE,
)  # text between two answers that makes the later one replace the earlier one
_CASE = re.compile(r"[\s$,;]*(?:if|when|for|in case|unless|or)\b[^.!?\n]{0,80}", re.IGNORECASE)
_LEFT = re.compile(
    r"((?<![\w}])-|\\neq?(?![A-Za-z])|≠|!="
    rf"|(?:\bnot\b|n't\b|\bcannot\b|\bnever\b|{prose.NOT})(?:\s+[^\W\d]+){{0,2}}|不[是等于为会可能]*)\s*\$?\s*$",
    re.IGNORECASE,
)
_RIGHT = re.compile(
    r"(\s*(?:\^\s*\{?\w+\}?|\\?%|/\s*\w+|(?:\\cdot|\\times|\*)\s*\w+)"
    rf"|{prose.FALSE.pattern})",
    re.IGNORECASE,
)
_JSON = re.compile(
    r'"(?:final_?)?answer"\s*:\s*(?:"((?:[^"\\]|\\.)*)"|(-?[\d.]+|true|false|\[[^\[\]]*\]))',
    re.IGNORECASE,
)
_TAG = re.compile(
    r"<\s*(?:final_?)?answer\s*>(.*?)(?:<\s*/\s*(?:final_?)?answer\s*>|\Z)",
    re.IGNORECASE | re.DOTALL,
)
_MARK = re.compile(r"(?m)####[ \t]*([^\n#]*)$")
_STARTS = re.compile(r"[-+\d$\\(\[{.*_`€£¥½-¾√π\uff10-\uff19]|[A-J][).\s]*$")
_NUMBERED = re.compile(r"\d+[.)]\s+[A-Za-z]{2,}|\([a-z]\)\s")
_FEW_WORDS, _FEW_BETWEEN = 5, 3
_NEAR = 80


@dataclass(frozen=True, slots=True)
class Extracted:
    """A final answer and the rule that found it."""

    answer: str
    rule: str


def extract(text: str, verdict: bool = False) -> Extracted | None:
    """Return the final answer of a response: the last one that the strongest matching rule finds.

    An answer tag counts as all of the text. Thinking does not count. ``verdict``: the answer to the
    question is yes or no, or true or false.
    """
    text = without_markup(after_thinking(text))
    tags = [match for match in _TAG.finditer(text) if match[1].strip()]
    tagged = [] if tags and _in_a_box(text) else _last_ones(text, tags)
    within = _complete(", ".join(tagged) if tagged else text)
    for rule, find in _RULES:
        find = prose.verdict if verdict and rule in (BOLD, LAST) else find
        if (answer := find(within)) is not None and answer.strip():
            few = prose.words(within) <= _FEW_WORDS and "\n" not in within
            if tagged and rule in (BOLD, LAST) and few:
                break
            return Extracted(answer.strip(), rule)
    return Extracted(within, TAG) if tagged else None


def _complete(text: str) -> str:
    start = text.rfind(r"\boxed")
    if start < 0 or (match := _BOX.match(text, start)) is None or not match[0].endswith("{"):
        return text
    return text if match.end() - 1 in braces(text) else text[:start]


def _in_a_box(text: str) -> bool:
    pairs = braces(text)
    spans = [
        (match.end(), pairs[match.end() - 1])
        for match in _BOX.finditer(text)
        if match.end() - 1 in pairs
    ]
    return any(
        start <= tag.start() < end for tag in _TAG.finditer(text) for start, end in spans[-64:]
    )


def of_gold(text: str) -> str:
    """Return the answer in a row's column, which may be a solution that ends in it."""
    tag = _TAG.search(text)
    answer = _box(text) or _mark(text) or (tag and tag[1]) or prose.counted(text) or text
    return answer.strip()


def _box(text: str) -> str | None:
    # The content of the last box that is not empty, with those that a list joins to it.
    boxes: list[tuple[int, int, str]] = []
    pairs = braces(text)
    for match in _BOX.finditer(text):
        if match[0].endswith("{"):
            end = pairs.get(match.end() - 1)
            if end is not None:
                boxes.append((match.start(), end + 1, text[match.end() : end]))
        elif unbraced := _UNBRACED.match(text, match.end()):
            boxes.append((match.start(), unbraced.end(), unbraced[0]))
    boxes = _outer([box for box in boxes if box[2].strip()])
    if not boxes:
        return None
    answers = [_with_context(text, boxes[-1])]
    for earlier, later in zip(reversed(boxes[:-1]), reversed(boxes[1:]), strict=True):
        if not _joined(text[earlier[1] : later[0]]):
            break
        if earlier[2].strip() not in answers:
            answers.insert(0, earlier[2].strip())
    return ", ".join(answers)


def _joined(between: str) -> bool:
    if _BETWEEN.fullmatch(between) or _CASE.fullmatch(between):
        return True
    few = len(between) <= _NEAR and len(between.split()) <= _FEW_BETWEEN
    return few and not _GOES_ON.search(between)


def _last_ones(text: str, found: list[re.Match[str]]) -> list[str]:
    answers: list[str] = []
    for place in range(len(found) - 1, -1, -1):
        if answers and not _joined(text[found[place].end() : found[place + 1].start()]):
            break
        said = found[place][1].strip()
        answers = answers if said in answers else [said, *answers]
    return answers


def _in_json(text: str) -> str | None:
    said = [(match[1] or match[2] or "").replace(r"\\", "\\") for match in _JSON.finditer(text)]
    return ", ".join(dict.fromkeys(said)) or None


def _outer(boxes: list[tuple[int, int, str]]) -> list[tuple[int, int, str]]:
    outer: list[tuple[int, int, str]] = []
    for box in boxes:
        if not outer or box[0] >= outer[-1][1]:
            outer.append(box)
    return outer


def _with_context(text: str, box: tuple[int, int, str]) -> str:
    before = _LEFT.search(text, max(0, box[0] - 40), box[0])
    after = _RIGHT.match(text, box[1])
    return f"{before[1] if before else ''}{box[2].strip()}{after[1] if after else ''}"


def _mark(text: str) -> str | None:
    # GSM8K's ``####``: the rest of its line. A Markdown heading does not count.
    for match in reversed(list(_MARK.finditer(text))):
        said, after = match[1].strip(), text[match.end() :]
        plain = said.lstrip("*_` ")
        if not plain:
            continue
        heading = not _STARTS.match(plain) or _NUMBERED.match(plain)
        if heading and after.strip():
            continue
        earlier = text[: match.start()].rstrip().rpartition("\n")[2]
        several = earlier.startswith("####") and earlier.strip("# ") != said
        return f"{earlier.strip('# ')}, {said}" if several else prose.clause(said)
    return None


_RULES: tuple[tuple[str, Callable[[str], str | None]], ...] = (
    (BOX, _box),
    (MARK, _mark),
    (JSON, _in_json),
    (SENTENCE, prose.stated),
    (BOLD, prose.bold),
    (LAST, prose.last),
)
