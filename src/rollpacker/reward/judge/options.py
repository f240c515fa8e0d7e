"""Options of the judge: the ``options:`` of a reward ``function: judge``."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Formatter
from typing import Any, Literal

from pydantic import Field, model_validator

from rollpacker.config import Config
from rollpacker.policy.grading import JudgePlan
from rollpacker.reward.base import GradingError


class JudgeOptions(Config):
    """The judging model, its prompt, and how its answer becomes a score in [0, 1]."""

    model: str | None = None
    """Folder or hub name of a causal language model with its tokenizer."""
    mode: Literal["logits", "generate"] = "logits"
    """``logits`` compares two answer tokens. ``generate`` decodes an answer and parses it."""
    template: str = "reference"
    """``reference``, ``no_reference``, ``few_shot``, a text with ``{prompt}``, ``{completion}``
    and ``{reference}``, or a file with such a text."""
    chat: bool | None = None
    """Send the prompt as a chat turn. Default: if the tokenizer can, except for ``few_shot``."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Extra arguments of the tokenizer's chat template, as ``enable_thinking: false``."""
    reference_key: str = "answer"
    """Column of the reference answer."""
    after: str | None = None
    """Judge only the text after the last such mark, as ``</think>``. Default: all of it."""
    yes: str | None = None
    """Mode ``logits``: answer that means right. Default: the template's own."""
    no: str | None = None
    """Mode ``logits``: answer that means wrong. Default: the template's own."""
    score: Literal["sigmoid", "threshold"] = "sigmoid"
    """Mode ``logits``: how a difference of logits becomes a score."""
    threshold: float = 0.0
    """Mode ``logits``: difference (nats) that scores 1/2, or above which the score is 1."""
    parser: str = "yes_no"
    """Mode ``generate``: ``yes_no``, ``brackets`` (``[[7]]``), ``json:FIELD`` or
    ``regex:PATTERN``."""
    low: float = 0.0
    """Number that the parsers turn into 0."""
    high: float = 10.0
    """Number that the parsers turn into 1."""
    max_new_tokens: int = Field(default=32, ge=1)
    """Mode ``generate``: longest answer."""
    max_tokens: int = Field(default=0, ge=0)
    """Longest prompt of the judge. 0 for the model's context."""
    overlong: Literal["error", "tail"] = "error"
    """Longer prompts fail (``error``), or lose the beginning of the response (``tail``)."""
    max_concurrency: int = Field(default=64, ge=1)
    """Most responses in a batch."""
    batch_tokens: int = Field(default=16_384, ge=1)
    """Most padded tokens in a batch of several responses."""
    resident: int | Literal["auto", "all"] = "auto"
    """Layers that stay on the device. ``auto`` follows the waiting lengths and the free memory (all
    layers on CPU)."""
    memory_gb: float | None = Field(default=None, gt=0.0)
    """Device memory that the judge may use. Default: what is free."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the weights. ``auto`` is the checkpoint's."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the judge computes."""
    threads: int = Field(default=1, ge=1)
    """CPU threads."""

    @model_validator(mode="after")
    def _consistent(self) -> JudgeOptions:
        if self.low >= self.high:
            raise ValueError(f"low must be below high, got low={self.low} and high={self.high}")
        if isinstance(self.resident, int) and self.resident < 0:
            raise ValueError(f"resident must not be negative, got {self.resident}")
        return self


# The judge's prompts: templates with the fields prompt, completion and reference.

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

# Small models imitate better than they obey, so this prompt has many examples and no instruction.
_SHOTS = """4 14, -11 -1, 3 1, -5 -5, 3 3, -6 -9, 1 1, -1 9, 12 12, -8 -8, 16 16, -12 -15, 1 -1,
    -2 -2, 0 3, 1 1"""
_GRADED = "Reference: {}\nAnswer: {}\nGrade: {}\n\n"
_FEW_SHOT = "".join(
    _GRADED.format(reference, answer, "Yes" if answer == reference else "No")
    for reference, answer in map(str.split, _SHOTS.split(","))
)
_FEW_SHOT += "Reference: {reference}\nAnswer: {completion}\nGrade:"


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgePrompt:
    """A format string. ``chat``: it is meant as a chat turn. ``yes`` and ``no`` are the answers."""

    text: str
    chat: bool = True
    yes: str = "Yes"
    no: str = "No"

    @property
    def fields(self) -> set[str]:
        return {name for _, name, _, _ in Formatter().parse(self.text) if name is not None}

    def render(self, values: Mapping[str, str | None]) -> str:
        """Return the prompt. Raises ``GradingError`` if a field that it uses has no value."""
        missing = sorted(name for name in self.fields if values.get(name) is None)
        if missing:
            raise GradingError(f"the judge's template uses {{{missing[0]}}}, but the row has none")
        return self.text.format_map({name: values[name] for name in self.fields})


BUILT_IN = {
    "reference": JudgePrompt(text=_REFERENCE),
    "no_reference": JudgePrompt(text=_NO_REFERENCE),
    "few_shot": JudgePrompt(text=_FEW_SHOT, chat=False, yes=" Yes", no=" No"),
}


def load_template(name: str) -> JudgePrompt:
    """Return a built-in template, a text with fields, or the text of a file. Raises ``ValueError``
    if there is no such file or the text's fields are not usable."""
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
        raise ValueError(f"judge: template: {error} (write a plain brace twice)") from None
    for _, name, spec, conversion in parts:
        if name not in FIELDS or spec or conversion:
            field = (
                f"{name}{'!' if conversion else ''}{conversion or ''}{':' if spec else ''}{spec}"
            )
            raise ValueError(
                f"judge: template has an unknown field '{{{field}}}', known: "
                f"{{prompt}}, {{completion}}, {{reference}} (write a plain brace twice)"
            )
    if "completion" not in {name for _, name, _, _ in parts}:
        raise ValueError("judge: template has no {completion}: it would judge nothing")


def prompt_text(prompt: str | list[dict[str, str]]) -> str:
    """Return a prompt as text: the content of a single turn, or all turns by role."""
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1:
        return prompt[0]["content"]
    # A turn that calls tools may have no content.
    return "\n".join(f"{turn['role']}: {turn.get('content') or ''}" for turn in prompt)


# From the judge's text to a score in [0, 1]; None if the text holds no grade.

Parser = Callable[[str], float | None]

_NUMBER = r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)"
_BRACKETS = re.compile(rf"\[\[\s*({_NUMBER})\s*\]\]")
_VERDICT = re.compile(r"\b(yes|no)\b", re.IGNORECASE)
_FIRST_WORD = re.compile(r"\W*(yes|no)\b", re.IGNORECASE)


def make_parser(name: str, low: float = 0.0, high: float = 10.0) -> Parser:
    """Return the parser that an option names. ``low`` becomes 0 and ``high`` 1. Raises
    ``ValueError`` for an unknown name or an unusable pattern."""
    kind, _, argument = name.partition(":")
    if name == "yes_no":
        return _yes_no
    if name == "brackets":
        return lambda text: _last_number(_BRACKETS, text, low, high)
    if kind == "json" and argument:
        return lambda text: _json_field(text, argument, low, high)
    if kind == "regex" and argument:
        pattern = _compiled(argument)
        return lambda text: _last_number(pattern, text, low, high)
    raise ValueError(
        f"judge: unknown parser '{name}', known: yes_no, brackets, json:FIELD, regex:PATTERN"
    )


def _yes_no(text: str) -> float | None:
    # 1 for yes and 0 for no: the first word, or else the only one of the two in the text.
    first = _FIRST_WORD.match(text)
    found = {first.group(1).lower()} if first else {v.lower() for v in _VERDICT.findall(text)}
    return float(found == {"yes"}) if len(found) == 1 else None


def _json_field(text: str, field: str, low: float, high: float) -> float | None:
    decoder = json.JSONDecoder()
    end = len(text)
    while (start := text.rfind("{", 0, end)) >= 0:
        end = start
        try:
            found, _ = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            continue
        if field in found:
            value = found[field]
            if isinstance(value, bool):
                return float(value)
            return _scaled(value, low, high) if isinstance(value, int | float) else None
    return None


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"judge: parser is not a regular expression: {error}") from None
    if compiled.groups != 1:
        raise ValueError(
            f"judge: parser 'regex:{pattern}' needs one group, around the number, but "
            f"it has {compiled.groups}"
        )
    return compiled


def _last_number(pattern: re.Pattern[str], text: str, low: float, high: float) -> float | None:
    found = pattern.findall(text)
    try:
        return _scaled(float(found[-1]), low, high) if found else None
    except ValueError:
        return None


def _scaled(value: float, low: float, high: float) -> float | None:
    # A number outside of the range is no grade, so it is not clipped.
    return (value - low) / (high - low) if low <= value <= high else None


# The number of waiting responses that are judged together, and of layers that stay resident.

Planner = Callable[[Sequence[int]], JudgePlan | None]
"""Takes waiting lengths in tokens, ascending. Returns None if not even the shortest fits."""


def capped(decide: Planner, batch_tokens: int) -> Planner:
    """Limit a plan's batches to ``batch_tokens`` padded tokens (or one response)."""

    def plan(lengths: Sequence[int]) -> JudgePlan | None:
        decided = decide(lengths)
        if decided is None:
            return None
        fitting = 1  # the shortest prompts, each padded to the longest of them
        while fitting < len(lengths) and (fitting + 1) * lengths[fitting] <= batch_tokens:
            fitting += 1
        count = min(decided.concurrency, fitting)
        return JudgePlan(concurrency=count, resident=decided.resident)

    return plan
