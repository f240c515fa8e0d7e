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
"""One try at one response of one prompt; never reused within a run."""
PromptId = NewType("PromptId", str)
"""Stable across epochs and restarts."""
EngineId = NewType("EngineId", int)
"""An engine decodes on some devices of one node."""
ReplicaId = NewType("ReplicaId", int)
"""A set of devices that shards one copy of the trained model, and sums gradients.

Where engines and replicas cover the same devices (colocated), theirs have one number.
"""


@dataclass(frozen=True, slots=True, order=True)
class Device:
    """What computes: a GPU, or some CPU cores; ``index`` is its place on the node."""

    node: int
    index: int


FinishReason = Literal["stop", "length", "abort"]
Phase = Literal["rollout", "train"]
"""Of a step."""


class RoundKind(StrEnum):
    """What a rollout round does with its losers."""

    FULL = "full"
    """Plain synchronous: every attempt that is started is kept."""
    SHORT = "short"
    """Over-provisioned: the first to finish are kept, the others are aborted."""
    LONG = "long"
    """Re-runs the losers of short rounds, without racing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What a policy may know of a prompt.

    Args:
        id: stable identity.
        domain: task domain; quotas are kept per domain.
        tokens: prompt length in tokens.
    """

    id: PromptId
    domain: str = "default"
    tokens: int = 0


# Without slots what is sent by the hundred: a frozen class with slots pickles through Python code.
@dataclass(frozen=True, kw_only=True, eq=False)
class Sample:
    """One finished response.

    Args:
        prompt: the prompt that it answers.
        index: position in its group, ``0 <= index``; part of the sampling seed.
        attempt: the attempt that produced it.
        prompt_tokens: shape (P,), int32.
        tokens: response token ids, shape (T,), int32; includes the end token if one was sampled.
        logprobs: of the sampler for ``tokens``, shape (T,), float32, nats.
        finish_reason: ``stop``, ``length`` (truncated) or ``abort`` (partial).
        weights_version: version of the weights that sampled its first token; equals the step, but
            in mode ``partial``.
        reward: weighted sum of ``rewards``; None until graded, and where no function applies.
        rewards: each reward function's own score by name.
        old_logprobs: like ``logprobs``, of the whole softmax of the weights that sampled, where
            the weights have changed since; None: they are the trainer's own.
        loss_mask: true on sampled tokens, false on those that an environment put in, shape (T,),
            bool; None: all were sampled. Tokens that were not sampled have a logprob of 0.
        stale: true on tokens of earlier weights that are to have no loss, shape (T,), bool; None:
            all have one.
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
        """Tokens that the model sampled: those of the loss."""
        return len(self.tokens) if self.loss_mask is None else int(self.loss_mask.sum())


@dataclass(frozen=True, kw_only=True, eq=False)
class Group:
    """The kept responses of one prompt, ordered by sample index, with their advantages.

    Args:
        prompt: the prompt.
        samples: graded samples, length G.
        advantages: shape (G,), float32.
    """

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
    """Seed of one attempt: 63 bits that depend on what is sampled, never on scheduling."""
    text = f"{run_seed}/{step}/{index}/{prompt}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


class Drafted(NamedTuple):
    """What drafts brought.

    Args:
        verifications: decode steps of a sequence that had a draft.
        drafted: tokens of its drafts.
        accepted: of them, those that were sampled.
    """

    verifications: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def tokens(self) -> float:
        """Tokens of a verification; 1 where there was none."""
        return 1.0 + self.accepted / max(1, self.verifications)

    def plus(self, other: Drafted) -> Drafted:
        return Drafted(*(mine + their for mine, their in zip(self, other, strict=True)))


NO_DRAFTS = Drafted()
