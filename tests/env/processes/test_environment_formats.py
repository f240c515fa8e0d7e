"""Calls are read in the format that a run's configuration names."""

import asyncio

import pytest
from chat_models import make_tokenizer
from pool_driving import HERE, Driver, pool_of

CALLS = {
    "hermes": '<tool_call>{"name": "double", "arguments": {"number": 21}}</tool_call>',
    "llama3": '{"name": "double", "parameters": {"number": 21}}',
    "qwen3_coder": "<function=double>\n<parameter=number>\n21\n</parameter>\n</function>",
    "glm": "<tool_call>double<arg_key>number</arg_key><arg_value>21</arg_value></tool_call>",
    "mistral": '[TOOL_CALLS] [{"name": "double", "arguments": {"number": 21}}]',
    "mistral_v11": '[TOOL_CALLS]double[ARGS]{"number": 21}',
    "functiongemma": "<start_function_call>call:double{number:21}<end_function_call>",
    "gemma4": "<|tool_call>call:double{number:21}<tool_call|>",
    "deepseek_v3": (
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>double\n"
        '```json\n{"number": 21}\n```<｜tool▁call▁end｜>'
    ),
    "deepseek_v31": '<｜tool▁call▁begin｜>double<｜tool▁sep｜>{"number": 21}<｜tool▁call▁end｜>',
    "harmony": '<|channel|>commentary to=functions.double<|message|>{"number": 21}',
    "pythonic": "[double(number=21)]",
}
ALIKE = {
    "<tool_call>": ("hermes", "qwen3_coder", "glm"),
    "[TOOL_CALLS]": ("mistral", "mistral_v11"),
    "<｜tool▁call▁begin｜>": ("deepseek_v3", "deepseek_v31"),
}
"""Formats that begin in the same way: what the one writes is a mistake in the other."""


QUICK = ("hermes", "glm", "mistral_v11", "harmony")
"""One of each kind of text; the others differ in what is read without processes as well."""


@pytest.mark.parametrize(
    "named",
    [pytest.param(each, marks=() if each in QUICK else pytest.mark.wide) for each in CALLS],
)
def test_calls_are_read_in_the_format_that_is_named(named: str) -> None:
    """Whatever the template writes."""
    template = "qwen2_5" if named == "llama3" else "llama3_1"

    async def talk(driver: Driver) -> None:
        for form, text in CALLS.items():
            answer = (await driver.told(await driver.begun(), text)).answer
            alike = any(named in ALIKE[tag] for tag in ALIKE if text.startswith(tag))
            if alike and form != named:
                assert answer.failed_calls == 1, "both begin with the same tag"
                continue
            assert answer.calls == (form == named)
            assert answer.failed_calls == 0
            assert answer.over == ("" if form == named else "stop")

    async def whole() -> None:
        path = f"{HERE / 'unruly.py'}:double"
        pool = pool_of(path, make_tokenizer(template), kind="tools", call_format=named)
        try:
            pool.wait_ready()
            await talk(Driver(pool))
        finally:
            pool.close()

    asyncio.run(whole())
