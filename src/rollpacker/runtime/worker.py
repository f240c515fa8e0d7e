"""A worker: one process, one device, an engine and a training replica over the same weights.

With LoRA the engine has a model of its own, which every step fills with the merged weights.
"""

from __future__ import annotations

import gc
import os
import time
import traceback
import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any

from rollpacker.config import MiniEngineConfig, RunConfig
from rollpacker.core.types import AttemptId
from rollpacker.runtime import messages as msg
from rollpacker.runtime.durable import disk_full
from rollpacker.train.base import NotFiniteError

if TYPE_CHECKING:
    from rollpacker.engine.base import Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """How to build a worker.

    Args:
        config: the run's.
        rank: 0 to world - 1.
        cores: CPU cores to stay on; empty for any.
        device: ``cpu`` or ``cuda:N``.
        max_length: longest response in tokens.
        total_updates: updates of the whole run.
    """

    config: RunConfig
    rank: int
    cores: tuple[int, ...]
    device: str
    max_length: int
    total_updates: int


def main(connection: Connection, spec: WorkerSpec) -> None:
    """Entry point of the process: serve until told to stop or the driver is gone."""
    if spec.cores:
        os.sched_setaffinity(0, spec.cores)
    try:
        Worker(connection, spec).serve()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
    except ValueError as error:
        connection.send(msg.Died(error=str(error), user_error=True))
    except NotFiniteError as error:
        connection.send(msg.Died(error=str(error), user_error=False))
    except Exception:
        connection.send(msg.Died(error=traceback.format_exc(), user_error=False))


class Worker:
    """Decodes while it has attempts, accumulates gradients while it has none."""

    def __init__(self, connection: Connection, spec: WorkerSpec) -> None:
        import torch
        from transformers.utils import logging

        from rollpacker.train.local import LocalTrainer
        from rollpacker.train.model import load_model

        logging.disable_progress_bar()
        config = spec.config
        torch.set_num_threads(config.workers.threads)
        torch.manual_seed(config.seed)
        self._connection = connection
        self._inbox: SimpleQueue[msg.Command | None] = SimpleQueue()
        # Always reading: two processes that both write into full pipes would wait for ever.
        Thread(target=self._listen, name="inbox", daemon=True).start()
        self._tasks: deque[msg.Accumulate] = deque()
        self._lockstep = config.deterministic
        self._held = False
        self._stopped = False
        self._model, tokenizer = load_model(config.model, spec.device)
        self._engine = build_engine(config, _decoded(config, self._model), tokenizer)
        info = self._engine.info()
        self._trainer = LocalTrainer(
            self._model,
            tokenizer,
            config.train,
            temperature=config.rollout.temperature,
            max_length=spec.max_length,
            total_updates=spec.total_updates,
            lora=config.model,
        )
        self._begin_work()
        self._send(msg.Ready(info=info))

    def serve(self) -> None:
        """Answer commands; between them decode, or accumulate when nothing decodes."""
        gc.collect()
        gc.freeze()  # collections must not walk the libraries' objects again and again
        while not self._stopped:
            decoding = self._engine.busy() and not self._held
            if not (decoding or self._tasks) or not self._inbox.empty():
                self._receive()
            elif decoding:
                self._decode()
            elif self._tasks:
                self._accumulate(self._tasks.popleft())

    def _listen(self) -> None:
        try:
            while True:
                self._inbox.put(self._connection.recv())
        except (EOFError, OSError):
            self._inbox.put(None)

    def _receive(self) -> None:
        """Wait for the next command. Raises ``EOFError`` when the driver is gone."""
        command = self._inbox.get()
        if command is None:
            raise EOFError
        self._handle(command)

    def _send(self, report: msg.Report) -> None:
        self._connection.send(report)

    def _handle(self, command: msg.Command) -> None:
        match command:
            case msg.Submit():
                self._submit(command)
            case msg.Abort():
                self._abort(command.attempts)
            case msg.Proceed():
                self._held = False
            case msg.Accumulate():
                self._tasks.append(command)
            case msg.Stop():
                self._stopped = True
            case _:
                self._handle_update(command)

    def _handle_update(self, command: msg.Command) -> None:
        """Commands that come while nothing decodes."""
        match command:
            case msg.BeginStep():
                self._begin_work()
                weights = None if self._trainer.shares_weights else self._trainer.weights()
                self._engine.load_weights(weights, command.version)
            case msg.Score():
                self._score(command)
            case msg.Apply():
                self._apply(command)
            case msg.Reform():
                self._trainer.world = join(command)
            case msg.Save():
                self._answer(self._trainer.save, command.folder)
            case msg.Load():
                self._answer(self._trainer.load, command.folder)
            case _:
                raise AssertionError(f"unknown command {command!r}")

    def _submit(self, command: msg.Submit) -> None:
        for request in command.requests:
            try:
                self._engine.submit([request])
            except ValueError as error:
                self._send(msg.Failed(attempts=[request.attempt], error=str(error)))

    def _abort(self, attempts: Sequence[AttemptId]) -> None:
        self._send(msg.Aborted(outputs=self._engine.abort(attempts)))

    def _decode(self) -> None:
        before = time.process_time()
        outputs = self._engine.step()
        self._decode_cpu_s += time.process_time() - before
        if outputs:
            self._held = self._lockstep
            self._send(msg.Finished(outputs=outputs))

    def _accumulate(self, task: msg.Accumulate) -> None:
        start = time.monotonic()
        partial = self._trainer.accumulate(task.groups)
        self._send(
            msg.Accumulated(
                parts=task.parts,
                partial=partial,
                start_s=start,
                end_s=time.monotonic(),
            )
        )

    def _score(self, command: msg.Score) -> None:
        start = time.monotonic()
        logprobs = self._trainer.score(command.groups)
        self._send(msg.Scored(logprobs=logprobs, start_s=start, end_s=time.monotonic()))

    def _apply(self, command: msg.Apply) -> None:
        start = time.monotonic()
        update = self._trainer.apply(command.total)
        self._send(
            msg.Applied(
                update=update,
                checksum=self._checksum() if command.checksum else 0,
                work=self._work(),
                start_s=start,
                end_s=time.monotonic(),
            )
        )

    def _begin_work(self) -> None:
        self._before = self._engine.stats()
        self._cpu_before = time.process_time()
        self._decode_cpu_s = 0.0

    def _work(self) -> msg.Work:
        now, before = self._engine.stats(), self._before
        return msg.Work(
            decode_steps=now.steps - before.steps,
            generated_tokens=now.generated_tokens - before.generated_tokens,
            prefill_tokens=now.prefill_tokens - before.prefill_tokens,
            preemptions=now.preemptions - before.preemptions,
            cpu_s=time.process_time() - self._cpu_before,
            decode_cpu_s=self._decode_cpu_s,
        )

    def _checksum(self) -> int:
        """CRC-32 of all weights; replicas must agree."""
        import torch

        total = 0
        for parameter in self._model.parameters():
            data = parameter.detach().cpu().contiguous().view(-1).view(torch.uint8)
            total = zlib.crc32(data.numpy().data, total)
        return total

    def _answer(self, action: Any, folder: str) -> None:
        try:
            action(Path(folder))
        except ValueError as error:
            self._send(msg.Done(error=str(error), user_error=True))
        except OSError as error:
            self._send(msg.Done(error=f"{type(error).__name__}: {error}"))
        except BaseException as error:  # torch's and safetensors' own, some of them no Exception
            if not disk_full(error, Path(folder)):
                raise
            self._send(msg.Done(error="no space left on device"))
        else:
            self._send(msg.Done())


def _decoded(config: RunConfig, model: Any) -> Any:
    """The model that the engine decodes from: the trained one, or one for its merged adapters."""
    if config.model.lora_rank == 0:
        return model
    from rollpacker.train.lora import engine_copy

    return engine_copy(model)


def build_engine(config: RunConfig, model: Any, tokenizer: Any) -> Engine:
    """The configured engine over ``model``."""
    if isinstance(config.engine, MiniEngineConfig):
        from rollpacker.engine.mini import MiniEngine

        return MiniEngine(
            model,
            config=config.engine,
            tokenizer=tokenizer,
            deterministic=config.deterministic,
            sharers=config.workers.per_gpu,
        )
    from rollpacker.engine.fake import FakeEngine

    return FakeEngine(config.engine)


def join(command: msg.Reform) -> Any:
    """Meet the other workers; None when there is no other.

    Raises ``RuntimeError`` when they do not come within a minute.
    """
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    if command.world == 1:
        return None
    dist.init_process_group(
        "gloo",
        init_method=f"file://{command.rendezvous}",
        rank=command.rank,
        world_size=command.world,
        timeout=timedelta(seconds=60),
    )
    return dist.group.WORLD
