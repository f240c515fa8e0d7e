"""The store of layers, used as passes use it, whatever happens in between."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from rollpacker.reward.judge.streamed import BUFFERS, LayerStore, spread

CPU = torch.device("cpu")
LAYERS = 6


def make_layers(count: int = LAYERS) -> list[nn.Module]:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(count):
        layer = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 1, bias=False))
        layer[2].to(torch.bfloat16)
        layers.append(layer)
    return layers


def tensors(layer: nn.Module) -> dict[str, torch.Tensor]:
    return dict(layer.named_parameters()) | dict(layer.named_buffers())


STEPS = st.one_of(
    st.tuples(st.just("keep"), st.integers(0, LAYERS)),
    st.tuples(st.just("pass"), st.integers(1, LAYERS)),
    st.tuples(st.just("fail"), st.integers(0, LAYERS - 1)),
)


@given(st.lists(STEPS, max_size=12))
def test_a_layer_in_use_is_always_the_right_one(steps):
    layers = make_layers()
    originals = [
        {name: tensor.clone() for name, tensor in tensors(layer).items()}
        for layer in copy.deepcopy(layers)
    ]
    store = LayerStore(layers, CPU)
    for step, number in steps:
        if step == "keep":
            store.keep(number)
            buffers = min(BUFFERS, LAYERS - number)
            assert store.held_bytes == (number + buffers) * store.layer_bytes
            continue
        store.begin()
        for layer in range(number):
            with store.weights(layer) as weights:
                assert weights.keys() == originals[layer].keys()
                for name, tensor in weights.items():
                    assert tensor.dtype == originals[layer][name].dtype
                    assert torch.equal(tensor, originals[layer][name])
        if step == "fail":
            with pytest.raises(KeyError), store.weights(number):
                raise KeyError


def test_layers_that_differ_are_refused():
    with pytest.raises(ValueError, match="layers differ"):
        LayerStore([nn.Linear(2, 3), nn.Linear(2, 4)], CPU)


def pass_seconds(layers: int, resident: int, copy_s: float, compute_s: float) -> float:
    """Of one pass among many, with two buffers, a copy at a time and a layer at a time."""
    kept = set(spread(layers)[:resident])
    streamed = [layer for layer in range(layers) if layer not in kept]
    copied, computed, copies_end, used = [], 0.0, 0.0, []
    passes = 6
    for _ in range(passes):
        for layer in range(layers):
            if layer in kept:
                computed += compute_s
                continue
            free = used[len(copied) - BUFFERS] if len(copied) >= BUFFERS else 0.0
            copies_end = max(copies_end, free) + copy_s
            copied.append(copies_end)
            computed = max(computed, copies_end) + compute_s
            used.append(computed)
    assert len(copied) == passes * len(streamed)
    return computed / passes


@pytest.mark.parametrize("resident", [0, 4, 8, 16, 24, 28])
@pytest.mark.parametrize("copy_s", [0.5, 1.0, 2.0, 4.0])
def test_a_pass_takes_its_compute_or_its_copies_as_the_policy_assumes(resident, copy_s):
    layers = 32
    bound = max(layers * 1.0, (layers - resident) * copy_s)
    assert pass_seconds(layers, resident, copy_s, 1.0) <= 1.15 * bound
