"""What the trainer refuses, in one line with the argument to change."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import trl_jobs as jobs
from peft import LoraConfig, PromptTuningConfig, PveraConfig, get_peft_model

from case_files import read_table
from rollpacker.config import MiniEngineConfig, TailBatchingConfig, VllmEngineConfig
from rollpacker.demo.model import build_model
from rollpacker.trl import GRPOTrainer

pytestmark = pytest.mark.trl


@pytest.mark.parametrize(
    ("options", "said"),
    [
        *read_table(__file__, "test_what_is_not_supported_is_refused_in_one_line"),
        ({"rollout_func": lambda prompts, trainer: {}}, "does not support rollout_func"),
        ({"tools": [len]}, "does not support tools"),
        (
            {"tail_batching": TailBatchingConfig(mode="off", audit_every=3)},
            "audit_every does nothing in mode 'off'",
        ),
    ],
)
def test_what_is_not_supported_is_refused_in_one_line(
    tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        jobs.trainer(GRPOTrainer, tmp_path, **options)
    assert "\n" not in str(caught.value)


def test_a_missing_vllm_is_told_before_a_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    said = r"VllmEngineConfig\(\): vLLM is not installed: run pip install 'rollpacker\[vllm\]' "
    with pytest.raises(ValueError, match=said) as caught:
        jobs.trainer(GRPOTrainer, tmp_path, model=_NOWHERE, engine=VllmEngineConfig())
    assert "\n" not in str(caught.value)


_NOWHERE = "no/such-model"
"""Whoever loads it fails otherwise."""


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"peft_config": PromptTuningConfig(num_virtual_tokens=3)}, "kind PROMPT_TUNING: its virt"),
        ({"peft_config": PveraConfig()}, "kind PVERA: it is random during training"),
        (
            {"peft_config": LoraConfig(layer_replication=[(0, 1), (0, 1)])},
            "kind LORA: layer_replication: it changes the number of layers: leave it out",
        ),
    ],
)
def test_adapters_that_no_engine_decodes_from_are_refused_before_a_model_is_loaded(
    tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        jobs.trainer(GRPOTrainer, tmp_path, model=_NOWHERE, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("saved", [False, True])
def test_what_the_model_says_of_sampling_is_not_dropped(tmp_path: Path, saved: bool) -> None:
    """Plain TRL fills its own generation configuration up with it."""
    model = build_model(0)
    model.generation_config.no_repeat_ngram_size = 2
    model.generation_config.suppress_tokens = [5]
    model.generation_config.repetition_penalty = 1.1  # TRL's own 1.0 is taken
    model.save_pretrained(str(tmp_path / "model"))
    given = str(tmp_path / "model") if saved else model
    said = "generation_config sets no_repeat_ngram_size, suppress_tokens, which trl.GRPOTrainer"
    with pytest.raises(ValueError, match=said) as caught:
        jobs.trainer(GRPOTrainer, tmp_path, model=given)
    assert "\n" not in str(caught.value)
    assert "repetition_penalty" not in str(caught.value)


def test_tied_embeddings_are_not_parted(tmp_path: Path) -> None:
    """The engine, and a checkpoint, have one matrix for both."""
    config = LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"])
    with pytest.raises(ValueError, match="modules_to_save would split"):
        jobs.trainer(GRPOTrainer, tmp_path, peft_config=config)
    pattern = LoraConfig(target_modules=r".*embed_tokens", task_type="CAUSAL_LM")
    with pytest.raises(ValueError, match="it would split"):
        jobs.trainer(GRPOTrainer, tmp_path, peft_config=pattern)


def test_an_adapted_model_and_a_folder_of_adapters_are_looked_at_too(tmp_path: Path) -> None:
    config = PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    adapted = get_peft_model(build_model(0), config)
    with pytest.raises(ValueError, match="kind PROMPT_TUNING"):
        jobs.trainer(GRPOTrainer, tmp_path, model=adapted)
    adapted.save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match="kind PROMPT_TUNING"):
        jobs.trainer(GRPOTrainer, tmp_path, model=str(tmp_path / "adapter"))


def test_trl_s_own_engines_are_refused_before_they_are_looked_for(tmp_path: Path) -> None:
    """A server that is not there would be waited for."""
    with pytest.raises(ValueError, match="does not support use_vllm"):
        jobs.trainer(GRPOTrainer, tmp_path, use_vllm=True, vllm_mode="server")


def test_all_options_may_come_as_a_dict(tmp_path: Path) -> None:
    given = {"mode": "race", "eta_prompts": 1.5}
    ours = jobs.trainer(GRPOTrainer, tmp_path, tail_batching=given, max_steps=1)
    ours.train()
    config = (tmp_path / "rollpacker" / "config.yaml").read_text()
    assert "eta_prompts: 1.5" in config


@pytest.mark.parametrize("mode", ["exact", "off", "race", "prompts", "auto"])
def test_a_dict_may_have_all_options_as_they_usually_are(tmp_path: Path, mode: str) -> None:
    given = TailBatchingConfig.model_validate({"mode": mode}).model_dump()
    jobs.trainer(GRPOTrainer, tmp_path, tail_batching=given)


def test_an_iterable_data_set_cannot_race(tmp_path: Path) -> None:
    stream = jobs.dataset().to_iterable_dataset()
    options = {"train_dataset": stream, "max_steps": 3}
    # Older releases of TRL refuse it themselves.
    with pytest.raises((ValueError, RuntimeError), match=r"iterable data set|Iterable"):
        jobs.trainer(GRPOTrainer, tmp_path, tail_batching="race", **options)


def test_a_checkpoint_of_plain_trl_cannot_go_on_racing(tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 4, "num_train_epochs": 1}
    jobs.trainer(GRPOTrainer, tmp_path, tail_batching="exact", **options).train()
    for file in tmp_path.glob("checkpoint-*/rollpacker-0.json"):
        file.unlink()
    racing = jobs.trainer(GRPOTrainer, tmp_path, tail_batching="race", **options)
    with pytest.raises(ValueError, match="is missing, so the prompts that a run"):
        racing.train(resume_from_checkpoint=True)


@pytest.mark.parametrize(("before", "after"), [("exact", "race"), ("race", "exact")])
def test_prompts_are_drawn_by_who_has_drawn_them(tmp_path: Path, before: str, after: str) -> None:
    options = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2}
    jobs.trainer(GRPOTrainer, tmp_path, tail_batching=before, **options).train()
    ours = jobs.trainer(GRPOTrainer, tmp_path, tail_batching=after, **options)
    with pytest.raises(ValueError, match=f"'{before}'.*'{after}' cannot continue it"):
        ours.train(resume_from_checkpoint=True)


def test_an_engine_without_room_names_the_arguments(tmp_path: Path) -> None:
    ours = jobs.trainer(GRPOTrainer, tmp_path, engine=MiniEngineConfig(kv_tokens=16))
    with pytest.raises(ValueError, match=r"raise kv_tokens of the engine or lower max_completion"):
        ours.train()


def words(completions: list[str], **_: Any) -> list[Any]:
    return ["good" for _ in completions]


def test_a_reward_that_is_no_number_names_its_function(tmp_path: Path) -> None:
    ours = jobs.trainer(GRPOTrainer, tmp_path, rewards=words)
    with pytest.raises(ValueError, match="the reward function 'words' returned 'good', which is"):
        ours.train()
