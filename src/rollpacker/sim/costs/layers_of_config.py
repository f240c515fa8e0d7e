"""The layers of a decoder, from its ``config.json``.

Sizes are read by transformers' names, and a family's exceptions by its ``model_type``. The sizes of
``FAMILIES`` agree with the models that transformers builds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from rollpacker.config.base import ROUTED

# --- Fields of config.json, by the names of each family

LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
HIDDEN = ("hidden_size", "n_embd", "d_model")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
INNER = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
CONTEXT = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")

_HUB_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    # What the hub's files of Gemma 3 leave to transformers.
    "gemma3_text": {
        "vocab_size": 262208,
        "head_dim": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "sliding_window_pattern": 6,
        "max_position_embeddings": 131072,
    },
    "gemma2": {"sliding_window_pattern": 2},
    "cohere2": {"sliding_window_pattern": 4},
    "qwen3_next": {"full_attention_interval": 4},
}
_TIED = (
    *("gemma", "gemma2", "gemma3_text", "smollm3", "ernie4_5", "starcoder2", "cohere", "cohere2"),
    *("gpt2", "bloom", "falcon", "opt", "ernie4_5_moe", "lfm2", "mamba", "falcon_mamba"),
)


class ConfigFields:
    """Fields of a configuration, or of the text model in a composed one."""

    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        text = config.get("text_config")
        inner = cast(dict[str, Any], text) if isinstance(text, dict) else config
        self.name = name
        self.composed = inner is not config
        self.kind = str(inner.get("model_type"))
        self._fields: Mapping[str, Any] = {**_HUB_DEFAULTS.get(self.kind, {}), **inner}
        # The whole model ties its head, whatever its parts say.
        tied = config.get("tie_word_embeddings", inner.get("tie_word_embeddings"))
        self.tied = self.kind in _TIED if tied is None else bool(tied)

    def get(self, *names: str) -> Any:
        return next((self._fields[n] for n in names if self._fields.get(n) is not None), None)

    def integer(self, *names: str, default: int | None = None) -> int:
        """Return the first of these that is set. Raises ``ValueError`` without one and a
        default."""
        value = self.get(*names)
        if isinstance(value, list):  # one for each layer, all alike
            value = next(iter(cast(list[Any], value)), None)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        if default is None:
            raise ValueError(f"{self.name}: no integer {names[0]} in its config")
        return default

    def integers(self, name: str) -> tuple[int, ...] | None:
        value = self._fields.get(name)
        return tuple(cast(list[int], value)) if isinstance(value, list) else None

    def of_layer(self, index: int) -> ConfigFields:
        each = self._fields.get("per_layer_config")
        if not isinstance(each, dict):
            return self
        own: Any = {int(n): v for n, v in cast(dict[Any, Any], each).items()}.get(index)
        if not own:
            return self
        return ConfigFields({**self._fields, **own}, self.name)


# --- One layer of a decoder

Matrix = tuple[int, int]  # outputs and inputs of a linear layer


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderLayer:
    """Numbers of weights and of values. A token mixer and an MLP add up to a layer.

    Args:
        matrices: of the mixer's linear layers.
        feed_forward: those of MLPs that every token passes.
        routed: number of experts per token.
        other: further weights: norms, biases, convolutions, routers.
        output: inputs of the mixer's last matrix.
        mixed: values of a token that the mixer keeps for its gradient, besides its input and
            ``output``.
        normed: float32 values of a token that norms keep, if they compute in it throughout.
        inner: sizes of the MLPs that a token passes, together.
        kv_heads: heads that devices can share. Each device has at least one. 1 for a latent cache.
        kv_width: values that a token leaves in the cache of each of them.
        window: most tokens of a sequence for which they are kept, 0 for all.
        state: values that are kept per sequence, of any length.
    """

    matrices: tuple[Matrix, ...] = ()
    feed_forward: tuple[Matrix, ...] = ()
    expert: tuple[Matrix, ...] = ()
    experts: int = 0
    routed: int = 0
    other: int = 0
    output: int = 0
    mixed: int = 0
    normed: int = 0
    inner: int = 0
    kv_heads: int = 0
    kv_width: int = 0
    window: int = 0
    state: int = 0

    def __add__(self, also: DecoderLayer) -> DecoderLayer:
        """Join two parts. At most one has experts, and at most one a cache by tokens."""
        return DecoderLayer(
            matrices=self.matrices + also.matrices,
            feed_forward=self.feed_forward + also.feed_forward,
            expert=self.expert + also.expert,
            experts=self.experts + also.experts,
            routed=self.routed + also.routed,
            other=self.other + also.other,
            output=self.output + also.output,
            mixed=self.mixed + also.mixed,
            normed=self.normed + also.normed,
            inner=self.inner + also.inner,
            kv_heads=self.kv_heads + also.kv_heads,
            kv_width=self.kv_width + also.kv_width,
            window=self.window + also.window,
            state=self.state + also.state,
        )

    @property
    def expert_weights(self) -> int:
        return self.experts * _size(self.expert)

    @property
    def idle_weights(self) -> int:
        return (self.experts - self.routed) * _size(self.expert)

    @property
    def linear(self) -> int:
        return _size(self.matrices) + _size(self.feed_forward) + self.expert_weights

    @property
    def weights(self) -> int:
        return self.linear + self.other

    def cached(self, devices: int) -> int:
        """Return the values that a token leaves on ``devices`` together. If heads are fewer,
        copies count."""
        return max(devices, self.kv_heads) * self.kv_width


def _size(matrices: tuple[Matrix, ...]) -> int:
    return sum(rows * columns for rows, columns in matrices)


FAMILIES = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3", "glm4"),
    *("smollm3", "olmo2", "olmo3", "seed_oss", "exaone4", "ernie4_5", "granite", "cohere2"),
    *("starcoder2", "gpt2", "gpt_neox", "qwen2_moe", "qwen3_moe", "mixtral", "olmoe", "gpt_oss"),
    *("deepseek_v3", "glm4_moe", "minimax_m2", "granitemoe", "phimoe", "llama4_text"),
    *("ernie4_5_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "lfm2", "jamba"),
    *("granitemoehybrid", "falcon_h1", "nemotron_h", "mamba", "mamba2"),
)

_PLAIN_MLP = (
    *("gpt2", "gpt_neox", "starcoder2", "phi", "opt", "bloom", "falcon", "nemotron", "nemotron_h"),
    *("gptj", "gpt_neo", "gpt_bigcode", "arcee", "apertus"),
)
"""Families whose MLP has no gate: two matrices."""
_GATED_ATTENTION = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""Families with one gate for each query."""
_MAMBA_ONLY = ("mamba", "mamba2", "falcon_mamba")
_PATTERN = {"M": "mamba", "*": "full_attention", "-": "mlp", "E": "moe"}
"""Letters of ``hybrid_override_pattern``."""


def layers_of(fields: ConfigFields) -> tuple[DecoderLayer, ...]:
    """Return one entry per layer. Raises ``ValueError`` if a size is missing."""
    return tuple(
        _layer(fields.of_layer(index), index, kind) for index, kind in enumerate(_kinds(fields))
    )


def _layer(f: ConfigFields, index: int, kind: str) -> DecoderLayer:
    hidden = f.integer(*HIDDEN)
    # Gemma's four, as saved tensors of transformers' layers were counted.
    normed = 7 * hidden if f.kind.startswith("gemma") else 0
    norms = DecoderLayer(other=2 * hidden, normed=normed)
    if kind in _MLPS:
        return norms + _MLPS[kind](f)
    mixer = _MIXERS.get(kind, attention)(f)
    if f.kind in (*_MAMBA_ONLY, "nemotron_h"):  # their layers are mixers, or MLPs
        return norms + mixer
    return norms + mixer + (experts(f) if _sparse(f, index) else mlp(f))


def _kinds(f: ConfigFields) -> list[str]:
    given = f.get("layer_types", "layers_block_type")
    if isinstance(given, list):
        return [str(each) for each in cast(list[Any], given)]
    pattern = f.get("hybrid_override_pattern")
    if isinstance(pattern, str):
        return [_PATTERN.get(letter, "full_attention") for letter in pattern]
    count = f.integer(*LAYERS)
    if f.kind in _MAMBA_ONLY:
        return ["mamba"] * count
    if f.kind == "falcon_h1":
        return ["hybrid"] * count
    full, other = _full_layers(f, count)
    return ["full_attention" if index in full else other for index in range(count)]


def _full_layers(f: ConfigFields, count: int) -> tuple[set[int], str]:
    """The layers with full attention, and the kind of the others, without a list in the config."""
    every = range(count)
    for name, other in (
        ("full_attention_interval", "linear_attention"),
        ("sliding_window_pattern", "sliding_attention"),
    ):
        if step := f.get(name):
            return {n for n in every if (n + 1) % step == 0}, other
    if period := f.get("attn_layer_period"):
        return {n for n in every if n % period == f.integer("attn_layer_offset")}, "mamba"
    for name, other in (("full_attn_idxs", "conv"), ("attn_layer_indices", "mamba")):
        if (found := f.integers(name)) is not None:
            return set(found), other
    if f.get("sliding_window") and f.get("use_sliding_window") is not False:
        return set(every[: f.integer("max_window_layers", default=0)]), "sliding_attention"
    return set(every), "full_attention"


def _sparse(f: ConfigFields, index: int) -> bool:
    if not f.integer(*EXPERTS, default=0):
        return False
    listed = f.integers("moe_layers")
    if listed is not None:
        return index in listed
    kinds = f.get("mlp_layer_types")
    if isinstance(kinds, list):
        return cast(list[Any], kinds)[index] == "sparse"
    if index in (f.integers("mlp_only_layers") or ()):
        return False
    dense = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
    if index < f.integer(*dense, default=0):
        return False
    if period := f.integer("expert_layer_period", default=0):
        return index % period == f.integer("expert_layer_offset", default=0)
    step = f.integer("decoder_sparse_step", "interleave_moe_layer_step", default=1)
    return (index + 1) % step == 0


# Token mixers --------------------------------------------------------------------------------


def attention(f: ConfigFields) -> DecoderLayer:
    """Attention over all earlier tokens, with grouped queries or DeepSeek's latent cache."""
    if f.get("kv_lora_rank"):
        return _latent_attention(f)
    hidden, heads = f.integer(*HIDDEN), f.integer(*HEADS)
    kv_heads = f.integer(*KV_HEADS, default=heads)
    if f.get("multi_query") and not f.get("new_decoder_architecture"):
        kv_heads = 1
    head = f.integer("head_dim", default=hidden // heads)
    q, kv = heads * head, kv_heads * head
    other = 0
    if f.kind == "qwen2":
        other = q + 2 * kv
    elif f.get("attention_bias"):
        other = q + 2 * kv + hidden
    if f.kind == "qwen3":
        other += 2 * head
    gated = f.kind in _GATED_ATTENTION or bool(f.get("attn_output_gate"))
    return DecoderLayer(
        matrices=((q * (1 + gated), hidden), (kv, hidden), (kv, hidden), (hidden, q)),
        other=other,
        output=q,
        mixed=q * (2 + gated) + 2 * kv,
        kv_heads=kv_heads,
        kv_width=2 * head,
    )


def _latent_attention(f: ConfigFields) -> DecoderLayer:
    """Every device keeps a latent and one head's rotated key of each token."""
    hidden, heads, rank = f.integer(*HIDDEN), f.integer(*HEADS), f.integer("kv_lora_rank")
    plain, rotated = f.integer("qk_nope_head_dim"), f.integer("qk_rope_head_dim")
    value, low = f.integer("v_head_dim"), f.integer("q_lora_rank", default=0)
    q = heads * (plain + rotated)
    queries: tuple[Matrix, ...] = ((low, hidden), (q, low)) if low else ((q, hidden),)
    keys = ((rank + rotated, hidden), (heads * (plain + value), rank))
    return DecoderLayer(
        matrices=(*queries, *keys, (hidden, heads * value)),
        other=low + rank,
        output=heads * value,
        mixed=2 * q + 2 * heads * value + low + rank,
        kv_heads=1,
        kv_width=rank + rotated,
    )


def _window(f: ConfigFields) -> DecoderLayer:
    return attention(f) + DecoderLayer(window=f.integer("sliding_window", default=0))


def _chunk(f: ConfigFields) -> DecoderLayer:
    return attention(f) + DecoderLayer(window=f.integer("attention_chunk_size", default=0))


def _linear(f: ConfigFields) -> DecoderLayer:
    if not f.get("linear_num_value_heads"):
        return _mamba(f) if _has_mamba(f) else _decayed(f)
    hidden, kernel = f.integer(*HIDDEN), f.integer("linear_conv_kernel_dim")
    heads = f.integer("linear_num_value_heads")
    key_head, value_head = f.integer("linear_key_head_dim"), f.integer("linear_value_head_dim")
    value = heads * value_head
    convolved = 2 * f.integer("linear_num_key_heads") * key_head + value
    return DecoderLayer(
        matrices=((convolved + value, hidden), (2 * heads, hidden), (hidden, value)),
        other=convolved * kernel + 2 * heads + value_head,
        output=value,
        mixed=2 * (convolved + value),
        state=heads * key_head * value_head + convolved * (kernel - 1),
    )


def _decayed(f: ConfigFields) -> DecoderLayer:
    plain = attention(f)
    heads = f.integer(*HEADS)
    state = heads * (plain.output // heads) ** 2
    return DecoderLayer(
        matrices=plain.matrices, output=plain.output, mixed=plain.mixed, state=state
    )


def _has_mamba(f: ConfigFields) -> bool:
    return f.get("mamba_d_state", "ssm_state_size", "state_size") is not None


def _mamba(f: ConfigFields) -> DecoderLayer:
    heads = f.get("mamba_n_heads", "mamba_num_heads")
    if heads is None and f.kind == "mamba2":
        heads = f.integer("num_heads")
    return _mamba_one(f) if heads is None else _mamba_two(f, heads)


def _mamba_two(f: ConfigFields, heads: int) -> DecoderLayer:
    hidden, kernel = f.integer(*HIDDEN), f.integer("mamba_d_conv", "conv_kernel")
    state = f.integer("mamba_d_state", "ssm_state_size", "state_size")
    head = f.integer("mamba_d_head", "mamba_head_dim", "head_dim")
    inner, groups = heads * head, f.integer("mamba_n_groups", "n_groups")
    convolved = inner + 2 * groups * state
    return DecoderLayer(
        matrices=((inner + convolved + heads, hidden), (hidden, inner)),
        other=convolved * (kernel + 1) + 3 * heads + inner,
        output=inner,
        mixed=2 * (convolved + inner),
        state=inner * state + convolved * (kernel - 1),
    )


def _mamba_one(f: ConfigFields) -> DecoderLayer:
    hidden, kernel = f.integer(*HIDDEN), f.integer("mamba_d_conv", "conv_kernel")
    state = f.integer("mamba_d_state", "state_size")
    inner = f.integer("mamba_expand", "expand") * hidden
    rank = f.integer("mamba_dt_rank", "time_step_rank", default=-(-hidden // 16))
    return DecoderLayer(
        matrices=(
            *((2 * inner, hidden), (rank + 2 * state, inner)),
            *((inner, rank), (hidden, inner)),
        ),
        other=inner * (kernel + state + 3),
        output=inner,
        mixed=6 * inner,
        state=inner * (state + kernel - 1),
    )


def _both(f: ConfigFields) -> DecoderLayer:
    return attention(f) + _mamba(f)


def _convolution(f: ConfigFields) -> DecoderLayer:
    """A gated convolution over a few tokens (LFM2)."""
    hidden, kernel = f.integer(*HIDDEN), f.integer("conv_L_cache")
    return DecoderLayer(
        matrices=((3 * hidden, hidden), (hidden, hidden)),
        other=hidden * kernel,
        output=hidden,
        mixed=4 * hidden,
        state=hidden * (kernel - 1),
    )


# MLPs ----------------------------------------------------------------------------------------


def mlp(f: ConfigFields) -> DecoderLayer:
    """An MLP for every token."""
    hidden = f.integer(*HIDDEN)
    inner = f.integer("intermediate_size_mlp", *INNER, default=4 * hidden)
    if f.get("shared_intermediate_size"):  # Granite's, where it has no experts
        inner = f.integer("shared_intermediate_size")
    if f.get("block_auto_adjust_ff_dim"):
        step = f.integer("block_multiple_of")
        inner = step * -(-int(f.get("block_ffn_dim_multiplier") * int(2 * inner / 3)) // step)
    other = 2 * inner + hidden if f.get("mlp_bias") else 0
    return DecoderLayer(feed_forward=_matrices(f, hidden, inner), other=other, inner=inner)


def experts(f: ConfigFields) -> DecoderLayer:
    """Routed experts for each token, and experts that all tokens share."""
    hidden, count = f.integer(*HIDDEN), f.integer(*EXPERTS)
    routed, inner = f.integer(*ROUTED), f.integer("moe_intermediate_size", *INNER)
    shared = f.integer("n_shared_experts", "moe_num_shared_experts", default=0) * inner
    shared = f.integer(
        "shared_expert_intermediate_size",
        "moe_shared_expert_intermediate_size",
        "shared_intermediate_size",
        default=inner if f.kind == "llama4_text" else shared,
    )
    return DecoderLayer(
        feed_forward=_matrices(f, hidden, shared) if shared else (),
        expert=_matrices(f, hidden, inner),
        experts=count,
        routed=routed,
        other=hidden * count,
        inner=routed * inner + shared,
    )


def _matrices(f: ConfigFields, hidden: int, inner: int) -> tuple[Matrix, ...]:
    ends: tuple[Matrix, ...] = ((inner, hidden), (hidden, inner))
    return ends if f.kind in _PLAIN_MLP else ((inner, hidden), *ends)


_MIXERS: dict[str, Callable[[ConfigFields], DecoderLayer]] = {
    "sliding_attention": _window,
    "chunked_attention": _chunk,
    "linear_attention": _linear,
    "mamba": _mamba,
    "conv": _convolution,
    "hybrid": _both,
}
_MLPS: dict[str, Callable[[ConfigFields], DecoderLayer]] = {"mlp": mlp, "moe": experts}
