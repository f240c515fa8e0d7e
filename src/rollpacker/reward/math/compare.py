"""Decides whether two answers are the same, and by which rule."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from typing import Any

from latex2sympy2_extended import NormalizationConfig
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from rollpacker.reward.math import exact, units
from rollpacker.reward.math.answer import MathAnswer, huge, read
from rollpacker.reward.math.units import PERCENT

_EXTRACTION = (
    LatexExtractionConfig(
        normalization_config=NormalizationConfig(
            basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none"
        )
    ),
    ExprExtractionConfig(),
)
_MOST_ITEMS = 64
_SAME_DIGITS = Fraction(2, 1_000_000)
"""Relative difference between a decimal fraction and the number that it rounds."""
_LEAST_DECIMALS = 6  # least decimals of a fraction that may round another number, as in math-verify
_FLOAT_DECIMALS = 12
_DECIMALS = re.compile(r"-?\d*\.(\d+)")
_TUPLE = re.compile(r"\(([^()\[\]{}]*,[^()\[\]]*)\)")
_OR = re.compile(r"(?<![A-Za-z])or(?![A-Za-z])|([a-z])\s*=.*\1\s*=")
_RELATION = re.compile(r"[<>]|\\[lg]e(?![A-Za-z])")
_INFINITE = re.compile(r"[-+]?\s*\\infty")
_SAID = re.compile(r"[a-z]{2,}(?:[ '-][a-z]+)*", re.IGNORECASE)
_LETTER = re.compile(r"(?<![\\A-Za-z])[A-Za-z](?![A-Za-z])")
_CAPITALS = re.compile(r"[A-Z]{1,3}")
_CONSTANT = re.compile(r"\+\s*[CcKk]$")  # the constant of an integral, under any name
_FILL = re.compile(r"[\s$]+|(?<!\\)\\[,;:! ]|\{(?=[^{}]\})|(?<=\{.)\}")
_JOINED = re.compile(r"(?:,|\band\b)\s*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Equality:
    """Whether the answers are equal, and the rule that decided."""

    equal: bool
    why: str


def compare(gold: MathAnswer, answer: MathAnswer) -> Equality:
    """Compare a response's answer with the row's. Numbers are compared exactly, lists in any order,
    units if both sides name one, words as text, and everything else by math-verify."""
    for claim in answer.claims:
        near = answer.rough and _nearly(claim, answer)
        if not near and not _compared(answer, claim).equal:
            return Equality(False, f"its own sides differ: {claim.text} and {answer.text}")
    return _compared(gold, answer)


def _nearly(one: MathAnswer, other: MathAnswer) -> bool:
    values = _approximate(one), _approximate(other)
    if values[0] is None or values[1] is None:
        return False
    return abs(values[0] - values[1]) <= abs(values[1]) / 50


def _approximate(answer: MathAnswer) -> float | None:
    if answer.literal or (answer.value is None and huge(answer.text)):
        return None
    try:
        return float(_parsed(answer.text)[0] if answer.value is None else answer.value)
    except (IndexError, TypeError, ValueError, OverflowError):
        return None


def _compared(gold: MathAnswer, answer: MathAnswer) -> Equality:
    answer = _converted(answer, gold)
    for rule in (_choices, _several, _conflict, _valued, _listed, _shapes, _worded):
        if decided := rule(gold, answer):
            return decided
    equal = bool(answer.text) and _symbolic(gold.text, answer.text)
    return Equality(equal, "equal by math-verify" if equal else "not shown equal by math-verify")


def _converted(answer: MathAnswer, gold: MathAnswer) -> MathAnswer:
    # ``answer`` in the unit of ``gold``, if both are of one kind.
    one, other = answer.unit, gold.unit
    if one is None or other is None or one == other or one.words:
        return answer
    (kind, many), (wanted, other_many) = one.base, other.base
    if kind != wanted:
        return answer
    scale = many / other_many
    if answer.value is not None:
        return replace(answer, text="", value=answer.value * scale, unit=other)
    return replace(answer, text=rf"({answer.text}) \cdot {scale}", unit=other)


def _conflict(gold: MathAnswer, answer: MathAnswer) -> Equality | None:
    if not units.agree(gold.unit, answer.unit):
        return Equality(False, f"units differ: {gold.unit} and {answer.unit}")
    if None not in (gold.relative, answer.relative) and gold.relative != answer.relative:
        return Equality(False, f"{gold.relative} and {answer.relative} differ")
    if None not in (gold.variable, answer.variable) and gold.variable != answer.variable:
        return Equality(False, f"values of {gold.variable} and of {answer.variable}")
    return None


def _valued(gold: MathAnswer, answer: MathAnswer) -> Equality | None:
    if gold.value is not None and answer.value is not None:
        lowest = f"{gold.value.numerator}:{gold.value.denominator}"
        if gold.literal and gold.text.replace(" ", "") != lowest:
            return None  # 12:30 is a time; 5:12 may be a ratio
        equal = _numbers(gold, answer)
        return Equality(equal, f"numbers {'equal' if equal else 'differ'}")
    return None


def _listed(gold: MathAnswer, answer: MathAnswer) -> Equality | None:
    if gold.items and answer.items:
        return _lists(gold, answer)
    if (gold.items and answer.value is not None) or (answer.items and gold.value is not None):
        return Equality(False, "a list and a number")
    return None


def _worded(gold: MathAnswer, answer: MathAnswer) -> Equality | None:
    if _same_text(gold.text, answer.text):
        return Equality(True, "the same text")
    if gold.literal or answer.literal:
        return Equality(False, "words, dates and times must be equal as text")
    if _INFINITE.fullmatch(gold.text) or huge(gold.text) or huge(answer.text):
        equal = gold.text.lstrip("+ ") == answer.text.lstrip("+ ")
        return Equality(equal, "compared as text: infinite, or too large to work out")
    return None


def _shapes(gold: MathAnswer, answer: MathAnswer) -> Equality | None:
    # A tuple against a list. A list is ordered only by its variables.
    for one, other in ((gold, answer), (answer, gold)):
        inside = _TUPLE.fullmatch(one.text)
        if inside is None or not other.items:
            continue
        elements = [read(part.strip()) for part in inside[1].split(",")]
        if other.text.startswith(r"\{") or _OR.search(other.text):
            return Equality(False, "a tuple and a set")
        items = sorted(other.items, key=lambda item: item.variable or "")
        if len({item.variable for item in items}) < len(items) and items[0].variable:
            return Equality(False, "a tuple and values of one variable")
        same = len(items) == len(elements) and all(
            _compared(replace(item, variable=None), element).equal
            for item, element in zip(items, elements, strict=True)
        )
        return Equality(same, f"a tuple and a list: {'equal' if same else 'not equal'} in order")
    sets = gold.text.startswith(r"\{"), answer.text.startswith(r"\{")
    tuples = _TUPLE.fullmatch(gold.text), _TUPLE.fullmatch(answer.text)
    if (sets[0] and tuples[1]) or (sets[1] and tuples[0]):
        return Equality(False, "a tuple and a set")
    lists = gold.items or answer.items
    related = _RELATION.search(answer.text if gold.items else gold.text)
    return Equality(False, "a list and a relation") if lists and related else None


def _several(gold: MathAnswer, answer: MathAnswer) -> Equality | None:
    # Choices in a list against their letters in one word; None otherwise.
    for word, other in ((gold, answer), (answer, gold)):
        if other.items and all(item.choice for item in other.items) and word.literal:
            named = sorted(str(item.choice) for item in other.items)
            equal = named == sorted(word.text)
            return Equality(equal, f"choices {'equal' if equal else 'differ'}")
    return None


def _choices(gold: MathAnswer, answer: MathAnswer) -> Equality | None:
    if not (gold.choice or answer.choice):
        return None
    if gold.choice and not gold.text and re.fullmatch("[a-d]", answer.text):
        answer = MathAnswer("", choice=answer.text.upper())
    if gold.choice and answer.choice:
        if gold.choice != answer.choice:
            return Equality(False, f"choices differ: {gold.choice} and {answer.choice}")
        return Equality(True, "the same choice")
    chosen, other = (gold, answer) if gold.choice else (answer, gold)
    if not chosen.text:
        return Equality(False, f"choice {chosen.choice} against an answer without a choice")
    content = MathAnswer(chosen.text, value=chosen.value)
    return compare(content, other) if chosen is gold else compare(other, content)


def _numbers(gold: MathAnswer, answer: MathAnswer) -> bool:
    one, other = gold.value, answer.value
    if one is None or other is None:
        return False
    if gold.unit == PERCENT and answer.unit != PERCENT:
        return _close(one, other, gold, answer) or _close(one / 100, other, gold, answer)
    if answer.unit == PERCENT and gold.unit != PERCENT:
        # "50%" may stand for 50, but "0.5%" never stands for 0.5.
        percent = one > 1 and _close(one, other, gold, answer)
        return percent or _close(one, other / 100, gold, answer)
    return _close(one, other, gold, answer)


def _close(one: Fraction, other: Fraction, gold: MathAnswer, answer: MathAnswer) -> bool:
    if one == other:
        return True
    digits = [_DECIMALS.fullmatch(side.text) for side in (gold, answer)]
    if digits[0] and digits[1] and len(digits[0][1]) >= _FLOAT_DECIMALS > len(digits[1][1]):
        # The row's number is a float's repr: 0.30000000000000004, or 3.299999952316284 of 32 bits.
        return Fraction(f"{Decimal(digits[0][0]):.6g}") == other
    rounded = [len(match[1]) for match in digits if match]
    if not rounded or min(rounded) < _LEAST_DECIMALS:
        return False
    apart = abs(one - other)
    most = _SAME_DIGITS * max(abs(one), abs(other))
    return apart < Fraction(1, 10 ** min(rounded)) and apart <= most


def _lists(gold: MathAnswer, answer: MathAnswer) -> Equality:
    if len(gold.items) != len(answer.items):
        counts = f"{len(gold.items)} and {len(answer.items)}"
        return Equality(False, f"lists of different lengths: {counts}")
    if len(gold.items) > _MOST_ITEMS:
        equal = _same_text(gold.text, answer.text)
        return Equality(equal, f"a list of more than {_MOST_ITEMS}, compared as text")
    left = list(answer.items)
    for item in gold.items:
        for place, other in enumerate(left):
            if compare(item, other).equal:
                del left[place]
                break
        else:
            return Equality(False, f"nothing equals {item.text}")
    return Equality(True, "lists equal")


def _same_text(gold: str, answer: str) -> bool:
    # Equal except for spaces and braces. Words match in any case; letters alone are variables.
    if _FILL.sub("", gold) == _FILL.sub("", answer):
        return bool(gold)
    if _CAPITALS.fullmatch(gold):
        return False
    gold, answer = _words(gold), _words(answer)
    return gold == answer and bool(_SAID.search(gold))


def _words(text: str) -> str:
    return " ".join(_JOINED.sub(" ", text.replace("\\text", "").strip("{} .!")).lower().split())


def _symbolic(gold: str, answer: str) -> bool:
    # No time limit here: math-verify's is in wall seconds, which a busy machine stretches.
    if _CONSTANT.search(gold):
        answer = _CONSTANT.sub("+ C", answer)
    letters = set(_LETTER.findall(gold)), set(_LETTER.findall(answer))
    if letters[0] != letters[1] and {*map(str.lower, letters[0])} == {*map(str.lower, letters[1])}:
        return False
    reference = _parsed(gold)
    found = _parsed(answer)
    if not reference or not found:
        return False
    equal = exact.equal(reference[0], found[0])
    if equal is not None:
        return equal
    return verify(list(reference), list(found), timeout_seconds=0, allow_set_relation_comp=True)


@lru_cache(maxsize=4096)
def _parsed(text: str) -> tuple[Any, ...]:
    text = text.replace("$", "")
    return tuple(parse(f"${text}$", _EXTRACTION, parsing_timeout=0))
