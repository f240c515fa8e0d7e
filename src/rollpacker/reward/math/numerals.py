"""Numerals as exact numbers: decimals, thousands, powers of ten, fractions, words."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache

from rollpacker.reward.math.latex import closing

_LONGEST = 400
PLAIN = r"\d+(?:\.\d*)?|\.\d+"
_GROUPED = re.compile(
    r"\d{1,3}(?:,\d{3})+(?![\d,])|\d{1,3}(?:[ '_]\d{3})+(?![\d ])"
    r"|\d{1,2}(?=(?:,\d\d)*,0\d)(?:,\d\d)+,\d{3}(?![\d,])"  # lakhs; 1,20,300 may be a list
)
_DIGITS = re.compile(rf"({PLAIN})(?:[eE]([+-]?\d{{1,4}}))?")
_SCIENTIFIC = re.compile(
    rf"({PLAIN})\s*(?:\\times|\\cdot|\*|x)\s*10\s*\^\s*\{{?\s*([+-]?\d{{1,4}})\s*\}}?"
)
_POWER_OF_TEN = re.compile(r"10\s*\^\s*\{?\s*([+-]?\d{1,4})\s*\}?")
_REPEATING = re.compile(r"(\d*)\.(\d*)\\(?:overline|bar|dot)\s*\{?(\d+)\}?")
_DIGITS_OF = "零一二三四五六七八九"
_HAN = re.compile("[一二三四五六七八九]?十[一二三四五六七八九]?|[零一二三四五六七八九]")
_BRACKETED = re.compile(r"(\d*)\.(\d*)\((\d+)\)")
_OUT_OF = re.compile(r"(\d+)\s+out\s+of\s+(\d+)")
_GOES_ON = re.compile(r"(\d*)\.(\d*?)(?:(\d)\3{2,}|(\d{2,6}?)\4+)(?:\.{2,}|…|\\[lc]?dots)")
_FRACTION = re.compile(rf"\\frac\s*\{{\s*(-?(?:{PLAIN}))\s*\}}\s*\{{\s*(-?(?:{PLAIN}))\s*\}}")
_SLASH = re.compile(rf"({PLAIN})\s*/\s*({PLAIN})")
_MIXED = re.compile(r"(\d+)(?:\s*\\frac\s*\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\}|[ -](\d+)/(\d+))")
_MAGNITUDES = {
    "hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12, "万": 4, "亿": 8,
}  # fmt: skip
MAGNITUDE = re.compile(
    rf"\s*(?:\\text\s*\{{\s*)?({'|'.join(_MAGNITUDES)})s?(?![A-Za-z])(?:\s*\}})?"
)
_TO_NINETEEN = """zero one two three four five six seven eight nine ten eleven twelve thirteen
    fourteen fifteen sixteen seventeen eighteen nineteen"""
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
_WORTH = {word: value for value, word in enumerate(_TO_NINETEEN.split())} | {
    word: 10 * value for value, word in enumerate(_TENS.split(), 2)
}
_ORDINALS = "third fourth fifth sixth seventh eighth ninth tenth"
_PARTS = {"half": 2, "halves": 2, "quarter": 4, "quarters": 4} | {
    name + plural: part for part, name in enumerate(_ORDINALS.split(), 3) for plural in ("", "s")
}
_SAID = rf"(?:{'|'.join([*_WORTH, *_PARTS, *list(_MAGNITUDES)[:5]])})(?![a-z])"
SPOKEN = rf"(?:(?:minus|negative)\s+)?{_SAID}(?:(?:\s*-\s*|,?\s+and\s+|,?\s+)(?:an?\s+)?{_SAID})*"
"""All that belongs to a number in English words: "one" of "twenty-one" is none."""
_SPOKEN = re.compile(rf"(?:an?\s+)?{SPOKEN}", re.IGNORECASE)


@lru_cache(maxsize=4096)
def number(text: str) -> Fraction | None:
    """The exact value of a numeral or a fraction of two; None where ``text`` is neither."""
    text = text.strip()
    if not text or len(text) > _LONGEST:
        return None
    over, of, under = text.partition("分之")
    if of and _HAN.fullmatch(over) and _HAN.fullmatch(under):
        parts, count = number(over), number(under)
        return count / parts if count is not None and parts else None
    if _HAN.fullmatch(text):
        tens, ten, ones = text.rpartition("十")
        worth = (10 * (_DIGITS_OF.index(tens) if tens else 1)) if ten else 0
        return Fraction(worth + (_DIGITS_OF.index(ones) if ones else 0))
    if _SPOKEN.fullmatch(text):
        return _spoken(text.lower())
    if text.startswith("{") and closing(text, 1) == len(text) - 1:
        text = text[1:-1].strip()
    if text[:1] in ("-", "+"):
        value = _unsigned(text[1:].strip())
        return -value if value is not None and text[0] == "-" else value
    return _unsigned(text)


def _spoken(text: str) -> Fraction | None:
    """Of "one hundred and five", "two thirds", "two and a half"; None where it is no number."""
    if text.startswith(("minus ", "negative ")):
        value = _spoken(text.partition(" ")[2])
        return None if value is None else -value
    *whole, last = re.split(r"\s+and\s+", text)
    words = re.split(r"[-\s,]+", last)
    if words[-1] in _PARTS:
        over = _integer(words[:-1]) if words[:-1] else int(words[-1] == "half")
        rest = _integer(re.split(r"[-\s,]+", " ".join(whole))) if whole else 0
        return None if rest is None or not over else rest + Fraction(over, _PARTS[words[-1]])
    value = _integer(re.split(r"(?:[-\s,]|\band\b)+", text))
    return None if value is None else Fraction(value)


def _integer(words: list[str]) -> int | None:
    total = group = 0
    for word in words:
        if word in _WORTH:
            if group % 100 and not (group % 10 == 0 and group % 100 > 10 and 0 < _WORTH[word] < 10):
                return None
            group += _WORTH[word]
        elif word in ("a", "an") and not group:
            group = 1
        elif word == "hundred" and 0 < group < 100:
            group *= 100
        elif word in _MAGNITUDES and word != "hundred" and group:
            total, group = total + group * 10 ** _MAGNITUDES[word], 0
        else:
            return None
    return total + group


def _unsigned(text: str) -> Fraction | None:
    magnitude = 0
    if match := MAGNITUDE.search(text):
        if match.end() != len(text) or not match.start():
            return None
        magnitude, text = _MAGNITUDES[match[1]], text[: match.start()].strip()
    text = _GROUPED.sub(lambda match: re.sub(r"[,\s'_]", "", match[0]), text)
    for form, value in _FORMS:
        if match := form.fullmatch(text):
            try:
                return value(match) * 10**magnitude
            except ZeroDivisionError:
                return None
    return None


def _repeating(match: re.Match[str]) -> Fraction:
    """Of ``0.1\\overline{6}`` and of ``0.1666...``."""
    whole, fixed, again = match[1] or "0", match[2], next(g for g in match.groups()[2:] if g)
    start = Fraction(int(whole + fixed), 10 ** len(fixed))
    return start + Fraction(int(again), 10 ** len(fixed) * (10 ** len(again) - 1))


def _mixed(match: re.Match[str]) -> Fraction:
    over, under = int(match[2] or match[4]), int(match[3] or match[5])
    return int(match[1]) + Fraction(over, under)


_FORMS: tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], Fraction]], ...] = (
    (_DIGITS, lambda m: Fraction(m[1]) * Fraction(10) ** int(m[2] or 0)),
    (_SCIENTIFIC, lambda m: Fraction(m[1]) * Fraction(10) ** int(m[2])),
    (_POWER_OF_TEN, lambda m: Fraction(10) ** int(m[1])),
    (_FRACTION, lambda m: Fraction(m[1]) / Fraction(m[2])),
    (_SLASH, lambda m: Fraction(m[1]) / Fraction(m[2])),
    (_MIXED, _mixed),
    (_REPEATING, _repeating),
    (_BRACKETED, _repeating),
    (_OUT_OF, lambda m: Fraction(int(m[1]), int(m[2]))),
    (_GOES_ON, _repeating),
)
