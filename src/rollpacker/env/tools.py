"""Kind ``tools``: functions that the model calls, until a reply calls none."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers.utils.chat_template_utils import get_json_schema

from rollpacker.config import EnvironmentConfig
from rollpacker.env.base import KEY, Caller, EpisodeError, Message, ToolFaults, Turn, call
from rollpacker.env.calls.call import BadCall, Call, short
from rollpacker.env.calls.values import NoTextError, as_text, wanted
from rollpacker.env.code_tool import CodeTool
from rollpacker.env.messages import ToolRequest, calls_of, whole
from rollpacker.errors import one_line, words_of
from rollpacker.user_code import find

Schema = dict[str, Any]


def schema_of(function: Callable[..., Any], where: str) -> Schema:
    """Return the schema of a function with type hints and a docstring that describes its arguments.
    Raises ``ValueError`` that begins with ``where`` and names the problem."""
    name = getattr(function, "__name__", type(function).__name__)
    if inspect.isclass(function):
        raise ValueError(f"{where}: {name} is a class: a tool is a function")
    unnamed = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)
    any_name = inspect.Parameter.VAR_KEYWORD
    try:
        for parameter in inspect.signature(function).parameters.values():
            if parameter.kind in unnamed or parameter.kind is any_name:
                raise ValueError(f"its argument {parameter.name} cannot be given by name")
        return get_json_schema(function)
    except Exception as error:  # hints may run any code
        raise ValueError(f"{where}: {name} cannot be a tool: {words_of(error)}") from error


def mistake(schema: Schema, arguments: Mapping[str, Any]) -> str | None:
    """Return the mistake in the arguments of a call, as text for the model, or None if there is
    none."""
    parameters = schema["function"]["parameters"]
    known: dict[str, Any] = parameters.get("properties", {})
    for name in arguments:
        if name not in known:
            takes = f"it takes {', '.join(known)}" if known else "it takes none"
            return f"there is no argument {name!r:.100}: {takes}"
    missing = [name for name in parameters.get("required", ()) if name not in arguments]
    if missing:
        return f"the argument {missing[0]!r} is missing"
    for name, value in arguments.items():
        should = wanted(known[name], value)
        if should is not None:
            return f"the argument {name!r} must be {should}"
    return None


BUILT_IN = "python"  # the tool that runs code in the sandbox


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that can be called."""

    function: Callable[..., Any]
    schema: Schema

    @property
    def name(self) -> str:
        return self.schema["function"]["name"]


def tools_of(functions: Sequence[Callable[..., Any]], where: str) -> dict[str, Tool]:
    """Return tools by their names. Raises ``ValueError`` that begins with ``where``."""
    tools: dict[str, Tool] = {}
    for function in functions:
        tool = Tool(function, schema_of(function, where))
        if tool.name in tools:
            raise ValueError(f"{where}: two tools are named '{tool.name}'")
        tools[tool.name] = tool
    return tools


async def answer(tools: Mapping[str, Tool], reply: Message, by: Caller) -> Turn:
    """Run the calls of a reply in their order. For a failed one, tell the model why. Without a call
    the episode is over."""
    asked = calls_of(reply)
    if not asked:
        return Turn(done=True)
    messages: list[Message] = []
    failed = 0
    for each in asked:
        text, error = await _result(tools, each.call, by)
        failed += error
        messages.append(_message(each, text))
    return Turn(messages=messages, calls=len(asked), failed_calls=failed)


async def _result(tools: Mapping[str, Tool], made: Call | BadCall, by: Caller) -> tuple[str, bool]:
    if isinstance(made, BadCall):
        return f"Error: {made.error}", True
    tool = tools.get(made.name)
    if tool is None:
        return f"Error: there is no tool {short(made.name)}: there is {', '.join(tools)}", True
    wrong = mistake(tool.schema, made.arguments)
    if wrong is not None:
        return f"Error: {made.name}: {wrong}", True
    try:
        text = as_text(await call(tool.function, **made.arguments))
    except EpisodeError:
        raise
    except NoTextError as error:
        by.returned(made.name, str(error))
        return f"Error: {made.name} returned {error}, which cannot be shown", True
    except Exception as error:  # a tool may raise anything
        by.raised(made.name, error)
        return f"Error: {one_line(error)}", True
    by.answered(made.name)
    return text, False


def _message(asked: ToolRequest, text: str) -> Message:
    message: Message = {"role": "tool", "content": whole(text)}
    if asked.call.name:
        message["name"] = asked.call.name
    if asked.key is not None:
        message["tool_call_id"] = asked.key
    return message


class ToolsEnvironment:
    """One episode with tools."""

    def __init__(self, tools: Mapping[str, Tool], faults: ToolFaults | None = None) -> None:
        self._tools = tools
        self._faults = faults or ToolFaults()
        self._by = self._faults.caller({})

    async def reset(self, row: Mapping[str, Any]) -> Sequence[Message]:
        """Add nothing to the prompt: the chat template shows the tools."""
        self._by = self._faults.caller(row)
        return ()

    async def step(self, reply: Message) -> Turn:
        return await answer(self._tools, reply, self._by)

    async def close(self) -> None:
        """Do nothing."""


class ToolsFactory:
    """Makes episodes with the tools of ``environment.path``. Raises ``ValueError`` if a path names
    no function, or one that cannot be a tool."""

    def __init__(self, config: EnvironmentConfig) -> None:
        # A sandbox is made before the user's modules are loaded: they may hold secrets.
        self._code = CodeTool(config.step_timeout_s) if BUILT_IN in config.path else None
        functions = [self._find(path) for path in config.path]
        self._tools = tools_of(functions, KEY)
        self.tools: Sequence[Mapping[str, Any]] = [tool.schema for tool in self._tools.values()]
        """JSON schemas for the chat template."""
        self.faults = ToolFaults()

    def _find(self, path: str) -> Callable[..., Any]:
        if path == BUILT_IN:
            assert self._code is not None
            return self._code.python
        if ":" not in path:
            raise ValueError(
                f"{KEY}: unknown tool '{path}': expected {BUILT_IN}, path/to/file.py:name or "
                "package.module:name"
            )
        return find(path, KEY)

    async def open(self) -> None:
        """Do nothing."""

    def make(self) -> ToolsEnvironment:
        return ToolsEnvironment(self._tools, self.faults)

    async def close(self) -> None:
        if self._code is not None:
            self._code.close()
