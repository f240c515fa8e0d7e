"""Logs of texts: lengths where only texts are logged, and ids of prompts."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from typing import Any, cast

from rollpacker.polytrace.formats.columns import pack, samples
from rollpacker.polytrace.formats.lines import MOST, Record
from rollpacker.polytrace.formats.reading import Reading
from rollpacker.polytrace.schema import Trace

CHARACTERS_PER_TOKEN = 4
"""Rule of thumb for English; code and mathematics have fewer, other scripts far fewer."""

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


def estimate(text: str) -> int:
    """About how many tokens ``text`` has; 0 only for an empty one."""
    return -(-len(text) // CHARACTERS_PER_TOKEN)


def counted(record: Mapping[str, Any], counts: tuple[str, ...], ids: tuple[str, ...]) -> int | None:
    """A token count that a log has beside its texts; None where it has none."""
    for key in ids:
        value = record.get(key)
        if isinstance(value, list):
            return len(cast(list[Any], value))
    for key in counts:
        value = record.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= MOST:
            return int(value)
    return None


def prompt_id(text: str) -> str:
    """The same text has the same id in every step and file."""
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).hexdigest()


def said(value: object) -> str:
    """The text of a prompt or completion: plain, or chat messages with ``content``."""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return said(cast(Mapping[str, Any], value).get("content") or "")
    if isinstance(value, list):
        return "".join(said(part) for part in cast(list[Any], value))
    return ""


class Rows:
    """Responses of a log of texts, as rows; lengths that it does not tell are guessed.

    Args:
        reading: of what task, and who is told of guesses.
        source: name of the format.
    """

    def __init__(self, reading: Reading, source: str) -> None:
        self._reading, self._source = reading, source
        self._places: Counter[tuple[int, str]] = Counter()
        self._guessed = 0
        self._rows: list[Record] = []

    def add(
        self,
        record: Record,
        texts: tuple[str, str],
        *,
        step: int,
        domain: str | None,
        reward: float | None,
        rest: Record,
    ) -> None:
        """One response; ``texts``: its prompt, whose hash is the id, and itself."""
        key = (step, prompt_id(texts[0]))
        before = counted(record, PROMPT_COUNTS, PROMPT_IDS)
        tokens = counted(record, RESPONSE_COUNTS, RESPONSE_IDS)
        self._guessed += tokens is None
        self._rows.append(
            {
                "task": self._reading.task,
                "step": step,
                "prompt": key[1],
                "index": self._places[key],
                "domain": domain,
                "prompt_tokens": estimate(texts[0]) if before is None else before,
                "response_tokens": estimate(texts[1]) if tokens is None else tokens,
                "state": "kept",
                "reward": reward,
                "extra": pack(self._source, rest),
            }
        )
        self._places[key] += 1

    def trace(self) -> Trace:
        """All of them; says how many lengths are guessed."""
        if self._guessed:
            self._reading.note(
                f"{self._reading.task}: lengths of {self._guessed} of {len(self._rows)} responses "
                "are approximated: the log has texts but no token counts, "
                f"{CHARACTERS_PER_TOKEN} characters are taken as a token"
            )
        return Trace(samples=samples(self._rows))
