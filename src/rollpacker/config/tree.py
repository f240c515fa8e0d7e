"""The whole configuration of a run, as one frozen tree."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from rollpacker.config.base import Config, Fixed, Free, Logged, Rounding
from rollpacker.config.data import DataConfig, ModelConfig
from rollpacker.config.rewards import EnvironmentConfig, GradingConfig, RewardConfig
from rollpacker.config.rollout import EngineConfig, MiniEngineConfig, RolloutConfig
from rollpacker.config.train import LocalTrainerConfig, TrainConfig, TrainerConfig


class SamplesConfig(Config):
    """The contents of ``samples/step-*.parquet`` besides numbers: [samples](samples.md)."""

    texts: Free[bool] = True
    """Keep the text of prompts and responses."""
    token_ids: Free[bool] = False
    """Keep the token ids of responses."""
    max_gb: Free[float] = Field(default=0.0, ge=0.0)
    """Largest table on disk in GB. Beyond it, the rows of the oldest steps are removed. 0 keeps
    all."""


class DevicesConfig(Config):
    """The GPUs or CPU cores that decode and train, of one machine or of several."""

    nodes: Rounding[int] = Field(default=1, ge=1)
    """Machines. More than one need ``cluster.address``."""
    per_node: Rounding[int] = Field(default=0, ge=0)
    """Devices of each machine. 0 takes one per core up to two, or ``per_gpu`` on every GPU."""
    per_gpu: Rounding[int] = Field(default=1, ge=1)
    """Devices that a GPU counts as, sharing its memory. With 2 the tail of a step decodes beside
    gradients on a single GPU. CUDA MPS lets both compute at once."""
    threads: Rounding[int] = Field(default=1, ge=1)
    """CPU threads of each device's processes."""
    pin: Free[bool] = True
    """Pin a device's processes to its own cores (Linux)."""
    kind: Rounding[Literal["auto", "cpu", "cuda"]] = "auto"
    """Kind of the devices. With ``cuda``, RollMux gives a job only nodes that have enough GPUs."""
    layout: Rounding[Literal["colocated", "separate"]] = "colocated"
    """``colocated``: all devices decode and train in turn, first those that the tail frees.
    ``separate``: ``training`` of them train, from the first complete group on."""
    training: Rounding[int] = Field(default=0, ge=0)
    """Devices that train with ``layout: separate``, the last ones."""
    turns: Rounding[Literal["auto", "off", "engine", "both"]] = "auto"
    """Memory that leaves a device while it decodes or trains, with ``engine.kind: vllm``.
    ``engine``: an engine sleeps while gradients are computed. ``both``: the trainer's state also
    waits in the machine's memory while responses decode. ``auto``: ``engine`` on GPUs, but
    ``off`` with a planner, RollMux, ``layout: separate`` or ``per_gpu`` above 1."""
    emulate: Fixed[str | None] = None
    """File of [emulated devices](emulation.md), ``per_node`` on each of ``nodes``. They take the
    time that a calibration gives, and train nothing."""

    @model_validator(mode="after")
    def _split(self) -> DevicesConfig:
        if self.layout == "separate" and not self.training:
            raise ValueError(
                "devices.layout=separate needs devices.training, how many of the devices train"
            )
        if self.layout == "colocated" and self.training:
            raise ValueError(
                "devices.training: with devices.layout=colocated all devices train: set separate"
            )
        if self.turns in ("engine", "both") and (self.layout == "separate" or self.per_gpu > 1):
            raise ValueError(
                f"devices.turns={self.turns}: an engine and a trainer take turns only if "
                "they alone share a device: leave it out with devices.layout=separate or "
                "devices.per_gpu > 1"
            )
        if self.emulate is not None and not self.per_node:
            raise ValueError("devices.emulate needs devices.per_node: how many devices there are")
        return self


class ClusterConfig(Config):
    """The cluster of a run's processes, and the time after which a process counts as lost."""

    address: Free[str] = ""
    """Ray cluster whose nodes the run takes: ``auto`` for this machine's, or ``HOST:PORT`` of
    its head. ``mux``: nodes that RollMux gives (``rollpacker mux submit``). Empty: this machine."""
    heartbeat_s: Free[float] = Field(default=10.0, gt=0.0)
    """Seconds between signs of life of a process. If one is silent for 2.5 times as long, it
    counts as dead, and its work runs elsewhere."""
    restarts: Free[int] = Field(default=3, ge=0)
    """Restarts of lost workers in a row before the run goes on without them. Also the times that
    a run which cannot go on resumes from its newest checkpoint. 0, and with ``mux`` or emulated
    devices: never."""


class EvalConfig(Config):
    """Accuracy on held-out problems. For a checkpoint that ``checkpoint.best`` chose by it, the
    accuracy is biased upwards."""

    data: Free[DataConfig | None] = None
    """Problems of the evaluation, in place of ``fraction``."""
    fraction: Fixed[float] = Field(default=0.0, ge=0.0, lt=1.0)
    """Share of the training data that is held out instead. Rows with the same question stay
    together."""
    every: Free[int] = Field(default=0, ge=0)
    """Steps between evaluations. 0 for only before and after the run."""
    temperature: Free[float] = Field(default=1.0, ge=0.0)
    """Sampling temperature."""
    num_generations: Free[int] = Field(default=1, ge=1)
    """Samples per problem."""
    threshold: Free[float] = 0.99
    """Reward that counts as correct."""

    @model_validator(mode="after")
    def _one_source(self) -> EvalConfig:
        if self.data is None and not self.fraction:
            raise ValueError(
                "no problems to evaluate: name some in eval.data, hold some of the training data "
                "out with eval.fraction, or leave eval out (eval=null)"
            )
        if self.data is not None and self.fraction:
            raise ValueError(
                "eval.data and eval.fraction exclude each other: drop one of them "
                "(eval.fraction=0, or eval.data=null)"
            )
        return self


class CheckpointConfig(Config):
    """Checkpoints and the journal, from which a run resumes."""

    every: Free[int] = Field(default=50, ge=0)
    """Steps between checkpoints. 0 for only at the end."""
    keep: Free[int] = Field(default=2, ge=2)
    """Checkpoints kept."""
    grace_s: Free[float] = Field(default=25.0, ge=0.0)
    """Seconds from SIGTERM to the run's end with a checkpoint. A step that does not finish in
    time is dropped. Ctrl-C waits for the step."""
    best: Free[str] = ""
    """Metric of an evaluation, such as ``eval/sampled_accuracy``. The checkpoint with the
    highest value is kept besides ``keep``."""
    journal_mb: Free[float] = Field(default=1024.0, ge=0.0)
    """Newest megabytes of journal that are kept. 0 keeps all."""
    signals: Free[list[Literal["HUP", "USR1", "USR2"]]] = []
    """Signals that act as SIGTERM does, such as ``USR1`` for Slurm's ``--signal=USR1@60``."""


class MuxConfig(Config):
    """Nodes shared with other jobs through [RollMux](mux_client.md). Without ``url`` the job
    runs alone. With it, ``token_file``, ``worst_rollout_s`` and ``worst_train_s`` must be set."""

    url: Free[str] = ""
    """The daemon's address, such as ``http://127.0.0.1:8642``."""
    token_file: Free[str] = ""
    """File with the daemon's token, readable by nobody else."""
    cafile: Free[str] = ""
    """Certificate to trust at ``https://``. Empty takes the system's."""
    job: Free[str] = ""
    """The job's id. Empty makes one from the run's folder."""
    slo: Free[float] = Field(default=1.5, ge=1.0)
    """Allowed slowdown of the whole run against running alone."""
    worst_rollout_s: Free[float] = Field(default=0.0, ge=0.0)
    """Seconds of a rollout with every response at the cap, including switch and evaluation."""
    worst_train_s: Free[float] = Field(default=0.0, ge=0.0)
    """Worst-case seconds of a training phase, including switch and checkpoint."""
    team: Free[str] = ""
    """Team whose share of the nodes the job takes."""
    priority: Free[int] = 0
    """Among a team's jobs, those with a higher priority start first."""
    rollout_memory_gb: Free[float] = Field(default=150.0, ge=0.0)
    """Host memory that the job keeps on each rollout node."""
    train_memory_gb: Free[float] = Field(default=250.0, ge=0.0)
    """The same on each training node."""
    managed: Free[bool] = False
    """An agent starts this run and reports its end. ``rollpacker mux submit`` sets it."""
    cores: Free[dict[str, list[int]]] = {}
    """CPU cores by node name, or by ``rollout`` and ``train``. Empty pins nothing."""


class RunConfig(Config):
    """One RL job."""

    seed: Fixed[int] = 0
    """Seed of data order, sampling and dropout."""
    output: Free[str] = "runs/default"
    """Folder of all files that the run writes."""
    steps: Logged[int] = Field(default=0, ge=0)
    """Rounds of responses, each with its updates. 0 goes by ``epochs``."""
    epochs: Logged[int] = Field(default=1, ge=1)
    """Passes over the data when ``steps`` is 0."""
    deterministic: Fixed[bool] = False
    """Results do not depend on batch composition or arrival order. Runs are slower."""
    model: ModelConfig
    data: DataConfig
    rewards: Fixed[list[RewardConfig]]
    environment: Fixed[EnvironmentConfig | None] = None
    grading: GradingConfig = GradingConfig()
    rollout: RolloutConfig = RolloutConfig()
    engine: EngineConfig = MiniEngineConfig()
    train: TrainConfig = TrainConfig()
    trainer: TrainerConfig = LocalTrainerConfig()
    devices: DevicesConfig = DevicesConfig()
    cluster: ClusterConfig = ClusterConfig()
    eval: Free[EvalConfig | None] = None
    checkpoint: CheckpointConfig = CheckpointConfig()
    samples: SamplesConfig = SamplesConfig()
    mux: MuxConfig = MuxConfig()
    trackers: Free[list[Literal["wandb", "trackio", "mlflow"]]] = []
    """Experiment trackers besides TensorBoard and JSONL."""

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
    def _decays_to_an_end(self) -> RunConfig:
        kind, sampling = self.train.lr_scheduler_type, self.rollout.dynamic_sampling
        if kind != "constant" and sampling.enabled and not self.steps:
            raise ValueError(
                f"train.lr_scheduler_type={kind} ends with the last step, and with "
                "rollout.dynamic_sampling the number of steps is unknown: set 'steps'"
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
