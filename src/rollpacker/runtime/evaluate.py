"""Accuracy on held-out problems, sampled by the run's own workers and graded by its rewards."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from rollpacker.config import EvalConfig
from rollpacker.core import decisions as do
from rollpacker.core import events as ev
from rollpacker.core.types import AttemptId, EngineId
from rollpacker.engine.base import SamplingParams
from rollpacker.policy.evaluation import EvaluationPolicy
from rollpacker.runtime.attempts.attempts import Trajectory
from rollpacker.runtime.attempts.environment_metrics import environment_metrics
from rollpacker.runtime.attempts.problems import Problems
from rollpacker.runtime.ipc.clock import Clock
from rollpacker.runtime.messages import messages as msg
from rollpacker.runtime.messages.faults import WorkerError
from rollpacker.runtime.pool.in_process import Workers
from rollpacker.runtime.pool.pool import Listener, Loss
from rollpacker.runtime.record.progress import Progress
from rollpacker.runtime.step.episodes import Episodes
from rollpacker.runtime.step.grading import Graders, logged_metrics
from rollpacker.runtime.step.sampling import Sampling
from rollpacker.runtime.step.step import DroppedError, StepRecord


class Evaluator:
    """Samples every held-out problem and grades the answers; between steps only.

    An engine that is lost leaves its answers to the others, which go on with the same random
    numbers: the answers stay the same.

    Args:
        config: what to evaluate.
        seed: the run's.
        problems: the held-out problems.
        workers: the run's; their engines have the weights already.
        rewards: the run's reward processes.
        params: how answers are sampled.
        clock: the run's.
        progress: shows how far an evaluation is, and its accuracy.
        episodes: the attempts' environments; None where they have none.
        retries: of an answer that an engine fails to give, before it counts as one without a
            reward.
    """

    def __init__(
        self,
        config: EvalConfig,
        seed: int,
        *,
        problems: Problems,
        workers: Workers,
        rewards: Graders,
        params: SamplingParams,
        clock: Clock,
        progress: Progress,
        episodes: Episodes | None = None,
        retries: int = 0,
    ) -> None:
        self._config = config
        self._seed = seed
        self._problems = problems
        self._workers = workers
        self._rewards = rewards
        self._params = params
        self._clock = clock
        self._progress = progress
        self._episodes = episodes
        self._retries = retries
        self._kind = "sampled"
        self._record = StepRecord(step=0, start_s=0.0)
        self._done: asyncio.Future[None] | None = None

    async def run(
        self, version: int, *, greedy: bool = False, step: int | None = None
    ) -> dict[str, float]:
        """``eval/*`` metrics of the weights in place.

        Args:
            version: of the weights.
            greedy: decode greedily, one answer a problem.
            step: updates that made the weights, to be shown; None where that is not known.

        Raises ``WorkerError`` when no engine is left, ``DroppedError`` after ``drop``,
        ``ValueError`` when nothing can be graded.
        """
        engines = self._workers.engines
        if not engines:
            raise WorkerError("evaluation: no engine is left")
        self._done = asyncio.get_running_loop().create_future()
        self._record = StepRecord(step=version, start_s=self._clock(), training=False)
        self._told = set[str]()
        sampling = self._sampling = self._begin(greedy)
        report = sampling.guarded(self._take_engine)
        listener = Listener(report, lambda *_: None, sampling.guarded(self._lose))
        with sampling.step(self._record, self._done, listener):
            sampling.post(ev.StepStarted(step=version, engines=engines, replicas=(), remaining={}))
            await self._done
        result = self._metrics()
        if missing := int(result["eval/ungraded"]):
            what = "they are left out" if self.graded() else "the accuracy says nothing"
            note = f"{missing} of {self._policy.answers} got no reward: {what}"
            self._progress.note(f"WARNING evaluation: {note}")
        self._progress.evaluated(self._kind, result, step)
        return result

    def _begin(self, greedy: bool) -> Sampling:
        """Another policy, and what performs its decisions."""
        self._kind, params, count = "sampled", self._params, self._config.num_generations
        if greedy:
            self._kind, count = "greedy", 1
            params = SamplingParams(
                max_tokens=params.max_tokens,
                temperature=0.0,
                stop=params.stop,
                stop_token_ids=params.stop_token_ids,
            )
        self._policy = EvaluationPolicy([*self._problems.tokens], count, self._retries)
        return Sampling(
            self._policy,
            workers=self._workers,
            problems=self._problems,
            rewards=self._rewards,
            params=params,
            seed=self._seed,
            clock=self._clock,
            record=self._hear,
            fail=self._end,
            lockstep=False,
            episodes=self._episodes,
        )

    def drop(self) -> None:
        """Give the running evaluation up, if there is one."""
        self._end(DroppedError("the evaluation was dropped"))

    def _end(self, error: Exception) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)

    def _hear(self, _now: float, event: ev.Event, made: Sequence[do.Decision]) -> None:
        """Show how far it is; say of what is given up why, the same failure once."""
        match event:
            case ev.AttemptFailed() if not made:
                self._say(event.attempt, "answer to", event.error)
            case ev.EpisodeFailed() if not made:
                self._say(event.attempt, "environment of", event.error)
            case ev.AttemptFinished():
                talk = self._record.attempts[event.attempt].conversation
                self._say(event.attempt, "environment of", "" if talk is None else talk.failed)
            case _:
                pass
        missing, answers = self._policy.missing, self._policy.answers
        self._progress.evaluating(self._kind, answers - missing, answers)
        if not missing and self._done is not None and not self._done.done():
            self._done.set_result(None)

    def _say(self, attempt: AttemptId, what: str, error: str) -> None:
        if error and error not in self._told:
            self._told.add(error)
            prompt = self._record.attempts[attempt].prompt
            self._progress.note(f"evaluation: the {what} problem {prompt}: {error}")

    def _take_engine(self, engine: EngineId, report: msg.EngineReport) -> None:
        self._sampling.take(engine, report)
        if isinstance(report, msg.Finished):  # in lockstep it waits for that
            self._workers.to_engine(engine, msg.Proceed())

    def _lose(self, loss: Loss) -> None:
        """What a lost engine was at begins again at others."""
        if not self._workers.engines:
            self._end(WorkerError(f"evaluation: {loss.text}; no engine is left"))
            return
        self._progress.note(f"evaluation: {loss}")
        self._sampling.lose(loss)

    def is_right(self, attempt: Trajectory) -> bool:
        """Whether a graded answer counts as correct."""
        return attempt.reward is not None and attempt.reward >= self._config.threshold

    def _answers(self) -> list[Trajectory]:
        """Those that count, of several to the same question the last, in the problems' order."""
        return [*{(a.prompt, a.index): a for a in self._record.attempts.values()}.values()]

    def graded(self) -> list[Trajectory]:
        """The answers of the last evaluation that got a reward, in the problems' order."""
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
            "eval/problems": float(len(self._problems.tokens)),
            "eval/ungraded": float(len(attempts) - len(graded)),
            **{
                f"eval/{kind}_{name}": value
                for name, value in (environment_metrics(graded) | logged_metrics(graded)).items()
            },
        }
