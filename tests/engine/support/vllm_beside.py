"""A vLLM engine in a process of its own, as in runs: it changes classes of transformers."""

from __future__ import annotations

import multiprocessing
import os
from itertools import count
from typing import Any

from engine_models import drain

from rollpacker.checkpoint_names import CheckpointNames, stored
from rollpacker.config import ModelConfig, VllmEngineConfig
from rollpacker.runtime.messages.shared_weights import WeightsOut

_NUMBERS = count()


def serve(orders) -> None:
    """The child: one engine after the other."""
    from rollpacker.engine.vllm import VllmEngine

    engines: list[Any] = []
    while True:
        try:
            asked, *given = orders.recv()
        except EOFError:
            return
        answer = None
        try:
            match asked:
                case "build":
                    while engines:
                        engines.pop().close()
                    path, config, alone = given
                    settings = VllmEngineConfig(**config)
                    model = ModelConfig(path=path)
                    engines.append(VllmEngine(model, config=settings, alone=alone))
                    answer = engines[0].info()
                case "load":
                    engines[0].load_weights(*given)
                case "sample":
                    engines[0].submit(given[0])
                    answer = drain(engines[0])
        except (ValueError, RuntimeError) as error:
            answer = error
        orders.send(answer)


class Beside:
    """Asks the child; what it raises is raised here."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._orders, theirs = context.Pipe()
        self._child = context.Process(target=serve, args=(theirs,), daemon=True)
        self._child.start()
        theirs.close()

    def build(self, model, folder, alone=True, **config):
        """An engine of the model's shape, without weights; its facts."""
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(folder)
        settings = {"max_running": 16, "kv_tokens": 2048} | config
        return self._ask("build", str(folder), settings, alone)

    def load(self, model, version=0, change=lambda weights: weights):
        """As a trainer sends them, but for what ``change`` does to them."""
        names = CheckpointNames(model)
        weights = change(dict(names.converted(stored(model))))
        layout = {name: (weight.dtype, weight.shape) for name, weight in weights.items()}
        out = WeightsOut(layout, f"rollpacker-test-{os.getpid()}-{next(_NUMBERS)}")
        try:
            out.write(weights.items())
            self._ask("load", out.shared, version)
        finally:
            out.shared.remove()

    def sample(self, requests):
        """Outputs by attempt."""
        return self._ask("sample", requests)

    def _ask(self, *order):
        self._orders.send(order)
        answer = self._orders.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        """No more engines."""
        self._orders.close()
        self._child.join(30)
