"""Checkpoints that transformers 4 reads as transformers 5 does.

Release 5 renamed fields of ``config.json`` and ``tokenizer_config.json``, and writes the new names
only. Release 4 takes its defaults instead, without a word: another rotary base, for one.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import AutoConfig

_APART = ("rope_theta", "partial_rotary_factor")
_ALSO = {
    "gpt_neox": {"rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"},
    "modernbert-decoder": {
        "global_rope_theta": "rope_theta",
        "local_rope_theta": "rope_local_base_freq",
    },
    "qwen3_moe": {"num_experts": "num_local_experts"},
}
"""By ``model_type``: release 4's name of a field in that family, and its usual or later name."""
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
    """What release 4 reads in place of release 5's fields; None where its fields cannot say what
    ``rope_parameters`` do."""
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
        try:  # release 5 still reads them, and changes them: it is asked whether they say the same
            read = AutoConfig.for_model(**deepcopy(older | fields))
        except (KeyError, ValueError):
            return None
    return fields if read.rope_parameters == rope else None


def write_beside(folder: Path, tokenizer: Any, source: Path | None) -> None:
    """Copy what lies beside the weights in ``source``, the checkpoint that they began as; without
    one, write the tokenizer as it is."""
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
    """All but what the last call left in it."""
    return json.loads(tokenizer.to_str()) | {"padding": None, "truncation": None}


def rewrite(path: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Change a file of JSON, which stays as it is where nothing does."""
    found = json.loads(path.read_text(encoding="utf-8"), object_hook=_number)
    if (changed := change(found)) != found:
        text = json.dumps(changed, indent=2, sort_keys=True, ensure_ascii=False)
        path.write_text(text + "\n", encoding="utf-8")


def _number(part: dict[str, Any]) -> Any:
    return float(part["__float__"]) if "__float__" in part else part  # release 5's infinity


def _older_tokenizer(config: dict[str, Any]) -> dict[str, Any]:
    """A ``tokenizer_config.json`` that both releases read."""
    own = {"backend", "is_local", "local_files_only", "model_specific_special_tokens"}
    found = {key: value for key, value in config.items() if key not in own}
    if found.get("tokenizer_class") == "TokenizersBackend":
        found["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(found.get("extra_special_tokens"), list):
        found["additional_special_tokens"] = found.pop("extra_special_tokens")
    if named := config.get("model_specific_special_tokens"):
        found["extra_special_tokens"] = named
    return found
