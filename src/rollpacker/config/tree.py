"""The whole configuration of a run, as one frozen tree.

Import paths appear in three leaves only: reward functions, datasets and environments.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from rollpacker.config.base import Config
from rollpacker.config.rewards import GradingConfig, RewardConfig


class ModelConfig(Config):
    """The model that is trained."""

    path: str
    """Folder or hub name of a Qwen2, Qwen3 or Llama checkpoint with its tokenizer."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights in forward and backward; bfloat16 keeps float32 master weights."""
    lora_rank: int = Field(default=0, ge=0)
    """Rank of LoRA adapters (peft) on all linear layers; 0 trains all weights."""
    lora_alpha: float = 32.0
    """LoRA scale, divided by the rank."""
    chat_template_kwargs: dict[str, Any] = {}
    """Extra arguments of the tokenizer's chat template."""


class DataConfig(Config):
    """Prompts and answers."""

    path: str
    """Hub dataset, local json/jsonl/parquet/csv file, ``rg:<task>`` (reasoning-gym) or
    ``package.module:function`` that returns rows."""
    split: str = "train"
    """Split of a hub dataset."""
    options: dict[str, Any] = {}
    """Keyword options of a reasoning-gym task or of the function."""
    size: int = Field(default=0, ge=0)
    """Rows to take, 0 for all; procedural tasks make this many (1,000 when 0)."""
    seed: int = 0
    """Seed of a procedural task."""
    input_key: str | None = None
    """Column of the prompt, when it cannot be detected."""
    label_key: str | None = None
    """Column of the answer, when it cannot be detected."""
    domain_key: str | None = None
    """Column that names the task domain; quotas are kept per domain."""
    system_prompt: str | None = None
    """System turn put before each prompt."""
    shots: list[dict[str, str]] = []
    """Chat turns (``role``, ``content``) put between the system turn and the prompt."""
    prompt_template: str | None = None
    """Format string with ``{prompt}`` applied to string prompts."""
    chat: bool | None = None
    """Apply the chat template to string prompts; default: when the tokenizer has one."""
    shuffle: bool = True
    """Shuffle every epoch with the run's seed."""
    drop_last: bool = False
    """Drop the prompts that do not fill the last step of an epoch."""
    overlong: Literal["error", "skip"] = "error"
    """What to do with a prompt that leaves no room for a response in the model's context."""
    exclude: str | None = None
    """A data file whose prompts are never drawn (for held-out problems)."""


class TailBatchingConfig(Config):
    """What happens to the long tail of a round."""

    mode: Literal["exact", "off", "race", "prompts", "auto"] = "exact"
    """``exact``: nothing is discarded, the tail is consolidated and gradients are streamed;
    ``off``: plain synchronous rounds; ``race``: the paper's tail batching; ``prompts``: only
    prompts race; ``auto``: chosen each step by predicted gain under ``bias_limit``."""
    eta_prompts: float = Field(default=1.25, ge=1.0, le=4.0)
    """Prompts started per prompt kept, in short rounds; the most in mode ``auto``."""
    eta_responses: float = Field(default=1.25, ge=1.0, le=4.0)
    """Responses started per response kept, in short rounds of mode ``race``; the most in
    mode ``auto``."""
    long_round_steps: int = Field(default=1, ge=1)
    """Steps' worth of queued prompts that one long round runs, with an update for each: long
    rounds get rarer by as much. All but the first of its updates use the clipped ratio to
    weights that are a few updates old; 1 stays on-policy, as in the paper."""
    bucket_rounds: int = Field(default=1, ge=1)
    """Rounds of mode ``exact`` that are drawn together and sorted by the lengths of earlier
    visits, so that short rounds are short; 1 keeps the order of the data."""
    bias_limit: float = Field(default=0.95, gt=0.0, le=1.0)
    """Lowest kept/true mean length that ``auto`` may cause."""
    race_responses: bool = False
    """Whether ``auto`` may race responses too."""
    censoring_weights: bool = False
    """Inverse-probability-of-censoring weights (clip 5) for mode ``prompts``."""
    audit_every: int = Field(default=7, ge=0)
    """Every so many steps a few prompts run without aborts, to measure bias; 0 never."""
    audit_prompts: int = Field(default=4, ge=1)
    """Prompts in an audit."""

    @field_validator("mode", mode="before")
    @classmethod
    def _plain_off(cls, value: Any) -> Any:
        """YAML 1.1 reads a bare ``off`` as false."""
        return "off" if value is False else value


class StreamingConfig(Config):
    """Gradients that start before the rollout ends: in every mode but ``off``, unless the update
    needs the whole batch first (several updates a step, REINFORCE++, censoring weights)."""

    enabled: bool = True
    """Give workers that the tail has freed to gradients of finished groups."""
    consolidate_below: int | Literal["auto"] = "auto"
    """Move the tail to one worker less when this many attempts or fewer are running; ``auto``
    takes it from the engine's measured step latency; 0 never."""
    lookahead: int = Field(default=2, ge=1)
    """Gradient tasks in flight per worker."""
    group_tokens: int = Field(default=1024, ge=1)
    """Tokens that make one gradient task; small groups are put together."""
    scaling: Literal["consolidate", "paper", "fixed"] = "consolidate"
    """Which rule frees devices from the tail: ``consolidate`` goes by ``consolidate_below``
    (where engines span several devices, simulated so far, the tail may also move to a higher
    tensor-parallel size); ``paper`` frees half between 20% and 50% of finished responses if the
    rest fits; ``fixed`` frees half at ``scaling_fraction``."""
    scaling_fraction: float = Field(default=0.4, ge=0.0, le=1.0)
    """Share of finished responses at which ``fixed`` frees half of the devices."""


class DynamicSamplingConfig(Config):
    """DAPO's dynamic sampling: drop groups without reward variance and draw more prompts."""

    enabled: bool = False
    """Whether a step must end with ``prompts_per_step`` informative groups."""
    max_draws: int = Field(default=4, ge=1)
    """Rounds of extra prompts before a step goes on with fewer groups."""


class RolloutConfig(Config):
    """Sampling of one step."""

    prompts_per_step: int = Field(default=16, ge=1)
    """P0: prompts (groups) in an update."""
    num_generations: int = Field(default=8, ge=1)
    """R0: responses of each prompt."""
    max_completion_length: int | None = Field(default=None, ge=1)
    """Longest response in tokens; default: what the model's context leaves."""
    temperature: float = Field(default=1.0, ge=0.0)
    """Softmax temperature; 0 is greedy."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Nucleus mass."""
    top_k: int = Field(default=0, ge=0)
    """Most likely tokens kept; 0 keeps all."""
    stop: list[str] = []
    """Strings that end a response."""
    tail_batching: TailBatchingConfig = TailBatchingConfig()
    streaming: StreamingConfig = StreamingConfig()
    dynamic_sampling: DynamicSamplingConfig = DynamicSamplingConfig()
    planner: Literal["off", "paper", "forecast"] = "off"
    """Chooses the tensor-parallel size of each round where engines span several devices
    (simulated so far): ``paper`` follows preemptions, ``forecast`` predicts each size's time."""
    max_retries: int = Field(default=2, ge=0)
    """Replacement attempts for a response that the engine or its reward failed on."""


class MiniEngineConfig(Config):
    """The built-in engine."""

    kind: Literal["mini"] = "mini"
    max_running: int = Field(default=256, ge=1)
    """Most sequences decoded together."""
    kv_tokens: int = Field(default=0, ge=0)
    """KV budget in tokens; 0 sizes it for ``max_running`` sequences of full length, within
    a quarter of the memory that is free."""
    block_size: int = Field(default=16, ge=1)
    """Tokens per KV block."""


class FakeEngineConfig(Config):
    """Scripted responses, for tests."""

    kind: Literal["fake"] = "fake"
    lengths: list[int] = [8]
    """Response lengths, taken in turn by a hash of the attempt's seed."""


EngineConfig = Annotated[MiniEngineConfig | FakeEngineConfig, Field(discriminator="kind")]


class GRPOConfig(Config):
    """GRPO (Shao et al., 2024): group-normalised advantages, sequence-mean loss."""

    kind: Literal["grpo"] = "grpo"
    scale_rewards: bool = True
    """Divide advantages by the group's standard deviation."""
    loss_type: Literal["sequence_mean", "token_mean"] = "token_mean"
    """Average per response and then over responses, or over all tokens."""
    epsilon: float = 0.2
    """Clip range of the probability ratio."""


class DrGRPOConfig(Config):
    """Dr. GRPO (Liu et al., 2025): no standard deviation, constant normaliser."""

    kind: Literal["dr_grpo"] = "dr_grpo"
    epsilon: float = 0.2
    """Clip range of the probability ratio."""


class DAPOConfig(Config):
    """DAPO (Yu et al., 2025): clip-higher, token-level loss, overlong shaping."""

    kind: Literal["dapo"] = "dapo"
    epsilon: float = 0.2
    """Lower clip range."""
    epsilon_high: float = 0.28
    """Upper clip range."""
    overlong_buffer: int = Field(default=0, ge=0)
    """Soft punishment over the last so many tokens before the cap; 0 for none."""
    overlong_penalty: float = 1.0
    """Punishment at the cap."""


class RLOOConfig(Config):
    """RLOO (Ahmadian et al., 2024): leave-one-out baseline, sequence-level REINFORCE."""

    kind: Literal["rloo"] = "rloo"
    epsilon: float = 0.2
    """Clip range of the sequence's probability ratio."""


class ReinforcePPConfig(Config):
    """REINFORCE++ (Hu, 2025): group mean as baseline, advantages normalised over the batch."""

    kind: Literal["reinforce_pp"] = "reinforce_pp"
    epsilon: float = 0.2
    """Clip range of the probability ratio."""


class GSPOConfig(Config):
    """GSPO (Zheng et al., 2025): sequence-level, length-normalised ratio."""

    kind: Literal["gspo"] = "gspo"
    epsilon: float = 3e-4
    """Lower clip range."""
    epsilon_high: float = 4e-4
    """Upper clip range."""


AlgorithmConfig = Annotated[
    GRPOConfig | DrGRPOConfig | DAPOConfig | RLOOConfig | ReinforcePPConfig | GSPOConfig,
    Field(discriminator="kind"),
]


class TrainConfig(Config):
    """The update."""

    algorithm: AlgorithmConfig = GRPOConfig()
    learning_rate: float = Field(default=1e-6, gt=0.0)
    """Peak learning rate of AdamW."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """Schedule after warm-up."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps of linear warm-up."""
    weight_decay: float = Field(default=0.0, ge=0.0)
    """AdamW weight decay."""
    adam_beta1: float = 0.9
    """AdamW decay of the mean gradient."""
    adam_beta2: float = 0.999
    """AdamW decay of the mean squared gradient."""
    max_grad_norm: float = Field(default=1.0, ge=0.0)
    """Gradient clipping; 0 for none."""
    beta: float = Field(default=0.0, ge=0.0)
    """Weight of the KL to the reference model (the k3 estimator); 0 loads no reference."""
    updates_per_step: int = Field(default=1, ge=1)
    """Mini-batches that a step's groups are split into, one update each."""
    micro_batch_tokens: int = Field(default=1024, ge=1)
    """Padded tokens of one forward and backward."""
    packing: Literal["auto", "padded", "prompt_shared"] = "auto"
    """``prompt_shared`` runs the prompt of a group once, with a block mask; ``auto`` takes it
    where prompts are long."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    max_skipped_updates: int = Field(default=3, ge=1)
    """Stop after so many updates in a row with a loss or gradient that is not finite."""


class WorkersConfig(Config):
    """Processes that decode and train."""

    count: int = Field(default=0, ge=0)
    """Workers; 0 takes one per core up to two, or one per GPU."""
    threads: int = Field(default=1, ge=1)
    """CPU threads of each worker."""
    pin: bool = True
    """Pin each worker to its own cores."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model runs."""


class EvalConfig(Config):
    """Accuracy on held-out problems; never used to choose anything."""

    data: DataConfig
    every: int = Field(default=0, ge=0)
    """Evaluate every so many steps; 0 only before and after."""
    temperature: float = Field(default=1.0, ge=0.0)
    """Sampling temperature."""
    num_generations: int = Field(default=1, ge=1)
    """Samples per problem."""
    threshold: float = 0.99
    """Reward that counts as correct."""


class CheckpointConfig(Config):
    """What survives a crash."""

    every: int = Field(default=50, ge=0)
    """Steps between checkpoints; 0 only at the end."""
    keep: int = Field(default=2, ge=2)
    """Checkpoints kept."""


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
    """Seconds of a rollout with every response at the cap, switch and first evaluation included."""
    worst_train_s: float = Field(default=0.0, ge=0.0)
    """Seconds of a training phase at worst, checkpoint and evaluation included."""
    cores: dict[str, list[int]] = {}
    """CPU cores by the daemon's node names, or by ``rollout`` and ``train``; empty pins nothing."""


class RunConfig(Config):
    """One RL job."""

    seed: int = 0
    """Seed of data order, sampling and dropout."""
    output: str = "runs/default"
    """Folder of everything that the run leaves behind."""
    steps: int = Field(default=0, ge=0)
    """Updates; 0 goes by ``epochs``."""
    epochs: int = Field(default=1, ge=1)
    """Passes over the data when ``steps`` is 0."""
    deterministic: bool = False
    """Results independent of batch composition and arrival order, at some cost in speed."""
    model: ModelConfig
    data: DataConfig
    rewards: list[RewardConfig] = Field(min_length=1)
    grading: GradingConfig = GradingConfig()
    rollout: RolloutConfig = RolloutConfig()
    engine: EngineConfig = MiniEngineConfig()
    train: TrainConfig = TrainConfig()
    workers: WorkersConfig = WorkersConfig()
    eval: EvalConfig | None = None
    checkpoint: CheckpointConfig = CheckpointConfig()
    mux: MuxConfig = MuxConfig()
    trackers: list[Literal["wandb", "trackio", "mlflow"]] = []
    """Experiment trackers besides TensorBoard and JSONL, through accelerate."""
