"""Sampling of a step, the modes of its tail, and the engine."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from rollpacker.config.base import Config, Fixed, Free, Logged, Rounding, usual_kind

TailMode = Literal["exact", "off", "race", "prompts", "partial", "auto"]
RACED: dict[str, Literal["prompts", "responses"]] = {
    "race": "responses",
    "prompts": "prompts",
    "partial": "prompts",
    "auto": "responses",
}
"""The modes that keep the first to finish, and whether only prompts race or responses too."""
_DISCARDS = tuple(mode for mode in RACED if mode != "partial")
USED_IN: dict[str, tuple[str, ...]] = {
    "eta_prompts": tuple(RACED),
    "eta_responses": tuple(mode for mode in RACED if RACED[mode] == "responses"),
    "long_round_steps": _DISCARDS,
    "max_staleness": ("partial",),
    "stale_tokens": ("partial",),
    "bias_limit": ("auto",),
    "race_responses": ("auto",),
    "audit_every": _DISCARDS,
    "audit_prompts": _DISCARDS,
}
"""The modes that use an option of ``tail_batching``."""


StaleTokens = Literal["ratio", "mask", "fresh"]


def is_own(mode: str) -> bool:
    """Whether a mode names a rule of the user's."""
    return ":" in mode


def _named(mode: str) -> str:
    if not is_own(mode):
        raise PydanticCustomError("own_mode", "path/to/file.py:name of a rule of your own")
    return mode


class TailBatchingConfig(Config):
    """Handling of the [long tail](concepts.md#modes) of a round."""

    mode: Fixed[TailMode | Annotated[str, AfterValidator(_named)]] = "exact"
    """``exact``: nothing is discarded, the tail is consolidated and gradients are streamed.
    ``off``: plain synchronous rounds. ``race``: the paper's tail batching. ``prompts``: only
    prompts race. ``partial``: prompts race, and losers continue in the next step under its
    weights, no longer on-policy. ``auto``: one of ``exact``, ``prompts`` and ``race``, chosen
    each step by predicted gain under ``bias_limit``. ``path/to/file.py:name``: [a rule of your
    own](own_policy.md)."""
    eta_prompts: Fixed[float] = Field(default=1.25, ge=1.0, le=4.0)
    """Prompts started per prompt kept, in short rounds. In mode ``auto`` this is the maximum."""
    eta_responses: Fixed[float] = Field(default=1.25, ge=1.0, le=4.0)
    """Responses started per response kept, in short rounds of mode ``race``. In mode ``auto``
    this is the maximum."""
    long_round_steps: Fixed[int] = Field(default=1, ge=1)
    """Steps' worth of queued prompts in one long round, with an update for each. Above 1 all
    updates except the first are slightly off-policy."""
    max_staleness: Fixed[int] = Field(default=4, ge=1)
    """Mode ``partial`` trains on a response at most this many steps after its first token."""
    stale_tokens: Fixed[StaleTokens] = "ratio"
    """Treatment of tokens that earlier weights sampled, in mode ``partial``. ``ratio``: clipped
    ratio to the sampler's log-probabilities, or ``train.sampler_correction``. ``mask``: no loss,
    but they count in the divisor. ``fresh``: like tokens of the current weights."""
    bias_limit: Fixed[float] = Field(default=0.95, gt=0.0, le=1.0)
    """Lowest kept/true mean length that ``auto`` may cause."""
    race_responses: Fixed[bool] = False
    """Let ``auto`` race responses too."""
    audit_every: Fixed[int] = Field(default=7, ge=0)
    """Steps between audits, in which a few prompts run without aborts to measure bias. 0 for never.
    """
    audit_prompts: Fixed[int] = Field(default=4, ge=1)
    """Prompts in an audit."""

    @property
    def carries(self) -> bool:
        """Whether losers keep their tokens, so that several weights may sample one response."""
        return self.mode == "partial"

    @property
    def own(self) -> bool:
        return is_own(self.mode)

    @property
    def races(self) -> Literal["prompts", "responses"] | None:
        """The unit that may be started and thrown away. A rule of the user's may do either."""
        return "responses" if self.own else RACED.get(self.mode)

    @property
    def unused(self) -> dict[str, tuple[str, ...]]:
        """Changed options without effect in this mode, and the modes that use them."""
        usual = TailBatchingConfig()
        mode = "race" if self.own else self.mode
        return {
            key: modes
            for key, modes in USED_IN.items()
            if mode not in modes and getattr(self, key) != getattr(usual, key)
        }


class StreamingConfig(Config):
    """Gradients that start before the rollout ends. Excluded are mode ``off`` and updates that
    need the whole batch (several updates per step, REINFORCE++)."""

    enabled: Rounding[bool] = True
    """Compute gradients of finished groups on devices that the tail has freed."""
    lookahead: Rounding[int] = Field(default=2, ge=1)
    """Gradient tasks in flight per replica."""
    group_tokens: Rounding[int | None] = Field(default=None, ge=1)
    """Tokens of one gradient task while responses decode. Small groups are joined. Default: two
    micro-batches (``train.micro_batch_tokens``). After the rollout, tasks may be eight times as
    large, and shrink with the work that is left."""
    scaling: Rounding[Literal["consolidate", "paper", "fixed", "off"]] = "consolidate"
    """The rule that frees devices from the tail. ``consolidate`` compares the rest of the step
    with and without a move, by measured costs. ``paper`` frees half between 20% and 50% of
    finished responses, if the rest fits. ``fixed`` frees half at ``scaling_fraction``. ``off``
    frees none."""
    scaling_fraction: Rounding[float] = Field(default=0.4, ge=0.0, le=1.0)
    """Share of finished responses at which ``fixed`` frees half of the devices."""


class DynamicSamplingConfig(Config):
    """DAPO's dynamic sampling: drop groups of equal rewards and draw more prompts."""

    enabled: Fixed[bool] = False
    """End each step with ``prompts_per_step`` informative groups."""
    max_draws: Fixed[int] = Field(default=4, ge=1)
    """Rounds of extra prompts before a step goes on with fewer groups."""
    max_empty_steps: Free[int] = Field(default=3, ge=0)
    """Steps in a row without an informative group before the run stops. 0 for never."""


class SpeculationConfig(Config):
    """[Speculative decoding](concepts.md#decoding-ahead): several tokens per decode step if
    earlier texts suggest them. The samples do not change. With vLLM in bfloat16, only their
    distribution is kept."""

    mode: Free[Literal["auto", "off"]] = "auto"
    """``auto``: while few sequences run, if nothing races and the engine can (``mini``, and vLLM
    on CPUs and on GPUs from Ampere to Hopper). Never in mode ``off``."""


class RolloutConfig(Config):
    """Sampling of one step."""

    prompts_per_step: Fixed[int] = Field(default=16, ge=1)
    """P0: prompts (groups) in a step."""
    num_generations: Fixed[int] = Field(default=8, ge=1)
    """R0: responses of each prompt."""
    max_completion_length: Fixed[int | None] = Field(default=None, ge=1)
    """Longest response in tokens. Default: the rest of the model's context."""
    temperature: Fixed[float] = Field(default=1.0, ge=0.0)
    """Softmax temperature. 0 is greedy."""
    top_p: Fixed[float] = Field(default=1.0, gt=0.0, le=1.0)
    """Nucleus mass."""
    top_k: Fixed[int] = Field(default=0, ge=0)
    """Most likely tokens kept. 0 keeps all."""
    stop: Fixed[list[str]] = []
    """Strings that end a response."""
    tail_batching: TailBatchingConfig = TailBatchingConfig()
    streaming: StreamingConfig = StreamingConfig()
    dynamic_sampling: DynamicSamplingConfig = DynamicSamplingConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    min_reward_range: Fixed[float] = Field(default=0.0, ge=0.0)
    """Groups with a smaller range of rewards count as equal: they have no advantage, and dynamic
    sampling drops them. 0 ignores differences by rounding only."""
    planner: Rounding[Literal["off", "paper"]] = "off"
    """Chooses the tensor-parallel size of each round, from ``engine.tensor_parallel`` on in
    powers of two. ``paper`` follows preemptions. Only with ``engine.kind: vllm``."""
    max_retries: Logged[int] = Field(default=2, ge=0)
    """New attempts for a response if the engine or its reward failed."""

    @property
    def full_softmax(self) -> bool:
        """Whether the sampler's log-probabilities are those of the whole softmax, like the
        trainer's. Greedy ones are, at temperature 1."""
        return self.temperature == 0.0 or (self.top_p == 1.0 and self.top_k == 0)


KV_SHARE = 4  # A default KV budget takes one in this many free bytes


class OneDeviceConfig(Config):
    """An engine that has one device."""

    @property
    def tensor_parallel(self) -> int:
        return 1


class MiniEngineConfig(OneDeviceConfig):
    """The built-in engine."""

    kind: Rounding[Literal["mini"]] = "mini"
    max_running: Rounding[int] = Field(default=256, ge=1)
    """Most sequences decoded together."""
    kv_tokens: Rounding[int] = Field(default=0, ge=0)
    """KV budget in tokens. 0: ``max_running`` sequences of full length, within a quarter of the
    free memory."""
    block_size: Rounding[int] = Field(default=16, ge=1)
    """Tokens per KV block. Always 16 on a CPU."""


class VllmEngineConfig(Config):
    """vLLM, in processes of its own (``pip install 'rollpacker[vllm]'``), with a second copy of
    the weights."""

    kind: Rounding[Literal["vllm"]] = "vllm"
    tensor_parallel: Rounding[int] = Field(default=1, ge=1)
    """Devices that an engine spans, neighbours of one machine."""
    max_running: Rounding[int] = Field(default=256, ge=1)
    """Most sequences decoded together (vLLM's ``max_num_seqs``)."""
    kv_tokens: Rounding[int] = Field(default=0, ge=0)
    """KV budget of each device in tokens. An engine of T devices has T times as many. 0: as with
    ``mini``, or on a GPU by ``gpu_memory``. If processes share a GPU, set it."""
    gpu_memory: Rounding[float] = Field(default=0.4, gt=0.0, lt=1.0)
    """Share of a GPU's memory for an engine's weights and KV cache (``gpu_memory_utilization``),
    if ``kv_tokens`` is 0. Each other size of a ``planner`` takes the same share again, and the
    trainer takes the rest."""


class FakeEngineConfig(OneDeviceConfig):
    """Scripted responses, for tests."""

    kind: Rounding[Literal["fake"]] = "fake"
    lengths: Fixed[list[int]] = [8]
    """Response lengths, chosen by the attempt's seed."""


EngineConfig = Annotated[
    MiniEngineConfig | VllmEngineConfig | FakeEngineConfig,
    Field(discriminator="kind"),
    usual_kind("mini"),
]
