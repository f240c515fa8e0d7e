"""Compares a chat template's rendering of earlier turns with the sampled tokens."""

from __future__ import annotations

from dataclasses import dataclass

from rollpacker.config.rewards import CallFormat
from rollpacker.env.base import Message
from rollpacker.env.calls.calls import FORMATS, written
from rollpacker.env.template import Template, Tools
from rollpacker.errors import words_of

_QUESTION: Message = {"role": "user", "content": "How much is 2 + 3?"}
_NEXT: Message = {"role": "user", "content": "And 4 + 4?"}
_TEXT = "It is 5."
_REASONING = "Add them."
_OPEN = "<think>"
_FIELDS = ("thinking", "reasoning_content", "reasoning")
"""Fields of a message from which templates take reasoning that is not in its text."""
_APART = ("harmony", "gemma4")  # formats of models whose templates do so
_ALONE = ("llama3", "pythonic", "mistral")  # formats whose calls stand alone
_SHOWN = 40
_LONGEST = 160
_KEY = "000000000"
_ARGUMENT = ("text", "2 + 3")
_START = "environment: the chat template"
_END = "the conversation is kept as it was sampled"


@dataclass(frozen=True, slots=True)
class _Turn:
    what: str
    content: str
    call: bool = False
    reasons: bool = False


_PLAIN = _Turn("earlier replies", _TEXT)
_THOUGHT = _Turn("the reasoning of earlier turns when a user message follows", _TEXT, reasons=True)
_CALL = _Turn("calls of tools", "", call=True)
_CALLS = (
    _Turn("the reasoning of earlier turns when a tool answers", "", True, reasons=True),
    _Turn("text beside calls of tools", _TEXT, call=True),
)


def check(template: Template, tools: Tools) -> list[str]:
    """Return one line for each way in which the template's rendering of a whole conversation
    differs from append-only rendering, and one if it has no place for tools.

    Raises ``ValueError`` if it cannot be used with ``tools``, which all prompts have.
    """
    if tools and template.call_format is None:
        raise ValueError(
            "environment.call_format: the chat template of model.path writes calls of tools as "
            f"{template.writes.strip()[:_LONGEST]!r}, which is none of the known formats "
            f"({', '.join(FORMATS)}): set the format that prompts ask for"
        )
    lines = _tool_lines(template, tools) if tools else []
    changed = _changed(template, _PLAIN, tools)
    if changed:
        return [*lines, *changed]
    lines += _token_lines(template, tools)
    lines += [*_end_lines(template), *_changed(template, _THOUGHT, tools)]
    if tools and template.writes:
        changed = _changed(template, _CALL, tools)
        turns = _CALLS[: 1 if template.call_format in _ALONE else None]
        lines += changed or [line for turn in turns for line in _changed(template, turn, tools)]
    return lines


def _tool_lines(template: Template, tools: Tools) -> list[str]:
    lines: list[str] = []
    if str(tools[0]["function"]["name"]) not in template.render([_QUESTION], tools, goes_on=True):
        lines.append(
            "environment: the chat template has no place for tools: prompts must list them and "
            "show how to call them"
        )
    if template.guessed:
        lines.append(
            "environment: the chat template does not show how tools are called: calls are read as "
            f"{template.call_format} (environment.call_format)"
        )
    if template.results == "user":
        lines.append(
            "environment: the chat template has no place for messages of role tool: tools' "
            "answers are sent as the user's, in <tool_response>"
        )
    return lines


def _token_lines(template: Template, tools: Tools) -> list[str]:
    # Whether text after a reply has the same tokens alone as inside of the whole.
    before = template.render([_QUESTION], tools, goes_on=True)
    behind = template.behind([_NEXT], tools)
    together = template.tokens(before + _TEXT + behind)
    alone = template.tokens(behind)
    if together[len(together) - len(alone) :] == alone:
        return []
    return [
        "environment: the tokenizer splits the text after a reply differently when it stands "
        "alone: the conversation is tokenised piece by piece"
    ]


def _end_lines(template: Template) -> list[str]:
    # Whether a reply's last token changes when a message follows.
    if template.last is None:
        return []
    sampled, inside = template.last
    ends = f"ends earlier replies with {inside!r}, where the model samples {sampled!r}"
    return [f"{_START} {ends}: {_END}"]


def _changed(template: Template, turn: _Turn, tools: Tools) -> list[str]:
    before = template.render([_QUESTION], tools, goes_on=True)
    form = template.call_format or FORMATS[0]
    name = str(tools[0]["function"]["name"]) if turn.call else ""
    call = written(name, *_ARGUMENT, form) if turn.call else ""
    reasoning = _REASONING if turn.reasons else ""
    sampled = _replied(form, reasoning, turn.content, call)
    said: Message = {
        "role": "assistant",
        "content": _replied("hermes", reasoning, turn.content, ""),
    }
    if reasoning and form in _APART:
        said |= dict.fromkeys(_FIELDS, reasoning) | {"content": turn.content}
    if reasoning and before.rstrip().endswith(_OPEN):
        opened = f"{_OPEN}\n"
        sampled = sampled.removeprefix(opened)
        said["content"] = said["content"].removeprefix(opened)
    follows = _NEXT
    if call:
        function = {"name": name, "arguments": dict([_ARGUMENT])}
        said["tool_calls"] = [{"id": _KEY, "type": "function", "function": function}]
        follows = {"role": "tool", "name": name, "content": "5", "tool_call_id": _KEY}
    try:
        sampled = before + sampled + template.behind([follows], tools)
        whole = template.render(template.fit([_QUESTION, said, follows]), tools, goes_on=True)
    except Exception as error:  # templates are programs with errors of their own
        return [f"{_START} refuses {turn.what} ({words_of(error)}): {_END}"]
    if _squeezed(whole) == _squeezed(sampled):
        return []
    pairs = enumerate(zip(whole, sampled, strict=False))
    same = next((i for i, (a, b) in pairs if a != b), min(len(whole), len(sampled)))
    ours, theirs = sampled[same : same + _SHOWN], whole[same : same + _SHOWN]
    return [f"{_START} changes {turn.what} ({ours!r} would become {theirs!r}): {_END}"]


def _replied(form: CallFormat, reasoning: str, content: str, call: str) -> str:
    if form == "harmony":
        parts = [f"<|channel|>analysis<|message|>{reasoning}"] if reasoning else []
        if content:
            parts.append(f"<|channel|>{'commentary' if call else 'final'}<|message|>{content}")
        return "<|end|><|start|>assistant".join([*parts, *([call] if call else [])])
    if reasoning and form == "gemma4":
        reasoning = f"<|channel>thought\n{reasoning}\n<channel|>"
    elif reasoning:
        reasoning = f"<think>\n{reasoning}\n</think>\n\n"
    return f"{reasoning}{content}{chr(10) if content and call else ''}{call}"


def _squeezed(text: str) -> str:
    # Models differ in the white space beside calls.
    return "".join(text.split())
