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

from rollpacker.core import journal
from rollpacker.policy.rollout import from_journal
from rollpacker.report.run_folder import load_run
from rollpacker.trl import GRPOTrainer

pytestmark = pytest.mark.trl


class Stop(TrainerCallback):
    """As if the process had been killed after a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self._step:
            raise KeyboardInterrupt


def kept(folder: Path) -> pl.DataFrame:
    rows = pl.read_parquet(folder / "rollpacker" / "samples.parquet")
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


@pytest.mark.parametrize("mode", ["exact", "race"])
def test_a_killed_run_goes_on_as_if_it_had_not_been(tmp_path: Path, mode: str) -> None:
    options = {"tail_batching": mode, "save_strategy": "steps", "save_steps": 4}
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


def test_a_checkpoint_of_plain_trl_cannot_go_on_racing(tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 4, "num_train_epochs": 1}
    jobs.trainer(GRPOTrainer, tmp_path, tail_batching="exact", **options).train()
    for file in tmp_path.glob("checkpoint-*/rollpacker-0.json"):
        file.unlink()
    racing = jobs.trainer(GRPOTrainer, tmp_path, tail_batching="race", **options)
    with pytest.raises(ValueError, match="is missing: the checkpoint is not of a run"):
        racing.train(resume_from_checkpoint=True)


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


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"min_p": 0.1}, "does not support min_p: leave it out"),
        ({"repetition_penalty": 1.2}, "does not support repetition_penalty"),
        ({"generation_kwargs": {"num_beams": 2}}, "does not support generation_kwargs"),
        ({"rollout_func": lambda prompts, trainer: {}}, "does not support rollout_func"),
        ({"tail_batching": "fast"}, "'exact', 'off', 'race', 'prompts' or 'auto'"),
    ],
)
def test_what_is_not_supported_is_refused_in_one_line(
    tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        jobs.trainer(GRPOTrainer, tmp_path, **options)


def test_an_iterable_data_set_cannot_race(tmp_path: Path) -> None:
    stream = jobs.dataset().to_iterable_dataset()
    options = {"train_dataset": stream, "max_steps": 3}
    # Older releases of TRL refuse it themselves.
    with pytest.raises((ValueError, RuntimeError), match=r"iterable data set|Iterable"):
        jobs.trainer(GRPOTrainer, tmp_path, tail_batching="race", **options)


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
