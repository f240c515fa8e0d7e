"""The checks that an engine makes of itself find what they are for."""

from __future__ import annotations

from dataclasses import replace

import pytest
from engine_models import build

from rollpacker.config import MiniEngineConfig
from rollpacker.engine.mini import MiniEngine
from rollpacker.engine.probe import answers, differ, drafts_differ


@pytest.fixture(scope="module")
def engine() -> MiniEngine:
    found = MiniEngine(build("qwen2"), config=MiniEngineConfig(max_running=8, kv_tokens=8 * 256))
    found.load_weights(None, 0)
    return found


def test_an_engine_answers_itself_and_drafts_change_nothing(engine: MiniEngine) -> None:
    assert not differ(answers(engine), answers(engine), loose=False)
    assert not drafts_differ(engine, loose=False)


@pytest.mark.parametrize(("loose", "nats"), [(False, 0.01), (True, 0.05), (True, 0.5)])
def test_other_responses_and_log_probabilities_are_found(
    engine: MiniEngine, loose: bool, nats: float
) -> None:
    first = answers(engine)
    others = [replace(each, tokens=each.tokens[::-1].copy()) for each in first]
    assert differ(first, others, loose=loose)
    others = [replace(each, logprobs=each.logprobs - nats) for each in first]
    assert "nats" in differ(first, others, loose=loose)


def test_rounding_of_bfloat16_is_no_difference(engine: MiniEngine) -> None:
    first = answers(engine)
    late = [each.tokens.copy() for each in first]
    for tokens in late:
        tokens[-3:] = (tokens[-3:] + 1) % 100
    others = [
        replace(each, tokens=tokens, logprobs=each.logprobs + 0.01)
        for each, tokens in zip(first, late, strict=True)
    ]
    assert not differ(first, others, loose=True)
    assert differ(first, others, loose=False)


def test_drafts_that_nobody_verifies_are_found(engine: MiniEngine, monkeypatch) -> None:
    monkeypatch.setattr(engine, "speculate", lambda _how: None)
    assert "no draft was accepted" in drafts_differ(engine, loose=False)
