"""Steps of racing on synthetic lengths: the rules of short and long rounds, without a driver."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from rollpacker.core.types import PromptId, RoundKind
from rollpacker.policy.lengths import LengthHistory


@dataclass(frozen=True)
class Family:
    """Log-normal body shared in part by a prompt, with a log-uniform tail, clipped at the cap."""

    median: float
    between: float
    within: float
    tail: float
    concentration: float
    low: float
    high: float
    cap: int

    def prompts(self, count, rng):
        q, c = self.tail, self.concentration
        return list(
            zip(
                rng.normal(0, self.between, count), rng.beta(q * c, (1 - q) * c, count), strict=True
            )
        )

    def draw(self, prompt, count, rng):
        own, tail = prompt
        body = self.median * np.exp(own + rng.normal(0, self.within, count))
        far = np.exp(rng.uniform(math.log(self.low), math.log(self.high), count))
        return np.clip(np.where(rng.random(count) < tail, far, body), 1, self.cap).astype(int)

    def sample(self, prompts, responses, seed=99):
        """Un-raced lengths, shape (prompts, responses)."""
        rng = np.random.default_rng(seed)
        return np.array([self.draw(p, responses, rng) for p in self.prompts(prompts, rng)])


# Fits to the published length figures of a 7B, a 14B and a 32B model.
FITS = {
    "8k": Family(557.4, 0.5195, 0.6195, 0.06601, 25.73, 2929, 8866, 8192),
    "16k": Family(570.9, 0.1394, 0.6380, 0.06196, 18.95, 1398, 23166, 16384),
    "32k": Family(521.6, 0.3940, 0.6015, 0.03683, 10.41, 2363, 103483, 32768),
}

ONE_OF_FITS = [n if n == "16k" else pytest.param(n, marks=pytest.mark.slow) for n in FITS]
"""Where a test takes seconds: the others show the same."""


@dataclass
class Step:
    number: int
    kind: RoundKind
    kept: np.ndarray
    history: LengthHistory


def race(family, *, prompts, responses, eta_p, eta_r, steps, seed=0) -> Iterator[Step]:
    """Run steps, telling a history of every attempt; yields after each."""
    rng = np.random.default_rng(seed)
    history, queue, drawn = LengthHistory(family.cap), deque(), 0
    for step in range(steps):
        if len(queue) >= prompts:
            taken = [queue.popleft() for _ in range(prompts)]
            groups = [family.draw(prompt, responses, rng) for _, prompt in taken]
            for (name, _), group in zip(taken, groups, strict=True):
                tell(history, name, group, group, RoundKind.LONG, step, family.cap)
            yield Step(step, RoundKind.LONG, np.concatenate(groups), history)
            continue
        started, tries = math.ceil(eta_p * prompts), math.ceil(eta_r * responses)
        fresh = family.prompts(started, rng)
        groups = np.sort([family.draw(prompt, tries, rng) for prompt in fresh], axis=1)
        done = groups[:, responses - 1]
        order = np.argsort(done, kind="stable")
        end = done[order[prompts - 1]]
        raced = started > prompts or tries > responses
        kind = RoundKind.SHORT if raced else RoundKind.FULL
        for place in range(started):
            name = PromptId(str(drawn + place))
            stop = np.minimum(groups[place], min(done[place], end))
            tell(history, name, groups[place], stop, kind, step, family.cap)
        queue.extend((PromptId(str(drawn + int(i))), fresh[i]) for i in sorted(order[prompts:]))
        drawn += started
        yield Step(step, kind, groups[order[:prompts], :responses].ravel(), history)


def tell(history, name, lengths, stops, kind, step, cap):
    for length, stop in zip(lengths.tolist(), stops.tolist(), strict=True):
        history.observe(name, stop, stop < length, kind, step, truncated=stop == length >= cap)
