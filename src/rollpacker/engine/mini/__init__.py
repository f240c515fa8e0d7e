"""The built-in engine: continuous batching for Qwen2, Qwen3 and Llama, with in-process weights."""

from rollpacker.engine.mini.engine import MiniEngine

__all__ = ["MiniEngine"]
