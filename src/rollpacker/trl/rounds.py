"""Rounds of one trainer: from its examples to kept responses, and from its updates to the next."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from rollpacker.config import MiniEngineConfig
from rollpacker.config.rollout import RACED, EngineConfig, TailBatchingConfig
from rollpacker.core.types import AttemptId, Prompt, PromptId, sampling_seed
from rollpacker.engine.base import Engine, Output, Request
from rollpacker.engine.configured import build_engine
from rollpacker.runtime.attempts import Attempt
from rollpacker.runtime.durable import replace_file
from rollpacker.runtime.hosted import Host, HostedJob
from rollpacker.runtime.in_process import HostUpdate
from rollpacker.runtime.metrics import Metrics
from rollpacker.runtime.progress import Progress
from rollpacker.train.base import Update
from rollpacker.train.lora import merged_weights
from rollpacker.trl.loop_thread import LoopThread
from rollpacker.trl.prompts import (
    Encoded,
    Example,
    Examples,
    Given,
    Share,
    TrainerProblems,
    given_rows,
)
from rollpacker.trl.rewards import Function, Logged, TrainerRewards
from rollpacker.trl.settings import reward_names, run_config, sampling_params

_LOG = logging.getLogger("rollpacker")
_PARSED = ("response_schema", "response_template")
"""Attributes of tokenizers whose completions the trainer parses."""
_EVALUATION = -1
"""In place of a round in seeds: every evaluation samples with the same random numbers."""


class Notes(Progress):
    """Tells the user through ``logging``: the trainer has the terminal."""

    def __init__(self) -> None:
        super().__init__(Console(quiet=True))

    def note(self, text: str) -> None:
        """A line."""
        level = logging.WARNING if text.startswith("WARNING") else logging.INFO
        _LOG.log(level, "%s", text)


@dataclass(slots=True)
class Timed:
    """When the trainer began with a round, and when its last update was made."""

    micro_steps: int = 0
    start_s: float = 0.0
    end_s: float = 0.0
    used_up: bool = False
    learning_rate: float = 0.0


class Rounds:
    """Samples a trainer's rounds; its methods are called by the trainer's thread.

    Args:
        trainer: TRL's.
        tail: what becomes of the tail.
        engine: which one decodes, and its settings.
        reward_threads: for reward functions that are not coroutines.
    """

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
        self._loop: LoopThread | None = None
        self._kept: list[Attempt] = []
        self._timed = Timed()

    @property
    def races(self) -> bool:
        """Whether prompts are drawn here, more than a round keeps; else by the trainer."""
        return self._tail.mode in RACED

    # From the trainer's start to its end ------------------------------------------------------

    def resume(self, checkpoint: str | None) -> None:
        """Go on from one of the trainer's checkpoints, or begin anew. Raises ``ValueError``."""
        self._state = None
        if checkpoint is None:
            return
        path = Path(checkpoint) / self._file
        if path.is_file():
            self._state = json.loads(path.read_text())
        elif self.races:
            raise ValueError(
                f"{path} is missing: the checkpoint is not of a run with "
                f"tail_batching='{self._tail.mode}', which knows what was trained on; go on with "
                "'exact', or train anew"
            )

    def save(self, checkpoint: Path) -> None:
        """Beside what the trainer has saved."""
        if self._loop is not None:
            self._finish({})
            state = self._loop.call(self._job.state_dict)
            replace_file(checkpoint / self._file, json.dumps(state).encode())

    def close(self) -> None:
        """The trainer has ended: close the run's files and write its report."""
        loop, self._loop = self._loop, None
        if loop is None:
            return
        try:
            if self._timed.used_up:
                loop.run(self._job.finish(self._update({})))
            loop.call(lambda: self._job.close(write_reports))
        finally:
            self._rewards.close()
            loop.close()

    def _open(self) -> LoopThread:
        """Build everything, when the trainer's model is where it trains."""
        if self._loop is not None:
            return self._loop
        trainer = self._trainer
        config = run_config(trainer, self._tail, self._engine_config, str(self.folder))
        self._seed, self._params = config.seed, sampling_params(trainer)
        device = str(trainer.accelerator.device)
        tokenizer = trainer.processing_class
        self._engine = build_engine(config, self._model(), tokenizer, device)
        self._rewards = TrainerRewards(
            self._early(),
            decode=self._decode,
            state=trainer.state,
            loop=getattr(trainer, "async_loop", None),
            threads=self._reward_threads,
        )
        self._problems = self._prompts()
        host = Host(
            engine=self._engine,
            weights=self._weights,
            problems=self._problems,
            rewards=self._rewards,
            params=self._params,
            tokenizer=tokenizer,
            progress=Notes(),
        )
        self._job = HostedJob(config, host)
        self._loop = LoopThread()
        self._loop.run(self._job.begin(self._state))
        return self._loop

    def _model(self) -> Any:
        """The trainer's own, out of its wrappers; adapters are layers in it."""
        model = self._trainer.accelerator.unwrap_model(self._trainer.model)
        return model.get_base_model() if hasattr(model, "get_base_model") else model

    def _weights(self) -> Iterable[tuple[str, torch.Tensor]] | None:
        """For an engine with weights of its own."""
        return (
            None
            if isinstance(self._engine_config, MiniEngineConfig)
            else merged_weights(self._model())
        )

    def _prompts(self) -> TrainerProblems:
        trainer = self._trainer
        accelerator, dataset = trainer.accelerator, trainer.train_dataset
        source: Given | Share
        if self.races:
            source = Share(
                len(dataset),
                trainer.args.seed,
                bool(trainer.args.shuffle_dataset),
                accelerator.process_index,
                accelerator.num_processes,
            )
        else:
            size = len(dataset) if hasattr(dataset, "__len__") else 0
            source = Given(size // accelerator.num_processes)
        rows = Examples(dataset)
        return TrainerProblems(rows, Encoded(rows, self._encode), source)

    def _early(self) -> list[Function]:
        """Functions that are called while others decode: not models, and not where completions
        are parsed messages, which only the trainer makes."""
        trainer = self._trainer
        tokenizer = trainer.processing_class
        if any(
            getattr(tokenizer, f"response_{n}", None) is not None for n in ("schema", "template")
        ):
            return []
        named = zip(
            reward_names(trainer),
            trainer.reward_funcs,
            trainer.reward_weights.tolist(),
            strict=True,
        )
        if any(isinstance(call, torch.nn.Module) for call in trainer.reward_funcs):
            return []
        return [Function(name, call, weight) for name, call, weight in named]

    def _encode(self, prompts: Sequence[Any]) -> Sequence[Sequence[int]]:
        return self._trainer._tokenize_prompts(list(prompts))[0]

    def _decode(self, ids: Any, prompts: Sequence[Any]) -> list[Any]:
        """Completions as TRL gives them to reward functions."""
        texts = self._trainer.processing_class.batch_decode(ids, skip_special_tokens=True)
        chat = isinstance(prompts[0], list)
        return [[{"role": "assistant", "content": text}] for text in texts] if chat else texts

    # A round ----------------------------------------------------------------------------------

    def sample(self, examples: Sequence[Example]) -> list[Example]:
        """The examples of the responses that a round kept, given those that the trainer drew.

        Raises what a reward function raised, ``ValueError`` where the engine has no room for a
        prompt.
        """
        loop = self._open()
        self._finish({})
        if not self.races:
            self._offer(examples)
        try:
            record = loop.run(self._job.round())
        except Exception:
            if self._rewards.error is not None:
                raise self._rewards.error from None
            raise
        self._timed = Timed(start_s=time.monotonic())
        kept: dict[PromptId, list[Attempt]] = {}
        for attempt in record.kept:
            kept.setdefault(attempt.prompt, []).append(attempt)
        self._check_whole(len(record.kept), len(examples), record.faults)
        order = record.trained if self.races else list(self._problems.rows)
        self._kept = [attempt for prompt in order for attempt in kept[prompt]]
        rows = self._problems.rows
        return [dict(rows[attempt.prompt].columns) for attempt in self._kept]

    def _offer(self, examples: Sequence[Example]) -> None:
        """The trainer's own draw."""
        rows, tokens = self._problems.rows, self._problems.tokens
        self._problems.forget()
        for row in given_rows(examples, self._trainer.num_generations):
            rows[row.id] = row
        source = self._problems.source
        assert isinstance(source, Given)
        source.epoch = int(self._trainer.state.epoch or 0)
        source.offer([Prompt(id=id_, tokens=len(tokens[id_])) for id_ in rows])

    def _check_whole(self, kept: int, wanted: int, faults: Sequence[str]) -> None:
        if kept != wanted:
            why = f": {faults[0]}" if faults else ""
            raise ValueError(f"{kept} of {wanted} responses of a round could be had{why}")

    @property
    def responses(self) -> list[Output]:
        """Of the round that the trainer trains on, in the order of its examples."""
        return [attempt.output for attempt in self._kept if attempt.output is not None]

    @property
    def prompt_ids(self) -> list[list[int]]:
        """Of the same."""
        return [attempt.prompt_tokens.tolist() for attempt in self._kept]

    def graded(self) -> list[Logged]:
        """What reward functions have said of the same; empty where the trainer calls them."""
        if not self._early():
            return []
        return [self._rewards.logged(attempt.id) for attempt in self._kept]

    def evaluate(self, prompts: Sequence[Any]) -> tuple[list[list[int]], list[list[int]]]:
        """Token ids of prompts, and of one response to each from the weights in place."""
        loop = self._open()
        self._finish({})
        encoded = [np.array(ids, np.int32) for ids in self._encode(prompts)]
        requests = [
            Request(
                attempt=AttemptId(-1 - n),
                group=PromptId(str(ids.tobytes())),
                prompt=ids,
                params=self._params,
                seed=sampling_seed(self._seed, _EVALUATION, PromptId(str(n)), 0),
            )
            for n, ids in enumerate(encoded)
        ]
        loop.run(self._job.refresh())
        outputs = {o.attempt: o for o in loop.call(lambda: decode_all(self._engine, requests))}
        answers = [outputs[request.attempt].tokens.tolist() for request in requests]
        return [ids.tolist() for ids in encoded], answers

    # What the trainer did with it -------------------------------------------------------------

    def trained(self) -> None:
        """The trainer has made a micro-step."""
        self._timed.micro_steps += 1

    def updated(self, learning_rate: float) -> None:
        """The trainer has made an update."""
        args, timed = self._trainer.args, self._timed
        timed.end_s, timed.learning_rate = time.monotonic(), learning_rate
        every = args.steps_per_generation * self._trainer.num_iterations
        timed.used_up = timed.micro_steps >= every

    def logged(self, logs: dict[str, float]) -> Metrics | None:
        """The trainer has logged an update; returns the metrics of a round that it ended."""
        return self._finish(logs) if "loss" in logs else None

    def _finish(self, logs: dict[str, float]) -> Metrics | None:
        """End the round when the trainer has used it up, or wants another one."""
        if self._loop is None or not self._timed.used_up:
            return None
        metrics = self._loop.run(self._job.finish(self._update(logs)))
        self._timed = replace(self._timed, used_up=False)
        if self.races:
            self._loop.call(self._turn)
        return metrics

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
    """Step an engine until it holds nothing."""
    engine.submit(requests)
    outputs: list[Output] = []
    while engine.busy():
        outputs += engine.step()
    return outputs


def write_reports(folder: Path) -> None:
    """``report.html`` and ``timeline.json``, where the report extra is installed."""
    try:
        from rollpacker.report.run_report import write_report
        from rollpacker.report.timeline import write_timeline

        write_timeline(folder)
        write_report(folder)
    except (ImportError, OSError, ValueError) as error:
        _LOG.info("no report: %s", error)
