"""What ``small.yaml`` needs: the demo's model, of a family with experts, windows or states.

    python examples/moe/small.py [FAMILY]

It begins untrained and is warm-started as the demo's is, which takes a few minutes: it can work a
greatest common divisor out, and most of the time does not bother to.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

from rollpacker.demo.warm_start import Recipe, default_cache, warm_start

FOLDER = Path("runs/moe-models")
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "mistral": {"sliding_window": 64},
    "gemma3_text": {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]},
    # vLLM's experts on a CPU are multiples of 32 wide.
    "qwen3_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "moe_intermediate_size": 64,
    },
    "nemotron_h": {
        "num_hidden_layers": 4,
        "hybrid_override_pattern": "M-*-",
        "mamba_num_heads": 4,
        "mamba_head_dim": 32,
        "ssm_state_size": 32,
        "n_groups": 1,
        "chunk_size": 32,
        "time_step_min": 1e-6,  # transformers clamps time steps there, vLLM does not
    },
}
"""What is not as in the demo's model."""


def recipe(family: str) -> Recipe:
    """The demo's warm start, of another model."""
    if family not in FAMILIES:
        raise ValueError(f"no family '{family}': take one of {', '.join(FAMILIES)}")
    return Recipe(heads=4, family=family, settings={"head_dim": 32, **FAMILIES[family]})


def progress(done: int, steps: int, loss: float) -> None:
    """A line now and then."""
    if done % 500 == 0 or done == steps:
        sys.stdout.write(f"{done} of {steps} supervised steps, loss {loss:.3f}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    kind = sys.argv[1] if len(sys.argv) > 1 else "qwen3_moe"
    made = warm_start(default_cache(), progress=progress, recipe=recipe(kind))
    shutil.copytree(made, FOLDER / kind, dirs_exist_ok=True)
    sys.stdout.write(f"{FOLDER / kind}\n")
