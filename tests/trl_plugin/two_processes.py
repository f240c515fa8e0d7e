"""What each of two processes does; started by ``test_trl_processes``, leaves a file of JSON."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import trl
import trl_jobs as jobs

from rollpacker.demo.model import build_model
from rollpacker.trl import GRPOTrainer

OPTIONS: dict[str, Any] = {"per_device_train_batch_size": 8, "ddp_backend": "gloo"}


def trainer(kind: type, folder: Path, **options: Any) -> Any:
    return jobs.trainer(kind, folder, model=build_model(0), **(OPTIONS | options))


class Watched(GRPOTrainer):
    """Keeps what it trained on."""

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        made = super()._generate_and_score_completions(inputs)
        rounds = self.rollpacker
        seen = self.__dict__.setdefault("seen", [])
        seen.append([output.tokens.tolist() for output in rounds.responses])
        texts = self.processing_class.batch_decode(rounds.prompt_ids)
        self.__dict__.setdefault("prompts", []).extend(texts)
        return made


def digest(of: Any) -> str:
    whole = hashlib.blake2b(digest_size=8)
    for value in jobs.weights(of).values():
        whole.update(value.numpy().tobytes())
    return whole.hexdigest()


def refused(folder: Path) -> str:
    """What is said of groups that would be cut between the processes."""
    try:
        trainer(GRPOTrainer, folder / "cut", per_device_train_batch_size=6)
    except ValueError as error:
        return str(error)
    return ""


def main(what: str, folder: Path) -> dict[str, Any]:
    data = jobs.dataset(25)
    ours = trainer(Watched, folder / "ours", tail_batching=what, train_dataset=data)
    ours.train()
    said = {"steps": ours.state.global_step, "ours": digest(ours), "prompts": ours.prompts}
    if what == "race":
        said["refused"] = refused(folder)
    if what == "exact":
        rounds = iter(ours.seen)

        def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
            ids = trainer.processing_class(text=prompts)["input_ids"]
            return {"prompt_ids": ids, "completion_ids": next(rounds), "logprobs": None}

        plain = trainer(trl.GRPOTrainer, folder / "plain", rollout_func=rollout, train_dataset=data)
        plain.train()
        said["plain"] = digest(plain)
    return said


if __name__ == "__main__":
    place = Path(sys.argv[2])
    told = main(sys.argv[1], place)
    (place / f"said-{os.environ['RANK']}.json").write_text(json.dumps(told))
