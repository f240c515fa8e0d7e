"""Every mistake in a configuration is answered in our words, in one line, with exit code 2."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel, ValidationError

from rollpacker import config
from rollpacker.cli import main
from rollpacker.config import Config, RunConfig
from rollpacker.config.reading.foreign import _NAMES, KEYS, REASONS
from rollpacker.config.reading.mistakes import WORDS, _paths, mistakes
from rollpacker.reward.judge.options import JudgeOptions
from rollpacker.sim.world.config import SimulationConfig

JOB = "model: {path: m}\ndata: {path: 'rg:gcd'}\nrewards: [{function: rg}]\n"

# Three of each section: what is given, and what is said of it.
MISTAKES = [
    # top level
    ("learning_rate=1e-5", "unknown key 'learning_rate'; did you mean 'train.learning_rate'?"),
    ("steps=many", "'steps': must be a whole number, got 'many'"),
    ("trackers=[tensorbord, wandbi]", "'trackers.0': must be 'wandb', 'trackio' or 'mlflow', got"),
    # model
    ("model.pth=x", "unknown key 'model.pth'; did you mean 'model.path'?"),
    ("model=Qwen/Qwen3-8B", "'model': must be keys and values such as 'path: Qwen/Qwen3-8B', got"),
    (
        "model.dtype=float16",
        "'model.dtype': must be 'float32' or 'bfloat16', got 'float16'; did you mean 'bfloat16'?",
    ),
    # data
    (
        "data.path=7",
        "'data.path': must be text or a list, got 7; YAML reads it as a number: put it in quotes",
    ),
    ("data.size=-1", "'data.size': must be at least 0, got -1"),
    ("data.options=[a]", "'data.options': must be keys and values, got ['a']"),
    # rewards
    ("rewards=math", "'rewards': must be a list, got 'math'"),
    ("rewards=[math]", "'rewards.0': must be keys and values such as 'function: math', got 'math'"),
    ("rewards=[{function: rg, wieght: 2}]", "unknown key 'rewards.0.wieght'; did you mean"),
    # grading
    ("grading.workers=0", "'grading.workers': must be at least 1, got 0"),
    ("grading.asynchronous=maybe", "'grading.asynchronous': must be true or false, got 'maybe'"),
    ("grading.code_timeout.most_s=1", "'grading.code_timeout': least_s=2 is more than most_s=1"),
    # rollout
    ("rollout.top_p=2", "'rollout.top_p': must be at most 1, got 2"),
    ("rollout.prompts_per_step=1.5", "'rollout.prompts_per_step': must be a whole number, got 1.5"),
    ("rollout.temperature=.nan", "'rollout.temperature': must be a finite number, got nan"),
    # rollout.tail_batching
    (
        "rollout.tail_batching.mode=exakt",
        "'rollout.tail_batching.mode': must be 'exact', 'off', 'race', 'prompts', 'partial' or "
        "'auto', got 'exakt'; did you mean 'exact'?",
    ),
    ("rollout.tail_batching.eta_prompts=5", "must be at most 4, got 5"),
    ("rollout.tail_batching.eta=2", "unknown key 'rollout.tail_batching.eta'"),
    # rollout.streaming
    (
        "rollout.streaming.consolidate_below=never",
        "'rollout.streaming.consolidate_below': must be a whole number or 'auto', got 'never'",
    ),
    ("rollout.streaming.lookahead=no", "'rollout.streaming.lookahead': must be at least 1, got"),
    (
        "rollout.streaming.scaling=on",
        "'rollout.streaming.scaling': must be 'consolidate', 'paper' or 'fixed', got True",
    ),
    # rollout.dynamic_sampling
    ("rollout.dynamic_sampling=true", "'rollout.dynamic_sampling': must be keys and values, got"),
    ("rollout.dynamic_sampling.enable=true", "did you mean 'rollout.dynamic_sampling.enabled'?"),
    ("rollout.dynamic_sampling.max_draws=0", "must be at least 1, got 0"),
    # engine
    ("engine.kind=vlm", "'engine.kind': must be 'mini', 'vllm' or 'fake', got 'vlm'; did you mean"),
    (
        "engine={tensor_parallel: 2}",
        "unknown key 'engine.tensor_parallel'; for it set engine.kind=vllm",
    ),
    (
        "engine={kind: vllm, block_size: 8}",
        "unknown key 'engine.block_size'; for it set engine.kind=mini",
    ),
    ("trainer={shard: 2}", "unknown key 'trainer.shard'; for it set trainer.kind=fsdp"),
    ("engine={max_runing: 3}", "unknown key 'engine.max_runing'; did you mean"),
    # train.algorithm
    (
        "train.algorithm.kind=ppo",
        "'train.algorithm.kind': must be 'grpo', 'dr_grpo', 'dapo', 'rloo'",
    ),
    ("train.algorithm=grpo", "'train.algorithm': must be keys and values such as 'kind: grpo',"),
    ("rollout.tail_batching=race", "must be keys and values such as 'mode: race', got 'race'"),
    (
        "train.algorithm={kind: dr_grpo, epsilon_high: 0.3}",
        "unknown key 'train.algorithm.epsilon_high'; for it set train.algorithm.kind=dapo or gspo",
    ),
    # train
    ("train.learning_rate=fast", "'train.learning_rate': must be a number, got 'fast'"),
    ("train.learning_rate=0", "'train.learning_rate': must be more than 0, got 0"),
    (
        "train.num_generations=4",
        "unknown key 'train.num_generations'; did you mean 'rollout.num_generations' or "
        "'eval.num_generations'?",
    ),
    # devices and cluster
    ("devices.kind=gpu", "'devices.kind': must be 'auto', 'cpu' or 'cuda', got 'gpu'"),
    ("devices.per_node=two", "'devices.per_node': must be a whole number, got 'two'"),
    ("devices=2", "'devices': must be keys and values, got 2"),
    # eval
    ("eval.every=5", "'eval': no problems to measure by: name some in eval.data, or hold"),
    ("eval.data=held_out.jsonl", "'eval.data': must be keys and values such as 'path: held_out"),
    ("eval={data: {path: x}, threshold: high}", "'eval.threshold': must be a number, got 'high'"),
    # checkpoint
    ("checkpoint.keep=1", "'checkpoint.keep': must be at least 2, got 1"),
    ("checkpoint.evry=1", "unknown key 'checkpoint.evry'; did you mean 'checkpoint.every'?"),
    ("checkpoint=[1]", "'checkpoint': must be keys and values, got [1]"),
    # mux
    ("mux.slo=0.5", "'mux.slo': must be at least 1, got 0.5"),
    ("mux.cores={rollout: all}", "'mux.cores.rollout': must be a list, got 'all'"),
    ("mux.cores={1: [0]}", "'mux.cores.1': the key must be text; YAML reads it as a number"),
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
    assert f"{path}: unknown keys 'stepz' (did you mean 'steps'?), 'qqqqqqqq'; override" in line
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
    leaves = {*_paths(RunConfig)}
    assert {key for key in KEYS.values() if key not in leaves} == set()
    assert not KEYS.keys() & REASONS.keys()
    assert len(KEYS) == sum(len(names.split()) for names in _NAMES.values())
    names = [key.rpartition(".")[2] for key in leaves]
    assert not KEYS.keys() & {*names}


def test_several_mistakes_are_said_together(job: Path) -> None:
    given = ["steps=many", "sed=1", "rollout.top_p=2", "model.pth=x"]
    with pytest.raises(config.ConfigError) as error:
        config.load(job, given)
    assert str(error.value) == (
        "override 'steps=many': 'steps': must be a whole number, got 'many'; "
        "override 'model.pth=x': unknown key 'model.pth'; did you mean 'model.path'?; "
        "override 'rollout.top_p=2': 'rollout.top_p': must be at most 1, got 2; "
        "override 'sed=1': unknown key 'sed'; did you mean 'seed'?"
    )


WRONG = [
    *(None, True, -1, 0, 1.5, 10**30, float("nan"), float("inf"), "", "x", "1" * 5000),
    *([], ["x"], [None], {}, {"x": 1}, {1: "x"}, {"kind": "x"}, {"kind": None}, object()),
]


def leaves(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where a value may stand in a valid tree, the tree itself included."""
    yield path
    items: Any = node.items() if isinstance(node, dict) else ()
    items = enumerate(node) if isinstance(node, list) else items
    for key, value in items:
        yield from leaves(value, (*path, key))


def planted(tree: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    changed = dict(tree) if isinstance(tree, dict) else list(tree)
    changed[path[0]] = planted(tree[path[0]], path[1:], value)
    return changed


def full(cls: type[Config], **given: Any) -> Any:
    """A valid tree with every section and every kind of leaf."""
    return cls.model_validate(given).model_dump(mode="json")


EVERYTHING = full(
    RunConfig,
    **yaml.safe_load(JOB),
    eval={"data": {"path": "x", "shots": [{"role": "a", "content": "b"}]}},
    mux={"cores": {"rollout": [1]}},
    trackers=["wandb"],
    rollout={"stop": ["x"]},
)
SIMULATED = yaml.safe_load(
    (Path(__file__).parents[2] / "examples" / "simulate" / "paper-7b-8k.yaml").read_text()
)
TREES = [
    (RunConfig, EVERYTHING),
    *[(RunConfig, planted(EVERYTHING, ("train", "algorithm"), full(each)))
      for each in (config.DAPOConfig, config.GSPOConfig)],
    (RunConfig, planted(EVERYTHING, ("engine",), full(config.FakeEngineConfig))),
    (JudgeOptions, full(JudgeOptions, model="m")),
    (SimulationConfig, full(SimulationConfig, **SIMULATED)),
]  # fmt: skip


def test_every_error_that_can_be_reached_has_words_of_ours() -> None:
    """Wrong values of every sort at every place of the trees."""
    met: set[str] = set()
    for tree, valid in TREES:
        for path in leaves(valid):
            for value in WRONG:
                try:
                    tree.model_validate(planted(valid, path, value))
                except ValidationError as error:
                    met |= {each["type"] for each in error.errors()}
                    for mistake in mistakes(tree, error):
                        text = mistake.text
                        assert "\n" not in text
                        assert len(text) < 600
                        for theirs in ("input should", "Input should", "Value error", "tag "):
                            assert theirs not in text, (path, value, text)
    sentences = {"extra_forbidden", "invalid_key", "missing", "value_error"}
    sentences |= {"union_tag_not_found"}
    assert met <= set(WORDS) | sentences, met - set(WORDS) - sentences
    assert met >= {
        "string_type",
        "literal_error",
        "finite_number",
        "too_short",
        "union_tag_invalid",
    }


def kinds(schema: Any, seen: set[int]) -> Iterator[str]:
    """The sorts of validators in a core schema of pydantic."""
    if id(schema) in seen:
        return
    seen.add(id(schema))
    if isinstance(schema, dict):
        if isinstance(schema.get("type"), str):
            yield schema["type"]
        for value in schema.values():
            yield from kinds(value, seen)
    elif isinstance(schema, list | tuple):
        for value in schema:
            yield from kinds(value, seen)


KNOWN = {
    *("str", "int", "float", "bool", "list", "dict", "any", "none", "nullable", "literal"),
    *("model", "model-fields", "model-field", "default", "union", "tagged-union", "definitions"),
    *("definition-ref", "function-before", "function-after", "function-plain", "no-info"),
    *("with-info", "function-wrap", "computed-field"),
}


@pytest.mark.parametrize("tree", [RunConfig, JudgeOptions, SimulationConfig])
def test_a_new_sort_of_leaf_needs_a_look_at_its_errors(tree: type[BaseModel]) -> None:
    """One that is not here: give it wrong values above, and its errors words."""
    found = set(kinds(tree.__pydantic_core_schema__, set()))
    assert found <= KNOWN, found - KNOWN


def test_a_long_value_is_cut_and_json_stays_readable() -> None:
    with pytest.raises(config.ConfigError) as error:
        config.parse({**yaml.safe_load(JOB), "steps": json.dumps(list(range(999)))})
    assert len(str(error.value)) < 200
