"""Mistakes in ``environment``: one line each that names the key."""

from typing import Any

import pytest

from rollpacker import config
from rollpacker.job.plan.checks import check, check_context

GOOD: dict[str, Any] = {
    "model": {"path": "m"},
    "data": {"path": "rg:gcd"},
    "environment": {"kind": "python", "path": "games.py:Game"},
}


def parsed(**changes: Any) -> config.RunConfig:
    return config.parse(GOOD | changes)


def test_an_environment_needs_no_reward_functions() -> None:
    run = parsed()
    assert run.rewards == []
    assert run.environment is not None
    assert run.environment.path == ["games.py:Game"]


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"kind": "python", "path": ["a.py:A", "b.py:B"]}, "environment.path names 2 classes"),
        ({"kind": "tools", "path": "a.py:f", "options": {"x": 1}}, "environment.options are for"),
        ({"kind": "agent", "path": ["a.py"], "options": {"x": 1}}, "environment.options are for"),
        ({"kind": "tools", "path": []}, "'environment.path'"),
        ({"kind": "tools"}, "'environment.path'"),
        ({"path": "a.py:f"}, "'environment.kind'"),
        ({"kind": "tools", "path": "a.py:f", "max_turns": 0}, "'environment.max_turns'"),
        ({"kind": "tools", "path": "a.py:f", "reward": "mean"}, "'environment.reward'"),
        ({"kind": "tools", "path": "a.py:f", "call_format": "json"}, "'environment.call_format'"),
        ({"kind": "tools", "path": "a.py:f", "on_error": "drop"}, "'environment.on_error'"),
        ({"kind": "tool", "path": "a.py:f"}, "'environment.kind'"),
        (
            {"kind": "tools", "path": "a.py:f", "max_turn": 2},
            "did you mean 'environment.max_turns'",
        ),
        ({"kind": "tools", "path": "a.py:f", "step_timeout_s": 0}, "'environment.step_timeout_s'"),
    ],
)
def test_what_cannot_be_meant_is_named(environment: dict[str, Any], words: str) -> None:
    with pytest.raises(config.ConfigError) as error:
        parsed(environment=environment)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data": {"path": "rg:gcd", "chat": False}}, "data.chat is false"),
        (
            {"devices": {"per_node": 2, "emulate": "devices.yaml"}},
            "environment and devices.emulate",
        ),
        (
            {
                "environment": GOOD["environment"] | {"max_total_tokens": 50},
                "rollout": {"max_completion_length": 60},
            },
            "environment.max_total_tokens=50 is less than rollout.max_completion_length=60",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check(parsed(**changes))


def test_a_conversation_that_no_context_holds_is_refused() -> None:
    run = parsed(environment=GOOD["environment"] | {"max_total_tokens": 512})
    with pytest.raises(ValueError, match=r"environment\.max_total_tokens=512 leaves no room"):
        check_context(run, 512)


@pytest.mark.parametrize("changes", [{}, {"rewards": []}])
def test_something_must_reward(changes: dict[str, Any]) -> None:
    tree = {key: value for key, value in GOOD.items() if key != "environment"} | changes
    with pytest.raises(config.ConfigError, match="'rewards'") as error:
        config.parse(tree)
    assert "\n" not in str(error.value)


def test_an_environment_is_no_word() -> None:
    with pytest.raises(config.ConfigError, match="'environment': must be keys and values") as error:
        parsed(environment="games.py:Game")
    assert "\n" not in str(error.value)
