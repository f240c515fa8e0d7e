"""Configurations of verl and TRL become jobs: each value, and each key exactly once.

The files have the keys and the forms of the two projects' public examples.
"""

import re
from pathlib import Path

import pytest
import yaml

from case_files import read_table
from rollpacker import config
from rollpacker.cli.convert import CommandLine, script, translate
from rollpacker.cli.convert.table import flat

FILES = Path(__file__).parent / "files"
NOTHING = CommandLine()

SCRIPT = """
from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import think_format_reward
import torch

raise SystemExit("nothing here may run")

def brevity(completions, **columns):
    return [-len(text) for text in completions]

def main():
    rows = load_dataset("openai/gsm8k", "main", split="train")
    rows = rows.map(lambda row: {"prompt": row["question"]})
    args = GRPOConfig(
        output_dir="out/brief",
        learning_rate=1e-5,
        num_generations=4,
        max_completion_length=256 * 2,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        importance_sampling_level="sequence",
        loss_type="grpo",
        epsilon=3e-4,
        epsilon_high=4e-4,
        model_init_kwargs={"dtype": torch.bfloat16},
        num_train_epochs=2,
    )
    GRPOTrainer(
        model="Qwen/Qwen3-0.6B",
        args=args,
        reward_funcs=[brevity, think_format_reward],
        train_dataset=rows,
        peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", lora_dropout=0.0),
    ).train()

if __name__ == "__main__":
    main()
"""


def job(tmp_path, file, asked=NOTHING):
    """The translation, and the job that is read from its text."""
    found = translate(file, asked)
    out = tmp_path / "job.yaml"
    out.write_text(found.text)
    return found, config.load(out)


def verl_job(tmp_path, **keys):
    """A verl file of these keys, where ``__`` is a dot, over the least that it takes."""
    tree = {
        "actor_rollout_ref": {"model": {"path": "m"}},
        "data": {"train_files": "d.parquet"},
        "algorithm": {"adv_estimator": "grpo"},
    }
    return job(tmp_path, written(tmp_path, tree, keys))


def trl_job(tmp_path, asked=NOTHING, **keys):
    tree = {"model_name_or_path": "m", "dataset_name": "d", "reward_funcs": ["pack.fun"]}
    return job(tmp_path, written(tmp_path, tree, keys), asked)


def written(tmp_path, tree, keys):
    for key, value in keys.items():
        *parents, leaf = key.split("__")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    file = tmp_path / "theirs.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file


def comment_of(text, path):
    """What stands behind a key that is alone of its name."""
    found = re.search(rf"^ *{path}: .*?  # (.*)$", text, re.MULTILINE)
    assert found, path
    return found[1]


def test_a_script_of_verl(tmp_path):
    found, run = job(tmp_path, FILES / "verl_grpo.sh")
    assert run.model.path == "Qwen/Qwen2.5-3B-Instruct"
    assert (run.model.lora_rank, run.model.lora_alpha, run.model.dtype) == (64, 32, "bfloat16")
    assert run.data.path == ["~/data/gsm8k/train.parquet", "~/data/math/train.parquet"]
    assert (run.data.shuffle, run.data.drop_last, run.data.overlong) == (False, True, "skip")
    assert run.rollout.prompts_per_step == 512  # prompts; the comment behind the call is none
    assert (run.rollout.num_generations, run.rollout.max_completion_length) == (5, 1024)
    assert run.train.updates_per_step == 4
    assert run.train.micro_batch_tokens == 8 * (512 + 1024)
    algorithm = run.train.algorithm
    assert (algorithm.kind, algorithm.loss_type, algorithm.epsilon) == ("grpo", "token_mean", 0.2)
    # What verl does where the file says nothing, and we would not.
    assert (algorithm.delta, run.train.weight_decay) == (3.0, 0.01)
    assert (run.train.beta, run.train.kl_bias_correction) == (0.001, False)
    assert (run.train.learning_rate, run.engine.kind) == (3e-6, "vllm")
    assert (run.eval.every, run.eval.temperature) == (5, 0.0)
    assert (run.epochs, run.checkpoint.every, run.trackers) == (15, 20, ["wandb"])
    assert comment_of(found.text, "updates_per_step") == (
        "data.train_batch_size=512, actor_rollout_ref.actor.ppo_mini_batch_size=128: 512 / 128: "
        "4 updates need the whole batch, so gradients cannot start during the rollout and exact "
        "gains little; 1 restores it, but changes what is learned"
    )
    assert set(found.refused) == {"data.max_prompt_length", "actor_rollout_ref.actor.entropy_coeff"}
    # verl spreads a replica over all GPUs where it is not told otherwise.
    assert (run.engine.tensor_parallel, run.devices.per_node) == (2, 2)
    assert (run.trainer.kind, run.trainer.shard) == ("fsdp", 0)
    assert any("data_source" in line for line in found.warnings)


def test_a_script_of_verl_with_variables(tmp_path):
    found, run = job(tmp_path, FILES / "verl_dapo.sh")
    algorithm = run.train.algorithm
    assert (algorithm.kind, algorithm.epsilon, algorithm.epsilon_high) == ("dapo", 0.2, 0.28)
    assert (algorithm.delta, algorithm.overlong_buffer, algorithm.overlong_penalty) == (10, 4096, 1)
    assert run.model.path == "~/verl/models/Qwen2.5-7B"
    assert (run.rollout.max_completion_length, run.train.micro_batch_tokens) == (8192, 10240)
    assert (run.rollout.num_generations, run.rollout.top_k) == (16, 0)
    sampling = run.rollout.dynamic_sampling
    # Ten batches of three times as many prompts as a step trains on, the first of them included.
    assert (sampling.enabled, sampling.max_draws) == (True, 29)
    # verl's schedule counts steps, ours updates, of which there are two a step.
    assert (run.train.updates_per_step, run.train.warmup_steps) == (2, 20)
    assert (run.steps, run.train.weight_decay, run.train.warmup_from_zero) == (400, 0.1, True)
    assert (run.eval.temperature, run.eval.num_generations) == (1.0, 4)
    assert set(found.refused) == {
        "data.max_prompt_length",
        "data.truncation",
        "actor_rollout_ref.rollout.val_kwargs.top_p",
        "trainer.experiment_name",  # it has the date
        "trainer.n_gpus_per_node",
    }


def test_a_file_of_verl(tmp_path):
    found, run = job(tmp_path, FILES / "verl_gspo.yaml")
    algorithm = run.train.algorithm
    assert (algorithm.kind, algorithm.epsilon, algorithm.epsilon_high) == ("gspo", 3e-4, 4e-4)
    assert run.rewards[0].function == "rewards/score.py:score"
    assert run.rewards[0].options == {"strict": True}
    assert run.model.chat_template_kwargs == {"enable_thinking": False}
    assert (run.data.input_key, run.train.updates_per_step) == ("question", 1)
    assert (run.train.warmup_steps, run.train.lr_scheduler_type) == (10, "cosine")
    assert run.train.beta == 0.0
    assert run.eval is None
    assert (run.train.adam_beta1, run.train.adam_beta2) == (0.9, 0.95)
    assert set(found.refused) == {
        "algorithm.use_kl_in_reward",
        "actor_rollout_ref.actor.ppo_epochs",
        "trainer.shiny_new_key",
    }
    assert "set by hand: trainer.shiny_new_key (3)" in found.by_hand
    hint = "ppo_epochs (2): each response is used for one update only"
    assert f"set by hand: actor_rollout_ref.actor.{hint}" in found.by_hand
    assert (run.engine.kind, run.rollout.num_generations) == ("vllm", 8)
    gspo, old, engine = sorted(found.warnings, reverse=True)
    assert "gspo averages as seq-mean-token-mean does (verl's default" in gspo
    assert "old log-probabilities" in old
    assert engine == "engine.kind: vLLM replaces SGLang, which is not supported"


def test_a_file_of_trl(tmp_path):
    found, run = job(tmp_path, FILES / "trl_grpo.yaml")
    # 8 responses on each of 4 processes, 8 times, in groups of 16.
    assert run.rollout.prompts_per_step == 8 * 4 * 8 // 16
    assert (run.rollout.num_generations, run.train.updates_per_step) == (16, 2)
    assert run.steps == 100 // 2  # TRL counts updates
    assert (run.checkpoint.every, run.checkpoint.keep, run.eval.every) == (10, 2, 25)
    assert (run.train.warmup_steps, run.train.warmup_from_zero) == (10, True)
    algorithm = run.train.algorithm
    assert (algorithm.kind, algorithm.epsilon, algorithm.epsilon_high) == ("dapo", 0.2, 0.28)
    assert (algorithm.scale_rewards, algorithm.std_epsilon, algorithm.delta) == ("none", 1e-4, None)
    assert (run.train.beta, run.train.kl_bias_correction) == (0.001, False)
    assert [(each.function, each.weight) for each in run.rewards] == [
        ("math", 1.0),
        ("my_rewards:tag_count", 0.2),
    ]
    assert (run.data.path, run.data.options) == ("openai/gsm8k", {"name": "main"})
    assert (run.data.input_key, run.data.system_prompt) == (
        "question",
        "Think first.\nThen answer.",
    )
    assert (run.eval.data.split, run.eval.temperature) == ("test", 0.7)
    assert (run.engine.kind, run.engine.gpu_memory) == ("vllm", 0.3)
    assert (run.output, run.seed, run.trackers) == ("runs/gsm8k-grpo", 7, ["wandb"])
    assert set(found.refused) == {"max_prompt_length"}
    assert [line.partition(":")[0] for line in found.warnings] == ["rewards", "trainer.kind"]


def test_a_script_of_trl(tmp_path):
    file = tmp_path / "train.py"
    file.write_text(SCRIPT)
    found, run = job(tmp_path, file, CommandLine(world=2))
    assert (run.model.path, run.model.lora_rank, run.model.lora_alpha) == ("Qwen/Qwen3-0.6B", 8, 16)
    assert [each.function for each in run.rewards] == [
        f"{file}:brevity",
        "trl.rewards:think_format_reward",
    ]
    assert (run.data.path, run.data.split) == ("openai/gsm8k", "train")
    assert (run.rollout.prompts_per_step, run.rollout.num_generations) == (8 * 2 * 2 // 4, 4)
    algorithm = run.train.algorithm
    assert (algorithm.kind, algorithm.epsilon, algorithm.epsilon_high) == ("gspo", 3e-4, 4e-4)
    assert (run.epochs, run.train.learning_rate) == (2, 1e-5)
    # 256 * 2 is no literal.
    assert set(found.refused) == {"max_completion_length", "model_init_kwargs"}
    assert any("changes its rows (map)" in line for line in found.warnings)
    assert any("with all its imports" in line for line in found.warnings)
    # What the command line says need not be in the file.
    file.write_text(SCRIPT.replace('model="Qwen/Qwen3-0.6B"', "model=model"))
    found, run = job(tmp_path, file, CommandLine(world=2, model="m"))
    assert run.model.path == "m"
    assert found.ignored["model_name_or_path"] == "--model overrides it"
    assert set(found.refused) == {"max_completion_length", "model_init_kwargs"}
    # Nor is a batch that only the script's arguments know.
    batch = "per_device_train_batch_size="
    file.write_text(SCRIPT.replace(f"{batch}8", f"{batch}arguments.batch"))
    found, run = job(tmp_path, file, CommandLine(world=2))
    assert "per_device_train_batch_size" in found.refused
    assert (run.train.updates_per_step, "prompts_per_step" in found.text) == (1, False)
    # A script that trains when it is imported cannot be where rewards are.
    file.write_text(SCRIPT.replace("def main():", "if True:"))
    found, run = job(tmp_path, file, CommandLine(world=2))
    assert run.rewards[0].function == "rewards.py:brevity"
    assert any("would start its training" in line for line in found.warnings)


def test_a_batch_that_only_the_shell_knows_is_set_by_hand(tmp_path):
    text = (
        (FILES / "verl_grpo.sh").read_text().replace("train_batch_size=512", "train_batch_size=$B")
    )
    file = tmp_path / "theirs.sh"
    file.write_text(text)
    found, run = job(tmp_path, file)
    assert "set by hand: data.train_batch_size ($B): the file does not contain its value" in (
        found.by_hand
    )
    assert "by hand" in comment_of(found.text, "updates_per_step")
    assert (run.train.updates_per_step, "prompts_per_step" in found.text) == (1, False)


EVERY = ["verl_grpo.sh", "verl_dapo.sh", "verl_gspo.yaml", "trl_grpo.yaml"]


def keys_of(name):
    file = FILES / name
    if file.suffix == ".sh":
        return set(script.overrides(file.read_text()))
    tree = yaml.safe_load(file.read_text())
    return set(tree) if name.startswith("trl") else {key for key, _ in flat(tree)}


@pytest.mark.parametrize("name", EVERY)
def test_every_key_is_somewhere_once(tmp_path, name):
    found, _ = job(tmp_path, FILES / name)
    keys = [*found.translated, *found.ignored, *found.refused]
    assert sorted(keys) == sorted(keys_of(name))
    # A translated key stands behind a value of ours, the others at the end.
    body, _, end = found.text.partition("\n# Set by hand")
    end = end or body.partition("\n# Ignored")[2]
    for key in found.translated:
        assert re.search(rf"  # .*(?<![\w.]){re.escape(key)}=", body), key
    for key, sign in [(k, "=") for k in found.ignored] + [(k, r" \(") for k in found.refused]:
        assert len(re.findall(rf"^#   {re.escape(key)}{sign}", end, re.MULTILINE)) == 1, key
    assert [line.split()[3] for line in found.by_hand] == [*found.refused]


def test_every_value_has_its_origin(tmp_path):
    for name in EVERY:
        text = job(tmp_path, FILES / name)[0].text
        lines = [line for line in text.splitlines() if line and not line.startswith("#")]
        assert all("  # " in line or line.endswith(":") for line in lines)


GSPO, HIGH = {"actor__policy_loss__loss_mode": "gspo"}, "actor__clip_ratio_high"
MEAN = "actor__loss_agg_mode"


@pytest.mark.parametrize(
    ("keys", "kind", "options", "refused"),
    [
        ({MEAN: "seq-mean-token-mean"}, "grpo", {"loss_type": "sequence_mean"}, ()),
        ({MEAN: "seq-mean-token-sum-norm"}, "dr_grpo", {"delta": 3.0}, None),
        ({HIGH: 0.3}, "dapo", {"epsilon": 0.2, "epsilon_high": 0.3}, ()),
        ({HIGH: 0.3, MEAN: "seq-mean-token-mean"}, "grpo", {"epsilon": 0.2},
         ("actor.clip_ratio_high",)),
        # verl's own low and high go before clip_ratio, unless they are null.
        ({"actor__clip_ratio": 0.3}, "grpo", {"epsilon": 0.2}, ()),
        ({"actor__clip_ratio": 0.3, "actor__clip_ratio_low": None, HIGH: None}, "grpo",
         {"epsilon": 0.3}, ()),
        ({"actor__use_token_level_loss": False}, "grpo", {"loss_type": "sequence_mean"}, ()),
        (GSPO | {MEAN: "seq-mean-token-mean"}, "gspo", {}, ()),
        (GSPO | {MEAN: "token-mean"}, "gspo", {}, ("actor.loss_agg_mode",)),
    ],
)  # fmt: skip
def test_losses_of_verl(tmp_path, keys, kind, options, refused):
    found, run = verl_job(
        tmp_path, **{f"actor_rollout_ref__{key}": value for key, value in keys.items()}
    )
    algorithm = run.train.algorithm
    assert algorithm.kind == kind
    assert {name: getattr(algorithm, name) for name in options} == options
    if refused is None:
        assert any("no standard deviation" in line for line in found.warnings)
    else:
        assert set(found.refused) == {f"actor_rollout_ref.{key}" for key in refused}


@pytest.mark.parametrize(
    ("key", "value", "by_hand"), read_table(__file__, "test_what_verl_does_with_experts")
)
def test_what_verl_does_with_experts(tmp_path, key, value, by_hand):
    key = f"actor_rollout_ref.{key}"
    found, _ = verl_job(tmp_path, **{key.replace(".", "__"): value})
    assert set(found.refused) == ({key} if by_hand else set())
    assert by_hand or key in found.ignored


@pytest.mark.parametrize(
    ("wins", "loses", "ours"),
    [
        ("actor.optim.warmup_style", "actor.optim.lr_scheduler_type", "lr_scheduler_type"),
        ("actor.optim.grad_clip", "actor.optim.clip_grad", "max_grad_norm"),
        ("actor.optim.clip_grad", "actor.grad_clip", "max_grad_norm"),
    ],
)
@pytest.mark.parametrize("equal", [False, True])
def test_of_two_names_in_verl_one_wins(tmp_path, wins, loses, ours, equal):
    one, other = ("cosine", "linear") if ours == "lr_scheduler_type" else (0.5, 2.0)
    wins, loses = f"actor_rollout_ref.{wins}", f"actor_rollout_ref.{loses}"
    keys = {wins: one, loses: one if equal else other}
    found, run = verl_job(tmp_path, **{key.replace(".", "__"): v for key, v in keys.items()})
    assert getattr(run.train, ours) == one
    said = found.ignored if equal else found.refused
    assert said[loses] == f"{wins} overrides it"
    assert wins in found.translated


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("data__train_batchsize", "data.train_batch_size? Its default, 1024, was taken"),
        ("trainer__n_gpu_per_node", "trainer.n_gpus_per_node?"),
        ("data__trian_files", "data.train_files?"),  # the right key is there too
        ("trainer__train_batch_size", ""),
    ],
)
def test_a_key_that_is_misspelt_names_the_one_that_is_meant(tmp_path, key, meant):
    found, _ = verl_job(tmp_path, **{key: 128})
    hint = f"unknown key of verl; did you mean {meant}" if meant else ""
    assert found.refused[key.replace("__", ".")] == hint


def test_the_command_line_goes_first(tmp_path):
    asked = CommandLine(model="mine", data="d.jsonl", reward="code", held_out="h.jsonl", steps=20)
    for name in EVERY:
        found, run = job(tmp_path, FILES / name, asked)
        assert (run.model.path, run.data.path, run.steps) == ("mine", "d.jsonl", 20)
        assert (run.rewards[0].function, run.eval.data.path) == ("code", "h.jsonl")
        assert len(run.rewards) == 1
        keys = [*found.translated, *found.ignored, *found.refused]
        assert sorted(keys) == sorted(keys_of(name))
