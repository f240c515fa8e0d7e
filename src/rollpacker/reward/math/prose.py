"""Answers in plain sentences: the clause after "the answer is", bold text, the last formula or
number."""

from __future__ import annotations

import re
from itertools import pairwise

from rollpacker.reward.math.latex import SPOKEN, without_emphasis

NOT = (
    r"\b(?:nicht|keine?|nie|niemals|weder|ungleich|pas|jamais|aucune?|différente? de|tampoco|nunca"
    r"|no (?:es|son|puede|hay|creo)|distint[oa] (?:de|a)|diferente de|não|non (?:è|sono)|niet|geen"
    r"|ikke|inte|nem|nie jest|değil|bukan|tidak|không|не|нет|никогда)\b"
)
_NOT_LATER = r"不|没|ない|ません|아니|아닙|않|नहीं|ليس|لا "
PERHAPS = (
    r"\b(?:oder|entweder|vielleicht|eventuell|möglicherweise|ou|soit|peut-être|o|quizás?|tal vez"
    r"|puede(?:n)?|talvez|forse|или|либо|возможно|может)\b|或|也许|可能|または|もしくは|かも|또는|아마"
)  # words for "no" and for "maybe" in languages other than English
_STATED = re.compile(
    r"\b(?:(?:final|correct|right|only)\s+)?(?:answers?|option|choice|result|final(?=\s*:))\b"
    r"(?:[ \t]+(?:to|of|for)\b[^.:=\n]{0,80}?)?[*_ \t]*"
    r"(?:(?::|=)[*_]*|(?:\bis\b|\bare\b|\bwould be\b|\bmust be\b|\bequals\b)[*_ \t]*:?)\s*"
    r"|\b(?:solutions?|roots?)[*_ \t]*(?::|\bis\b|\bare\b)\s*(?=\\?[$(\[{]|[-\dx])"
    r"|(?:\b(?:(?:End)?Ergebnis|Antwort|Lösung|réponse|résultat|respuesta|resultado|resposta|risposta"
    r"|risultato|ответ|результат)\b|答え|正解|정답|답|उत्तर|الجواب|الإجابة)(?:\s+fin\w+)?[*_ \t]*"
    r"(?:[:：=—]|は|が|은|는|이|है|هو|هي|\b(?:ist|lautet|beträgt|est|es|é|è|равен|равно)\b)"
    r"[*_ \t]*[:：]?\s*"
    r"|【?答案?】?\s*(?:是|为|应为|应该是)?\s*[:：]?\s*(?=[^\sえ])"
    r"|(?:选择?|故选)\s*[:：]?\s*(?=[A-J(（])",
    re.IGNORECASE,
)
_CHOSEN = re.compile(
    r"(?<![A-Za-z])\(?([A-J])\)?\s+is\s+(?:the\s+)?(?:correct|right|best|true|answer)\b"
    r"|\b(?:[Oo]ption|[Cc]hoice)\s+\(?([A-J])\)?(?=[.!\s]*$)"
    r"|\b(?:[Ss]o|[Tt]hus|[Hh]ence|[Tt]herefore),?\s+(?:it(?:'s| is)\s+)?\(?([A-J])\)?(?=[.!\s]*$)"
    r"|\bonly\s+\(?([A-J])\)?\s+[a-z]+s\b"
    r"|选项?[为是]?\s*([A-J]+)|为\s*([A-J]+)\s*选项"
    r"|\b(?:[Cc]hoose|[Cc]hose|[Pp]ick|[Ss]elect|[Gg]o with)\s+(?:option\s+)?\(?([A-J])\)?"
    r"(?![A-Za-z])"
)
_DOUBT = re.compile(
    r"(?:\bnot|n't|\bcannot|\bbetween|\bat (?:least|most)|\bneither"
    r"|\bnever(?: equals?)?|\bunequal to"
    r"|\bdifferent from|\bexceeds?|\babove|\bbelow|\bunder|\bup to|\beither"
    r"|\b(?:more|less|fewer|greater|smaller|larger) than)\b|!=|≠|\bfrom\s+\S+\s+to(?=\s)"
    rf"|{NOT}|{_NOT_LATER}|{PERHAPS}",
    re.IGNORECASE,
)
_BEFORE = re.compile(
    rf"(?:\b(?:wrong|incorrect|false|not|cannot be|n't|never|isn't)\b|{NOT}|不)"
    r"(?:(?!\b(?:so|thus|hence|therefore)\b)[^.;\n]){0,25}$",
    re.IGNORECASE,
)  # a negation before "the answer is"
_TAKEN_BACK = re.compile(
    r"[,;.]?\s*(?:which|but (?:this|that|it)|this|that|it)\s+(?:is|was)\s+"
    r"(?:not|wrong|incorrect|false)\b",
    re.IGNORECASE,
)
_WORKED = re.compile(
    r"\b(?:root|square|cube|half|twice|double|triple|negative|minus|opposite|reciprocal|factorial"
    r"|logarithm|sine|cosine)\b[^\d$]*$",
    re.IGNORECASE,
)  # a word before a number for an operation still to be applied to it
_RATHER = re.compile(r"[,;]\s*(?:but\s+)?(?:it is|it's|rather|but)\s+", re.IGNORECASE)
_STOP = r"(?P<end>(?<!\bRs)(?<!\bapprox)[.!?](?=\s|$|[*_`]+(?:\s|$))|[。！？；]|\n)"
_REASON = re.compile(
    r",?\s+(?:since|because|so that|given that|due to)\b.*|,\s+(?:as|with|when)\b.*"
    r"|[，,]?\s*(?:因为|由于).*|(?:です|である|だ|となります|입니다|이다|है|हैं)[。.]?$",
    re.IGNORECASE | re.DOTALL,
)
_BRACKETED_REASON = re.compile(
    r"\s*\((?:\\text\s*\{\s*)?(?:since|because|as|that is|i\.e\.,?|see|namely|from|by|so)\b"
    r"(?![^()]*\b(?:or|not|maybe|if)\b)(?:[^()]|\([^()]*\))*\)",
    re.IGNORECASE,
)
_ASIDE = re.compile(
    r",?\s+(?:which|where)\b.*|,\s+so\b.*|[，,]\s*所以.*", re.IGNORECASE | re.DOTALL
)
_BOLD = re.compile(r"(\*\*|__)(?=\S)([^*\n]{1,80}?)(?<=\S)\1")
_JOINED_BOLD = re.compile(r"(?:(?:\*\*[^*\n]{1,40}\*\*)(?:\s*,\s*|\s+or\s+|\s+and\s+|\s+))*$")
FALSE = re.compile(
    r"[\s$*_]*(?:\\[)\]])?\s*(?:(?:(?:is|was|are|were)\s+|it's\s+)(?:not|wrong|incorrect|false|impossible|too)\b"
    rf"|(?:isn't|cannot|can't|fails|does\s?n[o']t)\b|(?:(?:ist|n'est|est|es|é|è|это)\s+)?(?:{NOT}"
    r"|falsch|faux|fausse|incorrect[oae]?|falso|errad[oa]|sbagliat[oa]|неверно|неправильно)\b"
    r"|(?:这|是|也)*(?:不|错)|(?:は|が|では|じゃ)(?:ない|ありません|あり?ませ|間違|誤)|(?:이|가)?\s*(?:아니|아닙)|नहीं|ليس)",
    re.IGNORECASE,
)  # text behind an answer that rejects it
_HEADED = re.compile(
    r"^(?:(?:#{1,6}[^\n]*|-{3,}|[*_]{0,2}(?:final |the )?(?:answer|result|solution|total)"
    r"[*_:]{0,3})\s*\n\s*)+"
    r"|^(?:>|1\.)\s+(?=\S+$)",
    re.IGNORECASE,
)  # a heading over an answer
_FIRST_WORD = re.compile(
    r"(?!.*\b(?:wait|actually|but|hmm)\b)(yes|no|true|false)[,.:;]?\s+(?:(?:because|since|as)\b[^\n]{0,300}|(?<=[,.]\s)[^\n\d]{0,80})$",
    re.IGNORECASE,
)
_CHOSEN_FIRST = re.compile(r"\(?[A-J][).:]\s+[^\n]{1,80}")
_VERDICT = re.compile(r"true|false|yes|no", re.IGNORECASE)
_VERDICTS = re.compile(
    r"(?:^|[.!?\n:,]\s*|\b(?:is|so|therefore|thus|hence|answer),?\s+)[*_]*(yes|no|true|false)"
    r"(?=[*_]*(?:\s*[,.;:!]|\s+(?:because|since|as|when|for)\b|\s*$))",
    re.IGNORECASE,
)
_FORMULA = re.compile(
    r"\$\$([^$]+?)\$\$|\\\[((?:(?!\\\[).)+?)\\\]|\\\(((?:(?!\\\().)+?)\\\)"
    r"|(?<![\\\d$])\$(?!\d[^$\n]*\s[a-z]{2,}\s[^$\n]*\$)([^$\n]+?)(?<!\\)\$(?!\d)",
    re.DOTALL,
)
_STOPS = re.compile(f"{_FORMULA.pattern}|{_STOP}", re.DOTALL)
_ATOM = (
    r"\d{1,2}[-/.]\d{1,2}[-/.]\d{4}|\d{4}-\d{1,2}-\d{1,2}|"
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
    r"|dollars?|cents?|dozen|pairs?|met(?:er|re)s?|feet|inches|miles|years?|degrees?)\b(?:\^\{?\d\}?|²|³)?)?",
    re.IGNORECASE,
)
_WRITTEN = re.compile(
    r"(?<![\w\\])(?:[\[(]\s*-?[\w.√π/]{1,20}(?:\s*,\s*-?[\w.√π∞/]{1,20})+\s*[\])]"
    r"|[a-z]\s*[<>≤≥]\s*-?[\d./]+"
    r"|[a-z](?:\([a-z]\))?\s*=\s*"
    r"(?:[-+*/^()\d.\s²³]|(?<![A-Za-z])[a-z](?![A-Za-z])){1,60})(?<=[\w)\]²³])"
)  # a tuple, an interval or an equation without dollar signs
_PLACED = re.compile(
    r"(?:\b(?:in|on|over|after|before|between|among|within|from|than|out of|per|at|by|every"
    r"|i\.e\.,?)\s*\$?"
    r"|\b(?:between|from)\s+\S{1,12}\s+(?:and|to)\s*\$?"
    r"|(?<!total )(?<!sum )\bof (?:the|all|his|her|their|these|those)\s*\$?"
    r"|\bcourse of\s*|\bto\s+[a-z]+\s+(?:(?:the|a|an|his|her)\s+)?\$?"
    r"|\()$",
    re.IGNORECASE,
)  # text before a number that only gives a place or a time
_NUMBERED_PROSE = re.compile(
    r"\b(?:January|February|March|April|May|June|July|August|September|October|November|December"
    r"|equation|eq|step|figure|table|case|line|part|problem|question|chapter|example)s?\.?"
    r"\s*\(?$",
    re.IGNORECASE,
)  # text before a number that is a name
_COUNTED = re.compile(r"(?i)\b(?:there (?:are|is|were)|(?:has|have|is|are|was|were|equals)|=)\s+")
_TOLD = re.compile(r"=|\b(?:is|are|was|were|equals|gives|has|have)\b", re.IGNORECASE)
_JOINED = re.compile(r"\s*(?:,|,?\s*(?:and|or))\s*(?:[a-z]\s*=\s*)?")
_NOTHING = re.compile(
    r"\b(no (?:real |integer |such )?(?:solutions?|numbers?|integers?)(?: exists?)?"
    r"|infinitely many)\b(?:\s+solutions?)?[.!]*$",
    re.IGNORECASE,
)
_COMPARED = re.compile(
    r"\s*(?:\w+\s+){0,2}(?:more|less|fewer|older|younger|larger|greater|smaller|bigger|taller|shorter"
    r"|longer|higher|lower|heavier|lighter|faster|slower)\s+than\b|\s*(?:times|dozen)\b",
    re.IGNORECASE,
)  # text behind a number that only compares two others
_ASSUMED = re.compile(
    r"\s*(?:[-*\d.)]+\s*)?(?:now,?\s+|first,?\s+)?(?:let\s|suppose|assum|consider|denote|try)",
    re.IGNORECASE,
)  # text before numbers that a derivation begins with
_LINKS = (
    r"\b(?:the|this|that|these|which|and|or|but|so|then|if|when|since|because|as|of|to|for|from|with"
    r"|by|at|than|where|is|are|was|were|be|has|have|had|can|could|will|would|may|might|must|should|we"
    r"|i|you|he|she|it|they|his|her|their|its|needs?|gets?|gives?|next|now|also|let|thus|hence|therefore"
)
_CUT = re.compile(
    rf"(?:[=+/<>,(\\{{:-]|{_LINKS}|an?|on|und|oder|ist|der|die|das|wir|et|est|le|la|que|y|es|el|de|и|это))\s*$",
    re.IGNORECASE,
)  # the end of a text that was cut off
_PROSE_GOES_ON = re.compile(r"[^,;]*[,;]\s*[a-z]", re.IGNORECASE)
_ENDED = re.compile(r"[.!?。！？…:)\]}$*_`\"'|%]\s*$")
_ANY_WORD = re.compile(r"[^\W\d_]{2,}")
_ENGLISH = re.compile(
    rf"{_LINKS}|there|each|total|equals?|left|only|all|costs?|sum|answer|ans|final|not|makes?|falls?)\b",
    re.IGNORECASE,
)
_OFFER = re.compile(r"\s*(?:i )?(?:hope|feel free|let me know|if you|please)\b", re.IGNORECASE)
_IN_WORDS = re.compile(rf"(?<![A-Za-z])(?:an?\s+)?{SPOKEN}", re.IGNORECASE)
_LAST_WORD = re.compile(
    r"\b(?:is|are|was|on an?|on|be)\s+(?:the\s+|an?\s+)?([A-Za-z-]+|[A-Za-z]+ \d{1,2})[.!]*$"
    r"|是([㐀-鿿]{1,12})[。.!！]*$"
)
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
_LETTER = re.compile(r"\(?[A-J]\)?[.)]?")
_ONLY_LETTER = re.compile(
    r"(?!.*\b(?i:not|never|neither|except)\b)(?:[A-Za-z]+,?\s+){0,2}\(?([A-J])\)?[.!]*"
)
_LETTERS = re.compile(r"(?<![\\A-Za-z])[A-Za-z]+")
_ASSIGNED = re.compile(r"\s*[A-Za-z](?:\([a-z]\))?\s*=[^=]*")
_NEVER = re.compile(rf"\bnot\b|n't|\bcannot\b|\bnever\b|\bneither\b|{NOT}", re.IGNORECASE)
_EITHER = re.compile(r"\s*,?\s*(?:or|and)\s*")
_LEADING = re.compile(
    r"(?:the|an?|that|indeed|therefore|thus|simply|exactly|then)\b", re.IGNORECASE
)
_HAN, _KANA = re.compile("[一-鿿]"), re.compile("[぀-ヿ]")
_JOINT = re.compile("[=，]")
"""A joint in a text of several parts, of which the last may be the answer."""
_FEW_PROSE_WORDS = 4
_SHORT = 80
_NEAR_END = 200
_LOOKED_AT = 4000


def words(text: str) -> int:
    """Return the number of words of plain language in the text."""
    return len(_WORD.findall(text))


def stated(text: str) -> str | None:
    """Return the answer in the last "the answer is" sentence, or the choice that is called
    right."""
    # Only near the end: earlier, "statement A is true" may be a step towards a number.
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
    """Return the first sentence, without reasons."""
    said = without_reasons(said[:_LOOKED_AT])
    sentence = said[: _first_end(said)].strip()
    short = _ASIDE.sub("", _REASON.sub("", sentence)).strip()
    # This "!" is an exclamation: more text follows a factorial, or it stands in a formula.
    return without_emphasis((short or sentence).removesuffix("!"))


def without_reasons(text: str) -> str:
    """Return ``text`` without reasons in brackets, as in "7 (since 3 + 4 = 7)"."""
    return _BRACKETED_REASON.sub("", text) if "(" in text else text


def _first_end(text: str) -> int:
    # The end of the first sentence. A point inside a formula or a number does not end it.
    for match in _STOPS.finditer(text):
        factorial = match[0] == "!" and text[match.start() - 1 : match.start()].isalnum()
        if match["end"] and not factorial and text[: match.start()].strip(" *_`\n"):
            return match.end() if match[0] != "\n" else match.start()
    return len(text)


def _exact(said: str) -> str:
    formulas = list(_FORMULA.finditer(said))
    if formulas:
        if _NEVER.search(said[: formulas[-1].start()]) and not _RATHER.search(said):
            return said
        if words(_FORMULA.sub(" ", said)) <= _FEW_PROSE_WORDS:
            return said
        first = formulas[0] if formulas[0].start() == 0 else formulas[-1]
        return result(_inside(first))
    if _DOUBT.search(said):
        rather = _RATHER.split(said)
        return _exact(rather[-1]) if len(rather) > 1 else said
    if "=" in said and not _ASSIGNED.fullmatch(said):
        return result(said)
    numbers = list(_NUMBER.finditer(said))
    if any(_EITHER.fullmatch(said, a.end(), b.start()) for a, b in pairwise(numbers)):
        return said
    if not numbers and (word := _LAST_WORD.search(said)) and word[2]:
        return word[2]
    if not numbers or not (_LEADING.match(said) or len(said.split()) > _FEW_PROSE_WORDS + 2):
        return said
    chosen = numbers[-1] if said.lower().startswith("that ") else numbers[0]
    return said if _WORKED.search(said[: chosen.start()]) else _with_unit(chosen)


def result(formula: str) -> str:
    """Return the right side of ``48 + 24 = 72``. An equation in variables stays."""
    left, equals, right = formula.rpartition("=")
    calculated = equals and right.strip() and left.strip() and left[-1] not in "<>!:\\"
    return right.strip() if calculated and not _LETTERS.search(left) else formula


def bold(text: str) -> str | None:
    """Return the bold text in the last lines, if it is an answer."""
    text = text.rstrip()
    for match in reversed(list(_BOLD.finditer(text))):
        said, after = match[2].strip(), text[match.end() :]
        if "=" in after or len(after) > _NEAR_END or "\n\n" in after.strip():
            return None
        few = len(said.split()) <= _FEW_PROSE_WORDS and not said.endswith((":", ".", ")"))
        one = _LETTER.fullmatch(said) or _FORMULA.fullmatch(said) or _VERDICT.fullmatch(said)
        if FALSE.match(after):
            return None
        if (few and _NUMBER.match(said)) or one:
            joined = _JOINED_BOLD.search(text[: match.start()])
            others = _BOLD.sub(r"\2", joined[0]) if joined else ""
            return _bound(text, match.start()) + others + said
    return None


def last(text: str) -> str | None:
    """Return a text that is nothing but an answer, or the answer that ends its last sentences."""
    text = _HEADED.sub("", text.strip()).strip()
    if said := _FIRST_WORD.match(text) or _ONLY_LETTER.fullmatch(text):
        return said[1]
    alone = len(text) <= _SHORT and words(text) <= 1 and not _JOINT.search(text)
    if alone or _CHOSEN_FIRST.fullmatch(text):
        return text
    sentences = [part for part in _sentences(text) if part.strip() and not _OFFER.match(part)]
    final = sentences[-1].strip() if sentences else ""
    if said := _NOTHING.search(final) or _ONLY_LETTER.fullmatch(final):
        return said[1]
    if not final or _cut_off(final):
        return None
    for sentence in map(without_reasons, reversed(sentences)):
        if _ASSUMED.match(sentence) or _foreign(sentence):
            return None
        found = _last_of(_REASON.sub("", sentence)) or _last_of(sentence)
        if found:
            return found
    return _last_word(final)


def verdict(text: str) -> str | None:
    """Return yes or no for a question that asks for it. Numbers do not count."""
    said = {match[1].lower() for match in _VERDICTS.finditer(text)}
    return (said.pop() if len(said) == 1 else None) if said else last(text)


def _cut_off(sentence: str) -> bool:
    sentence = sentence.strip(" *_`\n")
    if _CUT.search(sentence):
        return True
    if _ENDED.search(sentence) or words(sentence) < 2:
        return False
    places = [*_places(sentence), *_IN_WORDS.finditer(sentence)]
    if not places:
        return not _LAST_WORD.search(sentence)
    end = max(place.end() for place in places)
    return words(sentence[end:]) > _FEW_PROSE_WORDS + 1 or bool(_PROSE_GOES_ON.match(sentence, end))


def _foreign(sentence: str) -> bool:
    bare = _FORMULA.sub(" ", sentence)
    if _ENGLISH.search(bare) or _HAN.search(bare):
        return bool(_KANA.search(bare))
    said = _ANY_WORD.findall(bare)
    return len(said) > 4 or any(not word.isascii() for word in said)


def counted(text: str) -> str | None:
    """Return the number of a sentence that states one, as "There are 15 ways.", or None for other
    texts."""
    numbers = list(_NUMBER.finditer(text))
    if len(numbers) != 1 or words(text) < 3 or "\\" in text or _DOUBT.search(text):
        return None
    verbs = list(_COUNTED.finditer(text, 0, numbers[0].start()))
    return _with_unit(numbers[0]) if verbs and verbs[-1].end() >= numbers[0].start() - 1 else None


def _sentences(text: str) -> list[str]:
    # The last sentences. Text beyond ``_LOOKED_AT`` characters is left out: a long text without an
    # end would take long to split.
    text = text[-_LOOKED_AT:]
    parts: list[str] = []
    while text.strip():
        end = max(_first_end(text), 1)
        parts.append(text[:end])
        text = text[end:]
    return parts


def _places(sentence: str) -> list[re.Match[str]]:
    places: list[re.Match[str]] = []
    for pattern in (_FORMULA, _WRITTEN, _NUMBER):
        taken = [match.span() for match in places]
        places += [
            match
            for match in pattern.finditer(sentence)
            if not any(start < match.end() and match.start() < end for start, end in taken)
        ]
    places = [match for match in places if not _NUMBERED_PROSE.search(sentence[: match.start()])]
    return sorted(places, key=lambda match: match.start())


def _last_of(sentence: str) -> str | None:
    places = _places(sentence)
    if not places:
        return None
    told = [match for match in places if not _PLACED.search(sentence[: match.start()])]
    chosen = (told or places)[-1]
    if _WORKED.search(sentence[: chosen.start()]):
        return None
    if FALSE.match(sentence, chosen.end()) or _COMPARED.match(sentence, chosen.end()):
        return None
    return _listed(sentence, [match for match in places if match.end() <= chosen.end()])


def _listed(sentence: str, places: list[re.Match[str]]) -> str:
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
    found = [each for each in _IN_WORDS.finditer(sentence) if each[0].lower() != "one"]
    numbers = [each[0] for each in found if not _COMPARED.match(sentence, each.end())]
    if _DOUBT.search(sentence):
        return None
    if numbers:
        return numbers[-1]
    match = _LAST_WORD.search(without_emphasis(sentence.strip()))
    return (match[1] or match[2]) if match else None


def _inside(formula: re.Match[str]) -> str:
    return next(group for group in formula.groups()[:4] if group)


def _with_unit(match: re.Match[str]) -> str:
    # The number, with a word before it that reverses its sense.
    bound = _bound(match.string, match.start())
    return bound + match["value"].strip() + (match["unit"] or "")


def _bound(text: str, place: int) -> str:
    before = re.split(r"[,;.?\n]|!(?!=)|\bbut\b", text[max(0, place - 60) : place])[-1]
    found = _DOUBT.search(before)
    told = found and _TOLD.search(before, found.end())
    return before[found.start() :] if found and not told else ""
