"""Sizes of models, as far as costs depend on them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

from rollpacker.sim.costs.config_fields import CONTEXT, HEADS, HIDDEN, KV_HEADS, ConfigFields
from rollpacker.sim.costs.decoder_layers import DecoderLayer, Matrix
from rollpacker.sim.costs.known_models import CONFIGS, FROZEN, SAME
from rollpacker.sim.costs.layers_of_config import FAMILIES, layers_of


class WeightCount(NamedTuple):
    """Weights of a model, tied embeddings once.

    ``active`` are those that a token meets, with all of both embeddings; ``experts`` those of all
    experts that routers choose among.
    """

    total: int
    active: int
    experts: int = 0

    @property
    def words(self) -> str:
        """Such as ``7.62B parameters``, or ``30.5B parameters, 3.35B active``."""
        active = f", {_short(self.active)} active" if self.active < self.total else ""
        return f"{_short(self.total)} parameters{active}"


def _short(count: int) -> str:
    """Three digits and a unit."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return str(count)


class CachedValues(NamedTuple):
    """Numbers of values that an engine keeps: of each token of a sequence, and of the sequence
    besides."""

    token: int
    sequence: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A decoder: dense or with experts, of attention or of mixers with a state.

    ``heads`` and ``kv_heads`` are attention's, 0 where it has none; ``context`` is the longest
    sequence, 0 where it is not known. ``frozen`` are weights of other parts (vision), which are
    held and not trained, and in none of the other numbers; None where they were not counted.
    ``adapter_widths`` are inputs and outputs of all layers that get adapters; None as well.
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
        """How many."""
        return len(self.blocks)

    @property
    def parameters(self) -> int:
        """All weights once, tied embeddings included."""
        return self.count.total

    @property
    def held(self) -> int:
        """All weights with those of other parts."""
        return self.parameters + (self.frozen or 0)

    @property
    def active(self) -> int:
        """Of these, those that a token meets."""
        return self.count.active

    @property
    def weight_bytes(self) -> int:
        """Of all weights in bfloat16."""
        return 2 * self.parameters

    @property
    def kv_bytes(self) -> int:
        """Of one token in bfloat16, in the layers that keep all tokens of a sequence."""
        return 2 * sum(layer.cached(1) for layer in self.blocks if not layer.window)

    def cached(self, devices: int, longest: int) -> CachedValues:
        """What an engine of so many devices keeps of sequences of up to ``longest`` tokens; 0: not
        known. A window that holds the longest sequence keeps all of it."""
        token = sequence = 0
        for layer in self.blocks:
            values = layer.cached(devices)
            windowed = 0 < layer.window < longest or (layer.window > 0 and not longest)
            sequence += layer.state + windowed * layer.window * values
            token += (not windowed) * values
        return CachedValues(token, sequence)

    def met(self, tokens: int) -> float:
        """Weights that so many tokens of a step meet, each of which chooses its experts as if all
        were as likely: what routers are trained to."""
        inactive = self.parameters - self.active
        if not inactive:
            return float(self.parameters)
        missed = inactive / self.count.experts
        return self.parameters - self.count.experts * missed**tokens

    @property
    def embedding(self) -> int:
        """Weights of one embedding, or of the output head."""
        return self.vocabulary * self.hidden

    @property
    def ends(self) -> int:
        """Weights of the embedding, and of a head of its own."""
        return self.embedding * (1 if self.tied else 2)

    @property
    def linear(self) -> int:
        """Weights of the matrices of all layers."""
        return sum(layer.linear for layer in self.blocks)

    @property
    def largest_layer(self) -> int:
        """Weights of the matrices of the largest one."""
        return max(layer.linear for layer in {*self.blocks})

    def adapter_parameters(self, rank: int) -> int:
        """Of LoRA adapters on all linear layers, with experts on those of the mixers.

        Those of ``train/model/lora.py`` where ``adapter_widths`` is known. By the config alone each
        matrix counts for itself, also where a family has several in one (Phi-3) or takes the bare
        weight (outputs of Mamba's mixers): 0.7 to 1.4 times as many as there are.
        """
        if self.adapter_widths is not None:
            return rank * self.adapter_widths
        adapted = (each for layer in self.blocks for each in self.adapted(layer))
        return rank * sum(rows + columns for rows, columns in adapted)

    def adapted(self, layer: DecoderLayer) -> tuple[Matrix, ...]:
        """Those of a layer that get adapters: in a model with experts the mixer's only."""
        return layer.matrices if self.count.experts else layer.matrices + layer.feed_forward

    @classmethod
    def from_config(
        cls,
        config: Mapping[str, Any],
        name: str,
        count: WeightCount | None = None,
        frozen: int | None = None,
    ) -> ModelShape:
        """From the fields of a hub ``config.json``, of its text model where it is of several.

        Args:
            config: the fields.
            name: the model's.
            count: its weights, where they were counted; else the family must be one of
                ``FAMILIES``, for which they follow from the fields.
            frozen: weights of its other parts, where it has some and they were counted.

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
"""Parts of a name, in small letters, that are none of the size."""

MODELS: Mapping[str, ModelShape] = {
    name: ModelShape.from_config(config, name, frozen=FROZEN.get(name))
    for name, config in CONFIGS.items()
}


def _short_name(name: str) -> str:
    return _TRAINED.sub("", name.lower())


def find_model(name: str) -> ModelShape:
    """A model of ``MODELS``, or one of a ``config.json``.

    ``org/`` and what says how a model was trained (``-Instruct``, ``-Math``, ``-2507``) are
    ignored; ``name`` may also be a path to a ``config.json`` or its folder. Raises ``ValueError``.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        return _read(path)
    short = _short_name(name.rstrip("/").rpartition("/")[2])
    for known in (*MODELS, *SAME):
        if _short_name(known) == short:
            return MODELS[SAME.get(known, known)]
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
