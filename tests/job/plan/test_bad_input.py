"""The user's mistakes: one clear line on standard error, exit code 2."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from runtime_jobs import Workshop, run, write_byte_model, write_model, write_wide_model
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

from rollpacker.cli import main

Capture = pytest.CaptureFixture[str]
Fails = Callable[..., str]
HARMLESS = ("prompt <- ", " steps", "   done    reward")
shop = Workshop.fixture()


@pytest.fixture
def fails(shop: Workshop, monkeypatch: pytest.MonkeyPatch, capfd: Capture) -> Fails:
    """Run ``rollpacker train`` on a job with a mistake; what it says of it, in one line."""

    def run(*words: str, file: Path | None = None, **changes: Any) -> str:
        file = file or shop.file("job", **changes)
        monkeypatch.setattr(sys, "argv", ["rollpacker", "train", str(file), *words])
        capfd.readouterr()
        with pytest.raises(SystemExit) as left:
            main()
        out, err = capfd.readouterr()
        assert left.value.code == 2
        assert out == ""
        # How the data was read, and what the run is, is said before the mistake that is found then.
        *before, last = err.splitlines()
        assert all(any(part in line for part in HARMLESS) for line in before), err
        assert last.startswith("rollpacker: ")
        return last.removeprefix("rollpacker: ")

    return run


def test_unknown_key(fails: Fails) -> None:
    assert "did you mean 'train.learning_rate'" in fails("train.learning_rat=1")
    said = fails(rollout__num_generation=4)
    assert "unknown key 'rollout.num_generation'" in said
    assert "did you mean 'rollout.num_generations'" in said


def test_wrong_type(fails: Fails) -> None:
    said = fails("train.learning_rate=fast")
    assert "'train.learning_rate'" in said
    assert "'fast'" in said
    assert "'rollout.tail_batching.mode'" in fails(mode="turbo")


def test_no_configuration_file(fails: Fails, tmp_path: Path) -> None:
    assert "nowhere.yaml" in fails(file=tmp_path / "nowhere.yaml")


def test_configuration_that_is_no_yaml(fails: Fails, tmp_path: Path) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text("a: [1, 2\nb: }", encoding="utf-8")
    assert "broken.yaml" in fails(file=path)


def test_an_override_without_a_value(fails: Fails) -> None:
    assert "train.learning_rate" in fails("train.learning_rate")


def test_an_unknown_value_of_resume(fails: Fails) -> None:
    assert "'auto'" in fails("--resume", "yes")


def test_no_data_file(fails: Fails, shop: Workshop) -> None:
    said = fails(data__path=str(shop.folder / "row.jsonl"))
    assert "row.jsonl" in said
    assert "did you mean 'rows.jsonl'" in said


def test_empty_data(fails: Fails, tmp_path: Path) -> None:
    path = tmp_path / "empty.jsonl"
    path.touch()
    assert fails(data__path=str(path)) == f"data.path: '{path}' has no rows"


def rows(path: Path, **columns: Any) -> str:
    path.write_text(json.dumps(columns) + "\n", encoding="utf-8")
    return str(path)


def test_no_answers(fails: Fails, tmp_path: Path) -> None:
    data = rows(tmp_path / "d.jsonl", prompt="1 + 1 = ")
    said = fails(data__path=data, rewards=[{"function": "math"}])
    assert "no answer column among ['prompt']: set data.label_key" in said


def test_math_without_answers(fails: Fails, tmp_path: Path) -> None:
    bare = tmp_path / "bare.jsonl"
    bare.write_text('{"id": "q", "prompt": "1"}\n', encoding="utf-8")
    path, key = f"data.path={bare}", 'data.label_key=""'
    line = fails(path, key, "rewards=[{function: math}]", "rollout.prompts_per_step=1")
    assert "rewards.0: 'math' needs an answer, which row 'q' lacks" in line
    assert "data.label_key" in line
    bare.write_text('{"id": "q", "prompt": "1", "answer": " "}\n', encoding="utf-8")
    line = fails(path, "rewards=[{function: math}]", "rollout.prompts_per_step=1")
    assert "rewards.0: 'math' needs an answer, which row 'q' lacks" in line


def test_messages_without_a_chat_template(fails: Fails, tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "12"}]
    data = rows(tmp_path / "d.jsonl", id="first", prompt=turns, answer="1")
    said = fails(data__path=data)
    assert "row 'first'" in said
    assert "no chat template" in said


def test_a_prompt_longer_than_the_context(fails: Fails, tmp_path: Path) -> None:
    data = rows(tmp_path / "d.jsonl", id="long one", prompt="1" * 300, answer="1")
    said = fails(data__path=data)
    assert "'long one'" in said
    assert "data.overlong" in said


def test_responses_longer_than_the_context(fails: Fails) -> None:
    """The length is to blame, not the data."""
    assert fails(rollout__max_completion_length=256) == (
        "rollout.max_completion_length=256 leaves no room for a prompt in the model's context of "
        "256 tokens: lower it, or leave it unset for all tokens behind the longest prompt"
    )
    said = fails(rollout__max_completion_length=254)
    assert "lower rollout.max_completion_length from 254" in said or "leaves no room" in said


def test_one_response_a_prompt(fails: Fails) -> None:
    assert fails(rollout__num_generations=1).startswith("rollout.num_generations=1 trains nothing")


def test_no_rows_to_hold_out(fails: Fails) -> None:
    assert fails(eval={"fraction": 1e-6}).startswith("eval.fraction=1e-06 holds out none of")


def test_another_architecture(fails: Fails, tmp_path: Path) -> None:
    write_byte_model(tmp_path)
    GPT2LMHeadModel(
        GPT2Config(vocab_size=259, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    ).save_pretrained(tmp_path)
    said = fails(model__path=str(tmp_path))
    assert "engine.kind=mini runs llama, qwen2, qwen3 models" in said


def test_a_tokenizer_that_is_larger_than_the_model(
    fails: Fails, shop: Workshop, tmp_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(write_model(tmp_path))
    tokenizer.add_tokens(["<spare>", "000"])
    tokenizer.save_pretrained(tmp_path)
    said = fails(model__path=str(tmp_path))
    assert "its tokenizer's '000' is beyond the model's vocab_size=18, and prompts" in said
    assert "resize_token_embeddings" in said
    tokenizer = AutoTokenizer.from_pretrained(write_model(tmp_path))
    tokenizer.add_tokens("<spare>")
    tokenizer.save_pretrained(tmp_path)
    settings = {"model__path": str(tmp_path), "model__dtype": "bfloat16", "steps": 1}
    said = run(shop.config("larger", "off", **settings))[1]
    assert "'<spare>' is beyond the model's vocab_size=18: no response can contain it" in said
    assert (
        "model.dtype=bfloat16: the run's checkpoints are in bfloat16, and model.path is in fl"
        in said
    )


def test_no_model(fails: Fails, tmp_path: Path) -> None:
    assert "there is no such folder" in fails(model__path=str(tmp_path / "nowhere"))
    assert "no config.json" in fails(model__path=str(tmp_path))
    write_model(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    assert "no tokenizer" in fails(model__path=str(tmp_path))


def test_what_is_not_here_is_said_before_libraries_are_imported(
    fails: Fails, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "rollpacker.job", None)
    assert "there is no such folder" in fails(model__path=str(tmp_path / "nowhere"))
    assert "data.path: no file" in fails(data__path=str(tmp_path / "rows.jsonl"))
    assert "no file matches" in fails(data__path=str(tmp_path / "*.jsonl"))
    assert "no file or folder './rows'" in fails(data__path="./rows")
    held_out = {"data": {"path": str(tmp_path / "held.parquet")}, "every": 1}
    assert "held.parquet" in fails(eval=held_out)


def test_unknown_rewards(fails: Fails, shop: Workshop) -> None:
    said = fails(rewards=[{"function": "maths"}])
    assert "unknown function 'maths'" in said
    said = fails(rewards=[{"function": f"{shop.rewards}:twos"}])
    assert "has no function 'twos'" in said
    assert "nowhere.py" in fails(rewards=[{"function": "nowhere.py:f"}])
    said = fails(rewards=[{"function": f"{shop.rewards}:ones", "name": "a"}] * 2)
    assert "two are named 'a'" in said


@pytest.mark.parametrize("place", ["file/run", "/proc/run"])
def test_a_folder_that_cannot_be_written(fails: Fails, tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    assert place in fails("--out", str(tmp_path / place))


def test_settings_that_contradict_each_other(fails: Fails) -> None:
    said = fails(mode="race", grading={"asynchronous": False})
    assert "grading.asynchronous" in said
    assert "'cuda'" in fails(devices__kind="cuda")


def test_a_model_file_that_is_damaged(fails: Fails, tmp_path: Path) -> None:
    write_model(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert str(tmp_path) in fails(model__path=str(tmp_path), devices__per_node=1)


def test_a_reward_of_the_wrong_shape(fails: Fails, shop: Workshop) -> None:
    """It stops the run in the first step rather than dropping every prompt."""
    said = fails(
        "--out",
        str(shop.folder / "shape"),
        rewards=wrong_shape(shop),
        devices__per_node=1,
        rollout__max_retries=0,
        grading__retries=0,
    )
    assert "reward 'wrong_shape' failed" in said
    assert "returned float 0.5, expected a list of 1 numbers" in said
    assert "judges.py:" in said


def wrong_shape(shop: Workshop) -> list[dict[str, str]]:
    return [{"function": f"{shop.rewards}:wrong_shape"}]


@pytest.mark.parametrize(
    "kind", ["mini", pytest.param("vllm", marks=pytest.mark.cluster)], ids=["mini", "vllm"]
)
def test_a_budget_without_room_for_one_response(fails: Fails, tmp_path: Path, kind: str) -> None:
    shop = Workshop(tmp_path)
    shop.model = write_wide_model(tmp_path / "wide")
    engine = {"kind": kind, "kv_tokens": 32}
    file = shop.file("small", engine=engine, rollout__max_completion_length=40)
    assert fails(file=file) == (
        "an engine has room for 32 tokens of a sequence, too few for a prompt and a response of "
        "40: raise engine.kv_tokens or lower rollout.max_completion_length"
    )
