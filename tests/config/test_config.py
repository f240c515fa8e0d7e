"""A configuration is read whole, and every mistake is one line that says what to change."""

import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rollpacker import config
from rollpacker.config import Config

SMALLEST: dict[str, Any] = {
    "model": {"path": "model"},
    "data": {"path": "rg:gcd"},
    "rewards": [{"function": "rg"}],
}


def tree(**changes: Any) -> dict[str, Any]:
    """The smallest valid configuration, with dotted keys changed (``__`` for the dot)."""
    data: dict[str, Any] = {key: value for key, value in SMALLEST.items()}
    for dotted, value in changes.items():
        *parents, leaf = dotted.split("__")
        node = data
        for parent in parents:
            node[parent] = dict(node.get(parent, {}))
            node = node[parent]
        node[leaf] = value
    return data


def message(data: dict[str, Any]) -> str:
    """The one line that a wrong configuration is answered with."""
    with pytest.raises(config.ConfigError) as error:
        config.parse(data)
    text = str(error.value)
    assert text.startswith("config: ")
    assert "\n" not in text
    return text.removeprefix("config: ")


def write(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


YAML = "model: {path: m}\ndata: {path: 'rg:gcd'}\nrewards: [{function: rg}]\n"


def test_the_smallest_configuration_takes_every_default() -> None:
    run = config.parse(SMALLEST)
    assert run.rollout.tail_batching.mode == "exact"
    assert isinstance(run.engine, config.MiniEngineConfig)
    assert isinstance(run.train.algorithm, config.GRPOConfig)
    assert run.eval is None


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"sede": 1}, "unknown key 'sede'; did you mean 'seed'?"),
        ({"model__pth": "x"}, "unknown key 'model.pth'; did you mean 'model.path'?"),
        (
            {"rollout__num_generation": 4},
            "unknown key 'rollout.num_generation'; did you mean 'rollout.num_generations'?",
        ),
        (
            {"rollout__tail_batching__eta_prompt": 2},
            "unknown key 'rollout.tail_batching.eta_prompt';"
            " did you mean 'rollout.tail_batching.eta_prompts'?",
        ),
        (
            {"eval": {"data": {"path": "x", "spilt": "test"}}},
            "unknown key 'eval.data.spilt'; did you mean 'eval.data.split'?",
        ),
        ({"qqqqqqqq": 1}, "unknown key 'qqqqqqqq'"),
    ],
)
def test_an_unknown_key_is_answered_with_the_nearest_valid_one(
    changes: dict[str, Any], expected: str
) -> None:
    assert message(tree(**changes)) == expected


def test_an_unknown_key_in_a_list_names_its_place() -> None:
    text = message(tree(rewards=[{"function": "rg"}, {"function": "rg", "wieght": 2}]))
    assert text == "unknown key 'rewards.1.wieght'; did you mean 'rewards.1.weight'?"


def test_an_unknown_key_in_a_union_names_a_key_of_the_chosen_kind() -> None:
    dapo = message(tree(train__algorithm={"kind": "dapo", "epsilon_hihg": 0.3}))
    assert dapo == (
        "unknown key 'train.algorithm.epsilon_hihg'; did you mean 'train.algorithm.epsilon_high'?"
    )
    mini = message(tree(engine={"kind": "mini", "max_runing": 3}))
    assert mini == "unknown key 'engine.max_runing'; did you mean 'engine.max_running'?"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seed": "many"}, ("'seed'", "integer", "'many'")),
        ({"rollout__prompts_per_step": 0}, ("'rollout.prompts_per_step'", "equal to 1", "got 0")),
        ({"rollout__top_p": 2}, ("'rollout.top_p'", "equal to 1", "got 2")),
        ({"rollout__tail_batching__mode": "fast"}, ("mode'", "'exact'", "'auto'", "'fast'")),
        ({"model": "m"}, ("'model'", "got 'm'")),
        (
            {"train__lr_scheduler_type": "cosine", "rollout__dynamic_sampling__enabled": True},
            ("train.lr_scheduler_type=cosine ends with the last step", "set 'steps'"),
        ),
        ({"rewards": []}, ("'rewards'", "at least 1")),
        ({"train__learning_rate": "1e-3x"}, ("'train.learning_rate'", "number")),
        ({"engine": {"kind": "fake", "lengths": [1, "x"]}}, ("'engine.lengths.1'", "'x'")),
        (
            {"rollout__streaming__lookahead": "never"},
            ("'rollout.streaming.lookahead'", "'never'"),
        ),
        ({"trackers": ["tensorbord"]}, ("trackers.0", "'wandb'", "'tensorbord'")),
    ],
)
def test_a_wrong_value_names_the_key_what_is_valid_and_what_was_given(
    changes: dict[str, Any], words: tuple[str, ...]
) -> None:
    text = message(tree(**changes))
    for word in words:
        assert word in text


@pytest.mark.parametrize(
    ("reward", "size", "limit_s"),
    [
        ({"function": "math"}, 1, 10.0),
        ({"function": "math", "batch": 8, "timeout_s": 3}, 8, 3.0),
        ({"function": "judge"}, 16, 300.0),
        ({"function": "judge", "batch": 1, "timeout_s": 20}, 1, 20.0),
        ({"function": "judge", "needs_group": True}, 1, 300.0),
        ({"function": "code", "batch": 1}, 1, 10.0),
    ],
)
def test_a_judge_is_called_for_more_at_once_and_for_longer(
    reward: dict[str, Any], size: int, limit_s: float
) -> None:
    (read,) = config.parse(tree(rewards=[reward])).rewards
    assert (read.call_size, read.call_limit_s) == (size, limit_s)


@pytest.mark.parametrize(
    ("reward", "problem"),
    [
        ({"function": "judge", "needs_group": True, "batch": 4}, "needs_group and batch=4"),
        ({"function": "code", "batch": 2}, "batch=2: 'code' runs the programs of one response"),
        ({"function": "math", "batch": 0}, "'rewards.0.batch'"),
    ],
)
def test_batches_that_make_no_sense_are_refused(reward: dict[str, Any], problem: str) -> None:
    assert problem in message(tree(rewards=[reward]))


@pytest.mark.parametrize("key", ["model", "data", "rewards"])
def test_a_required_key_that_is_missing_is_named(key: str) -> None:
    data = tree()
    del data[key]
    assert message(data) == f"'{key}' is required"


def test_several_mistakes_are_all_named() -> None:
    assert message({}) == "'model' is required; 'data' is required; 'rewards' is required"
    many = tree(**{f"rollout__{key}": "x" for key in ("top_p", "top_k", "temperature", "stop")})
    text = message(many | {"seed": "x", "steps": "x", "epochs": "x"})
    assert text.count("must be") == 7


@pytest.mark.parametrize(
    ("kind", "cls"),
    [
        ("grpo", config.GRPOConfig),
        ("dr_grpo", config.DrGRPOConfig),
        ("dapo", config.DAPOConfig),
        ("rloo", config.RLOOConfig),
        ("reinforce_pp", config.ReinforcePPConfig),
        ("gspo", config.GSPOConfig),
    ],
)
def test_an_algorithm_is_chosen_by_its_kind(kind: str, cls: type) -> None:
    assert type(config.parse(tree(train__algorithm={"kind": kind})).train.algorithm) is cls


def test_an_unknown_kind_lists_the_known_ones() -> None:
    text = message(tree(train__algorithm={"kind": "ppo"}))
    for kind in ("train.algorithm", "'ppo'", "'grpo'", "'gspo'"):
        assert kind in text
    assert "'fake'" in message(tree(engine={"kind": "vlm"}))


def test_overrides_replace_values_and_make_missing_parents(tmp_path: Path) -> None:
    path = write(tmp_path, YAML)
    run = config.load(
        path,
        [
            "seed=3",
            "rollout.tail_batching.mode=race",
            "rollout.tail_batching.eta_prompts=1.5",
            "train.algorithm={kind: dapo, epsilon_high: 0.3}",
            "rollout.stop=[a, b]",
            "data.label_key=",
            "model.path=a=b",
        ],
    )
    assert run.seed == 3
    assert run.rollout.tail_batching.mode == "race"
    assert run.rollout.tail_batching.eta_prompts == 1.5
    assert run.train.algorithm == config.DAPOConfig(epsilon_high=0.3)
    assert run.rollout.stop == ["a", "b"]
    assert run.data.label_key is None
    assert run.model.path == "a=b"


def test_a_number_in_exponent_notation_needs_no_point(tmp_path: Path) -> None:
    assert (
        config.load(write(tmp_path, YAML), ["train.learning_rate=3e-4"]).train.learning_rate == 3e-4
    )


@pytest.mark.parametrize("item", ["seed", "=1", "seed=[1", "sed=1"])
def test_a_wrong_override_is_one_line(tmp_path: Path, item: str) -> None:
    with pytest.raises(config.ConfigError) as error:
        config.load(write(tmp_path, YAML), [item])
    assert "\n" not in str(error.value)
    assert item.partition("=")[0] in str(error.value)


def test_the_override_that_is_wrong_is_named_and_not_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, YAML)
    with pytest.raises(config.ConfigError, match=r"^override 'train.learning_rate=fast': "):
        config.load(path, ["seed=1", "train.learning_rate=fast"])
    with pytest.raises(config.ConfigError, match=r"^override 'train.lerning_rate=1': unknown key"):
        config.load(path, ["train.lerning_rate=1"])
    path.write_text(YAML + "\nnonsense: 1\n")
    with pytest.raises(config.ConfigError, match=rf"^{re.escape(str(path))}: unknown key"):
        config.load(path, ["seed=1"])


def test_the_override_of_a_key_in_a_union_is_named_too(tmp_path: Path) -> None:
    path = write(tmp_path, YAML)
    with pytest.raises(config.ConfigError) as error:
        config.load(path, ["engine.kind=mini", "engine.max_runing=3"])
    assert str(error.value) == (
        "override 'engine.max_runing=3': unknown key 'engine.max_runing';"
        " did you mean 'engine.max_running'?"
    )
    given = ["train.algorithm.kind=dapo", "train.algorithm.epsilon_high=wide"]
    with pytest.raises(config.ConfigError) as error:
        config.load(path, given)
    assert str(error.value).startswith(f"override '{given[1]}': 'train.algorithm.epsilon_high': ")
    given = ["rollout.streaming.lookahead=never"]
    with pytest.raises(config.ConfigError, match=rf"^override '{given[0]}': "):
        config.load(path, given)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("# later\n", "holds no keys; rollpacker init writes a first job file"),
        ("- a\n- b\n", "expected keys and values, found list"),
        ("model: [\n", "cannot be read as YAML"),
        ("a: b: c\n", "cannot be read as YAML"),
    ],
)
def test_a_file_without_a_mapping_is_refused(tmp_path: Path, text: str, expected: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(config.ConfigError) as error:
        config.load(path)
    assert str(error.value).startswith(f"{path}: {expected}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["set -x\npython3 -m verl data.seed=1 $@\n", "A=a: b: c\n"])
def test_a_launch_script_is_told_what_translates_it(tmp_path: Path, text: str) -> None:
    for name, hinted in (("run.sh", True), ("grpo.py", True), ("job.yaml", False)):
        (tmp_path / name).write_text(text)
        with pytest.raises(config.ConfigError) as error:
            config.load(tmp_path / name)
        hint = f"; a launch script of verl or TRL: rollpacker init --from {tmp_path / name}"
        assert str(error.value).endswith(hint) == hinted


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(config.ConfigError, match="no such config file"):
        config.load(tmp_path / "none.yaml")
    with pytest.raises(config.ConfigError, match="cannot be read") as error:
        config.load(tmp_path)
    assert str(tmp_path) in str(error.value)


def test_the_tree_is_frozen_and_equal_by_value() -> None:
    run = config.parse(SMALLEST)
    with pytest.raises(ValidationError, match="frozen"):
        run.seed = 1  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ValidationError, match="frozen"):
        run.rollout.tail_batching.mode = "off"  # pyright: ignore[reportAttributeAccessIssue]
    assert run == config.parse(SMALLEST)


def test_a_resolved_configuration_reads_back_as_itself() -> None:
    run = config.parse(tree(train__algorithm={"kind": "dapo"}, eval={"data": {"path": "x"}}))
    assert config.parse(run.model_dump(mode="json")) == run


def nodes(cls: type[Config] = Config) -> list[type[Config]]:
    return [each for sub in cls.__subclasses__() for each in (sub, *nodes(sub))]


@pytest.mark.parametrize("node", nodes(), ids=lambda node: node.__name__)
def test_every_key_is_described(node: type[Config]) -> None:
    assert node.__doc__
    for name, field in node.model_fields.items():
        subtree = isinstance(field.annotation, type) and issubclass(field.annotation, Config)
        described = field.description or subtree or name in {"kind", "algorithm", "engine"}
        described = described or name in {"rewards", "environment", "eval", "trainer"}
        assert described, f"{node.__name__}.{name} has no docstring in config/"


@pytest.mark.parametrize("key", ["rollout.tail_batching.mode", "rollout.planner"])
def test_a_bare_off_is_a_choice_of_that_name(tmp_path: Path, key: str) -> None:
    *parents, leaf = key.split(".")
    text = f"{leaf}: off"
    for parent in reversed(parents):
        text = f"{parent}: {{{text}}}"
    for file, given in ((YAML + text, []), (YAML, [f"{key}=off"])):
        node: Any = config.load(write(tmp_path, file), given).model_dump()
        for each in key.split("."):
            node = node[each]
        assert node == "off"


def test_false_stays_what_it_is_where_off_is_no_choice(tmp_path: Path) -> None:
    with pytest.raises(config.ConfigError, match=r"rollout.streaming.scaling"):
        config.load(write(tmp_path, YAML), ["rollout.streaming.scaling=never"])
    assert not config.load(write(tmp_path, YAML), ["data.shuffle=off"]).data.shuffle


def test_a_key_of_the_usual_engine_or_algorithm_needs_no_kind(tmp_path: Path) -> None:
    """It is that of the default; a ``kind`` alone still takes the defaults of its member."""
    path = write(tmp_path, YAML + "engine: {max_running: 2}\n")
    run = config.load(path, ["train.algorithm.epsilon=0.1", "engine.kv_tokens=64"])
    assert run.engine == config.MiniEngineConfig(max_running=2, kv_tokens=64)
    assert run.train.algorithm == config.GRPOConfig(epsilon=0.1)
    assert config.load(path, ["train.algorithm.kind=gspo"]).train.algorithm == config.GSPOConfig()
    assert message(tree(engine__max_runing=2)) == (
        "unknown key 'engine.max_runing'; did you mean 'engine.max_running'?"
    )


def test_a_fixed_timeout_has_no_shortest_one() -> None:
    tree = {"model": {"path": "m"}, "data": {"path": "d"}, "rewards": [{"function": "code"}]}
    timeout = {"adaptive": False, "most_s": 1.0}
    found = config.parse(tree | {"grading": {"code_timeout": timeout}})
    assert found.grading.code_timeout.most_s == 1.0


def test_a_key_that_is_the_beginning_of_one_names_it() -> None:
    assert "did you mean 'rollout.prompts_per_step'?" in message(tree(rollout__prompts=2))
    said = message(tree(rollout__tail_batching__eta_p=2))
    assert "did you mean 'rollout.tail_batching.eta_prompts'?" in said
