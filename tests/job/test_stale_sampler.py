"""A run whose engine has the weights of one step ago: the alarm sounds, corrections see it."""

from __future__ import annotations

import asyncio
import copy
import json
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from test_hosted import Lengths

from rollpacker.config import MiniEngineConfig, RunConfig, TrainConfig
from rollpacker.core.types import Group, Prompt, PromptId
from rollpacker.data.base import Row
from rollpacker.data.source import PromptSource
from rollpacker.demo.model import EOS_ID, build_model, build_tokenizer
from rollpacker.engine.base import SamplingParams
from rollpacker.engine.mini import MiniEngine
from rollpacker.job.hosted import HostedJob, HostTrainer
from rollpacker.report.run_report import write_report
from rollpacker.runtime.attempts.attempts import Problems
from rollpacker.runtime.pool.in_process import HostUpdate
from rollpacker.runtime.record.progress import Progress
from rollpacker.train.algorithms import build
from rollpacker.train.trainer import Trainer

CAP, STEPS = 20, 3
ALARM = "sampler and trainer disagree"


class Run:
    """Three steps; the engine has weights of its own, those that ``lag`` steps ago were new."""

    def __init__(self, folder: Path, lag: int, **correction: Any) -> None:
        model, tokenizer = build_model(0).eval(), build_tokenizer()
        config: dict[str, Any] = {
            "output": str(folder),
            "deterministic": True,
            "seed": 2,  # every step has groups to learn from
            "model": {"path": "here"},
            "data": {"path": "here"},
            "rewards": [{"function": "here", "name": "n"}],
            "rollout": {"prompts_per_step": 2, "num_generations": 4, "max_completion_length": CAP},
            "train": {"learning_rate": 0.003, "sampler_correction": correction},
        }
        self.config = RunConfig.model_validate(config)
        self.trainer = Trainer(model, tokenizer, self.config.train, temperature=1.0)
        self._held = [self._copy()] * (lag + 1)
        rows = [
            Row(id=PromptId(f"p{n}"), prompt=f"{n}", answer="", domain="default", columns={})
            for n in range(8)
        ]
        tokens = {r.id: np.array(tokenizer.encode(r.prompt), np.int32) for r in rows}
        source = PromptSource([Prompt(id=r.id, tokens=len(tokens[r.id])) for r in rows], 0)
        self._said = StringIO()
        host = HostTrainer(
            engine=MiniEngine(copy.deepcopy(model), config=MiniEngineConfig(), deterministic=True),
            weights=lambda: self._held[0],
            problems=Problems(rows, tokens, source),
            rewards=Lengths(),
            params=SamplingParams(max_tokens=CAP, stop_token_ids=(EOS_ID,)),
            tokenizer=tokenizer,
            read=tokenizer.decode,
            progress=Progress(Console(file=self._said, width=500)),
        )
        self.job = HostedJob(self.config, host)

    def _copy(self) -> list[tuple[str, Any]]:
        return [(name, weight.clone()) for name, weight in self.trainer.weights()]

    async def _steps(self) -> None:
        await self.job.begin(None)
        for _ in range(STEPS):
            record = await self.job.round()
            update = self.trainer.apply(self.trainer.accumulate(self._groups(record.kept)))
            self._held = [*self._held[1:], self._copy()]
            await self.job.finish(HostUpdate(update=update, start_s=0.0, end_s=0.0))
        self.job.close()

    def _groups(self, kept: list[Any]) -> list[Group]:
        algorithm, groups = build(TrainConfig().algorithm), []
        for prompt in dict.fromkeys(attempt.prompt for attempt in kept):
            samples = tuple(a.sample() for a in kept if a.prompt == prompt)
            rewards = np.array([s.reward for s in samples], np.float64)
            lengths = np.array([s.sampled for s in samples], np.int64)
            advantages = algorithm.reward(rewards, lengths, CAP).advantages
            groups.append(Group(prompt=prompt, samples=samples, advantages=advantages))
        return groups

    def __call__(self) -> tuple[list[dict[str, Any]], list[str]]:
        """Metrics by step, and lines of the alarm."""
        asyncio.run(self._steps())
        lines = (Path(self.config.output) / "metrics.jsonl").read_text().splitlines()
        said = [line for line in self._said.getvalue().splitlines() if ALARM in line]
        return [json.loads(line) for line in lines], said


def test_an_engine_that_has_the_weights_agrees_and_no_alarm_sounds(tmp_path: Path) -> None:
    steps, said = Run(tmp_path, lag=0)()
    assert said == []
    assert max(step["sampler/abs_logprob_difference"] for step in steps) < 1e-4
    assert all(step["sampler/effective_sample_size"] > 0.999999 for step in steps)
    assert all(step["sampler/outside"] == 0.0 for step in steps)
    assert "they agree" in write_report(tmp_path).read_text(encoding="utf-8")


@pytest.mark.parametrize("kind", ["none", "truncate", "mask"])
def test_stale_weights_sound_the_alarm_and_are_weighed(tmp_path: Path, kind: str) -> None:
    """In the first step nothing is stale yet."""
    steps, said = Run(tmp_path, lag=1, kind=kind, low=0.9, high=1.1)()
    apart = [step["sampler/abs_logprob_difference"] for step in steps]
    assert apart[0] < 1e-4
    assert min(apart[1:]) > 1e-3
    assert said[0].startswith("WARNING step 1: ")
    assert ("train.sampler_correction.kind: truncate" in said[0]) == (kind == "none")
    assert len(said) == 1 + (apart[2] >= 2 * apart[1])
    assert ALARM in write_report(tmp_path).read_text(encoding="utf-8")
    assert steps[1]["sampler/outside"] > 0.1
    assert steps[1]["sampler/ratio_min"] < 1.0 < steps[1]["sampler/ratio_max"]
