"""Keys of TRL that say together what a job is told."""

from pathlib import Path

import pytest
import yaml
from test_convert import trl_job

from rollpacker.cli.convert import CommandLine, translate


@pytest.mark.parametrize(
    ("keys", "kind", "refused"),
    [
        ({"loss_type": "grpo"}, "grpo", ()),
        ({"loss_type": "grpo", "epsilon_high": 0.28}, "grpo", ("epsilon_high",)),
        ({"loss_type": "dr_grpo", "scale_rewards": "none", "delta": 1.5}, "dr_grpo", ()),
        ({"loss_type": "dr_grpo", "scale_rewards": True}, "dr_grpo", ("scale_rewards",)),
        ({"importance_sampling_level": "sequence", "loss_type": "bnpo"}, "gspo", ("loss_type",)),
        ({"num_iterations": 2}, "grpo", ("num_iterations",)),
        ({"warmup_ratio": 0.1}, "grpo", ("warmup_ratio",)),
        ({"lr_scheduler_type": "polynomial"}, "grpo", ("lr_scheduler_type",)),
        ({"use_peft": True, "lora_target_modules": ["q_proj"]}, "grpo", ("lora_target_modules",)),
        ({"num_train_epochs": 1.5}, "grpo", ("num_train_epochs",)),
        ({"router_aux_loss_coef": 0.001}, "grpo", ("router_aux_loss_coef",)),
        ({"router_aux_loss_coef": 0.0}, "grpo", ()),
        ({"fp16": True, "min_p": 0.1, "top_k": -1}, "grpo", ("fp16", "min_p")),
    ],
)
def test_what_trl_says_otherwise(tmp_path, keys, kind, refused):
    found, run = trl_job(tmp_path, **keys)
    assert run.train.algorithm.kind == kind
    assert set(found.refused) == set(refused)


@pytest.mark.parametrize(
    ("device", "together", "each", "world", "prompts", "updates"),
    [
        (8, 1, None, 1, 1, 1),
        (8, 4, None, 4, 16, 1),
        (8, 2, 8, 1, 8, 4),
        (4, 128, 16, 2, 128, 1),  # rounds shorter than an update: one larger round
    ],
)
def test_batches_of_trl(tmp_path, device, together, each, world, prompts, updates):
    keys = {"per_device_train_batch_size": device, "gradient_accumulation_steps": together}
    if each:
        keys["steps_per_generation"] = each
    found, run = trl_job(tmp_path, CommandLine(world=world), **keys)
    assert (run.rollout.prompts_per_step, run.train.updates_per_step) == (prompts, updates)
    assert ("updates need the whole batch" in found.text) == (updates > 1)
    if each:
        keys.pop("steps_per_generation")
        keys["generation_batch_size"] = each * device * world
        _, same = trl_job(tmp_path, CommandLine(world=world), **keys)
        assert same.rollout.prompts_per_step == prompts
        assert same.train.updates_per_step == updates


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ('"json", data_files="train.jsonl", split="train"', "train.jsonl"),
        ('"parquet", data_files={"train": "a.parquet", "test": "b.parquet"}', "a.parquet"),
        ('path="csv", data_files=["a.csv", "b.csv"]', ["a.csv", "b.csv"]),
        ('"org/name", "main", split="train"', "org/name"),
    ],
)
def test_files_behind_a_format_are_the_data(tmp_path: Path, given: str, path: object) -> None:
    found = translate(script(tmp_path, given), CommandLine())
    assert yaml.safe_load(found.text)["data"]["path"] == path


@pytest.mark.parametrize("given", ['"json", data_files=FILES', '"json"', '"csv", data_files={}'])
def test_files_that_a_script_does_not_name_are_asked_for(tmp_path: Path, given: str) -> None:
    with pytest.raises(ValueError, match="does not define the whole job: give --data"):
        translate(script(tmp_path, given), CommandLine())


def script(folder: Path, loads: str) -> Path:
    file = folder / "train.py"
    file.write_text(
        "from datasets import load_dataset\nfrom trl import GRPOConfig, GRPOTrainer\n"
        "GRPOTrainer(model='m', reward_funcs='pack.fun', args=GRPOConfig(output_dir='out'), "
        f"train_dataset=load_dataset({loads}))\n"
    )
    return file
