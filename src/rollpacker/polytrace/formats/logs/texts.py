"""Fields of a log's record: texts and their speakers, token counts, scores, ids of prompts."""

from __future__ import annotations

import hashlib
import json
import re
from functools import cache
from math import isfinite
from typing import Any, cast

from rollpacker.polytrace.formats.files import MOST, Record, shown

CHARACTERS_PER_TOKEN = 4
"""Rule of thumb for English. Code and mathematics have fewer, other scripts far fewer."""

REASONING = "reasoning_content"  # key of the model's reasoning, in messages and in columns
_SAMPLED = ("assistant", "model", "gpt")
_TOOL = re.compile(r"<tool_response>.*?(?:</tool_response>|\Z)", re.DOTALL)
"""A tool's answer in Qwen's templates, in logs of a whole conversation as one text. The text may
end within it."""


def estimate(text: str) -> int:
    """Estimate the tokens of ``text``. 0 only for an empty one."""
    return -(-len(text) // CHARACTERS_PER_TOKEN)


def prompt_id(text: str) -> str:
    """Return an id that is the same for a text in every step and file."""
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).hexdigest()


def identity(value: object) -> str:
    """Return a text that is the same for the same prompt, including its images."""
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)


def said(value: object) -> str:
    """Return the text of a prompt or completion: plain, or chat messages with ``content``."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        message = cast(Record, value)
        return said(message.get("content") or message.get("text") or "")
    if isinstance(value, list):
        return "".join(said(part) for part in cast(list[Any], value))
    return ""


def sampled(value: object) -> str:
    """Return the model's own text, including its tool calls, without other speakers' texts."""
    if isinstance(value, str):
        return _TOOL.sub("", value) if "<tool_response>" in value else value
    if isinstance(value, dict):
        message = cast(Record, value)
        if message.get("role") not in (None, *_SAMPLED):
            return ""
        parts = (message.get(REASONING), message.get("content"))
        return "".join(sampled(said(part)) for part in parts) + _called(message.get("tool_calls"))
    if isinstance(value, list):
        return "".join(sampled(part) for part in cast(list[Any], value))
    return ""


def _called(calls: object) -> str:
    """Names and arguments. Their markup is the template's, which logs do not contain."""
    found: list[str] = []
    for call in cast(list[Any], calls) if isinstance(calls, list) else []:
        given = cast(Record, call if isinstance(call, dict) else {})
        inner: object = given.get("function", given)
        if isinstance(inner, dict):
            told = cast(Record, inner)
            arguments = told.get("arguments") or ""
            found += [
                said(told.get("name")),
                arguments if isinstance(arguments, str) else json.dumps(arguments),
            ]
    return "".join(found)


def with_reasoning(completion: object, reasoning: object) -> object:
    """Join a text with reasoning from a column of its own, unless the text contains it already."""
    if not isinstance(completion, str) or not isinstance(reasoning, str):
        return completion
    if not reasoning or reasoning in completion:
        return completion
    return {"role": "assistant", REASONING: reasoning, "content": completion}


def sides(conversation: object) -> tuple[object, object]:
    """Split a conversation into prompt and completion. Messages are split before the model's
    first. If texts alternate, the completion is every second one."""
    if not isinstance(conversation, list):
        return conversation, []
    parts = cast(list[Any], conversation)
    if all(isinstance(part, str) for part in parts):
        return parts[:1], parts[1::2]
    roles = [cast(Record, part).get("role") if isinstance(part, dict) else None for part in parts]
    first = next((at for at, role in enumerate(roles) if role in _SAMPLED), len(parts))
    return parts[:first], parts[first:]


# --- Numbers: tokens, scores, steps, each checked

RESPONSE_COUNTS = (
    "response_tokens",
    "response_length",
    "response_len",
    "completion_tokens",
    "completion_length",
    "output_tokens",
    "output_length",
    "num_tokens",
)
PROMPT_COUNTS = ("prompt_tokens", "prompt_length", "prompt_len", "input_tokens", "input_length")
RESPONSE_IDS = ("response_ids", "completion_ids", "output_ids")
PROMPT_IDS = ("prompt_ids", "input_ids")
RESPONSE_WAYS = (
    "mask:response_mask",
    "mask:completion_mask",
    *(f"ids:{key}" for key in RESPONSE_IDS),
    *(f"count:{key}" for key in RESPONSE_COUNTS),
)
"""Ways to count that hold in every trainer's logs (see ``layouts``)."""
PROMPT_WAYS = (
    *(f"ids:{key}" for key in PROMPT_IDS),
    *(f"count:{key}" for key in PROMPT_COUNTS),
)
_FILLER = re.compile(r"<.*>|\[PAD\]", re.DOTALL)


@cache
def _parts(path: str) -> tuple[str, ...]:
    return tuple(path.split("."))


@cache
def _way(way: str) -> tuple[str, str, str]:
    how, _, path = way.partition(":")
    return how, path, _parts(path)[0]


def values(record: object, path: str) -> list[Any]:
    """Return all values at ``path`` except nulls."""
    found = [record]
    for part in _parts(path):
        found = [each for one in found for each in _inside(one, part)]
    return found


def _inside(value: object, part: str) -> list[Any]:
    if isinstance(value, dict):
        inner = cast(Record, value).get(part)
        return [] if inner is None else [inner]
    if isinstance(value, list):
        return [each for one in cast(list[Any], value) for each in _inside(one, part)]
    return []


def first(record: Record, paths: tuple[str, ...]) -> Any:
    """Return the first value at the first path that exists, or None."""
    for path in paths:
        if path in record and record[path] is not None:
            return record[path]
        if "." in path and (found := values(record, path)):
            return found[0]
    return None


def tokens(record: Record, ways: tuple[str, ...]) -> int | None:
    """Count by the first of the ``ways`` that a record has, or return None. Raises
    ``ValueError`` that names the key."""
    for way in ways:
        how, path, key = _way(way)
        if key not in record:
            continue
        found = values(record, path)
        if how == "first":
            found = found[:1]
        counts = [count for each in found if (count := _count(how, each, path)) is not None]
        if counts:
            return whole(sum(counts), path)
    return None


def _count(how: str, value: object, path: str) -> int | None:
    if not isinstance(value, list):
        return whole(value, path) if how in ("count", "first") else None
    entries = cast(list[Any], value)
    if how == "mask":
        return sum(1 for each in entries if each) if entries else None
    return _without_filler(entries) if how == "padded" else len(entries)


def _without_filler(pieces: list[Any]) -> int:
    """Count tokens without the repeated special token at the end. Its first one ends the
    response, unless it is padding or follows another special token."""
    last = pieces[-1] if pieces else None
    if not _is_special(last):
        return len(pieces)
    start = len(pieces) - 1
    while start and pieces[start - 1] == last:
        start -= 1
    filler = "pad" in str(last).lower() or (start > 0 and _is_special(pieces[start - 1]))
    return start if filler else start + 1


def _is_special(piece: object) -> bool:
    return isinstance(piece, str) and bool(_FILLER.fullmatch(piece))


def whole(value: object, name: str) -> int | None:
    """Check a count. None for NaN, which tables write for missing values. Raises ``ValueError``."""
    if isinstance(value, float) and value != value:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name}: expected a whole number, got {shown(value)}")
    if not 0 <= value <= MOST:
        raise ValueError(f"{name}: expected 0 to {MOST}, got {shown(value)}")
    if value != int(value):
        raise ValueError(f"{name}: expected a whole number, got {shown(value)}")
    return int(value)


def step(value: object, names: tuple[str, ...]) -> int | None:
    """Check a step, which some trainers write as text. Raises ``ValueError``."""
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    return None if value is None else whole(value, names[0])


def score(value: object, name: str) -> float | None:
    """Return a reward: a list is summed, named scores are weighted and summed. None for NaN.
    Raises ``ValueError``."""
    if value is None:
        return None
    if isinstance(value, list):
        return _sum([score(each, name) for each in cast(list[Any], value)])
    if isinstance(value, dict):
        told = cast(Record, value)
        if "score" in told:
            inner, weight = score(told["score"], name), score(told.get("weight", 1.0), name)
            return None if inner is None or weight is None else inner * weight
        return _sum([score(each, name) for each in told.values()])
    if not isinstance(value, int | float):
        raise ValueError(f"{name}: expected a number, got {shown(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = float("inf")
    if number != number:
        return None
    if not isfinite(number):
        raise ValueError(f"{name}: expected a finite number, got {shown(value)}")
    return number


def _sum(given: list[float | None]) -> float | None:
    known = [each for each in given if each is not None]
    return sum(known) if known else None
