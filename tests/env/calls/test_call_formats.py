"""What every format of calls must do, whatever its marks."""

from __future__ import annotations

from typing import Any

import pytest
from call_texts import ADD, DEEPSEEK, GEMMA, GLM, ONE, V3, V31, XML, answers, read, written
from hypothesis import given
from hypothesis import strategies as st

from rollpacker.config.rewards import CallFormat
from rollpacker.env.calls.call import BadCall, Call
from rollpacker.env.calls.calls import FORMATS, parse

TWO = {form: text * 2 for form, text in ONE.items()} | {
    "mistral": "[TOOL_CALLS] [%s, %s]" % ((ONE["mistral"].split(" [")[1][:-1],) * 2),
    "deepseek_v3": DEEPSEEK % f"{V3}\n{V3}",
    "deepseek_v31": DEEPSEEK % (V31 * 2),
    "pythonic": "[add(a=2, b=3), add(a=2, b=3)]",
}
del TWO["harmony"]
OPENED = {
    "hermes": ONE["hermes"].removesuffix("\n</tool_call>"),
    "qwen3_coder": f"<tool_call>\n{XML.removesuffix('</parameter>' + chr(10) + '</function>')}",
    "glm": GLM.removesuffix("</arg_value>\n</tool_call>"),
    "functiongemma": GEMMA.removesuffix("<end_function_call>"),
    "gemma4": "<|tool_call>call:add{a:2,b:3}",
    "deepseek_v3": f"<｜tool▁calls▁begin｜>{V3.removesuffix('<｜tool▁call▁end｜>')}",
    "deepseek_v31": f"<｜tool▁calls▁begin｜>{V31.removesuffix('<｜tool▁call▁end｜>')}",
    "pythonic": "[add(a=2, b=3)",
}
"""Without what ends a call, where something does."""
WRONG = {
    form: ONE[form].replace('"b": 3}', '"b": }').replace("b:3}", "b:[3}").replace("b=3)", "b=)")
    for form in FORMATS
    if form not in ("qwen3_coder", "glm")
} | {
    "qwen3_coder": "<tool_call>\nadd(2, 3)\n</tool_call>",
    "glm": "<tool_call>add\n<arg_key>a</arg_key>\n2\n</tool_call>",
}
NAMED = set(FORMATS) - {"hermes", "llama3", "mistral", "qwen3_coder"}
"""Formats in which the name stands before what is wrong."""
ALONE = ("llama3", "pythonic", "harmony")
"""Formats whose calls are all of a reply, or the end of it."""


@pytest.mark.parametrize("form", FORMATS)
def test_a_call_is_read_and_run(form: CallFormat) -> None:
    parsed = read(ONE[form], form)
    assert (parsed.calls, parsed.content) == ((ADD,), "")
    (answer,) = answers(ONE[form], form)
    assert (answer["name"], answer["content"]) == ("add", "5")


@pytest.mark.parametrize("form", TWO)
def test_several_calls(form: CallFormat) -> None:
    parsed = read(TWO[form], form)
    assert (parsed.calls, parsed.content) == ((ADD, ADD), "")
    first, second = answers(TWO[form], form)
    assert first["tool_call_id"] != second["tool_call_id"]


@pytest.mark.parametrize("form", [form for form in FORMATS if form not in ALONE])
def test_text_before_a_call_and_behind_it_stays(form: CallFormat) -> None:
    parsed = read(f"I add 2 é 3.\n\n{ONE[form]}\nThen I wait.", form)
    assert parsed.calls == (ADD,)
    assert parsed.content.split() == ["I", "add", "2", "é", "3.", "Then", "I", "wait."]


@pytest.mark.parametrize("form", OPENED)
def test_the_end_of_a_call_may_be_missing(form: CallFormat) -> None:
    parsed = read(OPENED[form], form)
    assert (parsed.calls, parsed.content) == ((ADD,), "")


@pytest.mark.parametrize("form", FORMATS)
def test_a_call_that_is_wrong_is_answered_with_what_is_wrong(form: CallFormat) -> None:
    (bad,) = read(WRONG[form], form).calls
    assert isinstance(bad, BadCall)
    assert "\n" not in bad.error
    assert bad.name == ("add" if form in NAMED else None)
    (answer,) = answers(WRONG[form], form)
    assert answer["content"] == f"Error: {bad.error}"
    assert answer.get("name") == bad.name


@pytest.mark.parametrize(
    "form", [form for form in TWO if form not in ("llama3", "mistral", "pythonic")]
)
def test_a_call_that_is_wrong_harms_no_other(form: CallFormat) -> None:
    calls = read(f"{WRONG[form]}{ONE[form]}", form).calls
    assert isinstance(calls[0], BadCall)
    assert calls[-1] == ADD


@pytest.mark.parametrize("form", FORMATS)
def test_a_tool_that_is_not_there_is_named(form: CallFormat) -> None:
    text = ONE[form].replace("add", "take")
    (answer,) = answers(text, form)
    assert answer["content"] == "Error: there is no tool 'take': there is add"
    assert answer["name"] == "take"


@pytest.mark.parametrize("form", FORMATS)
def test_an_argument_of_another_type_is_named(form: CallFormat) -> None:
    many = {
        "deepseek_v3": '"many"',
        "qwen3_coder": "many",
        "glm": "many",
        "gemma4": '<|"|>many<|"|>',
    }
    text = ONE[form].replace("2", many.get(form, '"many"')).replace('a:"many"', "a:many")
    (answer,) = answers(text, form)
    assert answer["content"] == "Error: add: the argument 'a' must be of type integer"


@pytest.mark.parametrize("form", FORMATS)
def test_a_call_without_arguments(form: CallFormat) -> None:
    assert parse(written(Call("take", {}), form), form).calls == (Call("take", {}),)


ALIKE = [{"hermes", "qwen3_coder", "glm"}, {"mistral", "mistral_v11"}]
ALIKE += [{"deepseek_v3", "deepseek_v31"}]
"""Formats that begin in the same way: a call of the one is a mistake in the other."""


@pytest.mark.parametrize("form", FORMATS)
def test_a_call_of_another_format_is_none(form: CallFormat) -> None:
    for other in set(FORMATS) - {form}:
        calls = read(ONE[other], form).calls
        if any({form, other} <= alike for alike in ALIKE):
            assert [type(call) for call in calls] == [BadCall], other
        else:
            assert calls == (), other


# Round trips -----------------------------------------------------------------------------------

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
WORDS = TEXT.filter(lambda text: not any(mark in text for mark in ("<", "|", "｜")))
NAMES = st.from_regex(r"[a-z][a-z_0-9]{0,8}", fullmatch=True)
SCALARS: dict[str, st.SearchStrategy[Any]] = {
    "string": WORDS,
    "integer": st.integers(),
    "number": st.floats(allow_nan=False, allow_infinity=False),
    "boolean": st.booleans(),
}
NESTED = st.recursive(
    st.one_of(*SCALARS.values(), st.none()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)
KINDS = SCALARS | {
    "array": st.lists(NESTED, max_size=3),
    "object": st.dictionaries(NAMES, NESTED, max_size=3),
}


@given(st.data(), st.sampled_from(FORMATS))
def test_what_is_written_is_read_back_as_it_was(data: st.DataObject, form: CallFormat) -> None:
    """Unicode, nested lists and objects, numbers, truth values and text, as the schema has them."""
    types = data.draw(st.dictionaries(NAMES, st.sampled_from(sorted(KINDS)), max_size=3))
    call = Call("look.up-1", {name: data.draw(KINDS[kind]) for name, kind in types.items()})
    if form == "pythonic":
        call = Call("look.up", call.arguments)
    properties = {name: {"type": kind} for name, kind in types.items()}
    parameters = {"type": "object", "properties": properties}
    tools = [{"type": "function", "function": {"name": call.name, "parameters": parameters}}]
    (found,) = parse(written(call, form), form, tools=tools).calls
    assert found == call
    assert isinstance(found, Call)
    kinds = {name: type(value) for name, value in call.arguments.items()}
    assert {name: type(value) for name, value in found.arguments.items()} == kinds


@given(st.data(), st.sampled_from(FORMATS), st.data())
def test_a_call_that_is_cut_anywhere_raises_nothing(
    data: st.DataObject, form: CallFormat, more: st.DataObject
) -> None:
    text = data.draw(st.sampled_from([ONE[form], TWO.get(form, ONE[form]), WRONG[form]]))
    cut = text[: more.draw(st.integers(0, len(text)))]
    for call in read(cut, form).calls:
        assert isinstance(call, BadCall) or call.name in ("add", "a", "ad", "function")
