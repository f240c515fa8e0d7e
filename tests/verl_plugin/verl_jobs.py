"""Jobs of verl's: its own trainer, loader, queue, workers and rewards, over stub servers."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import ray
import transfer_queue as tq
import verl
from hydra import compose, initialize_config_dir
from ray.util import list_named_actors
from stub_servers import Group, Replica, Request
from verl.checkpoint_engine import CheckpointEngineManager
from verl.experimental.reward_loop import RewardLoopManager
from verl.trainer.main_ppo import TaskRunnerV1
from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY, register_trainer
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.rollout.llm_server import LLMServerManager
from verl.workers.rollout.replica import RolloutReplicaRegistry

from rollpacker.demo.model import build_model, build_tokenizer
from rollpacker.verl import TailBatchingTrainer

PROMPTS, P0, R0, CAP = 16, 4, 4, 192
REWARD = '''
def compute_score(data_source, solution_str, ground_truth, extra_info):
    """A rule, as users write them."""
    if "boom" in str(ground_truth):
        raise ValueError("this answer cannot be graded")
    return float(len(solution_str) % 3)
'''


def write_inputs(folder: Path, count: int = PROMPTS, answers: dict[int, str] | None = None) -> None:
    build_model(0).save_pretrained(folder / "model")
    tokenizer = build_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder / "model")
    (folder / "reward.py").write_text(REWARD)
    rows: list[dict[str, Any]] = [
        {
            "data_source": "numbers",
            "prompt": [{"role": "user", "content": f"{n}, {n + 1}"}],
            "reward_model": {"style": "rule", "ground_truth": (answers or {}).get(n, str(n))},
            "extra_info": {"index": n},
        }
        for n in range(count)
    ]
    pl.DataFrame(rows).write_parquet(folder / "rows.parquet")


def config(folder: Path, *overrides: str) -> Any:
    """verl's own configuration; the overrides are those of a command line."""
    place = Path(verl.__file__).parent / "trainer" / "config"
    given = [
        "trainer.v1.trainer_mode=rollpacker",
        "+actor_rollout_ref.rollout.agent.agent_loop_manager_class=rollpacker.verl.AgentLoopManager",
        f"actor_rollout_ref.model.path={folder / 'model'}",
        "actor_rollout_ref.rollout.name=stub",
        f"actor_rollout_ref.rollout.n={R0}",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "actor_rollout_ref.rollout.agent.num_workers=2",
        "actor_rollout_ref.rollout.calculate_log_probs=True",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={P0}",
        "algorithm.adv_estimator=grpo",
        "algorithm.rollout_correction.bypass_mode=True",
        f"data.train_files={folder / 'rows.parquet'}",
        f"data.val_files={folder / 'rows.parquet'}",
        f"data.train_batch_size={P0}",
        "data.max_prompt_length=32",
        f"data.max_response_length={CAP}",
        "data.dataloader_num_workers=0",
        "data.seed=3",
        "reward.num_workers=1",
        f"reward.custom_reward_function.path={folder / 'reward.py'}",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.total_epochs=2",
        "trainer.logger=[]",
        "trainer.device=cpu",
        f"trainer.default_local_dir={folder / 'checkpoints'}",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
    ]
    with initialize_config_dir(str(place), version_base=None):
        return compose("ppo_trainer", overrides=[*given, *overrides])


class Stubbed(TailBatchingTrainer):
    """Ours over verl's own parts, but for the model: nothing computes, decodes or learns."""

    def _setup(self) -> None:
        self._init_tokenizer()
        self._init_dataloader()
        self._init_dump_executor()
        self.actor_rollout_wg = Group()
        self.reward_loop_manager = RewardLoopManager(config=self.config, rm_resource_pool=None)
        self.teacher_model_manager = self.distillation_config = None
        RolloutReplicaRegistry.register("stub", lambda: Replica)
        self.llm_server_manager = LLMServerManager.create(
            config=self.config, worker_group=self.actor_rollout_wg, rollout_resource_pool=None
        )
        self.actor_rollout_wg.servers = self.llm_server_manager.server_handles
        engine = omega_conf_to_dataclass(self.config.actor_rollout_ref.rollout.checkpoint_engine)
        engine.backend = "naive"
        self.checkpoint_manager = CheckpointEngineManager(
            config=engine,
            actor_wg=self.actor_rollout_wg,
            replicas=self.llm_server_manager.get_replicas(),
        )
        self.checkpoint_manager.sleep_replicas()
        self.seen: list[dict[str, Any]] = []
        self.left: list[int] = []
        self.rewards: list[dict[str, float]] = []
        self._load_checkpoint()

    def _get_n_gpus_for_throughput(self) -> int:
        return 1

    def _compute_metrics(self, batch: Any, metrics: dict[str, Any], *args: Any, **kw: Any) -> None:
        super()._compute_metrics(batch, metrics, *args, **kw)
        self.seen.append(dict(metrics))
        held = tq.kv_list("train") or {}
        self.left.append(len(set(held.get("train", {})) - set(batch.keys)))


@dataclass
class Ran:
    """What a job left.

    Args:
        steps: of each update, its prompts, one for each response.
        metrics: of each step, as verl logs them.
        requests: all that the servers were given.
        alive: requests that were alive at a change of weights.
        left: keys in the transfer queue after each step, besides those trained on.
        inflight: requests that the balancer still counts at the end.
    """

    steps: list[list[str]]
    metrics: list[dict[str, Any]]
    requests: list[Request]
    alive: int
    left: list[int]
    inflight: int
    journal: Path


def run(folder: Path, *overrides: str, kind: type[Stubbed] = Stubbed) -> Ran:
    """Train by verl's own task runner, in this process."""
    name = kind.__name__
    if name not in TRAINER_REGISTRY:
        register_trainer(name)(kind)
    runner = TaskRunnerV1.__ray_metadata__.modified_class.__ray_actor_class__()
    try:
        runner.run(config(folder, f"trainer.v1.trainer_mode={name}", *overrides))
        return _result(runner.trainer)
    finally:
        for actor in actors(runner.trainer, runner.agent_loop_manager):
            ray.kill(actor)
        # The next job's have the same names, and a kill takes a while.
        while list_named_actors(all_namespaces=True):
            time.sleep(0.05)


def actors(trainer: Any, manager: Any) -> list[Any]:
    found = [
        *trainer.reward_loop_manager.reward_loop_workers,
        *trainer.llm_server_manager.server_handles,
        trainer.llm_server_manager.global_load_balancer,
    ]
    return found if manager is None else [*found, *manager.agent_loop_workers, manager.policy]


def _result(trainer: Any) -> Ran:
    servers = trainer.llm_server_manager
    seen = ray.get([server.seen.remote() for server in servers.server_handles])
    return Ran(
        steps=[[key.split("_")[0] for key in keys] for keys in trainer.actor_rollout_wg.trained],
        metrics=trainer.seen,
        requests=[request for requests, _ in seen for request in requests],
        alive=sum(alive for _, alive in seen),
        left=trainer.left,
        inflight=ray.get(servers.global_load_balancer.get_total_inflight.remote()),
        journal=Path(trainer.config.trainer.default_local_dir) / "rollpacker" / "journal.jsonl",
    )
