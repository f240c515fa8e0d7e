import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

from case_files import read_table
from rollpacker.config import RewardConfig
from rollpacker.core.types import AttemptId
from rollpacker.reward.base import START, GradeRequest, GradingError, Scored, TrainerState
from rollpacker.reward.functions import resolve, reward_names

CHAT = [{"role": "user", "content": "1+1"}]

CODE = (Path(__file__).parent / "cases" / "signatures.txt").read_text(encoding="utf-8")


@pytest.fixture
def file(tmp_path) -> Path:
    (tmp_path / "neighbour.py").write_text("SCALE = 1.0\n")
    path = tmp_path / "my_rewards.py"
    path.write_text(CODE)
    return path


def request(completion="2", prompt="1+1", state=START, **row) -> GradeRequest:
    row = {"prompt": prompt, "answer": "2", "level": 3} | row
    return GradeRequest(
        attempt=AttemptId(1),
        prompt=prompt,
        completion=completion,
        completion_ids=[4, 5],
        row=row,
        state=state,
    )


@pytest.mark.parametrize(("name", "expected"), read_table(__file__, "test_signatures"))
def test_signatures(file, name, expected):
    (score,) = resolve(f"{file}:{name}", {})([request()])
    assert score == expected
    assert score is None or type(score) is float


@pytest.mark.parametrize("name", ["an_object", "Asynchronous", "trl_keywords_only"])
def test_columns_may_have_the_name_by_which_an_object_calls_itself(file, name):
    for columns in (None, ["answer", "self", "function"]):
        (score,) = resolve(f"{file}:{name}", {}, None, columns)([request(self=1, function=2)])
        assert score == (3.0 if name == "trl_keywords_only" else 1.0)


def test_groups_are_one_call(file):
    score = resolve(f"{file}:trl", {})
    assert score([request("2"), request("3"), request("2")]) == [1.0, 0.0, 1.0]


def test_conversations(file):
    assert resolve(f"{file}:trl_chat", {})([request("abc", CHAT)]) == [13.0]


def test_options_are_bound(file):
    row = {"extra_info": {"index": 1}, "data_source": "gsm8k"}
    plain = resolve(f"{file}:verl_more", {})([request(**row)])
    assert plain == [1 + 0 + 1 + 1]
    assert resolve(f"{file}:Scaled", {"scale": 2, "offset": 1.0})([request()]) == [3.0]
    assert resolve(f"{file}:verl_more", {"bonus": 0.5})([request(**row)]) == [3.5]
    assert resolve(f"{file}:trl_exact", {"answer": ["9"]})([request("9")]) == [1.0]


def test_modules(file, monkeypatch):
    monkeypatch.syspath_prepend(file.parent)
    assert resolve("my_rewards:trl_exact", {})([request()]) == [1.0]


def test_built_in_rewards_take_options():
    assert resolve("math", {"require_boxed": True})([request("2")]) == [0.0]
    with pytest.raises(ValueError, match="rewards: 'math' takes no option 'boxed'"):
        resolve("math", {"boxed": True})


@pytest.mark.parametrize(("name", "message"), read_table(__file__, "test_nonsense_is_named"))
def test_nonsense_is_named(file, name, message):
    with pytest.raises(GradingError) as caught:
        resolve(f"{file}:{name}", {})([request()])
    line = 1 + file.read_text().split(f"def {name}(")[0].count("\n")
    assert str(caught.value) == f"{file}:{line}: {message}"


def test_what_is_logged_comes_with_the_scores(file):
    state = TrainerState(global_step=3, max_steps=12, epoch=0.75)
    first, second = resolve(f"{file}:trl_logs", {})([request("ab", state=state), request("cd")])
    metrics = {"progress": 0.5}
    assert first == Scored(score=None, extra={"first": "a", "step": "3"}, metrics=metrics)
    assert second == Scored(score=1.0, extra={"first": "c", "step": "12"}, metrics=metrics)
    with pytest.raises(TypeError, match=r"log_metric\('accuracy'\) takes a number, not str 'good'"):
        resolve(f"{file}:logs_text", {})([request()])


def test_other_keys_of_verl_are_metrics_and_columns(file):
    row = {"extra_info": {"index": 1}, "data_source": "gsm8k"}
    (scored,) = resolve(f"{file}:verl", {})([request(**row)])
    assert isinstance(scored, Scored)
    assert scored.score == 1.0
    assert scored.metrics == {"reward_extra/acc/mean": 1.0}
    assert scored.extra["pred"] == "2"
    assert "gsm8k" in scored.extra["seen"]
    assert sorted(scored.extra) == ["pred", "seen"]


def test_the_batch_form_of_verl_is_one_call(file):
    score = resolve(f"{file}:verl_batch", {})
    right, wrong = score([request("2"), request("3")])
    assert right == Scored(score=1.0, metrics={"reward_extra/acc/mean": 1.0})
    assert wrong == 0.0


def test_verl_is_told_the_turns_of_a_conversation(file):
    said = [{"role": role, "content": "2"} for role in ("assistant", "tool", "assistant")]
    long = dataclasses.replace(request(), messages=said)
    assert resolve(f"{file}:verl_turns", {})([long, request()]) == [4.0, 2.0]


def test_a_row_is_not_changed_by_a_function(file):
    row = {"extra_info": {"index": 1}}
    resolve(f"{file}:verl_turns", {})([request(**row)])
    assert row == {"extra_info": {"index": 1}}


def test_a_column_that_some_rows_lack_is_none_there(file):
    score = resolve(f"{file}:trl_exact", {}, columns=["answer", "id"])
    lacking = request("x")
    lacking = dataclasses.replace(lacking, row={"id": 1})
    assert score([lacking, request("2")]) == [0.0, 1.0]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    read_table(__file__, "test_what_nobody_gives_is_found_when_it_is_loaded"),
)  # fmt: skip
def test_what_nobody_gives_is_found_when_it_is_loaded(file, name, options, message):
    with pytest.raises(ValueError, match="rewards: ") as caught:
        resolve(f"{file}:{name}", options, columns=["answer", "color", "id"])
    assert f"rewards: '{file}:{name}' {message.format(file=file)}" in str(caught.value)
    assert "\n" not in str(caught.value)
    given = {"colour": ["red"], "judge": "j", "scale": 1}
    if name in ("missing", "verl_missing"):
        own = {"missing": "colour", "verl_missing": "judge"}[name]
        assert resolve(f"{file}:{name}", {own: given[own]}, columns=["id"])([request()]) == [1.0]


@pytest.mark.parametrize(
    ("function", "message"), read_table(__file__, "test_bad_paths_are_one_line")
)
def test_bad_paths_are_one_line(file, function, message):
    with pytest.raises(ValueError, match=re.escape(message.format(file))) as caught:
        resolve(function.format(file), {})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("x = 1\ndef f(completions:\n", "{}:2: SyntaxError: '(' was never closed"),
        ("x = 1\nimport no_such_thing\n", "{}:2: ModuleNotFoundError: No module named"),
        ("def g():\n    import json; json.loads('{{')\ng()\n", "{}:2 in g: JSONDecodeError: "),
        ("raise SystemExit('no key')\n", "{}:1: SystemExit: no key"),
    ],
)
def test_a_file_that_cannot_be_imported_is_named_with_the_line(tmp_path, code, message):
    path = tmp_path / "broken_rewards.py"
    path.write_text(code.replace("{{", "{"))
    with pytest.raises(ValueError, match="cannot import") as caught:
        resolve(f"{path}:f", {})
    assert f"rewards: cannot import '{path}': {message.format(path)}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_names_must_differ():
    rewards = [RewardConfig(function="a.py:f"), RewardConfig(function="b.py:f")]
    with pytest.raises(ValueError, match=r"two are named 'f': set rewards\.1\.name"):
        reward_names(rewards)
    renamed = [rewards[0], RewardConfig(function="b.py:f", name="g")]
    assert reward_names(renamed) == ["f", "g"]
    assert reward_names([RewardConfig(function="models/reward/")]) == ["reward"]


def test_a_grading_process_imports_nothing_heavy():
    code = (
        "import sys, rollpacker.reward.processes.worker; "
        "heavy = {'numpy', 'torch', 'transformers', "
        "'pydantic', 'polars', 'sympy', 'math_verify', 'reasoning_gym'}; "
        "print(heavy & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
