"""verl's synchronous trainer with rollpacker's rounds."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray  # pyright: ignore[reportMissingImports]
import torch
import transfer_queue as tq  # pyright: ignore[reportMissingImports]
from omegaconf import OmegaConf, open_dict  # pyright: ignore[reportMissingImports]
from verl.trainer.ppo.v1 import register_trainer  # pyright: ignore[reportMissingImports]
from verl.utils import tensordict_utils as tu  # pyright: ignore[reportMissingImports]
from verl.utils.checkpoint.checkpoint_manager import (  # pyright: ignore[reportMissingImports]
    find_latest_ckpt_path,
)

from rollpacker.core.types import Prompt, PromptId
from rollpacker.verl.host import PlainTrainer
from rollpacker.verl.settings import DOMAIN, MODE, check_supported, read, rollout_settings
from rollpacker.verl.worker import CancellingClient

_IDENTITY = ("raw_prompt", "data_source", "reward_model")  # columns that identify a row


class RowQueue:
    """Draws rows, and keeps them until they are trained on.

    A row's ``uid`` is its prompt's id, a hash of the row. It is the same in every epoch and after a
    resume, unlike verl's own. It groups responses as verl's does.

    Args:
        fetch: the next row of the data loader, a TensorDict. It begins anew after the last one.
        size: rows of an epoch.
    """

    def __init__(self, fetch: Callable[[], Any], size: int) -> None:
        self._fetch = fetch
        self._size = size
        self._drawn = 0
        self.epoch = 0  # epochs begun before this one
        self._rows: dict[PromptId, Any] = {}

    @property
    def remaining(self) -> int:
        return self._size - self._drawn

    def draw(self, count: int) -> list[Prompt]:
        assert count <= self.remaining
        prompts: list[Prompt] = []
        for _ in range(count):
            row = self._fetch()
            id_ = self._name(row)
            row["uid"] = tu.get_tensordict({"uid": np.array([id_], dtype=object)})["uid"]
            self._rows[id_] = row
            prompts.append(Prompt(id=id_, domain=DOMAIN))
        self._drawn += count
        return prompts

    def _name(self, row: Any) -> PromptId:
        found = {column: row[column][0] for column in _IDENTITY if column in row}
        text = json.dumps(found, sort_keys=True, default=_plain)
        digest = hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).hexdigest()
        id_, number = PromptId(digest), 1
        while id_ in self._rows:  # an equal row waits
            number += 1
            id_ = PromptId(f"{digest}-{number}")
        return id_

    def batch(self, prompts: Sequence[PromptId]) -> Any:
        rows = [self._rows[prompt] for prompt in prompts]
        return rows[0].clone() if len(rows) == 1 else tu.concat_tensordict(rows)

    def forget(self, prompts: Iterable[PromptId]) -> None:
        for prompt in prompts:
            del self._rows[prompt]

    def next_epoch(self) -> None:
        for _ in range(self.remaining):
            self._fetch()
        self._rows.clear()
        self._drawn, self.epoch = 0, self.epoch + 1

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self._drawn, "epoch": self.epoch, "rows": dict(self._rows)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._drawn, self.epoch = state["drawn"], state["epoch"]
        self._rows = dict(state["rows"])


def _plain(value: object) -> Any:
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else str(value)


_LOG = logging.getLogger(__name__)
_POLL_S = 0.05  # verl itself looks for finished responses only every 2 s
_STATE = "rollpacker.pt"  # the file in a checkpoint with the state of tail batching


@register_trainer(MODE)
class TailBatchingTrainer(PlainTrainer):
    """``PPOTrainerSync`` whose steps train on the responses that rounds with tail batching kept.
    Losses, updates, validation, checkpoints and logging stay verl's. Metrics get ``tail/*``. Raises
    ``ValueError`` in one line for settings that are not supported."""

    def __init__(self, config: Any) -> None:
        section = config.get(MODE)
        plain = None if section is None else OmegaConf.to_container(section, resolve=True)
        self._ours = read(plain)
        check_supported(config)
        with open_dict(config):
            # verl compares this name to tell its asynchronous trainers apart.
            config.trainer.v1.trainer_mode = "sync"
            # A round draws as many rows as it needs.
            config.data.gen_batch_size = 1
        self._state: dict[str, Any] | None = None
        super().__init__(config)

    def get_llm_client(self) -> Any:
        return self.llm_server_manager.get_client(client_cls=CancellingClient)

    def fit(self, agent_loop_manager: Any) -> None:
        if not hasattr(agent_loop_manager, "policy"):
            raise ValueError(
                f"trainer.v1.trainer_mode={MODE} needs +actor_rollout_ref.rollout.agent."
                "agent_loop_manager_class=rollpacker.verl.AgentLoopManager"
            )
        self._policy = agent_loop_manager.policy
        self._rows = RowQueue(self._fetch_one_gen_batch, len(self.train_dataset))
        state = self._state
        if state is not None:
            self._rows.load_state_dict(state["rows"])
        folder = self._ours.output or os.path.join(self.config.trainer.default_local_dir, MODE)
        settings = rollout_settings(self._ours, self.config, len(self.train_dataset))
        driver = None if state is None else state["driver"]
        # Absolute, as actors have another working folder.
        begun = self._policy.begin.remote(settings.to_json(), os.path.abspath(folder), driver)
        ray.get(begun)
        try:
            super().fit(agent_loop_manager)
        finally:
            ray.get(self._policy.close.remote())

    def prepare_step(self) -> dict[str, float]:
        policy, rows = self._policy, self._rows
        waiting = ray.get(policy.held.remote())
        if rows.remaining + waiting < self.config.data.train_batch_size:
            ray.get(policy.end_epoch.remote(rows.epoch))
            rows.next_epoch()
        count = ray.get(policy.start.remote(self.global_steps, rows.remaining))
        started = ray.get(policy.drawn.remote(rows.draw(count)))
        batch = rows.batch(started)
        tu.assign_non_tensor_data(batch, "global_steps", self.global_steps)
        self._submit_batch_to_rollout(batch)
        return {}

    def on_sample_begin(self) -> None:
        """Wait for the round. verl's replay buffer then finds exactly what the round kept."""
        super().on_sample_begin()
        done = ray.get(self._policy.rollout.remote())
        # verl trains on whatever a failed group has, which is nothing here.
        lacking = self.config.data.train_batch_size - len(done.accepted)
        lost = done.dropped[:lacking]
        others = [*done.deferred, *done.dropped[lacking:]]
        if others:
            tq.kv_clear(keys=others, partition_id="train")
        if lost:
            tq.kv_batch_put(
                keys=lost, partition_id="train", tags=[{"status": "failure"} for _ in lost]
            )
        self._rows.forget([*done.accepted, *done.dropped])

    def step(self, metrics: dict[str, Any], timing_raw: dict[str, float]) -> Any:
        batch = super().step(metrics, timing_raw)
        seconds = timing_raw.get("update_actor", 0.0)
        found, alarms = ray.get(self._policy.trained.remote(seconds))
        for alarm in alarms:
            _LOG.warning("step %s: %s", self.global_steps, alarm)
        metrics.update(found)
        return batch

    def on_step_end(self) -> None:
        """verl's own sends the weights to the servers. Report it to the policy."""
        super().on_step_end()
        ray.get(self._policy.published.remote(self.global_steps + 1))

    def _build_replay_buffer(self) -> Any:
        buffer = super()._build_replay_buffer()
        buffer.poll_interval = _POLL_S
        return buffer

    def _save_checkpoint(self) -> None:
        """Save the waiting prompts too, before verl marks the checkpoint as complete."""
        folder = Path(self.config.trainer.default_local_dir) / f"global_step_{self.global_steps}"
        folder.mkdir(parents=True, exist_ok=True)
        driver = ray.get(self._policy.state_dict.remote())
        torch.save({"driver": driver, "rows": self._rows.state_dict()}, folder / _STATE)
        super()._save_checkpoint()

    def _load_checkpoint(self) -> None:
        super()._load_checkpoint()
        if self.global_steps == 0:
            return
        path = self._checkpoint() / _STATE
        if not path.exists():
            raise ValueError(
                f"{path.parent} was made without trainer.v1.trainer_mode={MODE}, so the rows that "
                "it has seen are unknown: start a new run, or train with "
                "trainer.v1.trainer_mode=sync"
            )
        self._state = torch.load(path, weights_only=False)

    def _checkpoint(self) -> Path:
        config = self.config.trainer
        if config.resume_mode == "resume_path":
            return Path(config.resume_from_path)
        return Path(find_latest_ckpt_path(os.path.abspath(config.default_local_dir)))
