"""Reward functions and how they are run."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from rollpacker.config.base import Config


class RewardConfig(Config):
    """One reward function."""

    function: str
    """``math``, ``code`` (runs the program in a sandbox), ``judge`` (a language model), ``rg`` (the
    reasoning-gym scorer of the row's task), ``path/to/file.py:name`` or ``package.module:name``;
    TRL's and verl's signatures are recognised."""
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
    timeout_s: float = Field(default=10.0, gt=0)
    """Longest time for one call, then its process is killed; for ``code``, longest time without a
    sign of life, as its programs have timeouts of their own (``grading.code_timeout``)."""

    @property
    def runs_programs(self) -> bool:
        """Whether it runs what the model wrote, for as long as that takes."""
        return self.function == "code"

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
        if self.least_s > self.most_s:
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
