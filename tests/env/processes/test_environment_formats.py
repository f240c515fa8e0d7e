"""Calls are read in the format that a run's configuration names, whatever the template writes."""

import asyncio

from chat_models import make_tokenizer
from pool_driving import HERE, Driver, pool_of


def test_calls_are_read_in_the_format_that_is_named() -> None:
    async def talk() -> None:
        driver = Driver(pool)
        call = '[TOOL_CALLS]double[ARGS]{"number": 21}'
        answer = (await driver.told(await driver.begun(), call)).answer
        assert (answer.calls, answer.failed_calls, answer.over) == (1, 0, "")
        other = '{"name": "double", "parameters": {"number": 21}}'
        answer = (await driver.told(await driver.begun(), other)).answer
        assert (answer.calls, answer.failed_calls, answer.over) == (0, 0, "stop")

    tokenizer = make_tokenizer("llama3_1")
    pool = pool_of(
        f"{HERE / 'unruly.py'}:double", tokenizer, kind="tools", call_format="mistral_v11"
    )
    try:
        pool.wait_ready()
        asyncio.run(talk())
    finally:
        pool.close()
