"""Emulated responses: forced lengths, random tokens, and in their first ones what a grader finds.

The length of a response is the simulator's for the same draw. Tokens follow from the seed of the
attempt, so that one that moves goes on where it was.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from rollpacker.core.types import FinishReason, PromptId, sampling_seed
from rollpacker.emulate.config import Emulated
from rollpacker.emulate.head import head_of
from rollpacker.emulate.messages import Draw
from rollpacker.engine.base import Output, Request
from rollpacker.sim.workload.turn_script import TurnScript, at_most
from rollpacker.sim.workload.workload import DrawnWorkload

_CORPUS = 1 << 20
_MOST_SAMPLES = 1 << 14


class Coming(NamedTuple):
    """A response that is being decoded: its request, and what will come of it."""

    request: Request
    course: TurnScript
    reward: float
    grading_s: float


class EmulatedResponses:
    """What the engines of one process answer.

    Args:
        emulated: the devices.
        cap: longest response, tokens.
        vocabulary: token ids that responses may have.
    """

    def __init__(self, emulated: Emulated, cap: int, vocabulary: int) -> None:
        self._emulated = emulated
        self._cap = cap
        self._seed = emulated.run.seed
        self._step = -1
        self._workload = self._drawn()
        self._draws: dict[PromptId, Draw] = {}
        self._indices: dict[PromptId, dict[int, int]] = {}
        rng = np.random.default_rng([self._seed, 6])
        self._tokens = rng.integers(0, vocabulary, _CORPUS + cap, dtype=np.int32)
        self._logprobs = -rng.standard_exponential(_CORPUS + cap, dtype=np.float32)

    def _drawn(self) -> DrawnWorkload:
        return DrawnWorkload(
            self._emulated.source.lengths,
            domains={"default": 1.0},
            prompt_tokens=self._emulated.prompt_tokens,
            seed=self._seed,
            recorded=self._emulated.source.recorded,
        )

    def coming(self, step: int, request: Request, draw: Draw) -> Coming:
        """What a request of a step will give."""
        if step != self._step:
            self._step, self._workload = step, self._drawn()
            self._draws.clear()
            self._indices.clear()
        prompt, workload = request.group, self._workload
        if self._draws.get(prompt) != draw:
            self._draws[prompt] = draw
            workload.place(prompt, draw.domain, number=draw.number, visits=draw.visits)
        index = self._index(step, prompt, request.seed)
        turns = at_most(workload.turns(step, prompt, index), self._cap)
        course = TurnScript(request.attempt, prompt, workload.prompt_tokens, turns)
        course.generated = len(request.generated)
        reward = workload.reward(step, prompt, index)
        return Coming(request, course, reward, self._grading_s(step, prompt, index))

    def _index(self, step: int, prompt: PromptId, seed: int) -> int:
        """Of the sample that has this seed."""
        known = self._indices.setdefault(prompt, {})
        while seed not in known:
            index = len(known)
            assert index < _MOST_SAMPLES, "the seed is none of this run's"
            known[sampling_seed(self._seed, step, prompt, index)] = index
        return known[seed]

    def _grading_s(self, step: int, prompt: PromptId, index: int) -> float:
        """Seconds of the clock that grading is to take."""
        emulated = self._emulated
        costs, run = emulated.calibration.rewards, emulated.run
        if not emulated.asynchronous:
            # All are graded together; a process does its share of them one after the other.
            count = run.rollout.prompts_per_step * run.rollout.num_generations
            seconds = emulated.calibration.synchronous_reward_s * run.grading.workers / count
            return seconds / emulated.config.factor
        match emulated.kind(self._draws[prompt].domain):
            case "none":
                seconds = 0.0
            case "math":
                seconds = costs.math_s
            case "judge":
                seconds = costs.judged_s(0.0)
            case "code":
                longest = run.grading.code_timeout.most_s
                seconds = min(longest, self._workload.run_s(step, prompt, index))
        return seconds / emulated.config.factor

    def output(self, coming: Coming, tokens: int, version: int, *, aborted: bool = False) -> Output:
        """The first ``tokens`` of a response."""
        at = coming.request.seed % _CORPUS
        ids = self._tokens[at : at + tokens].copy()
        head = head_of(coming.reward, coming.grading_s)[:tokens]
        ids[: len(head)] = head
        ended: FinishReason = "length" if tokens >= self._cap else "stop"
        return Output(
            attempt=coming.request.attempt,
            tokens=ids,
            logprobs=self._logprobs[at : at + tokens],
            finish_reason="abort" if aborted else ended,
            weights_version=version,
        )
