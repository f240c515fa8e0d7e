"""Reward functions and how they are run."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from rollpacker.config.base import Config


class RewardConfig(Config):
    """One reward function."""

    function: str
    """``math``, ``code`` (runs the program in a sandbox), ``judge`` (a language model), ``rg`` (the
    reasoning-gym scorer of the row's task), ``path/to/file.py:name``, ``package.module:name`` or
    the folder of a sequence-classification model; TRL's and verl's signatures are recognised."""
    name: str | None = None
    """Name in the metrics; default: the function's."""
    domains: list[str] = []
    """Domains of the rows that it applies to; empty for all."""
    weight: float = 1.0
    """Weight in the sum."""
    options: dict[str, Any] = {}
    """Keyword arguments bound to the function."""
    needs_group: bool = False
    """Call it once with all responses of a prompt instead of one by one."""
    batch: int | None = Field(default=None, ge=1)
    """Most responses in one call (the judge cuts its batches from them, by length): those that have
    finished by the time that a process is idle. When a call fails, its responses are graded one by
    one. Default: 16 for ``judge``, else 1; with ``deterministic`` always 1."""
    timeout_s: float | None = Field(default=None, gt=0)
    """Longest time for one call, then its process is killed; for ``code`` and ``math``, longest
    time without a sign of life, as they have limits of their own (``grading.code_timeout`` and
    option ``time_limit``). Default: 300 for ``judge``, else 10."""

    on_error: Literal["stop", "skip"] = "stop"
    """What to do when it only fails: when the first responses, of three prompts, time out or raise
    in the same way (or any 8 before it has ever answered, or 32 in a row later). ``stop`` ends the
    run, ``skip`` goes on without it until the run is started again. A response that fails among
    others that are graded is replaced in either case."""

    @model_validator(mode="after")
    def _callable(self) -> RewardConfig:
        if self.batch is not None and self.batch > 1:
            if self.needs_group:
                raise ValueError(
                    f"needs_group and batch={self.batch}: a call has one whole group; drop batch"
                )
            if self.runs_programs:
                raise ValueError(
                    f"batch={self.batch}: 'code' runs the programs of one response a call; "
                    "drop batch (grading.workers run side by side)"
                )
        return self

    @property
    def runs_programs(self) -> bool:
        """Whether it runs what the model wrote, for as long as that takes."""
        return self.function == "code"

    @property
    def shows_life(self) -> bool:
        """Whether a call has a limit of its own, in CPU seconds, and says that it goes on."""
        return self.function in ("code", "math")

    @property
    def call_size(self) -> int:
        """Most responses that are joined to one call: ``batch``, or its default."""
        if self.needs_group:
            return 1
        return self.batch or (16 if self.function == "judge" else 1)

    @property
    def call_limit_s(self) -> float:
        """Longest time for one call: ``timeout_s``, or its default."""
        return self.timeout_s or (300.0 if self.function == "judge" else 10.0)

    def applies(self, domain: str) -> bool:
        """Whether rows of a domain get this reward."""
        return not self.domains or domain in self.domains


class CodeTimeoutConfig(Config):
    """CPU seconds that a program may take on one test of reward ``code``: ``factor`` times the
    longest time of a correct response on that test so far, within bounds."""

    adaptive: bool = True
    """Follow the test; false always gives ``most_s``."""
    factor: float = Field(default=1.5, ge=1.0)
    """Over the longest time of a correct response."""
    least_s: float = Field(default=2.0, gt=0)
    """Shortest timeout."""
    most_s: float = Field(default=30.0, gt=0, le=3600)
    """Longest timeout, and the one before any correct response."""

    @model_validator(mode="after")
    def _ordered(self) -> CodeTimeoutConfig:
        if self.adaptive and self.least_s > self.most_s:
            raise ValueError(f"least_s={self.least_s:g} is more than most_s={self.most_s:g}")
        return self


class GradingConfig(Config):
    """How rewards are computed."""

    workers: int = Field(default=1, ge=1)
    """Reward processes."""
    asynchronous: bool | None = None
    """Grade each response as it finishes; false waits for the whole round. Default: true, but
    for mode ``off``, whose rounds are plain synchronous ones."""
    retries: int = Field(default=1, ge=0)
    """How often a failed call is repeated before its response is replaced."""
    code_timeout: CodeTimeoutConfig = CodeTimeoutConfig()
    """How long programs may run."""
