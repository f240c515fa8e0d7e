"""Which column is what: schemas of other frameworks, recognised by their columns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollpacker.config import DataConfig
from rollpacker.data.base import DataError
from rollpacker.data.files import Record
from rollpacker.data.messages import chat_of, decoded, is_empty

OPENRLHF = "OpenRLHF"
"""The schema whose rows may lack a domain."""

_PROMPTS = ("prompt", "question", "problem", "input")
_ANSWERS = ("answer", "ground_truth", "solution", "label")


@dataclass(frozen=True, slots=True, kw_only=True)
class Schema:
    """How to read a record.

    Args:
        name: of the recognised schema.
        prompt: column of the prompt.
        answer: column of the answer, dotted where nested; None where rows have none.
        domain: column of the domain, or None.
        gold: whether answers are what the assistant says last in a row's prompt.
    """

    name: str
    prompt: str
    answer: str | None
    domain: str | None
    gold: bool

    def describe(self) -> str:
        """One line: the schema and which column went where."""
        last_turn = "the assistant's last turn" if self.gold else "none"
        parts = [f"prompt <- {self.prompt}", f"answer <- {self.answer or last_turn}"]
        parts.append(f"domain <- {self.domain}" if self.domain else "one domain")
        return f"{self.name}: {', '.join(parts)}"


def columns_of(records: Iterable[Record]) -> Record:
    """Every column with its first value, one that is not empty where there is one."""
    columns: Record = {}
    for record in records:
        for name, value in record.items():
            if columns.get(name) is None or (is_empty(columns[name]) and not is_empty(value)):
                columns[name] = value
    return columns


def detect(records: Sequence[Record], config: DataConfig, source: str) -> Schema:
    """The schema of a source's rows. Raises ``DataError``."""
    columns = columns_of(records)
    names = list(columns)
    name, prompt, answer, domain = _framework(columns)
    if config.input_key or config.label_key:
        name = "by key"
    prompt = _chosen(config.input_key, "data.input_key", names, source) or prompt
    answer = _chosen(config.label_key, "data.label_key", names, source) or answer
    if config.label_key == "":
        answer = None
    unknown = answer is None and config.label_key is None
    gold = unknown and prompt is not None and any(_ends_in_answer(r, prompt) for r in records)
    if prompt is None or (unknown and not gold):
        raise DataError(_lacking(columns, source, prompt=prompt is None, answer=unknown))
    domain = _chosen(config.domain_key, "data.domain_key", names, source) or domain
    return Schema(name=name, prompt=prompt, answer=answer, domain=domain, gold=gold)


def _lacking(columns: Record, source: str, *, prompt: bool, answer: bool) -> str:
    what = " and ".join(["no prompt column"] * prompt + ["no answer column"] * answer)
    keys = ["data.input_key"] * prompt
    keys += ["data.label_key ('' when no reward needs an answer)"] * answer
    candidates = [name for name in (*_PROMPTS * prompt, *_ANSWERS * answer) if name in columns]
    nulls = f" ('{candidates[0]}' is empty in every row)" if candidates else ""
    return f"{source}: {what} among {list(columns)}{nulls}: set {' and '.join(keys)}"


def _ends_in_answer(record: Record, prompt: str) -> bool:
    turns = chat_of(value_at(record, prompt))
    last = turns[-1] if isinstance(turns, list) and turns else None
    return isinstance(last, Mapping) and last.get("role") == "assistant"


def prompt_column(columns: Record, config: DataConfig) -> str | None:
    """The prompt's column, where there is one."""
    if config.input_key and config.input_key.split(".")[0] in columns:
        return config.input_key
    return _framework(columns)[1]


def _framework(columns: Record) -> tuple[str, str | None, str | None, str | None]:
    filled = {name for name, value in columns.items() if value is not None}
    model = decoded(columns.get("reward_model"))
    if isinstance(model, dict) and "ground_truth" in model and "prompt" in filled:
        domain = "data_source" if "data_source" in filled else None
        return "verl", "prompt", "reward_model.ground_truth", domain
    if isinstance(columns.get("messages"), str) and "ground_truth" in filled:
        return "ROLL", "messages", "ground_truth", "tag" if "tag" in filled else None
    if "rg_task" in columns:
        return f"reasoning-gym {columns['rg_task']}", "question", "answer", None
    prompt = next((c for c in (*_PROMPTS, "messages") if c in filled), None)
    answer = next((c for c in _ANSWERS if c in filled and c != prompt), None)
    if "datasource" in filled:
        return OPENRLHF, prompt, answer, "datasource"
    canonical = (prompt, answer) == ("prompt", "answer")
    return "canonical" if canonical else "aliases", prompt, answer, None


def _chosen(key: str | None, setting: str, columns: Sequence[str], source: str) -> str | None:
    if not key:
        return None
    if key.split(".")[0] not in columns and key not in columns:
        raise DataError(f"{source}: {setting} is '{key}' but the columns are {columns}")
    return key


def value_at(record: Record, column: str) -> Any:
    """The value of a column, dotted where nested, JSON texts decoded; None where it is missing."""
    if column in record:
        return record[column]
    value: Any = record
    for part in column.split("."):
        value = decoded(value)
        value = value.get(part) if isinstance(value, dict) else None
    return value
