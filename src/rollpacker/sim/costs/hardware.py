"""Devices that costs are computed for.

GPUs are described by their datasheets, a CPU by measurements of our own engine.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import Field

from rollpacker.config import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """A GPU.

    Args:
        bandwidth: of its memory, bytes/s.
        flops: dense bfloat16, 1/s.
        memory: bytes.
        bus: all-reduce bus bandwidth within a node, bytes/s.
        per_node: GPUs that share the bus.
    """

    name: str
    bandwidth: float
    flops: float
    memory: float
    bus: float
    per_node: int = 8


# Bus bandwidth is 0.4 of the NVLink figure of the datasheet (both directions): 160 of 400 GB/s
# (H800), 360 of 900 GB/s (H20, H200). A100, H100 and B200 take the same share of 600, 900 and
# 1800 GB/s. The other figures of these three: NVIDIA A100 80GB SXM, H100 SXM and HGX B200
# (180 GB usable, 1,000 W) datasheets, without sparsity. A800: an A100 with 400 GB/s of NVLink.
# The others: their datasheets, GeForce cards with sums in float32, with the same share of PCIe
# 4.0's 64 GB/s (RTX5090 and RTXPRO6000: of PCIe 5.0's 128 GB/s; T4: of 3.0's 32 GB/s, in float16).
DEVICES: Mapping[str, DeviceSpec] = {
    device.name: device
    for device in (
        DeviceSpec(name="A100", bandwidth=2.039e12, flops=312e12, memory=80e9, bus=240e9),
        DeviceSpec(name="A800", bandwidth=2.039e12, flops=312e12, memory=80e9, bus=160e9),
        DeviceSpec(name="A100-40GB", bandwidth=1.555e12, flops=312e12, memory=40e9, bus=240e9),
        DeviceSpec(name="T4", bandwidth=0.32e12, flops=65e12, memory=16e9, bus=12.8e9),
        DeviceSpec(name="A10", bandwidth=0.6e12, flops=125e12, memory=24e9, bus=25.6e9),
        DeviceSpec(name="A10G", bandwidth=0.6e12, flops=70e12, memory=24e9, bus=25.6e9),
        DeviceSpec(name="L4", bandwidth=0.3e12, flops=121e12, memory=24e9, bus=25.6e9),
        DeviceSpec(name="RTX3090", bandwidth=0.936e12, flops=71e12, memory=24e9, bus=25.6e9),
        DeviceSpec(name="RTX4090", bandwidth=1.008e12, flops=165e12, memory=24e9, bus=25.6e9),
        DeviceSpec(name="RTX5090", bandwidth=1.792e12, flops=209e12, memory=32e9, bus=51.2e9),
        DeviceSpec(name="A6000", bandwidth=0.768e12, flops=155e12, memory=48e9, bus=25.6e9),
        DeviceSpec(name="RTX6000Ada", bandwidth=0.96e12, flops=364e12, memory=48e9, bus=25.6e9),
        DeviceSpec(name="RTXPRO6000", bandwidth=1.792e12, flops=503e12, memory=96e9, bus=51.2e9),
        DeviceSpec(name="L40", bandwidth=0.864e12, flops=181e12, memory=48e9, bus=25.6e9),
        DeviceSpec(name="L40S", bandwidth=0.864e12, flops=362e12, memory=48e9, bus=25.6e9),
        DeviceSpec(name="H100", bandwidth=3.35e12, flops=989e12, memory=80e9, bus=360e9),
        DeviceSpec(name="H800", bandwidth=3.35e12, flops=990e12, memory=80e9, bus=160e9),
        DeviceSpec(name="H20", bandwidth=4.0e12, flops=148e12, memory=96e9, bus=360e9),
        DeviceSpec(name="H200", bandwidth=4.8e12, flops=990e12, memory=141e9, bus=360e9),
        DeviceSpec(name="B200", bandwidth=8.0e12, flops=2250e12, memory=180e9, bus=720e9),
    )
}


class MeasuredDevice(Config):
    """The CPU cores of one worker with one model."""

    latency: dict[int, float]
    """Seconds of a decode step by batch size."""
    kv_tokens: int = Field(gt=0)
    """KV budget."""
    max_running: int = Field(default=0, ge=0)
    """Most sequences of its engine. 0: unknown."""
    prefill_token_s: float = Field(ge=0.0)
    """Seconds to prefill one token."""
    context: int = Field(default=0, ge=0)
    """Tokens of each sequence when ``latency`` was measured."""
    context_token_s: float = Field(default=0.0, ge=0.0)
    """Seconds of a step for each further context token of the batch."""
    train_token_s: float = Field(default=0.0, ge=0.0)
    """Seconds of gradient for one token, prompts included."""
    train_square_s: float = Field(default=0.0, ge=0.0)
    """Seconds of gradient per square of a sequence's tokens (attention)."""
    train_task_s: float = Field(default=0.0, ge=0.0)
    """Seconds of each message that requests gradients."""


def find_device(name: str) -> DeviceSpec:
    """Return a device of ``DEVICES``, in any usual spelling: ``rtx 4090``, ``H100 80GB HBM3``.
    Raises ``ValueError`` if there is none."""
    for known, device in DEVICES.items():
        if _bare(known) == _bare(name):
            return device
    raise ValueError(f"unknown device {name!r}; known: {', '.join(DEVICES)}")


def _bare(name: str) -> str:
    brands = "NVIDIA|TESLA|GEFORCE|RTX|GENERATION|BLACKWELL|(SERVER|WORKSTATION) EDITION"
    return re.sub(rf"[^A-Z0-9]|{brands}|SXM\d?|PCIE|HBM\d?E?|80GB", "", name.upper())
