"""Tool calls in a model's text."""

import json
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from case_files import read_table
from rollpacker.config.rewards import CallFormat
from rollpacker.env.base import Message
from rollpacker.env.calls.call import BadCall, Call, Parsed
from rollpacker.env.calls.calls import FORMATS, parse, written
from rollpacker.env.messages import calls_of, to_message

ADD = Call("add", {"a": 2, "b": 3})
HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
LLAMA3 = '{"name": "add", "parameters": {"a": 2, "b": 3}}'

HERMES_TEXTS = {
    "alone": (HERMES, ""),
    "behind text": (f"I add.\n{HERMES}", "I add."),
    "between texts": (f"I add.{HERMES} Then I wait.", "I add. Then I wait."),
    "without space": ('<tool_call>{"name":"add","arguments":{"a":2,"b":3}}</tool_call>', ""),
    "with much space": ('<tool_call> \n\t{ "name" : "add",\n"arguments":{"a":2,"b":3} } \n', ""),
    "not closed": (HERMES.removesuffix("</tool_call>"), ""),
    "as Llama names it": (f"<tool_call>{LLAMA3}</tool_call>", ""),
    "arguments as text": (
        '<tool_call>{"name": "add", "arguments": "{\\"a\\": 2, \\"b\\": 3}"}</tool_call>',
        "",
    ),
    "behind reasoning": (f"<think>\nAdd.\n</think>\n\n{HERMES}", "<think>\nAdd.\n</think>"),
    "behind the end of reasoning": (f"Add.\n</think>\n{HERMES}", "Add.\n</think>"),
}

LLAMA3_TEXTS = {
    "alone": (LLAMA3, ""),
    "with the tag": (f"<|python_tag|>{LLAMA3}", ""),
    "with space": (f"\n {LLAMA3} \n", ""),
    "as Hermes names it": ('{"name": "add", "arguments": {"a": 2, "b": 3}}', ""),
    "with its type": ('{"type": "function", "name": "add", "parameters": {"a": 2, "b": 3}}', ""),
    "behind reasoning": (f"<think>Add.</think>{LLAMA3}", "<think>Add.</think>"),
}


CASES = [("hermes", *each) for each in HERMES_TEXTS.values()]
CASES += [("llama3", *each) for each in LLAMA3_TEXTS.values()]


@pytest.mark.parametrize(("form", "text", "content"), CASES, ids=[*HERMES_TEXTS, *LLAMA3_TEXTS])
def test_calls(form: CallFormat, text: str, content: str) -> None:
    parsed = parse(text, form)
    assert parsed.calls == (ADD,)
    assert parsed.content == content


@pytest.mark.parametrize("between", ["; ", "\n", " ;\n", ""])
def test_several_llama3_calls(between: str) -> None:
    second = '{"name": "take", "parameters": {}}'
    parsed = parse(f"{LLAMA3}{between}{second}", "llama3")
    assert parsed.calls == (ADD, Call("take", {}))


@pytest.mark.parametrize(
    ("behind", "content"),
    [(" and then", "and then"), ("; So.\n", "So."), ("}", "}"), ("<|eom_id|>", "<|eom_id|>")],
)
def test_text_behind_a_llama3_call_is_no_call(behind: str, content: str) -> None:
    assert parse(f"{LLAMA3}{behind}", "llama3") == Parsed(content, (ADD,))
    two = parse(f"<|python_tag|>{LLAMA3};{LLAMA3}{behind}", "llama3")
    assert two == Parsed(content, (ADD, ADD))


def test_several_hermes_calls_keep_their_order() -> None:
    second = '<tool_call>{"name": "take"}</tool_call>'
    assert parse(f"{HERMES}\n{second}{HERMES}", "hermes").calls == (ADD, Call("take", {}), ADD)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    "text",
    [
        "It is 5.",
        "",
        '{"answer": 5}',
        '{"name": "Ada", "age": 36}',
        '{"name": "Ada"',
        f"Like this: {LLAMA3}",
        "<think>\n" + HERMES,
        "<think>\n" + LLAMA3,
        f"<think>{HERMES}</think>It is 5.",
    ],
)
def test_what_is_no_call(form: CallFormat, text: str) -> None:
    parsed = parse(text, form)
    assert parsed.calls == ()
    assert parsed.content == text


WORDS = "say <think> and then </think>"
"""In arguments these are words like others."""


def say(text: str, form: CallFormat) -> str:
    """A call that says it."""
    return written("say", "text", text, form)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("text", [WORDS, "</think>", "<think>", "</think> <think>"])
def test_what_arguments_say_of_reasoning_hides_no_call(form: CallFormat, text: str) -> None:
    parsed = parse(say(text, form), form)
    assert parsed.calls == (Call("say", {"text": text}),)
    assert parsed.content == ""


def test_what_is_said_of_reasoning_behind_a_call_or_before_it_hides_none() -> None:
    assert parse(f"{HERMES}\n<think>Hm.", "hermes").calls == (ADD,)
    assert parse(f"I <think> so. {HERMES}", "hermes").calls == (ADD,)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("begins", ["<think>", "\n <think>\n"])
def test_calls_in_reasoning_are_not_meant(form: CallFormat, begins: str) -> None:
    call = say("hi", form)
    assert parse(f"{begins}{call}", form).calls == ()
    parsed = parse(f"{begins}{call}</think>{call}", form)
    assert parsed.calls == (Call("say", {"text": "hi"}),)
    assert parsed.content.endswith("</think>")


@pytest.mark.parametrize("form", FORMATS)
def test_a_reply_may_begin_inside_of_reasoning(form: CallFormat) -> None:
    """The template has opened it: the reply itself has only its end."""
    call = say(WORDS, form)
    parsed = parse(f"Hm.</think>{call}", form, reasons=True)
    assert parsed.calls == (Call("say", {"text": WORDS}),)
    hidden = say("hi", form)
    assert parse(hidden, form, reasons=True).calls == ()
    assert parse(f"{hidden}</think>It is 5.", form, reasons=True).calls == ()
    assert parse(f"{hidden}</think>{call}", form, reasons=True).calls == parsed.calls


BAD = {
    **read_table(__file__, "BAD"),
    '{"name": "add", "arguments": {"a": ' + "1" * 5000 + "}}": "a number is too long",
    '{"name": "add", "arguments": ' + "[" * 100_000: "nested too deep",
}


@pytest.mark.parametrize("body", BAD, ids=range(len(BAD)))
def test_malformed_hermes_calls_say_what_is_wrong(body: str) -> None:
    parsed = parse(f"I try.<tool_call>{body}</tool_call>{HERMES}", "hermes")
    bad, good = parsed.calls
    assert isinstance(bad, BadCall)
    assert BAD[body] in bad.error
    assert "\n" not in bad.error
    assert good == ADD
    assert parsed.content == "I try."


def test_a_call_that_is_not_closed_ends_where_the_next_begins() -> None:
    assert parse('<tool_call>{"name": "add", ' + HERMES, "hermes").calls[1:] == (ADD,)
    assert parse(HERMES.removesuffix("</tool_call>") + HERMES, "hermes").calls == (ADD, ADD)


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "add", "parameters": {"a": 2,}',
        f'{LLAMA3} {{"name": "add", and then',
        "<|python_tag|>1 + 1 =",
    ],
)
def test_malformed_llama3_calls_say_what_is_wrong(text: str) -> None:
    assert isinstance(parse(text, "llama3").calls[-1], BadCall)


def test_tags_inside_of_arguments_are_arguments() -> None:
    text = "</tool_call><tool_call>{}"
    assert parse(say(text, "hermes"), "hermes").calls == (Call("say", {"text": text}),)


PIECES = st.sampled_from(
    [
        *["<tool_call>", "</tool_call>", "<think>", "</think>", "<|python_tag|>", HERMES, LLAMA3],
        *["<function=", "<parameter=", ">", "</parameter>", "</function>", "add>"],
        *["add\n<arg_key>a</arg_key>", "<arg_value>", "</arg_value>", "<arg_key>"],
        *["[TOOL_CALLS]", "add[ARGS]", "[CALL_ID]", "[{", "[THINK]", "[/THINK]"],
        *["<start_function_call>call:add{", "<escape>", "<end_function_call>", "a:"],
        *["<|tool_call>call:add{", '<|"|>', "<tool_call|>", "<|channel>thought", "<channel|>"],
        *["<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "function<｜tool▁sep｜>add\n```json"],
        *["add<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"],
        *["<|channel|>commentary to=functions.add", "<|message|>", "<|call|>", "<|end|>"],
        *["<|start|>", "<|channel|>analysis", "[add(", "a=2", "a=", ")", "```tool_code\n", "```"],
        *[
            '{"name": "',
            '"arguments": {',
            '"parameters": ',
            "{",
            "}",
            "[",
            "]",
            '"',
            "\\",
            ":",
            ",",
        ],
        *[";", "\n", " ", "\ud800", "\\ud800", "\x00", "1e999", "NaN", "-", "true", "null"],
    ]
)
TEXTS = st.lists(PIECES | st.text(max_size=5), max_size=30).map("".join)


@given(TEXTS, st.sampled_from(FORMATS))
def test_nothing_is_too_strange(text: str, form: CallFormat) -> None:
    parsed = parse(text, form)
    message = to_message(parsed, text)
    assert len(calls_of(message)) == len(parsed.calls)
    for asked, call in zip(calls_of(message), parsed.calls, strict=True):
        assert isinstance(asked.call, BadCall) is isinstance(call, BadCall)
    json.dumps(message, ensure_ascii=False)


@pytest.mark.parametrize(
    "piece",
    [
        *["<tool_call>", "<tool_call>{", '<tool_call>"', "<tool_call>[[[", "</tool_call>{"],
        *["<function=", "<function=a>", "<function=a><parameter=b>", "<parameter=b>\n"],
        *["<tool_call>a\n<arg_key>b</arg_key><arg_value>", "<arg_key>b</arg_key>"],
        *["[TOOL_CALLS]", "[TOOL_CALLS][", "[TOOL_CALLS]a[ARGS]{", "[TOOL_CALLS]a[CALL_ID]"],
        *["<start_function_call>", "<start_function_call>call:a{b:", "<|tool_call>call:a{b:[{"],
        *[
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁call▁begin｜>a<｜tool▁sep｜>{",
            "<｜tool▁call▁end｜>{",
        ],
        *["<|message|>", "<|channel|>a to=b<|message|>{", "<|end|><|start|>", "to=b"],
        *["[a(", "[a(b=[", "```tool_code\na(", "```tool_code\n[a(b='", '\\"', "[a()]"],
    ],
)
@pytest.mark.parametrize("form", FORMATS)
def test_the_work_grows_with_the_text_and_not_faster(
    piece: str, form: CallFormat, calls: Callable[[Callable[[], object]], int]
) -> None:
    once = calls(lambda: parse(piece * 100, form))
    assert calls(lambda: parse(piece * 1000, form)) <= 11 * once


def test_messages_have_ids_of_nine_characters_that_tell_calls_apart() -> None:
    def message(text: str) -> Message:
        return to_message(parse(text, "hermes"), text)

    first = [call["id"] for call in message(HERMES * 2)["tool_calls"]]
    assert len({*first}) == 2
    assert {len(each) for each in first} == {9}
    assert all(each.isalnum() for each in first)
    assert first == [call["id"] for call in message(HERMES * 2)["tool_calls"]]
    assert first[0] != message(HERMES)["tool_calls"][0]["id"]


def test_calls_and_mistakes_keep_their_places() -> None:
    text = (
        f"<tool_call>1</tool_call>{HERMES}<tool_call>2</tool_call><tool_call>3</tool_call>{HERMES}"
    )
    found = [type(asked.call) for asked in calls_of(to_message(parse(text, "hermes"), text))]
    assert found == [BadCall, Call, BadCall, BadCall, Call]
