import re
import subprocess
import sys
from pathlib import Path

import pytest

from rollpacker.config import RewardConfig
from rollpacker.core.types import AttemptId
from rollpacker.reward.base import GradeRequest, GradingError
from rollpacker.reward.functions import resolve, reward_names

CHAT = [{"role": "user", "content": "1+1"}]

CODE = """
import asyncio, sys, numpy
from neighbour import SCALE

def trl(prompts, completions, completion_ids, answer, **columns):
    assert sorted(columns) == ["level"], columns
    return [SCALE * float(c == a) for c, a in zip(completions, answer)]

def trl_exact(completions, answer):
    return [c == a for c, a in zip(completions, answer)]

async def trl_async(completions, **_):
    await asyncio.sleep(0)
    return [float(len(c)) for c in completions]

def trl_chat(prompts, completions, **_):
    return [float(len(c[0]["content"]) + 10 * len(p)) for p, c in zip(prompts, completions)]

def trl_ids(completion_ids, **_):
    return [sum(ids) for ids in completion_ids]

def trl_array(completions, **_):
    return numpy.ones(len(completions), dtype="float32")

def not_applicable(completions, **_):
    return [None for _ in completions]

def verl(data_source, solution_str, ground_truth, extra_info):
    return {"score": numpy.float32(solution_str == ground_truth), "acc": True,
            "seen": (data_source, extra_info)}

def verl_more(solution_str, ground_truth, extra_info=None, bonus=0.0, **kwargs):
    return (solution_str == ground_truth) + bonus + extra_info["index"] + len(kwargs)

class Callable:
    def __call__(self, completions, **columns):
        return [1.0] * len(completions)

an_object = Callable()

def string(completions, **_): return ["1.0"]
def too_many(completions, **_): return [1.0, 2.0]
def scalar(completions, **_): return 1.0
def infinite(completions, **_): return [float("inf")]
def not_a_number(solution_str, ground_truth): return float("nan")
def no_score(solution_str, ground_truth): return {"acc": 1.0}
def missing(completions, colour): return [1.0]
def strange(a, b): return 1.0
"""


@pytest.fixture
def file(tmp_path) -> Path:
    (tmp_path / "neighbour.py").write_text("SCALE = 1.0\n")
    path = tmp_path / "my_rewards.py"
    path.write_text(CODE)
    return path


def request(completion="2", prompt="1+1", **row) -> GradeRequest:
    row = {"prompt": prompt, "answer": "2", "level": 3} | row
    return GradeRequest(
        attempt=AttemptId(1), prompt=prompt, completion=completion, completion_ids=[4, 5], row=row
    )


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("trl", 1.0),
        ("trl_exact", 1.0),
        ("trl_async", 1.0),
        ("trl_ids", 9.0),
        ("trl_array", 1.0),
        ("not_applicable", None),
        ("verl", 1.0),
        ("an_object", 1.0),
    ],
)
def test_signatures(file, name, expected):
    (score,) = resolve(f"{file}:{name}", {})([request()])
    assert score == expected
    assert score is None or type(score) is float


def test_groups_are_one_call(file):
    score = resolve(f"{file}:trl", {})
    assert score([request("2"), request("3"), request("2")]) == [1.0, 0.0, 1.0]


def test_conversations(file):
    assert resolve(f"{file}:trl_chat", {})([request("abc", CHAT)]) == [13.0]


def test_options_are_bound(file):
    row = {"extra_info": {"index": 1}, "data_source": "gsm8k"}
    plain = resolve(f"{file}:verl_more", {})([request(**row)])
    assert plain == [1 + 0 + 1 + 1]
    assert resolve(f"{file}:verl_more", {"bonus": 0.5})([request(**row)]) == [3.5]
    assert resolve(f"{file}:trl_exact", {"answer": ["9"]})([request("9")]) == [1.0]


def test_modules(file, monkeypatch):
    monkeypatch.syspath_prepend(file.parent)
    assert resolve("my_rewards:trl_exact", {})([request()]) == [1.0]


def test_built_in_rewards_take_options():
    assert resolve("math", {"require_boxed": True})([request("2")]) == [0.0]
    with pytest.raises(ValueError, match="rewards: 'math' takes no option 'boxed'"):
        resolve("math", {"boxed": True})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("string", "returned str '1.0', expected a number"),
        ("too_many", "returned list [1.0, 2.0], expected a list of 1 numbers"),
        ("scalar", "returned float 1.0, expected a list of 1 numbers"),
        ("infinite", "returned inf, expected a finite number"),
        ("not_a_number", "returned nan, expected a finite number"),
        ("no_score", "returned a dict without 'score'"),
    ],
)
def test_nonsense_is_named(file, name, message):
    with pytest.raises(GradingError) as caught:
        resolve(f"{file}:{name}", {})([request()])
    assert str(caught.value) == f"reward '{file}:{name}' {message}"


def test_a_missing_column_is_named(file):
    with pytest.raises(TypeError, match="colour"):
        resolve(f"{file}:missing", {})([request()])


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            "maths",
            "rewards: unknown function 'maths': expected math, code, rg, path/to/file.py",
        ),
        ("no.such:thing", "rewards: cannot import 'no.such': ModuleNotFoundError"),
        ("nowhere.py:f", "rewards: cannot import 'nowhere.py': FileNotFoundError: no file"),
        ("{}:nothing", "has no function 'nothing'"),
        ("{}:strange", "has neither TRL's signature (prompts, completions, completion_ids"),
    ],
)
def test_bad_paths_are_one_line(file, function, message):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        resolve(function.format(file), {})
    assert "\n" not in str(caught.value)


def test_names_must_differ():
    rewards = [RewardConfig(function="a.py:f"), RewardConfig(function="b.py:f")]
    with pytest.raises(ValueError, match=r"two are named 'f': set rewards\.1\.name"):
        reward_names(rewards)
    renamed = [rewards[0], RewardConfig(function="b.py:f", name="g")]
    assert reward_names(renamed) == ["f", "g"]


def test_a_grading_process_imports_nothing_heavy():
    code = (
        "import sys, rollpacker.reward.worker; heavy = {'torch', 'transformers', 'pydantic', "
        "'polars', 'sympy', 'math_verify', 'reasoning_gym'}; print(heavy & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
