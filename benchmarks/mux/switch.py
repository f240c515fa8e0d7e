"""A warm switch against a cold start of the same training state.

    python -m benchmarks.mux.switch --hidden 512

Cold: a new process that imports its libraries and loads model and optimizer from disk. Warm: the
process is alive and its state waits in host memory. On CUDA the state goes to the device.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks._run import flags
from rollpacker.train.state.warm_state import WarmState

COLD = """
import sys, torch
from transformers import AutoModelForCausalLM
folder, device = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder).to(device)
optimizer = torch.optim.AdamW(model.parameters())
optimizer.load_state_dict(torch.load(folder + "/optimizer.pt"))
"""


def main() -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    args = flags(__doc__, hidden=512).parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = Qwen2Config(
        vocab_size=8192,
        hidden_size=args.hidden,
        intermediate_size=4 * args.hidden,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
    )
    model: Any = Qwen2ForCausalLM(shape)
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    kept = [value for each in optimizer.state.values() for value in each.values()]
    state = WarmState(lambda: [*model.parameters(), *kept], device)
    switches: list[float] = []
    for _ in range(4):
        begun = time.monotonic()
        state.offload()
        state.load()
        switches.append(time.monotonic() - begun)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        torch.save(optimizer.state_dict(), Path(folder) / "optimizer.pt")
        begun = time.monotonic()
        subprocess.run(
            [sys.executable, "-c", COLD, folder, device], check=True, capture_output=True
        )
        cold = time.monotonic() - begun
    # The first switch allocates the buffers.
    warm = statistics.median(switches[1:])
    print(
        f"{state.bytes / 1e9:.2f} GB on {device}: warm switch {warm:.3f} s (out and in),", end=" "
    )
    print(f"cold start {cold:.1f} s, {cold / warm:.0f} times as long")


if __name__ == "__main__":
    main()
