"""What single formats have of their own: values, ids, channels, reasoning."""

from __future__ import annotations

import pytest
from call_texts import ADD, GLM, ONE, answers, read

from case_files import read_table
from rollpacker.config.rewards import CallFormat
from rollpacker.env.calls.call import BadCall, Call
from rollpacker.env.calls.calls import parse

# One format each -------------------------------------------------------------------------------


def test_glm_4_7_writes_no_line_breaks() -> None:
    assert read(GLM.replace("\n", ""), "glm").calls == (ADD,)
    text = "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>2<arg_key>b</arg_key><arg_value>3"
    assert read(text, "glm").calls == (ADD,)


def test_mistral_s_ids_are_kept_for_the_answers() -> None:
    listed = '[TOOL_CALLS][{"name": "add", "arguments": {"a": 2, "b": 3}, "id": "Ab1Cd2Ef3"}]'
    for text, form in (
        (listed, "mistral"),
        ('[TOOL_CALLS]add[CALL_ID]Ab1Cd2Ef3[ARGS]{"a": 2, "b": 3}', "mistral_v11"),
    ):
        (answer,) = answers(text, form)
        assert (answer["content"], answer["tool_call_id"]) == ("5", "Ab1Cd2Ef3")
    (odd,) = answers(listed.replace("Ab1Cd2Ef3", "no id"), "mistral")
    assert len(odd["tool_call_id"]) == 9
    twice = '[TOOL_CALLS]add[CALL_ID]Ab1Cd2Ef3[ARGS]{"a": 2, "b": 3}' * 2
    first, second = answers(twice, "mistral_v11")
    assert first["tool_call_id"] != second["tool_call_id"]


@pytest.mark.parametrize("text", ["[TOOL_CALLS]", "[TOOL_CALLS] []", "[TOOL_CALLS] 5"])
def test_a_token_of_mistral_s_without_a_call(text: str) -> None:
    assert isinstance(parse(text, "mistral").calls[0], BadCall)
    assert isinstance(parse(text, "mistral_v11").calls[0], BadCall)


GEMMA_VALUES = read_table(__file__, "GEMMA_VALUES")


@pytest.mark.parametrize("text", GEMMA_VALUES)
def test_values_as_gemma_writes_them(text: str) -> None:
    call = f"<start_function_call>call:f{{{text}}}<end_function_call>"
    assert parse(call, "functiongemma").calls == (Call("f", GEMMA_VALUES[text]),)
    other = f"<|tool_call>call:f{{{text}}}<tool_call|>".replace("<escape>", '<|"|>')
    assert parse(other, "gemma4").calls == (Call("f", GEMMA_VALUES[text]),)


PYTHON_VALUES = {
    """a='it''s', b="say \\"hi\\"\\n" """.replace("''", "\\'"): {"a": "it's", "b": 'say "hi"\n'},
    'a="""two\nlines "quoted" """': {"a": 'two\nlines "quoted" '},
    "a=r'\\d+', b='\\d+'": {"a": "\\d+", "b": "\\d+"},
    "a='\\u00e9\\ud83d\\ude00\\x41'": {"a": "é😀A"},
    "a=True, b=None, c=false, d=[1, -2.5, (3,)], e={'x': {'y': []}}": {
        "a": True,
        "b": None,
        "c": False,
        "d": [1, -2.5, [3]],
        "e": {"x": {"y": []}},
    },
    "a=')', b='[f(x=1)]',": {"a": ")", "b": "[f(x=1)]"},
}


@pytest.mark.parametrize("text", PYTHON_VALUES)
def test_values_as_python_writes_them(text: str) -> None:
    assert parse(f"[f({text})]", "pythonic").calls == (Call("f", PYTHON_VALUES[text]),)
    block = f"I look.\n```tool_code\nf({text})\n```\nSo."
    parsed = parse(block, "pythonic")
    assert parsed.calls == (Call("f", PYTHON_VALUES[text]),)
    assert parsed.content.split() == ["I", "look.", "So."]


@pytest.mark.parametrize(
    "text",
    [
        "```python\n[add(a=2, b=3)]\n```",
        "```tool_code\nadd(a=2, b=3)\nadd(a=2, b=3)",
        "  [add(a=2, b=3)]",
    ],
)
def test_python_may_stand_in_a_fence(text: str) -> None:
    parsed = parse(text, "pythonic")
    assert {*map(str, parsed.calls)} == {str(ADD)}
    assert parsed.content == ""


@pytest.mark.parametrize(
    "call",
    ["add(2, 3)", "add(a=b)", "add(a='x", "add(**{})", "add(a=open('x'))", "add(a=1 + 2)", "add"],
)
def test_what_is_no_call_in_python_is_said_and_never_run(call: str) -> None:
    (bad,) = parse(f"```tool_code\n{call}\n```", "pythonic").calls
    assert isinstance(bad, BadCall)
    assert "NAME(argument=value" in bad.error


@pytest.mark.parametrize(
    "text", ["[1, 2]", "See [this](url).", "[x] done", "```python\nadd(a=2)\n```"]
)
def test_other_brackets_are_no_calls(text: str) -> None:
    assert parse(text, "pythonic") == parse(text, "hermes")


def test_gemma_3_s_json_may_stand_in_a_fence() -> None:
    parsed = parse(f"```json\n{ONE['llama3']}\n```", "llama3")
    assert (parsed.calls, parsed.content) == ((ADD,), "")
    assert parse('```json\n{"name": "Ada", "age": 36}\n```', "llama3").calls == ()


DEEP = read_table(__file__, "DEEP")


@pytest.mark.parametrize("form", DEEP)
@pytest.mark.parametrize("depth", [100, 10_000])
def test_arguments_that_are_nested_too_deep_are_no_call(form: CallFormat, depth: int) -> None:
    (bad,) = parse(DEEP[form] % ("[" * depth + "]" * depth), form).calls
    assert isinstance(bad, BadCall)
    assert "too deep" in bad.error


# Harmony ---------------------------------------------------------------------------------------

THOUGHT = "<|channel|>analysis<|message|>I could say to=functions.add.<|end|><|start|>assistant"
SHOWN = "<think>\nI could say to=functions.add.\n</think>\n\n"


def test_harmony_s_channels() -> None:
    final = "<|channel|>final<|message|>It is 5."
    assert parse(THOUGHT + final, "harmony").content == f"{SHOWN}It is 5."
    assert parse(f"{final}<|return|>", "harmony") == parse("It is 5.", "harmony")
    said = "<|channel|>commentary<|message|>I add.<|end|><|start|>assistant"
    parsed = parse(THOUGHT + said + ONE["harmony"], "harmony")
    assert parsed.calls == (ADD,)
    assert parsed.content == f"{SHOWN}I add."


@pytest.mark.parametrize(
    "header",
    [
        " to=functions.add<|channel|>commentary json<|message|>",
        "<|channel|>commentary to=functions.add<|message|>",
        "<|channel|>analysis to=functions.add code<|message|>",
        "<|channel|>commentary to=add <|constrain|>json<|message|>",
    ],
)
def test_a_recipient_stands_before_the_channel_or_behind_it(header: str) -> None:
    assert parse(f'{header}{{"a": 2, "b": 3}}<|call|>', "harmony").calls == (ADD,)


def test_a_reply_of_harmony_s_ends_with_its_first_call() -> None:
    imagined = "<|start|>functions.add to=assistant<|channel|>commentary<|message|>7<|end|>"
    text = f"{ONE['harmony']}<|call|>{imagined}<|start|>assistant{ONE['harmony']}<|call|>"
    parsed = parse(text, "harmony")
    assert (parsed.calls, parsed.content) == ((ADD,), "")


@pytest.mark.parametrize(
    "text", ["<|channel|>analysis", "<|start|>assistant", "It is 5.<|end|>", ""]
)
def test_a_reply_of_harmony_s_without_a_message_is_text(text: str) -> None:
    assert parse(text, "harmony").content == text


# Reasoning -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "begins", "ends"),
    [("mistral_v11", "[THINK]", "[/THINK]"), ("gemma4", "<|channel>thought\n", "<channel|>")],
)
def test_other_marks_of_reasoning_are_shown_as_most_have_them(
    form: CallFormat, begins: str, ends: str
) -> None:
    text = f"{begins}I may call {ONE[form]}{ends}It is 5."
    parsed = parse(text, form)
    assert parsed.calls == ()
    assert parsed.content.startswith("<think>")
    assert parsed.content.endswith("</think>It is 5.")
    assert parse(f"{text}{ONE[form]}", form).calls == (ADD,)
    inside = parse(f"Hm.{ONE[form]}{ends}{ONE[form]}", form, reasons=True)
    assert inside.calls == (ADD,)
    assert inside.content == f"Hm.{ONE[form]}</think>"
