"""Accuracy on held-out problems, sampled by the run's own workers and graded by its rewards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rollpacker.config import EvalConfig
from rollpacker.core import decisions as do
from rollpacker.core import events as ev
from rollpacker.core.types import AttemptId
from rollpacker.policy.evaluation import EvaluationPolicy
from rollpacker.runtime.attempts.attempts import Trajectory
from rollpacker.runtime.record.metrics import environment_metrics, logged_metrics
from rollpacker.runtime.record.progress import Progress
from rollpacker.runtime.step.driver import StepDriver
from rollpacker.runtime.step.responses import Setup
from rollpacker.runtime.step.step import StepRecord


class Evaluator:
    """Samples every held-out problem and grades the answers, between steps only.

    If an engine is lost, others continue its answers with the same random numbers, so the answers
    stay the same.

    Args:
        setup: held-out problems, sampling settings and workers. Engines must have the weights
            already.
        retries: of an answer that an engine fails to give. Then it has no reward.
    """

    def __init__(
        self, config: EvalConfig, setup: Setup, progress: Progress, *, retries: int = 0
    ) -> None:
        self._config = config
        self._setup = setup
        self._progress = progress
        self._retries = retries
        self._kind = "sampled"
        self._driver: StepDriver | None = None

    async def run(
        self, version: int, *, greedy: bool = False, step: int | None = None
    ) -> dict[str, float]:
        """``eval/*`` metrics of the current weights.

        Args:
            version: of the weights.
            greedy: decode greedily, one answer for each problem.
            step: number of updates that made the weights, for the display, if it is known.

        Raises ``WorkerError`` if no engine is left, ``DroppedError`` after ``drop``, and
        ``ValueError`` if nothing can be graded.
        """
        self._kind, setup, count = "sampled", self._setup, self._config.num_generations
        if greedy:
            params = replace(setup.params, temperature=0.0)
            self._kind, setup, count = "greedy", replace(setup, params=params), 1
        prompts = [*setup.problems.tokens]
        self._policy = EvaluationPolicy(prompts, count, self._retries)
        self._told = set[str]()
        driver = self._driver = StepDriver(setup, self._policy, self._hear)
        with driver.begin(version):
            await driver.roll_out()
        result = self._metrics()
        if missing := int(result["eval/ungraded"]):
            what = "they are left out" if self.graded() else "the accuracy says nothing"
            note = f"{missing} of {self._policy.answers} got no reward: {what}"
            self._progress.note(f"WARNING evaluation: {note}")
        self._progress.evaluated(self._kind, result, step)
        return result

    @property
    def _record(self) -> StepRecord:
        assert self._driver is not None
        return self._driver.record

    def drop(self) -> None:
        if self._driver is not None:
            self._driver.drop("the evaluation")

    def _hear(self, _now: float, event: ev.Event, made: Sequence[do.Decision]) -> None:
        given_up = not any(isinstance(each, do.StartAttempt) for each in made)
        match event:
            case ev.DevicesLost():
                self._progress.note(f"evaluation: {self._record.faults[-1]}")
            case ev.AttemptFailed() if given_up:
                self._say(event.attempt, "answer to", event.error)
            case ev.EpisodeFailed() if given_up:
                self._say(event.attempt, "environment of", event.error)
            case ev.AttemptFinished():
                talk = self._record.attempts[event.attempt].conversation
                self._say(event.attempt, "environment of", "" if talk is None else talk.failed)
            case _:
                pass
        missing, answers = self._policy.missing, self._policy.answers
        self._progress.evaluating(self._kind, answers - missing, answers)

    def _say(self, attempt: AttemptId, what: str, error: str) -> None:
        if error and error not in self._told:
            self._told.add(error)
            prompt = self._record.attempts[attempt].prompt
            self._progress.note(f"evaluation: the {what} problem {prompt}: {error}")

    def is_right(self, attempt: Trajectory) -> bool:
        return attempt.reward is not None and attempt.reward >= self._config.threshold

    def _answers(self) -> list[Trajectory]:
        """The last answer of each sample, in the problems' order."""
        return [*{(a.prompt, a.index): a for a in self._record.attempts.values()}.values()]

    def graded(self) -> list[Trajectory]:
        return [attempt for attempt in self._answers() if attempt.reward is not None]

    def _metrics(self) -> dict[str, float]:
        kind, attempts, graded = self._kind, self._answers(), self.graded()
        right = [self.is_right(attempt) for attempt in graded]
        lengths = [attempt.tokens for attempt in attempts]
        clipped = [a.output is not None and a.output.finish_reason == "length" for a in attempts]
        return {
            f"eval/{kind}_accuracy": float(np.mean(right)) if right else 0.0,
            f"eval/{kind}_mean_length": float(np.mean(lengths)),
            f"eval/{kind}_clipped_ratio": float(np.mean(clipped)),
            "eval/problems": float(len(self._setup.problems.tokens)),
            "eval/ungraded": float(len(attempts) - len(graded)),
            **{
                f"eval/{kind}_{name}": value
                for name, value in (environment_metrics(graded) | logged_metrics(graded)).items()
            },
        }
