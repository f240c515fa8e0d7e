"""``rollpacker eval`` on the checkpoint of a real run, and what the run itself said of it."""

import json
import re
import sys

import pytest
import yaml
from runtime_jobs import Workshop, run, write_rows

from rollpacker.cli import main

EVAL = {"num_generations": 4, "threshold": 0.5, "every": 1}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    shop = Workshop(tmp_path_factory.mktemp("eval"))
    held_out = str(write_rows(shop.folder / "held_out.jsonl", 5))
    changes = {
        "steps": 2,
        "devices__per_node": 1,
        "eval": {"data": {"path": held_out}, "every": 1, **EVAL},
    }
    file = shop.file("run", **changes)
    folder, said = run(shop.config("run", **changes))
    summary = json.loads((folder / "summary.json").read_text())
    return folder, said, summary, file


@pytest.fixture
def evaluate(trained, monkeypatch, capfd):
    """``rollpacker eval`` in this process: exit code, standard output, last line of errors."""

    def call(checkpoint, *words, config=trained[3]):
        argv = ["rollpacker", "eval", checkpoint, config, *words]
        monkeypatch.setattr(sys, "argv", [str(word) for word in argv])
        capfd.readouterr()
        with pytest.raises(SystemExit) as left:
            main()
        out, err = capfd.readouterr()
        return left.value.code, out, err.splitlines()[-1]

    return call


def test_the_console_of_a_run_shows_evaluations_and_steps(trained):
    _, said, summary, _ = trained
    lines = [line.strip() for line in said.splitlines()]
    for name, step in (("before", 0), ("after", 2)):
        for kind in ("sampled", "greedy"):
            accuracy = summary[name][f"eval/{kind}_accuracy"]
            start = rf"accuracy {accuracy:.3f} with {step} done \({kind}"
            assert any(re.match(start, line) for line in lines), (start, said)
    assert any(line.startswith("accuracy") and "with 1 done (sampled" in line for line in lines)
    assert any(line.startswith("evaluating, 0 of 20 (sampled)") for line in lines)
    sampled = [re.search(r"with (\d+) done \(sampled", line) for line in lines]
    assert [int(found[1]) for found in sampled if found] == [0, 1, 2, 2]
    steps = [line for line in lines if re.match(r"\d+/2 ", line)]
    assert [line.split()[0] for line in steps] == ["1/2", "2/2"]
    assert all("ones=" in line for line in steps)
    assert "bubble" not in said


def test_a_checkpoint_is_as_good_as_its_run_said(trained, evaluate):
    folder, _, summary, _ = trained
    code, out, err = evaluate(folder / "checkpoint-2", "--json")
    assert code == 0, err
    result = json.loads(out)
    after = summary["after"]
    assert result["accuracy"] == after["eval/sampled_accuracy"]
    assert result["mean_length"] == after["eval/sampled_mean_length"]
    assert result["problems"] == 5
    assert set(result["pass_at"]) == set(result["maj_at"]) == {"1", "2", "4"}
    assert result["pass_at"]["1"] == pytest.approx(result["accuracy"])
    assert result["maj_at"]["1"] == pytest.approx(result["accuracy"])
    values = list(result["pass_at"].values())
    assert values == sorted(values)
    # Nothing is written into the run.
    assert json.loads((folder / "summary.json").read_text()) == summary


def test_the_number_of_answers_can_be_given_and_overrides_too(trained, evaluate):
    """And a reward may be for domains that are trained on only."""
    file = trained[3]
    tree = yaml.safe_load(file.read_text())
    tree["rewards"][0]["domains"] = ["default", "other"]
    file.with_name("domains.yaml").write_text(yaml.safe_dump(tree))
    words = ("eval.data.size=3", "--num-generations", 2)
    checkpoint = trained[0] / "checkpoint-2"
    code, out, err = evaluate(checkpoint, *words, config=file.with_name("domains.yaml"))
    assert code == 0, err
    assert "on 3 problems, 2 answers to each" in out
    assert "maj@k" in out


def test_what_cannot_be_evaluated_is_one_line(trained, evaluate, tmp_path):
    folder = trained[0]
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    for words, said in (
        (["nowhere/at/all"], "there is no such folder"),
        ([folder / "checkpoint-2", "eval.data.path=rows.jsonl"], "no file 'rows.jsonl'"),
        ([folder], f"so it is not a checkpoint: did you mean '{folder}/checkpoint-2'?"),
        ([adapter], "the folder around them"),
        ([folder / "checkpoint-2", "eval="], "eval.data is missing"),
        ([folder / "checkpoint-2", "eval.temperature=0"], "eval.temperature=0"),
    ):
        code, out, err = evaluate(*words)
        assert (code, out) == (2, "")
        assert said in err
