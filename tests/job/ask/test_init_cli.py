"""``rollpacker init``: what it writes trains as it is."""

import contextlib
import json
import os
import pty
import sys
import threading

import pytest
import yaml
from runtime_jobs import Workshop, run, write_byte_model

from rollpacker import config
from rollpacker.cli import main


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    shop = Workshop(tmp_path_factory.mktemp("init"), rows=3)
    write_byte_model(shop.folder / "bytes", context=512)
    return shop


@pytest.fixture
def init(monkeypatch, capfd):
    """``rollpacker init`` in this process: exit code, standard output, errors."""

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["rollpacker", "init", *map(str, words)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as left:
            main()
        out, err = capfd.readouterr()
        return left.value.code, out, err

    return call


def test_what_it_writes_trains(shop, init, monkeypatch):
    monkeypatch.chdir(shop.folder)
    words = ("--model", "model", "--data", "rows.jsonl", "--reward", "judges.py:ones")
    more = ("--eval-data", "rows.jsonl", "--steps", 1, "--out", "new/job.yaml", "--json")
    code, out, err = init(*words, *more)
    assert code == 0, err
    result = json.loads(out)
    assert result["file"] == "new/job.yaml"
    assert any(line.startswith("3 prompts are few") for line in result["warnings"])
    file = shop.folder / "new" / "job.yaml"
    assert "# " in file.read_text()
    overrides = ["devices.per_node=1", "devices.kind=cpu", "rollout.max_completion_length=20"]
    folder, said = run(config.load(file, overrides))
    assert folder.name == "rows"
    assert json.loads((folder / "summary.json").read_text())["steps"] == 1
    assert "accuracy" in said


def test_the_folder_of_a_reward_model_is_a_reward(shop, init, tmp_path):
    file = tmp_path / "job.yaml"
    words = ("--model", shop.model, "--data", shop.data, "--reward", shop.model, "--out", file)
    code, _, err = init(*words)
    assert code == 0, err
    assert config.load(file).rewards[0].function == str(shop.model)


def test_nothing_is_overwritten(shop, init, tmp_path):
    file = tmp_path / "job.yaml"
    file.write_text("precious")
    words = ("--model", shop.model, "--data", "rg:gcd", "--reward", "rg", "--out", file)
    code, out, err = init(*words)
    assert (code, out) == (2, "")
    assert err == f"rollpacker: {file} exists: choose another file with --out, or use --force\n"
    assert file.read_text() == "precious"
    assert init(*words, "--force")[0] == 0
    assert "function: rg" in file.read_text()


def written(init, tmp_path, **options):
    """The new file's tree and the warnings."""
    file = tmp_path / "job.yaml"
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    code, out, err = init(*words, "--out", file, "--force", "--json")
    assert code == 0, err
    return yaml.safe_load(file.read_text()), json.loads(out)["warnings"]


def rows(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_it_looks_at_the_model_and_the_columns(shop, init, tmp_path):
    data = rows(
        tmp_path / "sums.jsonl", *({"question": f"{i}+1", "answer": "#"} for i in range(80))
    )
    tree, warnings = written(init, tmp_path, model=shop.folder / "bytes", data=data, reward="math")
    assert "boxed" in tree["data"]["system_prompt"]
    assert tree["rollout"]["prompts_per_step"] == 16
    assert 16 < tree["rollout"]["max_completion_length"] < 512
    assert tree["eval"]["fraction"] == 0.1
    assert warnings == []
    # Its prompts lead to an end of a turn that ends nothing.
    base = write_byte_model(tmp_path / "base", context=512, end="<|endoftext|>")
    _, warnings = written(init, tmp_path, model=base, data=data, reward="math")
    assert [line.partition(", but")[0] for line in warnings] == [
        "model.path: its chat template ends a turn with '<|im_end|>'"
    ]
    # A base model gets no system turn; a column of another name is guessed, and said.
    data = rows(tmp_path / "odd.jsonl", {"riddle": "1 2 3 4", "n": "1"}, {"riddle": "2", "n": "2"})
    reward = f"{shop.rewards}:ones"
    tree, warnings = written(init, tmp_path, model=shop.model, data=data, reward=reward)
    assert tree["data"] == {"path": str(data), "label_key": "", "input_key": "riddle"}
    assert any("no chat template" in line for line in warnings)
    assert any("'riddle' is used as the prompt" in line for line in warnings)
    assert any(line.endswith("set its name here: one of ['riddle', 'n']") for line in warnings)
    # Held-out problems are never drawn, even where the files overlap.
    held = rows(tmp_path / "held.jsonl", {"prompt": "1", "answer": "1"})
    data = rows(tmp_path / "all.jsonl", *({"prompt": str(n), "answer": "1"} for n in (1, 2, 3)))
    words = {"model": shop.model, "data": data, "reward": reward, "eval-data": held}
    tree, _ = written(init, tmp_path, **words)
    assert tree["data"]["exclude"] == tree["eval"]["data"]["path"] == str(held)
    # One without a chat template is told in the prompt where the answer belongs.
    bare = write_byte_model(tmp_path / "bare", context=512, chat=False)
    data = rows(tmp_path / "plain.jsonl", {"question": "1+1?", "answer": "2"})
    tree, _ = written(init, tmp_path, model=bare, data=data, reward="math")
    assert tree["data"]["prompt_template"].startswith("{prompt}\nPlease reason")
    # Rows that lack an answer are left out, and said; a system turn of their own is kept.
    data = rows(
        tmp_path / "own.jsonl",
        {"system": "Sum.", "conversations": [{"from": "human", "value": "1"}], "answer": "1"},
        {"conversations": [{"from": "human", "value": "2"}], "answer": float("nan")},
    )
    tree, warnings = written(init, tmp_path, model=shop.folder / "bytes", data=data, reward="math")
    assert tree["data"]["missing"] == "skip"
    assert any("row 1: no answer in column 'answer': set data.missing" in line for line in warnings)
    assert "system_prompt" not in tree["data"]
    assert tree["data"]["prompt_template"].startswith("{prompt}\nPlease reason")
    # A prompt that leaves no room is left out rather than refused.
    data = rows(tmp_path / "long.jsonl", *({"prompt": "1" * n, "answer": "1"} for n in (3, 300)))
    tree, warnings = written(init, tmp_path, model=shop.model, data=data, reward=reward)
    assert tree["data"]["overlong"] == "skip"
    assert any(line.startswith("1 of 2 prompts fill the model's context") for line in warnings)


ASSERTS = {"test_list": ["assert f() == 1"]}


@pytest.mark.skipif(sys.platform != "linux", reason="the code sandbox needs Linux")
def test_rows_for_programs_need_no_answer_and_no_solution_is_a_prompt(shop, init, tmp_path):
    mbpp = {"text": "Write f that gives 1.", "code": "def f():\n    return 1\n" * 9, **ASSERTS}
    data = rows(tmp_path / "mbpp.jsonl", mbpp, {**mbpp, "text": "Write it again."})
    tree, warnings = written(init, tmp_path, model=shop.model, data=data, reward="code")
    assert tree["data"] == {"path": str(data), "label_key": "", "input_key": "text"}
    assert any("'text' is used as the prompt" in line for line in warnings)
    # Of some rows answers are empty: they are no reason to leave those out.
    code = {"prompt": "Write f.", "answer": "", **ASSERTS}
    data = rows(tmp_path / "mix.jsonl", {**code, "answer": "4"}, {**code, "prompt": "Write g."})
    tree, warnings = written(init, tmp_path, model=shop.model, data=data, reward="code")
    assert tree["data"] == {"path": str(data), "label_key": ""}
    data = rows(
        tmp_path / "m.jsonl", {**code, "id": "c0"}, {"id": "m0", "prompt": "2+2", "answer": "4"}
    )
    out = ("--out", tmp_path / "none.yaml")
    code, _, err = init("--model", shop.model, "--data", data, "--reward", "code", *out)
    assert code == 2
    assert "cannot read the tests of row 'm0'" in err
    # What is no prompt by its name, and not the only text, is asked for.
    data = rows(
        tmp_path / "odd.jsonl", {"code": "def f( x ): pass", "solution": "so it is", **ASSERTS}
    )
    code, _, err = init("--model", shop.model, "--data", data, "--reward", "code", *out)
    assert code == 2
    assert err.endswith("set data.input_key\n")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"reward": "maths"}, "--reward maths: expected math, code, rg"),
        ({"reward": "nowhere.py:f"}, "no file 'nowhere.py'"),
        ({"reward": "judges.py:twos"}, "has no function 'twos'"),
        ({"reward": "judge"}, "docs/judge.md"),
        ({"reward": "code"}, "cannot read the tests"),
        ({"data": "row.jsonl"}, "did you mean 'rows.jsonl'"),
        ({"model": "nowhere/at/all"}, "there is no such folder"),
        ({"eval-data": "row.jsonl"}, "did you mean 'rows.jsonl'"),
    ],
)
def test_what_cannot_be_a_job_is_one_line_and_no_file(shop, init, monkeypatch, change, said):
    monkeypatch.chdir(shop.folder)
    options = {"model": "model", "data": "rows.jsonl", "reward": "judges.py:ones"} | change
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    code, out, err = init(*words, "--out", "none.yaml")
    assert (code, out) == (2, "")
    assert said in err.splitlines()[-1]
    assert not (shop.folder / "none.yaml").exists()


def test_without_a_terminal_nothing_is_asked(init, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where no job.yaml is
    code, _, err = init("--data", "rg:gcd")
    assert code == 2
    assert err == "rollpacker: give --model, --reward: init asks on a terminal only\n"


def test_five_questions_on_a_terminal(shop, init, tmp_path, monkeypatch):
    ours, theirs = pty.openpty()
    out = tmp_path / "asked.yaml"
    said = []

    def read():
        with contextlib.suppress(OSError):  # the other end is closed
            while True:
                said.append(os.read(ours, 65536))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    for answer in (shop.model, "rg:gcd", "", "", "7"):
        os.write(ours, f"{answer}\n".encode())
    with (
        open(theirs) as keys,
        open(os.dup(theirs), "w") as screen,
        monkeypatch.context() as patch,
    ):
        patch.setattr(sys, "stdin", keys)
        patch.setattr(sys, "stderr", screen)
        code, printed, _ = init("--out", out, "--json")
    reader.join(60)
    os.close(ours)
    assert code == 0, said
    for question in (b"Model (", b"Prompts (", b"Reward (", b"Held-out", b"Steps"):
        assert b"".join(said).count(question) == 1
    assert json.loads(printed)["file"] == str(out)
    tree = yaml.safe_load(out.read_text())
    assert tree["steps"] == 7
    assert tree["rewards"] == [{"function": "rg"}]
    assert tree["eval"]["fraction"] == 0.1


@pytest.fixture
def theirs(shop):
    """A file of verl for the model and the rows of the workshop."""
    tree = {
        "algorithm": {"adv_estimator": "grpo"},
        "data": {
            "train_files": str(shop.data),
            "train_batch_size": 2,
            "max_response_length": 8,
            "shuffle": False,
        },
        "actor_rollout_ref": {
            "model": {"path": str(shop.model)},
            "actor": {"ppo_mini_batch_size": 1, "entropy_coeff": 0.01},
            "rollout": {"n": 2, "name": "hf"},
        },
        "custom_reward_function": {"path": str(shop.rewards), "name": "ones"},
        "trainer": {"experiment_name": "mine", "total_training_steps": 1, "nnodes": 1},
    }
    file = shop.folder / "verl.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file


def test_what_it_translates_trains(shop, init, theirs, monkeypatch):
    monkeypatch.chdir(shop.folder)
    code, out, err = init("--from", theirs, "--out", "verl_job.yaml")
    assert code == 0, err
    assert out.splitlines() == [
        f"{theirs} (verl): 13 keys translated, 1 ignored (listed at the end of verl_job.yaml), "
        "1 set by hand",
        "wrote verl_job.yaml; next: rollpacker doctor verl_job.yaml (elsewhere: --device H100 "
        "--gpus 8), then rollpacker train verl_job.yaml",
    ]
    refused = (
        "WARNING set by hand: actor_rollout_ref.actor.entropy_coeff (0.01): the loss has no entropy"
    )
    assert err.startswith(refused)
    overrides = ["devices.per_node=1", "devices.kind=cpu", "model.dtype=float32"]
    folder, _ = run(config.load(shop.folder / "verl_job.yaml", overrides))
    assert folder.name == "mine"
    assert json.loads((folder / "summary.json").read_text())["steps"] == 1


def test_a_translation_as_json_and_its_mistakes(init, theirs, tmp_path):
    file = tmp_path / "job.yaml"
    code, out, err = init("--from", theirs, "--out", file, "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert (found["file"], found["framework"]) == (str(file), "verl")
    assert "actor_rollout_ref.rollout.n" in found["translated"]
    assert set(found["unsupported"]) == {"actor_rollout_ref.actor.entropy_coeff"}
    assert found["warnings"] == []
    code, _, err = init("--from", theirs, "--out", file)
    assert code == 2
    assert "--force" in err
    other = tmp_path / "other.yaml"
    code, out, err = init("--from", tmp_path / "none.yaml", "--out", other)
    assert (code, out) == (2, "")
    assert err == f"rollpacker: --from {tmp_path / 'none.yaml'}: no such file\n"
    assert not other.exists()
    code, _, err = init("--world", 2, "--out", other)
    assert (code, err) == (2, "rollpacker: --world needs --from\n")
