"""Chat messages on their way into a chat template: content is text, and none of it gets lost."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

Message = dict[str, Any]
"""A chat message: ``role`` (``system``, ``user``, ``assistant``, ``tool``), ``content``, and what
else the chat template reads (``tool_calls``, ``name``)."""

_TEXT = ("text", "input_text", "output_text", None)
"""Types of the parts of a content that are text; some leave them out."""
_KEPT = 4096
"""Forms of conversations that are remembered."""
_SAID, _CALLED = "said{:06}of5d41402a", "called{:06}of5d41402a"
"""Stand for what a message says and for whom it calls; nothing that a template looks for."""


class NotTextError(ValueError):
    """A message's content is no text; the message says what it is."""


def text_of(content: Any) -> Any:
    """A content that is a list of parts of text as one text; any other as it is.

    Raises ``NotTextError`` where a part is something else.
    """
    if not isinstance(content, list):
        return content
    texts: list[str] = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if not isinstance(part, Mapping) or kind not in _TEXT:
            raise NotTextError(
                f"a chat message has content of type '{kind}', but models are trained on text alone"
            )
        if not isinstance(part.get("text"), str):
            raise NotTextError("a content block of type 'text' has no text")
        texts.append(part["text"])
    return "\n".join(texts)


class Complete:
    """Whether a chat template writes all that it is given.

    What it makes of a text (escaped, stripped, without its reasoning) is its own affair, so marks
    take the place of what messages say, and must be found again. Conversations of one form, which
    differ in their texts alone, are tried once.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, str | None] = {}

    def mistake(
        self,
        messages: Sequence[Message],
        render: Callable[[Sequence[Message]], str],
        how: Hashable = None,
    ) -> str | None:
        """What the template leaves out, in one line that names the role; None: nothing.

        Args:
            messages: which it has rendered.
            render: renders others in the same way.
            how: all else that decides what it writes.
        """
        form = (how, *map(_form, messages))
        if form not in self._known:
            if len(self._known) >= _KEPT:
                self._known.clear()
            self._known[form] = _mistake(messages, render)
        return self._known[form]


def _form(message: Message) -> Hashable:
    return message.get("role"), _says(message), len(_calls(message)), (*sorted(map(str, message)),)


def _says(message: Message) -> bool:
    content = message.get("content")
    return isinstance(content, str) and bool(content.strip())


def _calls(message: Message) -> Sequence[Any]:
    return message.get("tool_calls") or ()


def _mistake(messages: Sequence[Message], render: Callable[[Sequence[Message]], str]) -> str | None:
    try:
        text = render([_marked(message, place) for place, message in enumerate(messages)])
    except Exception:  # it has rendered the messages themselves, and may look at what they say
        return None
    for place, message in enumerate(messages):
        role, calls = message.get("role"), _calls(message)
        if text.count(_CALLED.format(place)) < len(calls):
            return (
                f"the chat template leaves out the calls of role '{role}': take a model that was "
                "trained with tools, or write them as text"
            )
        if _says(message) and _SAID.format(place) not in text:
            beside = " beside calls: remove the text or the calls"
            other = ": say it in a role that the template writes, such as user"
            return (
                f"the chat template leaves out what role '{role}' says{beside if calls else other}"
            )
    return None


def _marked(message: Message, place: int) -> Message:
    marked = dict(message)
    if _says(message):
        marked["content"] = _SAID.format(place)
    if calls := _calls(message):
        marked["tool_calls"] = [_renamed(call, _CALLED.format(place)) for call in calls]
    return marked


def _renamed(call: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Some write a call without ``function`` around it."""
    if "function" in call:
        return {**call, "function": {**call["function"], "name": name}}
    return {**call, "name": name}
