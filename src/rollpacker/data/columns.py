"""Decides which columns of a row make a prompt, an answer and a domain."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollpacker.chat import NotTextError, text_of
from rollpacker.config import DataConfig
from rollpacker.data.base import DataError, Message, Record, whole_text

# --- Prompts as rows hold them: text, chat messages, tools

Prompt = str | list[Message]

_MEDIA = {
    "image": "images",
    "images": "images",
    "video": "videos",
    "videos": "videos",
    "audio": "sounds",
    "audios": "sounds",
}  # columns of TRL, verl and OpenRLHF for media, which a text model cannot read

_SPEAKERS = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "observation": "tool",
}  # other names of roles in ShareGPT's turns (``from``, ``value``)


_TURNS = re.compile(r"""\[\s*\{\s*['"](role|content|from|value)['"]\s*:""")
"""The beginning of chat messages as text, such as pandas makes of a column of arrays."""


class MissingError(DataError):
    """A row lacks its prompt, answer or domain."""


_VALUES = frozenset({str, int, bool, dict, bytes})  # types without missing values
_PYTHON = ("[{'", "{'", '[{"', '{"', "['")
"""The beginning of objects and lists of texts in Python's notation."""


def is_missing(value: Any) -> bool:
    """Return whether a row has no value in a column: None, NaN, a list of NaN, pandas' NaT or
    NA."""
    kind = type(value)
    if kind in _VALUES:
        return False
    if value is None or kind.__name__ == "NAType":
        return True
    if isinstance(value, list):
        return bool(value) and all(isinstance(each, float) and each != each for each in value)
    try:
        differs: Any = value != value
    except Exception:  # a user's own type may raise anything
        return False
    return isinstance(differs, bool | np.bool_) and bool(differs)


def is_empty(value: Any) -> bool:
    """Return whether a value is missing or has no content."""
    return is_missing(value) or (isinstance(value, str | list | dict) and not value)


def is_blank(value: Any) -> bool:
    """Return whether a value is empty, or a text of spaces."""
    return is_empty(value) or (isinstance(value, str) and not value.strip())


def check_text_only(record: Record, where: str) -> None:
    """Raise ``DataError`` if a row comes with pictures or sounds."""
    for name, kind in _MEDIA.items():
        if not is_empty(record.get(name)):
            raise DataError(
                f"{where}: column '{name}' holds {kind}, but models are trained on text alone: "
                "remove or rename the column if the prompts do not need it"
            )


def parse_prompt(value: Any, where: str) -> tuple[Prompt, str | None]:
    """Return a prompt as text or chat messages, and the assistant's text at its end, if any.

    JSON strings of messages are decoded. The assistant's last turns are cut from the prompt. The
    text is empty if they only call tools. Raises ``MissingError`` if there is no prompt, and
    ``DataError``, both naming ``where``.
    """
    value = chat_of(value)
    if is_blank(value):
        raise MissingError(f"{where}: the prompt is empty")
    if isinstance(value, str):
        if _TURNS.match(value) and value.rstrip().endswith("]"):
            raise DataError(
                f"{where}: the prompt is the text of chat messages, but neither as JSON nor as "
                "Python writes them: write the column with json.dumps, or the file as parquet"
            )
        return whole_text(value, f"{where}: the prompt"), None
    if not isinstance(value, list):
        found = type(value).__name__
        raise DataError(f"{where}: the prompt must be text or chat messages, found {found}")
    turns = [_message(turn, where) for turn in value]
    return _without_answer(turns, where)


def decoded(value: Any) -> Any:
    """Decode the text of an object or a list in JSON's or Python's notation. Other values stay."""
    if not isinstance(value, str) or value[:1] not in ("{", "["):
        return value
    try:
        return json.loads(value)
    except (json.JSONDecodeError, RecursionError):
        pass
    if not value.startswith(_PYTHON):
        return value
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return value


def chat_of(value: Any) -> Any:
    """Decode chat messages from a JSON string, ShareGPT's turns or pandas' array. Other values
    stay."""
    turns = value.tolist() if isinstance(value, np.ndarray) else decoded(value)
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        return value
    if turns and all("from" in turn and "value" in turn and "role" not in turn for turn in turns):
        return [_spoken(turn) for turn in turns]
    return turns if all("role" in turn for turn in turns) else value


def _spoken(turn: Mapping[str, Any]) -> Message:
    speaker = turn["from"]
    role = _SPEAKERS.get(speaker, speaker) if isinstance(speaker, str) else speaker
    return {"role": role, "content": turn["value"]}


def _without_answer(turns: list[Message], where: str) -> tuple[list[Message], str | None]:
    count = len(turns)
    while count and turns[count - 1]["role"] == "assistant":
        count -= 1
    if not count:
        raise DataError(f"{where}: the prompt has only turns of the assistant, nothing to answer")
    if count == len(turns):
        return turns, None
    return turns[:count], turns[-1].get("content") or ""


def _message(turn: Any, where: str) -> Message:
    # Keep all keys for the chat template. Tables give each row the keys of all, so missing ones go.
    if not isinstance(turn, dict):
        raise DataError(f"{where}: a chat message must have 'role' and 'content', found {turn!r}")
    role, content = turn.get("role"), _content(turn.get("content"), where)
    calls = not is_empty(turn.get("tool_calls"))
    if not isinstance(role, str) or not (isinstance(content, str) or (content is None and calls)):
        raise DataError(
            f"{where}: a chat message needs text as 'role' and 'content', found "
            f"{type(role).__name__} and {type(content).__name__}"
        )
    kept = {str(key): value for key, value in turn.items() if not is_missing(value)}
    if content is not None:
        kept["content"] = whole_text(content, f"{where}: the prompt")
    elif "content" in turn:
        kept["content"] = None
    if calls:
        kept["tool_calls"] = without_nones(turn["tool_calls"])
    return {"role": role} | kept


def _content(content: Any, where: str) -> Any:
    try:
        return None if is_missing(content) else text_of(content)
    except NotTextError as error:
        raise DataError(f"{where}: {error}") from None


def without_nones(value: Any) -> Any:
    """Drop missing keys at any depth, because tables give each row the keys of all."""
    if isinstance(value, Mapping):
        return {k: without_nones(v) for k, v in value.items() if not is_missing(v)}
    if isinstance(value, list):
        return [without_nones(item) for item in value]
    return value


def parse_tools(record: Record, where: str) -> list[dict[str, Any]]:
    """Return the JSON schemas in a row's ``tools`` column, which may be JSON text."""
    value = decoded(record.get("tools"))
    if is_empty(value):
        return []
    if not isinstance(value, list) or not all(isinstance(tool, Mapping) for tool in value):
        raise DataError(
            f"{where}: column 'tools' must be a list of JSON schemas, or that as JSON text. "
            "Rename it if it is something else"
        )
    return without_nones(value)


def parse_template_kwargs(record: Record, where: str) -> dict[str, Any]:
    """Return the object in a row's ``chat_template_kwargs`` column, which may be JSON text."""
    value = decoded(record.get("chat_template_kwargs"))
    if is_empty(value):
        return {}
    if not isinstance(value, Mapping):
        raise DataError(f"{where}: column 'chat_template_kwargs' must be an object")
    return without_nones(value)


# --- Columns of the prompt: one, or several together

PROMPTS = ("prompt", "question", "problem", "input", "question_content")  # columns of a prompt

_CHATS = ("messages", "conversations", "conversation")
_PASSAGES = ("context", "passage", "article", "paragraph")
"""A text before the question that it belongs to."""
_STARTER = "starter_code"  # the function to write, in the layout of APPS and TACO
_CHOICES = ("choices", "options")
_EARLIER = "history"  # turns before an instruction, in LLaMA-Factory's layout


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLayout:
    """The columns that make a prompt.

    Args:
        column: of the prompt, dotted if nested.
        before: column of a text before it, with a blank line between. ``after`` likewise.
        system: column of the system turn.
        named: the user names the column, so no other column joins the prompt.
    """

    column: str
    before: str | None = None
    after: str | None = None
    system: str | None = None
    named: bool = False

    @property
    def several(self) -> bool:
        return bool(self.before or self.after or self.system)

    def __str__(self) -> str:
        parts = [part for part in (self.before, self.column, self.after) if part]
        return " + ".join(parts) + (f", system turn <- {self.system}" if self.system else "")


def layout_of(columns: Record) -> tuple[PromptLayout | None, tuple[str, ...]]:
    """Return the columns of the prompt, and unusual columns of the answer. ``columns``: each with a
    value, not empty if it has one."""
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
    # A column that is blank in every row is still the prompt if there is no other.
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
    """Return the value of a column, dotted if nested, JSON texts decoded. None if it is missing."""
    if column in record:
        return record[column]
    value: Any = record
    for part in column.split("."):
        value = decoded(value)
        value = value.get(part) if isinstance(value, dict) else None
    return value


def prompt_of(record: Record, layout: PromptLayout, where: str) -> Any:
    """Return a row's prompt from its parts, or None if it has none. Raises ``DataError`` that
    begins with ``where`` if a part is no text."""
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
    # The messages' own system turn wins.
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
    # Refuse a prompt that lacks text on which the answer depends.
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
    value = decoded(value)
    if isinstance(value, dict):
        value = value.get("text")
    texts: list[Any] = value if isinstance(value, list) else []
    return [text for text in texts if isinstance(text, str) and text.strip()]


# --- Schemas of other frameworks, recognised by their columns

OPENRLHF = "OpenRLHF"  # the schema whose rows may lack a domain

_ANSWERS = ("answer", "ground_truth", "solution", "label")


@dataclass(frozen=True, slots=True, kw_only=True)
class Schema:
    """How to read a record. Columns are dotted if nested, None if rows lack them. ``gold``: the
    assistant's last text in the prompt is the answer."""

    name: str
    prompt: PromptLayout
    answer: str | None
    domain: str | None
    gold: bool

    def describe(self) -> str:
        last_turn = "the assistant's last turn" if self.gold else "none"
        parts = [f"prompt <- {self.prompt}", f"answer <- {self.answer or last_turn}"]
        parts.append(f"domain <- {self.domain}" if self.domain else "one domain")
        return f"{self.name}: {', '.join(parts)}"


def columns_of(records: Iterable[Record]) -> Record:
    """Return every column with its first value that is not empty, if there is one."""
    columns: Record = {}
    for record in records:
        for name, value in record.items():
            if is_missing(columns.get(name)) or (is_empty(columns[name]) and not is_empty(value)):
                columns[name] = value
    return columns


def detect(records: Sequence[Record], config: DataConfig, source: str) -> Schema:
    """Return the schema of a source's rows. Raises ``DataError``."""
    columns = columns_of(records)
    names = list(columns)
    name, layout, answer, domain = _framework(columns)
    if config.input_key or config.label_key:
        name = "by key"
    chosen = _chosen(config.input_key, "data.input_key", names, source)
    layout = PromptLayout(column=chosen, named=True) if chosen else layout
    answer = _chosen(config.label_key, "data.label_key", names, source) or answer
    if config.label_key == "":
        answer = None
    unknown = answer is None and config.label_key is None
    gold = unknown and layout is not None and any(_ends_in_answer(r, layout) for r in records)
    if layout is None or (unknown and not gold):
        raise DataError(_lacking(columns, source, prompt=layout is None, answer=unknown))
    domain = _chosen(config.domain_key, "data.domain_key", names, source) or domain
    return Schema(name=name, prompt=layout, answer=answer, domain=domain, gold=gold)


def _lacking(columns: Record, source: str, *, prompt: bool, answer: bool) -> str:
    what = " and ".join(["no prompt column"] * prompt + ["no answer column"] * answer)
    keys = ["data.input_key"] * prompt
    keys += ["data.label_key ('' when no reward needs an answer)"] * answer
    candidates = [name for name in (*PROMPTS * prompt, *_ANSWERS * answer) if name in columns]
    nulls = f" ('{candidates[0]}' is empty in every row)" if candidates else ""
    return f"{source}: {what} among {list(columns)}{nulls}: set {' and '.join(keys)}"


def _ends_in_answer(record: Record, layout: PromptLayout) -> bool:
    turns = chat_of(value_at(record, layout.column))
    last = turns[-1] if isinstance(turns, list) and turns else None
    return isinstance(last, Mapping) and last.get("role") == "assistant"


def prompt_layout(columns: Record, config: DataConfig) -> PromptLayout | None:
    """Return the columns that make the prompt, if there are any."""
    if config.input_key and config.input_key.split(".")[0] in columns:
        return PromptLayout(column=config.input_key, named=True)
    return _framework(columns)[1]


def _framework(columns: Record) -> tuple[str, PromptLayout | None, str | None, str | None]:
    filled = {name for name, value in columns.items() if not is_missing(value)}
    model = decoded(columns.get("reward_model"))
    if isinstance(model, dict) and "ground_truth" in model and "prompt" in filled:
        domain = "data_source" if "data_source" in filled else None
        return "verl", PromptLayout(column="prompt"), "reward_model.ground_truth", domain
    if isinstance(columns.get("messages"), str) and "ground_truth" in filled:
        domain = "tag" if "tag" in filled else None
        return "ROLL", PromptLayout(column="messages"), "ground_truth", domain
    if "rg_task" in columns:
        layout = PromptLayout(column="question", named=True)
        return f"reasoning-gym {columns['rg_task']}", layout, "answer", None
    layout, gold = layout_of(columns)
    prompt = None if layout is None else layout.column
    answers = (*_ANSWERS, *gold)
    answer = next((c for c in answers if c in filled and c != prompt), None)
    if "datasource" in filled:
        return OPENRLHF, layout, answer, "datasource"
    canonical = (prompt, answer) == ("prompt", "answer")
    return "canonical" if canonical else "aliases", layout, answer, None


def _chosen(key: str | None, setting: str, columns: Sequence[str], source: str) -> str | None:
    if not key:
        return None
    if key.split(".")[0] not in columns and key not in columns:
        raise DataError(f"{source}: {setting} is '{key}' but the columns are {columns}")
    return key
