"""Prompts as token ids."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollpacker.chat import Complete
from rollpacker.config import DataConfig
from rollpacker.core.types import PromptId
from rollpacker.data.base import DataError, Message, Row, whole_text
from rollpacker.data.held_out import canonical
from rollpacker.errors import words_of


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Encoded:
    """Encoded prompts. ``tokens``: token ids by prompt, each of shape (P,), int32, in the rows'
    order. ``skipped``: prompts left out because they are too long for the context."""

    tokens: dict[PromptId, NDArray[np.int32]]
    skipped: tuple[PromptId, ...]


_MARK = "said5d41402a"
_LEAST_RESPONSE = 16  # tokens that a prompt must leave for its response if no length is configured


def encode_prompts(
    rows: Sequence[Row],
    tokenizer: Any,
    config: DataConfig,
    max_context: int,
    max_response: int,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> Encoded:
    """Encode each row's prompt with the tokenizer of a transformers model.

    A prompt must leave ``max_response`` of ``max_context`` tokens, or 16 if that is 0 (not
    configured). Raises ``DataError`` on a longer one, unless ``data.overlong`` is ``skip``. Also
    raises it on settings that need a chat template, and on tools or messages that the template
    leaves out.
    """
    kwargs, complete = chat_template_kwargs or {}, Complete()
    _check_settings(config, tokenizer, kwargs)
    openings = _openings(tokenizer, kwargs) if _uses_chat(tokenizer, config) else ()
    own = [_is_rendered(row, openings, config) for row in rows]
    texts = [
        _bare(row, config) if rendered else _text(row, tokenizer, config, kwargs, complete)
        for row, rendered in zip(rows, own, strict=True)
    ]
    for row, text in zip(rows, texts, strict=True):
        whole_text(text, f"row '{row.id}': its prompt")
    ids = _ids(texts, own, tokenizer, chat=_uses_chat(tokenizer, config))
    needed = max_response or min(_LEAST_RESPONSE, max_context - 1)
    tokens: dict[PromptId, NDArray[np.int32]] = {}
    overlong: dict[PromptId, int] = {}
    for row, prompt in zip(rows, ids, strict=True):
        if not prompt:
            raise DataError(f"row '{row.id}': the prompt encodes to no tokens")
        if len(prompt) + needed <= max_context:
            tokens[row.id] = np.asarray(prompt, np.int32)
        else:
            overlong[row.id] = len(prompt)
    if overlong and config.overlong == "error":
        raise DataError(_too_long(overlong, max_context, max_response))
    if not tokens:
        beside = f" with rollout.max_completion_length={max_response}" if max_response else ""
        raise DataError(
            f"data.overlong: no prompt fits the context of {max_context} tokens{beside}"
        )
    return Encoded(tokens=tokens, skipped=tuple(overlong))


def _too_long(overlong: Mapping[PromptId, int], context: int, max_response: int) -> str:
    name, length = max(overlong.items(), key=lambda item: item[1])
    others = f", the longest of {len(overlong)} such," if len(overlong) > 1 else ""
    start = f"row '{name}': its prompt of {length} tokens{others}"
    skip = f"set data.overlong: skip to leave {'them' if others else 'it'} out"
    room = context - length
    if max_response and room >= min(_LEAST_RESPONSE, max_response):
        return (
            f"{start} leaves {room} of the context of {context} for a response: lower "
            f"rollout.max_completion_length from {max_response}, or {skip}"
        )
    return f"{start} leaves no room for a response in the context of {context}: {skip}"


def _openings(tokenizer: Any, kwargs: Mapping[str, Any]) -> tuple[str, ...]:
    turns = [{"role": "user", "content": _MARK}]
    try:
        text: str = tokenizer.apply_chat_template(turns, tokenize=False, **kwargs)
    except Exception:  # a template that needs other turns refuses the rows later
        return ()
    before = text.partition(_MARK)[0]
    marks = [each.content for each in tokenizer.added_tokens_decoder.values() if each.special]
    bos = tokenizer.bos_token or ""
    found = bos, *(mark for mark in marks if mark in before), before.removeprefix(bos).strip()
    return tuple(filter(None, found))


def _is_rendered(row: Row, openings: Sequence[str], config: DataConfig) -> bool:
    # A text that a chat template has rendered is used as it is. Raises ``DataError`` if a setting
    # would change it.
    prompt = row.prompt if isinstance(row.prompt, str) else ""
    opening = next((each for each in openings if prompt.startswith(each)), None)
    if opening is None:
        return False
    for key in ("chat", "system_prompt", "shots", "prompt_template"):
        if getattr(config, key):
            raise DataError(
                f"row '{row.id}': its prompt begins with {opening!r}, so a chat template has "
                f"rendered it already: remove data.{key}"
            )
    return True


def _ids(texts: Sequence[str], own: Sequence[bool], tokenizer: Any, *, chat: bool) -> list[Any]:
    # A chat template writes special tokens itself, and a text with a BOS token must not get a
    # second one.
    bos = tokenizer.bos_token
    found: dict[int, Any] = {}
    for special in (False, True):
        batch = [
            place
            for place, text in enumerate(texts)
            if ((own[place] or not chat) and not (bos and text.startswith(bos))) == special
        ]
        if batch:
            those = tokenizer([texts[i] for i in batch], add_special_tokens=special)["input_ids"]
            found.update(zip(batch, those, strict=True))
    return [found[place] for place in range(len(texts))]


def _uses_chat(tokenizer: Any, config: DataConfig) -> bool:
    return bool(tokenizer.chat_template) if config.chat is None else config.chat


def _check_settings(config: DataConfig, tokenizer: Any, kwargs: Mapping[str, Any]) -> None:
    template = config.prompt_template
    if template is not None and "{prompt}" not in template:
        raise DataError("data.prompt_template: it does not contain {prompt}")
    if config.chat and not tokenizer.chat_template:
        raise DataError("data.chat: true, but the tokenizer has no chat template: set it to false")
    if _uses_chat(tokenizer, config):
        _check_read(kwargs, tokenizer)
        return
    for key in ("system_prompt", "shots"):
        if getattr(config, key):
            raise DataError(
                f"data.{key} needs a chat template: remove it, or take a tokenizer that has "
                "one and leave data.chat unset"
            )
    if kwargs:
        raise DataError(
            "model.chat_template_kwargs needs prompts that take the chat template: remove it, or "
            "leave data.chat unset"
        )


def _check_read(kwargs: Mapping[str, Any], tokenizer: Any) -> None:
    text = str(tokenizer.chat_template)
    arguments = signature(tokenizer.apply_chat_template).parameters
    for name in kwargs:
        if name not in arguments and not re.search(rf"\b{re.escape(name)}\b", text):
            raise DataError(
                f"model.chat_template_kwargs: the chat template reads no '{name}': correct or "
                "remove it"
            )


def chat(row: Row, config: DataConfig) -> list[Message]:
    """Return the chat messages that a row's prompt is rendered from. Raises ``DataError``."""
    if isinstance(row.prompt, str):
        return _conversation([{"role": "user", "content": _plain(row.prompt, config)}], config)
    if config.prompt_template is None:
        return _conversation(row.prompt, config)
    *before, last = row.prompt
    if last["role"] != "user":
        raise DataError(
            f"row '{row.id}': data.prompt_template needs a last turn of the user, but the "
            f"prompt ends with a turn of role '{last['role']}': remove it"
        )
    asked = {**last, "content": _plain(last.get("content") or "", config)}
    return _conversation([*before, asked], config)


def told(row: Row, tokenizer: Any, config: DataConfig) -> str:
    """Return the content of an encoded prompt without additions of its chat template, such as a
    date."""
    chats = _takes_template(row, tokenizer, config)
    return canonical([chats, chat(row, config), list(row.tools), row.template_kwargs])


def _plain(prompt: str, config: DataConfig) -> str:
    if config.prompt_template is None:
        return prompt
    # str.format would fail on the other braces of mathematics.
    return config.prompt_template.replace("{prompt}", prompt)


def _bare(row: Row, config: DataConfig) -> str:
    _check_plain(row)
    if isinstance(row.prompt, str):
        return _plain(row.prompt, config)
    roles = [turn["role"] for turn in row.prompt]
    if roles != ["user"]:
        raise DataError(
            f"row '{row.id}': its prompt has turns of {', '.join(roles)}, and data.chat is false: "
            "without a chat template, a prompt is one turn of the user"
        )
    return _plain(row.prompt[0].get("content") or "", config)


def _takes_template(row: Row, tokenizer: Any, config: DataConfig) -> bool:
    if config.chat is False:
        return False
    return bool(tokenizer.chat_template) or not isinstance(row.prompt, str)


def _text(
    row: Row, tokenizer: Any, config: DataConfig, kwargs: Mapping[str, Any], complete: Complete
) -> str:
    if not _takes_template(row, tokenizer, config):
        return _bare(row, config)
    if not tokenizer.chat_template:
        raise DataError(
            f"row '{row.id}': its prompt is chat messages but the tokenizer has no chat template: "
            "use one that has, or set data.chat: false if prompts are one turn of the user"
        )
    _check_tools(row, tokenizer)
    messages, more = chat(row, config), {**kwargs, **row.template_kwargs}

    def render(messages: Sequence[Message]) -> str:
        return tokenizer.apply_chat_template(
            list(messages),
            tools=list(row.tools) or None,
            tokenize=False,
            add_generation_prompt=True,
            **more,
        )

    try:
        text = render(messages)
    except Exception as error:  # templates are programs with errors of their own
        reason = words_of(error)
        raise DataError(f"row '{row.id}': the chat template refuses it: {reason}") from None
    mistake = complete.mistake(messages, render, (bool(row.tools), repr(sorted(more.items()))))
    if mistake is not None:
        raise DataError(f"row '{row.id}': {mistake}")
    return text


def _check_plain(row: Row) -> None:
    for column, value in (("tools", row.tools), ("chat_template_kwargs", row.template_kwargs)):
        if value:
            raise DataError(
                f"row '{row.id}': its column '{column}' is for a chat template, which its prompt "
                "does not take (data.chat): remove the column, or take a tokenizer with a template"
            )


def _check_tools(row: Row, tokenizer: Any) -> None:
    if row.tools and "tools" not in tokenizer.get_chat_template(tools=list(row.tools)):
        raise DataError(
            f"row '{row.id}': it has tools, but the tokenizer's chat template has no place for "
            "them: take a model that was trained with tools, or remove the column 'tools'"
        )


def _conversation(turns: list[Message], config: DataConfig) -> list[Message]:
    # System turn (the configured one replaces the row's), shots, then the row's other turns.
    own = [turn for turn in turns[:1] if turn["role"] == "system"]
    rest = turns[len(own) :]
    if config.system_prompt is not None:
        own = [{"role": "system", "content": config.system_prompt}]
    return [*own, *config.shots, *rest]
