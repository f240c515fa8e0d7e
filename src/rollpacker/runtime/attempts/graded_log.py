"""Graded responses of the step in flight, so that a run that is killed does not sample them again.

An append-only file of records, each with its CRC. They hold for one step and for the weights of
one verified checkpoint: a step that begins with any others starts an empty log.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollpacker.core.types import AttemptId, PromptId
from rollpacker.durable import AppendFile
from rollpacker.engine.base import Output
from rollpacker.reward.base import CodeRun, Grade
from rollpacker.runtime.attempts.attempts import Trajectory
from rollpacker.runtime.attempts.episode_record import EpisodeRecord

Buffer = bytes | memoryview
_FRAME = struct.Struct("<III")
"""CRC-32 of what follows the frame, bytes of JSON, bytes of tokens, logprobs and routes."""


@dataclass(frozen=True, slots=True)
class GradedResponse:
    """A response and its grade, as a step that was killed has left them."""

    output: Output
    grade: Grade
    prompt_tokens: NDArray[np.int32] | None = None
    """Where its environment has put another prompt in the row's place."""
    conversation: EpisodeRecord | None = None

    def restore(self, attempt: Trajectory) -> None:
        """Give an attempt what it had said to its environment."""
        attempt.conversation = self.conversation
        if self.prompt_tokens is not None:
            attempt.prompt_tokens = self.prompt_tokens

    def of(self, attempt: AttemptId) -> GradedResponse:
        """The same under the id that it has now."""
        out, old = self.output, self.grade
        output = Output(
            attempt=attempt,
            tokens=out.tokens,
            logprobs=out.logprobs,
            finish_reason=out.finish_reason,
            weights_version=out.weights_version,
            routes=out.routes,
        )
        return replace(self, output=output, grade=replace(old, attempt=attempt))


class GradedLog:
    """The log of one run.

    Args:
        path: its file; made when the first step that can use it begins.
        say: told, once, when the log cannot be read, written or removed; the run goes on without
            it.
    """

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        self._path = path
        self._say = say
        self._file: AppendFile | None = None
        self._told = False
        self._known: dict[tuple[PromptId, int], GradedResponse] = {}

    def begin(self, step: int, weights: str | None) -> int:
        """Begin a step; returns how many responses of it are known from before.

        Args:
            step: the step.
            weights: fingerprint of the checkpoint that the step begins with; None where there is
                none, so that nothing of the step could be used again.
        """
        self.close()
        self._known = {}
        if weights is None:
            self.clear()
            return 0
        head = {"step": step, "weights": weights}
        try:
            records, good = _read(self._path)
            if records and records[0][0] == head:
                for fields, body in records[1:]:
                    self._known[fields["prompt"], fields["index"]] = _response(step, fields, body)
            self._open(head, good if self._known else 0)
        except OSError as error:
            self._stop(error)
        return len(self._known)

    def find(self, prompt: PromptId, index: int) -> GradedResponse | None:
        """The response to a prompt with this sample index, if it was graded before."""
        return self._known.get((prompt, index))

    def add(self, attempts: Iterable[Trajectory]) -> None:
        """Keep what was just graded."""
        if self._file is None:
            return
        new = (a for a in attempts if (a.prompt, a.index) not in self._known)
        try:
            self._file.write(b"".join(chain.from_iterable(map(_encode_attempt, new))))
        except OSError as error:
            self._stop(error)

    def clear(self) -> None:
        """Nothing is in flight: remove the file."""
        self.close()
        try:
            self._path.unlink(missing_ok=True)
        except OSError as error:
            self._stop(error)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self, head: Mapping[str, Any], good: int) -> None:
        with self._path.open("ab") as file:
            file.truncate(good)
        self._file = AppendFile(self._path)
        if not good:
            self._file.write(b"".join(_encode(head)))

    def _stop(self, error: OSError) -> None:
        self.close()
        if not self._told:
            self._told = True
            self._say(
                f"WARNING {self._path} cannot be written ({error}): the run goes on without it; "
                "one that is killed samples the step again"
            )


def _encode_attempt(attempt: Trajectory) -> Sequence[Buffer]:
    assert attempt.output is not None
    fields = {
        "prompt": attempt.prompt,
        "index": attempt.index,
        "finish_reason": attempt.output.finish_reason,
        "reward": attempt.reward,
        "rewards": dict(attempt.rewards),
        "runs": {name: asdict(run) for name, run in attempt.runs.items()},
        "extra": dict(attempt.extra),
        "metrics": dict(attempt.metrics),
    }
    conversation = attempt.conversation
    if conversation is not None:
        fields["conversation"] = conversation.to_json()
        if conversation.changed:
            fields["prompt_tokens"] = attempt.prompt_tokens.tolist()
    tokens = np.ascontiguousarray(attempt.output.tokens, dtype="<i4")
    logprobs = np.ascontiguousarray(attempt.output.logprobs, dtype="<f4")
    arrays = [tokens.data, logprobs.data]
    if attempt.output.routes is not None:
        fields["routes"] = attempt.output.routes.shape
        arrays.append(np.ascontiguousarray(attempt.output.routes, dtype="<i2").data)
    return _encode(fields, *arrays)


def _response(step: int, fields: Mapping[str, Any], body: bytes) -> GradedResponse:
    shape = fields.get("routes")
    end = len(body) - (0 if shape is None else 2 * math.prod(shape))
    half, routes = end // 2, None
    if shape is not None:
        routes = np.frombuffer(body[end:], dtype="<i2").astype(np.int16).reshape(shape)
    output = Output(
        attempt=AttemptId(-1),
        tokens=np.frombuffer(body[:half], dtype="<i4").astype(np.int32),
        logprobs=np.frombuffer(body[half:end], dtype="<f4").astype(np.float32),
        finish_reason=fields["finish_reason"],
        weights_version=step,
        routes=routes,
    )
    grade = Grade(
        attempt=AttemptId(-1),
        reward=fields["reward"],
        rewards=fields["rewards"],
        runs={name: _run(run) for name, run in fields["runs"].items()},
        extra=fields.get("extra", {}),
        metrics=fields.get("metrics", {}),
    )
    prompt, conversation = fields.get("prompt_tokens"), fields.get("conversation")
    return GradedResponse(
        output,
        grade,
        None if prompt is None else np.array(prompt, np.int32),
        None if conversation is None else EpisodeRecord.from_json(conversation),
    )


def _run(fields: Mapping[str, Any]) -> CodeRun:
    return CodeRun(**{**fields, "tests": tuple(fields["tests"]), "cpu_s": tuple(fields["cpu_s"])})


def _encode(fields: Mapping[str, Any], *arrays: memoryview) -> Sequence[Buffer]:
    """The parts of a record."""
    head = json.dumps(fields).encode()
    crc = zlib.crc32(head)
    for array in arrays:
        crc = zlib.crc32(array, crc)
    return _FRAME.pack(crc, len(head), sum(array.nbytes for array in arrays)), head, *arrays


def _read(path: Path) -> tuple[Sequence[tuple[dict[str, Any], bytes]], int]:
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
