"""What a release of transformers makes of checkpoints, and checkpoints as it writes them.

``python checkpoint_readings.py write FOLDER`` and ``... read FOLDER...``, which prints JSON: with
the release that is on the path.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen2TokenizerFast,
    __version__,
)

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TURNS = [
    {"role": "user", "content": "Wie groß ist 2 + 3?"},
    {"role": "assistant", "content": "Let me see: 2 + 3 = 5 <|im_start|>, e\u0301."},
    {"role": "user", "content": "\U0001f600 " + "12345 " * 8},
]
SIZES = {
    "vocab_size": 259,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 258,
    "pad_token_id": 256,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
OLD: dict[str, dict[str, Any]] = {
    "qwen2": {"rope_theta": 1e6, "tie_word_embeddings": True},
    "llama": {"rope_theta": 5e5, "rope_scaling": LLAMA3},
}
"""By ``model_type``, in the words of release 4."""


def make_model(family: str, **more: Any) -> Any:
    """A random one, far from the symmetry of initial weights."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZES | {"initializer_range": 0.3} | more)
    return AutoModelForCausalLM.from_config(config)


def make_tokenizer(**more: Any) -> Any:
    """Of all bytes."""
    words = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={w: n for n, w in enumerate(words)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(w, special=True, normalized=False) for w in SPECIALS])
    ends = {"eos_token": SPECIALS[2], "pad_token": SPECIALS[0], "model_max_length": 512}
    made = PreTrainedTokenizerFast(tokenizer_object=inner, **ends | more)
    made.chat_template = TEMPLATE
    return made


def write(folder: Path) -> None:
    """Checkpoints in bfloat16 as those of the hub: a tokenizer of a family's own class."""
    for family, more in OLD.items():
        model = make_model(family, **more).to(torch.bfloat16)
        model.generation_config.update(do_sample=True, temperature=0.7, eos_token_id=[258, 256])
        model.save_pretrained(folder / family)
        vocabulary = make_tokenizer().backend_tokenizer.get_vocab(with_added_tokens=False)
        (folder / "vocab.json").write_text(json.dumps(vocabulary))
        (folder / "merges.txt").write_text("#version: 0.2\n")
        files = (str(folder / name) for name in ("vocab.json", "merges.txt"))
        own = {"eos_token": SPECIALS[2], "pad_token": SPECIALS[0], "unk_token": SPECIALS[0]}
        tokenizer = Qwen2TokenizerFast(*files, **own, additional_special_tokens=[SPECIALS[1]])
        tokenizer.chat_template = TEMPLATE
        tokenizer.save_pretrained(folder / family)


@torch.no_grad()
def read(folder: Path) -> dict[str, Any]:
    """Log-probabilities of a conversation's tokens in float32, and what tokenizer and generation
    configuration say."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    text = tokenizer.apply_chat_template(TURNS, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text)["input_ids"]
    logits = model(input_ids=torch.tensor([ids])).logits[0]
    generation = model.generation_config
    return {
        "logprobs": logits.log_softmax(-1)[:, ::16].tolist(),
        "dtype": str(AutoConfig.from_pretrained(folder).dtype),
        "text": text,
        "ids": ids,
        "decoded": tokenizer.decode(ids, skip_special_tokens=True),
        "special": sorted(tokenizer.all_special_tokens),
        "ends": [tokenizer.eos_token, tokenizer.pad_token, generation.eos_token_id],
        "longest": tokenizer.model_max_length,
        "temperature": getattr(generation, "temperature", None) or 1.0,
    }


if __name__ == "__main__":
    _, what, *folders = sys.argv
    if what == "write":
        write(Path(folders[0]))
    else:
        found = {folder: read(Path(folder)) for folder in folders}
        print(json.dumps({"release": __version__, "found": found}))
