"""vLLM as an engine: the one place that knows it, and what is peculiar about its versions.

Nothing outside knows a name of vLLM's.
"""

# First: vLLM reads it as it is imported.
from rollpacker.engine.vllm import environment as environment
from rollpacker.engine.vllm.engine import VllmEngine

__all__ = ["VllmEngine"]
