"""``rollpacker simulate``, ``estimate`` and ``calibrate``."""

import json
import sys
from pathlib import Path

import polars as pl
import pytest
import typer
from typer.testing import CliRunner

from rollpacker.cli.simulate.app import calibrate, estimate, simulate
from rollpacker.core import journal
from rollpacker.demo.model import build_tokenizer
from rollpacker.policy.rollout import from_journal
from rollpacker.polytrace import formats
from rollpacker.polytrace.schema import SAMPLES, Trace

app = typer.Typer(pretty_exceptions_enable=False)
for command in (simulate, estimate, calibrate):
    app.command()(command)
EXAMPLES = Path(__file__).parents[3] / "examples" / "simulate"


def run(*args: str) -> str:
    result = CliRunner().invoke(app, list(args), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_simulate_prints_one_object() -> None:
    text = run("simulate", str(EXAMPLES / "paper-7b-8k.yaml"), "steps=2", "--json")
    found = json.loads(text)
    assert len(found["step_s"]) == 2
    assert found["mean_step_s"] == pytest.approx(sum(found["step_s"]) / 2)
    assert found["kept_vs_true_len"] == pytest.approx(1.0)
    assert 0.0 <= found["bubble"] <= 1.0
    assert 0.0 < found["bounds"]["packing_s"] < found["mean_step_s"]
    assert found["bounds"]["single_sequence_s"] > 0.0
    assert found["samples_per_s"] == pytest.approx(1024 / found["mean_step_s"])
    assert found["sim_wall_s"] > 0.0
    assert found["over_off"] == pytest.approx(found["off_step_s"] / found["mean_step_s"])
    assert 1.0 < found["over_off"] < 1.5


@pytest.mark.parametrize("mode", ["off", "race"])
def test_a_simulated_journal_replays(tmp_path: Path, mode: str) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_text("left from before\n", encoding="utf-8")
    args = ("steps=6", "rollout.prompts_per_step=16", f"rollout.tail_batching.mode={mode}")
    text = run("simulate", str(EXAMPLES / "paper-7b-8k.yaml"), *args, "--journal", str(path))
    assert "s a step" in text
    replayed = journal.replay(path, from_journal)
    assert replayed.events > 500
    assert replayed.differences == []


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_examples_run(example: Path) -> None:
    run("simulate", str(example), "steps=1", "rollout.prompts_per_step=8")


def test_a_wrong_key_is_named() -> None:
    with pytest.raises(ValueError, match="did you mean 'steps'"):
        run("simulate", str(EXAMPLES / "paper-7b-8k.yaml"), "stepps=2")


def test_estimate_reads_a_trace(tmp_path: Path) -> None:
    rows = [
        {
            "task": "made",
            "step": prompt // 8,
            "prompt": f"p{prompt}",
            "index": index,
            "prompt_tokens": 20,
            "response_tokens": 50 + 37 * ((prompt * 5 + index * 3) % 40),
            "state": "kept",
        }
        for prompt in range(32)
        for index in range(4)
    ]
    trace = Trace(samples=pl.DataFrame(rows, schema=SAMPLES))
    formats.write(trace, tmp_path / "made.parquet", "native")
    args = ("estimate", "--from", str(tmp_path / "made.parquet"), "--steps", "5")
    found = json.loads(run(*args, "--json"))
    modes = ["off", "exact", "auto", "prompts", "race", "partial", "exact, ahead"]
    assert [*found["modes"]] == modes
    for mode in found["modes"].values():
        assert mode["speedup"] > 0.0
        assert mode["kept_vs_true_len"] > 0.0
    assert found["recommended"] in found["modes"]
    assert -1.0 <= found["icc"] <= 1.0
    assert found["recommended"] in run(*args)
    longest = "by the mean of the longest hundredth, 1493 tokens"
    assert found["costs"]["weights"] == longest
    given = json.loads(run(*args, "--json", "--calibration", "paper-14b-16k", "--gpus", "16"))
    assert given["costs"]["paper-14b-16k, 100%"] == "Qwen2.5-14B on 16 H800"
    rule = tmp_path / "plain.py"
    base = "from rollpacker.policy.rounds.rule import TailRule"
    rule.write_text(f"{base}\n\nclass Plain(TailRule):\n    pass\n", encoding="utf-8")
    few = json.loads(run(*args, "--json", "--format", "native", "--modes", f"exact, {rule}:Plain"))
    assert [*few["modes"]] == ["off", "exact", f"{rule}:Plain"]
    exact, own = few["modes"]["exact"], few["modes"][f"{rule}:Plain"]
    assert exact["speedup"] == pytest.approx(found["modes"]["exact"]["speedup"], rel=0.2)
    assert own["kept_vs_true_len"] == pytest.approx(1.0, rel=0.1)
    assert own["speedup"] == pytest.approx(exact["speedup"], rel=0.1)
    with pytest.raises(ValueError, match=r"--modes: .*did you mean 'exact'"):
        run(*args, "--modes", "exat")
    with pytest.raises(ValueError, match=r"--modes exact,: no space after a comma"):
        run(*args, "--modes", "exact,", f"{rule}:Plain")


def test_an_estimate_of_a_trl_log_ends_with_the_lines_to_change(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        rows = [
            {
                "step": step,
                "prompt": f"q{step} {n // 4}",
                "completion": "a" * (900 + 3100 * (n % 8)),
            }
            for n in range(128)
        ]
        pl.DataFrame(rows).write_parquet(tmp_path / f"completions_0000{step}.parquet")
    told = run("estimate", "--from", str(tmp_path), "--steps", "5")
    mode = json.loads(run("estimate", "--from", str(tmp_path), "--steps", "5", "--json"))
    assert "from rollpacker.trl import GRPOTrainer" in told
    assert f'GRPOTrainer(..., tail_batching="{mode["recommended"]}")' in told.splitlines()[-1]


def verl_log(folder: Path, **more: object) -> Path:
    """Two steps of four prompts with four responses that repeat themselves."""
    for step in (1, 2):
        lines = [
            {
                "input": f"q{prompt}",
                "output": "so 1+2=3, " * (9 + 3 * n + prompt),
                "score": 1.0,
                **more,
            }
            for prompt in range(4)
            for n in range(4)
        ]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"{step}.jsonl").write_text(text, encoding="utf-8")
    return folder


def test_a_run_in_the_folder_of_a_trainer_is_read_before_the_trainers_log(tmp_path: Path) -> None:
    from test_fit_costs import made_run

    (tmp_path / "rollpacker").mkdir()
    made_run(tmp_path / "rollpacker", "exact")
    (tmp_path / "rollpacker" / "config.yaml").write_text("{}\n", encoding="utf-8")
    (tmp_path / "completions").mkdir()
    log = tmp_path / "completions" / "completions_00001.jsonl"
    row = {"step": 1, "prompt": "p", "completion": "abc" * 9, "reward": 1.0, "advantage": 0.0}
    log.write_text(8 * (json.dumps(row) + "\n"), encoding="utf-8")
    found = json.loads(run("estimate", "--from", str(tmp_path), "--json", "--steps", "2"))
    assert found["notes"][0].startswith(f"read {tmp_path / 'rollpacker'}, the run in it")
    beside = run(
        "estimate", "--from", str(tmp_path), "--task", "completions", "--json", "--steps", "2"
    )
    assert "4 characters are taken as a token" in json.loads(beside)["notes"][0]


def test_an_estimate_of_a_verl_log_ends_with_the_way_to_what_it_recommends(tmp_path: Path) -> None:
    log = verl_log(tmp_path)
    told = run("estimate", "--from", str(log), "--steps", "5")
    mode = json.loads(run("estimate", "--from", str(log), "--steps", "5", "--json"))["recommended"]
    ways = {"race": "trainer_mode=rollpacker", "prompts": "trainer_mode=rollpacker", "off": "off"}
    assert ways.get(mode, "rollpacker init --from") in "".join(told.splitlines()[-3:])


def test_what_could_be_decoded_ahead_is_measured_on_the_texts(tmp_path: Path) -> None:
    log, tokenizer = tmp_path / "log", tmp_path / "tokenizer"
    log.mkdir()
    build_tokenizer().save_pretrained(tokenizer)
    args = ("estimate", "--from", str(verl_log(log)), "--steps", "1", "--json")

    def ahead(*more: str) -> tuple[str, str]:
        told: str = json.loads(run(*args, *more))["costs"]["tokens of a step ahead"]
        tokens, source = told.split(", ", 1)
        return tokens, source

    assert ahead()[0] == "1.5 to 2.5"
    tokens, source = ahead("--tokenizer", str(tokenizer))
    assert source == "measured on the responses that end the log's 2 steps"
    assert float(tokens) > 3.0
    verl_log(log, response_ids=[1, 2, 3, 4] * 40)
    assert float(ahead()[0]) > 3.0


def test_the_tokens_of_a_trl_log_are_counted_by_the_tokenizer_that_is_given(
    tmp_path: Path,
) -> None:
    log, tokenizer = tmp_path / "log", tmp_path / "tokenizer"
    log.mkdir()
    (known := build_tokenizer()).save_pretrained(tokenizer)
    rows = [
        {"step": 1, "prompt": f"{n // 4}", "completion": "12+3" * (50 + n), "advantage": 0.0}
        for n in range(16)
    ]
    pl.DataFrame(rows).write_parquet(log / "completions_00001.parquet")
    args = ("estimate", "--from", str(log), "--steps", "1", "--json")
    assert "hundredth, 65 tokens" in json.loads(run(*args))["costs"]["weights"]
    found = json.loads(run(*args, "--tokenizer", str(tokenizer)))
    longest = len(known("12+3" * 65)["input_ids"])
    assert f"hundredth, {longest} tokens" in found["costs"]["weights"]
    assert longest != 65
    assert "lengths of 16 of 16 responses are counted by the tokenizer" in found["notes"][0]
    assert not any("characters" in note for note in found["notes"])


def test_half_a_character_is_none(tmp_path: Path) -> None:
    log, tokenizer = tmp_path / "log", tmp_path / "tokenizer"
    log.mkdir()
    build_tokenizer().save_pretrained(tokenizer)
    verl_log(log, output="a \ud800 b")
    args = ("--steps", "1", "--json", "--tokenizer", str(tokenizer))
    costs = json.loads(run("estimate", "--from", str(log), *args))["costs"]
    assert "measured" in costs["tokens of a step ahead"]


def test_without_the_extra_a_range_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "rollpacker.engine.drafts", None)
    log = verl_log(tmp_path, response_ids=[1, 2, 3])
    found = json.loads(run("estimate", "--from", str(log), "--steps", "1", "--json"))
    assert "1.5 to 2.5, assumed" in found["costs"]["tokens of a step ahead"]
    assert any("needs rollpacker[train]" in note for note in found["notes"])


def test_a_tokenizer_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"^--tokenizer [^\n]*/empty: [^\n]+$"):
        run("estimate", "--from", str(verl_log(tmp_path)), "--tokenizer", str(tmp_path / "empty"))
    with pytest.raises(ValueError, match=r"^--tokenizer ./none: there is no such folder"):
        run("estimate", "--from", str(verl_log(tmp_path)), "--tokenizer", "./none")


@pytest.mark.wide
def test_calibrate_and_estimate_from_a_run(tmp_path: Path) -> None:
    # The simulated run stands for a real one: they leave the same files.
    from test_fit_costs import made_run

    folder = tmp_path / "run"
    folder.mkdir()
    made_run(folder, "exact")
    out = tmp_path / "costs.yaml"
    found = json.loads(run("calibrate", "--from", str(folder), "--out", str(out), "--json"))
    assert found["file"] == str(out)
    assert 0.0 <= found["error"] < 0.03
    assert found["accuracy_mean"] == pytest.approx(1.0 - found["error"])
    predicted = json.loads(run("estimate", "--from", str(folder), "--steps", "5", "--json"))
    assert "the run itself" in predicted["costs"]["run"]
    assert predicted["modes"]["exact"]["kept_vs_true_len"] == pytest.approx(1.0)
    text = run(
        "simulate", str(EXAMPLES / "paper-7b-8k.yaml"), f"calibration={out}", "steps=1", "--json"
    )
    assert len(json.loads(text)["step_s"]) == 1


def test_another_model_on_other_gpus_says_what_is_taken_over(tmp_path: Path) -> None:
    file = str(EXAMPLES / "paper-7b-8k.yaml")
    size = ("steps=1", "rollout.prompts_per_step=16", "gpus=8", "--json")
    step_s = {}
    for model, device in (("Qwen2.5-7B", "H800"), ("Qwen2.5-14B", "H800"), ("Qwen2.5-7B", "B200")):
        result = CliRunner().invoke(
            app, ["simulate", file, f"model={model}", f"device={device}", *size]
        )
        assert result.exit_code == 0, result.output
        step_s[model, device] = json.loads(result.stdout)["mean_step_s"]
        said = "fitted to Qwen2.5-7B on H800 and taken over for" in result.stderr
        assert said == ((model, device) != ("Qwen2.5-7B", "H800"))
        size_said = "taken over for Qwen2.5-14B (14.8B parameters) on H800" in result.stderr
        assert size_said == (model == "Qwen2.5-14B")
    plain = step_s["Qwen2.5-7B", "H800"]
    assert step_s["Qwen2.5-7B", "B200"] < plain < step_s["Qwen2.5-14B", "H800"]


def test_a_mixture_of_experts_takes_the_time_of_its_active_weights() -> None:
    """Qwen3-30B-A3B beside Qwen3-32B: a tenth of the arithmetic of a gradient."""
    file = str(EXAMPLES / "paper-32b-32k.yaml")
    step_s = {}
    for model in ("Qwen3-30B-A3B", "Qwen3-32B"):
        words = ["simulate", file, f"model={model}", "steps=1", "rollout.prompts_per_step=16"]
        result = CliRunner().invoke(app, [*words, "--json"])
        assert result.exit_code == 0, result.output
        step_s[model] = json.loads(result.stdout)["mean_step_s"]
    assert step_s["Qwen3-30B-A3B"] < step_s["Qwen3-32B"]


def test_a_model_that_does_not_fit_is_named() -> None:
    with pytest.raises(ValueError, match=r"Llama-3\.1-70B.*runs on"):
        run("simulate", str(EXAMPLES / "paper-7b-8k.yaml"), "model=Llama-3.1-70B", "device=L40S")
    with pytest.raises(ValueError, match="unknown device 'H900'"):
        run("simulate", str(EXAMPLES / "paper-7b-8k.yaml"), "device=H900")
