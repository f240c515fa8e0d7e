"""Where the final answer stands in a text."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from rollpacker.reward.math.latex import (
    braces,
    without_emphasis,
    without_tokens,
)

BOX, TAG, MARK, SENTENCE, BOLD, LAST = (
    r"\boxed{}",
    "<answer>",
    "####",
    "the sentence that gives the answer",
    "bold at the end",
    "the last formula or number",
)
"""Rules, the strongest first."""

_BOX = re.compile(r"\\+f?boxed\s*(?:\{|(?=[^\s{}]))")
_UNBRACED = re.compile(r"\\[A-Za-z]+(?:\{[^{}]*\})*|[^\s$\\{}.,;]+")
_BETWEEN = re.compile(
    r"(?:[\s$,;&]|\\[()\[\],;: ]|\\q?quad|\\text\s*\{\s*,?\s*(?:and|or)\s*\}|and|or"
    r"|[或和与、，]|[a-zA-Z]\s*=)*"
)
_JOINS = re.compile(r"[,;、，]|and|or|[或和与]")
_TAG = re.compile(
    r"<\s*(?:final_?)?answer\s*>(.*?)<\s*/\s*(?:final_?)?answer\s*>", re.I | re.DOTALL
)
_MARK = re.compile(r"(?m)####[ \t]*([^\n#]*)$")
_STARTS = re.compile(r"[-+\d$\\(\[{.*_`€£¥½-¾√π\uff10-\uff19]|[A-J][).\s]*$")
_STATED = re.compile(
    r"(?:(?:final|correct|right|only)\s+)?(?:answers?|option|choice|result)\b"
    r"(?:[ \t]+(?:to|of|for)\b[^.:=\n]{0,80}?)?[*_ \t]*"
    r"(?:(?::|=)[*_]*|(?:\bis\b|\bare\b|\bwould be\b|\bmust be\b|\bequals\b)[*_ \t]*:?)\s*"
    r"|答案(?:是|为|应为|应该是)?\s*[:：]?\s*|(?:选择?|故选)\s*[:：]?\s*(?=[A-J(（])",
    re.IGNORECASE,
)
_DOUBT = re.compile(
    r"(?:not|n't|between|at (?:least|most)|(?:more|less|fewer|greater) than|neither)\b|不是",
    re.IGNORECASE,
)
_BOUND = re.compile(rf"(?:{_DOUBT.pattern})\s*$", re.IGNORECASE)
_STOP = r"(?P<end>[.!?](?=\s|$|[*_`]+(?:\s|$))|[。！？；]|\n)"
_REASON = re.compile(
    r",?\s+(?:since|because|which|where|so that|given that|due to)\b.*|,\s+(?:as|so|with|when)\b.*"
    r"|，?\s*(?:因为|由于|所以).*",
    re.IGNORECASE | re.DOTALL,
)
_BOLD = re.compile(r"(\*\*|__)(?=\S)([^*\n]{1,80}?)(?<=\S)\1")
_FORMULA = re.compile(
    r"\$\$(.+?)\$\$|\\\[(.+?)\\\]|\\\((.+?)\\\)|(?<![\\\d$])\$([^$\n]+?)(?<!\\)\$(?!\d)", re.DOTALL
)
_STOPS = re.compile(f"{_FORMULA.pattern}|{_STOP}", re.DOTALL)
_NUMBER = re.compile(
    r"(?<![\w.\\^{])(?P<value>[-−]?[$€£¥₹]?\s?(?:"
    r"\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+\s+\d+/\d+|\d+(?:\.\d+)?(?:\s*/\s*\d+(?:\.\d+)?)?|\.\d+"
    r"|\d*\\[dtc]?frac\s*(?:\{[^{}]*\}|\d)\s*(?:\{[^{}]*\}|\d)|[√]\(?\d+\)?|[½-¾⅓-⅞]|π)"
    r"(?:\s*(?:\\pi|π|\\sqrt\s*\{[^{}]*\}|√\d+|!))?(?:\s*(?:\\?%|°|percent\b))?"
    r"(?:\s+(?:million|billion|trillion|thousand)\b)?)"
    r"(?P<unit>\s?(?:km/h|m/s|mph|km|cm|mm|kg|m|g|s|h|hours?|minutes?|seconds?|days?|dollars?|cents?"
    r"|met(?:er|re)s?|feet|inches|miles|years?|degrees?)\b(?:\^\{?\d\}?|²|³)?)?"
)
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
_LETTER = re.compile(r"\(?[A-J]\)?[.)]?")
_NUMBERED = re.compile(r"\d+[.)]\s+[A-Za-z]{2,}|\([a-z]\)\s")
_LETTERS = re.compile(r"(?<![\\A-Za-z])[A-Za-z]+")
_FEW = re.compile(r"\s*[A-Za-z](?:\([a-z]\))?\s*=[^=]*")
_FEW_WORDS = 4
_SHORT = 80
_NEAR_END = 200
_LOOKED_AT = 4000


@dataclass(frozen=True, slots=True)
class Found:
    """A final answer and the rule that found it."""

    answer: str
    rule: str

    @property
    def boxed(self) -> bool:
        """Whether it stood in a box."""
        return self.rule == BOX


def extract(text: str) -> Found | None:
    """The final answer of a response: the first of the rules that finds one, its last place.

    An answer tag, where one is closed, is all of the text; what stands before ``</think>`` is no
    part of it.
    """
    text = without_tokens(text.rpartition("</think>")[2])
    tagged = [match[1] for match in _TAG.finditer(text) if match[1].strip()]
    within = tagged[-1].strip() if tagged else text
    for rule, find in _RULES:
        if (answer := find(within)) is not None and answer.strip():
            if tagged and rule in (BOLD, LAST) and len(_WORD.findall(within)) <= _FEW_WORDS + 1:
                break
            return Found(answer.strip(), rule)
    return Found(within, TAG) if tagged else None


def of_gold(text: str) -> str:
    """The answer in a row's column, which may be a solution that ends in it."""
    for find in (_box, _mark, _tagged):
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
    boxes = [box for box in boxes if box[2].strip() and not box[2].lstrip().startswith(r"\boxed")]
    outer = [box for box in boxes if r"\fbox" not in text[box[0] : box[0] + 6]]
    if not outer:
        return None
    answers = [outer[-1][2]]
    for earlier, later in zip(reversed(outer[:-1]), reversed(outer[1:]), strict=True):
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
        return _clause(said)
    return None


def _sentence(text: str) -> str | None:
    """What "the answer is" says, in the last such sentence."""
    for match in reversed(list(_STATED.finditer(text))):
        if clause := _clause(text[match.end() :]):
            return _exact(clause)
    return None


def _clause(said: str) -> str:
    """The first sentence, without reasons."""
    clause = said[: _first_end(said)].strip()
    return without_emphasis(_REASON.sub("", clause).strip() or clause)


def _first_end(text: str) -> int:
    """Where the first sentence ends; a point inside a formula or a number ends none."""
    place = 0
    for match in _STOPS.finditer(text):
        factorial = match[0] == "!" and text[match.start() - 1 : match.start()].isalnum()
        if match["end"] and not factorial and text[: match.start()].strip(" *_`\n"):
            return match.end() if match[0] != "\n" else match.start()
        place = match.end()
    return max(place, len(text))


def _exact(clause: str) -> str:
    """The answer in a clause that may hold more words than it."""
    formulas = list(_FORMULA.finditer(clause))
    if formulas:
        outside = _FORMULA.sub(" ", clause)
        if len(_WORD.findall(outside)) <= _FEW_WORDS:
            return clause
        first = formulas[0] if formulas[0].start() == 0 else formulas[-1]
        return _result(next(group for group in first.groups() if group))
    if _DOUBT.search(clause):
        return clause
    if "=" in clause and not _FEW.fullmatch(clause):
        return _result(clause)
    if len(clause.split()) <= _FEW_WORDS + 2:
        return clause
    number = _NUMBER.search(clause)
    return _with_unit(number) if number else clause


def _result(formula: str) -> str:
    """Of ``48 + 24 = 72`` the right side; an equation in variables stays."""
    left, equals, right = formula.rpartition("=")
    calculated = equals and right.strip() and left.strip() and left[-1] not in "<>!:\\"
    return right.strip() if calculated and not _LETTERS.search(left) else formula


def _bold(text: str) -> str | None:
    """What is bold in the last lines, where that is an answer."""
    end = text.rstrip()
    for match in reversed(list(_BOLD.finditer(end))):
        said, after = match[2].strip(), end[match.end() :]
        if "=" in after or len(after) > _NEAR_END or "\n\n" in after.strip():
            return None
        number = _NUMBER.match(said)
        few = len(said.split()) <= _FEW_WORDS and not said.endswith((":", ".", ")"))
        if (number and few) or _LETTER.fullmatch(said) or _FORMULA.fullmatch(said):
            return said
    return None


def _last(text: str) -> str | None:
    """The last formula or number of the last sentence that has one."""
    text = text.strip()
    if len(text) <= _SHORT and len(_WORD.findall(text)) <= 1 and "=" not in text:
        return text
    for sentence in reversed(_sentences(text)):
        found = _last_of(_REASON.sub("", sentence)) or _last_of(sentence)
        if found:
            return found
    return None


def _sentences(text: str) -> list[str]:
    """The last of them: a text without end is not cut into pieces from its beginning."""
    text = text[-_LOOKED_AT:]
    parts: list[str] = []
    while text.strip():
        end = max(_first_end(text), 1)
        parts.append(text[:end])
        text = text[end:]
    return parts


def _last_of(sentence: str) -> str | None:
    formulas = list(_FORMULA.finditer(sentence))
    numbers = list(_NUMBER.finditer(_FORMULA.sub(lambda match: " " * len(match[0]), sentence)))
    if formulas and (not numbers or formulas[-1].end() > numbers[-1].end()):
        inside = next(group for group in formulas[-1].groups() if group)
        return _result(inside)
    return _with_unit(numbers[-1]) if numbers else None


def _with_unit(match: re.Match[str]) -> str:
    """The number with what turns its sense round, if that stands before it."""
    before = _BOUND.search(match.string, max(0, match.start() - 20), match.start())
    bound = before[0] if before else ""
    return bound + match["value"].strip() + (match["unit"] or "")


_RULES: tuple[tuple[str, Callable[[str], str | None]], ...] = (
    (BOX, _box),
    (MARK, _mark),
    (SENTENCE, _sentence),
    (BOLD, _bold),
    (LAST, _last),
)
