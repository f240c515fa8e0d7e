"""Which text is one expression that math-verify reads whole.

It drops what it does not understand and evaluates the rest: ``5 \\ne x`` would be 5. What is not
certain to be read whole is compared as text.
"""

from __future__ import annotations

import re

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
_MATRIX = re.compile(r"\\begin\s*\{([bpvBV]?matrix|array)\}.*?\\end\s*\{\1\}", re.DOTALL)
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{4,}(?![A-Za-z])")
_NOT = re.compile(r"(?<![A-Za-z\\])(?:not|no|nor)(?![A-Za-z])", re.IGNORECASE)
_TEXT = re.compile(r"\\text\s*\{\s*[^{}\s]")
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
    """Whether math-verify reads all of ``text``, as ``latex.tidy`` leaves it."""
    if _TEXT.search(text) or _NOT.search(text) or _CONDITIONAL.search(text):
        return False
    bare = _MATRIX.sub(" ", text)
    if any(name not in _KNOWN for name in _COMMAND.findall(bare)):
        return False
    if any(word not in _FUNCTIONS for word in _WORD.findall(_COMMAND.sub(" ", bare))):
        return False
    for wrong in (_STRANGE, _SEPARATE, _ENDS, _OPEN_END, _TWICE):
        if wrong.search(bare.strip()):
            return False
    return bare.count("|") % 2 == 0 and _balanced(bare)


def _balanced(text: str) -> bool:
    """As many brackets are closed as are opened, of any kind: ``[2, 5)`` is an interval."""
    depth = 0
    for bracket in _BRACKET.findall(text):
        depth += 1 if bracket in "([{" else -1
        if not 0 <= depth <= _DEEPEST:
            return False
    return depth == 0


def huge(text: str) -> bool:
    """Whether its value may have more digits or terms than there is time for."""
    return bool(_HUGE.search(text))
