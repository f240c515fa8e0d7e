"""The whole configuration of a run, as one frozen tree.

Import paths appear in three leaves only: reward functions, datasets and environments.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from rollpacker.config.base import Config
from rollpacker.config.data import DataConfig, ModelConfig
from rollpacker.config.environment import EnvironmentConfig
from rollpacker.config.rewards import GradingConfig, RewardConfig
from rollpacker.config.rollout import EngineConfig, MiniEngineConfig, RolloutConfig
from rollpacker.config.samples import SamplesConfig
from rollpacker.config.train import LocalTrainerConfig, TrainConfig, TrainerConfig


class DevicesConfig(Config):
    """What decodes and trains: the GPUs of one machine or of several, or their CPU cores."""

    nodes: int = Field(default=1, ge=1)
    """Machines; more than one need ``cluster.address``."""
    per_node: int = Field(default=0, ge=0)
    """Devices of each machine; 0 takes one per core up to two, or ``per_gpu`` on every GPU."""
    per_gpu: int = Field(default=1, ge=1)
    """Devices that a GPU counts as, one GPU filled after the other: with 2, the tail of a step
    decodes beside gradients on a single GPU (CUDA MPS lets both compute at once: ``rollpacker mps
    start``). They share its memory: the KV budget that ``engine.kv_tokens=0`` finds is of their
    share."""
    threads: int = Field(default=1, ge=1)
    """CPU threads of each device's processes."""
    pin: bool = True
    """Pin a device's processes to its own cores (Linux)."""
    kind: Literal["auto", "cpu", "cuda"] = "auto"
    """What devices are."""
    layout: Literal["colocated", "separate"] = "colocated"
    """``colocated``: all devices decode and train in turn, and those that the tail of a step frees
    begin with gradients; ``separate``: ``training`` of them train, from the first complete group
    on, and the others decode."""
    training: int = Field(default=0, ge=0)
    """Devices that train, the last ones, with ``layout: separate``."""
    emulate: str | None = None
    """File of emulated devices (``rollpacker.emulate``): no model is loaded, responses have the
    lengths of a workload, and ``per_node`` devices on each of ``nodes`` take the time that a
    calibration says, divided by a factor. The rest of the run is real, but nothing is trained or
    kept: it measures the driver, and schedules, at a size that the machine does not have."""

    @model_validator(mode="after")
    def _split(self) -> DevicesConfig:
        if self.layout == "separate" and not self.training:
            raise ValueError(
                "devices.layout=separate needs devices.training, how many of the devices train"
            )
        if self.layout == "colocated" and self.training:
            raise ValueError(
                "devices.training: all devices train with devices.layout=colocated; set separate"
            )
        if self.emulate is not None and not self.per_node:
            raise ValueError("devices.emulate needs devices.per_node: how many devices there are")
        return self


class ClusterConfig(Config):
    """Where the processes of a run are, and how it is noticed that one is gone."""

    address: str = ""
    """Of a Ray cluster, whose nodes the run takes: ``auto`` for the one that this machine is a part
    of, or ``HOST:PORT`` of its head node. ``mux``: the nodes that RollMux gives the job, whose
    agents start its processes (``rollpacker mux submit``). Empty: this machine, without Ray."""
    heartbeat_s: float = Field(default=10.0, gt=0.0)
    """Seconds between two signs of life of a process; one that gives none for two to three times
    as long is taken for dead, and what it ran runs elsewhere."""
    restarts: int = Field(default=3, ge=0)
    """Times in a row that lost workers are started again, beside the steps, before the run goes on
    without them; and that the run starts again by itself, from its newest checkpoint, when it has
    lost what it cannot go on without, before it ends. 0, and in runs that share their nodes
    (``mux``) or are emulated: neither."""


class EvalConfig(Config):
    """Accuracy on held-out problems, of a data set of their own or of the training data.

    It chooses nothing, unless ``checkpoint.best`` keeps the checkpoint that does best here: what
    was chosen by it looks better here than it is, so measure that one on other problems.
    """

    data: DataConfig | None = None
    """Problems to measure by; none with ``fraction``."""
    fraction: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Share of the training data that is held out instead, chosen by the run's seed and the rows'
    ids; rows that ask the same stay together."""
    every: int = Field(default=0, ge=0)
    """Evaluate every so many steps; 0 only before and after."""
    temperature: float = Field(default=1.0, ge=0.0)
    """Sampling temperature."""
    num_generations: int = Field(default=1, ge=1)
    """Samples per problem."""
    threshold: float = 0.99
    """Reward that counts as correct."""

    @model_validator(mode="after")
    def _one_source(self) -> EvalConfig:
        if self.data is None and not self.fraction:
            raise ValueError(
                "no problems to measure by: name some in eval.data, or hold some of the training "
                "data out with eval.fraction"
            )
        if self.data is not None and self.fraction:
            raise ValueError("eval.data and eval.fraction exclude each other: drop one of them")
        return self


class CheckpointConfig(Config):
    """What survives a crash."""

    every: int = Field(default=50, ge=0)
    """Steps between checkpoints; 0 only at the end."""
    keep: int = Field(default=2, ge=2)
    """Checkpoints kept."""
    grace_s: float = Field(default=25.0, ge=0.0)
    """Seconds from SIGTERM to the end of the run with a checkpoint; the step in flight is finished
    if it fits, else dropped. Ctrl-C waits for the step."""
    best: str = ""
    """Metric of an evaluation, such as ``eval/sampled_accuracy``, whose highest value so far keeps
    its checkpoint besides ``keep``; empty for none."""
    journal_mb: float = Field(default=1024.0, ge=0.0)
    """Megabytes of journal that are kept, the newest; 0 keeps all."""
    signals: list[Literal["HUP", "USR1", "USR2"]] = []
    """More signals that do what SIGTERM does, such as ``USR1`` for Slurm's
    ``--signal=USR1@60``."""


class MuxConfig(Config):
    """Nodes shared with other jobs through a RollMux daemon; without ``url`` the job runs alone."""

    url: str = ""
    """Address of the daemon, such as ``http://127.0.0.1:8642``; empty for none."""
    token_file: str = ""
    """File with the daemon's bearer token; nobody else may be able to read it."""
    cafile: str = ""
    """Certificate to trust, for a daemon at ``https://``; empty takes the system's."""
    job: str = ""
    """The job's id; empty makes one from the run's folder."""
    slo: float = Field(default=1.5, ge=1.0)
    """Allowed slowdown of the whole run against running alone."""
    worst_rollout_s: float = Field(default=0.0, ge=0.0)
    """Seconds of a rollout with every response at the cap, switch and evaluation included."""
    worst_train_s: float = Field(default=0.0, ge=0.0)
    """Seconds of a training phase at worst, switch and checkpoint included."""
    team: str = ""
    """Whose share of the nodes the job takes."""
    priority: int = 0
    """Of a team's jobs the higher ones go first."""
    rollout_memory_gb: float = Field(default=150.0, ge=0.0)
    """Host memory that the job keeps on every rollout node."""
    train_memory_gb: float = Field(default=250.0, ge=0.0)
    """Host memory that it keeps on every training node."""
    managed: bool = False
    """The job was submitted, and an agent starts this run and reports its end."""
    cores: dict[str, list[int]] = {}
    """CPU cores by the daemon's node names, or by ``rollout`` and ``train``; empty pins nothing."""


class RunConfig(Config):
    """One RL job."""

    seed: int = 0
    """Seed of data order, sampling and dropout."""
    output: str = "runs/default"
    """Folder of everything that the run leaves behind."""
    steps: int = Field(default=0, ge=0)
    """Rounds of responses, with ``train.updates_per_step`` updates each; 0 goes by ``epochs``."""
    epochs: int = Field(default=1, ge=1)
    """Passes over the data when ``steps`` is 0."""
    deterministic: bool = False
    """Results independent of batch composition and arrival order, at some cost in speed."""
    model: ModelConfig
    data: DataConfig
    rewards: list[RewardConfig]
    environment: EnvironmentConfig | None = None
    """What answers the model between two turns of a response; none: a response is one turn."""
    grading: GradingConfig = GradingConfig()
    rollout: RolloutConfig = RolloutConfig()
    engine: EngineConfig = MiniEngineConfig()
    train: TrainConfig = TrainConfig()
    trainer: TrainerConfig = LocalTrainerConfig()
    devices: DevicesConfig = DevicesConfig()
    cluster: ClusterConfig = ClusterConfig()
    eval: EvalConfig | None = None
    checkpoint: CheckpointConfig = CheckpointConfig()
    samples: SamplesConfig = SamplesConfig()
    mux: MuxConfig = MuxConfig()
    trackers: list[Literal["wandb", "trackio", "mlflow"]] = []
    """Experiment trackers besides TensorBoard and JSONL, through accelerate."""

    @model_validator(mode="before")
    @classmethod
    def _own_rewards(cls, data: Any) -> Any:
        """An environment may give rewards of its own: then no others are needed."""
        if isinstance(data, dict) and data.get("environment") and "rewards" not in data:  # pyright: ignore
            return {"rewards": []} | data  # pyright: ignore
        return data  # pyright: ignore

    @model_validator(mode="after")
    def _rewarded(self) -> RunConfig:
        if not self.rewards and self.environment is None:
            raise ValueError(
                "'rewards' needs at least 1 function, or an 'environment' that rewards"
            )
        return self

    @model_validator(mode="after")
    def _replayable(self) -> RunConfig:
        if self.train.router_replay:
            raise ValueError(
                "train.router_replay needs an engine that says which experts it chose, and none "
                "does yet, on CPUs or GPUs (vLLM 0.32 does in a model runner without our seeds): "
                "leave it at false"
            )
        return self

    @model_validator(mode="after")
    def _comparable(self) -> RunConfig:
        kind = self.train.sampler_correction.kind
        if kind != "none" and not self.rollout.full_softmax:
            raise ValueError(
                f"train.sampler_correction.kind={kind} needs the sampler's probabilities of the "
                "whole softmax: set rollout.top_p to 1 and rollout.top_k to 0, or the kind to none"
            )
        return self
