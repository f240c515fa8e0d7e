"""Environment variables that vLLM and torch read at import. Import this module first."""

from __future__ import annotations

import os

FIXED = {
    # The engine core in this process, and the model runner that has a place for our drafts.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    # Workers are bound to their cores already.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    # FlashInfer's sampler is compiled by nvcc as the engine starts, and our seeds never use it.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
_USUAL = {"VLLM_LOGGING_LEVEL": "ERROR"}

os.environ.update(FIXED)
for _name, _value in _USUAL.items():
    os.environ.setdefault(_name, _value)
