"""The decisions of one RL job: passes events to the parts and returns their decisions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rollpacker.config import RolloutConfig
from rollpacker.core import decisions as do
from rollpacker.core import events as ev
from rollpacker.policy.bias import Bias
from rollpacker.policy.measure import Measurements
from rollpacker.policy.streaming import Streaming, StreamingRules
from rollpacker.policy.tail_batching import TailBatching


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSettings:
    """Everything that the policy depends on besides events; written at a journal's head.

    Args:
        rollout: the run's ``rollout`` section.
        seed: the run's.
        sizes: prompts of each domain in the data.
        cap: longest response, tokens.
        latency: seconds of a decode step of one worker by batch size.
        asynchronous_grading: grade each response when it finishes.
        rules: what streaming may do.
    """

    rollout: RolloutConfig
    seed: int
    sizes: dict[str, int]
    cap: int
    latency: dict[int, float]
    asynchronous_grading: bool
    rules: StreamingRules

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return {
            "rollout": self.rollout.model_dump(mode="json"),
            "seed": self.seed,
            "sizes": self.sizes,
            "cap": self.cap,
            "latency": {str(batch): seconds for batch, seconds in self.latency.items()},
            "asynchronous_grading": self.asynchronous_grading,
            "rules": asdict(self.rules),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RolloutSettings:
        """The inverse of ``to_json``."""
        return cls(
            rollout=RolloutConfig.model_validate(data["rollout"]),
            seed=data["seed"],
            sizes=dict(data["sizes"]),
            cap=data["cap"],
            latency={int(batch): seconds for batch, seconds in data["latency"].items()},
            asynchronous_grading=data["asynchronous_grading"],
            rules=StreamingRules(**data["rules"]),
        )


class RolloutPolicy:
    """Tail batching, streaming and what they know of lengths, as one policy."""

    def __init__(self, settings: RolloutSettings) -> None:
        self._streaming = Streaming(settings.rollout.streaming, settings.rules)
        self._measure = Measurements(
            settings.rollout,
            seed=settings.seed,
            latency=settings.latency,
            cap=settings.cap,
            streaming=settings.rules.stream,
        )
        self._tail = TailBatching(
            settings.rollout,
            settings.sizes,
            asynchronous_grading=settings.asynchronous_grading,
            predict=self._measure.predicted,
        )

    def handle(self, now: float, event: ev.Event) -> list[do.Decision]:
        """Take one event; the decisions are in the order in which to perform them."""
        del now
        made: list[do.Decision] = []
        if isinstance(event, ev.StepStarted):
            self._streaming.start(event)
            racing, audits = self._measure.start(event)
            self._follow(made, self._tail.start(event, racing, audits))
        else:
            self._streaming.handle(event)
            self._measure.handle(event, self._tail.audited())
            self._follow(made, self._tail.handle(event))
        made.extend(self._streaming.decide())
        return made

    def _follow(self, made: list[do.Decision], decisions: Iterable[do.Decision]) -> None:
        for decision in decisions:
            made.append(decision)
            self._streaming.observe(decision)
            self._measure.observe(decision)
            if isinstance(decision, do.FinishRollout):
                self._measure.finish(self._tail.audited())

    @property
    def queue(self) -> int:
        """Prompts waiting for a long round."""
        return len(self._tail.queue)

    @property
    def held(self) -> int:
        """Prompts that were drawn and wait: queued, or bucketed for a later round."""
        return self._tail.held

    def bias(self) -> Bias:
        """How far the last rounds' kept responses are from all responses."""
        return self._measure.bias

    def censoring_weights(self, lengths: Sequence[int]) -> list[float]:
        """Inverse-probability-of-censoring weights of kept responses (mode ``prompts``)."""
        return self._measure.weights(lengths)

    def state_dict(self) -> dict[str, Any]:
        """What outlives a step, as JSON."""
        return {"tail": self._tail.state_dict(), "measure": self._measure.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore ``state_dict``."""
        self._tail.load_state_dict(state["tail"])
        self._measure.load_state_dict(state["measure"])


def from_journal(meta: Mapping[str, Any]) -> RolloutPolicy:
    """The policy that a journal's ``meta`` line describes."""
    policy = RolloutPolicy(RolloutSettings.from_json(meta["settings"]))
    policy.load_state_dict(meta["state"])
    return policy
