"""Sampling of a step: what becomes of its tail, and the engine."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rollpacker.config.base import Config, usual_kind

TailMode = Literal["exact", "off", "race", "prompts", "partial", "auto"]
RACED: dict[TailMode, Literal["prompts", "responses"]] = {
    "race": "responses",
    "prompts": "prompts",
    "partial": "prompts",
    "auto": "responses",
}
"""What races in the modes that keep the first to finish: prompts only, or responses of one too."""


StaleTokens = Literal["ratio", "mask", "fresh"]


class TailBatchingConfig(Config):
    """What happens to the long tail of a round."""

    mode: TailMode = "exact"
    """``exact``: nothing is discarded, the tail is consolidated and gradients are streamed;
    ``off``: plain synchronous rounds; ``race``: the paper's tail batching; ``prompts``: only
    prompts race; ``partial``: only prompts race, and the losers keep their tokens and go on in the
    next step, under its weights: no longer on-policy, there to be compared with (partial rollouts);
    ``auto``: one of ``exact``, ``prompts`` and ``race``, chosen each step by predicted gain under
    ``bias_limit``."""
    eta_prompts: float = Field(default=1.25, ge=1.0, le=4.0)
    """Prompts started per prompt kept, in short rounds; the most in mode ``auto``."""
    eta_responses: float = Field(default=1.25, ge=1.0, le=4.0)
    """Responses started per response kept, in short rounds of mode ``race``; the most in
    mode ``auto``."""
    long_round_steps: int = Field(default=1, ge=1)
    """Steps' worth of queued prompts that one long round runs, with an update for each: long
    rounds get rarer by as much. All but the first of its updates use the clipped ratio to
    weights that are a few updates old; 1 stays on-policy, as in the paper."""
    max_staleness: int = Field(default=4, ge=1)
    """Steps after its first token within which a response of mode ``partial`` is trained on: a
    round waits for prompts that would become older."""
    stale_tokens: StaleTokens = "ratio"
    """What is done about tokens of mode ``partial`` that earlier weights have sampled. ``ratio``:
    all tokens of a step have the algorithm's clipped ratio to the log-probabilities that they were
    sampled with; ``train.sampler_correction`` takes its place where it is not ``none``. ``mask``:
    the earlier ones have no loss, but count in the divisor. ``fresh``: nothing, they are taken for
    tokens of the present weights."""
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

    @property
    def carries(self) -> bool:
        """Whether losers keep their tokens, so that a response may be of several weights."""
        return self.mode == "partial"


class StreamingConfig(Config):
    """Gradients that start before the rollout ends: in every mode but ``off``, unless the update
    needs the whole batch first (several updates a step, REINFORCE++, censoring weights)."""

    enabled: bool = True
    """Give devices that the tail has freed to gradients of finished groups."""
    consolidate_below: int | Literal["auto"] = "auto"
    """Move the tail to one engine less when this many attempts or fewer are running; 0 never.
    ``auto`` compares what is left of the step with and without a move, by what steps, contexts and
    prefill were measured to cost; where contexts were not measured, and in runs that are
    ``deterministic`` or share their nodes (``mux``), it is a number, by step latency alone."""
    lookahead: int = Field(default=2, ge=1)
    """Gradient tasks in flight per replica."""
    group_tokens: int = Field(default=1024, ge=1)
    """Tokens that make one gradient task; small groups are put together."""
    scaling: Literal["consolidate", "paper", "fixed"] = "consolidate"
    """Which rule frees devices from the tail: ``consolidate`` goes by ``consolidate_below`` (a
    ``planner`` always compares, and the tail may also move to engines of more devices); ``paper``
    frees half between 20% and 50% of finished responses if the rest fits; ``fixed`` frees half at
    ``scaling_fraction``."""
    scaling_fraction: float = Field(default=0.4, ge=0.0, le=1.0)
    """Share of finished responses at which ``fixed`` frees half of the devices."""


class DynamicSamplingConfig(Config):
    """DAPO's dynamic sampling: drop groups without reward variance and draw more prompts."""

    enabled: bool = False
    """Whether a step must end with ``prompts_per_step`` informative groups."""
    max_draws: int = Field(default=4, ge=1)
    """Rounds of extra prompts before a step goes on with fewer groups."""
    max_empty_steps: int = Field(default=3, ge=0)
    """Steps in a row that end without a single informative group before the run stops; 0 never."""


class SpeculationConfig(Config):
    """Decoding ahead: several tokens in one step where they can be guessed from texts seen before.

    Every sample is what it would have been, token by token; of vLLM in bfloat16, whose rows round
    differently beside others, another one of the same distribution.
    """

    mode: Literal["auto", "off"] = "auto"
    """``auto``: where nothing races and the engine can (``mini``, and vLLM on CPUs), while so few
    sequences run that a step has room for guesses; not in mode ``off``, which others are compared
    with. ``off``: never."""


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
    speculation: SpeculationConfig = SpeculationConfig()
    min_reward_range: float = Field(default=0.0, ge=0.0)
    """Groups whose rewards are closer together than this count as equal: no advantage, and dynamic
    sampling drops them. 0 leaves out rounding only (1e-6 of the largest reward); version 0.1.0
    had 1e-3."""
    planner: Literal["off", "paper", "forecast"] = "off"
    """Chooses the tensor-parallel size of each round, from ``engine.tensor_parallel`` on in powers
    of two, as far as devices and heads divide: ``paper`` follows preemptions, ``forecast`` predicts
    each size's time. Only with ``engine.kind: vllm``; each size has processes of its own, which
    on a GPU give back weights and KV cache while they rest."""
    max_retries: int = Field(default=2, ge=0)
    """Replacement attempts for a response that the engine or its reward failed on."""

    @property
    def full_softmax(self) -> bool:
        """Whether the sampler's log-probabilities are those of the whole softmax, as the trainer's
        are; greedy ones are, at temperature 1."""
        return self.temperature == 0.0 or (self.top_p == 1.0 and self.top_k == 0)


KV_SHARE = 4
"""A KV budget that is not given takes one in so many bytes that are free."""


class OneDeviceConfig(Config):
    """An engine that has one device."""

    @property
    def tensor_parallel(self) -> int:
        """Devices that it spans."""
        return 1


class MiniEngineConfig(OneDeviceConfig):
    """The built-in engine."""

    kind: Literal["mini"] = "mini"
    max_running: int = Field(default=256, ge=1)
    """Most sequences decoded together."""
    kv_tokens: int = Field(default=0, ge=0)
    """KV budget in tokens; 0 sizes it for ``max_running`` sequences of full length, within
    a quarter of the memory that is free."""
    block_size: int = Field(default=16, ge=1)
    """Tokens per KV block; on a CPU it is always 16."""


class VllmEngineConfig(Config):
    """vLLM, in processes of its own; install it with ``pip install 'rollpacker[vllm]'``.

    The same seed gives the response that ``mini`` gives, but where rounding decides: in float32
    hardly ever, in bfloat16 for a token in 30 to 60. Each step gives it the trained weights, a
    second copy of them, through one more in the host's memory.
    """

    kind: Literal["vllm"] = "vllm"
    tensor_parallel: int = Field(default=1, ge=1)
    """Devices that an engine spans; neighbours by number, of one machine."""
    max_running: int = Field(default=256, ge=1)
    """Most sequences decoded together (vLLM's ``max_num_seqs``)."""
    kv_tokens: int = Field(default=0, ge=0)
    """KV budget of each device in tokens; an engine of T devices has T times as many, since each
    holds its part of the heads. 0 sizes it for ``max_running`` sequences of full length within a
    quarter of the memory that is free, on a GPU by ``gpu_memory``: give it where processes share a
    GPU, for then vLLM measures nothing."""
    gpu_memory: float = Field(default=0.4, gt=0.0, lt=1.0)
    """Share of a GPU's memory for the weights and KV cache of one engine's process together
    (``gpu_memory_utilization``), where ``kv_tokens`` is 0; the trainer, and a ``planner``'s engines
    of other sizes with a share of their own each, have the rest."""


class FakeEngineConfig(OneDeviceConfig):
    """Scripted responses, for tests."""

    kind: Literal["fake"] = "fake"
    lengths: list[int] = [8]
    """Response lengths, taken in turn by a hash of the attempt's seed."""


EngineConfig = Annotated[
    MiniEngineConfig | VllmEngineConfig | FakeEngineConfig,
    Field(discriminator="kind"),
    usual_kind("mini"),
]
