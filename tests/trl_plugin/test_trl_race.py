"""Racing modes inside TRL: each prompt once an epoch, resumed exactly, replayed, reported."""

from __future__ import annotations

import json
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
import trl_jobs as jobs
from rich.console import Console
from transformers import TrainerCallback
from trl import GRPOTrainer as PlainTrainer

from rollpacker.core import journal
from rollpacker.policy.rollout import from_journal
from rollpacker.report.reading.run_folder import load_run
from rollpacker.sim.recorded.run_record import read_run
from rollpacker.trl import GRPOTrainer

pytestmark = pytest.mark.trl


class Stop(TrainerCallback):
    """As if the process had been killed after a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self._step:
            raise KeyboardInterrupt


def _short(completions: list[str], **_: Any) -> list[float]:
    return [-len(text) / 10 for text in completions]


def kept(folder: Path) -> pl.DataFrame:
    rows = pl.read_parquet(folder / "rollpacker" / "samples" / "*.parquet")
    return rows.filter(pl.col("state") == "kept")


@pytest.mark.parametrize("mode", ["race", "prompts", "auto"])
def test_each_prompt_is_trained_on_once_an_epoch(tmp_path: Path, mode: str) -> None:
    trained: list[str] = []

    class Watched(GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            made = super()._generate_and_score_completions(inputs)
            texts = self.processing_class.batch_decode(
                [
                    ids[mask.bool()]
                    for ids, mask in zip(made["prompt_ids"], made["prompt_mask"], strict=True)
                ]
            )
            trained.extend(texts)
            return made

    ours = jobs.trainer(Watched, tmp_path, tail_batching=mode, train_dataset=jobs.dataset(13))
    ours.train()
    # 13 prompts, two a step: TRL's own sampler leaves one out too.
    assert ours.state.global_step == 12
    for epoch in (trained[:48], trained[48:]):
        counts = Counter(epoch)
        assert len(counts) == 12
        assert set(counts.values()) == {4}
    rows = kept(tmp_path)
    assert (rows["weights_version"] == rows["step"]).all()
    # As they began: who ended first may be the machine's doing.
    assert trained == rows.sort("step", "attempt")["prompt_text"].to_list()
    if mode == "race":
        lines = (tmp_path / "rollpacker" / "metrics.jsonl").read_text().splitlines()
        kinds = Counter(json.loads(line)["tail/round_kind"] for line in lines)
        assert kinds["short"] > 0
        assert kinds["long"] > 0


@pytest.mark.parametrize("iterations", [1, 2])
@pytest.mark.parametrize("mode", ["exact", "race"])
def test_a_killed_run_goes_on_as_if_it_had_not_been(
    tmp_path: Path, mode: str, iterations: int
) -> None:
    """From a checkpoint between two rounds."""
    options = {"tail_batching": mode, "save_strategy": "steps", "save_steps": 4}
    options |= {"num_iterations": iterations}
    whole = jobs.trainer(GRPOTrainer, tmp_path / "whole", **options)
    whole.train()
    broken = jobs.trainer(GRPOTrainer, tmp_path / "broken", **options, callbacks=[Stop(6)])
    with pytest.raises(KeyboardInterrupt):
        broken.train()
    again = jobs.trainer(GRPOTrainer, tmp_path / "broken", **options)
    again.train(resume_from_checkpoint=True)
    for name, value in jobs.weights(whole).items():
        assert torch.equal(value, jobs.weights(again)[name]), name
    columns = ["step", "prompt", "sample_index", "completion"]
    assert (
        kept(tmp_path / "whole").select(columns).equals(kept(tmp_path / "broken").select(columns))
    )


@pytest.mark.parametrize(("before", "after"), [("", "exact"), ("", "off"), ("exact", "")])
def test_plain_trl_s_checkpoints_go_on_here_and_ours_there(
    tmp_path: Path, before: str, after: str
) -> None:
    """With the prompts of the epoch that are left, and then ours again."""
    options = {"save_strategy": "steps", "save_steps": 2, "num_train_epochs": 1, "rewards": _short}

    def train(mode: str, resume: str | None = None) -> tuple[Any, list[set[str]]]:
        class Watched(GRPOTrainer if mode else PlainTrainer):
            def _generate_and_score_completions(self, inputs: Any) -> Any:
                trained.append({each["prompt"] for each in inputs})
                return super()._generate_and_score_completions(inputs)

        trained: list[set[str]] = []
        tail = {"tail_batching": mode} if mode else {}
        made = jobs.trainer(Watched, tmp_path / "run", **options, **tail)
        made.train(resume_from_checkpoint=resume)
        return made, trained

    whole, prompts = train(before)
    again, rest = train(after, str(tmp_path / "run" / "checkpoint-2"))
    assert again.state.global_step == whole.state.global_step == 6
    assert rest == prompts[2:]
    if after:
        _, last = train(after, str(tmp_path / "run" / "checkpoint-4"))
        assert last == prompts[4:]


def test_a_run_that_goes_on_amid_a_round_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """TRL keeps none of a round's responses in its checkpoints."""
    options = {"save_strategy": "steps", "num_iterations": 2, "max_steps": 6, "save_steps": 1}
    jobs.trainer(GRPOTrainer, tmp_path / "run", **options).train()
    between = jobs.trainer(GRPOTrainer, tmp_path / "run", **options)
    between.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert "was saved amid a round" not in caplog.text
    amid = jobs.trainer(GRPOTrainer, tmp_path / "run", **options)
    amid.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
    assert "was saved amid a round, whose responses TRL does not keep" in caplog.text
    assert amid.state.global_step == 6


def test_the_folder_is_a_runs(tmp_path: Path) -> None:
    jobs.trainer(GRPOTrainer, tmp_path, tail_batching="race", num_train_epochs=1).train()
    folder = tmp_path / "rollpacker"
    replayed = journal.replay(folder / "journal.jsonl", from_journal)
    assert replayed.differences == []
    run = load_run(folder, Console().print)
    assert len(run.metrics) == 6
    assert run.metrics[0]["loss"] == run.metrics[0]["loss"]
    assert (folder / "report.html").stat().st_size > 10_000
    assert run.summary["prompts_trained"] == 12
    config = (folder / "config.yaml").read_text()
    assert "num_generations: 4" in config
    assert "learning_rate" not in config, "the trainer has its own"
    text = (folder / "report.html").read_text()
    assert "The host trainer has its own" in text
    assert len(read_run(folder).steps) == 6


def test_the_bias_meter_is_in_the_trainer_s_own_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raced = jobs.trainer(GRPOTrainer, tmp_path / "a", tail_batching="race", num_train_epochs=1)
    raced.train()
    lines = [line for line in raced.state.log_history if "loss" in line]
    assert all(0.0 < line["tail/kept_vs_true_len"] < 2.0 for line in lines)
    exact = jobs.trainer(GRPOTrainer, tmp_path / "b", num_train_epochs=1)
    exact.train()
    assert not [name for line in exact.state.log_history for name in line if "tail/" in name]
    said = capsys.readouterr().out
    assert "rollpacker: tail batching 'race', responses by mini" in said
    assert f"report.html are in {tmp_path / 'b' / 'rollpacker'}" in said


def wrong(completions: list[str], **_: Any) -> list[float]:
    raise RuntimeError("the judge is ill")


def test_what_a_reward_function_raises_ends_the_training(tmp_path: Path) -> None:
    ours = jobs.trainer(GRPOTrainer, tmp_path, rewards=wrong)
    with pytest.raises(RuntimeError, match="the judge is ill"):
        ours.train()


def alarmed(completions: list[str], **_: Any) -> list[float]:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    return jobs.ones(completions)


@pytest.mark.parametrize("mode", ["exact", "race"])
def test_functions_that_need_the_main_thread_are_left_to_trl(tmp_path: Path, mode: str) -> None:
    options = {"rewards": alarmed, "tail_batching": mode, "num_train_epochs": 1}
    with pytest.raises(ValueError, match="main thread") as caught:
        jobs.trainer(GRPOTrainer, tmp_path / "threads", **options).train()
    assert any("reward_threads=0" in note for note in caught.value.__notes__)
    ours = jobs.trainer(GRPOTrainer, tmp_path / "none", reward_threads=0, **options)
    ours.train()
    assert ours.state.log_history[0]["rewards/alarmed/mean"] > 0.0


def test_one_trainer_evaluates_trains_and_trains_again(tmp_path: Path) -> None:
    ours = jobs.trainer(
        GRPOTrainer,
        tmp_path,
        tail_batching="race",
        eval_dataset=jobs.dataset(4),
        per_device_eval_batch_size=4,
        num_train_epochs=1,
    )
    first = evaluated(ours)
    assert evaluated(ours) == first
    ours.train()
    changed = evaluated(ours)
    assert changed != first
    ours.train()
    assert evaluated(ours) != changed
    assert len((tmp_path / "rollpacker" / "metrics.jsonl").read_text().splitlines()) == 6


def evaluated(trainer: Any) -> float:
    """The oldest release does not return it."""
    trainer.evaluate()
    return trainer.state.log_history[-1]["eval_reward"]
