"""Sizes of models that determine costs."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple, cast

from rollpacker.sim.costs.layers_of_config import (
    CONTEXT,
    FAMILIES,
    HEADS,
    HIDDEN,
    KV_HEADS,
    ConfigFields,
    DecoderLayer,
    Matrix,
    layers_of,
)

# --- Sizes of well-known models, as their config.json has them

_SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
)


def _known(
    kind: str, sizes: tuple[int, int, int, int, int, int, int], *, tied: bool = False, **more: Any
) -> dict[str, Any]:
    named = dict(zip(_SIZES, sizes, strict=True))
    return {"model_type": kind, **named, "tie_word_embeddings": tied, **more}


def _qwen3_next(kind: str, sizes: tuple[int, int, int, int, int, int, int]) -> dict[str, Any]:
    return _known(
        kind,
        sizes,
        full_attention_interval=4,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
        max_position_embeddings=262144,
    )


def _gemma2(sizes: tuple[int, int, int, int, int, int, int]) -> dict[str, Any]:
    layers = ["sliding_attention", "full_attention"] * (sizes[0] // 2)
    return _known("gemma2", sizes, tied=True, sliding_window=4096, layer_types=layers)


def _gemma3(sizes: tuple[int, int, int, int, int, int, int], window: int) -> dict[str, Any]:
    return _known(
        "gemma3_text",
        sizes,
        tied=True,
        sliding_window=window,
        sliding_window_pattern=6,
        max_position_embeddings=32768 if sizes[0] == 26 else 131072,
    )


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    return _known(
        "gpt_oss",
        (layers, 2880, 64, 8, 64, 2880, 201088),
        num_local_experts=experts,
        num_experts_per_tok=4,
        sliding_window=128,
        attention_bias=True,
        layer_types=["sliding_attention", "full_attention"] * (layers // 2),
        max_position_embeddings=131072,
    )


_QWEN3_MOE: dict[str, Any] = {
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "max_position_embeddings": 40960,
}

# Layers, hidden, heads, KV heads, head size, MLP size, vocabulary: from each model's config.json.
FROZEN: Mapping[str, int] = {
    "Gemma-3-4B": 419_816_304,
    "Gemma-3-12B": 421_290_864,
    "Gemma-3-27B": 423_060_336,
}
"""Weights of parts that no text token uses, as transformers builds them: vision towers and their
projections."""

SAME: Mapping[str, str] = {
    "QwQ-32B": "Qwen2.5-32B",
    "Qwen3-Coder-30B-A3B": "Qwen3-30B-A3B",
    "DeepSeek-R1-Distill-Qwen-7B": "Qwen2.5-7B",
    "DeepSeek-R1-Distill-Qwen-14B": "Qwen2.5-14B",
    "DeepSeek-R1-Distill-Qwen-32B": "Qwen2.5-32B",
    "DeepSeek-R1-Distill-Llama-8B": "Llama-3.1-8B",
    "DeepSeek-R1-Distill-Llama-70B": "Llama-3.3-70B",
    "DeepSeek-Math-7B": "DeepSeek-LLM-7B",
    "DeepSeek-R1": "DeepSeek-V3",
    "Mathstral-7B": "Mistral-7B",
    **{f"Qwen2-{size}": f"Qwen2.5-{size}" for size in ("0.5B", "1.5B", "7B", "72B")},
}

CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "Qwen2.5-0.5B": _known("qwen2", (24, 896, 14, 2, 64, 4864, 151936), tied=True),
    "Qwen2.5-1.5B": _known("qwen2", (28, 1536, 12, 2, 128, 8960, 151936), tied=True),
    "Qwen2.5-3B": _known("qwen2", (36, 2048, 16, 2, 128, 11008, 151936), tied=True),
    "Qwen2.5-7B": _known("qwen2", (28, 3584, 28, 4, 128, 18944, 152064)),
    "Qwen2.5-14B": _known("qwen2", (48, 5120, 40, 8, 128, 13824, 152064)),
    "Qwen2.5-32B": _known("qwen2", (64, 5120, 40, 8, 128, 27648, 152064)),
    "Qwen2.5-72B": _known("qwen2", (80, 8192, 64, 8, 128, 29568, 152064)),
    "Qwen3-0.6B": _known("qwen3", (28, 1024, 16, 8, 128, 3072, 151936), tied=True),
    "Qwen3-1.7B": _known("qwen3", (28, 2048, 16, 8, 128, 6144, 151936), tied=True),
    "Qwen3-4B": _known("qwen3", (36, 2560, 32, 8, 128, 9728, 151936), tied=True),
    "Qwen3-8B": _known("qwen3", (36, 4096, 32, 8, 128, 12288, 151936)),
    "Qwen3-14B": _known("qwen3", (40, 5120, 40, 8, 128, 17408, 151936)),
    "Qwen3-32B": _known("qwen3", (64, 5120, 64, 8, 128, 25600, 151936)),
    "Qwen3-30B-A3B": _known(
        "qwen3_moe", (48, 2048, 32, 4, 128, 6144, 151936), moe_intermediate_size=768, **_QWEN3_MOE
    ),
    "Qwen3-235B-A22B": _known(
        "qwen3_moe", (94, 4096, 64, 4, 128, 12288, 151936), moe_intermediate_size=1536, **_QWEN3_MOE
    ),
    "Qwen3-Next-80B-A3B": {
        **_qwen3_next("qwen3_next", (48, 2048, 16, 2, 256, 5120, 151936)),
        "num_experts": 512,
        "num_experts_per_tok": 10,
    },
    "Qwen3.5-35B-A3B": {
        **_qwen3_next("qwen3_5_moe_text", (40, 2048, 16, 2, 256, 5632, 248320)),
        "num_experts": 256,
        "num_experts_per_tok": 8,
    },
    "DeepSeek-R1-Distill-Qwen-1.5B": _known("qwen2", (28, 1536, 12, 2, 128, 8960, 151936)),
    "DeepSeek-LLM-7B": _known("llama", (30, 4096, 32, 32, 128, 11008, 102400)),
    "SmolLM2-135M": _known("llama", (30, 576, 9, 3, 64, 1536, 49152), tied=True),
    "SmolLM2-360M": _known("llama", (32, 960, 15, 5, 64, 2560, 49152), tied=True),
    "SmolLM2-1.7B": _known("llama", (24, 2048, 32, 32, 64, 8192, 49152), tied=True),
    "SmolLM3-3B": _known("smollm3", (36, 2048, 16, 4, 128, 11008, 128256), tied=True),
    "Llama-2-7B": _known("llama", (32, 4096, 32, 32, 128, 11008, 32000)),
    "Llama-2-13B": _known("llama", (40, 5120, 40, 40, 128, 13824, 32000)),
    "Llama-3.2-1B": _known("llama", (16, 2048, 32, 8, 64, 8192, 128256), tied=True),
    "Llama-3.2-3B": _known("llama", (28, 3072, 24, 8, 128, 8192, 128256), tied=True),
    "Llama-3-8B": _known("llama", (32, 4096, 32, 8, 128, 14336, 128256)),
    "Llama-3-70B": _known("llama", (80, 8192, 64, 8, 128, 28672, 128256)),
    "Llama-3.1-8B": _known("llama", (32, 4096, 32, 8, 128, 14336, 128256)),
    "Llama-3.1-70B": _known("llama", (80, 8192, 64, 8, 128, 28672, 128256)),
    "Llama-3.1-405B": _known("llama", (126, 16384, 128, 8, 128, 53248, 128256)),
    "Llama-3.3-70B": _known("llama", (80, 8192, 64, 8, 128, 28672, 128256)),
    "Mistral-7B": _known("mistral", (32, 4096, 32, 8, 128, 14336, 32768), sliding_window=None),
    "Mistral-Nemo": _known("mistral", (40, 5120, 32, 8, 128, 14336, 131072), sliding_window=None),
    "Mistral-Small-24B": _known(
        "mistral", (40, 5120, 32, 8, 128, 32768, 131072), sliding_window=None
    ),
    "Ministral-8B": _known("mistral", (36, 4096, 32, 8, 128, 12288, 131072), sliding_window=None),
    "Phi-3-mini-4k": _known("phi3", (32, 3072, 32, 32, 96, 8192, 32064)),
    "Phi-4": _known("phi3", (40, 5120, 40, 10, 128, 17920, 100352)),
    "Phi-4-mini": _known("phi3", (32, 3072, 24, 8, 128, 8192, 200064), tied=True),
    "Gemma-2B": _known("gemma", (18, 2048, 8, 1, 256, 16384, 256000), tied=True),
    "Gemma-7B": _known("gemma", (28, 3072, 16, 16, 256, 24576, 256000), tied=True),
    "Gemma-2-2B": _gemma2((26, 2304, 8, 4, 256, 9216, 256000)),
    "Gemma-2-9B": _gemma2((42, 3584, 16, 8, 256, 14336, 256000)),
    "Gemma-2-27B": _gemma2((46, 4608, 32, 16, 128, 36864, 256000)),
    "Gemma-3-1B": _gemma3((26, 1152, 4, 1, 256, 6912, 262144), 512),
    "Gemma-3-4B": _gemma3((34, 2560, 8, 4, 256, 10240, 262208), 1024),
    "Gemma-3-12B": _gemma3((48, 3840, 16, 8, 256, 15360, 262208), 1024),
    "Gemma-3-27B": _gemma3((62, 5376, 32, 16, 128, 21504, 262208), 1024),
    "Mixtral-8x7B": _known(
        "mixtral",
        (32, 4096, 32, 8, 128, 14336, 32000),
        num_local_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=32768,
    ),
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    "DeepSeek-V3": {
        **_known("deepseek_v3", (61, 7168, 128, 128, 64, 18432, 129280)),
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "max_position_embeddings": 163840,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "v_head_dim": 128,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
    },
}


class WeightCount(NamedTuple):
    """Weights of a model, tied embeddings once. ``active`` are those that a token uses, with all
    of both embeddings. ``experts`` are those of all routed experts."""

    total: int
    active: int
    experts: int = 0

    @property
    def words(self) -> str:
        """``7.62B parameters``, or ``30.5B parameters, 3.35B active``."""
        active = f", {_short(self.active)} active" if self.active < self.total else ""
        return f"{_short(self.total)} parameters{active}"


def _short(count: int) -> str:
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return str(count)


class CachedValues(NamedTuple):
    """Numbers of values that an engine keeps per token, and per sequence besides."""

    token: int
    sequence: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A decoder: dense or with experts, of attention or of mixers with a state.

    ``heads`` and ``kv_heads`` are attention's, 0 without attention. ``context`` is the longest
    sequence, 0 if unknown. ``frozen`` are weights of other parts (vision), which are held, not
    trained, and in none of the other numbers. None: they were not counted. ``adapter_widths`` are
    inputs and outputs of all layers that get adapters, or None.
    """

    name: str
    kind: str
    hidden: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool
    blocks: tuple[DecoderLayer, ...]
    count: WeightCount
    context: int = 0
    frozen: int | None = 0
    adapter_widths: int | None = None

    @property
    def layers(self) -> int:
        return len(self.blocks)

    @property
    def parameters(self) -> int:
        """All weights once, tied embeddings included."""
        return self.count.total

    @property
    def held(self) -> int:
        return self.parameters + (self.frozen or 0)

    @property
    def active(self) -> int:
        return self.count.active

    @property
    def weight_bytes(self) -> int:
        return 2 * self.parameters

    @property
    def kv_bytes(self) -> int:
        """Bytes of one token in bfloat16, in the layers that keep all tokens of a sequence."""
        return 2 * sum(layer.cached(1) for layer in self.blocks if not layer.window)

    def cached(self, devices: int, longest: int) -> CachedValues:
        """Return the values that an engine of ``devices`` keeps of sequences of up to
        ``longest`` tokens. 0 stands for an unknown length. A window as long as the longest
        sequence keeps all of it."""
        token = sequence = 0
        for layer in self.blocks:
            values = layer.cached(devices)
            windowed = 0 < layer.window < longest or (layer.window > 0 and not longest)
            sequence += layer.state + windowed * layer.window * values
            token += (not windowed) * values
        return CachedValues(token, sequence)

    def met(self, tokens: int) -> float:
        """Return the weights that so many tokens of a step use, if they choose experts
        uniformly."""
        inactive = self.parameters - self.active
        if not inactive:
            return float(self.parameters)
        missed = inactive / self.count.experts
        return self.parameters - self.count.experts * missed**tokens

    @property
    def embedding(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def ends(self) -> int:
        """Weights of the embedding, and of a separate head."""
        return self.embedding * (1 if self.tied else 2)

    @property
    def linear(self) -> int:
        return sum(layer.linear for layer in self.blocks)

    @property
    def largest_layer(self) -> int:
        return max(layer.linear for layer in {*self.blocks})

    def adapter_parameters(self, rank: int) -> int:
        """Return the parameters of LoRA adapters, as in ``train/model/lora.py``. Without
        ``adapter_widths``, each matrix of the config counts for itself, which gives 0.7 to 1.4
        times the true number."""
        if self.adapter_widths is not None:
            return rank * self.adapter_widths
        adapted = (each for layer in self.blocks for each in self.adapted(layer))
        return rank * sum(rows + columns for rows, columns in adapted)

    def adapted(self, layer: DecoderLayer) -> tuple[Matrix, ...]:
        """Return the matrices of a layer that get adapters: with experts only the mixer's."""
        return layer.matrices if self.count.experts else layer.matrices + layer.feed_forward

    @classmethod
    def from_config(
        cls,
        config: Mapping[str, Any],
        name: str,
        count: WeightCount | None = None,
        frozen: int | None = None,
    ) -> ModelShape:
        """Read the fields of a hub ``config.json``, or of its text model.

        Args:
            count: counted weights. Without it the family must be one of ``FAMILIES``, whose weights
                follow from the fields.
            frozen: counted weights of its other parts, if any.

        Raises ``ValueError`` on another architecture or a missing field.
        """
        fields = ConfigFields(config, name)
        if count is None and fields.kind not in FAMILIES:
            raise ValueError(
                f"{name}: model_type {fields.kind!r} is not one of those whose size follows from "
                f"their config ({', '.join(FAMILIES)})"
            )
        layers = layers_of(fields)
        hidden, vocabulary = fields.integer(*HIDDEN), fields.integer("vocab_size")
        ends = vocabulary * hidden * (1 if fields.tied else 2) + hidden
        if fields.kind in _LEARNED_POSITIONS:
            ends += hidden * fields.integer(*CONTEXT)
        total = ends + sum(layer.weights for layer in layers)
        idle = sum(layer.idle_weights for layer in layers)
        experts = sum(layer.expert_weights for layer in layers)
        attends = any(layer.kv_heads for layer in layers)
        heads = fields.integer(*HEADS) if attends else 0
        return cls(
            name=name,
            kind=fields.kind,
            hidden=hidden,
            heads=heads,
            kv_heads=fields.integer(*KV_HEADS, default=heads) if attends else 0,
            vocabulary=vocabulary,
            tied=fields.tied,
            blocks=layers,
            count=count or WeightCount(total, total - idle, experts),
            context=fields.integer(*CONTEXT, default=0),
            frozen=frozen if frozen is not None or fields.composed else 0,
        )


_LEARNED_POSITIONS = ("gpt2", "opt", "gpt_neo", "gpt_bigcode")

_TRAINED = re.compile(
    r"^meta-|-(instruct|chat|base|it|pt|hf|thinking|math|coder|1m|rl|\d{4}|v\d+(\.\d+)?)(?=-|$)"
)
"""Parts of a name, in small letters, that do not belong to the size."""

MODELS: Mapping[str, ModelShape] = {
    name: ModelShape.from_config(config, name, frozen=FROZEN.get(name))
    for name, config in CONFIGS.items()
}


def _last(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2]


def _short_name(name: str) -> str:
    return _TRAINED.sub("", name.lower())


def find_model(name: str) -> ModelShape:
    """Return a model of ``MODELS``, or one of a ``config.json`` (its path or its folder).
    ``org/`` and suffixes about the training (``-Instruct``, ``-Math``, ``-2507``) are ignored.
    Raises ``ValueError``."""
    path = Path(name).expanduser()
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        return _read(path)
    short = _short_name(_last(name))
    for known in (*MODELS, *SAME):
        if _short_name(known) == short:
            return MODELS[SAME.get(known, known)]
    unknown = f"unknown model {name!r}"
    if near := near_model(name):
        raise ValueError(
            f"{unknown}: did you mean {near}? Otherwise give the path of a config.json"
        )
    raise ValueError(f"{unknown}: give the path of a config.json, or one of {', '.join(MODELS)}")


def near_model(name: str) -> str:
    """The known model whose name is close to an unknown one, or an empty text."""
    names = {_short_name(known): known for known in (*MODELS, *SAME)}
    near = get_close_matches(_short_name(_last(name)), names, 1, 0.8)
    return names[near[0]] if near else ""


def _read(path: Path) -> ModelShape:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path}: expected a JSON object")
    return ModelShape.from_config(cast(dict[str, Any], config), str(path))
