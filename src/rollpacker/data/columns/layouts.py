"""Which columns make a prompt: one, or several that ask for the answer only together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rollpacker.data.base import DataError
from rollpacker.data.columns.messages import chat_of, decoded, is_blank, is_empty, is_missing
from rollpacker.data.files import Record

PROMPTS = ("prompt", "question", "problem", "input", "question_content")
"""Columns of a prompt."""

_CHATS = ("messages", "conversations", "conversation")
_PASSAGES = ("context", "passage", "article", "paragraph")
"""What a question is about; it goes before the question."""
_STARTER = "starter_code"
"""The function to be written, in APPS' and TACO's layout."""
_CHOICES = ("choices", "options")
_EARLIER = "history"
"""Turns before an instruction, in LLaMA-Factory's layout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLayout:
    """Which columns make a prompt.

    Args:
        column: of the prompt, dotted where nested.
        before: column of a text before it, with a blank line between, or None.
        after: column of a text behind it, or None.
        system: column of the system turn, or None.
        named: whether the user names the column: what else a row has is none of the prompt.
    """

    column: str
    before: str | None = None
    after: str | None = None
    system: str | None = None
    named: bool = False

    @property
    def several(self) -> bool:
        """Whether more than one column makes the prompt."""
        return bool(self.before or self.after or self.system)

    def __str__(self) -> str:
        parts = [part for part in (self.before, self.column, self.after) if part]
        return " + ".join(parts) + (f", system turn <- {self.system}" if self.system else "")


def layout_of(columns: Record) -> tuple[PromptLayout | None, tuple[str, ...]]:
    """The columns of prompts, and of answers besides the usual ones.

    Args:
        columns: each with a value that is not empty, where it has one.
    """
    filled = {name for name, value in columns.items() if not is_blank(value)}
    passage = next((name for name in _PASSAGES if name in filled), None)
    system = "system_prompt" if isinstance(columns.get("system_prompt"), str) else None
    system = system if system in filled else None
    speaker = system or ("system" if "system" in filled else None)
    if "instruction" in filled and not filled & {*PROMPTS[:3]}:
        after = "input" if "input" in filled else passage
        return PromptLayout(column="instruction", after=after, system=speaker), (
            "output",
            "response",
        )
    # One that is blank in every row is still the prompt, where there is no other.
    present = {name for name, value in columns.items() if not is_missing(value)}
    name = next((name for names in (filled, present) for name in PROMPTS if name in names), None)
    if name is not None:
        before = passage if name == "question" else None
        after = _STARTER if _STARTER in filled else None
        return PromptLayout(column=name, before=before, after=after, system=system), ()
    if "query" in filled:
        return PromptLayout(column="query", before=passage, system=system), ("response",)
    chat = next((name for name in _CHATS if name in filled), None)
    return (PromptLayout(column=chat, system=speaker), ()) if chat else (None, ())


def value_at(record: Record, column: str) -> Any:
    """The value of a column, dotted where nested, JSON texts decoded; None where it is missing."""
    if column in record:
        return record[column]
    value: Any = record
    for part in column.split("."):
        value = decoded(value)
        value = value.get(part) if isinstance(value, dict) else None
    return value


def prompt_of(record: Record, layout: PromptLayout, where: str) -> Any:
    """A row's prompt as it is, its parts put together; None where it has none.

    Raises ``DataError`` that begins with ``where`` where a part is no text.
    """
    value = chat_of(value_at(record, layout.column))
    if layout.named or is_blank(value):
        return value
    _check_all_shown(record, layout, value, where)
    for part, first in ((layout.before, True), (layout.after, False)):
        if part and not is_blank(record.get(part)):
            value = _joined(value, record[part], first, f"{where}: column '{part}'", layout)
    if layout.system and not is_blank(record.get(layout.system)):
        return _with_system(value, record[layout.system], f"{where}: column '{layout.system}'")
    return value


def _joined(value: Any, part: Any, first: bool, what: str, layout: PromptLayout) -> Any:
    """A prompt with a part that it may hold already."""
    if not isinstance(value, str) or not isinstance(part, str):
        found = type(part if isinstance(value, str) else value).__name__
        raise DataError(
            f"{what} belongs to the prompt in column '{layout.column}', but only text can be put "
            f"together, found {found}: set data.input_key: {layout.column} to leave it out"
        )
    if part in value:
        return value
    return f"{part}\n\n{value}" if first else f"{value}\n\n{part}"


def _with_system(value: Any, system: Any, what: str) -> Any:
    """Chat messages that begin with a system turn; their own wins."""
    if not isinstance(system, str):
        found = type(system).__name__
        raise DataError(f"{what} must be the text of the system turn, found {found}: rename it")
    turns = [{"role": "user", "content": value}] if isinstance(value, str) else value
    if not isinstance(turns, list) or _begins_with_system(turns):
        return value
    return [{"role": "system", "content": system}, *turns]


def _begins_with_system(turns: list[Any]) -> bool:
    return bool(turns) and isinstance(turns[0], dict) and turns[0].get("role") == "system"


def _check_all_shown(record: Record, layout: PromptLayout, value: Any, where: str) -> None:
    """Refuse a prompt that lacks what an answer depends on."""
    leave = f"set data.input_key: {layout.column} to do without"
    if layout.column == "instruction" and not is_empty(record.get(_EARLIER)):
        raise DataError(
            f"{where}: column '{_EARLIER}' holds earlier turns: put all turns into a column "
            f"'messages', or {leave}"
        )
    for name in _CHOICES:
        choices = _choices(record.get(name))
        if choices and not any(choice in str(value) for choice in choices):
            raise DataError(
                f"{where}: column '{name}' holds answers to choose from, which the prompt in "
                f"column '{layout.column}' does not show: write them into it, or {leave}"
            )


def _choices(value: Any) -> list[str]:
    """The texts of a column of choices: a list of them, or an object with such a list."""
    value = decoded(value)
    if isinstance(value, dict):
        value = value.get("text")
    texts: list[Any] = value if isinstance(value, list) else []
    return [text for text in texts if isinstance(text, str) and text.strip()]
