"""Engines and replicas over devices, colocated and separate."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollpacker.core.types import Device, EngineId, ReplicaId
from rollpacker.policy.fleet import Fleet, colocated, grid, separate


def test_a_device_is_its_node_and_its_index():
    assert grid(2, 2) == (Device(0, 0), Device(0, 1), Device(1, 0), Device(1, 1))


def test_colocated_replicas_wait_for_the_engines_on_their_devices():
    fleet = colocated(grid(2, 4), tensor_parallel=2, replica=4)
    assert list(fleet.engines) == [0, 1, 2, 3]
    assert list(fleet.replicas) == [0, 2]
    assert fleet.beside(ReplicaId(2)) == (2, 3)
    assert fleet.trainable([EngineId(0)]) == (2,)
    assert fleet.trainable([]) == (0, 2)
    assert fleet.trainable([EngineId(1), EngineId(3)]) == ()


def test_separate_replicas_wait_for_nobody():
    devices = grid(2, 4)
    fleet = separate(devices[:4], devices[4:], tensor_parallel=2, replica=1)
    assert len(fleet.replicas) == 4
    assert fleet.trainable(list(fleet.engines)) == tuple(fleet.replicas)


@given(st.integers(1, 3), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]), st.data())
def test_a_lost_device_takes_its_engine_and_its_replica(nodes, per_engine, engines, data):
    devices = grid(nodes, 8)
    fleet = colocated(devices, tensor_parallel=per_engine, replica=per_engine * engines)
    lost = data.draw(st.sampled_from(devices))
    left = fleet.without(lost)
    gone = {r for r, covered in fleet.replicas.items() if lost in covered}
    assert len(gone) == 1
    assert left.replicas.keys() == fleet.replicas.keys() - gone
    assert left.engines.keys() == fleet.engines.keys() - set(fleet.beside(gone.pop()))


def test_devices_that_are_separate_go_alone():
    devices = grid(1, 4)
    fleet = separate(devices[:2], devices[2:], tensor_parallel=1, replica=2)
    assert list(fleet.without(Device(0, 1)).engines) == [0]
    assert len(fleet.without(Device(0, 1)).replicas) == 1
    assert not fleet.without(Device(0, 3)).replicas


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: colocated(grid(2, 3), tensor_parallel=2, replica=2), "one node"),
        (lambda: colocated(grid(1, 4), tensor_parallel=3, replica=3), "4 devices do not divide"),
        (lambda: colocated(grid(1, 4), tensor_parallel=4, replica=2), "holds no whole engines"),
        (
            lambda: separate(grid(1, 2), grid(1, 2), tensor_parallel=1, replica=1),
            "devices are separate",
        ),
        (
            lambda: Fleet(layout="separate", engines={0: grid(1, 1), 1: grid(1, 1)}, replicas={}),
            "share a device",
        ),
        (
            lambda: Fleet(layout="colocated", engines={0: grid(1, 1)}, replicas={}),
            "cover the same devices",
        ),
    ],
)
def test_a_fleet_that_cannot_be_is_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()
