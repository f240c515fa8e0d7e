"""AdamW over float32 master weights, its learning rates, and the reference weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from rollpacker.config import TrainConfig
from rollpacker.train.mesh import part, parted

_LARGE = 7e9
_LARGE_RATE = 1e-6
_LORA = 10.0


def default_learning_rate(parameters: int, *, lora: bool) -> float:
    """AdamW's rate for a model with ``parameters``, to two digits.

    verl, TRL and DAPO (Yu et al., 2025) take 1e-6 from 7B on. Below that the rate grows with
    1/sqrt(parameters), and stays on the safe side of our trials: 2e-5 for 135M, where 3e-5
    collapses, and 3e-4 for 0.2M. All parameters of a mixture of experts count, as verl takes 1e-6
    for Qwen3-30B-A3B too. LoRA takes ten times as much (Schulman et al., 2025, "LoRA Without
    Regret").
    """
    rate = _LARGE_RATE * max(1.0, math.sqrt(_LARGE / parameters)) * (_LORA if lora else 1.0)
    return float(f"{rate:.1e}")


def check_schedule(config: TrainConfig, total_updates: int) -> None:
    """Raise ``ValueError`` when a decaying schedule lacks the number of updates."""
    if config.lr_scheduler_type != "constant" and total_updates <= 0:
        raise ValueError(
            f"train.lr_scheduler_type={config.lr_scheduler_type} needs the number of updates: "
            "set steps, or use constant"
        )


def learning_rate(config: TrainConfig, update: int, total: int) -> float:
    """Rate of update number ``update`` (from 0) of ``total``.

    Linear warm-up reaches the peak at update ``warmup_steps``, from 0 with ``warmup_from_zero``.
    Then the rate is constant, or decays to 0 after the last update. Without a configured peak it is
    that of large models. A job sets its own.
    """
    peak, warmup = config.learning_rate or _LARGE_RATE, config.warmup_steps
    if update < warmup:
        first = 0 if config.warmup_from_zero else 1
        return peak * (update + first) / (warmup + first)
    if config.lr_scheduler_type == "constant":
        return peak
    progress = min(1.0, (update - warmup) / max(1, total - warmup))
    if config.lr_scheduler_type == "linear":
        return peak * (1.0 - progress)
    return peak * 0.5 * (1.0 + math.cos(math.pi * progress))


class Reference:
    """The reference policy of the KL term, as a copy of the first weights on the host. While
    active, the copy replaces the weights in their storage, as others such as FSDP read it."""

    def __init__(self, weights: Sequence[torch.Tensor]) -> None:
        self._weights = list(weights)
        self._copies = [w.detach().to("cpu", copy=True) for w in self._weights]

    @contextmanager
    def active(self) -> Iterator[None]:
        own = [w.detach().clone() for w in self._weights]
        try:
            _copy(self._weights, self._copies)
            yield
        finally:
            _copy(self._weights, own)


@torch.no_grad()
def _copy(into: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    for weight, value in zip(into, values, strict=True):
        weight.copy_(value)


class Optimizer:
    """Owns the gradient sum and AdamW's state.

    Gradients of float32 parameters are views of the flat sum. Those of other types are added to it
    as they are made, and freed, and their parameters get float32 masters. Weights change in place,
    so all who share their storage see the update. If parameters are spread over processes
    (float32), this covers this process's part.
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
        matrices = [m for m in self._masters.values() if m.ndim >= 2]
        vectors = [m for m in self._masters.values() if m.ndim < 2]
        groups = [(matrices, decay), (vectors, 0.0)]
        return [{"params": params, "weight_decay": rate} for params, rate in groups if params]

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for group in self._adamw.param_groups:
            group["lr"] = rate
        self._adamw.step()
        self.copy_masters()

    @torch.no_grad()
    def copy_masters(self) -> None:
        for name in self._low:
            self._parameters[name].copy_(self._masters[name])

    def state(self) -> dict[str, dict[str, torch.Tensor]]:
        """The live tensors that continue the run exactly: masters, moments and step counts, by
        name. Writing into them restores a state (then call ``copy_masters``)."""
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
        yield self.sums
        for kind in self.state().values():
            yield from map(part, kind.values())


def _adder(view: torch.Tensor) -> Callable[[torch.Tensor], None]:
    def add(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        view.add_(parameter.grad)
        parameter.grad = None

    return add
