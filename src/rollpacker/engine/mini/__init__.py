"""The built-in engine: continuous batching for Qwen2, Qwen3 and Llama, in-process weights.

Nothing here knows processes or drivers.
"""

from rollpacker.engine.mini.engine import MiniEngine

__all__ = ["MiniEngine"]
