"""Rounds of one trainer: from its examples to kept responses, and from its updates to the next."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from rollpacker.config import MiniEngineConfig
from rollpacker.config.rollout import EngineConfig, TailBatchingConfig
from rollpacker.core.types import AttemptId, Prompt, PromptId, sampling_seed
from rollpacker.durable import replace_file
from rollpacker.engine.base import Engine, Output, Request, check_room
from rollpacker.engine.compiling import told_of_compiling
from rollpacker.engine.configured import build_engine
from rollpacker.errors import visible
from rollpacker.job.hosted import HostedJob, HostTrainer
from rollpacker.report.of_run import write_reports
from rollpacker.runtime.attempts.attempts import Trajectory
from rollpacker.runtime.pool.in_process import HostUpdate
from rollpacker.runtime.record.progress import Progress
from rollpacker.train.base import Update
from rollpacker.train.model.adapters import has_adapters
from rollpacker.trl.parts import (
    LoopThread,
    decode,
    decoded_model,
    early_functions,
    encode,
    model_of,
    problems_of,
    weights_of,
)
from rollpacker.trl.prompts import Example, Given, given_rows
from rollpacker.trl.rewards import Logged, TrainerRewards
from rollpacker.trl.settings import in_names_of_trl, run_config, sampling_params

_LOG = logging.getLogger("rollpacker")
_SIGNALS = (
    "reward functions run in a thread during decoding: if one needs the main thread, such as "
    "math-verify with its own timeouts, set GRPOTrainer(reward_threads=0)"
)
_AMID = "amid_round"
_AMID_A_ROUND = (
    "%s was saved amid a round, whose responses TRL does not keep, so the run continues with new "
    "ones. To resume exactly, let save_steps be a multiple of "
    "num_iterations * steps_per_generation / gradient_accumulation_steps."
)
_EVALUATION = -1
"""Replaces the round in seeds, so that every evaluation uses the same random numbers."""


class LoggingProgress(Progress):
    """Writes to ``logging``, as the trainer has the terminal."""

    def __init__(self) -> None:
        super().__init__(Console(quiet=True))

    def note(self, text: str) -> None:
        level = logging.WARNING if text.startswith("WARNING") else logging.INFO
        _LOG.log(level, "%s", in_names_of_trl(text))


@dataclass(slots=True)
class RoundTimes:
    """Times of a round's start and its last update."""

    micro_steps: int = 0
    start_s: float = 0.0
    end_s: float = 0.0
    used_up: bool = False
    learning_rate: float = 0.0


class Rounds:
    """Samples a trainer's rounds. The trainer's thread calls its methods."""

    def __init__(
        self,
        trainer: Any,
        tail: TailBatchingConfig,
        engine: EngineConfig,
        reward_threads: int,
    ) -> None:
        self._trainer = trainer
        self._tail = tail
        self._engine_config = engine
        self._reward_threads = reward_threads
        rank = trainer.accelerator.process_index
        self._file = f"rollpacker-{rank}.json"
        folder = Path(trainer.args.output_dir) / "rollpacker"
        self.folder = folder if rank == 0 else folder / f"rank-{rank}"
        self._state: dict[str, Any] | None = None
        self._engine: Engine | None = None
        self._asleep = False
        self._loop: LoopThread | None = None
        self._kept: list[Trajectory] = []
        self._timed = RoundTimes()

    @property
    def races(self) -> bool:
        """Whether prompts are drawn here, more than a round keeps, instead of by the trainer."""
        return self._tail.races is not None

    # From the trainer's start to its end ------------------------------------------------------

    def resume(self, checkpoint: str | None) -> None:
        """Continue from one of the trainer's checkpoints, or begin anew. Raises ``ValueError``."""
        self._state = None
        if checkpoint is None:
            return
        path = Path(checkpoint) / self._file
        if path.is_file():
            self._state = state = json.loads(path.read_text())
            self._check_drawn(path)
            if state.pop(_AMID, False):
                _LOG.warning(_AMID_A_ROUND, checkpoint)
        elif self.races:
            raise ValueError(
                f"{path} is missing, so the prompts that a run with "
                f"tail_batching='{self._tail.mode}' has trained on are unknown: continue with "
                "'exact', or start a new run"
            )

    def _check_drawn(self, path: Path) -> None:
        """The same side must keep drawing prompts, as the other does not know which were drawn."""
        assert self._state is not None
        raced = bool(self._state["source"])
        if raced != self.races:
            before = "'race', 'prompts' or 'auto'" if raced else "'exact' or 'off'"
            raise ValueError(
                f"{path} is of a run with tail_batching {before}, in which "
                f"{'rollpacker' if raced else 'TRL'} has drawn the prompts, so "
                f"'{self._tail.mode}' cannot continue it: keep the mode, or start a new run"
            )

    def save(self, checkpoint: Path) -> None:
        if self._loop is not None:
            self._finish({})
            state = self._loop.call(self._job.state_dict)
            state[_AMID] = self._job.open
            replace_file(checkpoint / self._file, json.dumps(state).encode())

    def close(self) -> None:
        loop = self._loop
        if loop is None:
            return
        try:
            self._finish({})
            loop.call(self._job.close)
            write_reports(self.folder, _LOG.info)
            self._say(f"the run's files and report.html are in {self.folder}")
        finally:
            self._loop = None
            self._rewards.close()
            loop.close()
            self._decoder().sleep()
            self._asleep = True

    def _open(self) -> LoopThread:
        if self._loop is not None:
            return self._loop
        trainer = self._trainer
        self._functions = early_functions(trainer) if self._reward_threads else []
        self._rewards = TrainerRewards(
            self._functions,
            decode=lambda ids, prompts: decode(trainer, ids, prompts),
            state=trainer.state,
            loop=getattr(trainer, "async_loop", None),
            threads=max(1, self._reward_threads),
        )
        self._problems = problems_of(trainer, self.races)
        host = HostTrainer(
            engine=self._decoder(),
            weights=self._weights,
            problems=self._problems,
            rewards=self._rewards,
            params=self._params,
            tokenizer=trainer.processing_class,
            read=partial(trainer.processing_class.decode, skip_special_tokens=True),
            progress=LoggingProgress(),
        )
        self._job = HostedJob(self._config, host)
        self._loop = LoopThread()
        self._loop.run(self._job.begin(self._state))
        self._say(f"tail batching '{self._tail.mode}', responses by {self._engine_config.kind}")
        return self._loop

    def _say(self, text: str) -> None:
        self._trainer.accelerator.print(f"rollpacker: {visible(text)}")

    def _decoder(self) -> Engine:
        if self._engine is None:
            trainer = self._trainer
            folder = str(self.folder)
            self._config = run_config(trainer, self._tail, self._engine_config, folder)
            self._params = sampling_params(trainer)
            device = str(trainer.accelerator.device)
            try:
                model = decoded_model(trainer)
                tokenizer = trainer.processing_class
                engine = build_engine(self._config, model, tokenizer, device, alone=False)
                with told_of_compiling(self._say):
                    check_room(engine.info(), self._params.max_tokens)
            except ValueError as error:
                raise ValueError(in_names_of_trl(str(error))) from None
            self._engine = engine
        elif self._asleep:
            self._engine.wake()
        self._asleep = False
        return self._engine

    def _weights(self) -> Iterable[tuple[str, Any]] | None:
        mini = isinstance(self._engine_config, MiniEngineConfig)
        shares = mini and not has_adapters(model_of(self._trainer))
        return None if shares else weights_of(self._trainer)

    # A round ----------------------------------------------------------------------------------

    def sample(self, examples: Sequence[Example]) -> list[Example]:
        """The examples of a round's kept responses, from those that the trainer drew. Raises a
        reward function's error, and ``ValueError`` if the engine has no room for a prompt."""
        loop = self._open()
        self._finish({}, used_up=True)
        if not self.races:
            self._offer(examples)
        try:
            record = loop.run(self._job.round())
        except Exception:
            if (error := self._rewards.error) is None:
                raise
            if "main thread" in str(error):
                error.add_note(_SIGNALS)
            raise error from None
        self._timed = RoundTimes(start_s=time.monotonic())
        kept: dict[PromptId, list[Trajectory]] = {}
        for attempt in record.kept:
            kept.setdefault(attempt.prompt, []).append(attempt)
        self._check_whole(len(record.kept), len(examples), record.faults)
        order = record.begun if self.races else list(self._problems.rows)
        self._kept = [attempt for prompt in order for attempt in kept.get(prompt, [])]
        rows = self._problems.rows
        return [dict(rows[attempt.prompt].columns) for attempt in self._kept]

    def _offer(self, examples: Sequence[Example]) -> None:
        rows, tokens = self._problems.rows, self._problems.tokens
        self._problems.forget()
        for row in given_rows(examples, self._trainer.num_generations):
            rows[row.id] = row
        source = self._problems.source
        assert isinstance(source, Given)
        prompts = [Prompt(id=id_, tokens=len(tokens[id_])) for id_ in rows]
        source.offer(prompts, float(self._trainer.state.epoch or 0.0))

    def _check_whole(self, kept: int, wanted: int, faults: Sequence[str]) -> None:
        if kept != wanted:
            why = f": {faults[0]}" if faults else ""
            text = f"a round has only {kept} of {wanted} responses{why}"
            raise ValueError(in_names_of_trl(text))

    @property
    def responses(self) -> list[Output]:
        return [attempt.output for attempt in self._kept if attempt.output is not None]

    @property
    def prompt_ids(self) -> list[list[int]]:
        return [attempt.prompt_tokens.tolist() for attempt in self._kept]

    def graded(self) -> list[Logged]:
        if not self._functions:
            return []
        return [self._rewards.logged(attempt.id) for attempt in self._kept]

    def bias(self) -> dict[str, float]:
        if not self.races:
            return {}
        return {"tail/kept_vs_true_len": self._job.bias.kept_vs_true_len}

    def evaluate(self, prompts: Sequence[Any]) -> tuple[list[list[int]], list[list[int]]]:
        """Token ids of prompts, and of one response to each under the current weights."""
        engine = self._decoder()
        encoded = [np.array(ids, np.int32) for ids in encode(self._trainer, prompts)]
        requests = [
            Request(
                attempt=AttemptId(-1 - n),
                group=PromptId(str(ids.tobytes())),
                prompt=ids,
                params=self._params,
                seed=sampling_seed(self._config.seed, _EVALUATION, PromptId(str(n)), 0),
            )
            for n, ids in enumerate(encoded)
        ]
        if self._loop is None:
            engine.load_weights(self._weights(), 0)
            outputs = decode_all(engine, requests)
        else:
            self._finish({})
            self._loop.run(self._job.refresh())
            outputs = self._loop.call(lambda: decode_all(engine, requests))
        answers = {output.attempt: output.tokens.tolist() for output in outputs}
        return [ids.tolist() for ids in encoded], [answers[each.attempt] for each in requests]

    # The trainer's progress -------------------------------------------------------------------

    def trained(self) -> None:
        self._timed.micro_steps += 1
        self._timed.end_s = time.monotonic()

    def updated(self, learning_rate: float) -> None:
        args, timed = self._trainer.args, self._timed
        timed.end_s, timed.learning_rate = time.monotonic(), learning_rate
        every = args.steps_per_generation * self._trainer.num_iterations
        timed.used_up = timed.micro_steps >= every

    def logged(self, logs: dict[str, float]) -> None:
        if "loss" in logs:
            self._finish(logs)

    def _finish(self, logs: dict[str, float], *, used_up: bool = False) -> None:
        if self._loop is None or not self._job.open or not (used_up or self._timed.used_up):
            return
        self._loop.run(self._job.finish(self._update(logs)))
        self._timed.used_up = False
        if self.races:
            self._loop.call(self._turn)

    def _turn(self) -> None:
        self._job.turn_epoch()
        self._problems.forget()

    def _update(self, logs: dict[str, float]) -> HostUpdate:
        timed = self._timed
        metrics = {"loss": float(logs["loss"])} if "loss" in logs else {}
        return HostUpdate(
            update=Update(
                applied=True,
                grad_norm=float(logs.get("grad_norm", float("nan"))),
                learning_rate=timed.learning_rate,
                metrics=metrics,
            ),
            start_s=timed.start_s,
            end_s=max(timed.start_s, timed.end_s),
        )


def decode_all(engine: Engine, requests: Sequence[Request]) -> list[Output]:
    """Step an engine until it is idle."""
    engine.submit(requests)
    outputs: list[Output] = []
    while engine.busy():
        outputs += engine.step()
    return outputs
