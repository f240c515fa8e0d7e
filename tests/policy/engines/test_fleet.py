"""Engines and replicas over devices, colocated and separate."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollpacker.core.types import Device, EngineId, ReplicaId
from rollpacker.policy.engines.fleet import Fleet, by_number, colocated, grid, separate


def test_a_device_is_its_node_and_its_index():
    assert grid(3, 2) == (Device(0, 0), Device(0, 1), Device(1, 0))


def test_colocated_replicas_wait_for_the_engines_on_their_devices():
    fleet = colocated(grid(8, 4), tensor_parallel=2, replica=4)
    assert list(fleet.engines) == [0, 1, 2, 3]
    assert list(fleet.replicas) == [0, 2]
    assert fleet.beside == {0: (0, 1), 2: (2, 3)}
    assert fleet.trainable(fleet.engines[EngineId(0)]) == (2,)
    assert fleet.trainable([]) == (0, 2)
    assert fleet.trainable([Device(0, 3), Device(1, 3)]) == ()


def test_separate_replicas_wait_for_nobody():
    devices = grid(8, 4)
    fleet = separate(devices[:4], devices[4:], tensor_parallel=2, replica=1)
    assert len(fleet.replicas) == 4
    assert fleet.beside == dict.fromkeys(fleet.replicas, ())
    assert fleet.trainable(devices[:4]) == tuple(fleet.replicas)


def test_replicas_by_their_numbers_lie_up_to_the_next_one():
    fleet = by_number("colocated", (0, 1, 2, 4, 5), (0, 4))
    assert fleet.beside == {0: (0, 1, 2), 4: (4, 5)}
    assert by_number("separate", (0, 1), (0, 1)).on == {0: (), 1: ()}


def test_replicas_of_so_many_engines_do_not_take_those_of_a_lost_one():
    fleet = by_number("colocated", (0, 1, 2, 3, 4, 5), (0, 4), 2)
    assert fleet.beside == {0: (0, 1), 4: (4, 5)}
    assert fleet.on == {0: (0,), 1: (0,), 2: (), 3: (), 4: (4,), 5: (4,)}


def test_a_replica_outlives_its_engines():
    fleet = by_number("colocated", (1, 4, 5), (0, 2, 4), 2)
    assert fleet.beside == {0: (1,), 2: (), 4: (4, 5)}
    assert len(fleet.devices) == 4
    assert by_number("colocated", (), (0,), 2).replicas == {0: (Device(0, 0),)}


@given(
    st.sets(st.integers(0, 11), min_size=1), st.sets(st.integers(0, 5)), st.sampled_from([1, 2, 3])
)
def test_a_colocated_engine_lies_on_its_own_replica_if_that_lives(engines, replicas, size):
    live = tuple(sorted(EngineId(engine) for engine in engines))
    replicas = {ReplicaId(size * replica) for replica in replicas}
    fleet = by_number("colocated", live, tuple(sorted(replicas)), size)
    for engine in live:
        own = ReplicaId(engine // size * size)
        assert fleet.on[engine] == ((own,) if own in replicas else ())


@given(st.integers(1, 3), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]), st.data())
def test_a_lost_engine_takes_its_replica_and_leaves_the_other_engines(nodes, size, engines, data):
    fleet = colocated(grid(8 * nodes, 8), tensor_parallel=size, replica=size * engines)
    lost = data.draw(st.sampled_from(sorted(fleet.engines)))
    left = fleet.without(lost)
    if left is None:
        assert list(fleet.engines) == [lost]
        return
    assert left.engines.keys() == fleet.engines.keys() - {lost}
    assert left.replicas.keys() == fleet.replicas.keys() - set(fleet.on[lost])
    assert left.without(EngineId(99)) == left


def test_engines_that_are_separate_go_alone():
    devices = grid(4, 4)
    fleet = separate(devices[:2], devices[2:], tensor_parallel=1, replica=2)
    left = fleet.without(EngineId(1))
    assert left == Fleet(layout="separate", engines={0: devices[:1]}, replicas=fleet.replicas)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: colocated(grid(6, 3), tensor_parallel=2, replica=2), "one node"),
        (lambda: colocated(grid(4, 4), tensor_parallel=3, replica=3), "4 devices do not divide"),
        (lambda: colocated(grid(4, 4), tensor_parallel=4, replica=2), "holds no whole engines"),
        (
            lambda: separate(grid(2, 2), grid(2, 2), tensor_parallel=1, replica=1),
            "devices are separate",
        ),
        (
            lambda: Fleet(layout="separate", engines={0: grid(1, 1), 1: grid(1, 1)}, replicas={}),
            "share a device",
        ),
    ],
)
def test_a_fleet_that_cannot_be_is_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()
