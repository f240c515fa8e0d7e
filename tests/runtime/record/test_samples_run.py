"""Responses of real runs: in the table, in the report, on the command line."""

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import polars as pl
import pytest
from runtime_jobs import Workshop, metrics, run, table
from transformers import AutoTokenizer
from typer.testing import CliRunner

from rollpacker.cli import app, main
from rollpacker.core.sample_table import files, part, query
from rollpacker.core.types import PromptId
from rollpacker.data.base import Row
from rollpacker.report.drawing.gantt_data import Gantt
from rollpacker.report.reading.run_folder import load_run
from rollpacker.report.run_report import write_report
from rollpacker.runtime.record.samples import Texts

MARK = "7"
"""A special token that the model writes, as others write ``<think>``."""
JUDGES = """
def length(completions, **_):
    return [float(len(c)) for c in completions]

def letters(completions, log_extra=None, **_):
    log_extra("first", [c[:1] for c in completions])
    return [None if len(c) % 2 else 1.0 for c in completions]
"""


@pytest.fixture(scope="module")
def shop(tmp_path_factory) -> Workshop:
    made = Workshop(tmp_path_factory.mktemp("samples"))
    tokenizer = AutoTokenizer.from_pretrained(made.model)
    tokenizer.add_special_tokens({"additional_special_tokens": [MARK]})
    tokenizer.save_pretrained(made.model)
    (made.folder / "two.py").write_text(JUDGES)
    return made


@pytest.fixture(scope="module")
def folder(shop) -> Path:
    """A run in mode race with two rewards; read only."""
    rewards = [{"function": f"{shop.folder / 'two.py'}:{name}"} for name in ("length", "letters")]
    made, _ = run(shop.config("race", "race", rewards=rewards, samples={"token_ids": True}))
    return made


@pytest.fixture
def copy(folder, tmp_path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "run"))


def test_every_response_has_its_text_and_each_reward(shop, folder):
    """Of special tokens too, but for the end: a reward of the format may wait for them."""
    frame, tokenizer = table(folder), AutoTokenizer.from_pretrained(shop.model)
    assert frame["completion"].str.contains(MARK).any()
    assert set(frame["state"]) >= {"kept", "aborted"}
    for row in frame.iter_rows(named=True):
        ids, text = row["completion_ids"], row["completion"]
        assert row["prompt_text"] == f"{int(row['prompt'][1:]):03d}"
        assert row["answer"] == "1"
        if ids is None:
            assert text is None
            continue
        assert len(ids) == row["tokens"]
        assert tokenizer.decode(ids, skip_special_tokens=True) == text.replace(MARK, "")
        assert text.count(MARK) == ids.count(tokenizer.convert_tokens_to_ids(MARK))
        assert tokenizer.eos_token not in text
        assert row["truncated"] == {"stop": False, "length": True}.get(row["finish_reason"])
        if row["reward"] is not None:
            letters = None if len(text) % 2 else 1.0
            assert row["extra/first"] == text[:1]
            assert (row["rewards/length"], row["rewards/letters"]) == (len(text), letters)
            assert row["reward"] == len(text) + (letters or 0.0)
    kept = frame.filter(pl.col("state") == "kept")
    assert kept["advantage"].null_count() == 0
    assert frame.filter(pl.col("state") != "kept")["advantage"].is_null().all()
    sums = kept.group_by("step", "prompt").agg(pl.sum("advantage"))["advantage"]
    assert sums.to_list() == pytest.approx([0.0] * len(sums), abs=1e-4)


def test_the_bubble_is_the_same_in_the_line_of_a_step_and_in_the_report(folder):
    """Both used to have a definition, and a beginning and an end of the step, of their own."""
    loaded = load_run(folder)
    gantt = Gantt(loaded)
    assert loaded.moves.is_empty(), "whose times the journal has a moment later"
    for line in metrics(folder):
        said = line["bubble/rollout"], line["bubble/total"]
        assert gantt.shares[line["step"]] == pytest.approx(said, abs=1e-4)
        chart = gantt.chart(line["step"])
        assert (chart["rollout_bubble"], chart["bubble"]) == pytest.approx(said, abs=2e-4)
    page = write_report(folder).read_text(encoding="utf-8")
    assert f"<td>{gantt.shares[line['step']][1]:.1%}</td>" in page


@pytest.mark.wide
def test_a_resumed_run_outlives_a_damaged_table_and_may_keep_other_things(shop):
    """The size limit holds, texts may be given up, and the report says what is missing."""
    limited = shop.config("less", "off", steps=3, samples={"max_gb": 1e-6})
    made, said = run(limited)
    assert "the oldest steps' rows are deleted" in said
    assert table(made)["step"].unique().to_list() == [2]
    [file] = (made / "samples").iterdir()
    file.write_bytes(file.read_bytes()[:-9])
    again = shop.config("less", "off", steps=4, samples={"texts": False, "token_ids": True})
    _, said = run(again, resume=True)
    assert said.count("step-000002.parquet: not a whole parquet file") == 1
    frame = query(made, lambda rows: rows, [].append)
    assert frame["step"].to_list() == [3] * 12
    assert frame["completion"].is_null().all()
    assert frame["completion_ids"].null_count() == 0
    page = (made / "report.html").read_text(encoding="utf-8")
    assert "33 of 45 responses are missing" in page
    assert "of steps 0 to 2." in page
    assert "No texts were kept" in page


def shown(*words):
    """What a command prints, here in this process."""
    done = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert done.exit_code == 0
    return done


def ask(folder, *words):
    done = shown("samples", folder, *words, "--json")
    assert done.stderr == ""
    return json.loads(done.stdout)["samples"]


def test_of_a_long_answer_the_start_is_kept() -> None:
    tests = [{"stdin": "1\n", "stdout": "é" * 1000}]
    rows = {
        PromptId(name): Row(id=PromptId(name), prompt="", answer=answer, domain="d", columns={})
        for name, answer in (
            *(("tests", tests), ("none", None), ("number", 4.5)),
            ("odd", {(1, 2): 3, "a": Path("b")}),
        )
    }
    texts = Texts(SimpleNamespace(decode=str), str, rows)
    answers = {name: texts.answer(SimpleNamespace(prompt=name)) for name in (*rows, "gone")}
    assert answers["tests"].startswith('[{"stdin": "1\\n", "stdout": "éé')
    assert len(answers["tests"]) < 500
    assert answers["odd"] == '{"a": "b"}', "what is no JSON stops no run"
    assert (answers["none"], answers["gone"], answers["number"]) == (None, None, "4.5")


def test_the_command_shows_what_the_table_holds(folder):
    frame = table(folder)
    graded = frame.drop_nulls("reward")
    last = int(frame["step"].max())
    [best] = ask(folder, "--best", "--limit", 1)
    assert best["reward"] == graded["reward"].max()
    assert set(best["rewards"]) == {"length", "letters"}
    assert best["extra"] == {"first": best["completion"][:1]}
    assert best["completion"] in frame["completion"].to_list()
    worst = ask(folder, "--worst", "--step", 1)
    assert len(worst) == 10
    assert {row["step"] for row in worst} == {1}
    assert [row["reward"] for row in worst] == sorted(row["reward"] for row in worst)
    newest = [row["step"] for row in ask(folder)]
    assert len(newest) == 10
    assert newest[0] == last
    assert newest == sorted(newest, reverse=True)
    [longest, *_] = ask(folder, "--longest")
    assert longest["tokens"] == frame["tokens"].max()
    mine = ask(folder, "--prompt", "p3", "--limit", 0)
    assert len(mine) == frame.filter(pl.col("prompt") == "p3").height
    drawn = ask(folder, "--random", "--limit", 5)
    assert len({row["attempt"] for row in drawn}) == 5
    wanted = frame.filter(pl.col("completion").str.contains("(GCD)", literal=True))
    hits = ask(folder, "--grep", "(GCD)", "--limit", 0)
    assert {row["attempt"] for row in hits} == set(wanted["attempt"])
    assert "[answer of the data]\n1\n" in shown("samples", folder, "--limit", 1).stdout
    none = shown("samples", folder, "--step", last + 1)
    assert none.stdout == "no response matches: steps are counted from 0\n"


def test_nothing_that_a_model_writes_does_something_to_the_terminal(copy):
    file = files(copy)[-1]
    evil = "a\x1b[2J\x07\x9b31m\r[red]b[/red]\u202ec\u2028d\nf\x00"
    pl.read_parquet(file).with_columns(
        completion=pl.lit(evil), prompt=pl.lit("p\x1b]0;x\x07\n")
    ).write_parquet(file)
    done = shown("samples", copy, "--limit", 1)
    escaped = r"a\x1b[2J\x07\x9b31m\r[red]b[/red]\u202ec\u2028d" + "\n" + r"f\x00"
    assert escaped in done.stdout
    assert r"prompt p\x1b]0;x\x07\n" in done.stdout
    assert [char for char in done.stdout if not char.isprintable() and char not in "\n\t"] == []
    assert ask(copy, "--limit", 1)[0]["completion"] == evil


def test_a_damaged_part_is_left_out_and_said(copy):
    whole, bad = table(copy), part(copy, 1)
    bad.write_bytes(bad.read_bytes()[:-20])
    lost = whole.filter(pl.col("step") == 1).height

    done = shown("samples", copy, "--limit", 0, "--json")
    assert len(json.loads(done.stdout)["samples"]) == whole.height - lost
    assert "step-000001.parquet: not a whole parquet file" in done.stderr
    done = shown("report", copy)
    [said] = done.stderr.splitlines()
    assert said.endswith("its rows are missing")
    page = (copy / "report.html").read_text(encoding="utf-8")
    assert f"{lost} of {whole.height} responses are missing" in page
    assert "of steps 1." in page


def test_mistakes(folder, tmp_path, monkeypatch, capfd):
    def said(*words):
        monkeypatch.setattr(sys, "argv", ["rollpacker", "samples", *map(str, words)])
        with pytest.raises(SystemExit) as left:
            main()
        out, err = capfd.readouterr()
        assert (left.value.code, out) == (2, "")
        [line] = err.splitlines()
        assert line.startswith("rollpacker: ")
        return line

    assert said(tmp_path / "none").endswith("no such run folder")
    assert said(tmp_path).endswith("no samples in it yet")
    assert "choose one of them" in said(folder, "--best", "--worst")
