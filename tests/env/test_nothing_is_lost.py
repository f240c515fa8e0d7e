"""What is said to the model is in what it reads, or an error names whose it is."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from chat_models import ADD, NAMES, make_tokenizer
from one_episode import MADE, TEMPLATES, USER, Says, talk

from rollpacker.chat import Complete
from rollpacker.config import DataConfig
from rollpacker.core.types import PromptId
from rollpacker.data.base import DataError, Row
from rollpacker.data.encode import encode_prompts
from rollpacker.env.base import Message, Opening

QWEN = ["qwen2_5", "qwen3", "qwen3_instruct_2507"]
CALLING = [*QWEN, "llama3_1"]
"""Templates that write calls of tools."""
UNKNOWN = ["observation", "environment", "function", "User"]
"""Roles that Qwen's templates leave out without a word."""

SYSTEM = {"role": "system", "content": " Be brief.\n"}
THOUGHT = {"role": "assistant", "content": "<think>\nAdd.\n</think>\n\nIt is 5."}
CALLED = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "abcdefghi",
            "type": "function",
            "function": {"name": "add", "arguments": {"a": 2, "b": 3}},
        }
    ],
}
RESULT = {
    "role": "tool",
    "name": "add",
    "content": '{"a": "é\n<b>\\"x\\""}',
    "tool_call_id": "abcdefghi",
}


def encode(name: str, prompt: list[Message], tools: Sequence[Any] = ()) -> str:
    """A row's prompt as the model reads it."""
    row = Row(
        id=PromptId("r"), prompt=prompt, answer="1", domain="default", columns={}, tools=tools
    )
    tokens = encode_prompts([row], MADE[name], DataConfig(path="x"), 10_000, 1).tokens
    return MADE[name].decode(tokens[row.id])


# Roles -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", UNKNOWN)
@pytest.mark.parametrize("name", NAMES)
def test_a_role_is_rendered_or_named(name: str, role: str) -> None:
    """Alike in rows, at an episode's beginning and behind a reply; short words are no excuse."""
    for text in ("Look behind you.", "5", "assistant"):
        message = {"role": role, "content": text}
        begun = talk(name, Says([message]))[-1]
        turned = talk(name, Says(turns=[[message]]), "I look.")[-1]
        if name in QWEN:
            with pytest.raises(DataError) as refused:
                encode(name, [USER, message])
            assert str(refused.value).startswith(
                f"row 'r': the chat template leaves out what role '{role}' says"
            )
            for answer in (begun, turned):
                assert f"the chat template leaves out what role '{role}' says" in answer.error
        else:
            assert text in encode(name, [USER, message])
            assert (begun.error, turned.error) == ("", "")
            assert text in MADE[name].decode(np.frombuffer(turned.tokens, np.int32))


def test_a_prompt_in_the_row_s_place_is_looked_at_too() -> None:
    opening = Opening(prompt=[USER, {"role": "observation", "content": "It is dark."}])
    (answer,) = talk("qwen3", Says(opening))
    assert "leaves out what role 'observation' says" in answer.error


def test_a_role_is_named_among_others_that_are_there() -> None:
    said = [{"role": "user", "content": "a"}, {"role": "observation", "content": "a"}]
    answer = talk("qwen3", Says(turns=[said]), "I look.")[-1]
    assert "leaves out what role 'observation' says" in answer.error


PROMPTS = {
    "system": [SYSTEM, USER],
    "reasoning": [SYSTEM, USER, THOUGHT, USER],
    "nothing said": [{"role": "system", "content": " \n"}, USER],
}
WITH_CALLS = {
    "call": [USER, CALLED, RESULT],
    "call without text": [USER, {**CALLED, "content": None}, RESULT],
    "call and more": [SYSTEM, USER, CALLED, RESULT, THOUGHT, USER],
}


@pytest.mark.parametrize("name", NAMES)
def test_what_templates_make_of_texts_is_no_loss(name: str) -> None:
    """They strip white space, drop reasoning and escape what tools say."""
    for prompt in PROMPTS.values():
        for tools in ((), [ADD]):
            if not tools or name in CALLING:
                encode(name, prompt, tools)
        TEMPLATES[name].prompt(prompt, ())
        TEMPLATES[name].delta([5], prompt, ())
    for prompt in WITH_CALLS.values() if name in CALLING else ():
        for tools in ((), [ADD]):
            encode(name, prompt, tools)
            TEMPLATES[name].prompt(prompt, tools)
    for text in (RESULT["content"], "", "5", "<tool_response>\n5\n</tool_response>"):
        TEMPLATES[name].delta([5], [{**RESULT, "content": text}], [ADD])


def test_calls_that_a_template_cannot_write_are_named() -> None:
    with pytest.raises(DataError, match="leaves out the calls of role 'assistant'"):
        encode("smollm2", WITH_CALLS["call"])
    beside = [USER, {**CALLED, "content": "I add."}, RESULT]
    with pytest.raises(DataError, match="what role 'assistant' says beside calls: remove the text"):
        encode("llama3_1", beside)
    assert "I add." in encode("qwen3", beside)


def test_a_form_is_tried_once() -> None:
    rendered: list[Sequence[Message]] = []

    def render(messages: Sequence[Message]) -> str:
        rendered.append(messages)
        return "".join(str(message["content"]) for message in messages)

    complete = Complete()
    for text in "abc":
        assert complete.mistake([{"role": "user", "content": text}], render) is None
    assert len(rendered) == 1
    complete.mistake([{"role": "system", "content": "a"}], render)
    complete.mistake([{"role": "user", "content": "a"}], render, "with tools")
    assert len(rendered) == 3


def test_a_template_that_looks_at_texts_is_taken_at_its_word() -> None:
    text = (
        "{% for m in messages %}{% if m.content[0] != '5' %}{{ raise_exception('no') }}{% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    tokenizer = make_tokenizer(text)
    messages = [{"role": "user", "content": "5 + 3"}]

    def render(messages: Sequence[Message]) -> str:
        return tokenizer.apply_chat_template(list(messages), tokenize=False)

    assert render(messages) == "5 + 3"
    assert Complete().mistake(messages, render) is None


# Content ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3", "llama3_1"])
def test_parts_of_text_are_joined(name: str) -> None:
    said = {"role": "user", "content": [{"type": "text", "text": "a"}, {"text": "b"}]}
    plain = {"role": "user", "content": "a\nb"}
    opened, turned = talk(name, Says([said], [[said]]), "So.")
    assert (opened, turned) != talk(name, Says(), "So.")
    expected = talk(name, Says([plain], [[plain]]), "So.")
    assert (opened.prompt, turned.tokens) == (expected[0].prompt, expected[1].tokens)
    assert turned.error == ""


CONTENTS = {"NoneType": None, "int": 5, "dict": {"board": [1]}, "tuple": ("a", "b"), "bytes": b"a"}


@pytest.mark.parametrize("kind", CONTENTS)
def test_content_that_is_no_text_is_refused_by_name(kind: str) -> None:
    said = {"role": "user", "content": CONTENTS[kind]}
    error = f"returned a message of role 'user' whose content is {kind}, not text"
    for opening in ([said], Opening(prompt=[said])):
        (answer,) = talk("qwen3", Says(opening))
        assert answer.error == f"reset {error}"
    assert talk("qwen3", Says(turns=[[said]]), "So.")[-1].error == f"step {error}"


def test_parts_that_are_no_text_are_refused_by_name() -> None:
    said = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    answer = talk("llama3_1", Says(turns=[[said]]), "So.")[-1]
    assert "role 'user': a chat message has content of type 'image_url'" in answer.error


def test_a_message_without_content_needs_calls() -> None:
    assert "whose content is NoneType" in talk("qwen3", Says([{"role": "user"}]))[0].error
    calls = {key: value for key, value in CALLED.items() if key != "content"}
    assert talk("qwen3", Says([calls, RESULT]))[0].error == ""
