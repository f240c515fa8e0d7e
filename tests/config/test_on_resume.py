"""Every key of a run's configuration has one class on resume, chosen when the key was made."""

from rollpacker.config import RunConfig
from rollpacker.config.base import Resumed, keys
from rollpacker.config.on_resume import on_resume


def test_every_key_is_classified_on_purpose() -> None:
    """A section that may come or go is a key too."""
    marked = {
        key.path: [mark for mark in key.field.metadata if isinstance(mark, Resumed)]
        for key in keys(RunConfig)
        if not key.sections or key.path == "rewards" or key.field.default is None
    }
    assert len(marked) > 150
    wrong = [key for key, marks in marked.items() if len(marks) != 1]
    assert wrong == [], "say by Free, Rounding, Logged or Fixed what becomes of a run"


def test_keys_in_lists_and_unknown_ones() -> None:
    assert on_resume("rewards.0.timeout_s") == "logged"
    assert on_resume("eval.data.path") == on_resume("eval.data.size") == "free"
    assert on_resume("eval.data.of_tomorrow") == on_resume("eval") == "free"
    assert on_resume("eval.database") == on_resume("eval.fraction") == "refused"
    assert on_resume("rewards.12.weight") == on_resume("rewards") == "refused"
    assert on_resume("train.of_tomorrow") == "refused"
    assert on_resume("engine.kv_tokens") == on_resume("engine.kind") == "rounding"
