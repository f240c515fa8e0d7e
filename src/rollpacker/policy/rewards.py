"""How long code may run, and what the judge may use of the devices it shares with the rollout.

RollPacker, section 4.3: timeouts follow the test case, the judge streams most of its layers from
host memory. What is decided here is acted upon by the drivers.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeoutSettings:
    """``T = min(max(least, factor * anchor), most)``, in CPU seconds.

    Args:
        factor: over the longest time of a correct response.
        least: shortest timeout.
        most: longest timeout, and the one before any correct response.
        at_once: a correct response counts from when it is graded, as in the paper. Otherwise
            from the next step, so that rewards do not depend on the order of grading.
        cases: test cases remembered; the least recently seen are forgotten.
    """

    factor: float = 1.5
    least: float = 2.0
    most: float = 30.0
    at_once: bool = True
    cases: int = 1_000_000

    def __post_init__(self) -> None:
        if not (self.factor >= 1.0 and 0.0 < self.least <= self.most < math.inf):
            raise ValueError(
                "an adaptive timeout needs factor >= 1 and 0 < least <= most, got "
                f"factor={self.factor}, least={self.least}, most={self.most}"
            )


class AdaptiveTimeouts:
    """A timeout for each test case, from the correct responses to it so far."""

    def __init__(self, settings: TimeoutSettings) -> None:
        self._settings = settings
        self._anchors: OrderedDict[str, float] = OrderedDict()
        self._later: dict[str, float] = {}

    def timeout(self, case: str) -> float:
        """Seconds that a response may take on this test case."""
        rules = self._settings
        anchor = self._anchors.get(case)
        if anchor is None:
            return rules.most
        return min(max(rules.least, rules.factor * anchor), rules.most)

    def observe(self, case: str, seconds: float, correct: bool) -> None:
        """Take the time of one response on one test case; only correct ones count."""
        if not correct:
            return
        if self._settings.at_once:
            self._raise(case, seconds)
        else:
            self._later[case] = max(seconds, self._later.get(case, 0.0))

    def advance(self) -> None:
        """A step is over: what waited for its end counts from now on."""
        for case in sorted(self._later):
            self._raise(case, self._later[case])
        self._later.clear()

    def _raise(self, case: str, seconds: float) -> None:
        self._anchors[case] = max(seconds, self._anchors.get(case, 0.0))
        self._anchors.move_to_end(case)
        if len(self._anchors) > self._settings.cases:
            self._anchors.popitem(last=False)

    def state_dict(self) -> dict[str, Any]:
        """Longest correct times by test case, as JSON."""
        return {"anchors": list(self._anchors.items()), "later": dict(self._later)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore ``state_dict``."""
        self._anchors = OrderedDict((case, seconds) for case, seconds in state["anchors"])
        self._later = dict(state["later"])


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeModel:
    """What one replica of the judge needs.

    Args:
        layers: its blocks.
        layer_bytes: weights of a block.
        fixed_bytes: embeddings, head and buffers, always resident.
        token_bytes: activations and KV of one token of a running sequence.
        token_seconds: compute of one token in one block.
        copy_seconds: copy of one block from host memory.
    """

    layers: int
    layer_bytes: int
    fixed_bytes: int
    token_bytes: float
    token_seconds: float
    copy_seconds: float

    def bytes_needed(self, resident: int, tokens: int) -> float:
        """Peak device memory: two more blocks than are resident, one in use and one on its way."""
        held = min(self.layers, resident + 2)
        return self.fixed_bytes + held * self.layer_bytes + tokens * self.token_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgePlan:
    """The ``concurrency`` shortest waiting sequences run, ``resident`` layers stay."""

    concurrency: int
    resident: int


class JudgeBudget:
    """Concurrency and resident layers of a judge replica.

    A pass takes as long as its compute or as the copies of the layers that are not resident,
    whichever is longer. Starting from one sequence and one layer, whatever speeds the judge up
    most per byte is added next, until copies hide behind compute (the rest of the memory stays
    with the actor) or memory ends. That order does not depend on the memory, so more memory
    never means fewer layers or sequences.

    Args:
        model: the judge.
        most: sequences in a batch.
    """

    def __init__(self, model: JudgeModel, most: int = 256) -> None:
        if model.layers < 1 or most < 1:
            raise ValueError(f"a judge needs layers >= 1 and most >= 1, got {model.layers}, {most}")
        self._model = model
        self._most = most

    def decide(self, waiting: Sequence[int], free_bytes: float) -> JudgePlan | None:
        """The plan for ``waiting`` lengths in tokens; None when nothing waits or fits."""
        lengths = sorted(waiting)[: self._most]
        if not lengths or self._model.bytes_needed(1, lengths[0]) > free_bytes:
            return None
        count, resident, tokens = 1, self._kept(1), lengths[0]
        while self._copies(resident) > self._compute(tokens):
            longer = tokens + lengths[count] if count < len(lengths) else tokens
            if self._layer_first(resident, tokens, longer):
                step = (count, self._kept(resident + 1), tokens)
            else:
                step = (count + 1, resident, longer)
            if self._model.bytes_needed(step[1], step[2]) > free_bytes:
                break
            count, resident, tokens = step
        return JudgePlan(concurrency=count, resident=resident)

    def _kept(self, resident: int) -> int:
        """The last two layers cost no memory: their place is the copies' place."""
        return self._model.layers if resident + 2 >= self._model.layers else resident

    def _copies(self, resident: int) -> float:
        return (self._model.layers - resident) * self._model.copy_seconds

    def _compute(self, tokens: int) -> float:
        return self._model.layers * tokens * self._model.token_seconds

    def _speed(self, resident: int, tokens: int) -> float:
        seconds = max(self._copies(resident), self._compute(tokens))
        return tokens / seconds if seconds > 0.0 else math.inf

    def _layer_first(self, resident: int, tokens: int, longer: int) -> bool:
        """Whether a layer is the better use of the next bytes than a sequence."""
        if longer == tokens:
            return True
        now = self._speed(resident, tokens)
        layer = self._speed(self._kept(resident + 1), tokens) - now
        sequence = self._speed(resident, longer) - now
        sequence_bytes = (longer - tokens) * self._model.token_bytes
        return layer * sequence_bytes >= sequence * self._model.layer_bytes
