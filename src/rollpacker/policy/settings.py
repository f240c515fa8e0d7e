"""What a job's policy is told once, before its first event."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from rollpacker.config import RolloutConfig
from rollpacker.policy.engines.fleet import Layout, tail_engines
from rollpacker.policy.engines.hardware import Hardware, RowCosts

USUAL_MICRO_BATCH = 8192
"""Tokens that keep a GPU busy with models of 0.5 to 14 billion parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamingRules:
    """What streaming may do in this run.

    Args:
        stream: gradients may start before the rollout ends.
        ordered: gradients are summed in the order in which prompts were started, so that the sum is
            the same to the bit in every run.
        updates: of a step; more than one needs all groups first.
        train_all: groups whose rewards are alike have a gradient too (a KL term's, or that of
            advantages which are not zero for them).
        prompts: groups of an update, where a round may have several updates' worth of them.
        task_tokens: tokens of a gradient task while the rollout lasts.
        turns: engines sleep while replicas on their devices compute gradients.
        tail_engines: engines that keep decoding the tail after RollMux lends the other nodes to
            another job; 0: never lend.
        replica_engines: engines on a colocated replica's devices; 0: those up to the next
            replica's, as it was when a replica was lost with its engines.
    """

    stream: bool
    ordered: bool = False
    updates: int = 1
    train_all: bool = False
    layout: Layout = "colocated"
    prompts: int = 0
    task_tokens: int = 1024
    turns: bool = False
    tail_engines: int = 0
    replica_engines: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSettings:
    """Everything that the policy depends on besides events; written at a journal's head.

    Args:
        sizes: prompts of each domain in the data.
        cap: longest response, tokens.
        latency: seconds of a decode step of one engine by batch size.
        asynchronous_grading: grade each response when it finishes.
        machine: devices, for the planner and the rule that frees them; None where neither asks.
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

    @classmethod
    def of(
        cls,
        rollout: RolloutConfig,
        *,
        seed: int,
        sizes: Mapping[str, int],
        cap: int,
        latency: dict[int, float],
        engines: int,
        whole_batch: bool,
        asynchronous: bool | None = None,
        ordered: bool = False,
        updates: int = 1,
        train_all: bool = False,
        machine: Hardware | None = None,
        rows: RowCosts | None = None,
        shared: bool = False,
        permits: bool = False,
        layout: Layout = "colocated",
        replica_engines: int = 0,
        micro_batch_tokens: int = USUAL_MICRO_BATCH,
        turns: bool = False,
    ) -> RolloutSettings:
        """From a run's configuration, and what else is known of it.

        Args:
            engines: how many there are.
            whole_batch: the update needs all groups before its first gradient.
            asynchronous: how responses are graded; None leaves it to the mode.
            shared: other jobs may be given the nodes of a tail.
            permits: nodes are the job's for a phase at a time, so replicas that have some of their
                own wait for the rollout's end.
            layout: where replicas are; separate ones have no use for the engines of a tail.
            micro_batch_tokens: of one forward and backward.
        """
        # The paper's rules know nothing of a tail that leaves its nodes.
        ours = rollout.planner == "off" and rollout.streaming.scaling in ("consolidate", "off")
        off = rollout.tail_batching.mode == "off" or (permits and layout == "separate")
        stream = rollout.streaming.enabled and not (off or whole_batch)
        rules = StreamingRules(
            stream=stream,
            ordered=ordered,
            updates=updates,
            train_all=train_all,
            prompts=rollout.prompts_per_step,
            task_tokens=rollout.streaming.group_tokens or 2 * micro_batch_tokens,
            turns=turns and not ordered,
            tail_engines=tail_engines(engines) if shared and ours and layout == "colocated" else 0,
            layout=layout,
            replica_engines=replica_engines,
        )
        return cls(
            rollout=rollout,
            seed=seed,
            sizes=dict(sizes),
            cap=cap,
            latency=latency,
            asynchronous_grading=asynchronous_grading(rollout, asynchronous),
            rules=rules,
            machine=machine,
            rows=rows,
        )

    def to_json(self) -> dict[str, Any]:
        return _ADAPTER.dump_python(self, mode="json")

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RolloutSettings:
        return _ADAPTER.validate_python(data)


_ADAPTER = TypeAdapter(RolloutSettings)


def asynchronous_grading(rollout: RolloutConfig, chosen: bool | None) -> bool:
    """Whether responses are graded while others still decode, unless it was ``chosen``."""
    return rollout.tail_batching.mode != "off" if chosen is None else chosen
