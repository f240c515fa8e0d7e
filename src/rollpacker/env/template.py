"""Between chat messages and tokens: prompts, the model's replies, and what comes behind them.

A reply stays in the tokens in which it was sampled: only what follows it is rendered and tokenised.
What a template writes behind a reply is found by rendering a short conversation whose reply is a
mark, and taking the text behind the mark.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rollpacker.chat import Complete
from rollpacker.env.base import EpisodeError, Message
from rollpacker.env.calls.calls import FORMATS, REASONING, Call, Format, parse
from rollpacker.env.conversation import arguments_of, to_message, whole
from rollpacker.errors import words_of

Tools = Sequence[Mapping[str, Any]]
Results = Literal["tool", "calls", "user"]

_WAYS: tuple[Results, ...] = ("tool", "calls", "user")
_REPLY = "rollpacker-reply-5d41402a"
"""Stands for the reply; nothing that a template looks for."""
_ASKED: Message = {"role": "user", "content": "Hello"}
_MOST = 4096
"""Texts behind replies that are kept: those of a group are often the same."""
_VARIANTS = 256
"""Of a template, by rows' own arguments, that are kept."""
_PROBE = Call("look_up", {"key": "capital"})
_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": _PROBE.name,
        "description": "Look something up.",
        "parameters": {
            "type": "object",
            "properties": {"key": {"type": "string", "description": "What."}},
            "required": ["key"],
        },
    },
}


@dataclass(frozen=True, slots=True)
class Reply:
    """What a model said, as a message of role assistant (see ``to_message``)."""

    message: Message


class Template:
    """The chat template of a model.

    Args:
        tokenizer: of transformers.
        kwargs: the template's own arguments (``model.chat_template_kwargs``).
        call_format: how the model writes calls; ``auto``: as the template does.

    Raises ``ValueError`` where conversations of several turns cannot be rendered.
    """

    def __init__(
        self,
        tokenizer: Any,
        kwargs: Mapping[str, Any],
        *,
        call_format: Format | Literal["auto"] = "auto",
    ) -> None:
        if not tokenizer.chat_template:
            raise ValueError(
                "environment: the tokenizer of model.path has no chat template: take an instruct "
                "model, or leave environment out"
            )
        self._tokenizer = tokenizer
        self._kwargs = dict(kwargs)
        self._variants: dict[str, Template] = {}
        self._tails: OrderedDict[str, tuple[int, ...]] = OrderedDict()
        self._complete = Complete()
        # Llama 3's <|eom_id|> and the like have no name of their own.
        added = {id_: str(t) for id_, t in tokenizer.added_tokens_decoder.items() if t.special}
        special = sorted({*tokenizer.all_special_tokens, *added.values()}, key=len, reverse=True)
        self._special_ids = frozenset({*tokenizer.all_special_ids, *added})
        self._special = re.compile("|".join(map(re.escape, special)) or "(?!)")
        self.closing = self._closing()
        """What the template writes behind a reply, whatever follows."""
        self._end = tuple(self.tokens(self.closing))
        self._ends = self._end_tokens(special)
        self.results: Results = self._results_as()
        """How messages of role tool are rendered: as they are, only behind calls, or as the
        user's."""
        found, self.writes_calls = self._format_found()
        self.guessed = call_format == "auto" and not self.writes_calls
        """Whether nothing says how calls are written."""
        self.call_format: Format | None = found if call_format == "auto" else call_format
        """Of the model's calls; None where the template writes them in one that is unknown."""
        self._reasons = self._begins_reasoning()

    # What the process of environments calls --------------------------------------------------

    def variant(self, kwargs: Mapping[str, Any]) -> Template:
        """The same with more arguments of the template, those of a row."""
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
        """Token ids of a conversation that the model is to go on with. Raises ``EpisodeError``."""
        return self.tokens(self._rendered(messages, tools))

    def reply(self, ids: Sequence[int], tools: Tools = (), earlier: int = 0) -> Reply:
        """What the model has sampled, with its end token or without, behind so many ``earlier``
        calls of the conversation. Never raises."""
        body = list(ids)
        if body and body[-1] in self._special_ids:
            body.pop()
        said = self._tokenizer.decode(
            body, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        if self.closing:
            said = said.removesuffix(self.closing)
        form = self.call_format or FORMATS[0]
        parsed = parse(said, form, reasons=self._reasons, tools=tools)
        message = to_message(parsed, said, earlier)
        texts = {key: message[key] for key in ("content", "text") if key in message}
        plain = {key: self._special.sub("", text) for key, text in texts.items()}
        return Reply(message | plain)

    def delta(self, reply: Sequence[int], messages: Sequence[Message], tools: Tools) -> list[int]:
        """Token ids behind a reply, up to where the model goes on: the end of its turn, if it has
        not sampled it, and the messages. Raises ``EpisodeError``."""
        tail = self._tail(messages, tools)
        return list(tail[self._sampled(reply, tail) :])

    # What it is made of ------------------------------------------------------------------------

    def render(self, messages: Sequence[Message], tools: Tools, *, goes_on: bool) -> str:
        """The text of a conversation; ``goes_on``: with the beginning of the next reply."""
        text = self._tokenizer.apply_chat_template(
            [_plain(message) for message in messages],
            tools=[dict(tool) for tool in tools] or None,
            tokenize=False,
            add_generation_prompt=goes_on,
            **self._kwargs,
        )
        return whole(text)

    def tokens(self, text: str) -> list[int]:
        """Token ids of rendered text."""
        return self._tokenizer(text, add_special_tokens=False)["input_ids"] if text else []

    def behind(self, messages: Sequence[Message], tools: Tools) -> str:
        """The text behind a reply that ``messages`` follow. Raises what the template raises."""
        messages = self.fit(messages)
        answered = [message for message in messages if message["role"] == "tool"]
        if answered and self.results == "calls":
            return self._behind_calls(messages, answered, tools)
        said: Message = {"role": "assistant", "content": _REPLY}
        return self._after_mark([_ASKED, said, *messages], tools)

    def _behind_calls(
        self, messages: Sequence[Message], answered: Sequence[Message], tools: Tools
    ) -> str:
        """Of a template that renders what tools answer only where they were called."""
        said = {"role": "assistant", "content": "", "tool_calls": [_called(m) for m in answered]}
        alone = self._after_mark([_ASKED, said], tools, goes_on=False)
        text = self._after_mark([_ASKED, said, *messages], tools)
        if not text.startswith(alone):
            raise ValueError("what comes behind a call depends on what follows")
        return self.closing + text[len(alone.rstrip()) :]

    def _after_mark(self, messages: Sequence[Message], tools: Tools, goes_on: bool = True) -> str:
        _, found, behind = self.render(messages, tools, goes_on=goes_on).rpartition(_REPLY)
        if not found:
            raise ValueError("it leaves out what the assistant says")
        return behind

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
        """Raises ``EpisodeError`` where a message is not to be found in what was rendered."""
        mistake = self._complete.mistake(messages, render, (place, bool(tools)))
        if mistake is not None:
            raise EpisodeError(mistake)

    def fit(self, messages: Sequence[Message]) -> list[Message]:
        """With what tools answer as the user's, where the template has no other place for it."""
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

    def _sampled(self, reply: Sequence[int], tail: tuple[int, ...]) -> int:
        """How many tokens of what comes behind a reply it has sampled already."""
        if reply and tail and reply[-1] == tail[0] and reply[-1] in self._special_ids:
            return 1
        closing = len(self._end)
        if not reply or not closing or tail[:closing] != self._end:
            return 0
        last = self._tokenizer.decode(list(reply[-closing - 4 :]), skip_special_tokens=False)
        return closing if reply[-1] in self._ends or last.endswith(self.closing) else 0

    # What it is found to be --------------------------------------------------------------------

    def _closing(self) -> str:
        said: Message = {"role": "assistant", "content": _REPLY}
        try:
            alone = self._after_mark([_ASKED, said], (), goes_on=False).rstrip()
            followed = self._after_mark([_ASKED, said, _ASKED], ())
        except Exception as error:
            raise ValueError(
                "environment: the chat template of model.path cannot render a conversation of "
                f"several turns: {words_of(error)}"
            ) from error
        if followed.startswith(alone):
            return alone
        # Some end the conversation in another way than a turn.
        tokens = re.match(f"(?:{self._special.pattern})*", _shared(alone, followed))
        return tokens[0] if tokens else ""

    def _end_tokens(self, special: Sequence[str]) -> set[int]:
        """Tokens of which one at the end of a reply is the end of its turn: the template's, and
        others that it writes (Llama 3.1 has two)."""
        text = self._tokenizer.get_chat_template(tools=[_PROBE_TOOL])
        written = [token for token in special if token in text]
        ids = {*self._end[-1:], *self._tokenizer.convert_tokens_to_ids(written)}
        return ids & self._special_ids

    def _results_as(self) -> Results:
        """Raises ``ValueError`` where the template has no way at all."""
        answer = {
            "role": "tool",
            "name": _PROBE.name,
            "content": "Brasilia",
            "tool_call_id": "000000000",
        }
        error: Exception | None = None
        for way in _WAYS:
            self.results = way
            try:
                if answer["content"] in self.behind([answer], [_PROBE_TOOL]):
                    return way
                error = None
            except Exception as raised:  # templates are programs with errors of their own
                error = raised
        raise ValueError(
            "environment: the chat template of model.path cannot render what an environment "
            f"answers: {'it leaves it out' if error is None else words_of(error)}"
        )

    def _begins_reasoning(self) -> bool:
        """Whether a reply begins inside of reasoning, which the template has opened."""
        try:
            return self.render([_ASKED], [], goes_on=True).rstrip().endswith(REASONING)
        except Exception:
            return False

    def _format_found(self) -> tuple[Format | None, bool]:
        """The format in which the template writes calls, and whether it writes them at all."""
        said = {"role": "assistant", "content": "", "tool_calls": [_called({}, _PROBE)]}
        try:
            before = self.render([_ASKED], [_PROBE_TOOL], goes_on=True)
            text = self.render([_ASKED, said], [_PROBE_TOOL], goes_on=False)
        except Exception:
            return FORMATS[0], False
        if not text.startswith(before):
            before = self.render([_ASKED], [_PROBE_TOOL], goes_on=False)
        turn = text[len(before) :].rstrip().removesuffix(self.closing)
        if _PROBE.name not in turn:
            return FORMATS[0], False
        return next((each for each in FORMATS if parse(turn, each).calls == (_PROBE,)), None), True


def _called(answer: Message, call: Call | None = None) -> dict[str, Any]:
    """A call that a tool's answer is for; its last argument is the mark."""
    made = call or Call(str(answer.get("name") or _PROBE.name), {"key": _REPLY})
    function = {"name": made.name, "arguments": made.arguments}
    key = answer.get("tool_call_id") or "000000000"
    return {"id": key, "type": "function", "function": function}


def _plain(message: Message) -> Message:
    """As templates want it: the arguments of calls are objects, not text of them."""
    if not message.get("tool_calls"):
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": arguments_of(call["function"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _shared(one: str, other: str) -> str:
    """The beginning that two texts have in common."""
    pairs = enumerate(zip(one, other, strict=False))
    return one[: next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))]


def _refused(what: str, error: Exception) -> EpisodeError:
    return EpisodeError(f"the chat template refuses {what}: {words_of(error)}")
