"""Tokenizers with the chat templates of real models, small enough to be made in a test."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEMPLATES = Path(__file__).parent / "templates"
NAMES = sorted(path.stem for path in TEMPLATES.glob("*.jinja"))

SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|python_tag|>",
]
PLAIN = ["<tool_call>", "</tool_call>", "<think>", "</think>", "<tool_response>"]
"""Tokens of their own that are no special ones, as in Qwen's vocabulary."""

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "description": "One."},
                "b": {"type": "integer", "description": "The other."},
            },
            "required": ["a", "b"],
        },
    },
}


@cache
def _bytes() -> str:
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = [(TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8") for name in NAMES]
    inner.train_from_iterator(texts, trainer)
    return inner.to_str()


def make_tokenizer(
    template: str | None,
    eos: str = "<|im_end|>",
    named: bool = True,
    special: Sequence[str] = SPECIAL,
    plain: Sequence[str] = (),
) -> PreTrainedTokenizerFast:
    """Byte-level BPE; ``template`` is a name of ``NAMES``, or the text of one; ``named``: all
    ``special`` tokens, and not only the first and the last of a text; ``plain``: more tokens of
    their own."""
    inner = Tokenizer.from_str(_bytes())
    inner.add_special_tokens([AddedToken(token, special=True) for token in special])
    inner.add_tokens([AddedToken(token, normalized=False) for token in (*PLAIN, *plain)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token="<|begin_of_text|>" if special is SPECIAL else special[0],
        eos_token=eos,
        extra_special_tokens=[*special] if named else None,
    )
    if template in NAMES:
        template = (TEMPLATES / f"{template}.jinja").read_text(encoding="utf-8")
    tokenizer.chat_template = template
    return tokenizer
