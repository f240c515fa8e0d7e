"""The imports of the process that workers are forked off.

Numba loads its registries before its first function. Garbage collections would cost a quarter of
the imports' time, and copy pages in a worker.
"""

import gc
from contextlib import suppress
from importlib import import_module

_MODULES = (
    "rollpacker.engine.mini.engine",
    "rollpacker.runtime.worker.worker_process",
    "rollpacker.train.trainer",
    "rollpacker.train.model.loading",
    "torch.distributed.checkpoint",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen3.modeling_qwen3",
)
"""They look for no device: a fork of a process that did could not use CUDA."""

gc.disable()
for _name in _MODULES:
    import_module(_name)
import_module("numba").njit(lambda: None)()
# The first load of any model compiles a thousand patterns of all models' weights.
with suppress(AttributeError):
    import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("llama")
gc.collect()
gc.freeze()
gc.enable()
