"""Converts between chat messages and tokens: prompts, the model's replies, and the text after them.
A reply keeps its sampled tokens. Only the text after it is rendered and tokenised."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rollpacker.chat import Complete
from rollpacker.config.rewards import CallFormat
from rollpacker.env.base import EpisodeError, Message
from rollpacker.env.calls.call import Call, as_json
from rollpacker.env.calls.calls import FORMATS, opens_reasoning, parse, written
from rollpacker.env.messages import arguments_of, to_message, whole
from rollpacker.errors import words_of

# To find a template's text after a reply, render a short conversation whose reply is a mark, and
# take the text after the mark.

Tools = Sequence[Mapping[str, Any]]
Results = Literal["tool", "calls", "user"]

ASKED: Message = {"role": "user", "content": "Hello"}
PROBE = Call("look_up", {"key": "capital"})
PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": PROBE.name,
        "description": "Look something up.",
        "parameters": {
            "type": "object",
            "properties": {"key": {"type": "string", "description": "What."}},
            "required": ["key"],
        },
    },
}
ANSWER: Message = {
    "role": "tool",
    "name": PROBE.name,
    "content": "Brasilia",
    "tool_call_id": "000000000",
}  # a tool's answer
_REPLY = "rollpacker-reply-5d41402a"
"""Stands for the reply. No template looks for it."""
_WAYS: tuple[Results, ...] = ("tool", "calls", "user")
_NAMELESS = "unknown"  # the name of a tool whose call was not understood


class Rendering:
    """The chat template of a model, with its own arguments ``kwargs``. ``call_format`` is ``auto``
    for the template's. Raises ``ValueError`` if conversations of several turns cannot be
    rendered."""

    def __init__(
        self, tokenizer: Any, kwargs: Mapping[str, Any], call_format: CallFormat | Literal["auto"]
    ) -> None:
        if not tokenizer.chat_template:
            raise ValueError(
                "environment: the tokenizer of model.path has no chat template: take an instruct "
                "model, or leave environment out"
            )
        self._tokenizer = tokenizer
        self._kwargs = dict(kwargs)
        # Llama 3's <|eom_id|> and the like have no name of their own.
        added = {id_: str(t) for id_, t in tokenizer.added_tokens_decoder.items() if t.special}
        self.special = sorted(
            {*tokenizer.all_special_tokens, *added.values()}, key=len, reverse=True
        )  # tokens that are no text
        self._pattern = re.compile("|".join(map(re.escape, self.special)) or "(?!)")
        self._as_text = False
        self.last: tuple[str, str] | None = None
        """The token at the end of a conversation, and the one at the end of an inner turn, if they
        differ."""
        self.closing = self._closing()  # the template's text after any reply
        self.writes: str = ""  # a call in the template's notation, empty if it has none
        self._own: CallFormat | None = self._format_found()
        self.guessed = call_format == "auto" and not self.writes
        """Whether neither the user nor the template says how calls are written."""
        self.call_format: CallFormat | None = self._own if call_format == "auto" else call_format
        """The format of the model's calls, or None if the template's is unknown."""
        self.results: Results = self._results_as()
        """How messages of role tool are rendered: as they are, only after calls, or as the
        user's."""

    def render(self, messages: Sequence[Message], tools: Tools, *, goes_on: bool) -> str:
        """Return the text of a conversation. ``goes_on``: with the beginning of the next reply."""
        text = self._tokenizer.apply_chat_template(
            [_plain(message, self._as_text) for message in messages],
            tools=[dict(tool) for tool in tools] or None,
            tokenize=False,
            add_generation_prompt=goes_on,
            **self._kwargs,
        )
        return whole(text)

    def behind(self, messages: Sequence[Message], tools: Tools) -> str:
        """Return the text between a reply and the model's next one, with ``messages``. Raises the
        template's errors."""
        messages = self.fit(messages)
        answered = [message for message in messages if message["role"] == "tool"]
        if answered and self.results == "calls":
            return self._behind_calls(messages, answered, tools)
        said: Message = {"role": "assistant", "content": _REPLY}
        return self._after_mark([ASKED, said, *messages], tools)

    def fit(self, messages: Sequence[Message]) -> list[Message]:
        """Give tools' answers a name or the role of the user, if the template needs that."""
        if self.results == "calls":
            return [
                {"name": _NAMELESS, **message} if message["role"] == "tool" else message
                for message in messages
            ]
        if self.results != "user":
            return list(messages)
        fitted: list[Message] = []
        answering = False
        for message in messages:
            if message["role"] != "tool":
                fitted.append(message)
                answering = False
                continue
            text = f"<tool_response>\n{message.get('content') or ''}\n</tool_response>"
            if answering:
                text = f"{fitted.pop()['content']}\n{text}"
            fitted.append({"role": "user", "content": text})
            answering = True
        return fitted

    def _behind_calls(
        self, messages: Sequence[Message], answered: Sequence[Message], tools: Tools
    ) -> str:
        # For a template that renders tools' answers only after their calls.
        calls = [_called(message) for message in answered]
        said = {"role": "assistant", "content": "", "tool_calls": calls}
        text = self._after_mark([ASKED, said, *messages], tools)
        if (rest := self._behind_end(text, answered[-1])) is not None:
            return rest
        alone = self._after_mark([ASKED, said], tools, goes_on=False)
        if not text.startswith(alone):
            raise ValueError("what comes behind a call depends on what follows")
        return self.closing + text[len(alone.rstrip()) :]

    def _behind_end(self, text: str, answer: Message) -> str | None:
        # The text after a call whose text argument is a mark; None if the call ends in another way
        # than the model's.
        if self._own is None or self.call_format != self._own or not self.writes:
            return None
        call = written(answer["name"], "key", _REPLY, self._own)
        place = _past(text, call.rpartition(_REPLY)[2])
        if place is None:
            return None
        rest = text[place:]
        closes = self.closing and rest.lstrip().startswith(self.closing)
        return rest.lstrip() if closes else rest

    def _after_mark(self, messages: Sequence[Message], tools: Tools, goes_on: bool = True) -> str:
        _, found, behind = self.render(messages, tools, goes_on=goes_on).rpartition(_REPLY)
        if not found:
            raise ValueError("it leaves out what the assistant says")
        return behind

    # Properties of the template ----------------------------------------------------------------

    def _closing(self) -> str:
        said: Message = {"role": "assistant", "content": _REPLY}
        try:
            alone = self._after_mark([ASKED, said], (), goes_on=False).rstrip()
            followed = self._after_mark([ASKED, said, ASKED], ())
        except Exception as error:
            raise ValueError(
                "environment: the chat template of model.path cannot render a conversation of "
                f"several turns: {words_of(error)}"
            ) from error
        if followed.startswith(alone):
            return alone
        # Some templates end the conversation in another way than a turn.
        shared = re.match(f"(?:{self._pattern.pattern})*", _shared(alone, followed))
        if shared and shared[0]:
            return shared[0]
        ends = self._pattern.match(alone), self._pattern.match(followed)
        if ends[0] and ends[1]:
            self.last = ends[0][0], ends[1][0]
        return ""

    def _results_as(self) -> Results:
        error: Exception | None = None
        for way in _WAYS:
            self.results = way
            try:
                behind = self.behind([ANSWER], [PROBE_TOOL])
                if ANSWER["content"] in behind:
                    return "calls" if way == "tool" and self._differs(behind) else way
                error = None
            except Exception as raised:  # templates are programs with errors of their own
                error = raised
        raise ValueError(
            "environment: the chat template of model.path cannot render an environment's "
            f"answers: {'it leaves it out' if error is None else words_of(error)}"
        )

    def _differs(self, plain: str) -> bool:
        said = {"role": "assistant", "content": "", "tool_calls": [_called(ANSWER)]}
        try:
            text = self._after_mark([ASKED, said, ANSWER], [PROBE_TOOL])
        except Exception:
            return False
        rest = self._behind_end(text, ANSWER)
        return rest is not None and rest != plain

    def _format_found(self) -> CallFormat | None:
        # The template's format of calls; the first format if it writes none.
        writes: list[str] = []
        for self._as_text in (False, True):  # a few templates want arguments as text of JSON
            turn = self._call_turn()
            writes += [turn] if PROBE.name in turn else []
            for form in FORMATS if PROBE.name in turn else ():
                if parse(turn, form).calls == (PROBE,):
                    self.writes = turn
                    return form
        self._as_text = False
        self.writes = writes[0] if writes else ""
        return None if writes else FORMATS[0]

    def _call_turn(self) -> str:
        said = {
            "role": "assistant",
            "content": "",
            "tool_calls": [_called({}, PROBE)],
        }
        try:
            before = self.render([ASKED], [PROBE_TOOL], goes_on=True)
            text = self.render([ASKED, said], [PROBE_TOOL], goes_on=False)
            if not text.startswith(before):
                before = self.render([ASKED], [PROBE_TOOL], goes_on=False)
        except Exception:
            return ""
        return text[len(before) :].rstrip().removesuffix(self.closing)


def _called(answer: Message, call: Call | None = None) -> dict[str, Any]:
    made = call or Call(str(answer.get("name") or _NAMELESS), {"key": _REPLY})
    function = {"name": made.name, "arguments": made.arguments}
    key = answer.get("tool_call_id") or "000000000"
    return {"id": key, "type": "function", "function": function}


def _plain(message: Message, as_text: bool) -> Message:
    # Most templates want the arguments of calls as objects, a few as text.
    if not message.get("tool_calls"):
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": _arguments(call, as_text)}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _arguments(call: Mapping[str, Any], as_text: bool) -> Any:
    arguments = arguments_of(call["function"])
    return as_json(arguments) if as_text else arguments


def _shared(one: str, other: str) -> str:
    pairs = enumerate(zip(one, other, strict=False))
    return one[: next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))]


def _past(text: str, ending: str) -> int | None:
    # The place after ``ending``, which must begin the text; white space does not count.
    place = 0
    for char in "".join(ending.split()):
        place += len(text[place:]) - len(text[place:].lstrip())
        if not text.startswith(char, place):
            return None
        place += 1
    return place


_MOST = 4096  # texts after replies that are kept: within a group they are often equal
_VARIANTS = 256  # variants of a template, by rows' own arguments, that are kept


@dataclass(frozen=True, slots=True)
class Reply:
    """A model's reply as a message of role assistant (see ``to_message``)."""

    message: Message


class Template(Rendering):
    """The chat template of a model, between messages and tokens. Raises ``ValueError`` if
    conversations of several turns cannot be rendered."""

    def __init__(
        self,
        tokenizer: Any,
        kwargs: Mapping[str, Any],
        *,
        call_format: CallFormat | Literal["auto"] = "auto",
    ) -> None:
        super().__init__(tokenizer, kwargs, call_format)
        self._variants: dict[str, Template] = {}
        self._tails: OrderedDict[str, tuple[int, ...]] = OrderedDict()
        self._complete = Complete()
        self._special_ids = frozenset(
            {*tokenizer.all_special_ids, *tokenizer.convert_tokens_to_ids(self.special)}
        )
        self._end = tuple(self.tokens(self.closing))
        self._ends = self._end_tokens()
        self._last = self.last and tuple(tokenizer.convert_tokens_to_ids(list(self.last)))
        self._reasons = self._begins_reasoning()
        self._reasons_answered = opens_reasoning(self.behind([ANSWER], [PROBE_TOOL]))

    # Calls of the process of environments ------------------------------------------------------

    def variant(self, kwargs: Mapping[str, Any]) -> Template:
        """Return the template with a row's own arguments added."""
        if not kwargs:
            return self
        key = repr(sorted(kwargs.items()))
        if key not in self._variants:
            form = self.call_format or "auto"
            more = Template(self._tokenizer, {**self._kwargs, **kwargs}, call_format=form)
            self._variants[key] = more
            if len(self._variants) > _VARIANTS:
                self._variants.pop(next(iter(self._variants)))
        return self._variants[key]

    def prompt(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        """Return the token ids of a conversation for the model to go on with. Raises
        ``EpisodeError``."""
        return self.tokens(self._rendered(messages, tools))

    def reply(
        self, ids: Sequence[int], tools: Tools = (), earlier: int = 0, *, answered: bool = False
    ) -> Reply:
        """Read sampled tokens, with the end token or without. Never raises. ``earlier``: number of
        calls earlier in the conversation. ``answered``: the reply follows a tool's answer."""
        body = list(ids)
        if body and body[-1] in self._special_ids:
            body.pop()
        said = self._tokenizer.decode(
            body, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        if self.closing:
            said = said.removesuffix(self.closing)
        form = self.call_format or FORMATS[0]
        reasons = self._reasons_answered if answered else self._reasons
        parsed = parse(said, form, reasons=reasons, tools=tools)
        message = to_message(parsed, said, earlier)
        texts = {key: message[key] for key in ("content", "text") if key in message}
        plain = {key: self._pattern.sub("", text) for key, text in texts.items()}
        return Reply(message | plain)

    def delta(self, reply: Sequence[int], messages: Sequence[Message], tools: Tools) -> list[int]:
        """Return the token ids from a reply to the next one: the messages, after the end of the
        reply's turn if that was not sampled. Raises ``EpisodeError``."""
        tail = self._tail(messages, tools)
        return list(tail[self._sampled(reply, tail) :])

    @property
    def call_end(self) -> str | None:
        """The token after a call for a tool, if it differs from that of other turns."""
        (first, *_) = self.tokens(self.behind([ANSWER], [PROBE_TOOL]))
        if first not in self._special_ids or first in self._end[:1]:
            return None
        return str(self._tokenizer.convert_ids_to_tokens(first))

    # Rendering and tokens ----------------------------------------------------------------------

    def tokens(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False)["input_ids"] if text else []

    def _tail(self, messages: Sequence[Message], tools: Tools) -> tuple[int, ...]:
        key = repr((messages, tools))
        if key in self._tails:
            self._tails.move_to_end(key)
            return self._tails[key]
        try:
            tail = tuple(self.tokens(self.behind(messages, tools)))
        except Exception as error:
            raise _refused("what the environment said", error) from error
        self._check_complete(messages, lambda others: self.behind(others, tools), "tail", tools)
        self._tails[key] = tail
        if len(self._tails) > _MOST:
            self._tails.popitem(last=False)
        return tail

    def _rendered(self, messages: Sequence[Message], tools: Tools) -> str:
        def render(messages: Sequence[Message]) -> str:
            return self.render(self.fit(messages), tools, goes_on=True)

        try:
            text = render(messages)
        except Exception as error:
            raise _refused("the prompt", error) from error
        self._check_complete(messages, render, "prompt", tools)
        return text

    def _check_complete(
        self,
        messages: Sequence[Message],
        render: Callable[[Sequence[Message]], str],
        place: str,
        tools: Tools,
    ) -> None:
        mistake = self._complete.mistake(messages, render, (place, bool(tools)))
        if mistake is not None:
            raise EpisodeError(mistake)

    def _sampled(self, reply: Sequence[int], tail: tuple[int, ...]) -> int:
        if reply and tail and reply[-1] == tail[0] and reply[-1] in self._special_ids:
            return 1
        if reply and tail and (reply[-1], tail[0]) == self._last:
            return 1  # the sampled token stays, in place of the turn's end
        closing = len(self._end)
        if not reply or not closing or tail[:closing] != self._end:
            return 0
        last = self._tokenizer.decode(list(reply[-closing - 4 :]), skip_special_tokens=False)
        return closing if reply[-1] in self._ends or last.endswith(self.closing) else 0

    # Properties of the template ----------------------------------------------------------------

    def _end_tokens(self) -> set[int]:
        # Tokens that end a turn: the template's, and others in its text (Llama 3.1 has two).
        text = self._tokenizer.get_chat_template(tools=[PROBE_TOOL])
        written = [token for token in self.special if token in text]
        ids = {*self._end[-1:], *self._tokenizer.convert_tokens_to_ids(written)}
        return ids & self._special_ids

    def _begins_reasoning(self) -> bool:
        try:
            return opens_reasoning(self.render([ASKED], [], goes_on=True))
        except Exception:
            return False


def _refused(what: str, error: Exception) -> EpisodeError:
    return EpisodeError(f"the chat template refuses {what}: {words_of(error)}")
