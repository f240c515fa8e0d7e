"""Multi-turn environments of verifiers before 0.2; their rubrics are left out."""

from __future__ import annotations

import importlib
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from rollpacker.env.adapters.rows import prompt_of
from rollpacker.env.base import Message, Turn
from rollpacker.env.calls.calling import call
from rollpacker.env.calls.schema import Schema

_KEPT = ("role", "content", "tool_calls", "tool_call_id", "name")


def schemas(environment: Any) -> list[Schema]:
    """Schemas of the tools that an environment has."""
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": dict(tool.parameters),
            },
        }
        for tool in getattr(environment, "tool_defs", None) or ()
    ]


class VerifiersEnvironment:
    """One episode of an environment that serves many: what it knows of one is its state.

    Args:
        environment: a ``MultiTurnEnv``.
    """

    def __init__(self, environment: Any) -> None:
        self._environment = environment
        self._state: Any = None
        self._messages: list[Any] = []
        self._normalize = importlib.import_module(
            "verifiers.utils.message_utils"
        ).normalize_messages

    async def reset(self, row: Mapping[str, Any]) -> Sequence[Message]:
        """Set its state up with a row."""
        types = importlib.import_module("verifiers.types")
        self._messages = self._normalize(prompt_of(row))
        task = {"example_id": 0, **row, "prompt": list(self._messages)}
        self._state = types.State(input=task)
        self._state.update(
            task=task,
            trajectory=[],
            trajectory_id=uuid.uuid4().hex,
            completion=None,
            is_completed=False,
            is_truncated=False,
            tool_defs=getattr(self._environment, "tool_defs", None) or [],
            error=None,
            final_env_response=None,
            timing=types.RolloutTiming(),
        )
        await call(self._environment.setup_state, self._state)
        return ()

    async def step(self, reply: Message) -> Turn:
        """Ask for its response, unless it says that the episode is over."""
        turn = self._normalize([{key: reply[key] for key in _KEPT if key in reply}])
        calls = len(reply.get("tool_calls") or ())
        before = list(self._messages)
        self._messages += turn
        self._state["trajectory"].append(
            {"prompt": before, "completion": turn, "response": None, "tokens": None}
            | {"reward": None, "advantage": None, "is_truncated": False, "extras": {}}
        )
        if await call(self._environment.is_completed, self._state):
            return Turn(done=True, calls=calls)
        answer = await call(self._environment.env_response, list(self._messages), self._state)
        if self._state.get("final_env_response") is not None:
            return Turn(done=True, calls=calls)
        said = self._normalize(answer)
        self._messages += said
        return Turn(messages=[_message(each) for each in said], calls=calls)

    async def close(self) -> None:
        """Let go of what the episode has."""
        if self._state is not None:
            await call(self._environment.cleanup, self._state)


def _message(message: Any) -> Message:
    dumped = message.model_dump(exclude_none=True)
    return {key: dumped[key] for key in _KEPT if key in dumped}
