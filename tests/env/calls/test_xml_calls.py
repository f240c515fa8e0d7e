"""Calls with a tag for each argument, as Qwen3-Coder and Qwen3.5 write them."""

from __future__ import annotations

from typing import Any

import pytest
from chat_models import ADD, TEMPLATES, make_tokenizer

from case_files import read_table
from rollpacker.env.calls.call import BadCall, Call, Parsed
from rollpacker.env.calls.calls import parse
from rollpacker.env.template import Template
from rollpacker.env.template_check import check

CALL = Call("add", {"a": 2, "b": 3})
TEXT = (
    "<tool_call>\n<function=add>\n<parameter=a>\n2\n</parameter>\n<parameter=b>\n3\n</parameter>\n"
    "</function>\n</tool_call>"
)
CODE = "if a </function> b:\n    print('</tool_call>')\n"


def tool(**types: Any) -> dict[str, Any]:
    """A tool ``f`` whose arguments have these schemas."""
    parameters = {"type": "object", "properties": types}
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


def f(**arguments: str) -> str:
    lines = (f"<parameter={key}>\n{text}\n</parameter>" for key, text in arguments.items())
    return "<tool_call>\n<function=f>\n" + "\n".join(lines) + "\n</function>\n</tool_call>"


WRITTEN = {
    "as the template has it": (TEXT, ""),
    "behind text": (f"I add.\n\n{TEXT}", "I add."),
    "behind reasoning": (f"<think>\n{TEXT}\n</think>\n{TEXT}", f"<think>\n{TEXT}\n</think>"),
    "in one line": (TEXT.replace("\n", ""), ""),
    "without the outer tag": (TEXT[len("<tool_call>\n") : -len("\n</tool_call>")], ""),
    "not closed": (TEXT.removesuffix("\n</tool_call>"), ""),
    "not ended": (TEXT.removesuffix("\n</function>\n</tool_call>"), ""),
    "values not ended": (TEXT.replace("\n</parameter>", ""), ""),
    "the last value not ended": (TEXT[: TEXT.rindex("\n</parameter>")], ""),
}


@pytest.mark.parametrize("case", WRITTEN)
def test_calls(case: str) -> None:
    text, content = WRITTEN[case]
    parsed = parse(text, "qwen3_coder", tools=[ADD])
    assert parsed.calls == (CALL,)
    assert parsed.content == content


def test_several_keep_their_order_and_one_that_is_none_harms_no_other() -> None:
    bad = "<tool_call>\nadd(2, 3)\n</tool_call>"
    parsed = parse(f"{TEXT}{bad}\n{TEXT}", "qwen3_coder", tools=[ADD])
    assert (parsed.calls[0], parsed.calls[2]) == (CALL, CALL)
    assert parsed.calls[1] == BadCall("the call must begin with <function=NAME>")
    two = f"<tool_call>{f()[len('<tool_call>') :]}".replace("</function>", "</function> and", 1)
    assert isinstance(parse(two, "qwen3_coder").calls[0], BadCall)
    assert isinstance(parse("<tool_call><function= >", "qwen3_coder").calls[0], BadCall)


def test_without_the_outer_tag_several_calls_and_text_between_them_are_read() -> None:
    bare = TEXT[len("<tool_call>\n") : -len("\n</tool_call>")]
    parsed = parse(f"{bare}\n{bare} Done.", "qwen3_coder", tools=[ADD])
    assert parsed.calls == (CALL, CALL)
    assert parsed.content == "Done."
    noted = parse(f"As `<function=NAME>` says: {TEXT}", "qwen3_coder", tools=[ADD])
    assert noted == Parsed("As `<function=NAME>` says:", (CALL,))


@pytest.mark.parametrize(
    "text",
    ["It is 5.", "", "a <function> of x", "<parameter=a>\n5", "Write `<function=NAME>` first."],
)
def test_what_is_no_call(text: str) -> None:
    assert parse(text, "qwen3_coder").calls == ()


TYPED = [
    *read_table(__file__, "TYPED"),
    ({"type": "string"}, CODE, CODE),
    ({"type": "integer"}, "1" * 5000, "1" * 5000),
    ({"type": "array"}, "[" * 100_000, "[" * 100_000),
]


@pytest.mark.parametrize(("schema", "text", "value"), TYPED, ids=range(len(TYPED)))
def test_an_argument_is_what_its_schema_takes_or_text(
    schema: dict[str, Any], text: str, value: Any
) -> None:
    (call,) = parse(f(x=text), "qwen3_coder", tools=[tool(x=schema)]).calls
    assert call == Call("f", {"x": value})
    assert isinstance(call, Call)
    assert type(call.arguments["x"]) is type(value)


def test_arguments_that_nobody_knows_are_text() -> None:
    assert parse(f(x="5"), "qwen3_coder").calls == (Call("f", {"x": "5"}),)
    assert parse(f(y="5"), "qwen3_coder", tools=[tool(x={"type": "integer"})]).calls == (
        Call("f", {"y": "5"}),
    )


@pytest.mark.parametrize(
    "of",
    [
        {"name": "f"},
        {"type": "function", "function": {}},
        {"type": "function", "function": {"name": "f", "parameters": None}},
        {"type": "function", "function": {"name": "f", "parameters": {"properties": []}}},
        *(
            tool(x=schema)
            for schema in (
                True,
                {"type": "array", "items": True},
                {"type": "array", "items": [{"type": "integer"}]},
                {"anyOf": [True]},
                {"enum": None},
                {"type": None},
                {"$ref": "#/x"},
                {"allOf": [{"type": "object"}]},
            )
        ),
    ],
)
@pytest.mark.parametrize("text", ["5", "[1]", '{"a": 1}', "five"])
def test_schemas_of_others_raise_nothing(of: dict[str, Any], text: str) -> None:
    (call,) = parse(f(x=text), "qwen3_coder", tools=[of]).calls
    assert isinstance(call, Call)
    assert call.arguments["x"] in (text, 5, [1], {"a": 1})


def test_a_list_or_an_object_is_one_where_its_schema_is_not_understood() -> None:
    tools = [tool(x={"$ref": "#/x"})]
    assert parse(f(x='{"a": 1}'), "qwen3_coder", tools=tools).calls == (Call("f", {"x": {"a": 1}}),)
    assert parse(f(x="5"), "qwen3_coder", tools=tools).calls == (Call("f", {"x": "5"}),)


def test_a_template_that_opens_reasoning_and_writes_tags_is_known() -> None:
    text = (TEMPLATES / "reasoning" / "qwen3_5.jinja").read_text(encoding="utf-8")
    tokenizer = make_tokenizer(text)
    template = Template(tokenizer, {})
    assert template.call_format == "qwen3_coder"
    assert not template.guessed
    assert all(line.endswith("is kept as it was sampled") for line in check(template, [ADD]))
    hidden, meant = (tokenizer(said)["input_ids"] for said in (TEXT, f"Hm.</think>\n\n{TEXT}"))
    assert "tool_calls" not in template.reply(hidden, [ADD]).message
    (called,) = template.reply(meant, [ADD]).message["tool_calls"]
    assert called["function"]["name"] == "add"
    assert called["function"]["arguments"] == '{"a": 2, "b": 3}'
