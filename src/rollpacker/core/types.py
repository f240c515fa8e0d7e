"""The nouns that every part of the system shares."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Literal, NamedTuple, NewType

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

AttemptId = NewType("AttemptId", int)
"""One try at one response of one prompt, never reused within a run."""
PromptId = NewType("PromptId", str)
"""Stable across epochs and restarts."""
EngineId = NewType("EngineId", int)
"""An engine decodes on some devices of one node."""
ReplicaId = NewType("ReplicaId", int)
"""A set of devices with one sharded copy of the trained model. Engines and replicas on the same
devices (colocated) share their number."""


@dataclass(frozen=True, slots=True, order=True)
class Device:
    """A GPU or some CPU cores. ``index`` is its place on the node."""

    node: int
    index: int


FinishReason = Literal["stop", "length", "abort"]
Phase = Literal["rollout", "train"]


class RoundKind(StrEnum):
    """How a rollout round treats its losers."""

    FULL = "full"
    """Plain synchronous: every started attempt is kept."""
    SHORT = "short"
    """Over-provisioned: the first to finish are kept, and the others are aborted."""
    LONG = "long"
    """Runs the losers of short rounds again, without racing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt as policies see it: quotas are per task domain, and ``tokens`` is its length."""

    id: PromptId
    domain: str = "default"
    tokens: int = 0


# No slots: samples are sent by the hundred, and a frozen class with slots pickles in Python code.
@dataclass(frozen=True, kw_only=True, eq=False)
class Sample:
    """One finished response.

    Args:
        index: position in its group, from 0, and part of the sampling seed.
        prompt_tokens: shape (P,), int32.
        tokens: response token ids with a sampled end token, shape (T,), int32.
        logprobs: the sampler's, of ``tokens``, shape (T,), float32, nats, 0 on tokens that were not
            sampled.
        finish_reason: ``stop``, ``length`` (truncated) or ``abort`` (partial).
        weights_version: version of the weights that sampled its first token. It equals the step,
            except in mode ``partial``.
        reward: weighted sum of ``rewards``, None until graded, and if no function applies.
        rewards: each reward function's score by name.
        old_logprobs: as ``logprobs``, but of the whole softmax of the weights that sampled, if the
            weights have changed since. None: the trainer computes them.
        loss_mask: true on sampled tokens, false on an environment's, shape (T,), bool. None: all
            were sampled.
        stale: true on tokens of earlier weights that get no loss, shape (T,), bool. None: none are.
    """

    prompt: PromptId
    index: int
    attempt: AttemptId
    prompt_tokens: NDArray[np.int32]
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    finish_reason: FinishReason
    weights_version: int
    reward: float | None = None
    rewards: Mapping[str, float] = field(default_factory=dict[str, float])
    old_logprobs: NDArray[np.float32] | None = None
    loss_mask: NDArray[np.bool_] | None = None
    stale: NDArray[np.bool_] | None = None

    @property
    def sampled(self) -> int:
        """The number of tokens that the model sampled, which are those of the loss."""
        return len(self.tokens) if self.loss_mask is None else int(self.loss_mask.sum())


@dataclass(frozen=True, kw_only=True, eq=False)
class Group:
    """The kept responses of one prompt, ordered by sample index, with their advantages.
    ``advantages`` has shape (len(samples),), float32."""

    prompt: PromptId
    samples: tuple[Sample, ...]
    advantages: NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class GroupPart:
    """Samples ``start`` to ``stop`` of a kept group: the unit of gradient work."""

    prompt: PromptId
    start: int
    stop: int


def sampling_seed(run_seed: int, step: int, prompt: PromptId, index: int) -> int:
    """The seed of one attempt: 63 bits that depend on the sample, never on scheduling."""
    text = f"{run_seed}/{step}/{index}/{prompt}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


class Drafted(NamedTuple):
    """Counts of speculative decoding.

    Args:
        verifications: decode steps of a sequence with a draft.
        drafted: draft tokens.
        accepted: draft tokens that were sampled.
    """

    verifications: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def tokens(self) -> float:
        """Mean tokens of a verification, 1 if there was none."""
        return 1.0 + self.accepted / max(1, self.verifications)

    def plus(self, other: Drafted) -> Drafted:
        return Drafted(*(mine + their for mine, their in zip(self, other, strict=True)))


NO_DRAFTS = Drafted()
