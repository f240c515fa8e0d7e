"""Tokenizers of more families: their chat templates, and tokens of their own."""

from __future__ import annotations

from dataclasses import dataclass

from chat_models import TEMPLATES, make_tokenizer
from transformers import PreTrainedTokenizerFast

_GEMMA = ["<bos>", "<start_of_turn>", "<end_of_turn>", "<escape>"]
_FUNCTION = [
    f"<{side}_function_{what}>" for side in ("start", "end") for what in ("call", "response")
]
_TURN = ["<|turn>", "<turn|>", "<|channel>", "<channel|>", '<|"|>']
_TOOL = [
    "<|tool>",
    "<tool|>",
    "<|tool_call>",
    "<tool_call|>",
    "<|tool_response>",
    "<tool_response|>",
]
_MISTRAL = ["<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"]
_RESULTS = ["[AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CONTENT]"]
_THINK = ["[THINK]", "[/THINK]"]
_GLM = ["<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"]
_HARMONY = ["start", "channel", "message", "constrain", "end", "call", "return"]
_DEEPSEEK = ["tool▁calls", "tool▁call", "tool▁outputs", "tool▁output"]


@dataclass(frozen=True, slots=True)
class Family:
    """A template, and what is known of it.

    Args:
        form: of its calls.
        special: tokens that are no text.
        end: that a reply ends with.
        call_end: that a call ends with.
        plain: tokens of their own that are text.
    """

    form: str
    special: list[str]
    end: str
    call_end: str
    plain: tuple[str, ...] = ()


def _deepseek(form: str) -> Family:
    end = "<｜end▁of▁sentence｜>"
    tags = [f"<｜{what}▁{side}｜>" for what in _DEEPSEEK for side in ("begin", "end")]
    plain = ("<｜User｜>", "<｜Assistant｜>", "<｜tool▁sep｜>", *tags)
    return Family(form, ["<｜begin▁of▁sentence｜>", end], end, end, plain)


def _mistral(form: str) -> Family:
    return Family(form, [*_MISTRAL, *_RESULTS, *_THINK], "</s>", "</s>")


FAMILIES = {
    "glm4_5": Family(
        "glm", ["<|endoftext|>", "[gMASK]", "<sop>", *_GLM], "<|user|>", "<|observation|>"
    ),
    "mistral_v3": _mistral("mistral"),
    "mistral_small_3_2": _mistral("mistral_v11"),
    "ministral3": _mistral("mistral_v11"),
    "functiongemma": Family(
        "functiongemma", [*_GEMMA, *_FUNCTION], "<end_of_turn>", "<start_function_response>"
    ),
    "gemma4": Family("gemma4", ["<bos>", *_TURN, *_TOOL], "<turn|>", "<|tool_response>"),
    "gemma3_pythonic": Family("pythonic", _GEMMA, "<end_of_turn>", "<end_of_turn>"),
    "deepseek_r1": _deepseek("deepseek_v3"),
    "deepseek_v3_1": _deepseek("deepseek_v31"),
    "gpt_oss": Family("harmony", [f"<|{name}|>" for name in _HARMONY], "<|return|>", "<|call|>"),
}
"""By the names of their templates."""


def family_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """The tokenizer of a family, small enough to be made in a test."""
    family = FAMILIES[name]
    text = (TEMPLATES / "families" / f"{name}.jinja").read_text(encoding="utf-8")
    return make_tokenizer(text, eos=family.end, special=family.special, plain=family.plain)
