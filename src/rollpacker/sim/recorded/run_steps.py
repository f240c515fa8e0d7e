"""What is known of a step of a real run: its responses, and how long its work took."""

from __future__ import annotations

from dataclasses import dataclass, field

from rollpacker.core.types import NO_DRAFTS, Drafted, Prompt, PromptId
from rollpacker.sim.recorded.run_lanes import NONE, Handled, Tried


@dataclass(frozen=True, slots=True)
class Interval:
    """``steps`` decode steps of one engine between two ends of its responses or their turns, or
    from a turn's begin to its end.

    ``batch`` sequences of ``context`` tokens in all, on average over the steps; ``seconds``, in
    which turns brought ``prefill`` tokens.
    Where it decoded ``ahead`` these are tokens of a sequence, not steps.
    """

    batch: float
    context: float
    steps: float
    seconds: float
    handled: Handled = NONE
    ahead: bool = False
    prefill: int = 0


@dataclass(frozen=True, slots=True)
class First:
    """The first end on an engine in a round: ``seconds`` after the round began, without those in
    which its environment did."""

    batch: int
    context: float
    steps: int
    prefill: int
    seconds: float
    handled: Handled = NONE
    ahead: bool = False


@dataclass(frozen=True, slots=True)
class GradientTask:
    """Gradients of responses with these lengths, prompts included; ``seconds`` with messages."""

    lengths: tuple[int, ...]
    seconds: float
    handled: Handled = NONE


@dataclass(slots=True)
class RunStep:
    """One step of a run; times are seconds of its clock."""

    number: int
    start_s: float
    engines: tuple[int, ...]
    remaining: dict[str, int]
    drawn: list[Prompt] = field(default_factory=list[Prompt])
    attempts: dict[int, Tried] = field(default_factory=dict[int, Tried])
    groups: dict[PromptId, list[int]] = field(default_factory=dict[PromptId, list[int]])
    trained: set[PromptId] = field(default_factory=set[PromptId])
    """Kept groups that have gradients."""
    intervals: list[Interval] = field(default_factory=list[Interval])
    firsts: list[First] = field(default_factory=list[First])
    tasks: list[GradientTask] = field(default_factory=list[GradientTask])
    last_end_s: float = 0.0
    rollout_end_s: float = 0.0
    drafts: Drafted = NO_DRAFTS
    """What decoding ahead brought."""
    last_gradient_s: float | None = None
    end_s: float | None = None
    measured: dict[str, float] = field(default_factory=dict[str, float])
    """Seconds of each phase, by the run's own metrics."""
