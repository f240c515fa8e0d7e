"""The built-in engine: continuous batching for Qwen2, Qwen3 and Llama, in-process weights."""

from rollpacker.engine.mini.engine import MiniEngine
from rollpacker.engine.mini.latency import measure_latency

__all__ = ["MiniEngine", "measure_latency"]
