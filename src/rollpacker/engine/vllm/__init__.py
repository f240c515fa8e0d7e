"""vLLM as an engine. No other module names vLLM's parts."""

# First, as vLLM reads these variables at import.
from rollpacker.engine.vllm import environment as environment
from rollpacker.engine.vllm.engine import VllmEngine

__all__ = ["VllmEngine"]
