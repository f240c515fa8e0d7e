"""Units of measurement and of money, and words behind a number for the things that it counts."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from rollpacker.reward.math.latex import DOLLAR, number

_SPELLINGS = {
    "mm": "millimeter millimetre",
    "cm": "centimeter centimetre",
    "dm": "decimeter decimetre",
    "m": "meter metre",
    "km": "kilometer kilometre kms",
    "in": "inch inches",
    "ft": "foot feet",
    "yd": "yard",
    "mi": "mile",
    "mg": "milligram",
    "g": "gram gm gms",
    "kg": "kilogram kilo kgs",
    "lb": "pound lbs",
    "oz": "ounce",
    "t": "tonne ton",
    "ml": "milliliter millilitre mL",
    "l": "liter litre L",
    "gal": "gallon",
    "ms": "millisecond",
    "s": "second sec secs",
    "min": "minute mins",
    "h": "hour hr hrs",
    "day": "",
    "week": "wk",
    "month": "",
    "year": "yr yrs",
    "deg": "degree degrees",
    "degC": "celsius",
    "degF": "fahrenheit",
    "K": "kelvin",
    "rad": "radian",
    "J": "joule",
    "kJ": "kilojoule",
    "N": "newton",
    "W": "watt",
    "kW": "kilowatt",
    "kWh": "",
    "V": "volt",
    "A": "ampere amp",
    "Hz": "hertz",
    "Pa": "pascal",
    "kPa": "",
    "mol": "mole",
    "T": "tesla",
    "cal": "calorie",
    "kcal": "kilocalorie",
    "eV": "",
    "keV": "",
    "MeV": "",
    "GeV": "",
    "rpm": "",
    "bpm": "",
    "AUD": "",
    "CAD": "",
    "mph": "",
    "acre": "",
    "ha": "hectare",
    "%": "percent percentage pct",
    "$": "dollar usd bucks",
    "cent": "¢",
    "€": "euro eur",
    "£": "gbp",
    "¥": "yen yuan rmb cny jpy 元",
    "₹": "rupee rs inr",
    "unit": "",
}
_MULTIPLES = """mm 1/1000 m, cm 1/100 m, dm 1/10 m, km 1000 m, ft 12 in, yd 36 in, mi 63360 in,
    mg 1/1000 g, kg 1000 g, t 1000000 g, lb 16 oz, ml 1/1000 l, ms 1/1000 s, h 60 min, day 1440 min,
    week 10080 min, kJ 1000 J, kW 1000 W, kPa 1000 Pa, kcal 1000 cal, keV 1000 eV, MeV 1000000 eV,
    GeV 1000000000 eV, cent 1/100 $"""
_WORTH = {
    name: (base, Fraction(worth))
    for name, worth, base in (each.split() for each in _MULTIPLES.split(","))
}
_NAMES = {name: unit for unit, names in _SPELLINGS.items() for name in (unit, *names.split())}
_PLURALS = {f"{name}s": unit for name, unit in _NAMES.items() if len(name) > 2}
_KNOWN = _PLURALS | _NAMES
MONEY = {
    DOLLAR: "$",
    "€": "€",
    "£": "£",
    "¥": "¥",
    "₹": "₹",
    "₽": "₽",
    "₩": "₩",
    "₱": "₱",
    "¢": "cent",
}

_OTHER_WORDS = """and or to but not nor is are was be if when where for unless between than at most
    least more less fewer over under above below plus minus times by divided choose
    mod modulo squared cubed factorial half halves third thirds quarter quarters pi
    sin cos tan cot sec csc log ln exp sqrt hundred thousand million billion trillion
    dozen percent point isn doesn no none never either neither maybe wrong incorrect
    false true solution solutions infinity infinitely many root square cube
    incorrectly rejected excluded impossible unlikely exceeds without except through
    negative imaginary score googol tens ones squares cubes roots answers guesses
    candidates options choices values x y n
    nicht kein keine oder aber pas ou non ni o nie niet ist est es"""
_NO_UNITS = frozenset(_OTHER_WORDS.split())  # words behind a number that do not name counted things
_UNUSUAL_PLURALS = """people men women children fish sheep mice geese feet teeth dice deer data old
    long wide tall high deep each total left away apart altogether pizza cake pie
    class group apple clip student person child ticket book coin way number item
    time page point ball card"""

_CHINESE = {
    "平方": " square ", "立方": " cubic ", "千米": " km ", "公里": " km ", "厘米": " cm ",
    "毫米": " mm ", "分米": " dm ", "米": " m ", "小时": " h ", "分钟": " min ", "秒": " s ",
    "千克": " kg ", "公斤": " kg ", "克": " g ", "毫升": " ml ", "升": " l ", "元": " ¥ ",
    "美元": " $ ", "度": " deg ", "每": " per ", "天": " day ", "吨": " t ",
}  # fmt: skip
_CHINESE_UNIT = re.compile("|".join(sorted(_CHINESE, key=len, reverse=True)))
_PEOPLE = frozenset(_UNUSUAL_PLURALS.split())
_COMMAND = re.compile(r"\\[A-Za-z]")
_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_RAISED = re.compile(r"\^\s*(?:\{\s*(-?\d)\s*\}|(-?\d))")
_CIRCLE = re.compile(r"\^\s*\{?\s*\\circ\s*\}?|\\degree(?![A-Za-z])")
_SCALE = re.compile(r"\bdeg(?:ree)?s?\s*(C|F)(?:elsius|ahrenheit)?\b", re.IGNORECASE)
_POWER = re.compile(r"(?<=[a-z])([23])(?![\dA-Za-z])")
_PLACE = re.compile(r"[A-Za-z%$€£¥₹¢元µΩ]+|\^-?\d|[/*]|[㐀-鿿]+|\S")
_SQUARE = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}


@dataclass(frozen=True, slots=True)
class Unit:
    """The unit of a number: ``factors`` are names and powers, sorted, such as ``(("m", 1), ("s",
    -1))`` for ``m/s``. Without one, ``words`` for the counted things."""

    factors: tuple[tuple[str, int], ...] = ()
    words: frozenset[str] = frozenset()

    @property
    def power(self) -> int:
        """1 of a length, 2 of an area."""
        return sum(power for _, power in self.factors)

    @property
    def base(self) -> tuple[Unit | None, Fraction]:
        """Return the base unit and the multiple: m/min and 50/3 for km/h."""
        powers, scale = dict[str, int](), Fraction(1)
        for name, power in self.factors:
            base, worth = _WORTH.get(name, (name, Fraction(1)))
            powers[base] = powers.get(base, 0) + power
            scale *= worth**power
        return _simplified(powers), scale

    def __str__(self) -> str:
        if self.words:
            return " ".join(sorted(self.words))
        return " ".join(name if power == 1 else f"{name}^{power}" for name, power in self.factors)


PERCENT = Unit((("%", 1),))


def money(sign: str) -> Unit:
    """Return the unit of a currency's sign in front of a number."""
    return Unit(((MONEY[sign], 1),))


def agree(one: Unit | None, other: Unit | None) -> bool:
    """Return whether two quantities may be of one kind. A missing unit agrees with every unit."""
    if one is None or other is None or one == other:
        return True
    if one.words and other.words:
        return one.words <= other.words or other.words <= one.words
    if not (one.factors and other.factors):
        return False
    if one.base[0] == other.base[0]:
        return True
    names = {name for name, _ in one.factors}, {name for name, _ in other.factors}
    if {"unit"} in names:
        generic = one if names[0] == {"unit"} else other
        return generic.power == 1 or one.power == other.power
    alike = {"deg", "degC"}, {"deg", "degF"}, {"lb", "£"}
    return names[0] != names[1] and (names[0] | names[1]) in alike


def unit_of(tail: str, letters: bool, single: bool = False) -> Unit | None:
    """Return the unit in the text after a number, as ``latex.tidy`` leaves it, or None if it names
    none.

    ``letters``: a letter right after the number is a unit too. ``single``: the number is at most
    one.
    """
    tail = _RAISED.sub(r"^\1\2", tail)
    marked = bool(_TEXT.search(tail))
    apart = marked or tail[:1].isspace() or tail.startswith("^") or _han(tail)
    text = _CIRCLE.sub(" deg ", _TEXT.sub(r" \1 ", tail))
    if _COMMAND.search(text.replace(r"\cdot", "")):
        return None
    text = text.replace(r"\%", "%").replace(r"\cdot", "*").replace(DOLLAR, "$").replace("{", "")
    text = re.sub(r"[()\\]", " ", text.replace("}", "").replace("·", "*"))
    if _han(text.strip()):
        text = _CHINESE_UNIT.sub(lambda match: _CHINESE[match[0]], text)
    text = _POWER.sub(r"^\1", _SCALE.sub(lambda match: f"deg{match[1].upper()}", text))
    parts = [part for part in _PLACE.findall(text) if part != "."]
    if not parts or len(parts) > 12:
        return None
    known = _measured(parts)
    if known is not None:
        single = len(parts) == 1 and len(parts[0]) == 1 and parts[0].isalpha()
        return known if apart or not single or (letters and parts[0] in "mgshlL") else None
    return _counted(parts, text, single) if apart else None


def _measured(parts: list[str]) -> Unit | None:
    powers: dict[str, int] = {}
    sign, next_power, last = 1, 1, ""
    for part in parts:
        word = part.lower()
        if part.startswith("^"):
            if not last:
                return None
            powers[last] += sign * (int(part[1:]) - 1)
        elif part == "/" or word in ("per", "each"):
            sign = -1
        elif part == "*":
            continue
        elif word in _SQUARE:
            next_power = _SQUARE[word]
        elif word in ("squared", "cubed") and last:
            powers[last] += sign * (1 if word == "squared" else 2)
        else:
            name = _KNOWN.get(part) or _KNOWN.get(word)
            if name is None and "/" in parts and part.isalpha() and len(part) > 1:
                name = _stem(word)
            if name is None or word in _NO_UNITS - {"percent"}:
                return None
            last = name
            powers[name] = powers.get(name, 0) + sign * next_power
            next_power = 1
    return _simplified(powers)


def _simplified(powers: dict[str, int]) -> Unit | None:
    if "mph" in powers:
        del powers["mph"]
        powers |= {"mi": 1, "h": -1}
    factors = tuple(sorted((name, power) for name, power in powers.items() if power))
    return Unit(factors) if factors else None


def _counted(parts: list[str], text: str, single: bool) -> Unit | None:
    # Words that are no unit of measurement, as in "72 clips" and in 12 and a Chinese measure word.
    if any(each.isdigit() for each in text) or len(parts) > 6:
        return None
    words = [part.lower() for part in parts]
    if words[0] == "of" and len(words) > 1:
        words = words[1:]
        part_of = words[0] in ("the", "a", "an", "all", "his", "her", "their", "its")
        words = words[1:] if part_of and len(words) > 1 else ["of"]
    if not all(word.isalpha() or word in "-'" for word in words):
        return None
    if any(_says_more(word) for word in words) or any(each in "不非没無无错假误" for each in text):
        return None
    plural = _han(words[-1]) or words[-1].endswith("s") or words[-1] in _PEOPLE
    if not (plural or (single and text.isascii())):
        return None
    return Unit(words=frozenset(_stem(word) for word in words if len(word) > 2 or _han(word)))


def _says_more(word: str) -> bool:
    ordinal = word.endswith(("th", "ths", "illion", "illions", "ly"))
    return word in _NO_UNITS or number(word) is not None or ordinal


def _han(text: str) -> bool:
    return bool(text) and "㐀" <= text[0] <= "鿿"


def _stem(word: str) -> str:
    if word.endswith("ies") and len(word) > 4:
        return word[:-3] + "y"
    return word[:-1] if word.endswith("s") and not word.endswith("ss") else word
