"""Reads an answer: a number and its unit, a choice, a list, or LaTeX and words."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from math import gcd

from rollpacker.reward.math import units
from rollpacker.reward.math.latex import DOLLAR, MAGNITUDE, PLAIN, closing, number, tidy, unwrapped
from rollpacker.reward.math.prose import counted, without_reasons
from rollpacker.reward.math.units import Unit

# Inequalities in one variable as the intervals that they describe.

_BOUNDED = re.compile(r"([a-zA-Z])\s*(<|>|\\le|\\ge|\\leq|\\geq|<=|>=)\s*([^<>=a-zA-Z]+)")
_EXCEPT = re.compile(r"([a-z])\s*\\ne\s*([^<>=a-zA-Z,\\]+)")
_DOWNWARDS = re.compile(r"([^<>=\\]+?)\s*(>|\\ge)\s*([a-zA-Z])\s*(>|\\ge)\s*([^<>=\\]+)")
_EITHER = re.compile(r"(?<![A-Za-z])or(?![A-Za-z])|\\(?:lor|vee)(?![A-Za-z])|或")


def of_one(text: str) -> str | None:
    """Return ``x \\ne 2`` as intervals, and ``3 > x > 1`` the usual way round, or None for other
    texts."""
    if match := _EXCEPT.fullmatch(text):
        return rf"(-\infty, {match[2]}) \cup ({match[2]}, \infty)"
    if match := _DOWNWARDS.fullmatch(text):
        upper, first, variable, second, lower = match.groups()
        return f"{lower} {_turned(second)} {variable} {_turned(first)} {upper}"
    return None


def of_list(parts: list[str], text: str) -> str | None:
    """Return ``x < 1 or x > 3`` or ``x > 1, x < 3`` as intervals, or None for other lists. ``text``
    is the whole list, which shows how ``parts`` are joined."""
    matches = [match for part in parts if (match := _BOUNDED.fullmatch(part))]
    if len(matches) < len(parts) or len({match[1] for match in matches}) != 1:
        return None
    above = [match for match in matches if match[2] in (">", ">=", r"\ge")]
    below = [match for match in matches if match not in above]
    lefts = [("(" if match[2] == ">" else "[") + match[3].strip() for match in above]
    rights = [match[3].strip() + (")" if match[2] == "<" else "]") for match in below]
    if _EITHER.search(text):
        intervals = [rf"(-\infty, {right}" for right in rights]
        intervals += [rf"{left}, \infty)" for left in lefts]
        return r" \cup ".join(intervals)
    return f"{lefts[0]}, {rights[0]}" if len(lefts) == len(rights) == 1 else None


def _turned(sign: str) -> str:
    return "<" if sign == ">" else r"\le"


# Whether math-verify reads all of a text. It drops unknown parts and evaluates the rest, so that
# ``5 \ne x`` would be 5. Other texts are compared as they are.

_COMMANDS = """frac sqrt pi theta alpha beta gamma delta epsilon varepsilon lambda mu nu xi phi
    varphi omega sigma rho tau psi chi eta zeta Gamma Delta Omega Phi Psi Sigma Theta
    Lambda sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln exp lg
    infty cdot times div le ge cup cap setminus emptyset pm mp binom mathbb begin end
    overline bar lfloor rfloor lceil rceil gcd lcm max min det angle triangle prime
    sum prod int partial over"""
_KNOWN = frozenset(_COMMANDS.split())
_NAMES = (
    """sqrt sinh cosh tanh coth arcsin arccos arctan asin acos atan frac cdot times floor ceil"""
)
_FUNCTIONS = frozenset(_NAMES.split())
_COMMAND = re.compile(r"\\([A-Za-z]+)")
_CONDITIONAL = re.compile(
    r"\\(?:sum|prod|int)(?!\s*_)|(?:^|[^)\]}\s])\s*\\(?:cup|cap|setminus)|\\(?:cup|cap|setminus)(?!\s*[(\[\\])"
)
_LATEX_MATRIX = re.compile(r"\\begin\s*\{([bpvBV]?matrix|array)\}.*?\\end\s*\{\1\}", re.DOTALL)
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{4,}(?![A-Za-z])")
_NOT = re.compile(r"(?<![A-Za-z\\])(?:not|no|nor)(?![A-Za-z])", re.IGNORECASE)
_LATEX_TEXT = re.compile(r"\\text\s*\{\s*[^{}\s]")
_STRANGE = re.compile(r"[^\x20-\x7e]|\.\.|[$;?\"#@`~]|\\\\|!=|:=|&")
_SEPARATE = re.compile(r"(?<![_^\d.])\d[\d.]*\s+\d|\d\s*\|\s*\d|\d\s*\\[{}]\s*\d")
_ENDS = re.compile(r"^(?:[*/^=_&|]+(?!.*\|)|[<>]|\\(?:le|ge|in|times|cdot|cup|cap)(?![A-Za-z]))")
_OPEN_END = re.compile(
    r"[-+*/^=<>_]$|\\(?:le|ge|in|times|cdot|cup|cap|pm|frac)$|\\sqrt(?!\s*(?:\[\w+\]\s*)?\{)"
    r"|\\(?:(?:arc)?(?:sin|cos|tan|cot)h?|sec|csc|log|ln|lg|exp)(?:\s*[_^]\s*(?:\{[^{}]*\}|\w))*"
    r"\s*(?:$|[-+*/=,)\]}&])"
)
_TWICE = re.compile(r"\\pm\s*\\pm|[-+*/]\s*[*/]|[*/^=<>]\s*=?\s*[+*/^=>]")
_BRACKET = re.compile(r"[(\[{}\])]")
_DEEPEST = 24
_HUGE = re.compile(
    r"\^\s*\{?\s*[\d\s]*\^|\^\s*\{[^{}]*\^|\^\s*\{?\s*\d{6,}|\)\s*\^\s*\{?\s*\d{3,}|\d{5,}\s*!"
    r"|!\s*!|\\(?:sum|prod)|\\binom\s*\{\s*\d{5,}"
)


def readable(text: str) -> bool:
    """Return whether math-verify reads all of ``text``, as ``latex.tidy`` leaves it."""
    if _LATEX_TEXT.search(text) or _NOT.search(text) or _CONDITIONAL.search(text):
        return False
    bare = _LATEX_MATRIX.sub(" ", text)
    if any(name not in _KNOWN for name in _COMMAND.findall(bare)):
        return False
    if any(word not in _FUNCTIONS for word in _WORD.findall(_COMMAND.sub(" ", bare))):
        return False
    for wrong in (_STRANGE, _SEPARATE, _ENDS, _OPEN_END, _TWICE):
        if wrong.search(bare.strip()):
            return False
    return bare.count("|") % 2 == 0 and _balanced(bare)


def _balanced(text: str) -> bool:
    # Brackets may be of different kinds: ``[2, 5)`` is an interval.
    depth = 0
    for bracket in _BRACKET.findall(text):
        depth += 1 if bracket in "([{" else -1
        if not 0 <= depth <= _DEEPEST:
            return False
    return depth == 0


def huge(text: str) -> bool:
    """Return whether the value may have too many digits or terms to compute in time."""
    return bool(_HUGE.search(text))


_LONGEST = 2000
"""Characters of an answer that is read. A longer one is compared as text."""

_LABEL = re.compile(
    r"(?:\\text\s*\{\s*)?(?:(?:so|thus|therefore|hence),?\s+)?(?:the\s+)?(?:final\s+|correct\s+)?"
    r"(?:answers?|ans|result|solutions?|answer is|答案)\s*(?:is|are|是|为|=|:)\s*:?\s*(?:\}\s*)?",
    re.IGNORECASE,
)
_WRONG = re.compile(
    r"\b(?:not|no|never|wrong|incorrect|false|bad|except|other|unlike)\b|n't", re.IGNORECASE
)
_ABOUT_EQUAL = re.compile(r"\\approx(?![A-Za-z])")
_EQUALS = re.compile(r"(?<![<>!:=\\])=(?!=)")
_UNKNOWN = re.compile(r"(?<![\\A-Za-z])[A-Za-z]+(?![A-Za-z({])")
_FEW_WORDS = 4
_COLON = re.compile(r"[a-zA-Z]\s*:\s+(?=[-\d\\])")
_SO = re.compile(r"(?:so|thus|therefore|hence|then),?\s+", re.IGNORECASE)
_TEXT_LABEL = re.compile(r"\\text\s*\{[^{}]*[:=]\s*\}\s*")
_ABOUT = re.compile(
    r"(?:\\text\s*\{\s*)?(?:\\approx(?![A-Za-z])|\\sim(?![A-Za-z])|about|approximately|approx\.?"
    r"|roughly|around|exactly|a total of|in total|only|just|it is|it's)(?:\s*\})?\s*(?=[-+\d$.\\"
    f"{DOLLAR}])",
    re.IGNORECASE,
)
_ELEMENT = re.compile(r"[a-zA-Z]\s*\\in(?![A-Za-z])\s*(?=[\[(\\])")
_VARIABLE = re.compile(
    r"([a-zA-Z](?:_\{?\w\}?)?|[a-zA-Z]\([^()=]{1,12}\)|\\(?:max|min)|\\angle\s*[A-Z]{1,3})"
    r"\s*=\s*(?![=<>])"
)
_MATRIX = re.compile(r"([A-Za-z](?:_\{?\w\}?)?(?:\s*\^\s*\{?(?:-1|T)\}?)?)\s*=\s*(?=\\begin)")
_IMPLIES = re.compile(r"\\(?:implies|Rightarrow|Longrightarrow|iff|therefore)(?![A-Za-z])|⇒|∴")
_ROUGHLY = re.compile(r"\s*(?:\\text\s*\{)?\s*\(?approx(?:imately|\.)?\)?\s*\}?$")
_MODULUS = re.compile(
    r"\s*(?:\(\s*)?\\?(?:text\s*\{\s*)?(?:[bp]?mod|modulo)(?:\s*\})?\s*\{?\s*(\d+)\s*\}?\s*\)?$"
)
_RELATIVE = (
    (_MODULUS, "modulo"),
    (re.compile(r"(?<=\d)_\{?(?:\\text\{)?(\d{1,2}|two|eight|ten|sixteen)\}{0,2}$"), "base"),
)
_CLOCK = re.compile(r"(\d{1,2}:\d{2}(?::\d{2})?)\s*(?:([ap])\.?\s?m\.?)?", re.IGNORECASE)
_CHOICE = re.compile(
    r"(?:(?:\\text\s*\{\s*)?(?:option|choice|answer)\s+)?"
    r"(?:\(\s*([A-Ja-j])\s*\)|\[\s*([A-J])\s*\]|([A-J])(?=\s*[.):]|\s*$|\s+\([A-Za-z]{2,}))\s*[.):]?\s*",
    re.IGNORECASE,
)
_CHOICES = re.compile(
    r"\([A-J]\)|(?<![A-Za-z\\])[A-J]\s*[.):](?!\d)|(?:^|\b(?:and|or)\s+|,\s*)[A-J]$"
)
_REJECTED = re.compile(
    r"(?:[,;]\s*|\s*\()(?:\\text\s*\{\s*)?(?:and\s+|but\s+)?(?:not|rather than|instead of)\s*\}?\s+"
    r"(?:option\s+)?(?:\(?[A-J]\)?|-?[\d.,/]+)\s*[)}]?$"
)  # text behind an answer that rejects another one
_AGAIN = re.compile(r"(\S+)\s*\(([a-z -]+)\)")  # a number, repeated in words
_SAYS = re.compile(
    r"(?:is|was|are|isn't|not|wrong|false|incorrect|impossible|or|and)\b", re.IGNORECASE
)

_HEAD = re.compile(
    r"(?:\\frac\s*\{[^{}]*\}\s*\{[^{}]*\}|\\sqrt\s*(?:\[\d+\])?\s*\{[^{}]*\}|\\pi(?![A-Za-z])"
    rf"|\d{{1,3}}(?:[, ]\d{{3}})+(?!\d)|{PLAIN}|\\(?:times|cdot)(?![A-Za-z])\s*"
    r"|10\s*\^\s*\{?[+-]?\d+\}?"
    r"|\^\s*(?:\{[+-]?\d+\}|\d)|\\overline\s*\{\d+\}|\s(?=[\d\\*/(+-])|[-+*/()!])+"
)
_HAN_NUMBER = re.compile(r"[㐀-鿿,:\s]*?(-?\d[\d.,]*(?:/\d+)?%?)\s*([㐀-鿿]*)[.\s]*")
_HAN = re.compile("[㐀-鿿]")
_HAN_NO = re.compile("[不非没無无错假误第至到]")

_AND = re.compile(
    r"\s*(?:[,;]\s*)?(?:\\text\s*\{\s*,?\s*(?:and|or)\s*\}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])"
    r"|\\(?:lor|vee|land|wedge)(?![A-Za-z])|[或和与及])\s*|\s*[,;]\s*"
)
_POINT = re.compile(r"([A-Z]'?)\s*(\([^()]*,[^()]*\))")
_RATIO = re.compile(r"(\d+)\s*(?:\\text\s*\{\s*to\s*\}|to|:)\s*(\d+)")
_RATIOS = re.compile(r"[1-9]\d*(?:\s*:\s*[1-9]\d*){2,}")
_NOWHERE = "DNE"
_SETS = (
    (re.compile(r"\+?infinity", re.IGNORECASE), r"\infty"),
    (re.compile(r"-infinity", re.IGNORECASE), r"-\infty"),
    (
        re.compile(
            r"(?:all )?real numbers?|all reals|the reals|\\mathbb\s*\{?R\}?|\\R", re.IGNORECASE
        ),
        r"(-\infty, \infty)",
    ),
    (re.compile(r"(?:it )?does not exist|doesn't exist|DNE|不存在", re.IGNORECASE), _NOWHERE),
    (
        re.compile(
            r"(?:there (?:is|are) )?no (?:real |integer )?solutions?|(?:the )?empty set|none|无解"
            r"|空集|no such number|\\emptyset|\\varnothing|\\\{ ?\\\}",
            re.IGNORECASE,
        ),
        r"\emptyset",
    ),
)  # sets that have names
_VERDICT = re.compile(r"(yes|no|true|false)(?:[,.;:].*)?$", re.IGNORECASE)
_LITERAL = re.compile(
    r"\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/]\d{1,2}[-/]\d{4}"
    r"|\d+(?:\s*:\s*\d+){2,}"
)
_TEXT = re.compile(r"\\text\s*\{")
_WHOLE_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_CAPITALS = re.compile(r"[A-Z]{2,}")


@dataclass(frozen=True, slots=True)
class MathAnswer:
    """One side of a comparison.

    Args:
        text: the answer in normalised LaTeX, without its unit.
        value: the value of a number.
        unit: the unit of the number, if there is one.
        variable: the variable that has this value, as in ``x = 5``.
        relative: modulus of a residue, base of a numeral, half of the day.
        choice: the letter of a multiple choice. ``text`` is then the text after the letter.
        items: of a list or a set, in any order, empty for other answers.
        literal: words, a date or a time, which only equal text equals. With a value, it may be a
            ratio.
        claims: other sides of a chain of equations, which must be equal too.
        rough: a claim may be only nearly equal, as in ``1/3 \\approx 0.33``.
    """

    text: str
    value: Fraction | None = None
    unit: Unit | None = None
    variable: str | None = None
    relative: str | None = None
    choice: str | None = None
    items: tuple[MathAnswer, ...] = ()
    literal: bool = False
    claims: tuple[MathAnswer, ...] = ()
    rough: bool = False

    def __str__(self) -> str:
        said = [self.text.replace(DOLLAR, "$")]
        if self.value is not None and str(self.value) != self.text:
            said.append(f"the number {self.value}")
        said += [f"unit {self.unit}"] * (self.unit is not None)
        said += [f"{self.relative}"] * (self.relative is not None)
        said += [f"choice {self.choice}"] * (self.choice is not None)
        said += [f"a list of {len(self.items)}"] * bool(self.items)
        said += ["words"] * self.literal
        return "; ".join(said)


def read(text: str, letters: bool = False) -> MathAnswer:
    """Read ``text``, an answer with nothing around it. Beyond 2000 characters it is words.
    ``letters``: a letter right after a number is a unit and not a variable."""
    if len(text) > _LONGEST:
        return MathAnswer(text.strip(), literal=True)
    return _read(text, letters)


@lru_cache(maxsize=4096)
def _read(text: str, letters: bool) -> MathAnswer:
    text = _REJECTED.sub("", without_reasons(tidy(text)))
    if (again := _AGAIN.fullmatch(text)) and number(again[1]) == number(again[2]) is not None:
        text = again[1]
    if text.startswith("{") and "," in text and closing(text, 1) == len(text) - 1:
        text = rf"\{{{text[1:-1]}\}}"
    for said in (text, _without_label(text)):
        choice = _CHOICE.match(_opened(said))
        if choice and (found := _choice(choice, _opened(said))):
            return found
    text = _ROUGHLY.sub("", _without_label(_concluded(text)))
    if match := _VERDICT.match(_opened(text)):
        return MathAnswer(match[1], literal=True)
    if whole := _WHOLE_TEXT.fullmatch(text):
        inside = whole[1].strip()
        return _value(inside, letters) or _list(inside, letters) or _other(text)
    return _chain(text, letters) or _value(text, letters) or _list(text, letters) or _other(text)


def _concluded(text: str) -> str:
    # ``x = 5`` of ``2x = 10 \implies x = 5``.
    *earlier, last = _IMPLIES.split(text)
    return last.strip() if earlier and ("=" in earlier[0] or not earlier[0].strip()) else text


def _chain(text: str, letters: bool) -> MathAnswer | None:
    # The last side of ``48 + 24 = 72`` or ``x = 6/2 = 3``, with the others as claims.
    about = [side.strip() for side in _ABOUT_EQUAL.split(text)]
    if len(about) == 2 and _VARIABLE.fullmatch(f"{about[0]} = "):
        return _read(about[1], letters)
    if len(about) == 2 and about[0] and number(about[1]) is not None:
        return replace(_read(about[0], letters), claims=(_read(about[1], letters),), rough=True)
    sides = [side.strip() for side in _EQUALS.split(text)]
    if len(sides) < 2 or not all(sides) or any(letter in text for letter in (r"\begin", ",", ";")):
        return None
    if len(sides) == 2 and _VARIABLE.fullmatch(f"{sides[1]} = "):
        sides.reverse()
    label = _VARIABLE.match(f"{sides[0]} = ")
    variable = label is not None and label.end() >= len(sides[0])
    if not variable and _TEXT.search(sides[0]) and number(sides[-1]) is not None:
        variable, label = _named(sides[0]), None
    if variable:
        sides = sides[1:]
    if variable and len(sides) == 1:
        return None if label else _read(sides[0], letters)
    if any(_UNKNOWN.search(side) for side in sides[:-1]):
        return None
    last = _read(sides[-1], letters)
    return replace(last, claims=tuple(_read(side, letters) for side in sides[:-1]))


def _named(label: str) -> bool:
    said = _opened(label)
    return not _WRONG.search(said) and len(said.split()) <= _FEW_WORDS and "=" not in said


def _without_label(text: str) -> str:
    for label in (_SO, _LABEL, _TEXT_LABEL, _COLON, _ABOUT, _ELEMENT):
        match = label.match(text)
        if match and match.end() < len(text) and not _WRONG.search(match[0]):
            text = text[match.end() :].strip()
    return text


def _opened(text: str) -> str:
    return " ".join(unwrapped(text, _TEXT).split())


def _choice(match: re.Match[str], text: str) -> MathAnswer | None:
    bracketed, rest = match[1] or match[2], text[match.end() :]
    letter = bracketed or match[3]
    if _CHOICES.search(rest) or _SAYS.match(rest):
        return None
    if not bracketed and not match[3].isupper():
        return None
    if bracketed and rest[:1] in tuple("^_+*/=<>!"):
        return None
    return MathAnswer(rest, choice=letter.upper(), value=number(rest))


# -- numbers


def _value(text: str, letters: bool) -> MathAnswer | None:
    if match := _CLOCK.fullmatch(_opened(text)):
        half = f"{match[2].lower()}m" if match[2] else None
        return MathAnswer(
            match[1], relative=half, literal=True, value=None if half else _ratio(match[1])
        )
    body, relative = text, None
    for form, said in _RELATIVE:
        if match := form.search(text):
            body, relative = text[: match.start()].strip(), f"{said} {number(match[1])}"
            break
    variable = _VARIABLE.match(body)
    if variable and (value := number(body[variable.end() :])) is not None:
        return MathAnswer(body, value=value, variable=variable[1], relative=relative)
    body, unit = _measured(body, letters)
    value = number(body)
    if value is None and ((unit is None and relative is None) or not readable(body)):
        return None
    return MathAnswer(body, value=value, unit=unit, relative=relative)


def _ratio(text: str) -> Fraction | None:
    match = _RATIO.fullmatch(text)
    zero = match is None or match[2].startswith("0") or match[1].startswith("0")
    return None if match is None or zero else Fraction(int(match[1]), int(match[2]))


def _measured(text: str, letters: bool) -> tuple[str, Unit | None]:
    variable = _VARIABLE.match(text)
    label, rest = (text[: variable.end()], text[variable.end() :]) if variable else ("", text)
    sign = rest[:1] if rest[:1] in "+-" and rest[1:2] in units.MONEY else ""
    rest = rest[len(sign) :]
    if rest[:1] in units.MONEY and len(rest) > 1:
        inside, behind = _measured(rest[1:].strip(), letters)
        unit = units.money(rest[0])
        fits = behind is None or units.agree(unit, behind) or bool(behind.words)
        return (label + sign + inside, unit) if fits else (text, None)
    head = _HEAD.match(rest)
    if head is None:
        return _in_chinese(text)
    end = len(head[0].rstrip(" (*/+-"))
    if magnitude := MAGNITUDE.match(rest[end:]):
        end += magnitude.end()
    if not rest[end:].strip():
        return text, None
    value = number(rest[:end])
    single = value is not None and 0 < abs(value) <= 1
    unit = units.unit_of(rest[end:], letters, single)
    if unit is None:
        return _in_chinese(text)
    return label + rest[:end].strip(), unit


def _in_chinese(text: str) -> tuple[str, Unit | None]:
    match = _HAN_NUMBER.fullmatch(text)
    if match is None or _HAN_NO.search(text) or not _HAN.search(text):
        return text, None
    if match[1].endswith("%"):
        return match[1][:-1], units.PERCENT
    unit = units.unit_of(match[2], letters=False) if match[2] else None
    return match[1].rstrip(".,"), unit


# -- lists and all else


def _list(text: str, letters: bool) -> MathAnswer | None:
    if r"\begin" in text or text.count(r"\pm") > 1:
        return None
    inside = text
    braced = text.startswith(r"\{") and text.endswith(r"\}") and r"\{" not in text[2:]
    if braced:
        inside = text[2:-2].strip()
    parts = _split(inside)
    if len(parts) == 1 and r"\pm" in inside and not braced:
        parts = [inside.replace(r"\pm", "", 1), inside.replace(r"\pm", "-", 1)]
        if not inside.strip().startswith(r"\pm") and not _VARIABLE.match(inside):
            parts[0] = inside.replace(r"\pm", "+", 1)
    if len(parts) < 2 or not all(parts):
        return None
    if not braced and (bounds := of_list(parts, inside)):
        return MathAnswer(bounds)
    labels = [_VARIABLE.match(part) for part in parts]
    if all(labels) and len({label[1][:1] for label in labels if label}) == 1:
        parts = [part[label.end() :] for part, label in zip(parts, labels, strict=True) if label]
    elif labels[0] and not any(labels[1:]):
        parts[0] = parts[0][labels[0].end() :]
    return MathAnswer(text, items=tuple(read(part.strip(), letters) for part in parts))


def _split(text: str) -> list[str]:
    # Split at commas, semicolons, ``and`` and ``or`` outside of brackets.
    parts: list[str] = []
    start = depth = place = 0
    while place < len(text):
        if text[place] in "([{":
            depth += 1
        elif text[place] in ")]}":
            depth -= 1
        match = _AND.match(text, place) if depth == 0 else None
        if match and match.end() > place:
            parts.append(text[start:place].strip())
            start = place = match.end()
        else:
            place += 1
    parts.append(text[start:].strip())
    return parts


def _other(text: str) -> MathAnswer:
    opened = _opened(text)
    bare = opened.rstrip(".!")
    for form, said in _SETS:
        if form.fullmatch(bare):
            return MathAnswer(said, literal=said == _NOWHERE)
    if said := of_one(text):
        return MathAnswer(said)
    if _RATIOS.fullmatch(text):
        parts = [int(part) for part in text.split(":")]
        return MathAnswer(":".join(str(part // gcd(*parts)) for part in parts), literal=True)
    if value := _ratio(text):
        return MathAnswer(text, value=value)
    if match := _POINT.fullmatch(text):
        return MathAnswer(match[2], variable=match[1])
    if said := counted(opened):
        return _read(said, letters=False)
    if readable(text) and not (_LITERAL.fullmatch(opened) or _CAPITALS.fullmatch(opened)):
        return MathAnswer(text)
    label = _MATRIX.match(text)
    if label and readable(text[label.end() :]):
        return MathAnswer(text[label.end() :], variable=label[1])
    return MathAnswer(opened, literal=True)
