"""vLLM decodes from merged adapters as the built-in engine does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import adapter_cases as cases
import pytest
from peft import PeftType

from rollpacker.config import ModelConfig, VllmEngineConfig
from rollpacker.train.model.adapters import KINDS

pytestmark = pytest.mark.cluster

WORST = 1e-4
"""Nats: its attention on a CPU sums in another order."""


def test_vllm_decodes_from_every_kind_and_option(tmp_path: Path) -> None:
    """One engine for all: a process has one at a time."""
    from rollpacker.engine.vllm import VllmEngine

    found: dict[str, cases.Measured] = {}
    for tied in (False, True):
        folder = tmp_path / str(tied)
        cases.build(tied).config.save_pretrained(folder)
        config = VllmEngineConfig(max_running=8, kv_tokens=1024)
        engine: Any = VllmEngine(ModelConfig(path=str(folder)), config=config)
        for kind in PeftType:
            if not tied and not KINDS[kind.value]:
                found[kind.value] = cases.measure_kind(kind, lambda _base, own=engine: own)
        for name in cases.OPTIONS:
            asked, option = cases.option_of(name)
            if asked == tied:
                found[name] = cases.measure(option, lambda _base, own=engine: own, tied=tied)
        engine.close()
        del engine
    measured = {name: each for name, each in found.items() if each.refused is None}
    assert len(measured) > len(found) / 2
    assert not {name: each for name, each in measured.items() if each.worst > WORST}
    assert all(each.changed > 1e-2 for each in measured.values())
