"""Whether two answers are the same one, and why."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

from latex2sympy2_extended import NormalizationConfig
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from rollpacker.reward.math import units
from rollpacker.reward.math.answer import Answer
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
"""Relative difference of a decimal fraction to what it rounds."""
_LEAST_DECIMALS = 6
"""Of a decimal fraction that may stand for what it rounds, as in math-verify."""
_DECIMALS = re.compile(r"-?\d*\.(\d+)")
_SAID = re.compile(r"[a-z]{2,}(?:[ '-][a-z]+)*", re.IGNORECASE)
_FILL = re.compile(r"[\s{}$]+|\\[,;:! ]")
_JOINED = re.compile(r"(?:,|\band\b)\s*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Whether the answers are equal, and the rule that said so."""

    equal: bool
    why: str


def compare(gold: Answer, answer: Answer) -> Comparison:
    """Compare a response's answer with the row's.

    Numbers are compared exactly, lists in any order, units where both sides name one, words as
    text, and everything else by math-verify.
    """
    if gold.choice or answer.choice:
        return _choices(gold, answer)
    if letters := _several(gold, answer):
        return letters
    if not units.agree(gold.unit, answer.unit):
        return Comparison(False, f"units differ: {gold.unit} and {answer.unit}")
    if None not in (gold.relative, answer.relative) and gold.relative != answer.relative:
        return Comparison(False, f"{gold.relative} and {answer.relative} differ")
    if None not in (gold.variable, answer.variable) and gold.variable != answer.variable:
        return Comparison(False, f"values of {gold.variable} and of {answer.variable}")
    if gold.value is not None and answer.value is not None:
        equal = _numbers(gold, answer)
        return Comparison(equal, f"numbers {'equal' if equal else 'differ'}")
    if gold.items and answer.items:
        return _lists(gold, answer)
    if _same_text(gold.text, answer.text):
        return Comparison(True, "the same text")
    if gold.literal or answer.literal:
        return Comparison(False, "words, dates and times must be equal as text")
    equal = bool(answer.text) and _symbolic(gold.text, answer.text)
    return Comparison(equal, "equal by math-verify" if equal else "not shown equal by math-verify")


def _several(gold: Answer, answer: Answer) -> Comparison | None:
    """Choices in a list against their letters in one word; None where that is not compared."""
    for word, other in ((gold, answer), (answer, gold)):
        if other.items and all(item.choice for item in other.items) and word.literal:
            named = sorted(str(item.choice) for item in other.items)
            equal = named == sorted(word.text)
            return Comparison(equal, f"choices {'equal' if equal else 'differ'}")
    return None


def _choices(gold: Answer, answer: Answer) -> Comparison:
    if gold.choice and answer.choice:
        if gold.choice != answer.choice:
            return Comparison(False, f"choices differ: {gold.choice} and {answer.choice}")
        return Comparison(True, "the same choice")
    chosen, other = (gold, answer) if gold.choice else (answer, gold)
    if not chosen.text:
        return Comparison(False, f"choice {chosen.choice} against what is no choice")
    content = Answer(chosen.text, value=chosen.value)
    return compare(content, other) if chosen is gold else compare(other, content)


def _numbers(gold: Answer, answer: Answer) -> bool:
    one, other = gold.value, answer.value
    if one is None or other is None:
        return False
    if gold.unit == PERCENT and answer.unit != PERCENT:
        return _close(one, other, gold, answer) or _close(one / 100, other, gold, answer)
    if answer.unit == PERCENT and gold.unit != PERCENT:
        return _close(one, other, gold, answer) or _close(one, other / 100, gold, answer)
    return _close(one, other, gold, answer)


def _close(one: Fraction, other: Fraction, gold: Answer, answer: Answer) -> bool:
    if one == other:
        return True
    rounded = [
        len(match[1])
        for match in (_DECIMALS.fullmatch(gold.text), _DECIMALS.fullmatch(answer.text))
        if match
    ]
    if not rounded or min(rounded) < _LEAST_DECIMALS:
        return False
    apart = abs(one - other)
    most = _SAME_DIGITS * max(abs(one), abs(other))
    return apart < Fraction(1, 10 ** min(rounded)) and apart <= most


def _lists(gold: Answer, answer: Answer) -> Comparison:
    """Every item has its equal on the other side, each once."""
    if len(gold.items) != len(answer.items):
        counts = f"{len(gold.items)} and {len(answer.items)}"
        return Comparison(False, f"lists of different lengths: {counts}")
    if len(gold.items) > _MOST_ITEMS:
        equal = _same_text(gold.text, answer.text)
        return Comparison(equal, f"a list of more than {_MOST_ITEMS}, compared as text")
    left = list(answer.items)
    for item in gold.items:
        for place, other in enumerate(left):
            if compare(item, other).equal:
                del left[place]
                break
        else:
            return Comparison(False, f"nothing equals {item.text}")
    return Comparison(True, "lists equal")


def _same_text(gold: str, answer: str) -> bool:
    """Equal but for spaces and braces; words in any case (letters alone are variables)."""
    if _FILL.sub("", gold) == _FILL.sub("", answer):
        return bool(gold)
    gold, answer = _words(gold), _words(answer)
    return gold == answer and bool(_SAID.search(gold))


def _words(text: str) -> str:
    return " ".join(_JOINED.sub(" ", text.replace("\\text", "").strip("{} .!")).lower().split())


def _symbolic(gold: str, answer: str) -> bool:
    # The limit is ours: math-verify's own is in wall seconds, which a busy machine stretches.
    reference = _parsed(gold)
    found = _parsed(answer)
    if not reference or not found:
        return False
    return verify(list(reference), list(found), timeout_seconds=0, allow_set_relation_comp=True)


@lru_cache(maxsize=4096)
def _parsed(text: str) -> tuple[Any, ...]:
    text = text.replace("$", "")
    return tuple(parse(f"${text}$", _EXTRACTION, parsing_timeout=0))
