"""Brings LaTeX into one spelling: texts that look alike on paper become equal."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from unicodedata import category

DOLLAR = "\ue000"
"""A dollar sign for money. The others are delimiters."""

_CHARACTERS = str.maketrans(
    {chr(0xFF01 + i): chr(0x21 + i) for i in range(94)}
    | {
        "ℝ": r"\mathbb{R}", "−": "-",
        "–": "-", "—": "-", "﹣": "-", "×": r"\times ", "⋅": r"\cdot ", "·": r"\cdot ",
        "÷": "/", "∕": "/", "⁄": "/", "π": r"\pi ", "∞": r"\infty ", "±": r"\pm ", "∓": r"\mp ",
        "≤": r"\le ", "≥": r"\ge ", "⩽": r"\le ", "⩾": r"\ge ", "≠": r"\ne ", "≈": r"\approx ",
        "°": r"^\circ ",
        "º": r"^\circ ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ",
        "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "λ": r"\lambda ", "∠": r"\angle ",
        "。": ".", "、": ",", "【": "[", "】": "]", "〈": r"\langle ", "〉": r"\rangle ",
        "∶": ":", "′": "'", "’": "'", "‘": "'", "“": '"', "”": '"',
        "\u00a0": " ", "\u2002": " ", "\u2003": " ", "\u2009": " ", "\u202f": " ", "\u3000": " ",
        "\u200b": None, "\u200c": None, "\u200d": None, "\ufeff": None, "\u2060": None,
        "½": r"\frac{1}{2}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}", "¼": r"\frac{1}{4}",
        "¾": r"\frac{3}{4}", "⅕": r"\frac{1}{5}", "⅖": r"\frac{2}{5}", "⅗": r"\frac{3}{5}",
        "⅘": r"\frac{4}{5}", "⅙": r"\frac{1}{6}", "⅚": r"\frac{5}{6}", "⅛": r"\frac{1}{8}",
        "⅜": r"\frac{3}{8}", "⅝": r"\frac{5}{8}", "⅞": r"\frac{7}{8}",
    }
)  # fmt: skip
_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n")
_LOWERED = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_RAISED_RUN = re.compile(f"[{''.join(map(chr, _RAISED))}]+")
_LOWERED_RUN = re.compile(f"[{''.join(map(chr, _LOWERED))}]+")
_ROOT = re.compile(r"([√∛])\s*(?:\(([^()]*)\)|\{([^{}]*)\}|(\d+(?:\.\d+)?|[A-Za-z]|\\pi))")

_BRACES = re.compile(r"\\+[lr]brace(?![A-Za-z])")
_SIZES = re.compile(
    r"\\(?:left|right|middle|bigg?[lrm]?|Bigg?[lrm]?|displaystyle|textstyle|scriptstyle|limits"
    r"|tiny|small|normalsize|large|Large|LARGE|huge|Huge|bf|rm|it|bfseries|boldmath|mathstrut"
    r"|strut|hfill|centering|noindent)(?![A-Za-z])\s*\.?(?=\S|$)"
)
_SIZED_POINT = re.compile(r"\\(?:left|right)\s*\.")
_COLOUR = re.compile(r"\\(?:text)?color\s*(?:\[[^\]]*\])?\s*\{[^{}]*\}|\\color\s+[a-z]+\s")
_FONTS = re.compile(
    r"\\(?:mathbf|mathit|mathsf|mathtt|mathnormal|boldsymbol|bm|pmb|emph|ensuremath|hbox"
    r"|underline|uline|mbox(?=\s*\{\s*[\d$\\-])|f?boxed|fbox|framebox)\s*\{"
)
_TEXTS = re.compile(
    r"\\(?:text(?:bf|it|rm|sf|tt|normal|up|md)|mathrm|mbox|operatorname\*?)\s*(?=\{)"
)
_FRACTIONS = re.compile(r"\\[dtc]frac(?![A-Za-z])")
_SPACES = re.compile(
    r"(?<!\\)\\(?:[,;:> ]|(?:q?quad|thinspace|medspace|thickspace|enspace)(?![A-Za-z]))|~"
)
_KERN = re.compile(r"\\!\s*|\\hspace\*?\s*\{[^{}]*\}")
_ROW_SPACE = re.compile(r"\\\\\s*\[-?[\d.]+\s*(?:pt|em|ex|cm|mm)\]|\\{4}(?!\\)")
_LETTER = re.compile(r"\\(?:text|mathrm|textrm|operatorname)\s*\{\s*([eiπ])\s*\}")
_NAMED = re.compile(
    r"\\(?:text|mathrm|operatorname\*?)\s*\{\s*(sin|cos|tan|cot|sec|csc|ln|log|exp|gcd|lcm|max|min|det"
    r"|arcsin|arccos|arctan)\s*\}"
)
_VECTOR = re.compile(r"\\(?:vec|hat)\s*\{?\s*\\?([ijk])(?:math)?(?![A-Za-z])\s*\}?")
_TRIG_DEGREES = re.compile(
    r"(\\(?:sin|cos|tan|cot|sec|csc))\s*\(?\s*(\d+(?:\.\d+)?)\s*\^\s*\{?\s*\\circ\s*\}?\)?"
)
_ODD_ROOT = re.compile(r"\\sqrt\s*\[(\d*[13579])\]\s*\{\s*-\s*(\w+)\s*\}")
_ROOTED = re.compile(r"\\sqrt\s*\(([^()]*)\)")
_BRACKETED_ARRAY = re.compile(
    r"[(\[]\s*\\begin\{array\}\s*\{[^{}]*\}(.*?)\\end\{array\}\s*[)\]]", re.DOTALL
)
_DECIMAL_COMMA = re.compile(r"(?<=\d)\{,\}(?=(?:\d{1,2}|\d{4,})(?!\d|\{,\}))")
_SPOKEN_DOLLAR = re.compile(r"\\text\s*\{\s*\\\$\s*\}|\\textdollar(?:\{\})?|\\\$")
_DELIMITERS = re.compile(r"\\+[()\[\]]")
_CASES = re.compile(
    r"\\begin\{(cases|aligned|array|gathered)\}(?:\{[^{}]*\})?(.*?)\\end\{\1\}", re.DOTALL
)
_POINTED = re.compile(r"(?<![A-Za-z])\{\s*([,.:])\s*\}")
_CURRENCIES = {
    "$": re.compile(r"(?:\\text\s*\{\s*)?(?:USD?|US)\s*\}?\s*(?=[\d\ue000])\ue000?"),
    "€": re.compile(r"\\(?:text)?euro(?![A-Za-z])(?:\{\})?|(?:\\text\s*\{\s*)?EUR\s*\}?\s*(?=\d)"),
    "£": re.compile(
        r"\\text\s*\{\s*\\pounds\s*\}|\\(?:pounds|textsterling)(?![A-Za-z])"
        r"|(?:\\text\s*\{\s*)?GBP\s*\}?\s*(?=\d)"
    ),
    "₹": re.compile(r"(?:\\text\s*\{\s*)?(?:Rs\.?|INR)\s*\}?\s*(?=\d)"),
    "¥": re.compile(r"(?:\\text\s*\{\s*)?(?:RMB|CNY|JPY)\s*\}?\s*(?=\d)"),
}
_RELATIONS = re.compile(r"\\(le|ge|ne)q(?:slant)?(?![A-Za-z])")
_NATURAL = re.compile(r"\\log_\{?e\}?(?![A-Za-z])")
_BUILT = re.compile(r"\\\{\s*([a-z])\s*(?:\\mid|\||:)\s*(\1\s*[<>\\].*?)\s*\\\}")
_CONDITION = re.compile(r",?\s*&\s*(?:\\text\s*\{\s*,?\s*(?:if|for|when|where)?\s*\}\s*)?")
_QED = re.compile(r"\$?\s*\\(?:blacksquare|square|Box|qed|hfill)(?![A-Za-z])\s*\$?\s*$")
_ORDER = re.compile(r"\\([lg])t(?![A-Za-z])")
_SEGMENT = re.compile(r"\\(?:overline|bar|overrightarrow|vec|widehat)\s*\{\s*([A-Z]{2,3})\s*\}")
_BRACE = re.compile(r"[{}]")
_FRAC = re.compile(r"\\frac\s*(\{[^{}]*\}|[^\s{}\\])\s*(\{[^{}]*\}|[^\s{}\\])")
_SQRT = re.compile(r"\\sqrt\s*([^\s{}()\\\[])")
_HTML = re.compile(r"<(b|strong|i|em|u)>([^<>]*)</\1>", re.IGNORECASE)
_TOKEN = re.compile(r"<[|｜][^<>|｜]{1,40}[|｜]>|</?s>|<eos>|<pad>|<end_of_turn>|\[/?INST\]")
_END = re.compile(
    r"<[|｜](?:im_end|eot_id|endoftext|end|end▁of▁sentence)[|｜]>|</s>|<eos>|<end_of_turn>"
)
_NEAR_END = 60


def tidy(text: str) -> str:
    """Return ``text`` without fonts, sizes, colours, delimiters and unusual characters.
    ``\\text{}`` stays around words. A dollar sign for money becomes ``DOLLAR``."""
    text = plain_characters(text)
    text = _ROW_SPACE.sub(r"\\\\", _SPOKEN_DOLLAR.sub(DOLLAR, text))
    text = _TRIG_DEGREES.sub(r"\1(\\frac{\2\\pi}{180})", text)
    text = _NAMED.sub(r"\\\1 ", _VECTOR.sub(r"\1", _LETTER.sub(r"\1", text)))
    text = _BRACES.sub(lambda match: r"\{" if "l" in match[0] else r"\}", text)
    text = _SIZED_POINT.sub("", text)
    for sign, names in _CURRENCIES.items():
        text = names.sub(DOLLAR if sign == "$" else sign, text)
    text = _NATURAL.sub(r"\\ln ", _RELATIONS.sub(r"\\\1", text))
    text = re.sub(r"\\equiv(?![A-Za-z])", "=", text)
    text = _BUILT.sub(r"\2", text)
    text = _ORDER.sub(lambda match: "<" if match[1] == "l" else ">", text)
    text = _SEGMENT.sub(
        r"\1", re.sub(r"\\([lr])angle(?![A-Za-z])", lambda m: "()"[m[1] == "r"], text)
    )
    text = _COLOUR.sub("", _KERN.sub("", text))
    text = _SIZES.sub("", text)
    text = unwrapped(text, _FONTS)
    text = _TEXTS.sub(r"\\text", _FRACTIONS.sub(r"\\frac", text))
    text = _ROOTED.sub(r"\\sqrt{\1}", _FRAC.sub(_braced, text))
    text = _ODD_ROOT.sub(r"(-\\sqrt[\1]{\2})", _SQRT.sub(r"\\sqrt{\1}", text))
    text = _POINTED.sub(r"\1", _SPACES.sub(" ", _DECIMAL_COMMA.sub(".", text)))
    text = _BRACKETED_ARRAY.sub(r"\\begin{pmatrix}\1\\end{pmatrix}", text)
    text = _CASES.sub(_listed, text)
    text = _undelimited(text)
    text = re.sub(r"\s+", " ", text).strip()
    return without_emphasis(text)


def plain_characters(text: str) -> str:
    """Return the text with full-width, raised, lowered and mathematical characters as ASCII and
    LaTeX."""
    if text.isascii():
        return text
    text = _RAISED_RUN.sub(lambda m: f"^{{{m[0].translate(_RAISED)}}}", text)
    text = _LOWERED_RUN.sub(lambda m: f"_{{{m[0].translate(_LOWERED)}}}", text)
    text = text.translate(_CHARACTERS)
    return _ROOT.sub(_rooted, text)


def _rooted(match: re.Match[str]) -> str:
    inside = match[2] or match[3] or match[4] or ""
    return rf"\sqrt{'[3]' if match[1] == '∛' else ''}{{{inside}}}"


def without_markup(text: str) -> str:
    """Return a response without special tokens, text after its end token, HTML emphasis, and the
    sign that ends a proof."""
    text = _TOKEN.sub("", _until_its_end(text)).rstrip()
    while text and category(text[-1]) == "So":
        text = text[:-1].rstrip()
    tail = text[-_NEAR_END:]
    if proved := _QED.search(tail):
        text = text[: len(text) - len(tail) + proved.start()]
    return _HTML.sub(r"\2", text)


def _until_its_end(text: str) -> str:
    for match in _END.finditer(text):
        before = text[: match.start()]
        if before.strip() and before.count("{") <= before.count("}"):
            return before
    return text


def without_emphasis(text: str) -> str:
    """Return ``text`` without Markdown's marks at its ends, and without a full stop."""
    text = text.strip('*_`" ')
    return text if text.endswith(("...", "\\.")) else text.rstrip(' .,;:*_`"')


def unwrapped(text: str, command: re.Pattern[str]) -> str:
    """Return ``text`` with each use of a command replaced by the content of its braces."""
    while match := command.search(text):
        end = closing(text, match.end())
        if end is None:
            return text[: match.start()] + text[match.end() :]
        text = f"{text[: match.start()]}{text[match.end() : end]}{text[end + 1 :]}"
    return text


def closing(text: str, start: int) -> int | None:
    """Return the place of the brace that closes the one opened before ``start``, or None."""
    depth = 1
    for place in range(start, len(text)):
        if text[place] == "{":
            depth += 1
        elif text[place] == "}":
            depth -= 1
            if depth == 0:
                return place
    return None


def braces(text: str) -> dict[int, int]:
    """Return the places of opening braces with the places of their closing ones."""
    opened: list[int] = []
    pairs: dict[int, int] = {}
    for match in _BRACE.finditer(text):
        if match[0] == "{":
            opened.append(match.start())
        elif opened:
            pairs[opened.pop()] = match.start()
    return pairs


def _braced(match: re.Match[str]) -> str:
    over, under = (part if part.startswith("{") else f"{{{part}}}" for part in match.groups())
    return rf"\frac{over}{under}"


def _listed(match: re.Match[str]) -> str:
    # A system of equations becomes a list of equations. Columns stay.
    if "&" in match[2].replace("&=", "="):
        if match[1] != "cases":
            return match[0]
        return rf"\begin{{{match[1]}}}{_CONDITION.sub(' & ', match[2])}\end{{{match[1]}}}"
    lines = [line.strip() for line in re.split(r"\\\\|\n", match[2].replace("&=", "="))]
    return ", ".join(line.rstrip(" ,.;") for line in lines if line)


def _undelimited(text: str) -> str:
    text = _DELIMITERS.sub(" ", text) if _DELIMITERS.search(text) else text
    if "$" not in text:
        return text
    if text.count("$") % 2 == 0:
        return text.replace("$", " ")
    return re.sub(r"\$(?=\s*-?[\d.])", DOLLAR, text).replace("$", " ")


# Numerals as exact numbers: decimals, thousands, powers of ten, fractions, words.

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
"""A whole number in English words. "one" of "twenty-one" does not match."""
_SPOKEN = re.compile(rf"(?:an?\s+)?{SPOKEN}", re.IGNORECASE)


@lru_cache(maxsize=4096)
def number(text: str) -> Fraction | None:
    """Return the exact value of a numeral or of a fraction of two, or None for other texts."""
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
    # The value of ``0.1\overline{6}`` and of ``0.1666...``.
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
