"""AdamW over float32 master weights, fed by one flat float32 sum of gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from rollpacker.config import TrainConfig
from rollpacker.train.mesh import part, parted


class Optimizer:
    """Owns the gradient sum and what AdamW keeps.

    Gradients of float32 parameters are views of the flat sum, so the backward pass adds to it.
    Those of other types are added to it as they are made, and freed; such parameters get
    float32 masters. Weights are changed in place: whoever shares their storage sees the update.
    Of parameters that are spread over processes (float32 ones) all this is about the part that
    this process holds.

    Args:
        parameters: trained parameters by name; their storage must not be replaced later.
        config: AdamW's settings.
    """

    def __init__(
        self, parameters: Sequence[tuple[str, torch.nn.Parameter]], config: TrainConfig
    ) -> None:
        self._parameters = dict(parameters)
        device = parameters[0][1].device
        parts = {name: part(p) for name, p in self._parameters.items()}
        sizes = [p.numel() for p in parts.values()]
        self.sums = torch.zeros(sum(sizes), dtype=torch.float32, device=device)
        self._masters: dict[str, torch.Tensor] = {}
        views = self.sums.split(sizes)
        for (name, parameter), flat in zip(self._parameters.items(), views, strict=True):
            view = flat.view(parts[name].shape)
            if parameter.dtype == torch.float32:
                self._masters[name] = parts[name]
                parameter.grad = parted(view, parameter)
            else:
                self._masters[name] = parameter.detach().float()
                parameter.register_post_accumulate_grad_hook(_adder(view))
            self._masters[name].grad = view
        self._low = [n for n, p in self._parameters.items() if p.dtype != torch.float32]
        self._adamw = torch.optim.AdamW(
            self._groups(config.weight_decay),
            lr=0.0,  # each step brings its own
            betas=(config.adam_beta1, config.adam_beta2),
            fused=True,
        )

    def _groups(self, decay: float) -> list[dict[str, object]]:
        """Matrices decay; biases and norms do not."""
        matrices = [m for m in self._masters.values() if m.ndim >= 2]
        vectors = [m for m in self._masters.values() if m.ndim < 2]
        groups = [(matrices, decay), (vectors, 0.0)]
        return [{"params": params, "weight_decay": rate} for params, rate in groups if params]

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """One update from the gradients in ``sums``."""
        for group in self._adamw.param_groups:
            group["lr"] = rate
        self._adamw.step()
        self.copy_masters()

    @torch.no_grad()
    def copy_masters(self) -> None:
        """Bring the weights up to their masters, such as after ``state`` was written into."""
        for name in self._low:
            self._parameters[name].copy_(self._masters[name])

    def state(self) -> dict[str, dict[str, torch.Tensor]]:
        """The tensors that continue the run exactly: masters, moments and step counts, by name.

        They are the live ones: writing into them restores a state (then call ``copy_masters``).
        """
        result: dict[str, dict[str, torch.Tensor]] = {"master": {}, "exp_avg": {}}
        result |= {"exp_avg_sq": {}, "step": {}}
        for name, master in self._masters.items():
            state = self._adamw.state[master]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=master.device)
                state["exp_avg"] = torch.zeros_like(master, requires_grad=False)
                state["exp_avg_sq"] = torch.zeros_like(master, requires_grad=False)
            spread = self._parameters[name]
            result["master"][name] = parted(master.detach(), spread)
            for key in ("exp_avg", "exp_avg_sq"):
                result[key][name] = parted(state[key], spread)
            result["step"][name] = state["step"]
        return result

    def tensors(self) -> Iterator[torch.Tensor]:
        """All that it keeps in this process."""
        yield self.sums
        for kind in self.state().values():
            yield from map(part, kind.values())


def _adder(view: torch.Tensor) -> Callable[[torch.Tensor], None]:
    def add(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        view.add_(parameter.grad)
        parameter.grad = None

    return add
