"""Which processes a run has: devices of engines and of replicas, and who meets whom."""

from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import assume, given

from rollpacker.config import RunConfig
from rollpacker.core.types import Device, EngineId, ReplicaId
from rollpacker.policy.engines.device_split import engine_sizes, split
from rollpacker.policy.engines.fleet import colocated, grid, separate
from rollpacker.runtime.cluster.nodes import Node
from rollpacker.runtime.pool.placement import ProcessSlot, Topology, in_turns, lay_out

FOLDER = Path("/meetings/unique")
STORE = "tcp://127.0.0.1:7/"


def config(**changes: Any) -> RunConfig:
    tree: dict[str, Any] = {
        "model": {"path": "m"},
        "data": {"path": "d"},
        "rewards": [{"function": "math"}],
    }
    return RunConfig.model_validate(tree | changes)


def machine(tp: int, engines: int, shard: int, training: int, planner: str = "off") -> RunConfig:
    """With ``training`` devices apart, or colocated replicas where that is 0."""
    devices = {"layout": "separate", "training": training} if training else {}
    return config(
        devices=devices | {"per_node": tp * engines + training},
        engine={"kind": "vllm", "tensor_parallel": tp},
        trainer={"kind": "fsdp", "shard": shard},
        rollout={"planner": planner},
    )


def laid_out(chosen: RunConfig, sizes: tuple[int, ...]) -> list[ProcessSlot]:
    return lay_out(chosen, nodes(1, chosen.devices.per_node), sizes, STORE)


def nodes(count: int, devices: int) -> list[Node]:
    places = tuple((f"cuda:{n}", (n,)) for n in range(devices))
    return [
        Node(number=n, places=places, folder=FOLDER.with_name(f"unique{n}")) for n in range(count)
    ]


@st.composite
def machines(draw: st.DrawFn) -> tuple[RunConfig, tuple[int, ...]]:
    tp, engines = draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 4))
    apart = draw(st.booleans())
    training = draw(st.integers(1, 4)) if apart else 0
    shard = draw(st.integers(1, 8))
    assume((training or tp * engines) % shard == 0)
    assume(apart or shard % tp == 0)
    larger = tuple(size for size in (2 * tp, 4 * tp) if tp * engines % size == 0)
    sizes = (tp, *larger[: draw(st.integers(0, len(larger)))])
    return machine(tp, engines, shard, training), sizes


@given(machines())
def test_every_device_decodes_and_trains_as_the_layout_says(
    given: tuple[RunConfig, tuple[int, ...]],
) -> None:
    chosen, sizes = given
    slots = laid_out(chosen, sizes)
    decoding, training = split(chosen, range(chosen.devices.per_node))
    for size in sizes:
        engines = [p for p in slots if p.engine is not None and p.engine.span.size == size]
        assert [p.device.index for p in engines] == list(decoding)
        assert all(p.engine and p.engine.resting == (size > sizes[0]) for p in engines)
    assert [p.device.index for p in slots if p.replica is not None] == list(training)
    assert all(slot.place == (f"cuda:{slot.device.index}", (slot.device.index,)) for slot in slots)


@given(machines())
def test_who_meets_are_neighbours_of_one_gang(given: tuple[RunConfig, tuple[int, ...]]) -> None:
    chosen, sizes = given
    met: dict[str, list[tuple[ProcessSlot, Any]]] = defaultdict(list)
    for slot in laid_out(chosen, sizes):
        for part in (slot.engine, slot.replica):
            if part is not None:
                met[part.span.meeting].append((slot, part))
    for meeting, found in met.items():
        assert meeting.startswith(f"{FOLDER}0/unique0-")
        assert [part.span.rank for _, part in found] == list(range(len(found)))
        assert {part.span.size for _, part in found} == {len(found)}
        assert all(b.device.index == a.device.index + 1 for (a, _), (b, _) in pairwise(found))
        kinds = {(type(part), getattr(part, "engine", None)) for _, part in found}
        assert len(kinds) == 1


@given(machines())
def test_its_fleet_is_that_of_the_policies(given: tuple[RunConfig, tuple[int, ...]]) -> None:
    """A colocated replica has the number of its first engine."""
    chosen, sizes = given
    slots = laid_out(chosen, sizes)
    gangs = Topology(slots)
    devices = grid(chosen.devices.per_node, chosen.devices.per_node)
    shard = chosen.trainer.members(chosen.devices.training or len(devices))
    if chosen.devices.training:
        apart = split(chosen, devices)
        expected = separate(*apart, tensor_parallel=sizes[0], replica=shard)
    else:
        expected = colocated(devices, tensor_parallel=sizes[0], replica=shard)
    fleet = gangs.fleet(chosen.devices.layout, range(len(slots)))
    assert dict(fleet.engines) == dict(expected.engines)
    assert dict(fleet.replicas) == dict(expected.replicas)


def test_a_fleet_has_only_who_is_whole() -> None:
    chosen = machine(tp=2, engines=2, shard=2, training=2)
    slots = laid_out(chosen, (2,))
    fleet = Topology(slots).fleet("separate", {1, 2, 3, 4, 5})
    assert fleet.engines == {EngineId(1): (Device(0, 2), Device(0, 3))}
    assert fleet.replicas == {ReplicaId(0): (Device(0, 4), Device(0, 5))}


def test_what_shares_weights_shares_a_process() -> None:
    slots = lay_out(config(devices={"per_node": 2}), nodes(1, 2), (1,))
    assert [(p.engine.engine, p.replica.replica) for p in slots if p.engine and p.replica] == [
        (0, 0),
        (1, 1),
    ]


@pytest.mark.parametrize(
    ("devices", "heads", "kv_heads", "sizes"),
    [
        (8, 32, 8, (1, 2, 4, 8)),
        (8, 12, 2, (1, 2, 4)),
        (6, 32, 8, (1, 2)),
        (12, 32, 8, (1, 2, 4)),
        (8, 32, 3, ()),
        (1, 32, 8, ()),
        (2, 7, 7, ()),
    ],
)
def test_a_planner_has_the_sizes_that_devices_and_heads_allow(
    devices: int, heads: int, kv_heads: int, sizes: tuple[int, ...]
) -> None:
    chosen = machine(tp=1, engines=devices, shard=1, training=0, planner="paper")
    if sizes:
        assert engine_sizes(chosen, [devices], heads, kv_heads) == sizes
    else:
        with pytest.raises(ValueError, match=r"planner=paper has no choice, as engines of 2"):
            engine_sizes(chosen, [devices], heads, kv_heads)


def test_without_a_planner_there_is_one_size() -> None:
    chosen = machine(tp=2, engines=4, shard=2, training=0)
    assert engine_sizes(chosen, [8, 8], 32, 8) == (2,)


@given(st.integers(1, 4), st.sampled_from([2, 4, 8]), st.sampled_from([1, 2]), st.data())
def test_no_engine_leaves_its_node_and_a_replica_may(
    count: int, devices: int, tp: int, data: st.DataObject
) -> None:
    shard = data.draw(st.sampled_from([n for n in (tp, 2, devices, 2 * devices) if n % tp == 0]))
    assume(count * devices % shard == 0)
    chosen = machine(tp, devices // tp, shard, 0)
    slots = lay_out(
        chosen, nodes(count, devices), (tp, *([2 * tp] if 2 * tp <= devices else [])), STORE
    )
    met: dict[str, list[ProcessSlot]] = defaultdict(list)
    for slot in slots:
        part = slot.engine or slot.replica
        assert part is not None
        met[part.span.meeting].append(slot)
    for meeting, found in met.items():
        where = {slot.device.node for slot in found}
        assert not found[0].engine or len(where) == 1
        (first, *_) = sorted(where)
        within = f"{FOLDER}{first}/unique{first}-"
        assert meeting.startswith(within if len(where) == 1 else f"{STORE}unique{first}-")
    fleet = Topology(slots).fleet("colocated", range(len(slots)))
    assert len(fleet.engines) == count * devices // tp
    assert len(fleet.replicas) == count * devices // shard


def test_devices_of_a_node_must_be_whole_engines() -> None:
    chosen = machine(tp=2, engines=2, shard=2, training=3)
    with pytest.raises(ValueError, match=r"tensor_parallel=2: 1 devices of a node that decode"):
        lay_out(chosen, nodes(2, 4), (2,), STORE)


def test_who_measures_a_gpus_memory_starts_when_nobody_else_takes_it() -> None:
    def turns(kv_tokens: int, place: str) -> list[list[int]]:
        run = config(
            devices={"per_node": 4},
            engine={"kind": "vllm", "kv_tokens": kv_tokens},
            trainer={"kind": "fsdp", "shard": 2},
        )
        node = Node(number=0, places=((place, ()),) * 4, folder=FOLDER)
        return [sorted(turn) for turn in in_turns(run, lay_out(run, [node], [1, 2]))]

    assert turns(0, "cuda:0") == [[8, 9, 10, 11], [0, 1, 2, 3], [4, 5, 6, 7]]
    assert turns(512, "cuda:0") == turns(0, "cpu") == [[*range(12)]]
