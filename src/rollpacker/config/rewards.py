"""Environments that answer the model, and reward functions."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from rollpacker.config.base import Config, Fixed, Free, Logged, Rounding

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
"""Formats in which models write tool calls."""


class EnvironmentConfig(Config):
    """The environment that answers the model [between two turns](environments.md). Without it a
    response is one turn."""

    kind: Fixed[Literal["tools", "python", "agent"]]
    """``tools``: functions that the model calls. ``python``: an environment class, also of TRL,
    OpenEnv, skyrl-gym or gem. ``agent``: a program that speaks OpenAI's chat API."""
    path: Fixed[list[str]] = Field(min_length=1)
    """``tools``: functions, each ``path/to/file.py:name``, ``package.module:name`` or ``python``
    (runs code in the sandbox). ``python``: one class or factory. ``agent``: the program and its
    arguments. A single string is a list of one."""
    options: Fixed[dict[str, Any]] = {}
    """Keyword arguments of the class or factory."""
    variables: Fixed[list[str]] = []
    """``agent``: environment variables that the program gets besides ``PATH``, ``HOME``, the
    locale, proxies, certificates and Python's own."""
    max_turns: Fixed[int] = Field(default=16, ge=1)
    """Most replies of the model. The episode is then cut off."""
    max_total_tokens: Fixed[int] = Field(default=0, ge=0)
    """Longest conversation after the prompt in tokens, including the environment's messages. 0
    takes ``rollout.max_completion_length``, which bounds only the tokens that the model samples."""
    step_timeout_s: Logged[float] = Field(default=30.0, gt=0.0)
    """Seconds for an environment's answer or ``reset``."""
    start_timeout_s: Logged[float] = Field(default=120.0, gt=0.0)
    """Seconds for a process to load ``path``."""
    concurrency: Rounding[int] = Field(default=0, ge=0)
    """Most episodes at a time. 0 for all."""
    processes: Free[int] = Field(default=1, ge=1)
    """Processes that hold environments."""
    on_error: Fixed[Literal["retry", "score"]] = "retry"
    """If the environment fails, ``retry`` samples another response, and ``score`` ends this one
    with ``failed_reward``."""
    failed_reward: Fixed[float] = 0.0
    """Reward of ``on_error: score``."""
    call_format: Fixed[Literal["auto", CallFormat]] = "auto"
    """[How the model writes calls](environments.md#how-calls-are-written). ``auto`` goes by the
    chat template."""
    reward: Fixed[Literal["sum", "last"]] = "sum"
    """Take the sum of the turns' rewards, or the last one."""
    weight: Fixed[float] = 1.0
    """Weight of that reward beside those of ``rewards``."""

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
    """Tokens of the longest response, including an environment's. The model samples at most
    ``cap``."""
    return cap if environment is None else environment.max_total_tokens or cap


class RewardConfig(Config):
    """One [reward function](rewards.md). None is needed if an ``environment`` rewards."""

    function: Fixed[str]
    """``math``, ``code`` (in a sandbox), ``judge`` (a language model), ``rg`` (reasoning-gym's
    scorer), or the folder of a sequence-classification model. Also ``path/to/file.py:name`` or
    ``package.module:name``, with our signature, TRL's or verl's."""
    name: Fixed[str | None] = None
    """Name in the metrics. Default: the function's."""
    domains: Fixed[list[str]] = []
    """Domains that it applies to. Empty for all."""
    weight: Fixed[float] = 1.0
    """Weight in the sum."""
    options: Fixed[dict[str, Any]] = {}
    """Keyword arguments bound to the function."""
    needs_group: Fixed[bool] = False
    """Call it once with all responses of a prompt instead of one by one."""
    batch: Rounding[int | None] = Field(default=None, ge=1)
    """Most responses in one call. Default: 16 for ``judge``, else 1. With ``deterministic``
    always 1."""
    timeout_s: Logged[float | None] = Field(default=None, gt=0)
    """Seconds for one call before its process is killed. For ``code`` and ``math``: seconds
    without a sign of life. Default: 300 for ``judge``, else 10."""

    on_error: Logged[Literal["stop", "skip"]] = "stop"
    """Applies if the function fails on all first responses, or 32 times in a row. ``stop`` ends
    the run, ``skip`` goes on without the function until the next start. Other failed responses
    are replaced."""

    @model_validator(mode="after")
    def _callable(self) -> RewardConfig:
        if self.batch is not None and self.batch > 1:
            if self.needs_group:
                raise ValueError(
                    f"needs_group and batch={self.batch}: a call has one whole group: drop batch"
                )
            if self.runs_programs:
                raise ValueError(
                    f"batch={self.batch}: 'code' runs the programs of one response per call: "
                    "drop batch (grading.workers run side by side)"
                )
        return self

    @property
    def runs_programs(self) -> bool:
        """Whether a call runs programs of the model, of unknown duration."""
        return self.function == "code"

    @property
    def shows_life(self) -> bool:
        """Whether a call limits its own CPU time and reports that it still runs."""
        return self.function in ("code", "math")

    @property
    def call_size(self) -> int:
        """Most responses that one call may join: ``batch``, or its default."""
        if self.needs_group:
            return 1
        return self.batch or (16 if self.function == "judge" else 1)

    @property
    def call_limit_s(self) -> float:
        """Longest time for one call: ``timeout_s``, or its default."""
        return self.timeout_s or (300.0 if self.function == "judge" else 10.0)

    def applies(self, domain: str) -> bool:
        return not self.domains or domain in self.domains


class CodeTimeoutConfig(Config):
    """CPU seconds that a program may take on one test of reward ``code``."""

    adaptive: Fixed[bool] = True
    """Follow the test. False always gives ``most_s``."""
    factor: Fixed[float] = Field(default=1.5, ge=1.0)
    """Multiple of the longest time that a correct response took on that test so far."""
    least_s: Fixed[float] = Field(default=2.0, gt=0)
    """Shortest timeout."""
    most_s: Fixed[float] = Field(default=30.0, gt=0, le=3600)
    """Longest timeout, and the one before any correct response."""

    @model_validator(mode="after")
    def _ordered(self) -> CodeTimeoutConfig:
        if self.adaptive and self.least_s > self.most_s:
            raise ValueError(f"least_s={self.least_s:g} is more than most_s={self.most_s:g}")
        return self


class GradingConfig(Config):
    """The grading of responses."""

    workers: Free[int] = Field(default=1, ge=1)
    """Reward processes."""
    asynchronous: Rounding[bool | None] = None
    """Grade each response as it finishes, not the whole round at its end. Default: in every mode
    except ``off``."""
    retries: Logged[int] = Field(default=1, ge=0)
    """Repetitions of a failed call before its response is replaced."""
    code_timeout: CodeTimeoutConfig = CodeTimeoutConfig()
