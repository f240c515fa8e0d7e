"""What is measured of every family: micro-batches, replicas over processes, adapters, exports."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import families
import numpy as np
import torch
from gang import apart, gradient, held, make_trainer, place, run
from safetensors import safe_open
from tiny_models import naive_logprobs

from rollpacker.core.types import AttemptId, Group, PromptId, Sample
from rollpacker.train.model import packing
from rollpacker.train.model.forward import PackedForward
from rollpacker.train.model.layouts import fit_of
from rollpacker.train.model.packing import numbered

CPU = torch.device("cpu")
TEMPERATURE = 0.7
CLOSE = 1e-5
"""Nats, and relative to the largest gradient."""


def groups() -> list[Group]:
    """Three groups; sequences are longer than the windows, one response has a single token, and all
    of the last group."""
    rng = np.random.default_rng(0)
    found = []
    for number, (before, lengths) in enumerate([(5, (17, 1, 9)), (13, (4, 22)), (12, (1, 1))]):
        prompt = rng.integers(2, families.VOCABULARY, before).astype(np.int32)
        samples = [
            Sample(
                prompt=PromptId(str(number)),
                index=index,
                attempt=AttemptId(10 * number + index),
                prompt_tokens=prompt,
                tokens=rng.integers(2, families.VOCABULARY, length).astype(np.int32),
                logprobs=np.zeros(length, np.float32),
                finish_reason="stop",
                weights_version=0,
                reward=float(index),
            )
            for index, length in enumerate(lengths)
        ]
        advantages = np.linspace(-1.0, 1.0, len(samples), dtype=np.float32) + np.float32(0.1)
        found.append(Group(prompt=samples[0].prompt, samples=tuple(samples), advantages=advantages))
    return found


def items() -> list[packing.Item]:
    """Their responses."""
    return numbered(
        (s, float(a)) for g in groups() for s, a in zip(g.samples, g.advantages, strict=True)
    )


def batches(shared: bool) -> list[packing.MicroBatch]:
    """Two micro-batches of them, in their order: of the second every response has one token."""
    found = items()
    return [packing.build(part, shared, CPU) for part in (found[:-2], found[-2:])]


def alone(model: Any) -> torch.Tensor:
    """Log-probabilities of all responses, each by the model's own forward pass."""
    samples = [item.sample for item in items()]
    return torch.cat(
        [naive_logprobs(model, s.prompt_tokens, s.tokens, TEMPERATURE) for s in samples]
    )


def gradients(model: Any, value: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of a value by all parameters."""
    model.zero_grad(set_to_none=True)
    value.backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def off(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """Largest difference over the largest value."""
    most = max(float(g.abs().max()) for g in wanted.values())
    zero = torch.zeros(())
    names = found.keys() | wanted.keys()
    apart = [(found.get(n, zero) - wanted.get(n, zero)).abs().max() for n in names]
    return float(max(apart)) / most


def forward(name: str) -> dict[str, Any]:
    """Layout, and the worst of log-probabilities (nats) and gradients, by way of packing."""
    model = families.make(name)
    fit = fit_of(model)
    expected = alone(model)
    weights = torch.linspace(-1.0, 1.0, len(expected))
    wanted = gradients(model, expected @ weights)
    found: dict[str, Any] = {"layout": fit.layout}
    for shared in (False, True)[: 1 + fit.shares_prompts]:
        for recompute in (False, True):
            packed = PackedForward(model, fit.layout, recompute=recompute)
            parts = [packed.logprobs(batch, TEMPERATURE)[0] for batch in batches(shared)]
            logprobs = torch.cat(parts)
            gradient = off(gradients(model, logprobs @ weights), wanted)
            packed.release()
            way = ("shared" if shared else "padded") + (", recomputed" if recompute else "")
            found[way] = [float((logprobs - expected).detach().abs().max()), gradient]
    assert torch.equal(alone(model), expected), "the model is not as it was"
    return found


SETTINGS: dict[str, dict[str, Any]] = {
    "fsdp": {"beta": 0.1, "gradient_checkpointing": True},
    "fsdp, lora": {"rank": 3},
}


def replicas(rank: int, folder: Path, names: list[str]) -> None:
    """Two processes that share each family's weights, against one: the gradient, and the weights
    after two updates."""
    here, results = place(2), {}
    for name in names:
        for kind, settings in SETTINGS.items():
            model = families.make(name)
            try:
                local, spread = (make_trainer(model, at, **settings) for at in (None, here))
                found = []
                for _ in range(2):
                    expected, total = (t.accumulate(groups()) for t in (local, spread))
                    if not found:
                        sums, wanted = gradient(spread), gradient(local)
                        found.append(float((sums - wanted).norm() / wanted.norm()))
                    local.apply(expected)
                    spread.apply(total)
                found.append(apart(held(spread), held(local)))
                results[f"{name}/{kind}"] = max(found)
            except Exception as error:
                results[f"{name}/{kind}"] = f"{type(error).__name__}: {str(error)[:200]}"
    if rank == 0:
        (folder / "replicas.json").write_text(json.dumps(results))


def over_processes(names: list[str], folder: Path) -> dict[str, float | str]:
    """``replicas`` by family and kind."""
    run(replicas, 2, folder, names)
    return json.loads((folder / "replicas.json").read_text())


@torch.no_grad()
def adapters(name: str) -> float:
    """Merged adapters against the adapted model: the worst log-probability, nats."""
    trainer = make_trainer(families.make(name), rank=3)
    for step in range(2):
        with torch.enable_grad():
            partial = trainer.accumulate(groups())
        trainer.apply(partial)
        del step
    adapted = alone(trainer._model)
    with tempfile.TemporaryDirectory() as folder:
        trainer.save(Path(folder))
        return float((alone(_loaded(folder)) - adapted).abs().max())


@torch.no_grad()
def export(name: str) -> float:
    """A checkpoint has the names of ``save_pretrained``; loaded again it is the model, nats."""
    model = families.make(name)
    trainer = make_trainer(model)
    with tempfile.TemporaryDirectory() as folder:
        trainer.save(Path(folder) / "ours")
        model.save_pretrained(Path(folder) / "its")
        ours, its = (
            safe_open(Path(folder) / each / "model.safetensors", "pt") for each in ("ours", "its")
        )
        assert set(ours.keys()) == set(its.keys()), set(ours.keys()) ^ set(its.keys())
        return float((alone(_loaded(Path(folder) / "ours")) - alone(model)).abs().max())


def _loaded(folder: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
