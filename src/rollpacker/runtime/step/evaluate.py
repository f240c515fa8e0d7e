"""Accuracy on held-out problems, sampled by the run's own workers and graded by its rewards."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rollpacker.config import EvalConfig
from rollpacker.core.types import AttemptId, EngineId, PromptId, sampling_seed
from rollpacker.engine.base import Request, SamplingParams
from rollpacker.reward.base import Grade
from rollpacker.runtime.attempts.attempts import GENERATING, Trajectory, TrajectoryStage
from rollpacker.runtime.attempts.environment_metrics import environment_metrics
from rollpacker.runtime.attempts.problems import Problems
from rollpacker.runtime.ipc.clock import Clock
from rollpacker.runtime.messages import messages as msg
from rollpacker.runtime.messages.faults import WorkerError, in_one_line
from rollpacker.runtime.pool.protocols import Graders, Listener, Loss, Workers
from rollpacker.runtime.record.progress import Progress
from rollpacker.runtime.step.episodes import Answered, Episodes
from rollpacker.runtime.step.grading import logged_metrics
from rollpacker.runtime.step.step import DroppedError

_EVALUATION = -1
"""In place of a step in seeds: every evaluation samples with the same random numbers."""


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
        self._failures = Counter[AttemptId]()
        self._sampling = params
        self._kind = "sampled"
        self._attempts: dict[AttemptId, Trajectory] = {}
        self._missing = 0
        self._told: set[str] = set()
        self._version = 0
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
        params = self._params
        if greedy:
            params = SamplingParams(
                max_tokens=params.max_tokens,
                temperature=0.0,
                stop=params.stop,
                stop_token_ids=params.stop_token_ids,
            )
        count = 1 if greedy else self._config.num_generations
        self._kind = "greedy" if greedy else "sampled"
        self._done = asyncio.get_running_loop().create_future()
        self._rewards.begin_step(version)
        self._attempts = {}
        self._failures.clear()
        self._told, self._version = set[str](), version
        report = self._guarded(self._report)
        listener = Listener(report, lambda _replica, _report: None, self._guarded(self._lose))
        self._sampling = params
        grades = self._rewards.listen(self._guarded(self._take_grades))
        episodes = contextlib.nullcontext()
        if self._episodes is not None:
            episodes = self._episodes.listen(self._guarded(self._take_answers))
        with self._workers.listen(listener), grades, episodes:
            self._start(count)
            self._show()
            await self._done
        result = self._metrics()
        if missing := int(result["eval/ungraded"]):
            what = "they are left out" if self.graded() else "the accuracy says nothing"
            every = len(self._attempts)
            self._progress.note(f"WARNING evaluation: {missing} of {every} got no reward: {what}")
        self._progress.evaluated(self._kind, result, step)
        return result

    def _guarded(self, take: Callable[..., None]) -> Callable[..., None]:
        """What it raises ends the evaluation, not the loop that called it."""

        def guarded(*told: Any) -> None:
            try:
                take(*told)
            except Exception as error:
                self._end(in_one_line(error))

        return guarded

    def _show(self) -> None:
        total = len(self._attempts)
        self._progress.evaluating(self._kind, total - self._missing, total)

    def drop(self) -> None:
        """Give the running evaluation up, if there is one."""
        if self._done is not None and not self._done.done():
            self._done.set_exception(DroppedError("the evaluation was dropped"))

    def _start(self, count: int) -> None:
        engines = self._workers.engines
        if not engines:
            raise WorkerError("evaluation: no engine is left")
        batches: dict[EngineId, list[Trajectory]] = {engine: [] for engine in engines}
        for place, prompt in enumerate(self._problems.tokens):
            engine = engines[place % len(engines)]
            for index in range(count):
                # Below zero: never the id of an attempt of the run.
                id_ = AttemptId(-1 - place * count - index)
                batches[engine].append(self._begin(id_, prompt, index, engine))
        self._missing = len(self._attempts)
        for engine, attempts in batches.items():
            if self._episodes is None:
                self._submit(engine, attempts)
                continue
            for each in attempts:
                self._episodes.begin(each, self._problems)

    def _begin(self, id_: AttemptId, prompt: PromptId, index: int, engine: EngineId) -> Trajectory:
        """A new attempt, in place of one of the same number."""
        now, tokens = self._clock(), self._problems.tokens[prompt]
        attempt = self._attempts[id_] = Trajectory(
            id=id_,
            prompt=prompt,
            index=index,
            engine=engine,
            prompt_tokens=tokens,
            start_s=now,
            since_s=now,
        )
        return attempt

    def _submit(self, engine: EngineId, attempts: Sequence[Trajectory]) -> None:
        for attempt in attempts:
            attempt.stage = TrajectoryStage.RUNNING
        requests = [self._request(attempt) for attempt in attempts]
        self._workers.to_engine(engine, msg.Submit(requests=requests))

    def _request(self, attempt: Trajectory) -> Request:
        """A response, or the next turn of one."""
        request = Request(
            attempt=attempt.id,
            group=attempt.prompt,
            prompt=attempt.prompt_tokens,
            params=self._sampling,
            seed=sampling_seed(self._seed, _EVALUATION, attempt.prompt, attempt.index),
        )
        if self._episodes is None:
            return request
        return self._episodes.request(request, attempt)

    def _report(self, engine: EngineId, report: msg.EngineReport) -> None:
        if self._done is None or self._done.done():
            return
        match report:
            case msg.Finished():
                finished = [self._attempts[output.attempt] for output in report.outputs]
                for attempt, output in zip(finished, report.outputs, strict=True):
                    attempt.output, attempt.stage = output, TrajectoryStage.GRADING
                if self._episodes is None:
                    self._grade(finished)
                else:
                    for attempt, output in zip(finished, report.outputs, strict=True):
                        attempt.end_turn(self._clock(), output)
                        self._episodes.step(attempt)
                self._workers.to_engine(engine, msg.Proceed())
            case msg.Failed():
                for id_ in report.attempts:
                    self._try_again(self._attempts[id_], report.error)
                self._finish()
            case msg.Aborted():
                pass
            case _:
                raise AssertionError(report)

    def _take_answers(self, answers: Sequence[Answered]) -> None:
        """Environments have answered; one that failed counts as an answer without a reward, and one
        that another one brought down begins again."""
        assert self._episodes is not None
        if (broken := self._episodes.broken) is not None:
            self._end(ValueError(broken))
            return
        for each in answers:
            attempt = each.attempt
            if not (each.over or each.error):
                self._submit(attempt.engine, [attempt])
                continue
            self._workers.to_engine(attempt.engine, msg.Abort(attempts=[attempt.id]))
            attempt.stage = TrajectoryStage.GRADING
            if each.over:
                attempt.output = attempt.whole(self._version)
            if each.blameless:
                again = self._begin(attempt.id, attempt.prompt, attempt.index, attempt.engine)
                self._episodes.begin(again, self._problems)
            else:
                self._missing -= bool(each.error)
                self._tell(each)
        self._grade([each.attempt for each in answers if each.over])
        self._finish()
        self._episodes.settle()

    def _tell(self, answered: Answered) -> None:
        """Say of an environment that it failed; the same failure once."""
        conversation = answered.attempt.conversation
        error = answered.error or (conversation.failed if conversation is not None else "")
        if error:
            self._say(f"the environment of problem {answered.attempt.prompt}: {error}", error)

    def _say(self, text: str, error: str) -> None:
        """The same failure once."""
        if error not in self._told:
            self._told.add(error)
            self._progress.note(f"evaluation: {text}")

    def _grade(self, attempts: Sequence[Trajectory]) -> None:
        rows = self._problems.rows
        if self._rewards.needs_group:
            for attempt in attempts:
                self._rewards.grade([attempt], rows, training=False)
        else:
            self._rewards.grade(attempts, rows, training=False)

    def _take_grades(self, grades: Sequence[Grade]) -> None:
        if (broken := self._rewards.broken) is not None:
            self._end(ValueError(broken))
        for grade in grades:
            attempt = self._attempts.get(grade.attempt)
            if attempt is not None:
                attempt.reward, attempt.metrics = grade.reward, grade.metrics
                self._missing -= 1
        self._finish()

    def _finish(self) -> None:
        self._show()
        if self._missing == 0 and self._done is not None and not self._done.done():
            self._done.set_result(None)

    def _lose(self, loss: Loss) -> None:
        """What a lost engine was at goes on at others."""
        engines = self._workers.engines
        if not engines:
            self._end(WorkerError(f"evaluation: {loss.text}; no engine is left"))
            return
        self._progress.note(f"evaluation: {loss}")
        going = [each for each in self._attempts.values() if each.stage in GENERATING]
        load = Counter(each.engine for each in going)
        batches: dict[EngineId, list[Trajectory]] = defaultdict(list)
        for attempt in going:
            if attempt.engine in loss.engines:
                attempt.engine = min(engines, key=lambda engine: (load[engine], engine))
                load[attempt.engine] += 1
                if (
                    attempt.stage is TrajectoryStage.RUNNING
                ):  # else when its environment has answered
                    batches[attempt.engine].append(attempt)
        for engine, attempts in batches.items():
            self._submit(engine, attempts)

    def _try_again(self, attempt: Trajectory, error: str) -> None:
        """An engine could not give an answer: the next one tries, a few times."""
        self._failures[attempt.id] += 1
        if self._failures[attempt.id] <= self._retries:
            engines = self._workers.engines
            attempt.engine = engines[(engines.index(attempt.engine) + 1) % len(engines)]
            self._submit(attempt.engine, [attempt])
            return
        attempt.stage = TrajectoryStage.OVER
        if self._episodes is not None:
            self._episodes.close(attempt)
        self._missing -= 1
        self._say(f"the answer to problem {attempt.prompt}: {error}", error)

    def _end(self, error: Exception) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)

    def is_right(self, attempt: Trajectory) -> bool:
        """Whether a graded answer counts as correct."""
        return attempt.reward is not None and attempt.reward >= self._config.threshold

    def graded(self) -> list[Trajectory]:
        """The answers of the last evaluation that got a reward, in the problems' order."""
        attempts = self._attempts.values()
        return [attempt for attempt in attempts if attempt.reward is not None]

    def _metrics(self) -> dict[str, float]:
        kind = self._kind
        attempts = list(self._attempts.values())
        graded = self.graded()
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
