"""AdamW over float32 master weights, its learning rates, and the weights that a run began with."""

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
    """AdamW's rate for a model of so many parameters, to two digits.

    1e-6 from 7B on is what verl, TRL and DAPO (Yu et al., 2025) take there. Below it grows with
    1/sqrt(parameters): on the safe side of what was tried here (2e-5 for 135M, where 3e-5
    collapses; 3e-4 for 0.2M). Of a mixture of experts all parameters count, not the active ones:
    verl takes 1e-6 for Qwen3-30B-A3B too, as for dense models of its size. Ten times as
    much for LoRA (Schulman et al., 2025, "LoRA Without Regret").
    """
    rate = _LARGE_RATE * max(1.0, math.sqrt(_LARGE / parameters)) * (_LORA if lora else 1.0)
    return float(f"{rate:.1e}")


def check_schedule(config: TrainConfig, total_updates: int) -> None:
    """Raise ``ValueError`` when a decaying schedule lacks the number of updates."""
    if config.lr_scheduler_type != "constant" and total_updates <= 0:
        raise ValueError(
            f"train.lr_scheduler_type={config.lr_scheduler_type} needs the number of updates; "
            "set steps, or use constant"
        )


def learning_rate(config: TrainConfig, update: int, total: int) -> float:
    """Rate of update number ``update`` (from 0) of ``total``.

    Linear warm-up reaches the peak at update ``warmup_steps``, from 0 with ``warmup_from_zero``;
    then constant, or linear or cosine decay to 0 after the last update. A job chooses a peak where
    none is given; a trainer without a job takes that of large models.
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
    """The reference policy of the KL term: keeps a copy of the first weights on the host, and
    copies it over their storage and back while it is asked, since others read them there, as FSDP
    does."""

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
    """Owns the gradient sum and what AdamW keeps.

    Gradients of float32 parameters are views of the flat sum, so the backward pass adds to it.
    Those of other types are added to it as they are made, and freed; such parameters get float32
    masters. Weights are changed in place: whoever shares their storage sees the update, and it must
    not be replaced. Of parameters that are spread over processes (float32 ones) all this is about
    the part that this process holds.
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
        yield self.sums
        for kind in self.state().values():
            yield from map(part, kind.values())


def _adder(view: torch.Tensor) -> Callable[[torch.Tensor], None]:
    def add(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        view.add_(parameter.grad)
        parameter.grad = None

    return add
