"""A run inside another trainer: rounds in turn with its updates, resumed where it was."""

from __future__ import annotations

import asyncio
import json
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from rich.console import Console

from rollpacker.config import MiniEngineConfig, RunConfig
from rollpacker.core import journal
from rollpacker.core.types import Prompt, PromptId
from rollpacker.data.base import Row
from rollpacker.data.source import PromptSource
from rollpacker.demo.model import EOS_ID, build_model, build_tokenizer
from rollpacker.engine.base import SamplingParams
from rollpacker.engine.mini import MiniEngine
from rollpacker.job.hosted import HostedJob, HostTrainer
from rollpacker.policy.rollout import from_journal
from rollpacker.reward.base import Grade
from rollpacker.runtime.attempts.attempts import Problems
from rollpacker.runtime.pool.in_process import HostUpdate
from rollpacker.runtime.record.progress import Progress
from rollpacker.train.base import Update

CAP, PROMPTS = 20, 8


class Lengths:
    """Grades at once: how long a response is."""

    needs_group = False
    broken: str | None = None

    @contextmanager
    def listen(self, take):
        self._take = take
        yield

    def begin_step(self, step, epoch=None) -> None:
        pass

    def grade(self, attempts, rows, *, training=True) -> None:
        grades = [Grade(attempt=a.id, reward=float(a.tokens), rewards={"n": 1.0}) for a in attempts]
        asyncio.get_running_loop().call_soon(self._take, grades)

    def cancel(self, attempt) -> None:
        pass

    def pending(self) -> dict:
        return {}

    def end_step(self) -> list[str]:
        return []


class Trainer:
    """The host: a model whose weights it changes after each round."""

    def __init__(self, folder: Path, mode: str, **changes: Any) -> None:
        self.model, self.tokenizer = build_model(0).eval(), build_tokenizer()
        config: dict[str, Any] = {
            "output": str(folder),
            "model": {"path": "here"},
            "data": {"path": "here"},
            "rewards": [{"function": "here", "name": "n"}],
            "rollout": {
                "prompts_per_step": 2,
                "num_generations": 3,
                "max_completion_length": CAP,
                "tail_batching": {"mode": mode},
            },
            **changes,
        }
        rows = [
            Row(id=PromptId(f"p{n}"), prompt=f"{n}", answer="", domain="default", columns={})
            for n in range(PROMPTS)
        ]
        tokens = {r.id: np.array(self.tokenizer.encode(r.prompt), np.int32) for r in rows}
        source = PromptSource([Prompt(id=r.id, tokens=len(tokens[r.id])) for r in rows], 0)
        host = HostTrainer(
            engine=MiniEngine(self.model, config=MiniEngineConfig()),
            weights=lambda: None,
            problems=Problems(rows, tokens, source),
            rewards=Lengths(),
            params=SamplingParams(max_tokens=CAP, stop_token_ids=(EOS_ID,)),
            tokenizer=self.tokenizer,
            read=self.tokenizer.decode,
            progress=Progress(Console(quiet=True)),
        )
        self.job = HostedJob(RunConfig.model_validate(config), host)

    async def finish(self) -> None:
        """Another version of the weights, a little off."""
        with torch.no_grad():
            for value in self.model.parameters():
                value.mul_(1.01)
        update = Update(applied=True, grad_norm=1.0, learning_rate=0.1, metrics={"loss": 2.0})
        await self.job.finish(HostUpdate(update=update, start_s=0.0, end_s=0.0))
        self.job.turn_epoch()


class Later(Lengths):
    """Says what it still grades; an ill one grades nothing."""

    ill = False

    def grade(self, attempts, rows, *, training=True) -> None:
        self.open = self.pending() | dict.fromkeys([a.id for a in attempts], 0.0)
        asyncio.get_running_loop().call_soon(self._done, attempts, rows)

    def _done(self, attempts, rows) -> None:
        self.broken = "the judge is ill" if self.ill else None
        for attempt in attempts:
            self.open.pop(attempt.id, None)
        super().grade(attempts, rows)

    def pending(self) -> dict:
        return getattr(self, "open", {})


def kept(folder: Path) -> pl.DataFrame:
    rows = pl.read_parquet(folder / "samples" / "*.parquet").filter(pl.col("state") == "kept")
    return rows.select("step", "prompt", "sample_index", "completion", "weights_version")


async def whole(trainer: Trainer, state: dict[str, Any] | None, rounds: int) -> dict[str, Any]:
    await trainer.job.begin(state)
    await whole_rounds(trainer, rounds)
    return trainer.job.state_dict()


async def whole_rounds(trainer: Trainer, count: int) -> None:
    for _ in range(count):
        record = await trainer.job.round()
        assert len(record.kept) == 6
        await trainer.finish()


@pytest.mark.parametrize("mode", ["exact", "race"])
def test_rounds_take_turns_with_the_hosts_updates(tmp_path: Path, mode: str) -> None:
    trainer = Trainer(tmp_path, mode)
    asyncio.run(whole(trainer, None, 8))
    trainer.job.close()
    rows = kept(tmp_path)
    assert (rows["weights_version"] == rows["step"]).all()
    for epoch in (rows.filter(pl.col("step") < 4), rows.filter(pl.col("step") >= 4)):
        assert epoch["prompt"].n_unique() == PROMPTS
        assert len(epoch) == 3 * PROMPTS
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(8))
    assert {line["loss"] for line in lines} == {2.0}
    assert journal.replay(tmp_path / "journal.jsonl", from_journal).differences == []


@pytest.mark.parametrize("mode", ["exact", "race"])
def test_what_was_open_is_sampled_again(tmp_path: Path, mode: str) -> None:
    """Killed with a round that the host had not trained on."""
    straight = Trainer(tmp_path / "straight", mode)
    asyncio.run(whole(straight, None, 6))
    straight.job.close()

    async def killed() -> dict[str, Any]:
        await whole(broken, None, 3)
        before = broken.job.state_dict()
        await broken.job.round()
        assert broken.job.open
        assert broken.job.state_dict() == before | {"clock_s": broken.job.state_dict()["clock_s"]}
        return json.loads(json.dumps(broken.job.state_dict()))

    broken = Trainer(tmp_path / "broken", mode)
    state = asyncio.run(killed())
    broken.job.close()
    again = Trainer(tmp_path / "broken", mode)
    again.model.load_state_dict(broken.model.state_dict())
    asyncio.run(whole(again, state, 3))
    again.job.close()
    assert kept(tmp_path / "broken").equals(kept(tmp_path / "straight"))


def test_what_breaks_in_a_round_is_raised_and_nothing_is_left_in_the_engine(tmp_path: Path) -> None:
    class Broken(Lengths):
        def grade(self, attempts, rows, *, training=True) -> None:
            self.broken = "the judge is ill"
            asyncio.get_running_loop().call_soon(self._take, [])

    trainer = Trainer(tmp_path, "exact")
    trainer.job._host.rewards.__class__ = Broken
    with pytest.raises(ValueError, match="the judge is ill"):
        asyncio.run(whole(trainer, None, 1))
    trainer.job.close()
    assert not trainer.job._host.engine.busy()
    assert json.loads((tmp_path / "summary.json").read_text())["interrupted"]


@pytest.mark.parametrize("mode", ["exact", "race"])
def test_after_a_round_that_failed_the_next_one_is_the_same_again(
    tmp_path: Path, mode: str
) -> None:
    class IllJudge(Lengths):
        def grade(self, attempts, rows, *, training=True) -> None:
            self.graded = getattr(self, "graded", 0) + len(attempts)
            self.broken = "the judge is ill" if self.graded > 8 else None
            super().grade(attempts, rows, training=training)

    async def through(trainer: Trainer, *, ill: bool) -> None:
        await whole(trainer, None, 1)
        if ill:
            trainer.job._host.rewards.__class__ = IllJudge
            with pytest.raises(ValueError, match="the judge is ill"):
                await whole_rounds(trainer, 9)
            trainer.job._host.rewards.__class__ = Lengths
            trainer.job._host.rewards.broken = None
        await whole_rounds(trainer, 4 - trainer.job.step)
        trainer.job.close()

    for name, ill in (("straight", False), ("ill", True)):
        asyncio.run(through(Trainer(tmp_path / name, mode), ill=ill))
    assert kept(tmp_path / "ill").equals(kept(tmp_path / "straight"))
    assert journal.replay(tmp_path / "ill" / "journal.jsonl", from_journal).differences == []


def test_after_a_round_that_failed_in_lockstep_the_engine_decodes_again(tmp_path: Path) -> None:
    """It was held: the driver that would have let it go on is gone with the round."""

    async def through() -> None:
        await whole(trainer, None, 1)
        rewards.ill = True
        with pytest.raises(ValueError, match="the judge is ill"):
            await trainer.job.round()
        rewards.ill = False
        async with asyncio.timeout(30.0):
            await whole_rounds(trainer, 2)
        trainer.job.close()

    trainer = Trainer(tmp_path, "exact", deterministic=True)
    rewards: Any = trainer.job._host.rewards
    rewards.__class__ = Later
    asyncio.run(through())
    assert trainer.job.step == 3


@pytest.mark.parametrize("breaks", ["folder", "measured", "published"])
def test_a_begin_that_fails_is_what_the_host_sees(tmp_path: Path, breaks: str) -> None:
    trainer = Trainer(tmp_path / "run", "exact")
    host = trainer.job._host

    if breaks == "folder":
        (tmp_path / "run").write_text("a file")
    else:
        object.__setattr__(host, "engine", Ill(host.engine, breaks))

    def begin() -> None:
        try:
            asyncio.run(trainer.job.begin(None))
        finally:
            trainer.job.close()

    with pytest.raises((OSError, RuntimeError), match=r"File exists|the real error"):
        begin()


class Ill:
    """An engine that fails as a round begins for the first time."""

    def __init__(self, engine: MiniEngine, at: str) -> None:
        self._engine, self._at = engine, at

    def __getattr__(self, name: str) -> Any:
        if name == {"measured": "info", "published": "load_weights"}[self._at]:
            raise RuntimeError("the real error")
        return getattr(self._engine, name)
