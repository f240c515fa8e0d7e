"""Which column is what: schemas of other frameworks, recognised by their columns."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rollpacker.config import DataConfig
from rollpacker.data.base import DataError
from rollpacker.data.read import Record

_PROMPTS = ("prompt", "question", "problem", "input")
_ANSWERS = ("answer", "ground_truth", "solution", "label")

Prompt = str | list[dict[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schema:
    """How to read a record.

    Args:
        name: of the recognised schema.
        prompt: column of the prompt.
        answer: column of the answer, dotted where nested; None where rows have none.
        domain: column of the domain, or None.
    """

    name: str
    prompt: str
    answer: str | None
    domain: str | None

    def describe(self) -> str:
        """One line: the schema and which column went where."""
        parts = [f"prompt <- {self.prompt}", f"answer <- {self.answer or 'none'}"]
        parts.append(f"domain <- {self.domain}" if self.domain else "one domain")
        return f"{self.name}: {', '.join(parts)}"


def detect(record: Record, config: DataConfig, source: str) -> Schema:
    """The schema of ``record``, a source's first row. Raises ``DataError``."""
    columns = list(record)
    name, prompt, answer, domain = _framework(record)
    if config.input_key or config.label_key:
        name = "by key"
    prompt = _chosen(config.input_key, "data.input_key", columns, source) or prompt
    if config.label_key == "":
        answer = None
    else:
        answer = _chosen(config.label_key, "data.label_key", columns, source) or answer
        if answer is None:
            raise DataError(
                f"{source}: no answer column among {columns}: set data.label_key "
                "('' when no reward needs an answer)"
            )
    if prompt is None:
        raise DataError(f"{source}: no prompt column among {columns}: set data.input_key")
    domain = _chosen(config.domain_key, "data.domain_key", columns, source) or domain
    return Schema(name=name, prompt=prompt, answer=answer, domain=domain)


def prompt_column(record: Record, config: DataConfig) -> str | None:
    """The prompt's column, where the record has one."""
    if config.input_key in record:
        return config.input_key
    return _framework(record)[1]


def _framework(record: Record) -> tuple[str, str | None, str | None, str | None]:
    model = record.get("reward_model")
    if isinstance(model, dict) and "ground_truth" in model and "prompt" in record:
        domain = "data_source" if "data_source" in record else None
        return "verl", "prompt", "reward_model.ground_truth", domain
    if isinstance(record.get("messages"), str) and "ground_truth" in record:
        return "ROLL", "messages", "ground_truth", "tag" if "tag" in record else None
    if "rg_task" in record:
        return f"reasoning-gym {record['rg_task']}", "question", "answer", None
    prompt = next((c for c in _PROMPTS if c in record), None)
    if prompt is None and "messages" in record:
        prompt = "messages"
    answer = next((c for c in _ANSWERS if c in record and c != prompt), None)
    canonical = (prompt, answer) == ("prompt", "answer")
    return "canonical" if canonical else "aliases", prompt, answer, None


def _chosen(key: str | None, setting: str, columns: Sequence[str], source: str) -> str | None:
    if not key:
        return None
    if key.split(".")[0] not in columns:
        raise DataError(f"{source}: {setting} is '{key}' but the columns are {columns}")
    return key


def value_at(record: Record, column: str) -> Any:
    """The value of a column, dotted where nested; None where it is missing."""
    if column in record:
        return record[column]
    value: Any = record
    for part in column.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def parse_prompt(value: Any, where: str) -> Prompt:
    """A prompt as text or chat messages; JSON strings of messages are decoded.

    Raises ``DataError`` naming ``where``.
    """
    if isinstance(value, str):
        value = _decoded(value)
    if isinstance(value, str):
        if not value.strip():
            raise DataError(f"{where}: the prompt is empty")
        return value
    if not isinstance(value, list) or not value:
        found = type(value).__name__
        raise DataError(f"{where}: the prompt must be text or chat messages, found {found}")
    return [_message(turn, where) for turn in value]


def _decoded(text: str) -> Any:
    if not text.startswith("[{"):
        return text
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        return text
    is_chat = all(isinstance(turn, dict) and "role" in turn for turn in value)
    return value if is_chat else text


def _message(turn: Any, where: str) -> dict[str, str]:
    if not isinstance(turn, dict):
        raise DataError(f"{where}: a chat message must have 'role' and 'content', found {turn!r}")
    role, content = turn.get("role"), turn.get("content")
    if not isinstance(role, str) or not isinstance(content, str):
        raise DataError(
            f"{where}: a chat message needs text as 'role' and 'content', found "
            f"{type(role).__name__} and {type(content).__name__}"
        )
    return {"role": role, "content": content}
