"""Environments of multi-turn responses."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from rollpacker.config.base import Config, Fixed, Free, LastBits, Said

CallFormat = Literal[
    "hermes",
    "llama3",
    "qwen3_coder",
    "glm",
    "mistral",
    "mistral_v11",
    "functiongemma",
    "gemma4",
    "deepseek_v3",
    "deepseek_v31",
    "harmony",
    "pythonic",
]
"""How models write calls of tools."""


class EnvironmentConfig(Config):
    """What answers the model [between two turns](environments.md); without it a response is one
    turn."""

    kind: Fixed[Literal["tools", "python", "agent"]]
    """``tools``: functions that the model calls; ``python``: an environment class, also of TRL,
    OpenEnv, skyrl-gym or gem; ``agent``: a program that speaks OpenAI's chat API."""
    path: Fixed[list[str]] = Field(min_length=1)
    """``tools``: functions, each ``path/to/file.py:name``, ``package.module:name`` or ``python``
    (runs code in the sandbox); ``python``: one class or factory; ``agent``: the program and its
    arguments. A single string is a list of one."""
    options: Fixed[dict[str, Any]] = {}
    """Keyword arguments of the class or factory."""
    variables: Fixed[list[str]] = []
    """``agent``: environment variables that the program gets besides ``PATH``, ``HOME``, the
    locale, proxies, certificates and Python's own."""
    max_turns: Fixed[int] = Field(default=16, ge=1)
    """Replies of the model before an episode is cut off."""
    max_total_tokens: Fixed[int] = Field(default=0, ge=0)
    """Longest conversation behind the prompt in tokens, the environment's messages included; 0: as
    ``rollout.max_completion_length``, which bounds what the model samples."""
    step_timeout_s: Said[float] = Field(default=30.0, gt=0.0)
    """Seconds for an environment's answer or ``reset``."""
    start_timeout_s: Said[float] = Field(default=120.0, gt=0.0)
    """Seconds for a process to load ``path``."""
    concurrency: LastBits[int] = Field(default=0, ge=0)
    """Most episodes at a time; 0 for all."""
    processes: Free[int] = Field(default=1, ge=1)
    """Processes that hold environments."""
    on_error: Fixed[Literal["retry", "score"]] = "retry"
    """Where the environment fails: ``retry`` samples another response, ``score`` ends this one with
    ``failed_reward``."""
    failed_reward: Fixed[float] = 0.0
    """Reward of ``on_error: score``."""
    call_format: Fixed[Literal["auto", CallFormat]] = "auto"
    """[How the model writes calls](environments.md#how-calls-are-written); ``auto``: by the chat
    template."""
    reward: Fixed[Literal["sum", "last"]] = "sum"
    """Of the turns' rewards the sum, or the last one."""
    weight: Fixed[float] = 1.0
    """Of that reward, beside those of ``rewards``."""

    @model_validator(mode="before")
    @classmethod
    def _one_path(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(data.get("path"), str):  # pyright: ignore
            return data | {"path": [data["path"]]}  # pyright: ignore
        return data  # pyright: ignore

    @model_validator(mode="after")
    def _one_class(self) -> EnvironmentConfig:
        if self.kind == "python" and len(self.path) != 1:
            raise ValueError(f"environment.path names {len(self.path)} classes: name one")
        if self.kind != "python" and self.options:
            raise ValueError("environment.options are for kind: python")
        if self.kind != "agent" and self.variables:
            raise ValueError("environment.variables are for kind: agent")
        return self


def longest_response(environment: EnvironmentConfig | None, cap: int) -> int:
    """Tokens of the longest response, an environment's among them; the model samples ``cap``."""
    return cap if environment is None else environment.max_total_tokens or cap
