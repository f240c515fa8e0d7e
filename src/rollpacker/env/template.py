"""Between chat messages and tokens: prompts, the model's replies, and what comes behind them.

A reply stays in the tokens in which it was sampled: only what follows it is rendered and tokenised.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rollpacker.chat import Complete
from rollpacker.config.environment import CallFormat
from rollpacker.env.base import EpisodeError, Message
from rollpacker.env.calls.calls import FORMATS, opens_reasoning, parse
from rollpacker.env.conversation import to_message
from rollpacker.env.rendering import ANSWER, ASKED, PROBE_TOOL, Rendering, Tools
from rollpacker.errors import words_of

_MOST = 4096
"""Texts behind replies that are kept: those of a group are often the same."""
_VARIANTS = 256
"""Of a template, by rows' own arguments, that are kept."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What a model said, as a message of role assistant (see ``to_message``)."""

    message: Message


class Template(Rendering):
    """The chat template of a model, between messages and tokens.

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

    def reply(
        self, ids: Sequence[int], tools: Tools = (), earlier: int = 0, *, answered: bool = False
    ) -> Reply:
        """What the model has sampled, with its end token or without, behind so many ``earlier``
        calls of the conversation; ``answered``: behind what a tool has answered. Never raises."""
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
        """Token ids behind a reply, up to where the model goes on: the end of its turn, if it has
        not sampled it, and the messages. Raises ``EpisodeError``."""
        tail = self._tail(messages, tools)
        return list(tail[self._sampled(reply, tail) :])

    @property
    def call_end(self) -> str | None:
        """The token behind a call that a tool answers, where it is not that of other turns."""
        (first, *_) = self.tokens(self.behind([ANSWER], [PROBE_TOOL]))
        if first not in self._special_ids or first in self._end[:1]:
            return None
        return str(self._tokenizer.convert_ids_to_tokens(first))

    # What it is made of ------------------------------------------------------------------------

    def tokens(self, text: str) -> list[int]:
        """Token ids of rendered text."""
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
        """Raises ``EpisodeError`` where a message is not to be found in what was rendered."""
        mistake = self._complete.mistake(messages, render, (place, bool(tools)))
        if mistake is not None:
            raise EpisodeError(mistake)

    def _sampled(self, reply: Sequence[int], tail: tuple[int, ...]) -> int:
        """How many tokens of what comes behind a reply it has sampled already."""
        if reply and tail and reply[-1] == tail[0] and reply[-1] in self._special_ids:
            return 1
        if reply and tail and (reply[-1], tail[0]) == self._last:
            return 1  # what was sampled stays, in place of the turn's end
        closing = len(self._end)
        if not reply or not closing or tail[:closing] != self._end:
            return 0
        last = self._tokenizer.decode(list(reply[-closing - 4 :]), skip_special_tokens=False)
        return closing if reply[-1] in self._ends or last.endswith(self.closing) else 0

    # What it is found to be --------------------------------------------------------------------

    def _end_tokens(self) -> set[int]:
        """Tokens of which one at the end of a reply is the end of its turn: the template's, and
        others that it writes (Llama 3.1 has two)."""
        text = self._tokenizer.get_chat_template(tools=[PROBE_TOOL])
        written = [token for token in self.special if token in text]
        ids = {*self._end[-1:], *self._tokenizer.convert_tokens_to_ids(written)}
        return ids & self._special_ids

    def _begins_reasoning(self) -> bool:
        """Whether a reply begins inside of reasoning, which the template has opened."""
        try:
            return opens_reasoning(self.render([ASKED], [], goes_on=True))
        except Exception:
            return False


def _refused(what: str, error: Exception) -> EpisodeError:
    return EpisodeError(f"the chat template refuses {what}: {words_of(error)}")
