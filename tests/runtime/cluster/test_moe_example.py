"""``examples/moe/small.yaml``: families with experts, windows and states learn the demo's task."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from runtime_jobs import (
    checkpoints,
    kept_samples,
    kill_group,
    metrics,
    run,
    start_cli,
    weights_digest,
)

from importing import module_of
from rollpacker import config
from rollpacker.config import ModelConfig
from rollpacker.demo.model import EOS_ID
from rollpacker.demo.task import chain_of_thought, heldout_rows
from rollpacker.demo.warm_start import warm_start
from rollpacker.train.model.loading import load_model

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "examples" / "moe"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A family's model after a few supervised steps, by name."""
    folder, example = tmp_path_factory.mktemp("models"), module_of(FOLDER / "small.py")

    def made(family: str, steps: int = 10) -> Path:
        short = replace(example.recipe(family), steps=steps, problems=64, warmup_steps=2)
        return warm_start(folder, recipe=short)

    return made


def job(model: Path, output: Path, mode: str = "exact", **changes: Any) -> dict[str, Any]:
    """The example's, cut short, on one device, with a reward that an untrained model finds; every
    update moves the weights a lot."""
    tree = yaml.safe_load((FOLDER / "small.yaml").read_text(encoding="utf-8"))
    tree["rollout"] |= {"prompts_per_step": 4, "num_generations": 4, "max_completion_length": 64}
    tree["rollout"]["tail_batching"] = {"mode": mode}
    tree["train"] |= {"learning_rate": 3e-3, "warmup_steps": 0}
    tree["rewards"] = [{"function": f"{ROOT}/examples/scale/small.py:digits"}]
    tree["devices"] = {"kind": "cpu", "per_node": 1, "pin": False}
    return tree | {"model": {"path": str(model)}, "output": str(output), "eval": None} | changes


def test_a_family_that_it_does_not_know_is_said() -> None:
    with pytest.raises(ValueError, match="no family 'gpt': take one of qwen2, "):
        module_of(FOLDER / "small.py").recipe("gpt")


@pytest.mark.parametrize("family", module_of(FOLDER / "small.py").FAMILIES)
def test_its_models_are_as_small_as_the_demos(family: str, models: Any) -> None:
    model, tokenizer = load_model(ModelConfig(path=str(models(family, steps=2))), "cpu")
    assert model.config.model_type == family
    assert 200_000 < sum(weight.numel() for weight in model.parameters()) < 500_000
    text = heldout_rows(1)[0]["prompt"] + chain_of_thought(84, 36)
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.eos_token_id == EOS_ID


# One with experts and one with other layers here, the others in the soak.
@pytest.mark.cluster
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=() if name in ("qwen3_moe", "nemotron_h") else pytest.mark.slow)
        for name in module_of(FOLDER / "small.py").FAMILIES
    ],
)
def test_sampler_and_trainer_agree_after_updates(family: str, models: Any, tmp_path: Path) -> None:
    folder, _ = run(config.parse(job(models(family), tmp_path / "run", steps=3)))
    steps = metrics(folder)
    assert len(steps) == 3
    for step in steps:
        assert step["grad_norm"] > 0.0  # each update moves what is sampled with next
        assert step["sampler/abs_logprob_difference"] < 1e-5
        assert abs(step["sampler/ratio_max"] - 1.0) < 1e-3
        assert abs(step["sampler/ratio_min"] - 1.0) < 1e-3


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_a_killed_run_goes_on_as_if_it_had_not_been(
    family: str, models: Any, tmp_path: Path
) -> None:
    """To the bit, where gradients wait for the last response; streamed ones are summed in any
    order."""
    settings = {"steps": 5, "checkpoint": {"every": 1, "keep": 9}, "mode": "off"}
    whole, _ = run(config.parse(job(models(family), tmp_path / "whole", **settings)))
    file, folder = tmp_path / "killed.yaml", tmp_path / "killed"
    file.write_text(yaml.safe_dump(job(models(family), folder, **settings)), encoding="utf-8")
    process = start_cli("train", file)
    while process.poll() is None and 2 not in checkpoints(folder):
        time.sleep(0.05)
    kill_group(process)
    assert 2 in checkpoints(folder)
    assert 5 not in checkpoints(folder)
    run(config.load(file, []), resume=True)
    assert kept_samples(folder) == kept_samples(whole)
    last = "checkpoint-5"
    assert weights_digest(folder / last) == weights_digest(whole / last)
