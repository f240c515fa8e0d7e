"""Writes checkpoints: the model in the hub's layout, the optimizer through torch DCP. transformers
5 renamed fields of ``config.json`` and ``tokenizer_config.json``, and writes only the new names.
Release 4 would silently use its defaults, such as another rotary base. So both names are
written."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from tokenizers import Tokenizer
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from transformers import AutoConfig

from rollpacker.checkpoint_names import Layout
from rollpacker.errors import first_line
from rollpacker.hub import folder_here

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


_APART = ("rope_theta", "partial_rotary_factor")
_ALSO = {
    "gpt_neox": {"rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"},
    "modernbert-decoder": {
        "global_rope_theta": "rope_theta",
        "local_rope_theta": "rope_local_base_freq",
    },
    "qwen3_moe": {"num_experts": "num_local_experts"},
}
"""By ``model_type``: release 4's name of a field, and its usual or later name."""
_BESIDE = (
    *("tokenizer*", "vocab*", "merges.txt", "*.model", "*.tiktoken", "special_tokens_map.json"),
    *("added_tokens.json", "chat_template*", "additional_chat_templates/*"),
    *("generation_config.json", "*processor_config.json"),
)
"""Files of a checkpoint that training does not change."""


def with_older_fields(config: dict[str, Any]) -> dict[str, Any]:
    """A ``config.json`` with the fields of both releases, in its parts too."""
    parts = {key: part for key, part in config.items() if isinstance(part, dict)}
    older = {key: with_older_fields(part) for key, part in parts.items() if "model_type" in part}
    return config | older | (older_fields(config) or {})


def older_fields(config: dict[str, Any]) -> dict[str, Any] | None:
    """Release 4's fields for those of release 5. None if they cannot express
    ``rope_parameters``."""
    rope = config.get("rope_parameters") or {}
    whole, local = rope.get("full_attention", rope) or {}, rope.get("sliding_attention")
    fields = {key: whole[key] for key in _APART if key in whole}
    fields["torch_dtype"] = config.get("dtype")
    if rope:
        scaling = {key: value for key, value in whole.items() if key not in _APART}
        fields["rope_scaling"] = None if scaling == {"rope_type": "default"} else scaling
    if local:
        fields["rope_local_base_freq"] = local["rope_theta"]
    older = {key: value for key, value in config.items() if key != "rope_parameters"} | fields
    names = _ALSO.get(config["model_type"], {})
    fields |= {old: older[new] for old, new in names.items() if new in older}
    if not rope:
        return fields
    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        try:  # release 5 reads and converts these, which shows whether they mean the same
            read = AutoConfig.for_model(**deepcopy(older | fields))
        except (KeyError, ValueError):
            return None
    return fields if read.rope_parameters == rope else None


def write_beside(folder: Path, tokenizer: Any, source: Path | None) -> None:
    """Copy the other files of ``source``, the initial checkpoint. Without one, write the
    tokenizer."""
    if source is None:
        tokenizer.save_pretrained(str(folder))
    else:
        for path in (path for name in _BESIDE for path in source.glob(name) if path.is_file()):
            place = folder / path.relative_to(source)
            place.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, place)
    words, inner = folder / "tokenizer.json", getattr(tokenizer, "backend_tokenizer", None)
    if inner and words.exists() and _whole(inner) != _whole(Tokenizer.from_file(str(words))):
        inner.save(str(words))  # release 5 replaces parts of some families' tokenizers
    if (path := folder / "tokenizer_config.json").exists():
        rewrite(path, _older_tokenizer)


def _whole(tokenizer: Tokenizer) -> dict[str, Any]:
    return json.loads(tokenizer.to_str()) | {"padding": None, "truncation": None}


def rewrite(path: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Change a JSON file, if ``change`` changes its content."""
    found = json.loads(path.read_text(encoding="utf-8"), object_hook=_number)
    if (changed := change(found)) != found:
        text = json.dumps(changed, indent=2, sort_keys=True, ensure_ascii=False)
        path.write_text(text + "\n", encoding="utf-8")


def _number(part: dict[str, Any]) -> Any:
    return float(part["__float__"]) if "__float__" in part else part  # release 5's infinity


def _older_tokenizer(config: dict[str, Any]) -> dict[str, Any]:
    own = {"backend", "is_local", "local_files_only", "model_specific_special_tokens"}
    found = {key: value for key, value in config.items() if key not in own}
    if found.get("tokenizer_class") == "TokenizersBackend":
        found["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(found.get("extra_special_tokens"), list):
        found["additional_special_tokens"] = found.pop("extra_special_tokens")
    if named := config.get("model_specific_special_tokens"):
        found["extra_special_tokens"] = named
    return found


_LIMIT = 5 << 30  # bytes of a file, unless a single weight has more
_TYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}


def write_weights(
    folder: Path,
    layout: Layout,
    weights: Iterator[tuple[str, torch.Tensor]],
    limit: int = _LIMIT,
) -> None:
    """Write safetensors files, with an index if there are several. Holds one weight at a time.
    Takes exactly as many of ``weights`` as ``layout`` has. Any tensor may be a view of another."""
    files = _files(layout, limit)
    names = [f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)]
    if len(files) == 1:
        names = ["model.safetensors"]
    for name, held in zip(names, files, strict=True):
        _write_file(folder / name, held, weights)
    if len(files) > 1:
        places = {weight: name for name, held in zip(names, files, strict=True) for weight in held}
        size = sum(_bytes(*entry) for entry in layout.values())
        index = {"metadata": {"total_size": size}, "weight_map": places}
        text = json.dumps(index, indent=2)
        (folder / "model.safetensors.index.json").write_text(text + "\n")


def _write_file(path: Path, held: Layout, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in held.items():
        start, end = end, end + _bytes(dtype, shape)
        entry = {"dtype": _TYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
        header[name] = entry
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # data is aligned
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for wanted in held:
            _append(file, wanted, *next(weights))


def _append(file: IO[bytes], wanted: str, name: str, weight: torch.Tensor) -> None:
    assert name == wanted, f"{name} came instead of {wanted}"
    data = weight.detach().cpu().contiguous().view(-1).view(torch.uint8)
    file.write(data.numpy().data)


def _files(layout: Layout, limit: int) -> list[Layout]:
    files: list[Layout] = [{}]
    used = 0
    for name, entry in layout.items():
        size = _bytes(*entry)
        if files[-1] and used + size > limit:
            files.append({})
            used = 0
        files[-1][name] = entry
        used += size
    return files


def _bytes(dtype: torch.dtype, shape: torch.Size) -> int:
    return dtype.itemsize * shape.numel()


_ARCHITECTURE = re.compile(
    r"size$|_dim$|_rank$|layer|_heads?$|expert|window|^n_|^moe_|^mamba_|^linear_|^conv_|_positions$"
)
"""Names of sizes and layer kinds in the configurations of all families."""

_MOST = 6  # differences that an error names

State = dict[str, dict[str, torch.Tensor]]


def save_model(
    folder: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    layout: Layout,
    weights: Iterator[tuple[str, torch.Tensor]],
) -> None:
    """Write weights (safetensors), configuration and tokenizer for ``from_pretrained``. Holds one
    of ``weights``, which ``layout`` describes, at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    config: Any = model.config
    config.dtype = str(_usual_type(layout)).removeprefix("torch.")
    # fully_shard renames the class.
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    config.save_pretrained(str(folder))
    rewrite(folder / "config.json", with_older_fields)
    if model.can_generate() and model.generation_config is not None:
        model.generation_config.save_pretrained(str(folder))
    write_weights(folder, layout, weights)
    write_beside(folder, tokenizer, folder_here(tokenizer.name_or_path))


def _usual_type(layout: Layout) -> torch.dtype:
    counts = Counter[torch.dtype]()
    for dtype, shape in layout.values():
        if dtype.is_floating_point:
            counts[dtype] += shape.numel()
    return counts.most_common(1)[0][0]


def save_state(folder: Path, state: State, group: dist.ProcessGroup | None = None) -> None:
    """Write tensors by name, from one replica. Each process of ``group`` holds a part, and calls
    it."""
    with warnings.catch_warnings():
        # DCP warns of exactly what no_dist asks for.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        save(state, checkpoint_id=str(folder), process_group=group, no_dist=group is None)


def load_state(folder: Path, state: State) -> None:
    """Read into the tensors of ``state``, whichever processes wrote which parts. Raises
    ``ValueError`` when the names differ."""
    saved = set(FileSystemReader(str(folder)).read_metadata().state_dict_metadata)
    wanted = {f"{kind}.{name}" for kind, tensors in state.items() for name in tensors}
    if saved != wanted:
        odd = sorted(saved ^ wanted)[0]
        raise ValueError(
            f"{folder}: its weights are not this trainer's ({odd}, for one): check whether "
            "model.lora_rank or model.path was changed"
        )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load(state, checkpoint_id=str(folder), no_dist=True)


def check_architecture(folder: Path, model: PreTrainedModel) -> None:
    """Raise ``ValueError`` when the checkpoint's model is not shaped like ``model``."""
    path = folder / "config.json"
    if not path.exists():
        raise ValueError(f"{folder}: no config.json, not a checkpoint's model folder")
    try:
        config = AutoConfig.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {first_line(error)}") from error
    saved, own = _architecture(config), _architecture(model.config)
    odd = [key for key in own | saved if saved.get(key) != own.get(key)]
    if odd:
        one, other = (
            ", ".join(f"{key}={found.get(key)}" for key in odd[:_MOST]) for found in (saved, own)
        )
        raise ValueError(f"{folder} holds a model with {one}, but the trainer has {other}")


def _architecture(config: Any) -> dict[str, Any]:
    text = config.get_text_config()
    found = {
        key: value
        for key, value in text.to_dict().items()
        if _ARCHITECTURE.search(key) and isinstance(value, int | list) and value is not False
    }
    return {"model_type": text.model_type, **found}
