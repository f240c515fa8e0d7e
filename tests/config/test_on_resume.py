"""Every key of a run's configuration has one class on resume, chosen when the key was made."""

from collections import Counter
from collections.abc import Iterator
from typing import Any, get_args, get_origin

from rollpacker.config import Config, RunConfig
from rollpacker.config.reading.on_resume import _KEYS, _WHOLE, CLASSES, MEANING, on_resume


def keys(node: type[Config], path: str = "") -> Iterator[str]:
    for name, field in node.model_fields.items():
        key, members = f"{path}{name}", sections(field.annotation)
        listed = get_origin(field.annotation) is list
        if not members or listed or field.default is None:
            yield key  # a section that may come or go is a key too
        for member in () if key in _WHOLE else members:
            yield from keys(member, f"{key}[]." if listed else f"{key}.")


def sections(annotation: Any) -> list[type[Config]]:
    if isinstance(annotation, type):
        return [annotation] if issubclass(annotation, Config) else []
    return [found for part in get_args(annotation) for found in sections(part)]


def test_every_key_is_classified_on_purpose() -> None:
    named = Counter(key for words in _KEYS.values() for key in words.split())
    assert [key for key, count in named.items() if count > 1] == []
    known = set(keys(RunConfig))
    assert len(known) > 150
    assert known - named.keys() == set(), "say in config/reading/on_resume.py what becomes of a run"
    assert named.keys() - known == set(), "no longer a key"
    assert _KEYS.keys() == MEANING.keys() == set(CLASSES.values())


def test_keys_in_lists_and_unknown_ones() -> None:
    assert on_resume("rewards.0.timeout_s") == "said"
    assert on_resume("eval.data.path") == on_resume("eval.data.size") == "free"
    assert on_resume("eval.data.of_tomorrow") == "free"
    assert on_resume("eval.database") == "refused"
    assert on_resume("rewards.12.weight") == "refused"
    assert on_resume("train.of_tomorrow") == "refused"
