"""A response, or how far it has come, as an earlier try has left it; and its record in a file.

A file of records is appended to: each has its CRC, and ends what can be read where it is torn.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollpacker.core.types import AttemptId
from rollpacker.engine.base import Output
from rollpacker.reward.base import CodeRun, Grade
from rollpacker.runtime.attempts.attempts import Spans, Trajectory
from rollpacker.runtime.attempts.episode_record import EpisodeRecord

Buffer = bytes | memoryview
_FRAME = struct.Struct("<III")
"""CRC-32 of what follows the frame, bytes of JSON, bytes of tokens and logprobs."""


@dataclass(frozen=True, slots=True)
class KnownResponse:
    """What is known of one sample of a prompt.

    Args:
        output: its tokens; where its ``finish_reason`` is ``abort`` it goes on from there.
        grade: its reward; None where that is not known.
        prompt_tokens: where its environment has put another prompt in the row's place.
        conversation: with its environment.
        carried: tokens of earlier steps.
    """

    output: Output
    grade: Grade | None
    prompt_tokens: NDArray[np.int32] | None = None
    conversation: EpisodeRecord | None = None
    carried: Spans = ()

    @classmethod
    def left_by(cls, attempt: Trajectory) -> KnownResponse:
        """What an attempt has, and its grade if it was graded."""
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
        """Give an attempt what it had before; its output comes as an engine's does."""
        attempt.conversation = self.conversation
        attempt.carried = self.carried
        if self.prompt_tokens is not None:
            attempt.prompt_tokens = self.prompt_tokens

    def output_of(self, attempt: AttemptId, step: int) -> Output:
        """As one of this attempt, in a step."""
        out = self.output
        return Output(
            attempt=attempt,
            tokens=out.tokens,
            logprobs=out.logprobs,
            finish_reason=out.finish_reason,
            weights_version=step,
        )

    def grade_of(self, attempt: AttemptId) -> Grade | None:
        """As one of this attempt."""
        return None if self.grade is None else replace(self.grade, attempt=attempt)

    def encode(self, prompt: str, index: int) -> Sequence[Buffer]:
        """The parts of its record."""
        out, grade = self.output, self.grade
        fields: dict[str, Any] = {
            "prompt": prompt,
            "index": index,
            "finish_reason": out.finish_reason,
        }
        if grade is not None:
            fields |= {
                "reward": grade.reward,
                "rewards": dict(grade.rewards),
                "runs": {name: asdict(run) for name, run in grade.runs.items()},
                "extra": dict(grade.extra),
                "metrics": dict(grade.metrics),
            }
        if self.conversation is not None:
            fields["conversation"] = self.conversation.to_json()
        if self.prompt_tokens is not None:
            fields["prompt_tokens"] = self.prompt_tokens.tolist()
        if self.carried:
            fields["carried"] = self.carried
        tokens = np.ascontiguousarray(out.tokens, dtype="<i4")
        logprobs = np.ascontiguousarray(out.logprobs, dtype="<f4")
        return encode(fields, tokens.data, logprobs.data)


def decode(step: int, fields: Mapping[str, Any], body: bytes) -> KnownResponse:
    """What ``KnownResponse.encode`` wrote, in a step."""
    half = len(body) // 2
    output = Output(
        attempt=AttemptId(-1),
        tokens=np.frombuffer(body[:half], dtype="<i4").astype(np.int32),
        logprobs=np.frombuffer(body[half:], dtype="<f4").astype(np.float32),
        finish_reason=fields["finish_reason"],
        weights_version=step,
    )
    prompt, conversation = fields.get("prompt_tokens"), fields.get("conversation")
    return KnownResponse(
        output,
        _grade(fields) if "reward" in fields else None,
        None if prompt is None else np.array(prompt, np.int32),
        None if conversation is None else EpisodeRecord.from_json(conversation),
        tuple((version, tokens) for version, tokens in fields.get("carried", ())),
    )


def _grade(fields: Mapping[str, Any]) -> Grade:
    return Grade(
        attempt=AttemptId(-1),
        reward=fields["reward"],
        rewards=fields["rewards"],
        runs={name: _run(run) for name, run in fields["runs"].items()},
        extra=fields.get("extra", {}),
        metrics=fields.get("metrics", {}),
    )


def _run(fields: Mapping[str, Any]) -> CodeRun:
    return CodeRun(**{**fields, "tests": tuple(fields["tests"]), "cpu_s": tuple(fields["cpu_s"])})


def encode(fields: Mapping[str, Any], *arrays: memoryview) -> Sequence[Buffer]:
    """The parts of a record."""
    head = json.dumps(fields).encode()
    crc = zlib.crc32(head)
    for array in arrays:
        crc = zlib.crc32(array, crc)
    return _FRAME.pack(crc, len(head), sum(array.nbytes for array in arrays)), head, *arrays


def read(path: Path) -> tuple[Sequence[tuple[dict[str, Any], bytes]], int]:
    """The records up to the first that is torn or damaged, and how many bytes they are."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return [], 0
    records: list[tuple[dict[str, Any], bytes]] = []
    good = 0
    for fields, body, end in _records(data):
        records.append((fields, body))
        good = end
    return records, good


def _records(data: bytes) -> Iterator[tuple[dict[str, Any], bytes, int]]:
    at = 0
    while at + _FRAME.size <= len(data):
        crc, head, body = _FRAME.unpack_from(data, at)
        begin, end = at + _FRAME.size, at + _FRAME.size + head + body
        # A power loss may leave zeros, whose CRC is right.
        if not head or end > len(data) or zlib.crc32(data[begin:end]) != crc:
            return
        yield json.loads(data[begin : begin + head]), data[begin + head : end], end
        at = end
