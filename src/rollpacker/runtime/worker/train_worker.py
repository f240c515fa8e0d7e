"""A training replica that carries out the driver's messages."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollpacker.durable import disk_full
from rollpacker.policy.engines.device_split import turns
from rollpacker.runtime.messages import messages as msg
from rollpacker.runtime.messages.faults import Fault
from rollpacker.runtime.messages.shared_weights import WeightsOut
from rollpacker.runtime.worker.weight_relay import WeightRelay
from rollpacker.runtime.worker.worker import Commands, Send, WorkerSpec
from rollpacker.train.configured import build_trainer

if TYPE_CHECKING:
    from rollpacker.train.trainer import Trainer

_MEETING = timedelta(seconds=60)
"""The time for other replicas to come and to reduce."""


class TrainWorker:
    """Sums gradients if there is no other command.

    Ranks of one replica carry out all commands in order, as they wait for each other.

    Args:
        crowded: devices share a GPU.
        alone: the replica has one rank.
        frees: an engine takes turns with it on its device.
    """

    at = "the gradients of a group"

    def __init__(
        self,
        trainer: Trainer,
        send: Send,
        *,
        crowded: bool = False,
        alone: bool = True,
        frees: bool = False,
    ) -> None:
        self.trainer = trainer
        self._send = send
        self._crowded = crowded
        self._frees = frees
        self._tasks: deque[msg.Accumulate] = deque()
        self._out: WeightsOut | None = None
        self._carrier = WeightRelay()
        here: Commands = {
            msg.Accumulate: self._tasks.append if alone else self._accumulate,
            msg.Score: self._score,
            msg.Apply: self._apply,
            msg.Share: self._share,
            msg.Carry: lambda command: send(self._carrier.send(command, self._out)),
            msg.Save: lambda command: self._answer(self._save, command.folder),
            msg.Load: lambda command: self._answer(trainer.load, command.folder),
            msg.Onload: lambda _command: send(msg.Done()),
        }
        self.commands: Commands = {kind: self._onloaded(act) for kind, act in here.items()}
        self.commands |= {msg.Offload: self._offload, msg.Reform: self._reform}

    def _offload(self, _command: msg.Offload) -> None:
        self.trainer.warm.offload()
        self._send(msg.Done(host_bytes=self.trainer.warm.bytes))

    def _onloaded(self, act: Callable[[Any], None]) -> Callable[[Any], None]:
        def call(command: Any) -> None:
            self.trainer.warm.load()
            act(command)

        return call

    def close(self) -> None:
        if self._out is not None:
            self._out.shared.remove()

    def busy(self) -> bool:
        return bool(self._tasks)

    def work(self) -> None:
        self.trainer.warm.load()
        self._accumulate(self._tasks.popleft())

    def _accumulate(self, task: msg.Accumulate) -> None:
        start = time.monotonic()
        partial = self.trainer.accumulate(task.groups)
        if not self._tasks:
            self._free()
        self._send(
            msg.Accumulated(
                parts=task.parts, partial=partial, start_s=start, end_s=time.monotonic()
            )
        )

    def _score(self, command: msg.Score) -> None:
        start = time.monotonic()
        logprobs = self.trainer.score(command.groups)
        self._send(msg.ScoredSamples(logprobs=logprobs, start_s=start, end_s=time.monotonic()))

    def _apply(self, command: msg.Apply) -> None:
        start = time.monotonic()
        update = self.trainer.apply(command.total)
        checksum = self.trainer.checksum() if command.checksum else 0
        self._free()
        end = time.monotonic()
        self._send(msg.Applied(update=update, checksum=checksum, start_s=start, end_s=end))

    def _share(self, command: msg.Share) -> None:
        start, trainer = time.monotonic(), self.trainer
        shared = None
        if trainer.leads:
            self._out = self._out or WeightsOut(trainer.layout, command.name)
            self._out.write(trainer.weights())
            shared = self._out.shared
        else:
            for _ in trainer.weights():  # each one is gathered for the lead
                pass
        self._free()
        self._send(msg.Shared(weights=shared, start_s=start, end_s=time.monotonic()))

    def _free(self) -> None:
        """Release torch's cached memory, which an engine needs to wake."""
        if self._frees and self.trainer.device.type == "cuda":
            from torch.cuda import empty_cache

            empty_cache()

    def _reform(self, command: msg.Reform) -> None:
        from rollpacker.train.mesh import meet

        self.trainer.world = meet(
            command.rendezvous,
            command.rank,
            command.world,
            _MEETING,
            self.trainer.device,
            crowded=self._crowded,
        )

    def _save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.trainer.save(folder)

    def _answer(self, action: Callable[[Path], None], folder: str) -> None:
        fault = None
        try:
            action(Path(folder))
        except ValueError as error:
            fault = Fault(kind="user", text=str(error))
        except OSError as error:
            fault = Fault(kind="storage", text=f"{type(error).__name__}: {error}")
        except BaseException as error:  # torch and safetensors raise some that are no Exception
            if not disk_full(error, Path(folder)):
                raise
            fault = Fault(kind="storage", text="no space left on device")
        self._send(msg.Done(fault=fault))


def train_worker(spec: WorkerSpec, model: Any, tokenizer: Any, send: Send) -> TrainWorker:
    """Build the worker's rank of its replica. If the two take turns, it begins in host memory."""
    assert spec.replica is not None
    config, span = spec.config, spec.replica.span
    trainer = build_trainer(
        config,
        model,
        tokenizer,
        # Tokens of an environment are context, not sampled.
        max_length=config.rollout.max_completion_length or spec.max_length,
        total_updates=spec.total_updates,
        rank=span.rank,
        members=span.size,
        meeting=span.meeting,
    )
    takes_turns = turns(config, gpus=spec.device.startswith("cuda"))
    if takes_turns == "both" and spec.engine is None:
        trainer.warm.offload()
    crowded, alone = config.devices.per_gpu > 1, span.size == 1
    return TrainWorker(trainer, send, crowded=crowded, alone=alone, frees=takes_turns != "off")
