"""Tensors that went to host memory and back are the same, and train as if they had stayed."""

from collections.abc import Callable

import torch

from rollpacker.train.state.warm_state import WarmState


def training_tensors(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> Callable[[], list[torch.Tensor]]:
    """Those of a model and its optimizer between two steps; gradients are dropped."""

    def tensors() -> list[torch.Tensor]:
        optimizer.zero_grad(set_to_none=True)
        state = [value for each in optimizer.state.values() for value in each.values()]
        return [*model.parameters(), *state]

    return tensors


def trained(offloads: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state = WarmState(training_tensors(model, optimizer), "cpu")
    for step in range(5):
        state.load()
        optimizer.zero_grad()
        inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        model(inputs).square().mean().backward()
        optimizer.step()
        if offloads:
            state.offload()
            assert all(p.untyped_storage().nbytes() == 0 for p in model.parameters())
    state.load()
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_training_is_bit_identical_across_phases() -> None:
    for stayed, moved in zip(trained(False), trained(True), strict=True):
        assert torch.equal(stayed, moved)


def test_its_size_grows_with_the_optimizer() -> None:
    model = torch.nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    state = WarmState(training_tensors(model, optimizer), "cpu")
    state.offload()
    state.offload()
    assert state.bytes == 4 * 4 * 4
    state.load()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    state.offload()
    assert state.bytes == 3 * 4 * 4 * 4 + 4
    state.load()


def test_views_and_tied_weights_follow() -> None:
    flat = torch.arange(12.0)
    first, second = torch.nn.Linear(4, 3, bias=False), torch.nn.Linear(4, 3, bias=False)
    first.weight.data = flat.view(3, 4)
    second.weight = first.weight
    state = WarmState(lambda: [first.weight, second.weight, flat[2:]], "cpu")
    state.offload()
    assert state.bytes == 48
    assert flat.untyped_storage().nbytes() == 0
    state.load()
    assert torch.equal(first.weight.detach().view(-1), torch.arange(12.0))
    flat[5] = 7.0
    assert second.weight[1, 1] == 7.0


def test_what_numpy_has_seen_stays() -> None:
    seen, free = torch.ones(3), torch.ones(5)
    array = seen.numpy()
    state = WarmState(lambda: [seen, free], "cpu")
    state.offload()
    assert state.bytes == 20
    assert array.sum() == 3.0
    state.load()
    assert torch.equal(free, torch.ones(5))
