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
from rollpacker.policy.division import engine_sizes, split
from rollpacker.policy.fleet import colocated, grid, separate
from rollpacker.runtime.gangs import Gangs
from rollpacker.runtime.placement import Post, lay_out

FOLDER = Path("/meetings/unique")


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


def laid_out(chosen: RunConfig, sizes: tuple[int, ...]) -> list[Post]:
    places = [(f"cuda:{n}", (n,)) for n in range(chosen.devices.per_node)]
    return lay_out(chosen, places, sizes, FOLDER)


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
    posts = laid_out(chosen, sizes)
    decoding, training = split(chosen, range(chosen.devices.per_node))
    for size in sizes:
        engines = [p for p in posts if p.engine is not None and p.engine.span.size == size]
        assert [p.number for p in engines] == list(decoding)
        assert all(p.engine and p.engine.resting == (size > sizes[0]) for p in engines)
    assert [p.number for p in posts if p.replica is not None] == list(training)
    assert all(post.place == (f"cuda:{post.number}", (post.number,)) for post in posts)


@given(machines())
def test_who_meets_are_neighbours_of_one_gang(given: tuple[RunConfig, tuple[int, ...]]) -> None:
    chosen, sizes = given
    met: dict[str, list[tuple[Post, Any]]] = defaultdict(list)
    for post in laid_out(chosen, sizes):
        for part in (post.engine, post.replica):
            if part is not None:
                met[part.span.meeting].append((post, part))
    for meeting, found in met.items():
        assert meeting.startswith(f"{FOLDER}/unique-")
        assert [part.span.rank for _, part in found] == list(range(len(found)))
        assert {part.span.size for _, part in found} == {len(found)}
        assert all(b.number == a.number + 1 for (a, _), (b, _) in pairwise(found))
        kinds = {(type(part), getattr(part, "engine", None)) for _, part in found}
        assert len(kinds) == 1


@given(machines())
def test_its_fleet_is_that_of_the_policies(given: tuple[RunConfig, tuple[int, ...]]) -> None:
    """A colocated replica has the number of its first engine."""
    chosen, sizes = given
    posts = laid_out(chosen, sizes)
    gangs = Gangs(posts)
    devices = grid(chosen.devices.per_node, chosen.devices.per_node)
    shard = chosen.trainer.members(chosen.devices.training or len(devices))
    if chosen.devices.training:
        apart = split(chosen, devices)
        expected = separate(*apart, tensor_parallel=sizes[0], replica=shard)
    else:
        expected = colocated(devices, tensor_parallel=sizes[0], replica=shard)
    fleet = gangs.fleet(chosen.devices.layout, range(len(posts)))
    assert dict(fleet.engines) == dict(expected.engines)
    assert dict(fleet.replicas) == dict(expected.replicas)


def test_a_fleet_has_only_who_is_whole() -> None:
    chosen = machine(tp=2, engines=2, shard=2, training=2)
    posts = laid_out(chosen, (2,))
    fleet = Gangs(posts).fleet("separate", {1, 2, 3, 4, 5})
    assert fleet.engines == {EngineId(1): (Device(0, 2), Device(0, 3))}
    assert fleet.replicas == {ReplicaId(0): (Device(0, 4), Device(0, 5))}


def test_what_shares_weights_shares_a_process() -> None:
    posts = lay_out(config(devices={"per_node": 2}), [("cpu", ())] * 2, (1,), FOLDER)
    assert [(p.engine.engine, p.replica.replica) for p in posts if p.engine and p.replica] == [
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
        assert engine_sizes(chosen, devices, heads, kv_heads) == sizes
    else:
        with pytest.raises(ValueError, match=r"rollout\.planner=paper has no choice: engines of 2"):
            engine_sizes(chosen, devices, heads, kv_heads)


def test_without_a_planner_there_is_one_size() -> None:
    chosen = machine(tp=2, engines=4, shard=2, training=0)
    assert engine_sizes(chosen, 8, 32, 8) == (2,)
