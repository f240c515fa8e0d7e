"""``exact`` is TRL's own training on the same samples: equal weights, no metric missing."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
import trl
import trl_jobs as jobs
from datasets import Dataset
from peft import IA3Config, LNTuningConfig, LoHaConfig, LoraConfig, OFTConfig, get_peft_model

from rollpacker.demo.model import build_model
from rollpacker.trl import GRPOTrainer

pytestmark = pytest.mark.trl

TIMES = ("_time", "_runtime", "_per_second", "step_time")


class Recording(GRPOTrainer):
    """Keeps the token ids of each round, in the order of its examples."""

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        made = super()._generate_and_score_completions(inputs)
        if self.model.training:
            seen = self.__dict__.setdefault("seen", [])
            seen.append([output.tokens.tolist() for output in self.rollpacker.responses])
        return made


def recorded(seen: list[list[list[int]]]) -> Any:
    """A ``rollout_func`` for plain TRL that gives the same."""
    rounds = iter(seen)

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        ids = trainer.processing_class(text=prompts)["input_ids"]
        return {"prompt_ids": ids, "completion_ids": next(rounds), "logprobs": None}

    return rollout


def logs(of: Any) -> list[dict[str, float]]:
    """Of every step, without times."""
    return [
        {name: value for name, value in line.items() if not name.endswith(TIMES)}
        for line in of.state.log_history
    ]


def same(left: float, right: float) -> bool:
    return left == right or (math.isnan(left) and math.isnan(right))


def twins(tmp_path: Path, **options: Any) -> tuple[Any, Any]:
    """A run of ours, and one of plain TRL on its samples."""
    ours = jobs.trainer(Recording, tmp_path / "ours", **options)
    ours.train()
    rollout = recorded(ours.seen)
    plain = jobs.trainer(trl.GRPOTrainer, tmp_path / "plain", rollout_func=rollout, **options)
    plain.train()
    return ours, plain


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4},
        {"num_iterations": 2, "beta": 0.1},
        {"steps_per_generation": 4, "gradient_accumulation_steps": 2, "num_iterations": 2},
        {
            "per_device_train_batch_size": 4,
            "steps_per_generation": 2,
            "gradient_accumulation_steps": 4,
        },
        {"scale_rewards": "batch", "mask_truncated_completions": True},
    ],
    ids=["plain", "accumulation", "iterations", "rarer updates", "rarer rounds", "batch"],
)
def test_weights_and_metrics_are_those_of_plain_trl(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    ours, plain = twins(tmp_path, **options)
    for name, value in jobs.weights(plain).items():
        assert torch.equal(value, jobs.weights(ours)[name]), name
    assert len(logs(ours)) == len(logs(plain)) > 5
    for line, other in zip(logs(ours), logs(plain), strict=True):
        missing = {name for name in other if name not in line}
        assert not missing
        assert not {name for name in other if not same(other[name], line[name])}


def _lora() -> LoraConfig:
    return LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")


def test_adapters_are_trained_and_decoded_with(tmp_path: Path) -> None:
    ours, plain = twins(tmp_path, peft_config=_lora(), learning_rate=1e-2)
    mine = jobs.weights(ours)
    for name, value in jobs.weights(plain).items():
        assert torch.equal(value, mine[name]), name
    assert any(value.abs().sum() > 0 for name, value in mine.items() if "lora_B" in name)


class Checked(GRPOTrainer):
    """Compares the engine's log-probabilities with those of the model that is trained."""

    worst = 0.0
    changed = 0.0

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        made = super()._generate_and_score_completions(inputs)
        rounds = self.rollpacker
        for prompt, output in zip(rounds.prompt_ids, rounds.responses, strict=True):
            ids = torch.tensor([prompt + output.tokens.tolist()])
            with torch.no_grad():
                logits = self.model(ids).logits[0, len(prompt) - 1 : -1]
                with self.model.disable_adapter():
                    base = self.model(ids).logits[0, len(prompt) - 1 : -1]
            told = torch.log_softmax(logits, -1).gather(-1, ids[0, len(prompt) :, None])[:, 0]
            self.worst = max(self.worst, (told - torch.tensor(output.logprobs)).abs().max().item())
            self.changed = max(self.changed, (logits - base).abs().max().item())
        return made


_LINEAR = {"target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"}
ADAPTERS: dict[str, Any] = {
    "lora": _lora(),
    "dora": LoraConfig(use_dora=True, **_LINEAR),
    "ia3": IA3Config(feedforward_modules=["down_proj"], **_LINEAR),
    "loha": LoHaConfig(**_LINEAR),
    "oft": OFTConfig(oft_block_size=4, **_LINEAR),
    "layer norms": LNTuningConfig(
        target_modules=["input_layernorm", "norm"], task_type="CAUSAL_LM"
    ),
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_responses_are_of_the_adapted_model(tmp_path: Path, name: str) -> None:
    options = {"peft_config": ADAPTERS[name], "learning_rate": 2e-2, "num_train_epochs": 1}
    ours = jobs.trainer(Checked, tmp_path, **options)
    ours.train()
    assert ours.worst < 1e-4
    assert ours.changed > 0.01


def test_a_model_may_come_with_its_adapter(tmp_path: Path) -> None:
    adapted = get_peft_model(build_model(0), ADAPTERS["dora"])
    options = {"model": adapted, "learning_rate": 2e-2, "num_train_epochs": 1}
    ours = jobs.trainer(Checked, tmp_path, **options)
    ours.train()
    assert ours.worst < 1e-4
    assert ours.changed > 0.01


def test_what_functions_log_is_beside_its_response(tmp_path: Path) -> None:
    seen: list[int] = []

    def told(
        completions: list[str], number: list[int], log_extra: Any, log_metric: Any, **_: Any
    ) -> list[float | None]:
        seen.append(len(completions))
        log_extra("length", [len(text) for text in completions])
        log_metric("mine", sum(number) / len(number))
        return [None if n % 5 == 0 else float(n) for n in number]

    ours = jobs.trainer(
        GRPOTrainer, tmp_path, rewards=(told, jobs.ones), log_completions=True, num_train_epochs=1
    )
    ours.train()
    tables = sorted((tmp_path / "completions").glob("*.parquet"))
    assert len(tables) == 6
    for table in map(pl.read_parquet, tables):
        assert table["length"].to_list() == [len(text) for text in table["completion"]]
        numbers = [int(prompt.split(",")[0]) for prompt in table["prompt"]]
        expected = [None if n % 5 == 0 else float(n) for n in numbers]
        known = [None if score is None or math.isnan(score) else score for score in table["told"]]
        assert known == expected
    assert sum(seen) == 6 * 8
    assert "mine" in ours.state.log_history[0]


async def slow(completions: list[str], **_: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def test_coroutines_and_evaluation(tmp_path: Path) -> None:
    ours = jobs.trainer(
        GRPOTrainer,
        tmp_path,
        rewards=(slow, jobs.ones),
        eval_dataset=Dataset.from_list([{"prompt": f"{n}, 1"} for n in range(4)]),
        eval_strategy="steps",
        eval_steps=3,
        per_device_eval_batch_size=4,
        num_train_epochs=1,
    )
    ours.train()
    evaluations = [line for line in ours.state.log_history if "eval_rewards/slow/mean" in line]
    assert len(evaluations) == 2
    lines = [line for line in ours.state.log_history if "rewards/slow/mean" in line]
    assert all(line["rewards/slow/mean"] > 0 for line in lines)
