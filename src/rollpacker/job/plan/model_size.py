"""How large a model is: its weights counted by name and shape, none of them loaded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from rollpacker.config.hub_names import ROUTED
from rollpacker.errors import first_line
from rollpacker.sim.costs.config_fields import EXPERTS, ConfigFields
from rollpacker.sim.costs.models import ModelShape, WeightCount
from rollpacker.train.model.loading import source
from rollpacker.train.model.lora import adapter_widths


def model_shape(path: str) -> ModelShape:
    """Of a folder or hub name. Raises ``ValueError``."""
    _, config = source(path)
    return shape_of_config(config, path)


def count_model(path: str) -> WeightCount:
    """Of a folder or hub name. Raises ``ValueError``."""
    _, config = source(path)
    return count_weights(config, path)


def shape_of_config(config: Any, name: str) -> ModelShape:
    """Of a configuration of transformers, of its text model where it is composed.

    Raises ``ValueError`` in one line where transformers has no such model, or a size is missing.
    """
    count, text = count_weights(config, name), config.get_text_config()
    frozen = 0 if text is config else _size(_built(config, name)) - count.total
    shape = ModelShape.from_config(text.to_dict(), name, count, frozen)
    return replace(shape, adapter_widths=adapter_widths(_built(text, name)))


def count_weights(config: Any, name: str) -> WeightCount:
    """Weights of the model that transformers builds of a configuration, without memory for them;
    of a composed one, of its model of text.

    Experts are tensors of as many matrices as the configuration names experts.

    Raises ``ValueError`` in one line where transformers builds none.
    """
    text = config.get_text_config()
    model = _built(text, name)
    fields = ConfigFields(text.to_dict(), name)
    count = fields.integer(*EXPERTS, default=0)
    total = _size(model)
    stacked = [w.numel() for w in model.parameters() if _stacked(w, count)]
    experts = sum(stacked)
    met = experts * fields.integer(*ROUTED) // count if experts else 0
    return WeightCount(total, total - experts + met, experts)


def _built(config: Any, name: str) -> Any:
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)
    except Exception as error:  # whatever a model's own code raises for sizes that do not fit
        raise ValueError(
            f"model.path={name}: transformers builds no model of its config.json: "
            f"{first_line(error)}"
        ) from error


def _size(model: Any) -> int:
    return sum(weight.numel() for weight in model.parameters())


def _stacked(weight: torch.Tensor, experts: int) -> bool:
    """Whether it holds a matrix of each expert; a convolution has one row of each channel."""
    return weight.dim() == 3 and weight.shape[0] == experts > 0 and weight.shape[1] > 1
