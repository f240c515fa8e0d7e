"""The examples that train a model of 0.2M parameters, examples/code and examples/tools: their
problems, what the model has read, tools and rewards, and a short run of each."""

import asyncio
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from case_files import read_table
from importing import imported
from rollpacker.config import load
from rollpacker.data.load import load_rows
from rollpacker.env.template import Template
from rollpacker.env.template_check import check
from rollpacker.env.tools import ToolsEnvironment, tools_of
from rollpacker.job import train
from rollpacker.reward.code.blocks import find_program
from rollpacker.sandbox import Limits, Sandbox, read_tests

ROOT = Path(__file__).parents[2]
CODE, TOOLS = ROOT / "examples" / "code", ROOT / "examples" / "tools"
RIGHT = {"short": False, "inverted": False, "backwards": False}
GOOD = {"at_once": 0.0, "other": 0.0, "broken": 0.0, "unknown": 0.0}


@pytest.fixture(scope="module")
def code() -> Iterator[Any]:
    with imported(CODE, "problems", "corpus", "prepare") as modules:
        yield modules


@pytest.fixture(scope="module")
def example() -> Iterator[Any]:
    with imported(TOOLS, "tasks", "tools", "reward", "corpus", "prepare") as modules:
        yield modules


@pytest.fixture(scope="module")
def tokenizer(example: Any) -> Any:
    return example.prepare.build_tokenizer()


@pytest.mark.parametrize(("folder", "trained", "heldout"), [(CODE, 640, 256), (TOOLS, 960, 200)])
def test_training_and_evaluation_share_no_question(
    folder: Path, trained: int, heldout: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    config = load(folder / "train.yaml")
    assert config.eval is not None
    ours, theirs = ([r.prompt for r in load_rows(d).rows] for d in (config.data, config.eval.data))
    assert (len({*ours}), len({*theirs})) == (len(ours), len(theirs)) == (trained, heldout)
    assert not {*ours} & {*theirs}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("folder", "steps", "size", "column"),
    [(CODE, 2, 2, "code_verdict"), (TOOLS, 60, 4, "rewards/right")],
)
def test_the_run(
    folder: Path,
    steps: int,
    size: int,
    column: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    command = f"from prepare import *; prepare(Path(sys.argv[1]), steps={steps})"
    model = tmp_path / "model"
    subprocess.run([sys.executable, "-c", command, str(model)], cwd=folder, check=True)
    monkeypatch.chdir(ROOT)
    small = [f"rollout.prompts_per_step={size}", f"rollout.num_generations={size}"]
    own = [f"model.path={model}", f"output={tmp_path / 'run'}", "steps=1", "eval=null"]
    one = ["devices.per_node=1", "devices.pin=false", "grading.workers=1"]
    train(load(folder / "train.yaml", [*small, *own, *one]))
    samples = pl.read_parquet(tmp_path / "run" / "samples" / "*.parquet")
    assert samples.height == size**2
    assert samples[column].null_count() == 0
    assert folder is CODE or samples["tool_calls"].sum() > 0


# examples/code


@pytest.mark.parametrize(("loop", "mistake", "verdict"), read_table(__file__, "test_programs"))
def test_programs(code: Any, loop: bool, mistake: str | None, verdict: str) -> None:
    mistakes = RIGHT | ({mistake: True} if mistake else {})
    # Loops that do not end are worth no long wait.
    limit_s = 0.02 if verdict == "tle_cpu" else 0.1
    found: list[str] = []
    with Sandbox("standard", check=False, limits=Limits(memory_mb=256)) as sandbox:
        for problem in code.problems.train_problems(24, 5):
            if mistake == "inverted" and not problem.divisor:
                continue
            response = code.corpus.program(problem, loop=loop, **mistakes)
            tests = read_tests({"tests": problem.tests()})
            program = find_program(response)
            assert program is not None
            found.append(sandbox.run(program.code, tests, limit_s, stop_early=True).verdict)
    assert found == [verdict] * len(found)


def test_every_text_is_spelled_by_the_tokenizer(code: Any) -> None:
    tokenizer = code.prepare.build_tokenizer()
    rng = random.Random(0)
    for problem in code.problems.train_problems(300, 0):
        for text in (problem.question(), code.corpus.sample(problem, rng, code.corpus.Habits())):
            ids = tokenizer(text)["input_ids"]
            assert tokenizer.decode(ids) == text
            assert len(ids) < 48


# examples/tools


def crowd(example: Any, count: int, **habits: float) -> list[tuple[Any, list[dict[str, str]]]]:
    """Tasks, each with a conversation of the crowd."""
    rng = random.Random(0)
    chosen = example.corpus.Habits(**habits)
    tasks = example.tasks.train_tasks(count, 0)
    return [(task, example.corpus.sample(task, rng, chosen)) for task in tasks]


def test_more_rows_than_there_are_draws_of_are_refused(
    example: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(example.tasks, "_MOST_DRAWS", 40)
    with pytest.raises(ValueError, match=r"^only \d+ such tasks are drawn, asked for size=50$"):
        example.tasks.train_rows(50)


def test_the_calculator_agrees_with_the_answers(example: Any) -> None:
    for row in example.tasks.train_rows(300, 3):
        expression = row["question"].removeprefix("What is ").removesuffix("?")
        assert example.tools.calculate(expression) == row["answer"]


def test_the_calculator_follows_brackets_and_signs(example: Any) -> None:
    assert example.tools.calculate(" -(2 + 3) * 4 - -1 ") == "-19"


@pytest.mark.parametrize(
    "expression", read_table(__file__, "test_the_calculator_takes_nothing_else")
)
def test_the_calculator_takes_nothing_else(example: Any, expression: str) -> None:
    with pytest.raises(ValueError, match=r"^only whole numbers with"):
        example.tools.calculate(expression)


@pytest.mark.parametrize("expression", ["9 + " * 25 + "9", "(" * 4000, "-" * 4000 + "1"])
def test_the_calculator_takes_nothing_long(example: Any, expression: str) -> None:
    with pytest.raises(ValueError, match="more than 100 characters"):
        example.tools.calculate(expression)


def test_every_conversation_is_spelled_by_the_tokenizer(example: Any, tokenizer: Any) -> None:
    for _, messages in crowd(example, 300):
        made = tokenizer.apply_chat_template(
            messages,
            tools=[example.prepare.SCHEMA],
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        ids, said = made["input_ids"], made["assistant_masks"]
        text = tokenizer.decode(ids)
        assert '"name": "calculate"' in text
        assert tokenizer.unk_token_id not in ids
        assert len(ids) < 120
        spoken = tokenizer.decode([each for each, own in zip(ids, said, strict=True) if own])
        replies = [m["content"] for m in messages if m["role"] == "assistant"]
        assert spoken == "".join(f"{reply}<|im_end|>" for reply in replies)


def test_any_text_can_be_spelled(tokenizer: Any) -> None:
    text = "".join(map(chr, range(32, 127))) + "\nSome answer: 12"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids) == text


def test_the_template_keeps_conversations_as_they_are(example: Any, tokenizer: Any) -> None:
    template = Template(tokenizer, {})
    tools = [example.prepare.SCHEMA]
    assert check(template, tools) == []
    assert (template.call_format, template.closing) == ("hermes", "<|im_end|>")
    for _, messages in crowd(example, 60):
        ids = template.prompt(messages[:1], tools)
        for place in range(1, len(messages) - 1, 2):
            reply = template.tokens(messages[place]["content"] + template.closing)
            ids += reply + template.delta(reply, [messages[place + 1]], tools)
        whole = tokenizer.apply_chat_template(
            messages[:-1], tools=tools, add_generation_prompt=True, return_dict=True
        )
        assert ids == whole["input_ids"]


@pytest.mark.parametrize("habits", [{}, {"broken": 1.0}, {"unknown": 1.0}, {"other": 1.0}])
def test_the_crowd_has_read_what_tools_answer(
    example: Any, tokenizer: Any, habits: dict[str, float]
) -> None:
    template = Template(tokenizer, {})
    environment = ToolsEnvironment(tools_of([example.tools.calculate], "path"))
    for _, messages in crowd(example, 60, **habits):
        for place in range(1, len(messages), 2):
            reply = template.reply(template.tokens(messages[place]["content"] + "<|im_end|>"))
            turn = asyncio.run(environment.step(reply.message))
            assert turn.done == (place == len(messages) - 1)
            answers = [each["content"] for each in messages[place + 1 : place + 2]]
            assert [each["content"] for each in turn.messages] == answers


@pytest.mark.parametrize(
    ("habits", "answers", "share"),
    [
        (GOOD, {"right"}, 1.0),
        (GOOD | {"other": 1.0}, {"wrong"}, 0.0),
        (GOOD | {"broken": 1.0, "again": 1.0}, {"Error: the call is no valid JSON"}, 0.0),
        (GOOD | {"unknown": 1.0, "again": 0.0}, {"Error: there is no tool 'calculator'"}, 0.0),
        ({"at_once": 1.0}, set[str](), 0.0),
    ],
)
def test_habits(example: Any, habits: dict[str, float], answers: set[str], share: float) -> None:
    found = crowd(example, 100, **habits)
    kinds = {
        kind(each["content"], str(task.answer))
        for task, messages in found
        for each in messages
        if each["role"] == "tool"
    }
    assert kinds == answers
    right = [example.reward.final_number(m) == str(task.answer) for task, m in found]
    # Some expressions that were not asked for, and some estimates, have the value by chance.
    assert abs(sum(right) / len(right) - share) < 0.05


def kind(content: str, answer: str) -> str:
    if content.startswith("Error"):
        return ":".join(content.split(":")[:2])
    return "right" if content == answer else "wrong"


def said(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content} | more


def told(content: str) -> dict[str, Any]:
    return {"role": "tool", "name": "calculate", "content": content}


CALL = said("", tool_calls=[{"function": {"name": "calculate", "arguments": "{}"}}])
BAD = said("", bad_calls=[{"place": 0, "error": "no JSON", "id": "1"}])


@pytest.mark.parametrize(
    ("messages", "score", "calls"),
    [
        ([said("The answer is -12.")], 1.0, None),
        ([said("2 - 14 is -12")], 1.0, None),
        ([said("The answer is 12.")], 0.0, None),
        ([said("The answer is -120.")], 0.0, None),
        ([said("-12 or 3")], 0.0, None),
        ([said("Minus twelve.")], 0.0, None),
        ([CALL, told("-12"), said("The answer is -12.")], 1.0, 1.0),
        ([CALL, told("-12"), said("The answer is 9.")], 0.0, 1.0),
        ([BAD, told("Error: x"), CALL, told("-12"), said("-12")], 1.0, 0.5),
        ([CALL, told("-12")], 0.0, 1.0),
        ([CALL, told("-12"), said("-12", tool_calls=CALL["tool_calls"])], 0.0, 1.0),
        ([CALL, told("-12"), said("-12", bad_calls=BAD["bad_calls"])], 0.0, 1.0),
    ],
)
def test_the_reward(
    example: Any, messages: list[dict[str, Any]], score: float, calls: float | None
) -> None:
    logged: list[tuple[str, float]] = []

    def log_metric(name: str, value: float) -> None:
        logged.append((name, value))

    given: dict[str, Any] = {"prompts": ["?"], "answer": ["-12"], "log_metric": log_metric}
    assert example.reward.right(completions=[messages], **given) == [score]
    assert logged == ([] if calls is None else [("tools/right_calls", calls)])
