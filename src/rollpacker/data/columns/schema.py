"""Which column is what: schemas of other frameworks, recognised by their columns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rollpacker.config import DataConfig
from rollpacker.data.base import DataError
from rollpacker.data.columns.layouts import PROMPTS, PromptLayout, layout_of, value_at
from rollpacker.data.columns.messages import chat_of, decoded, is_empty, is_missing
from rollpacker.data.files import Record

OPENRLHF = "OpenRLHF"
"""The schema whose rows may lack a domain."""

_ANSWERS = ("answer", "ground_truth", "solution", "label")


@dataclass(frozen=True, slots=True, kw_only=True)
class Schema:
    """How to read a record.

    Args:
        answer: column of the answer, dotted where nested; None where rows have none.
        domain: column of the domain, or None.
        gold: whether answers are what the assistant says last in a row's prompt.
    """

    name: str
    prompt: PromptLayout
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
            if is_missing(columns.get(name)) or (is_empty(columns[name]) and not is_empty(value)):
                columns[name] = value
    return columns


def detect(records: Sequence[Record], config: DataConfig, source: str) -> Schema:
    """The schema of a source's rows. Raises ``DataError``."""
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
    """Which columns make the prompt, where there is one."""
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
