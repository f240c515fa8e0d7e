"""Prompts as rows hold them: text, chat messages, tools, and what is no prompt."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from rollpacker.chat import NotTextError, text_of
from rollpacker.data.base import DataError, Message, whole_text
from rollpacker.data.files import Record

Prompt = str | list[Message]

_MEDIA = {
    "image": "images",
    "images": "images",
    "video": "videos",
    "videos": "videos",
    "audio": "sounds",
    "audios": "sounds",
}
"""Columns of TRL, verl and OpenRLHF for what a model of text cannot read, and what they hold."""

_SPEAKERS = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "observation": "tool",
}
"""Who speaks in ShareGPT's turns (``from``, ``value``), where a role has another name."""


_TURNS = re.compile(r"""\[\s*\{\s*['"](role|content|from|value)['"]\s*:""")
"""How the text of chat messages begins, such as pandas makes of a column of arrays."""


class MissingError(DataError):
    """A row lacks its prompt, answer or domain."""


_VALUES = frozenset({str, int, bool, dict, bytes})
"""Types of which everything is a value."""
_PYTHON = ("[{'", "{'", '[{"', '{"', "['")
"""How Python writes objects and lists of texts."""


def is_missing(value: Any) -> bool:
    """Whether a column holds no value in a row: None, NaN, a list of NaN, pandas' NaT or NA."""
    kind = type(value)
    if kind in _VALUES:
        return False
    if value is None or kind.__name__ == "NAType":
        return True
    if isinstance(value, list):
        return bool(value) and all(isinstance(each, float) and each != each for each in value)
    try:
        differs: Any = value != value
    except Exception:  # a user's own type may do as it likes
        return False
    return isinstance(differs, bool | np.bool_) and bool(differs)


def is_empty(value: Any) -> bool:
    """Whether a column holds nothing in a row: no value, or one without content."""
    return is_missing(value) or (isinstance(value, str | list | dict) and not value)


def is_blank(value: Any) -> bool:
    """The same, where a text of spaces is nothing either."""
    return is_empty(value) or (isinstance(value, str) and not value.strip())


def check_text_only(record: Record, where: str) -> None:
    """Raise ``DataError`` where a row comes with pictures or sounds."""
    for name, kind in _MEDIA.items():
        if not is_empty(record.get(name)):
            raise DataError(
                f"{where}: column '{name}' holds {kind}, but models are trained on text alone: "
                "remove or rename the column if the prompts do without"
            )


def parse_prompt(value: Any, where: str) -> tuple[Prompt, str | None]:
    """A prompt as text or chat messages, and what the assistant said at its end, if anything.

    JSON strings of messages are decoded. What the assistant says last is no prompt and is cut; it
    is empty where the turn only calls tools.
    Raises ``MissingError`` when there is no prompt, and ``DataError``, both naming ``where``.
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
    """What a JSON text of an object or a list says, or Python's own text of one, as tables of text
    have it; any other value as it is."""
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
    """Chat messages out of a JSON string of them, of ShareGPT's turns or of pandas' array of
    either; any other value as it is."""
    turns = value.tolist() if isinstance(value, np.ndarray) else decoded(value)
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        return value
    if turns and all("from" in turn and "value" in turn and "role" not in turn for turn in turns):
        return [_spoken(turn) for turn in turns]
    return turns if all("role" in turn for turn in turns) else value


def _spoken(turn: Mapping[str, Any]) -> Message:
    """A turn of ShareGPT's."""
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
    """A turn with all that a chat template may read; what is missing beside the content is not
    there, as in tables each row has the keys of all."""
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
    """Content blocks of text as one text; None where there is none."""
    try:
        return None if is_missing(content) else text_of(content)
    except NotTextError as error:
        raise DataError(f"{where}: {error}") from None


def without_nones(value: Any) -> Any:
    """Without the keys that are missing, at any depth: tables give each row the keys of all."""
    if isinstance(value, Mapping):
        return {k: without_nones(v) for k, v in value.items() if not is_missing(v)}
    if isinstance(value, list):
        return [without_nones(item) for item in value]
    return value


def parse_tools(record: Record, where: str) -> list[dict[str, Any]]:
    """The tools of a row's ``tools`` column: JSON schemas, or a JSON text of them."""
    value = decoded(record.get("tools"))
    if is_empty(value):
        return []
    if not isinstance(value, list) or not all(isinstance(tool, Mapping) for tool in value):
        raise DataError(
            f"{where}: column 'tools' must be a list of JSON schemas, or that as JSON text; "
            "rename it if it is something else"
        )
    return without_nones(value)


def parse_template_kwargs(record: Record, where: str) -> dict[str, Any]:
    """The arguments of a row's ``chat_template_kwargs`` column: an object, or a JSON text of it."""
    value = decoded(record.get("chat_template_kwargs"))
    if is_empty(value):
        return {}
    if not isinstance(value, Mapping):
        raise DataError(f"{where}: column 'chat_template_kwargs' must be an object")
    return without_nones(value)
