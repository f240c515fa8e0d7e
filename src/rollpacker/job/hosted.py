"""A run inside a host trainer: rollpacker samples and grades rounds, and the host updates."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollpacker.config import RunConfig
from rollpacker.engine.base import Engine, SamplingParams
from rollpacker.job.plan.build import rollout_settings
from rollpacker.policy.lengths import Bias
from rollpacker.policy.rollout import RolloutPolicy
from rollpacker.runtime.attempts.attempts import Problems
from rollpacker.runtime.ipc.clock import Clock
from rollpacker.runtime.messages.faults import Breaker
from rollpacker.runtime.pool.in_process import HostUpdate, InProcess
from rollpacker.runtime.record.metrics import Counters, Metrics
from rollpacker.runtime.record.progress import Progress
from rollpacker.runtime.record.run_log import RunLog, save_config
from rollpacker.runtime.record.samples import Texts
from rollpacker.runtime.step.driver import train_driver
from rollpacker.runtime.step.publishing import publish
from rollpacker.runtime.step.responses import Graders, Setup
from rollpacker.runtime.step.step import StepRecord
from rollpacker.runtime.step.updates import Updates
from rollpacker.runtime.worker.engine_worker import NewWeights
from rollpacker.train import algorithms


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTrainer:
    """The host's objects for a run. ``weights`` has the checkpoint's names, and is None if the
    engine reads them in place. ``read`` decodes responses as the host's rewards get them."""

    engine: Engine
    weights: NewWeights
    problems: Problems
    rewards: Graders
    params: SamplingParams
    tokenizer: Any
    read: Callable[[Sequence[int]], str]
    progress: Progress


class HostedJob:
    """Rounds of responses, each trained on before the next. Call ``begin`` once, then ``round`` and
    ``finish`` in turn, all on one event loop."""

    def __init__(self, config: RunConfig, host: HostTrainer) -> None:
        self._config = config
        self._host = host
        self._folder = Path(config.output)
        self._counters = Counters()
        self._files = contextlib.ExitStack()
        self._round = contextlib.ExitStack()
        self._before: dict[str, Any] | None = None
        self._failed = False

    async def begin(self, state: Mapping[str, Any] | None) -> None:
        """Measure the engine and open the run's files, anew or with a ``state_dict``."""
        config, host = self._config, self._host
        self._folder.mkdir(parents=True, exist_ok=True)
        save_config(config, self._folder, hosted=True)
        if state is not None:
            self._counters = Counters(**state["counters"])
        self._workers = InProcess(host.engine, host.weights, lockstep=config.deterministic)
        cap = host.params.max_tokens
        self._settings = rollout_settings(config, host.problems, self._workers, cap, hosted=True)
        self._clock = Clock(0.0 if state is None else state["clock_s"])
        self._log = RunLog(
            self._folder,
            config,
            last_step=self._counters.step - 1,
            max_length=cap,
            progress=host.progress,
            texts=Texts(host.tokenizer, host.read, host.problems.rows),
            trackers=(),
        )
        self._files.callback(self._log.close)
        self._updates = Updates(
            self._workers,
            algorithms.build(config.train.algorithm, config.rollout.min_reward_range),
            max_length=cap,
            clock=self._clock,
        )
        self._plan(state)
        await Breaker().run(publish(self._workers, self._counters.step))
        self._files.callback(self._leave)

    def _plan(self, state: Mapping[str, Any] | None) -> None:
        host = self._host
        self._policy = RolloutPolicy(self._settings)
        setup = Setup(
            workers=self._workers,
            problems=host.problems,
            rewards=host.rewards,
            params=host.params,
            seed=self._config.seed,
            clock=self._clock,
            lockstep=self._config.deterministic,
        )
        journal = self._log.journal.record
        self._driver = train_driver(self._config, setup, self._policy, journal, self._updates)
        if state is not None:
            self._policy.load_state_dict(state["policy"])
            host.problems.source.load_state_dict(state["source"])
        self._log.journal.meta(self._policy.journal_head())

    @property
    def step(self) -> int:
        """The number of finished rounds, which is also the version of the next round's weights."""
        return self._counters.step

    @property
    def bias(self) -> Bias:
        return self._policy.bias()

    @property
    def open(self) -> bool:
        return self._before is not None

    async def round(self) -> StepRecord:
        """Sample and grade a round's groups. After a failure the next call begins at the same
        state. Raises ``WorkerError`` if the engine fails, ``ValueError`` if rewards do."""
        assert not self.open
        self._before = self._state()
        self._workers.begin()
        self._cpu_s = time.process_time()
        try:
            self._round.enter_context(self._driver.begin(self.step))
            await Breaker().run(self._driver.roll_out())
        except BaseException:
            before, self._before, self._failed = self._before, None, True
            self._round.close()
            self._forget()
            self._plan(before)
            raise
        self._failed = False
        return self._driver.record

    def _forget(self) -> None:
        """Abort decoding and grading, because the next round uses the same numbers of attempts."""
        self._host.engine.abort(list(self._driver.record.attempts))
        for attempt in list(self._host.rewards.pending()):
            self._host.rewards.cancel(attempt)

    async def finish(self, update: HostUpdate) -> Metrics:
        """After the host has trained on the round, load its weights and record the step."""
        assert self.open
        self._workers.trained(update)
        with self._round:
            await Breaker().run(self._driver.learn())
        record, counters = self._driver.record, self._counters
        counters.driver_cpu_s += time.process_time() - self._cpu_s
        groups = self._updates.groups
        counters.add(record, groups, self.bias.kept_vs_true_len, learns=True)
        metrics = await self._log.step(
            record,
            groups,
            policy=self._policy,
            num_tokens=counters.num_tokens,
            epoch=self._host.problems.source.passed,
            extra={},
        )
        self._before = None
        return metrics

    def turn_epoch(self) -> None:
        source = self._host.problems.source
        left = sum(source.remaining().values()) + self._policy.queue
        if left < self._config.rollout.prompts_per_step:
            self._counters.epochs = source.epoch + 1
            self._driver.end_epoch(source.epoch)
            source.next_epoch()

    async def refresh(self) -> None:
        """Let the engine decode with the current weights, between rounds."""
        await Breaker().run(publish(self._workers, self.step))

    def state_dict(self) -> dict[str, Any]:
        """The state for a resumed run, as JSON. An open round will be sampled again."""
        return self._state() if self._before is None else self._before

    def _state(self) -> dict[str, Any]:
        return {
            "policy": self._policy.state_dict(),
            "source": self._host.problems.source.state_dict(),
            "counters": self._counters.state_dict(),
            "clock_s": self._clock(),
        }

    def close(self) -> None:
        """Close the run's open files. The engine stays open for its host."""
        self._round.close()
        self._files.close()

    def _leave(self) -> None:
        self._forget()
        cut = self.open or self._failed
        self._log.sum_up(self._counters.summary() | {"workers": 1, "interrupted": cut})
