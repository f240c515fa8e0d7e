"""Imported by the process that workers are forked off: what each of them would do first is done
once.

Numba loads its registries before its first function. Collections look at every object of every
library: a quarter of what the imports cost, and in a worker they would copy their pages.
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
"""They ask for no device: a fork of a process that did could not use CUDA."""

gc.disable()
for _name in _MODULES:
    import_module(_name)
import_module("numba").njit(lambda: None)()
# A thousand patterns, of all models' weights, which the first load of any model compiles.
with suppress(AttributeError):
    import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("llama")
gc.collect()
gc.freeze()
gc.enable()
