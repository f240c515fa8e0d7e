"""Every mistake in a configuration is answered in one line, with exit code 2."""

import json
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from rollpacker import config
from rollpacker.cli import main
from rollpacker.config import RunConfig
from rollpacker.config.reading import _NAMES, KEYS, REASONS

JOB = "model: {path: m}\ndata: {path: 'rg:gcd'}\nrewards: [{function: rg}]\n"

# Three of each section: what is given, and what is said of it.
MISTAKES = [
    ("learning_rate=1e-5", "unknown key 'learning_rate'; did you mean 'train.learning_rate'?"),
    ("steps=many", "'steps': must be a valid integer, got 'many'"),
    ("trackers=[tensorbord, wandbi]", "'trackers.0': must be 'wandb', 'trackio' or 'mlflow', got"),
    ("model.pth=x", "unknown key 'model.pth'; did you mean 'model.path'?"),
    ("model=Qwen/Qwen3-8B", "'model': must be keys and values such as 'path: Qwen/Qwen3-8B', got"),
    ("data.path=7", "a valid list, got 7; YAML reads it as a number: put it in quotes"),
    ("mux.cores={1: [0]}", "'mux.cores.1': must be a valid string, got 1; YAML reads it as a nu"),
    ("output=true", "'output': must be a valid string, got True; YAML reads it as a truth value"),
    ("output={a: 1}", "'output': must be a valid string, got {'a': 1}"),
    ("model.dtype=bf16", "must be 'float32' or 'bfloat16', got 'bf16'; did you mean 'bfloat16'?"),
    ("data.size=-1", "'data.size': must be greater than or equal to 0, got -1"),
    ("rewards=math", "'rewards': must be a valid list, got 'math'"),
    ("rewards=[{function: rg, wieght: 2}]", "unknown key 'rewards.0.wieght'; did you mean"),
    ("grading.code_timeout.most_s=1", "'grading.code_timeout': least_s=2 is more than most_s=1"),
    ("rollout.prompts_per_step=1.5", "must be a valid integer, got 1.5"),
    ("rollout.temperature=.nan", "'rollout.temperature': must be a finite number, got nan"),
    ("rollout.tail_batching.mode=exakt", "rule of your own, got 'exakt'; did you mean 'exact'?"),
    ("rollout.tail_batching=race", "must be keys and values such as 'mode: race', got 'race'"),
    ("rollout.dynamic_sampling.enable=true", "did you mean 'rollout.dynamic_sampling.enabled'?"),
    ("engine=vllm", "'engine': must be keys and values such as 'kind: vllm', got 'vllm'"),
    ("engine.kind=vlm", "'mini', 'vllm' or 'fake', got 'vlm'; did you mean 'vllm'?"),
    ("engine.kind=3", "'engine.kind': must be 'mini', 'vllm' or 'fake', got 3"),
    (
        "engine={tensor_parallel: 2}",
        "unknown key 'engine.tensor_parallel'; for it set engine.kind=vllm",
    ),
    (
        "train.algorithm={kind: dr_grpo, epsilon_high: 0.3}",
        "unknown key 'train.algorithm.epsilon_high'; for it set train.algorithm.kind=dapo or gspo",
    ),
    (
        "train.num_generations=4",
        "unknown key 'train.num_generations'; did you mean 'rollout.num_generations' or "
        "'eval.num_generations'?",
    ),
    ("eval.every=5", "'eval': no problems to evaluate: name some in eval.data, hold"),
    ("mux.cores={rollout: all}", "'mux.cores.rollout': must be a valid list, got 'all'"),
]


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(JOB, encoding="utf-8")
    return path


@pytest.mark.parametrize(("given", "said"), MISTAKES, ids=[given for given, _ in MISTAKES])
def test_a_mistake_is_one_line_and_exit_code_2(
    job: Path,
    given: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["rollpacker", "train", str(job), given])
    with pytest.raises(SystemExit) as left:
        main()
    out, err = capsys.readouterr()
    assert (left.value.code, out) == (2, "")
    assert err.count("\n") == 1, err
    line = err.strip()
    # What is missing is to be added to the file.
    place = str(job) if "is required" in said else f"override {given!r}"
    assert line.startswith(f"rollpacker: {place}: ")
    assert said in line


@pytest.mark.parametrize("command", ["train", "simulate", "eval"])
def test_every_command_names_all_unknown_keys(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "job.yaml"
    example = Path(__file__).parents[2] / "examples" / "simulate" / "paper-7b-8k.yaml"
    text = example.read_text(encoding="utf-8") if command == "simulate" else JOB
    tree = yaml.safe_load(text) | {"stepz": 1, "qqqqqqqq": 2}
    path.write_text(yaml.safe_dump(tree, sort_keys=False), encoding="utf-8")
    words = [*(["some-checkpoint"] if command == "eval" else []), str(path), "nonsense.x=1"]
    monkeypatch.setattr(sys, "argv", ["rollpacker", command, *words])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{path}: unknown key 'stepz'; did you mean 'steps'?; unknown key 'qqqqqqqq'; o" in line
    assert "override 'nonsense.x=1': unknown key 'nonsense'" in line
    assert line.endswith("'nonsense'")


def said_of(key: str) -> str:
    """What is said of an unknown key, behind its name."""
    tree = yaml.safe_load(JOB)
    *parents, leaf = key.split(".")
    node = tree
    for parent in parents:
        node = node.setdefault(parent, {})
    node[leaf] = 1
    with pytest.raises(config.ConfigError) as caught:
        config.parse(tree)
    said, found, rest = str(caught.value).partition(f"unknown key '{key}'")
    assert found, said
    return rest


@pytest.mark.parametrize(
    ("key", "ours"),
    [
        ("num_train_epochs", "epochs"),
        ("rollout.n", "rollout.num_generations"),
        ("report_to", "trackers"),
        ("save_total_limit", "checkpoint.keep"),
        ("rollout.max_new_tokens", "rollout.max_completion_length"),
        ("trainer.total_epochs", "epochs"),
        ("data.train_batch_size", "rollout.prompts_per_step"),
        ("data.train_files", "data.path"),
        ("model_name_or_path", "model.path"),
        ("n-samples-per-prompt", "rollout.num_generations"),
        ("train.beta1", "train.adam_beta1"),
        ("train.kl_coef", "train.beta"),
        ("checkpoint.save_total_limit", "checkpoint.keep"),
        ("eval_every", "eval.every"),
        ("reward", "rewards"),
        ("step", "steps"),
        ("train.gradient_checkpoint", "train.gradient_checkpointing"),
        ("train.lerning_rate", "train.learning_rate"),
        ("rollout.tempreature", "rollout.temperature"),
        ("devices.per_nod", "devices.per_node"),
    ],
)
def test_what_another_framework_calls_our_key(key: str, ours: str) -> None:
    assert said_of(key) == f"; did you mean '{ours}'?"


@pytest.mark.parametrize(
    ("key", "why"),
    [
        ("train.gradient_accumulation_steps", "a step trains on rollout.prompts_per_step prompts"),
        ("logging_steps", "every step is logged"),
        ("rollout.min_p", "tokens are sampled with rollout.temperature"),
        ("actor_rollout_ref", "rollpacker init --from FILE translates verl's configuration"),
        ("data.max_prompt_length", "prompts are never cut: data.overlong: skip"),
    ],
)
def test_what_has_no_key_says_why(key: str, why: str) -> None:
    assert said_of(key).startswith(f"; {why}")


@pytest.mark.parametrize(
    "key", ["rollout.retention", "rollout.max_news", "train.alpha", "steeple", "model.patches"]
)
def test_no_guess_is_made_of_what_is_not_near(key: str) -> None:
    assert not said_of(key)


def test_hints_of_other_frameworks_are_keys_of_ours() -> None:
    assert not KEYS.keys() & REASONS.keys()
    assert len(KEYS) == sum(len(names.split()) for names in _NAMES.values())
    for key in KEYS.values():
        node: Any = RunConfig
        for part in key.split("."):
            members = [node, *get_args(node), *(m for a in get_args(node) for m in get_args(a))]
            fields = [
                m.model_fields[part] for m in members if part in getattr(m, "model_fields", ())
            ]
            node = fields[0].annotation


def test_several_mistakes_are_said_together(job: Path) -> None:
    given = ["steps=many", "sed=1", "rollout.top_p=2", "model.pth=x"]
    with pytest.raises(config.ConfigError) as error:
        config.load(job, given)
    assert str(error.value) == (
        "override 'steps=many': 'steps': must be a valid integer, got 'many'; "
        "override 'model.pth=x': unknown key 'model.pth'; did you mean 'model.path'?; "
        "override 'rollout.top_p=2': 'rollout.top_p': must be less than or equal to 1, got 2; "
        "override 'sed=1': unknown key 'sed'; did you mean 'seed'?"
    )


def test_a_key_that_is_no_text_is_unknown() -> None:
    with pytest.raises(config.ConfigError, match="unknown key '1'"):
        config.parse(yaml.safe_load(JOB) | {1: 2})


def test_a_long_value_is_cut_and_json_stays_readable() -> None:
    with pytest.raises(config.ConfigError) as error:
        config.parse({**yaml.safe_load(JOB), "steps": json.dumps(list(range(999)))})
    assert len(str(error.value)) < 200
