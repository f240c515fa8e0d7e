"""The differences of a job on emulated devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rollpacker.config import RunConfig
from rollpacker.emulate.driver import Emulation
from rollpacker.runtime.record.metrics import Counters
from rollpacker.train.model.loading import Card

Note = Callable[[str], None]


def check_emulated(config: RunConfig) -> None:
    """Refuse options that emulated devices cannot do. Raises ``ValueError``."""
    if config.devices.emulate is None:
        return
    wrong = {
        "eval": (config.eval is not None, "their answers are random tokens, so drop it"),
        "deterministic": (config.deterministic, "they follow the clock, so leave it out"),
        "mux.url": (bool(config.mux.url), "they have no nodes to share, so leave it out"),
    }
    for key, (is_set, why) in wrong.items():
        if is_set:
            raise ValueError(f"devices.emulate cannot work with {key}: {why}")


def emulation_of(config: RunConfig, card: Card) -> Emulation | None:
    """The job's emulated devices, if it has any. Raises ``ValueError``."""
    if config.devices.emulate is None:
        return None
    return Emulation(config, len(card.tokenizer))


def title(config: RunConfig, emulation: Emulation | None) -> str:
    """The title of the run's progress display."""
    if emulation is None:
        return config.output
    devices, factor = config.devices.nodes * config.devices.per_node, emulation.factor
    return f"{config.output}: EMULATED, {devices} devices, factor {factor:g}, nothing is trained"


def sum_up(emulation: Emulation | None, counters: Counters, note: Note) -> dict[str, Any]:
    """The emulation's part of ``summary.json``. It also logs whether the driver kept up."""
    if emulation is None:
        return {}
    found = emulation.summary(counters.driver_cpu_s, counters.rollout_s, counters.step)
    late, behind = found["lateness_ms"], found["lateness_share"]
    said = (
        f"driver utilisation {found['driver_utilisation']:.2f}; emulated actions were late by "
        f"{late['p50']:.1f} ms (median) and {late['p99']:.1f} ms (99%), {behind:.1%} of a rollout"
    )
    if not found["honest"]:
        said = (
            f"WARNING too slow to be valid: {said}: lower the factor in the file of devices.emulate"
        )
    note(said)
    return {"emulated": found}
