"""What a job's policy is told once, before its first event."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from rollpacker.config import RolloutConfig
from rollpacker.policy.engines.fleet import Layout
from rollpacker.policy.engines.hardware import Hardware
from rollpacker.policy.engines.latency import LatencyCurve, RowCosts, consolidation_threshold
from rollpacker.policy.gradients.streaming import StreamingRules
from rollpacker.policy.gradients.tail_release import tail_engines


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSettings:
    """Everything that the policy depends on besides events; written at a journal's head.

    Args:
        rollout: the run's ``rollout`` section.
        seed: the run's.
        sizes: prompts of each domain in the data.
        cap: longest response, tokens.
        latency: seconds of a decode step of one engine by batch size.
        asynchronous_grading: grade each response when it finishes.
        rules: what streaming may do.
        machine: devices, where engines may span several or the rule that frees them asks for them.
        rows: what rows of a decode step cost; None where engines cannot decode ahead.
    """

    rollout: RolloutConfig
    seed: int
    sizes: dict[str, int]
    cap: int
    latency: dict[int, float]
    asynchronous_grading: bool
    rules: StreamingRules
    machine: Hardware | None = None
    rows: RowCosts | None = None

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return _ADAPTER.dump_python(self, mode="json")

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RolloutSettings:
        """The inverse of ``to_json``; what version 0.1.0 did not write is as it was then."""
        rollout = {"min_reward_range": 1e-3, **data["rollout"]}
        return _ADAPTER.validate_python({**data, "rollout": rollout})


_ADAPTER = TypeAdapter(RolloutSettings)


def streaming_rules(
    rollout: RolloutConfig,
    *,
    latency: Mapping[int, float],
    engines: int,
    whole_batch: bool,
    ordered: bool = False,
    updates: int = 1,
    train_all: bool = False,
    machine: Hardware | None = None,
    shared: bool = False,
    permits: bool = False,
    layout: Layout = "colocated",
    replica_engines: int = 0,
) -> StreamingRules:
    """What streaming may do, from the configuration.

    Args:
        rollout: the run's ``rollout`` section.
        latency: seconds of a decode step of one engine by batch size.
        engines: how many there are.
        whole_batch: the update needs all groups before its first gradient.
        ordered, updates, train_all: as in ``StreamingRules``.
        machine: devices, as in ``RolloutSettings``: then another rule moves the tail.
        shared: other jobs may be given the nodes of a tail.
        permits: nodes are the job's for a phase at a time, so replicas that have some of their own
            wait for the rollout's end.
        layout: where replicas are; separate ones have no use for the engines of a tail.
        replica_engines: as in ``StreamingRules``.
    """
    mode, config = rollout.tail_batching.mode, rollout.streaming
    frees = machine is None and layout == "colocated"
    apart = permits and layout == "separate"
    stream = config.enabled and mode != "off" and not whole_batch and not apart
    below = config.consolidate_below
    if below == "auto":
        curve = LatencyCurve(latency)
        below = consolidation_threshold(curve.at, engines, curve.largest)
    return StreamingRules(
        stream=stream,
        consolidate_below=below if stream and frees else 0,
        ordered=ordered,
        updates=updates,
        train_all=train_all,
        prompts=rollout.prompts_per_step,
        tail_engines=tail_engines(engines) if shared and frees else 0,
        layout=layout,
        replica_engines=replica_engines,
    )


def asynchronous_grading(rollout: RolloutConfig, chosen: bool | None) -> bool:
    """Whether responses are graded while others still decode, unless it was ``chosen``."""
    return rollout.tail_batching.mode != "off" if chosen is None else chosen
