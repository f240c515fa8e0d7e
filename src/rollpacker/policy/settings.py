"""The fixed inputs of a job's policy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from rollpacker.config import RolloutConfig
from rollpacker.policy.engines.fleet import Layout, tail_engines
from rollpacker.policy.engines.hardware import Hardware, RowCosts

USUAL_MICRO_BATCH = 8192  # tokens that keep a GPU busy with models of 0.5 to 14 billion parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamingRules:
    """Streaming's limits in this run.

    Args:
        stream: gradients may start before the rollout ends.
        ordered: gradients are summed in the order of the prompts, so that the sum is the same to
            the bit in every run.
        updates: of a step. More than one needs all groups first.
        train_all: groups of equal rewards have a gradient too (a KL term, or advantages other than
            0).
        prompts: groups of an update, if a round has several updates.
        task_tokens: tokens of a gradient task during the rollout.
        turns: engines sleep while replicas on their devices compute gradients.
        tail_engines: engines that decode the tail after RollMux lends the other nodes, 0 to never
            lend.
        replica_engines: engines on a colocated replica's devices. 0: those up to the next
            replica's.
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
    """All inputs of the policy besides events, written at a journal's head.

    Args:
        sizes: prompts of each domain in the data.
        cap: longest response, tokens.
        latency: seconds of a decode step of one engine by batch size.
        machine: devices, for the planner and the rule that frees them.
        rows: costs of a decode step's rows. None if engines cannot decode ahead.
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
        """From a run's configuration and further facts.

        Args:
            engines: their number.
            whole_batch: the update needs all groups before its first gradient.
            asynchronous: grade each response when it finishes. None leaves it to the mode.
            shared: other jobs may get the nodes of a tail.
            permits: the job holds nodes for one phase at a time, so separate replicas wait for the
                rollout's end.
            micro_batch_tokens: of one forward and backward.
        """
        # The paper's rules do not support a tail that leaves its nodes.
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
    """Whether responses are graded while others decode, unless ``chosen``."""
    return rollout.tail_batching.mode != "off" if chosen is None else chosen
