"""Rollout routing replay (R3, arXiv 2510.11370): tokens go to the experts that the engine chose.

Sampler and trainer round differently, so that a router between two experts may choose the other
one: another function. Replayed are the choices alone. Weights are the live router's, which
therefore has its gradient.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle
from transformers.modeling_layers import GradientCheckpointingLayer

Choose = Callable[[torch.Tensor], torch.Tensor | None]
"""From a router's own choice, shape (N, k), to what is to be instead; None: its own."""

_TOPK: tuple[Any, ...] = (torch.topk, torch.Tensor.topk)


class _Chosen(TorchFunctionMode):
    """Inside, the largest ``k`` of as many scores as there are experts are those of ``choose``."""

    def __init__(self, experts: int, choose: Choose) -> None:
        super().__init__()
        self._experts = experts
        self._choose = choose

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in _TOPK:
            return found
        scores = args[0] if args else (kwargs or {})["input"]
        # Others choose among groups of experts.
        if scores.ndim != 2 or scores.shape[1] != self._experts:
            return found
        chosen = self._choose(found.indices)
        if chosen is None:
            return found
        return torch.return_types.topk((scores.gather(1, chosen), chosen))  # pyright: ignore[reportAttributeAccessIssue]


class _Mixture:
    """One mixture of experts of a model, whose choice may be made elsewhere."""

    def __init__(self, block: Any, place: int, layer: int) -> None:
        self.block, self.place, self.layer = block, place, layer
        fused = [len(p) for p in block.experts.parameters(recurse=False) if p.ndim == 3]
        self._experts = fused[0] if fused else len(block.experts)
        self._router: Any = None

    def look(self) -> list[RemovableHandle]:
        """Find out which of its modules chooses, while the model runs; the handles end that.

        Not a layer that is recomputed: its hooks stay outside of that.
        """

        def chooser(module: Any) -> Callable[[], Choose]:
            def seen(_: torch.Tensor) -> None:
                self._router = module  # the innermost module is asked last

            return lambda: seen

        return [
            handle
            for module in self.block.modules()
            if not isinstance(module, GradientCheckpointingLayer)
            for handle in _within(module, self._experts, chooser(module))
        ]

    def ask(self, chooser: Callable[[_Mixture], Choose | None]) -> list[RemovableHandle]:
        """Ask ``chooser`` whenever it begins. The handles take that back.

        Raises ``ValueError`` where ``look`` has seen nothing that chooses.
        """
        if self._router is None:
            raise ValueError(
                f"train.router_replay: {type(self.block).__name__} does not choose its experts by "
                "torch.topk, so nothing can be put in the place of its choice: set it to false"
            )
        return _within(self._router, self._experts, lambda: chooser(self))


def _within(
    module: torch.nn.Module, experts: int, choose_of: Callable[[], Choose | None]
) -> list[RemovableHandle]:
    """Have a module run inside ``_Chosen``. The handles take that back."""
    inside: list[_Chosen | None] = []

    def begin(*_: Any) -> None:
        choose = choose_of()
        mode = None if choose is None else _Chosen(experts, choose)
        inside.append(mode)
        if mode is not None:
            mode.__enter__()

    def end(*_: Any) -> None:
        mode = inside.pop()
        if mode is not None:
            mode.__exit__(None, None, None)

    before = module.register_forward_pre_hook(begin)
    return [before, module.register_forward_hook(end, always_call=True)]


@torch.no_grad()
def mixtures_of(model: Any) -> list[_Mixture]:
    """The mixtures of experts of a model, in the order of its layers; it is run once.

    Raises ``ValueError`` where there is none.
    """
    blocks = {name: m for name, m in model.named_modules() if hasattr(m, "experts")}
    if not blocks:
        raise ValueError(
            "train.router_replay: no mixture of experts was found in this model: set it to false"
        )
    numbers = [re.search(r"\.(\d+)(?:\.|$)", name) for name in blocks]
    mixtures = [
        _Mixture(block, place, place if number is None else int(number[1]))
        for place, (block, number) in enumerate(zip(blocks.values(), numbers, strict=True))
    ]
    looking = [handle for mixture in mixtures for handle in mixture.look()]
    try:
        model(input_ids=torch.ones((1, 2), dtype=torch.int64, device=model.device))
    finally:
        for handle in looking:
            handle.remove()
    return mixtures


def replay(
    model: torch.nn.Module, routes_of: Callable[[], torch.Tensor | None]
) -> list[RemovableHandle]:
    """Take the choices of ``routes_of`` in ``model``, shape (N, layers, k), int64; -1: the
    router's own. ``layers`` are its mixtures, or all that it has. The handles take that back.

    Raises ``ValueError`` where it has none, or one that does not choose by ``torch.topk``.
    """
    mixtures = mixtures_of(model)

    def chooser(mixture: _Mixture) -> Choose | None:
        routes = routes_of()
        if routes is None:
            return None
        every = routes.shape[1] != len(mixtures)
        given = routes[:, mixture.layer if every else mixture.place]
        return lambda own: torch.where(given < 0, own, given)

    return [handle for mixture in mixtures for handle in mixture.ask(chooser)]
