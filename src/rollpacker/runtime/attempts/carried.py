"""Responses of a round's losers for the next step (mode ``partial``): tokens, log-probabilities,
grades.

A checkpoint has them as a file of its own, since a resumed run must not sample them again.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollpacker.core.codec import dumps
from rollpacker.core.types import AttemptId, PromptId
from rollpacker.durable import write_file
from rollpacker.engine.base import Output
from rollpacker.reward.base import CodeRun, Grade
from rollpacker.runtime.attempts.attempts import EpisodeRecord, Spans, Trajectory

FILE = "carried.jsonl"


@dataclass(frozen=True, slots=True)
class KnownResponse:
    """The known part of one sample of a prompt.

    Args:
        output: its tokens. If its ``finish_reason`` is ``abort``, it goes on from there.
        prompt_tokens: the prompt, if its environment has replaced the row's.
    """

    output: Output
    grade: Grade | None
    prompt_tokens: NDArray[np.int32] | None = None
    conversation: EpisodeRecord | None = None
    carried: Spans = ()

    @classmethod
    def left_by(cls, attempt: Trajectory) -> KnownResponse:
        assert attempt.output is not None
        grade = None
        if attempt.graded_s is not None:
            grade = Grade(
                attempt=attempt.id,
                reward=attempt.reward,
                rewards=attempt.rewards,
                runs=attempt.runs,
                extra=attempt.extra,
                metrics=attempt.metrics,
            )
        talk = attempt.conversation
        changed = talk is not None and talk.changed
        prompt = attempt.prompt_tokens if changed else None
        return cls(attempt.output, grade, prompt, talk, attempt.carried)

    def restore(self, attempt: Trajectory) -> None:
        """Give an attempt its former state, without its output, which comes like an engine's."""
        attempt.conversation = self.conversation
        attempt.carried = self.carried
        if self.prompt_tokens is not None:
            attempt.prompt_tokens = self.prompt_tokens

    def output_of(self, attempt: AttemptId, step: int) -> Output:
        out = self.output
        return Output(
            attempt=attempt,
            tokens=out.tokens,
            logprobs=out.logprobs,
            finish_reason=out.finish_reason,
            weights_version=step,
        )

    def grade_of(self, attempt: AttemptId) -> Grade | None:
        return None if self.grade is None else replace(self.grade, attempt=attempt)

    def to_json(self) -> dict[str, Any]:
        prompt, talk = self.prompt_tokens, self.conversation
        return {
            "finish_reason": self.output.finish_reason,
            "tokens": self.output.tokens.tolist(),
            "logprobs": self.output.logprobs.tolist(),
            "grade": None if self.grade is None else asdict(self.grade),
            "prompt_tokens": None if prompt is None else prompt.tolist(),
            "conversation": None if talk is None else talk.to_json(),
            "carried": self.carried,
        }

    @classmethod
    def from_json(cls, step: int, found: Mapping[str, Any]) -> KnownResponse:
        grade, prompt, talk = found["grade"], found["prompt_tokens"], found["conversation"]
        return cls(
            Output(
                attempt=AttemptId(-1),
                tokens=np.array(found["tokens"], np.int32),
                logprobs=np.array(found["logprobs"], np.float32),
                finish_reason=found["finish_reason"],
                weights_version=step,
            ),
            None if grade is None else _grade(grade),
            None if prompt is None else np.array(prompt, np.int32),
            None if talk is None else EpisodeRecord.from_json(talk),
            tuple((version, tokens) for version, tokens in found["carried"]),
        )


def _grade(found: Mapping[str, Any]) -> Grade:
    def run(each: Mapping[str, Any]) -> CodeRun:
        return CodeRun(**{**each, "tests": tuple(each["tests"]), "cpu_s": tuple(each["cpu_s"])})

    return Grade(**{**found, "runs": {name: run(each) for name, each in found["runs"].items()}})


def nothing_known(_prompt: PromptId, _index: int) -> KnownResponse | None:
    """Return None: every response begins anew."""
    return None


Responses = dict[tuple[PromptId, int], KnownResponse]


class CarriedResponses:
    """Responses of deferred prompts, complete or not. ``samples``: responses to a prompt."""

    def __init__(self, samples: int) -> None:
        self._samples = samples
        self._now: Responses = {}
        self._next: Responses = {}

    def begin(self) -> None:
        self._now = self._next

    def find(self, prompt: PromptId, index: int) -> KnownResponse | None:
        """The response to a prompt from before this step, if there is one."""
        return self._now.get((prompt, index))

    def keep(
        self, attempts: Collection[Trajectory], deferred: Collection[PromptId], step: int
    ) -> None:
        """Keep the responses of deferred prompts for the next step. Prompts that did not begin in
        this step keep their former responses."""
        lost: dict[PromptId, list[Trajectory]] = {attempt.prompt: [] for attempt in attempts}
        self._next = {key: known for key, known in self._now.items() if key[0] not in lost}
        for attempt in attempts:
            if attempt.prompt in deferred and attempt.verdict == "aborted":
                lost[attempt.prompt].append(attempt)
        for prompt, some in lost.items():
            own = {attempt.index for attempt in some}
            free = iter(n for n in range(self._samples) if n not in own)
            for attempt in some:
                # An attempt that was started in place of another takes its index.
                index = attempt.index if attempt.index < self._samples else next(free, None)
                if index is None:
                    continue
                attempt.verdict = "carried"
                if attempt.tokens:
                    left = KnownResponse.left_by(attempt)
                    self._next[prompt, index] = replace(left, carried=attempt.spans(step))

    def clear(self) -> None:
        self._next = {}

    def save(self, folder: Path, *, begun: bool) -> None:
        """Write the responses for the next step or, if ``begun``, those at this step's begin."""
        known = self._now if begun else self._next
        if known:
            lines = (dumps([*key, each.to_json()]) for key, each in known.items())
            write_file(folder / FILE, b"\n".join(lines))

    def load(self, folder: Path, step: int) -> None:
        file = folder / FILE
        lines = file.read_bytes().splitlines() if file.exists() else []
        self._next = {
            (PromptId(prompt), index): KnownResponse.from_json(step, found)
            for prompt, index, found in map(json.loads, lines)
        }
