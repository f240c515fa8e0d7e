"""Costs of decode steps, prefill, training, weight updates and rewards, and lower bounds.

Decode cost is affine in the context tokens of the batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from pydantic import Field, model_validator

from rollpacker.config import Config
from rollpacker.policy.engines.hardware import Devices, LatencyCurve
from rollpacker.policy.engines.speculation import MOST, drafted, tokens, worth
from rollpacker.sim.costs.hardware import DeviceSpec, MeasuredDevice
from rollpacker.sim.costs.models import ModelShape

# --- Speculative decoding: tokens of a step, and costs of drafts


class Ahead(Config):
    """Speculative decoding. The default costs are the middle of published ones for GPUs."""

    tokens: float = Field(default=1.0, ge=1.0)
    """Tokens of a step that verifies a draft. 1: no speculative decoding. In runs it is
    ``speculation/last_tokens_per_verification``."""
    drafted: int = Field(default=MOST, ge=1)
    """Most tokens of such a draft."""
    step_s: float = Field(default=0.5e-3, ge=0.0)
    """Additional seconds of a step with drafts, on GPUs."""
    row_s: float = Field(default=15e-6, ge=0.0)
    """Additional seconds for each drafted token, on GPUs. On a CPU it is a row of ``latency``."""
    rows: int = Field(default=128, ge=2)
    """Most rows of a step with drafts."""
    measured: dict[int, float] = Field(default_factory=dict[int, float])
    """Seconds of a token by number of sequences with drafts, instead of the costs above."""

    @model_validator(mode="after")
    def _reachable(self) -> Ahead:
        if self.tokens > self.drafted + 1:
            raise ValueError(
                f"tokens={self.tokens:g} of a draft of drafted={self.drafted}: at most one more"
            )
        if self.measured:
            LatencyCurve(self.measured)
        return self

    @property
    def possible(self) -> bool:
        return self.tokens > 1.0 or bool(self.measured)

    @cached_property
    def acceptance(self) -> float:
        """The acceptance rate of each drafted token, if all are equal, that gives ``tokens``."""
        low, high = 0.0, 1.0
        for _ in range(50):
            middle = (low + high) / 2
            few = tokens(middle, self.drafted) < self.tokens
            low, high = (middle, high) if few else (low, middle)
        return low


class Pace(NamedTuple):
    """Tokens that each sequence gets in a step, and tokens that are drafted for it."""

    tokens: float = 1.0
    drafted: int = 0


PLAIN = Pace()


@dataclass(frozen=True, slots=True)
class Rule:
    """The policy's rule for an engine (``decisions.Speculate``), and the costs of drafts."""

    below: int
    most: int
    free: int
    row_cost: float
    ahead: Ahead

    def pace(self, batch: int) -> Pace:
        """Return the pace with ``batch`` sequences. A draft ends before tokens of too low a
        chance."""
        if batch > self.below:
            return PLAIN
        acceptance = self.ahead.acceptance
        most = min(self.most, self.ahead.drafted, self.ahead.rows // batch - 1)
        count = drafted(acceptance, worth(batch, self.free, self.row_cost), most)
        return Pace(tokens(acceptance, count), count) if count else PLAIN


ROLLOUT_START_S = 10.0
"""Once per rollout on GPUs: memory handed over, caches built, first requests sent."""
PROMPT_TOKENS = 200  # prompt length that training charges for each response
ADMIT_SHARE = 0.99  # share of the KV cache that new sequences may fill (vLLM's watermark)
BLOCK_SLACK = 8  # tokens lost per sequence: half of a 16-token block
_LONG = 32_768  # tokens of a long sequence, if their length is unknown


class Efficiency(Config):
    """Terms of a decode step on a GPU: shares of the datasheet, and overheads."""

    step_s: float = Field(default=4.5e-3, ge=0.0)
    """Fixed seconds of a decode step."""
    sequence_s: float = Field(default=60e-6, ge=0.0)
    """Additional seconds for each sequence."""
    layer_s: float = Field(default=50e-6, ge=0.0)
    """Additional seconds for each layer, at a tensor-parallel size above 1."""
    weights: float = Field(default=0.92, gt=0.0, le=1.0)
    """Share of the bandwidth at which weights are read."""
    kv: float = Field(default=0.75, gt=0.0, le=1.0)
    """The same for the KV cache."""
    compute: float = Field(default=0.6, gt=0.0, le=1.0)
    """Share of the flops that decoding reaches at large batches."""
    prefill: float = Field(default=0.5, gt=0.0, le=1.0)
    """The same for prefill."""
    memory: float = Field(default=0.85, gt=0.0, le=1.0)
    """Share of a GPU's memory for the engine."""
    reserved: float = Field(default=4e9, ge=0.0)
    """Bytes of it for activations and graphs."""


def engine_devices(
    device: DeviceSpec, shape: ModelShape, efficiency: Efficiency, gpus: int
) -> Devices:
    """Return the limits of a model's tensor-parallel sizes on ``gpus`` devices."""
    return Devices(
        node_size=min(gpus, device.per_node),
        device_bytes=device.memory * efficiency.memory - efficiency.reserved,
        weight_bytes=shape.weight_bytes,
        heads=shape.heads,
    )


class GpuCosts:
    """A model on ``tp`` GPUs of one node. Raises ``ValueError`` if the model cannot have ``tp``.
    ``kappa`` multiplies the decode step. ``longest``: tokens of the longest sequence, 0 if
    unknown."""

    def __init__(
        self,
        *,
        device: DeviceSpec,
        shape: ModelShape,
        tp: int = 1,
        kappa: float = 1.0,
        efficiency: Efficiency | None = None,
        longest: int = 0,
    ) -> None:
        e = efficiency or Efficiency()
        devices = engine_devices(device, shape, e, device.per_node)
        if tp not in devices.sizes():
            raise ValueError(
                f"tp={tp}: {shape.name}, with {shape.heads} heads, runs on "
                f"{', '.join(map(str, devices.sizes()))} x {device.name}"
            )
        free = tp * devices.device_bytes - shape.weight_bytes
        many = tp > 1
        reduced = 2 * shape.layers * shape.hidden * 2 * 2 * (tp - 1) / (tp * device.bus)
        token, sequence = _cached_bytes(shape, tp, longest)
        self.tp, self.kappa = tp, kappa
        self.capacity = free / token
        self.slack = BLOCK_SLACK + sequence / token
        self._flops = 2 * shape.active
        self._shape = shape
        self._weight_s = 2 / (tp * device.bandwidth * e.weights)
        self._sequence_flops_s = self._flops / (tp * device.flops * e.compute)
        self._fixed_s = e.step_s + many * e.layer_s * shape.layers
        reading = tp * device.bandwidth * e.kv
        self._sequence_s = e.sequence_s + many * reduced + sequence / reading
        self.slope = kappa * (token / reading)
        self._prefill_rate = tp * device.flops * e.prefill

    def step_s(self, batch: int, context_tokens: float) -> float:
        weights = self._weights_s(batch)
        fixed = self._fixed_s + self._sequence_s * batch + weights
        return self.kappa * fixed + self.slope * context_tokens

    def drafts_s(self, batch: int, drafted: int, ahead: Ahead) -> float:
        more = self._weights_s(batch + drafted) - self._weights_s(batch)
        return self.kappa * more + ahead.step_s + ahead.row_s * drafted

    def _weights_s(self, rows: int) -> float:
        return max(self._shape.met(rows) * self._weight_s, rows * self._sequence_flops_s)

    def prefill_s(self, tokens: float) -> float:
        """Seconds to prefill ``tokens``, bound by compute."""
        return tokens * self._flops / self._prefill_rate


def _cached_bytes(shape: ModelShape, tp: int, longest: int) -> tuple[float, float]:
    """Bytes on all GPUs of an engine in bfloat16: per token, and per sequence. If no layer keeps
    all tokens, a token counts its part of a long sequence's cache."""
    token, sequence = shape.cached(tp, longest)
    if token:
        return 2.0 * token, 2.0 * sequence
    return 2.0 * sequence / (longest or _LONG), 0.0


class CurveCosts:
    """Costs from measurements, for CPUs. Raises ``ValueError`` if the context term exceeds a
    measured step."""

    def __init__(self, device: MeasuredDevice) -> None:
        self.capacity = float(device.kv_tokens)
        self.slack = float(BLOCK_SLACK)
        self.slope = device.context_token_s
        self._prefill_token_s = device.prefill_token_s
        self._curve = LatencyCurve(device.latency)
        self._shift = device.context * device.context_token_s
        for batch in device.latency:
            if self._curve.at(batch) <= batch * self._shift:
                raise ValueError(
                    f"latency at batch {batch} is below context * context_token_s * batch: "
                    "lower context_token_s"
                )

    def step_s(self, batch: int, context_tokens: float) -> float:
        moved = self.slope * context_tokens - self._shift * batch
        return self._curve.at(batch) + moved

    def drafts_s(self, batch: int, drafted: int, ahead: Ahead) -> float:
        del ahead
        return self._curve.at(batch + drafted) - self._curve.at(batch)

    def prefill_s(self, tokens: float) -> float:
        return tokens * self._prefill_token_s


EngineCosts = GpuCosts | CurveCosts
"""Costs of one engine replica. ``capacity`` is its KV cache in tokens. Each sequence takes
``slack`` of it besides its tokens: the unused part of its last block, and its state of fixed
size. ``slope`` is the seconds that each context token adds to a decode step."""


def ahead_terms(costs: EngineCosts, batch: int, rule: Rule) -> tuple[float, float]:
    """Return seconds of a token of each of ``batch`` sequences with speculative decoding. The
    first is at no context, the second for each token of context."""
    measured = rule.ahead.measured
    if measured and batch <= rule.below:
        return LatencyCurve(measured).at(batch), costs.slope
    pace, seconds = rule.pace(batch), costs.step_s(batch, 0.0)
    if pace.drafted:
        seconds += costs.drafts_s(batch, batch * pace.drafted, rule.ahead)
    return seconds / pace.tokens, costs.slope / pace.tokens


@dataclass(frozen=True, slots=True)
class TrainCosts:
    """Gradient work of one data-parallel replica. Each response takes ``launch_s``, ``token_s``
    for each of its tokens and of ``prompt_tokens``, and ``square_s`` for the square of their
    number (attention). Each message that requests gradients takes ``task_s``."""

    launch_s: float
    token_s: float
    prompt_tokens: int = PROMPT_TOKENS
    square_s: float = 0.0
    task_s: float = 0.0

    @classmethod
    def on_gpus(
        cls, device: DeviceSpec, shape: ModelShape, *, gpus: int, launch_s: float, mfu: float
    ) -> TrainCosts:
        """Make a replica of ``gpus`` for forward, backward, recompute, old and reference
        logprobs. Each computes with the weights that a token uses."""
        return cls(launch_s, 12 * shape.active / (gpus * device.flops * mfu))

    def sequence_s(self, tokens: int) -> float:
        whole = tokens + self.prompt_tokens
        return self.launch_s + (self.token_s + self.square_s * whole) * whole


class RewardCosts(Config):
    """Seconds of one reward, by kind."""

    math_s: float = Field(default=0.05, ge=0.0)
    """Answer extraction and comparison."""
    judge_s: float = Field(default=30.0, ge=0.0)
    """One judged response while the judge's devices are loaded."""
    judge_idle: float = Field(default=0.25, ge=0.0, le=1.0)
    """Factor of that on idle devices."""
    judge_slots: int = Field(default=256, ge=1)
    """Responses judged at once. Others wait."""

    def judged_s(self, load: float) -> float:
        """Return seconds of one judged response at a load from 0 (idle) to 1, linear in between."""
        assert 0.0 <= load <= 1.0
        return self.judge_s * (self.judge_idle + (1.0 - self.judge_idle) * load)


class DriverCosts(Config):
    """CPU seconds of driver and grading. They delay workers only while no core is free."""

    cores: int = Field(ge=1)
    """Cores of the machine."""
    ended_s: float = Field(ge=0.0)
    """For each response that ended or left its engine."""
    graded_s: float = Field(ge=0.0)
    """For each reward, including its computation."""

    def delay_s(self, busy: int, cpu_s: float) -> float:
        return cpu_s / self.cores if busy >= self.cores else 0.0


def packing_bound_s(
    costs: EngineCosts,
    replicas: int,
    lengths: Sequence[int],
    prompt_tokens: float = PROMPT_TOKENS,
    max_running: float = math.inf,
) -> float:
    """Return the least seconds to decode ``lengths`` if ``replicas`` ran full to the last token.
    The KV cache holds sequences at their mean context over the tokens to decode. Prefill is
    free."""
    total = sum(lengths)
    if total == 0:
        return 0.0
    context = prompt_tokens + sum(n * n for n in lengths) / (2 * total)
    batch = max(1, math.floor(min(costs.capacity / (context + costs.slack), max_running)))
    return total * costs.step_s(batch, batch * context) / batch / replicas


def single_sequence_s(
    costs: EngineCosts, tokens: int, prompt_tokens: float = PROMPT_TOKENS
) -> float:
    """Return the seconds to decode one response of ``tokens`` alone, a bound of a synchronous
    round."""
    return tokens * costs.step_s(1, prompt_tokens + tokens / 2)
