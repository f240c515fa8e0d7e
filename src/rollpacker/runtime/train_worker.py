"""A training replica that is told what to sum, and when to update, by messages."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollpacker.runtime import messages as msg
from rollpacker.runtime.durable import disk_full
from rollpacker.runtime.faults import Fault
from rollpacker.runtime.shared_weights import WeightsOut
from rollpacker.runtime.worker import Commands, Send, WorkerSpec, prepared
from rollpacker.train.configured import build_trainer

if TYPE_CHECKING:
    from rollpacker.train.trainer import Trainer

_MEETING = timedelta(seconds=60)
"""In which the other replicas come, and reduce."""


class TrainWorker:
    """Sums gradients when nothing else is to be done; all other commands at once."""

    def __init__(self, trainer: Trainer, send: Send) -> None:
        self._trainer = trainer
        self._send = send
        self._tasks: deque[msg.Accumulate] = deque()
        self._out: WeightsOut | None = None
        self.progress = 0
        self.commands: Commands = {
            msg.Accumulate: self._tasks.append,
            msg.Score: self._score,
            msg.Apply: self._apply,
            msg.Share: self._share,
            msg.Reform: self._reform,
            msg.Save: lambda command: self._answer(trainer.save, command.folder),
            msg.Load: lambda command: self._answer(trainer.load, command.folder),
        }

    def close(self) -> None:
        """Leave nothing behind."""
        if self._out is not None:
            self._out.shared.remove()

    def busy(self) -> bool:
        """Whether there are gradients to sum."""
        return bool(self._tasks)

    def work(self) -> None:
        """The next gradients."""
        task, start = self._tasks.popleft(), time.monotonic()
        partial = self._trainer.accumulate(task.groups)
        self.progress += 1
        self._send(
            msg.Accumulated(
                parts=task.parts, partial=partial, start_s=start, end_s=time.monotonic()
            )
        )

    def _score(self, command: msg.Score) -> None:
        start = time.monotonic()
        logprobs = self._trainer.score(command.groups)
        self._send(msg.Scored(logprobs=logprobs, start_s=start, end_s=time.monotonic()))

    def _apply(self, command: msg.Apply) -> None:
        start = time.monotonic()
        update = self._trainer.apply(command.total)
        checksum = self._trainer.checksum() if command.checksum else 0
        end = time.monotonic()
        self._send(msg.Applied(update=update, checksum=checksum, start_s=start, end_s=end))

    def _share(self, command: msg.Share) -> None:
        start, trainer = time.monotonic(), self._trainer
        shared = None
        if trainer.leads:
            self._out = self._out or WeightsOut(trainer.layout, command.prefix)
            self._out.write(trainer.weights())
            shared = self._out.shared
        else:
            for _ in trainer.weights():  # each of them is gathered for the lead
                pass
        self._send(msg.Shared(weights=shared, start_s=start, end_s=time.monotonic()))

    def _reform(self, command: msg.Reform) -> None:
        import torch.distributed as dist

        from rollpacker.train.mesh import meet

        store = dist.FileStore(  # pyright: ignore[reportPrivateImportUsage]
            command.rendezvous, command.world
        )
        store.set_timeout(_MEETING)
        device = self._trainer.device
        self._trainer.world = meet(store, command.rank, command.world, _MEETING, device)

    def _answer(self, action: Callable[[Path], None], folder: str) -> None:
        fault = None
        try:
            action(Path(folder))
        except ValueError as error:
            fault = Fault(kind="user", text=str(error))
        except OSError as error:
            fault = Fault(kind="storage", text=f"{type(error).__name__}: {error}")
        except BaseException as error:  # torch's and safetensors' own, some of them no Exception
            if not disk_full(error, Path(folder)):
                raise
            fault = Fault(kind="storage", text="no space left on device")
        self._send(msg.Done(fault=fault))


def replica_worker(spec: WorkerSpec, send: Send) -> TrainWorker:
    """A replica, or a part of one, in a process of its own."""
    worker = TrainWorker(trainer_of(spec, *prepared(spec)), send)
    send(msg.Ready())
    return worker


def trainer_of(spec: WorkerSpec, model: Any, tokenizer: Any) -> Trainer:
    """The worker's part of its replica."""
    assert spec.replica is not None
    span = spec.replica.span
    return build_trainer(
        spec.config,
        model,
        tokenizer,
        max_length=spec.max_length,
        total_updates=spec.total_updates,
        rank=span.rank,
        members=span.size,
        meeting=span.meeting,
    )
