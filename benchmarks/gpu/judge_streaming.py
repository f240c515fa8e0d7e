"""The judge's layers copied while others compute, against copied when needed; needs CUDA.

A random model with the layers of Qwen2.5-7B, one sequence of ``--tokens``: seconds of a pass and
peak device memory, as JSON.

python -m benchmarks.gpu.judge_streaming [--tokens 32768] [--layers 12] [--resident 2]
"""

import gc
import json
import statistics
import sys
import time

import torch
from transformers import AutoModelForCausalLM

from benchmarks._run import flags
from benchmarks.gpu.models import shape_of
from rollpacker.reward.judge.streamed import StreamedModel


def build(layers: int, tokens: int, *, pipelined: bool) -> StreamedModel:
    shape = shape_of(
        "7B", vocab_size=32_000, num_hidden_layers=layers, max_position_embeddings=tokens
    )
    with torch.device("cuda"):  # to draw so many weights takes a CPU minutes
        model = AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16)
    model.to("cpu")
    return StreamedModel(model, torch.device("cuda"), pipelined=pipelined)


def measure(model: StreamedModel, tokens: int, resident: int, repeats: int) -> dict[str, float]:
    ids = torch.randint(0, 32_000, (1, tokens), device="cuda")
    at = torch.tensor([tokens - 1], device="cuda")
    model.keep(resident)
    model.logits(ids, at)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        model.logits(ids, at)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated()
    held = model.store.held_bytes + model.fixed_bytes
    return {
        "pass_s": statistics.median(seconds),
        "peak_gb": peak / 1e9,
        "weights_gb": held / 1e9,
        "activations_gb": (peak - held) / 1e9,
    }


def main() -> int:
    arguments = flags(
        __doc__,
        tokens=(32_768, "length of the sequence"),
        layers=(12, "layers of the model"),
        resident=(2, "layers kept on the device"),
        repeats=(5, "passes; the median counts"),
    ).parse_args()
    if not torch.cuda.is_available():
        print("judge_streaming: torch sees no CUDA device: nothing to measure", file=sys.stderr)
        return 2
    rows: dict[str, dict[str, float]] = {}
    for name, pipelined, resident in (
        ("pipelined", True, arguments.resident),
        ("not_pipelined", False, arguments.resident),
        ("all_resident", True, arguments.layers),
    ):
        model = build(arguments.layers, arguments.tokens, pipelined=pipelined)
        rows[name] = measure(model, arguments.tokens, resident, arguments.repeats)
        del model
        gc.collect()
        torch.cuda.empty_cache()
    speedup = rows["not_pipelined"]["pass_s"] / rows["pipelined"]["pass_s"]
    print(json.dumps(vars(arguments) | rows | {"speedup": speedup}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
