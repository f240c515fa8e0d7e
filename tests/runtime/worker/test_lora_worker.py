"""A worker with LoRA: it decodes from merged weights, trains adapters, and saves what it was."""

from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
from lora_models import (
    FAMILIES,
    MOST,
    ask,
    encode,
    engine_answer,
    load,
    merged_by_peft,
    transformers_answer,
    write_family,
)

from rollpacker import config
from rollpacker.core.types import EngineId, Group, GroupPart, PromptId, ReplicaId, Sample
from rollpacker.engine.base import Output
from rollpacker.runtime.messages import messages as msg
from rollpacker.runtime.worker.worker import EnginePart, ReplicaPart, Server, WorkerSpec
from rollpacker.runtime.worker.worker_process import ColocatedWorker

PROMPT = "012"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
AGREE = {"float32": 1e-5, "bfloat16": 0.03}
"""Mean difference of the sampler's and the trainer's log-probabilities: rounding alone."""


class Driver:
    """The other end of a worker's pipe; the worker itself is real and in a thread."""

    def __init__(self, path: Path, dtype: str, **train: Any) -> None:
        tree = {
            "model": {"path": str(path), "dtype": dtype, "lora_rank": 4},
            "data": {"path": "unused.jsonl"},
            "rewards": [{"function": "unused:unused"}],
            "train": {"learning_rate": 0.05, **train},
            "engine": {"kind": "mini", "max_running": 16},
            "cluster": {"heartbeat_s": 600},
        }
        ours, theirs = Pipe()
        spec = WorkerSpec(
            config=config.parse(tree),
            rank=0,
            cores=(),
            device="cpu",
            max_length=MOST,
            total_updates=9,
            engine=EnginePart(engine=EngineId(0)),
            replica=ReplicaPart(replica=ReplicaId(0)),
        )
        self.pipe: Connection = ours
        server = Server(theirs, spec.config.cluster.heartbeat_s)

        def build(send):
            self.worker = ColocatedWorker(spec, send)
            return self.worker

        self._thread = Thread(target=server.serve, args=(build,), daemon=True)
        self._thread.start()
        self.hear(msg.Ready)

    def hear(self, kind: type[Any]) -> Any:
        report: Any = msg.Noted(text="")
        while isinstance(report, msg.Noted):  # kernels are compiled, where none is on the disk
            assert self.pipe.poll(60), "the worker's thread has ended"
            report = self.pipe.recv()
        assert isinstance(report, kind), report
        return report

    def sample(self, version: int, prompt: list[int], stop: int) -> tuple[Output, list[Output]]:
        """The greedy answer and eight sampled ones of the weights in place."""
        self.pipe.send(msg.LoadWeights(version=version))
        assert self.hear(msg.WeightsLoaded).version == version
        drawn = [ask(i, prompt, group="p", seed=i, stop_token_ids=(stop,)) for i in range(1, 9)]
        greedy = ask(0, prompt, group="p", temperature=0.0, stop_token_ids=(stop,))
        self.pipe.send(msg.Submit(requests=[greedy, *drawn]))
        found: dict[int, Output] = {}
        while len(found) < 9:
            found |= {o.attempt: o for o in self.hear(msg.Finished).outputs}
        assert {o.weights_version for o in found.values()} == {version}
        return found.pop(0), list(found.values())

    def train(self, prompt: list[int], outputs: list[Output]) -> dict[str, float]:
        """One update towards longer answers; means over the tokens."""
        group = grouped(prompt, outputs)
        part = GroupPart(prompt=group.prompt, start=0, stop=len(outputs))
        self.pipe.send(msg.Accumulate(parts=(part,), groups=[group]))
        partial = self.hear(msg.Accumulated).partial
        self.pipe.send(msg.Apply(total=partial, checksum=True))
        applied = self.hear(msg.Applied)
        assert applied.update.applied
        assert applied.update.grad_norm > 0
        return applied.update.metrics

    def save(self, folder: Path) -> None:
        self.pipe.send(msg.Save(folder=str(folder)))
        assert self.hear(msg.Done).fault is None

    def stop(self) -> None:
        self.pipe.send(msg.Stop())
        self._thread.join(timeout=30)
        assert not self._thread.is_alive()


def grouped(prompt: list[int], outputs: list[Output]) -> Group:
    samples = tuple(
        Sample(
            prompt=PromptId("p"),
            index=i,
            attempt=output.attempt,
            prompt_tokens=np.asarray(prompt, np.int32),
            tokens=output.tokens,
            logprobs=output.logprobs,
            finish_reason=output.finish_reason,
            weights_version=output.weights_version,
            reward=float(len(output.tokens)),
        )
        for i, output in enumerate(outputs)
    )
    rewards = np.array([s.reward for s in samples], np.float32)
    return Group(prompt=PromptId("p"), samples=samples, advantages=rewards - rewards.mean())


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        pytest.param(family, dtype, marks=pytest.mark.wide if place and dtype == "bfloat16" else ())
        for place, family in enumerate(FAMILIES)
        for dtype in DTYPES
    ],
)
def test_a_worker_decodes_from_what_it_trains_and_saves_it(
    family: str, dtype: str, tmp_path: Path
) -> None:
    base, kind = write_family(tmp_path / "base", family, dtype), DTYPES[dtype]
    prompt = encode(base, PROMPT)
    driver = Driver(base, dtype, beta=0.05)
    stop = load(base, kind).config.eos_token_id
    first, drawn = driver.sample(0, prompt, stop)
    assert driver.train(prompt, drawn)["kl"] == pytest.approx(0.0, abs=1e-6)
    for version in (1, 2):
        _, drawn = driver.sample(version, prompt, stop)
        metrics = driver.train(prompt, drawn)
        assert metrics["trained_tokens/abs_logprob_difference"] < AGREE[dtype]
        assert metrics["kl"] > 1e-3
    last, _ = driver.sample(3, prompt, stop)
    driver.save(tmp_path / "saved")
    driver.stop()

    before = engine_answer(load(base, kind), prompt, stop)
    np.testing.assert_array_equal(first.tokens, before.tokens)
    assert last.tokens.tolist() != before.tokens.tolist()
    saved, merged = load(tmp_path / "saved", kind), merged_by_peft(base, tmp_path / "saved", kind)
    again = engine_answer(saved, prompt, stop)
    assert again.tokens.tolist() == last.tokens.tolist()
    assert again.logprobs.tolist() == last.logprobs.tolist()
    assert engine_answer(merged, prompt, stop).tokens.tolist() == last.tokens.tolist()
    if kind == torch.float32:
        assert transformers_answer(saved, prompt, stop) == last.tokens.tolist()
        assert transformers_answer(merged, prompt, stop) == last.tokens.tolist()
