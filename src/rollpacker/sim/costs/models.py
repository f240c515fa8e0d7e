"""Sizes of models, as far as costs depend on them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A dense decoder with grouped-query attention and a gated MLP.

    ``parameters`` counts all weights once, tied embeddings included; ``inner`` is the MLP's size;
    ``context`` the longest sequence, 0 where it is not known.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocabulary: int
    tied: bool
    parameters: int
    context: int = 0

    @property
    def weight_bytes(self) -> int:
        """Of all weights in bfloat16."""
        return 2 * self.parameters

    @property
    def kv_bytes(self) -> int:
        """Of one token's keys and values in bfloat16."""
        return 2 * self.layers * self.kv_heads * self.head_dim * 2

    @property
    def embedding(self) -> int:
        """Weights of one embedding, or of the output head."""
        return self.vocabulary * self.hidden

    @property
    def linear(self) -> int:
        """Weights of the matrices of all layers."""
        return self.layers * sum(rows * columns for rows, columns in self._matrices)

    def adapter_parameters(self, rank: int) -> int:
        """Of LoRA adapters on every linear layer but the output head."""
        return self.layers * rank * sum(rows + columns for rows, columns in self._matrices)

    @property
    def _matrices(self) -> tuple[tuple[int, int], ...]:
        """Outputs and inputs of a layer's seven matrices."""
        hidden, q, kv = self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim
        return (
            *((q, hidden), (kv, hidden), (kv, hidden), (hidden, q)),
            *((self.inner, hidden), (self.inner, hidden), (hidden, self.inner)),
        )

    @classmethod
    def from_config(cls, config: Mapping[str, Any], name: str) -> ModelShape:
        """From the fields of a hub ``config.json`` (Qwen2, Qwen3, Llama, Mistral).

        Raises ``ValueError`` on another architecture or a missing field.
        """
        kind = config.get("model_type")
        if "moe" in str(kind) or any(key in config for key in _EXPERTS):
            raise ValueError(f"{name}: {_NO_EXPERTS}")
        if kind not in _KINDS:
            raise ValueError(f"{name}: model_type {kind!r} is not one of {', '.join(_KINDS)}")
        missing = [key for key in _REQUIRED if not isinstance(config.get(key), int)]
        if missing:
            raise ValueError(f"{name}: no integer {', '.join(missing)} in its config")
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        kv_heads = config.get("num_key_value_heads") or heads
        head_dim = config.get("head_dim") or hidden // heads
        return cls(
            name=name,
            layers=config["num_hidden_layers"],
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            inner=config["intermediate_size"],
            vocabulary=config["vocab_size"],
            tied=bool(config.get("tie_word_embeddings", False)),
            parameters=_parameters(config, kv_heads, head_dim),
            context=int(config.get("max_position_embeddings") or 0),
        )


_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_NO_EXPERTS = (
    "mixtures of experts are not supported: a step's costs depend on how many experts its tokens "
    "meet; take a dense model"
)
_KINDS = ("qwen2", "qwen3", "llama", "mistral")
_REQUIRED = (
    "hidden_size",
    "num_attention_heads",
    "num_hidden_layers",
    "intermediate_size",
    "vocab_size",
)


def _parameters(config: Mapping[str, Any], kv_heads: int, head_dim: int) -> int:
    kind, hidden = config["model_type"], config["hidden_size"]
    q, kv = config["num_attention_heads"] * head_dim, kv_heads * head_dim
    attention = hidden * (q + 2 * kv) + q * hidden
    if kind == "qwen2":
        attention += q + 2 * kv
    elif config.get("attention_bias"):
        attention += q + 2 * kv + hidden
    if kind == "qwen3":
        attention += 2 * head_dim
    inner = config["intermediate_size"]
    mlp = 3 * hidden * inner
    if config.get("mlp_bias"):
        mlp += 2 * inner + hidden
    embeddings = config["vocab_size"] * hidden
    if not config.get("tie_word_embeddings", False):
        embeddings *= 2
    return config["num_hidden_layers"] * (attention + mlp + 2 * hidden) + embeddings + hidden


def _known(
    kind: str, name: str, sizes: tuple[int, int, int, int, int, int, int], *, tied: bool = False
) -> ModelShape:
    keys = (
        "num_hidden_layers",
        "hidden_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "intermediate_size",
        "vocab_size",
    )
    fields = dict(zip(keys, sizes, strict=True))
    return ModelShape.from_config(fields | {"model_type": kind, "tie_word_embeddings": tied}, name)


# layers, hidden, heads, KV heads, head size, MLP size, vocabulary: from each model's config.json.
MODELS: Mapping[str, ModelShape] = {
    shape.name: shape
    for shape in (
        _known("qwen2", "Qwen2.5-0.5B", (24, 896, 14, 2, 64, 4864, 151936), tied=True),
        _known("qwen2", "Qwen2.5-1.5B", (28, 1536, 12, 2, 128, 8960, 151936), tied=True),
        _known("qwen2", "Qwen2.5-3B", (36, 2048, 16, 2, 128, 11008, 151936), tied=True),
        _known("qwen2", "Qwen2.5-7B", (28, 3584, 28, 4, 128, 18944, 152064)),
        _known("qwen2", "Qwen2.5-14B", (48, 5120, 40, 8, 128, 13824, 152064)),
        _known("qwen2", "Qwen2.5-32B", (64, 5120, 40, 8, 128, 27648, 152064)),
        _known("qwen2", "Qwen2.5-72B", (80, 8192, 64, 8, 128, 29568, 152064)),
        _known("qwen3", "Qwen3-0.6B", (28, 1024, 16, 8, 128, 3072, 151936), tied=True),
        _known("qwen3", "Qwen3-1.7B", (28, 2048, 16, 8, 128, 6144, 151936), tied=True),
        _known("qwen3", "Qwen3-4B", (36, 2560, 32, 8, 128, 9728, 151936), tied=True),
        _known("qwen3", "Qwen3-8B", (36, 4096, 32, 8, 128, 12288, 151936)),
        _known("qwen3", "Qwen3-14B", (40, 5120, 40, 8, 128, 17408, 151936)),
        _known("qwen3", "Qwen3-32B", (64, 5120, 64, 8, 128, 25600, 151936)),
        _known("llama", "SmolLM2-135M", (30, 576, 9, 3, 64, 1536, 49152), tied=True),
        _known("llama", "Llama-3.2-1B", (16, 2048, 32, 8, 64, 8192, 128256), tied=True),
        _known("llama", "Llama-3.2-3B", (28, 3072, 24, 8, 128, 8192, 128256), tied=True),
        _known("llama", "Llama-3-8B", (32, 4096, 32, 8, 128, 14336, 128256)),
        _known("llama", "Llama-3-70B", (80, 8192, 64, 8, 128, 28672, 128256)),
        _known("llama", "Llama-3.1-8B", (32, 4096, 32, 8, 128, 14336, 128256)),
        _known("llama", "Llama-3.1-70B", (80, 8192, 64, 8, 128, 28672, 128256)),
        _known("llama", "Llama-3.3-70B", (80, 8192, 64, 8, 128, 28672, 128256)),
    )
}


def find_model(name: str) -> ModelShape:
    """A model of ``MODELS``, or one of a ``config.json``.

    ``org/``, ``-Instruct`` and ``-Base`` are ignored; ``name`` may also be a path to a
    ``config.json`` or its folder. Raises ``ValueError``.
    """
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        return _read(path)
    short = name.rpartition("/")[2].removesuffix("-Instruct").removesuffix("-Base")
    for known, shape in MODELS.items():
        if known.lower() == short.lower():
            return shape
    if re.search(r"-A\d+(\.\d+)?B|mixtral|moe|deepseek-v[23]", short, re.IGNORECASE):
        raise ValueError(f"model {name!r}: {_NO_EXPERTS}")
    raise ValueError(
        f"unknown model {name!r}: give the path of a config.json, or one of {', '.join(MODELS)}"
    )


def _read(path: Path) -> ModelShape:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path}: expected a JSON object")
    return ModelShape.from_config(cast(dict[str, Any], config), str(path))
