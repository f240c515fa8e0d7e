"""Tool calls in a model's text: parsed, never run, and never a reason to raise."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from rollpacker.env.calls import xml_calls
from rollpacker.env.calls.values import too_deep

Format = Literal["hermes", "llama3", "qwen3_coder"]
FORMATS: tuple[Format, ...] = ("hermes", "llama3", "qwen3_coder")

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
REASONING = "<think>"
_END_OF_REASONING = "</think>"
_PYTHON_TAG = "<|python_tag|>"
_TAG = re.compile(f"{_OPEN}|{_CLOSE}")
_BEGINS = re.compile(_OPEN)
_XML_BEGINS = re.compile(f"{_OPEN}|(?=<function=)")
"""Some models leave the outer tag out."""
_LLAMA3 = re.compile(r'\{\s*"(?:name"\s*:|type"\s*:\s*"function")')
"""How JSON begins that is meant as a call, if it has arguments too; it may not be well-formed."""
_ARGUMENTS = ("arguments", "parameters")
_BETWEEN = re.compile(r"[\s;]*")
_SPACE = re.compile(r"\s*")
_LONGEST = 100
_decode = json.JSONDecoder().raw_decode


@dataclass(frozen=True, slots=True)
class Call:
    """One call.

    Args:
        name: of the tool; one that does not exist is found out by whoever runs it.
        arguments: by name.
    """

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class BadCall:
    """What was meant as a call and is none; ``error`` is one line for the model."""

    error: str


@dataclass(frozen=True, slots=True)
class Parsed:
    """A reply.

    Args:
        content: the text without its calls.
        calls: in the order of the text.
    """

    content: str
    calls: tuple[Call | BadCall, ...] = ()


_Reader = Callable[[str, int], "tuple[Call | BadCall | None, int]"]
"""A call that begins at a place of a text, and where it ends; None where it is text after all."""


def parse(
    text: str, call_format: Format, *, reasons: bool = False, tools: xml_calls.Tools = ()
) -> Parsed:
    """The content and the calls of a reply. Whatever the text is, this does not raise.

    Where it begins with ``<think>``, or the template has begun it so (``reasons``), calls up to
    ``</think>`` are not meant; elsewhere these are words like others. The schemas of ``tools`` say
    what arguments are, where the format does not (``qwen3_coder``).
    """
    start = 0
    if reasons or text.lstrip().startswith(REASONING):
        end = text.find(_END_OF_REASONING)
        if end < 0:
            return Parsed(text)
        start = end + len(_END_OF_REASONING)
    match call_format:
        case "hermes":
            return _tagged(text, start, _BEGINS, _hermes)
        case "qwen3_coder":
            return _tagged(text, start, _XML_BEGINS, partial(_xml, tools=tools))
        case "llama3":
            return _llama3(text, start)


def written(call: Call, call_format: Format) -> str:
    """A call as a model writes it."""
    if call_format == "qwen3_coder":
        return f"{_OPEN}\n{xml_calls.write(call.name, call.arguments)}\n{_CLOSE}"
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    name = json.dumps(call.name, ensure_ascii=False)
    if call_format == "hermes":
        return f'{_OPEN}\n{{"name": {name}, "arguments": {arguments}}}\n{_CLOSE}'
    return f'{{"name": {name}, "parameters": {arguments}}}'


def _tagged(text: str, start: int, begins: re.Pattern[str], reader: _Reader) -> Parsed:
    calls: list[Call | BadCall] = []
    rest = [text[:start]]
    while (opening := begins.search(text, start)) is not None:
        call, end = reader(text, opening.end())
        rest.append(text[start : opening.start() if call is not None else end])
        start = end
        if call is not None:
            calls.append(call)
    if not calls:
        return Parsed(text)
    rest.append(text[start:])
    return Parsed("".join(rest).strip(), tuple(calls))


def _hermes(text: str, start: int) -> tuple[Call | BadCall, int]:
    """The call behind a tag; one that is not closed ends with its JSON."""
    found = _read(text, start)
    if isinstance(found, BadCall):
        return found, _next(text, start)
    value, end = found
    closed = _closed(text, end)
    if closed is None:
        return BadCall(_behind(text, end)), _next(text, end)
    return _call(value), closed


def _behind(text: str, end: int) -> str:
    """What is wrong with that which stands behind the JSON of a call."""
    start = _skip(text, end)
    if text.startswith("{", start):
        return "there is more than one JSON object in the call"
    if text.startswith("}", start):
        return "there is one } too many behind the JSON object of the call"
    return "there is text behind the JSON object of the call"


def _xml(text: str, start: int, tools: xml_calls.Tools) -> tuple[Call | BadCall | None, int]:
    outer = text.endswith(_OPEN, 0, start)
    try:
        found = xml_calls.read(text, start, tools)
    except xml_calls.NoCallError as error:
        if not outer:
            return None, start + len("<function=")
        return BadCall(str(error)), _next(text, start)
    if not (outer or found.ended or found.arguments):
        return None, found.end
    call, closed = Call(found.name, found.arguments), _closed(text, found.end)
    if closed is None and outer:
        return BadCall("text stands between the parts of the call"), _next(text, found.end)
    return call, found.end if closed is None else closed


def _closed(text: str, end: int) -> int | None:
    """Where text goes on behind a call that is closed, the last, or followed by another; None
    where something else follows."""
    behind = _skip(text, end)
    if text.startswith(_CLOSE, behind):
        return behind + len(_CLOSE)
    return behind if behind == len(text) or text.startswith(_OPEN, behind) else None


def _next(text: str, start: int) -> int:
    """Where text goes on behind a call that was not understood."""
    tag = _TAG.search(text, start)
    if tag is None:
        return len(text)
    return tag.end() if tag[0] == _CLOSE else tag.start()


def _llama3(text: str, start: int) -> Parsed:
    begin = _skip(text, start)
    tagged = text.startswith(_PYTHON_TAG, begin)
    begin += len(_PYTHON_TAG) if tagged else 0
    if not tagged and not _meant(text, begin):
        return Parsed(text)
    calls, end = _objects(text, begin)
    return Parsed(text[:start] + text[end:].strip(), calls)


def _meant(text: str, start: int) -> bool:
    """Whether JSON alone is a call, and no answer in JSON."""
    if not _LLAMA3.match(text, start):
        return False
    read = _read(text, start)
    said = text if isinstance(read, BadCall) else read[0]
    return any(f'"{key}"' in said if said is text else key in said for key in _ARGUMENTS)


def _objects(text: str, start: int) -> tuple[tuple[Call | BadCall, ...], int]:
    """JSON objects one behind the other, and where text goes on; the first that is none ends
    them."""
    calls: list[Call | BadCall] = []
    while not calls or text.startswith("{", start):
        read = _read(text, start)
        if isinstance(read, BadCall):
            return (*calls, read), len(text)
        value, end = read
        calls.append(_call(value))
        start = _BETWEEN.match(text, end).end()  # type: ignore[union-attr]
    return tuple(calls), start


def _read(text: str, start: int) -> tuple[Any, int] | BadCall:
    start = _skip(text, start)
    try:
        return _decode(text, start)
    except json.JSONDecodeError as error:
        return BadCall(f"the call is no valid JSON: {error.msg} at character {error.pos - start}")
    except (ValueError, RecursionError):
        return BadCall("the call is no valid JSON: a number is too long, or it is nested too deep")


def _skip(text: str, start: int) -> int:
    return _SPACE.match(text, start).end()  # type: ignore[union-attr]


def _call(value: Any) -> Call | BadCall:
    if not isinstance(value, dict):
        return BadCall(f"the call must be a JSON object with a name, not {_kind(value)}")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return BadCall('the call has no "name"')
    arguments = next((value[key] for key in _ARGUMENTS if key in value), None)
    if isinstance(arguments, str):  # some models write the object as text
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return BadCall(f"the arguments of {short(name)} must be a JSON object, not text")
        except RecursionError:
            return BadCall(_too_deep(name))
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        return BadCall(f"the arguments of {short(name)} must be a JSON object")
    if too_deep(arguments):
        return BadCall(_too_deep(name))
    return Call(name, arguments)


def _too_deep(name: str) -> str:
    return f"the arguments of {short(name)} are nested too deep"


def _kind(value: Any) -> str:
    kinds = {list: "a list", str: "text", bool: "a truth value", type(None): "null"}
    return kinds.get(type(value), "a number")


def short(text: str) -> str:
    """A name of the model's own, fit to be shown: it may be long, or half a character."""
    whole = text.encode("utf-8", "replace").decode()
    return repr(whole if len(whole) <= _LONGEST else whole[:_LONGEST] + "...")
