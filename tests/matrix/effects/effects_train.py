"""What ``train`` does: the update of the first step by its formula, and when updates are made."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from losses import Mean, Rule, expected_loss
from matrix_runs import Ran
from matrix_table import RUNS, described, effect
from matrix_tree import key_of

LR, DECAY, CLIP, BETA1, BETA2 = 8e-3, 0.5, 0.05, 0.8, 0.9

described(
    "tuned",
    {
        "seed": 11,
        "steps": 4,
        "rollout.temperature": 0.05,
        "train.learning_rate": LR,
        "train.lr_scheduler_type": "linear",
        "train.warmup_steps": 1,
        "train.weight_decay": DECAY,
        "train.adam_beta1": BETA1,
        "train.adam_beta2": BETA2,
        "train.max_grad_norm": CLIP,
        "train.beta": 0.3,
        "checkpoint.every": 1,
        "checkpoint.keep": 4,
        "checkpoint.best": "eval/sampled_accuracy",
        "eval.data.path": "{here}/held_out.jsonl",
        "eval.every": 2,
        "eval.temperature": 0.0,
        "eval.num_generations": 2,
        "eval.threshold": 0.5,
    },
)


def norm(tensors: dict[str, torch.Tensor]) -> float:
    return float(torch.stack([tensor.square().sum() for tensor in tensors.values()]).sum().sqrt())


@effect("train.adam_beta2", run="tuned")
def _(ran: Ran) -> None:
    squares = ran.optimizer(1, "exp_avg_sq")
    for name, mean in ran.optimizer(1, "exp_avg").items():
        square = (mean / (1 - BETA1)) ** 2 * (1 - BETA2)
        assert torch.allclose(squares[name], square, rtol=1e-3, atol=1e-12)


@effect("train.learning_rate", "train.weight_decay", run="tuned")
def _(ran: Ran) -> None:
    """AdamW's first update is by the sign of the gradient, and shrinks matrices."""
    gradients, before, after = ran.optimizer(1, "exp_avg"), ran.first_weights, ran.tensors(1)
    name = "model.layers.0.mlp.up_proj.weight"
    clear = gradients[name].abs() > 1e-5
    assert clear.any()
    rate = LR / 2  # half of the warm-up
    moved = before[name] * (1 - rate * DECAY) - rate * gradients[name].sign()
    assert torch.allclose(after[name][clear], moved[clear], atol=1e-5)


def algorithm(
    kind: str, rule: Rule, mean: Mean, option: str = "", value: Any = None, **formula: Any
) -> None:
    """A run of an algorithm, or of one of its options, whose losses are known."""
    keys = {"train.algorithm.kind": kind} | ({f"train.algorithm.{option}": value} if option else {})
    leaf = f"train.algorithm[{kind}].{option}" if option else f"train.algorithm.kind={kind}"
    name = "-".join(str(part) for part in (kind, option, value) if part)
    described(name, {**keys, "steps": 2}, slow=True)

    @effect(f"{leaf}={value}" if isinstance(value, str) else leaf, run=name)
    def _(ran: Ran) -> None:
        for row in ran.metrics:
            wanted = expected_loss(ran, row["step"], rule, mean, **formula)
            assert row["loss"] == pytest.approx(wanted, abs=2e-5)


algorithm("dr_grpo", "none", "constant")
algorithm("rloo", "leave_one_out", "responses")
algorithm("reinforce_pp", "tokens", "tokens")
algorithm("gspo", "group", "responses")
algorithm("grpo", "group", "responses", "loss_type", "sequence_mean")
algorithm("reinforce_pp", "batch", "tokens", "whiten", "batch", epsilon=1e-4)
algorithm("reinforce_pp", "responses", "tokens", "whiten", "responses")
for name in ("grpo", "dapo"):
    algorithm(name, "none", "tokens", "scale_rewards", "none")
    algorithm(name, "batch", "tokens", "scale_rewards", "batch")
    algorithm(name, "group", "tokens", "std_epsilon", 0.5, epsilon=0.5)

SHAPED = {"train.algorithm.overlong_buffer": 30, "train.algorithm.overlong_penalty": 5.0}


@effect(
    "train.algorithm[dapo].overlong_buffer",
    "train.algorithm[dapo].overlong_penalty",
    "train.algorithm.kind=dapo",
    run="shaped",
    instead=dict.fromkeys(SHAPED),
)
def _(ran: Ran) -> None:
    """The reward is shaped before advantages are taken."""
    for row in ran.metrics:
        shaped = expected_loss(ran, row["step"], buffer=30, penalty=5.0)
        assert row["loss"] == pytest.approx(shaped, abs=2e-5)
    assert any(row["loss"] != pytest.approx(expected_loss(ran, row["step"]), abs=1e-3)
               for row in ran.metrics)  # fmt: skip


def unclipped(kind: str, *ranges: str) -> None:
    """A run with large steps in which nothing is clipped, since the ranges are wide."""
    wide = {f"train.algorithm.{name}": 1e6 for name in ranges}
    name = f"{kind}-unclipped"
    keys = {"train.algorithm.kind": kind, "train.updates_per_step": 3, "train.learning_rate": 0.1}
    described(name, keys | wide, slow=True)

    @effect(*(f"train.algorithm[{kind}].{each}" for each in ranges), run=name)
    def _(ran: Ran) -> None:
        assert all(row["clip_ratio/region_mean"] == 0.0 for row in ran.metrics)
        assert any(abs(row.get("trained_tokens/ratio", 1.0) - 1.0) > 1e-2 for row in ran.metrics)


for kind in ("grpo", "dr_grpo", "rloo", "reinforce_pp"):
    unclipped(kind, "epsilon")
for kind in ("dapo", "gspo"):
    unclipped(kind, "epsilon", "epsilon_high")


def other_gradient(leaf: str, usual: str, value: Any, step: int = 0) -> None:
    """The run ``usual`` with one key more: the same samples, and gradients of another size."""
    name = f"{usual}-{leaf.rpartition('.')[2].replace('=', '-')}"
    described(name, {**RUNS[usual].keys, key_of(leaf): value}, slow=True)

    @effect(leaf, run=name, against=usual)
    def _(ran: Ran) -> None:
        other = ran.other(usual)
        assert ran.trained(step) == other.trained(step)
        norms = [each.metrics[step]["grad_norm"] for each in (ran, other)]
        assert norms[0] != pytest.approx(norms[1], rel=1e-3)


for kind in ("grpo", "dr_grpo", "reinforce_pp", "dapo"):
    other_gradient(f"train.algorithm[{kind}].delta", f"{kind}-unclipped", 1.0001)
for word in ("none", "batch"):
    other_gradient(f"train.algorithm[gspo].scale_rewards={word}", "gspo", word)
other_gradient("train.algorithm[gspo].std_epsilon", "gspo", 0.5)
other_gradient("train.kl_bias_correction", "held-back", False, step=1)

for word in ("truncate", "mask"):
    other_gradient(f"train.sampler_correction.kind={word}", "unlike", word)
for word in ("sequence", "geometric"):
    other_gradient(f"train.sampler_correction.level={word}", "unlike-kind-truncate", word)
other_gradient("train.sampler_correction.high", "unlike-kind-truncate", 1.0)
other_gradient("train.sampler_correction.low", "unlike-kind-mask", 0.0)


def sums_otherwise(ran: Ran, usual: Ran) -> bool:
    """The same gradient, summed in another order."""
    one, two = (
        torch.cat([mean.flatten() for mean in each.optimizer(1, "exp_avg").values()])
        for each in (ran, usual)
    )
    return torch.allclose(one, two, rtol=1e-3, atol=1e-6) and not torch.equal(one, two)


def growth(ran: Ran) -> int:
    """Kilobytes by which the worker's largest memory grew in the first update."""
    most = [int(call["workers"][0]["VmHWM"].split()[0]) for call in ran.calls]
    return most[-1] - most[0]
