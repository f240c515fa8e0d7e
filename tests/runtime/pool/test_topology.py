"""What ends with a worker, for any layout of devices."""

from collections.abc import Iterator
from pathlib import Path

from hypothesis import assume, given
from hypothesis import strategies as st

from rollpacker.config import RunConfig, parse
from rollpacker.core.types import EngineId
from rollpacker.runtime.cluster.nodes import Node
from rollpacker.runtime.pool.placement import ProcessSlot, Topology, lay_out

Case = tuple[list[ProcessSlot], list[tuple[int, EngineId]]]


def config(layout: str, kind: str, training: int, shard: int, size: int) -> RunConfig:
    devices = {"kind": "cpu", "layout": layout}
    tree = {
        "output": "run",
        "model": {"path": "nothing"},
        "data": {"path": "rows.jsonl"},
        "rewards": [{"function": "math"}],
        "devices": devices | ({"training": training} if layout == "separate" else {}),
        "engine": {"kind": kind} | ({"tensor_parallel": size} if kind == "vllm" else {}),
        "trainer": {"kind": "fsdp", "shard": shard} if shard > 1 else {"kind": "local"},
    }
    return parse(tree, source="test")


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Workers, and larger engines that are formed: none of them on the devices of another."""
    layout = draw(st.sampled_from(["colocated", "separate"]))
    kind = draw(st.sampled_from(["mini", "vllm"]))
    shard, size = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2]))
    size = size if kind == "vllm" else 1
    assume(layout == "separate" or shard % size == 0)
    training = shard * draw(st.integers(1, 2))
    devices = 8 + (training if layout == "separate" else 0)
    sizes = [size * 2**n for n in range(draw(st.integers(1, 3)))] if kind == "vllm" else [1]
    run = config(layout, kind, training, shard, size)
    node = Node(number=0, places=(("cpu", ()),) * devices, folder=Path("/meeting"))
    slots = lay_out(run, [node], sizes)
    gangs = Topology(slots)
    formed: list[tuple[int, EngineId]] = []
    for key in draw(st.permutations([*gangs.engines])):
        taken = {one for other in formed for one in gangs.covered(*other)}
        if key[0] > gangs.size and not taken & {*gangs.covered(*key)} and draw(st.booleans()):
            formed.append(key)
    return slots, formed


def deaths(case: Case) -> Iterator[tuple[Topology, int, set[int], set[EngineId], set[int]]]:
    slots, formed = case
    for worker in range(len(slots)):
        gangs = Topology(slots)
        workers, engines, replicas = gangs.without(worker, formed)
        yield gangs, worker, workers, {*engines}, {*map(int, replicas)}


@given(cases())
def test_engines_and_replicas_die_as_one(case: Case) -> None:
    for gangs, worker, workers, engines, replicas in deaths(case):
        assert worker in workers
        for part in (*gangs.engines.values(), *gangs.replicas.values()):
            assert not workers & {*part} or {*part} <= workers
        assert {r for r, part in gangs.replicas.items() if workers & {*part}} == replicas
        live = {*range(len(case[0]))} - workers
        # Nobody is lost unsaid, and whoever is said to be lost decodes no more.
        small = {e for size, e in gangs.engines if size == gangs.size}
        assert {*gangs.decoding(live)} == small - engines


@given(cases())
def test_a_formed_engine_is_lost_whole_and_another_goes_on(case: Case) -> None:
    for gangs, worker, workers, engines, _ in deaths(case):
        for key in case[1]:
            covered = {*gangs.covered(*key)}
            if engines & covered:
                assert covered <= engines
            else:
                assert not workers & {*gangs.engines[key]}
        mine = case[0][worker].engine
        if mine is None:
            continue
        # Each of the lost is on devices of the dead worker's engine, or of one formed over these.
        near = {*gangs.covered(mine.span.size, mine.engine)}
        over = [{*gangs.covered(*key)} for key in case[1] if near & {*gangs.covered(*key)}]
        if not any(slot.engine and slot.replica for slot in case[0]):
            assert engines == near.union(*over)


@given(cases())
def test_an_engine_takes_no_replica_of_other_processes_along(case: Case) -> None:
    slots, _ = case
    for _, worker, _, engines, replicas in deaths(case):
        if slots[worker].replica is None:
            assert not replicas
        if slots[worker].engine is None:
            assert not engines
            assert len(replicas) == 1
