"""What the judge is asked: prompt templates with the fields prompt, completion and reference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Formatter

from rollpacker.reward.base import GradingError

FIELDS = ("prompt", "completion", "reference")

_REFERENCE = """\
You grade an answer against a reference.

Question:
{prompt}

Reference answer:
{reference}

Answer to grade:
{completion}

Does the answer to grade agree with the reference answer? Reply with Yes or No only."""

_NO_REFERENCE = """\
You grade an answer.

Question:
{prompt}

Answer to grade:
{completion}

Is the answer correct? Reply with Yes or No only."""

# Small models imitate better than they obey: no instruction, only examples, and many of them.
_SHOTS = [
    ("4", "14"),
    ("-11", "-1"),
    ("3", "1"),
    ("-5", "-5"),
    ("3", "3"),
    ("-6", "-9"),
    ("1", "1"),
    ("-1", "9"),
    ("12", "12"),
    ("-8", "-8"),
    ("16", "16"),
    ("-12", "-15"),
    ("1", "-1"),
    ("-2", "-2"),
    ("0", "3"),
    ("1", "1"),
]
_GRADED = "Reference: {}\nAnswer: {}\nGrade: {}\n\n"
_FEW_SHOT = "".join(
    _GRADED.format(reference, answer, "Yes" if answer == reference else "No")
    for reference, answer in _SHOTS
)
_FEW_SHOT += "Reference: {reference}\nAnswer: {completion}\nGrade:"


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgePrompt:
    """A prompt of the judge.

    Args:
        text: a format string.
        chat: whether it is meant as a chat turn.
        yes: answer that means right.
        no: answer that means wrong.
    """

    text: str
    chat: bool = True
    yes: str = "Yes"
    no: str = "No"

    @property
    def fields(self) -> set[str]:
        """Fields that occur in it."""
        return {name for _, name, _, _ in Formatter().parse(self.text) if name is not None}

    def render(self, values: Mapping[str, str | None]) -> str:
        """The prompt. Raises ``GradingError`` when a field that it uses has no value."""
        missing = sorted(name for name in self.fields if values.get(name) is None)
        if missing:
            raise GradingError(f"the judge's template uses {{{missing[0]}}}; the row has none")
        return self.text.format_map({name: values[name] for name in self.fields})


BUILT_IN = {
    "reference": JudgePrompt(text=_REFERENCE),
    "no_reference": JudgePrompt(text=_NO_REFERENCE),
    "few_shot": JudgePrompt(text=_FEW_SHOT, chat=False, yes=" Yes", no=" No"),
}


def load_template(name: str) -> JudgePrompt:
    """A built-in template, a text with fields, or a file with one.

    Raises ``ValueError`` when there is no such file or the text's fields are not usable.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]
    text = name if "{" in name else _read(name)
    _check(text)
    return JudgePrompt(text=text)


def _read(name: str) -> str:
    file = Path(name).expanduser()
    if not file.is_file():
        raise ValueError(
            f"judge: template '{name}' is neither {', '.join(BUILT_IN)}, nor a file, nor a text "
            "with {completion}"
        )
    return file.read_text(encoding="utf-8")


def _check(text: str) -> None:
    try:
        parts = [part for part in Formatter().parse(text) if part[1] is not None]
    except ValueError as error:
        raise ValueError(f"judge: template: {error}; write a plain brace twice") from None
    for _, name, spec, conversion in parts:
        if name not in FIELDS or spec or conversion:
            field = (
                f"{name}{'!' if conversion else ''}{conversion or ''}{':' if spec else ''}{spec}"
            )
            raise ValueError(
                f"judge: template has an unknown field '{{{field}}}'; known: "
                f"{{prompt}}, {{completion}}, {{reference}} (write a plain brace twice)"
            )
    if "completion" not in {name for _, name, _, _ in parts}:
        raise ValueError("judge: template has no {completion}: it would judge nothing")


def prompt_text(prompt: str | list[dict[str, str]]) -> str:
    """A prompt as text: of a chat with one turn its content, of others all turns by role."""
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1:
        return prompt[0]["content"]
    # A turn that calls tools may have no content.
    return "\n".join(f"{turn['role']}: {turn.get('content') or ''}" for turn in prompt)
