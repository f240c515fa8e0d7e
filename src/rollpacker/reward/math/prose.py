"""Answers in plain sentences: what "the answer is" says, what is bold, what stands last."""

from __future__ import annotations

import re

from rollpacker.reward.math.latex import without_emphasis

_STATED = re.compile(
    r"\b(?:(?:final|correct|right|only)\s+)?(?:answers?|option|choice|result|final(?=\s*:))\b"
    r"(?:[ \t]+(?:to|of|for)\b[^.:=\n]{0,80}?)?[*_ \t]*"
    r"(?:(?::|=)[*_]*|(?:\bis\b|\bare\b|\bwould be\b|\bmust be\b|\bequals\b)[*_ \t]*:?)\s*"
    r"|\b(?:solutions?|roots?)[*_ \t]*(?::|\bis\b|\bare\b)\s*(?=\\?[$(\[{]|[-\dx])"
    r"|【?答案?】?\s*(?:是|为|应为|应该是)?\s*[:：]?\s*(?=\S)"
    r"|(?:选择?|故选)\s*[:：]?\s*(?=[A-J(（])",
    re.IGNORECASE,
)
_CHOSEN = re.compile(
    r"(?<![A-Za-z])\(?([A-J])\)?\s+is\s+(?:the\s+)?(?:correct|right|best|true|answer)\b"
    r"|\b(?:[Oo]ption|[Cc]hoice)\s+\(?([A-J])\)?(?=[.!\s]*$)"
    r"|\bonly\s+\(?([A-J])\)?\s+[a-z]+s\b"
    r"|选项?[为是]?\s*([A-J])|为\s*([A-J])\s*选项"
    r"|\b(?:[Cc]hoose|[Cc]hose|[Pp]ick|[Ss]elect|[Gg]o with)\s+(?:option\s+)?\(?([A-J])\)?"
    r"(?![A-Za-z])"
)
_DOUBT = re.compile(
    r"(?:\bnot|n't|\bcannot|\bbetween|\bat (?:least|most)|\bneither"
    r"|\bnever(?: equals?)?|\bunequal to"
    r"|\bdifferent from|\bexceeds?|\babove|\bbelow|\bunder|\bup to|\beither"
    r"|\b(?:more|less|fewer|greater|smaller|larger) than)\b|不是|!=|≠|\bfrom\s+\S+\s+to(?=\s)",
    re.IGNORECASE,
)
_BEFORE = re.compile(
    r"\b(?:wrong|incorrect|false|not|cannot be|n't|never|isn't)\b[^.\n]{0,25}$|不$", re.IGNORECASE
)
"""Before "the answer is" it says that it is not."""
_TAKEN_BACK = re.compile(
    r"[,;.]?\s*(?:which|but (?:this|that|it)|this|that|it)\s+(?:is|was)\s+"
    r"(?:not|wrong|incorrect|false)\b",
    re.IGNORECASE,
)
_WORKED = re.compile(
    r"\b(?:root|square|cube|half|twice|double|triple|negative|minus|opposite|reciprocal|factorial"
    r"|logarithm|sine|cosine)\b[^\d$]*$",
    re.IGNORECASE,
)
"""Before a number, what is still to be done with it."""
_RATHER = re.compile(r"[,;]\s*(?:but\s+)?(?:it is|it's|rather|but)\s+", re.IGNORECASE)
_STOP = r"(?P<end>(?<!\bRs)(?<!\bapprox)[.!?](?=\s|$|[*_`]+(?:\s|$))|[。！？；]|\n)"
_REASON = re.compile(
    r",?\s+(?:since|because|so that|given that|due to)\b.*|,\s+(?:as|with|when)\b.*"
    r"|[，,]?\s*(?:因为|由于).*",
    re.IGNORECASE | re.DOTALL,
)
_ASIDE = re.compile(
    r",?\s+(?:which|where)\b.*|,\s+so\b.*|[，,]\s*所以.*", re.IGNORECASE | re.DOTALL
)
_BOLD = re.compile(r"(\*\*|__)(?=\S)([^*\n]{1,80}?)(?<=\S)\1")
_JOINED_BOLD = re.compile(r"(?:(?:\*\*[^*\n]{1,40}\*\*)(?:\s*,\s*|\s+or\s+|\s+and\s+|\s+))*$")
_FALSE = re.compile(r"\s*(?:is|was)\s+(?:not|wrong|incorrect|false)\b", re.IGNORECASE)
_HEADED = re.compile(
    r"^(?:(?:#{1,6}[^\n]*|-{3,}|[*_]{0,2}(?:final |the )?(?:answer|result|solution|total)"
    r"[*_:]{0,3})\s*\n\s*)+"
    r"|^(?:>|1\.)\s+(?=\S+$)",
    re.IGNORECASE,
)
"""A heading over an answer."""
_FIRST_WORD = re.compile(r"(yes|no|true|false)[,.]\s[^\n\d]{0,80}$", re.IGNORECASE)
_VERDICT = re.compile(r"true|false|yes|no", re.IGNORECASE)
_FORMULA = re.compile(
    r"\$\$([^$]+?)\$\$|\\\[((?:(?!\\\[).)+?)\\\]|\\\(((?:(?!\\\().)+?)\\\)"
    r"|(?<![\\\d$])\$(?!\d[^$\n]*\s[a-z]{2,}\s[^$\n]*\$)([^$\n]+?)(?<!\\)\$(?!\d)",
    re.DOTALL,
)
_STOPS = re.compile(f"{_FORMULA.pattern}|{_STOP}", re.DOTALL)
_ATOM = (
    r"\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+\s*[½-¾⅓-⅞]|\d+\s+\d+/\d+|\d{1,2}\s?:\s?\d{1,2}(?!\d)"
    r"|\d+(?:\.\d+)?(?:\s*/\s*\d+(?:\.\d+)?)?|\.\d+"
    r"|\d*\\[dtc]?frac\s*(?:\{[^{}]*\}|\d)\s*(?:\{[^{}]*\}|\d)|√\(?\d+\)?|[½-¾⅓-⅞]"
    r"|π(?:/\d+)?|sqrt\(\d+\)"
)
_NUMBER = re.compile(
    rf"(?<![A-Za-z0-9_.\\^{{])(?P<value>(?:Rs\.?\s?|US)?[-−]?[$€£¥₹]?\s?(?:{_ATOM})"
    r"(?:\s*(?:\\pi|π|\\sqrt\s*\{[^{}]*\}|√\d+|!))?(?:\s*(?:\\?%|°|percent\b))?"
    r"(?:\s*(?:×|\\times|x)\s*10\s*\^?\s*\{?[-−⁻]?[\d⁰-⁹]+\}?)?"
    r"(?:\s+(?:million|billion|trillion|thousand|[ap]\.?m\b\.?)(?![a-z]))?)"
    r"(?P<unit>\s?(?:km/h|m/s|mph|km|cm|mm|kg|m|g|s|h|J|N|W|V|hours?|minutes?|seconds?|days?"
    r"|dollars?|cents?|met(?:er|re)s?|feet|inches|miles|years?|degrees?)\b(?:\^\{?\d\}?|²|³)?)?",
    re.IGNORECASE,
)
_WRITTEN = re.compile(
    r"(?<![\w\\])(?:[\[(]\s*-?[\w.√π/]{1,20}(?:\s*,\s*-?[\w.√π∞/]{1,20})+\s*[\])]"
    r"|[a-z]\s*[<>≤≥]\s*-?[\d./]+"
    r"|[a-z](?:\([a-z]\))?\s*=\s*"
    r"(?:[-+*/^()\d.\s²³]|(?<![A-Za-z])[a-z](?![A-Za-z])){1,60})(?<=[\w)\]²³])"
)
"""A tuple, an interval or an equation without dollar signs."""
_PLACED = re.compile(
    r"(?:\b(?:in|on|over|after|before|between|among|within|from|than|out of|per|at|by|every"
    r"|i\.e\.,?)\s*\$?"
    r"|\b(?:between|from)\s+\S{1,12}\s+(?:and|to)\s*\$?"
    r"|(?<!total )(?<!sum )\bof (?:the|all|his|her|their|these|those)\s*\$?"
    r"|\bcourse of\s*|\bto\s+[a-z]+\s+(?:(?:the|a|an|his|her)\s+)?\$?"
    r"|\()$",
    re.IGNORECASE,
)
"""Before a number that only says where or when."""
_NUMBERED = re.compile(
    r"\b(?:equation|eq|step|figure|table|case|line|part|problem|question|chapter|example)s?\.?"
    r"\s*\(?$",
    re.IGNORECASE,
)
"""Before a number that is a name."""
_COUNTED = re.compile(r"(?i)\b(?:there (?:are|is|were)|(?:has|have|is|are|was|were|equals)|=)\s+")
_TOLD = re.compile(r"=|\b(?:is|are|was|were|equals|gives|has|have)\b", re.IGNORECASE)
_JOINED = re.compile(r"\s*(?:,|,?\s*(?:and|or))\s*(?:[a-z]\s*=\s*)?")
_NOTHING = re.compile(
    r"\b(no (?:real |integer |such )?(?:solutions?|numbers?|integers?)(?: exists?)?"
    r"|infinitely many)\b(?:\s+solutions?)?[.!]*$",
    re.IGNORECASE,
)
_OFFER = re.compile(r"\s*(?:i )?(?:hope|feel free|let me know|if you|please)\b", re.IGNORECASE)
_TWO_UP = """two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen
    sixteen seventeen eighteen nineteen twenty thirty forty fifty"""
_IN_WORDS = re.compile(rf"\b(?:{'|'.join(_TWO_UP.split())})\b", re.IGNORECASE)
_LAST_WORD = re.compile(
    r"\b(?:is|are|was|on an?|on|be)\s+(?:the\s+|an?\s+)?([A-Za-z-]+|[A-Za-z]+ \d{1,2})[.!]*$"
    r"|是([㐀-鿿]{1,12})[。.!！]*$"
)
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
_LETTER = re.compile(r"\(?[A-J]\)?[.)]?")
_ONLY_LETTER = re.compile(r"(?:[A-Za-z]+,?\s+){0,2}\(?([A-J])\)?[.!]*")
_LETTERS = re.compile(r"(?<![\\A-Za-z])[A-Za-z]+")
_ASSIGNED = re.compile(r"\s*[A-Za-z](?:\([a-z]\))?\s*=[^=]*")
_LEADING = re.compile(
    r"(?:the|an?|that|indeed|therefore|thus|simply|exactly|then)\b", re.IGNORECASE
)
_JOINT = re.compile("[=，]")
"""In a text of several parts, of which the last may be the answer."""
_FEW_WORDS = 4
_SHORT = 80
_NEAR_END = 200
_LOOKED_AT = 4000


def words(text: str) -> int:
    """How many words of plain language are in it."""
    return len(_WORD.findall(text))


def stated(text: str) -> str | None:
    """What "the answer is" says, in the last such sentence, or which choice is called right."""
    # Near the end: "statement A is true" may be a step to a number.
    near = _CHOSEN.finditer(text, max(0, len(text.rstrip()) - _NEAR_END))
    chosen = [match for match in near if not _denied(text, match.start())]
    for match in reversed(list(_STATED.finditer(text))):
        if chosen and chosen[-1].start() >= match.start():
            break
        after = text[match.end() : match.end() + _LOOKED_AT]
        if "\n" in match[0] and after.startswith("- "):
            after = after[2:]  # an item of a list
        said = clause(after)
        if said:
            back = _denied(text, match.start()) or _TAKEN_BACK.search(after[: _first_end(after)])
            return f"not {said}" if back else _exact(said)
    return next(filter(None, chosen[-1].groups())) if chosen else None


def _denied(text: str, place: int) -> bool:
    return bool(_BEFORE.search(text[max(0, place - 40) : place]))


def clause(said: str) -> str:
    """The first sentence, without reasons."""
    sentence = said[: _first_end(said)].strip()
    short = _ASIDE.sub("", _REASON.sub("", sentence)).strip()
    # An exclamation, and no factorial: those are followed by more, or stand in a formula.
    return without_emphasis((short or sentence).removesuffix("!"))


def _first_end(text: str) -> int:
    """Where the first sentence ends; a point inside a formula or a number ends none."""
    for match in _STOPS.finditer(text):
        factorial = match[0] == "!" and text[match.start() - 1 : match.start()].isalnum()
        if match["end"] and not factorial and text[: match.start()].strip(" *_`\n"):
            return match.end() if match[0] != "\n" else match.start()
    return len(text)


def _exact(said: str) -> str:
    """The answer in a clause that may hold more words than it."""
    formulas = list(_FORMULA.finditer(said))
    if formulas:
        if words(_FORMULA.sub(" ", said)) <= _FEW_WORDS:
            return said
        first = formulas[0] if formulas[0].start() == 0 else formulas[-1]
        return result(_inside(first))
    if _DOUBT.search(said):
        rather = _RATHER.split(said)
        return _exact(rather[-1]) if len(rather) > 1 else said
    if "=" in said and not _ASSIGNED.fullmatch(said):
        return result(said)
    numbers = list(_NUMBER.finditer(said))
    if not numbers and (word := _LAST_WORD.search(said)) and word[2]:
        return word[2]
    if not numbers or not (_LEADING.match(said) or len(said.split()) > _FEW_WORDS + 2):
        return said
    chosen = numbers[-1] if said.lower().startswith("that ") else numbers[0]
    return said if _WORKED.search(said[: chosen.start()]) else _with_unit(chosen)


def result(formula: str) -> str:
    """Of ``48 + 24 = 72`` the right side; an equation in variables stays."""
    left, equals, right = formula.rpartition("=")
    calculated = equals and right.strip() and left.strip() and left[-1] not in "<>!:\\"
    return right.strip() if calculated and not _LETTERS.search(left) else formula


def bold(text: str) -> str | None:
    """What is bold in the last lines, where that is an answer."""
    text = text.rstrip()
    for match in reversed(list(_BOLD.finditer(text))):
        said, after = match[2].strip(), text[match.end() :]
        if "=" in after or len(after) > _NEAR_END or "\n\n" in after.strip():
            return None
        few = len(said.split()) <= _FEW_WORDS and not said.endswith((":", ".", ")"))
        one = _LETTER.fullmatch(said) or _FORMULA.fullmatch(said) or _VERDICT.fullmatch(said)
        if _FALSE.match(after):
            return None
        if (few and _NUMBER.match(said)) or one:
            joined = _JOINED_BOLD.search(text[: match.start()])
            others = _BOLD.sub(r"\2", joined[0]) if joined else ""
            return _bound(text, match.start()) + others + said
    return None


def last(text: str) -> str | None:
    """A text that is nothing but an answer, or what its last sentences end in."""
    text = _HEADED.sub("", text.strip()).strip()
    if verdict := _FIRST_WORD.match(text):
        return verdict[1]
    if letter := _ONLY_LETTER.fullmatch(text):
        return letter[1]
    if len(text) <= _SHORT and words(text) <= 1 and not _JOINT.search(text):
        return text
    sentences = [part for part in _sentences(text) if part.strip() and not _OFFER.match(part)]
    if sentences and (nothing := _NOTHING.search(sentences[-1].strip())):
        return nothing[1]
    if sentences and (letter := _ONLY_LETTER.fullmatch(sentences[-1].strip())):
        return letter[1]
    for sentence in reversed(sentences):
        found = _last_of(_REASON.sub("", sentence)) or _last_of(sentence)
        if found:
            return found
    return _last_word(sentences[-1]) if sentences else None


def counted(text: str) -> str | None:
    """The number of a sentence that states one, as "There are 15 ways."; None of other texts."""
    numbers = list(_NUMBER.finditer(text))
    if len(numbers) != 1 or words(text) < 3 or "\\" in text or _DOUBT.search(text):
        return None
    verbs = list(_COUNTED.finditer(text, 0, numbers[0].start()))
    return _with_unit(numbers[0]) if verbs and verbs[-1].end() >= numbers[0].start() - 1 else None


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
    """The last formula or number, but one that only says where or when."""
    places: list[re.Match[str]] = []
    for pattern in (_FORMULA, _WRITTEN, _NUMBER):
        taken = [match.span() for match in places]
        places += [
            match
            for match in pattern.finditer(sentence)
            if not any(start < match.end() and match.start() < end for start, end in taken)
        ]
    places = [match for match in places if not _NUMBERED.search(sentence[: match.start()])]
    if not places:
        return None
    places.sort(key=lambda match: match.start())
    told = [match for match in places if not _PLACED.search(sentence[: match.start()])]
    chosen = (told or places)[-1]
    if _WORKED.search(sentence[: chosen.start()]):
        return None
    return _listed(sentence, [match for match in places if match.end() <= chosen.end()])


def _listed(sentence: str, places: list[re.Match[str]]) -> str:
    """The last of them, with those that commas, "and" and "or" join to it."""
    first = len(places) - 1
    while first and _JOINED.fullmatch(sentence[places[first - 1].end() : places[first].start()]):
        first -= 1
    if first < len(places) - 1:
        return ", ".join(_said(match) for match in places[first:])
    last = places[-1]
    if last.re is _NUMBER:
        return _with_unit(last)
    return _bound(sentence, last.start()) + _said(last)


def _said(match: re.Match[str]) -> str:
    if match.re is _FORMULA:
        return result(_inside(match))
    if match.re is _NUMBER:
        return match["value"].strip() + (match["unit"] or "")
    return result(match[0])


def _last_word(sentence: str) -> str | None:
    """What a sentence without a figure ends in."""
    numbers = _IN_WORDS.findall(sentence)
    if _DOUBT.search(sentence):
        return None
    if numbers:
        return numbers[-1]
    match = _LAST_WORD.search(without_emphasis(sentence.strip()))
    return (match[1] or match[2]) if match else None


def _inside(formula: re.Match[str]) -> str:
    return next(group for group in formula.groups()[:4] if group)


def _with_unit(match: re.Match[str]) -> str:
    """The number with what turns its sense round, if that stands before it."""
    bound = _bound(match.string, match.start())
    return bound + match["value"].strip() + (match["unit"] or "")


def _bound(text: str, place: int) -> str:
    """Words in the clause before ``place`` that say it is not that number."""
    before = re.split(r"[,;.?\n]|!(?!=)|\bbut\b", text[max(0, place - 60) : place])[-1]
    found = _DOUBT.search(before)
    told = found and _TOLD.search(before, found.end())
    return before[found.start() :] if found and not told else ""
