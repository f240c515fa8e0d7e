"""The server of OpenAI's chat API, asked over a connection."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from fuzzing import amiss, torn
from rollpacker.env.agent.server import endpoint as endpoint_module
from rollpacker.env.agent.server import http
from rollpacker.env.agent.server.endpoint import Endpoint
from rollpacker.processes.children import allow_files
from waiting import in_loop


@asynccontextmanager
async def opened() -> AsyncIterator[tuple[Endpoint, int]]:
    """An endpoint and its port."""
    endpoint = Endpoint()
    await endpoint.open()
    try:
        yield endpoint, port_of(endpoint)
    finally:
        await endpoint.close()


def port_of(endpoint: Endpoint) -> int:
    return int(endpoint.url.split(":")[2].split("/")[0])


async def answered(endpoint: Endpoint, key: str, body: bytes) -> tuple[int, str]:
    """The status and the error of a response; the connection stays open for the next request."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port_of(endpoint))
    head = f"POST /v1/chat/completions HTTP/1.1\r\nAuthorization: Bearer {key}\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    async with asyncio.timeout(10.0):
        status = int((await reader.readline()).split()[1])
        length = 0
        while (line := await reader.readline()) != b"\r\n":
            name, _, value = line.decode().partition(":")
            length = int(value) if name.lower() == "content-length" else length
        text = await reader.readexactly(length)
    writer.close()
    return status, json.loads(text)["error"]["message"]


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b'{"messages": [{"role": "user", "content": "caf\xe9"}]}', "the body is not JSON: "),
        (b'{"messages": [{"role": "user", "caf\xe9": "x"}]}', "the body is not JSON: "),
        (b"\xff", "the body is not JSON: "),
        (b'{"messages": [', "the body is not JSON: "),
        (b"[" * 100_000, "the body is nested too deep"),
        (b"[]", "the body is not a JSON object"),
    ],
)
@in_loop
async def test_a_body_that_cannot_be_read_is_refused_and_the_session_goes_on(
    body: bytes, why: str
) -> None:
    async with opened() as (endpoint, _):
        key, session = endpoint.begin()
        status, said = await answered(endpoint, key, body)
        assert (status, session.take()) == (400, None)
        assert said.startswith(why)


def test_nothing_is_read_of_who_has_no_key() -> None:
    async def refused() -> bytes:
        async with opened() as (_, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            head = "POST /v1/chat/completions HTTP/1.1\r\nAuthorization: Bearer sk-guessed\r\n"
            writer.write(f"{head}Content-Length: 30000000\r\n\r\n".encode())
            async with asyncio.timeout(10.0):
                said = await reader.read()  # to its end: the connection is closed
            writer.close()
            return said

    assert asyncio.run(refused()).startswith(b"HTTP/1.1 401 ")


async def refused(endpoint: Endpoint) -> str:
    """What a session's program is told of a body that is none: that it is served."""
    key, _ = endpoint.begin()
    return (await answered(endpoint, key, b"[]"))[1]


@in_loop
async def test_strangers_keep_no_program_out() -> None:
    allow_files(5000)  # both ends are here
    ends = []
    async with opened() as (endpoint, port):
        for number in range(2000):
            ends.append(await asyncio.open_connection("127.0.0.1", port))
            if number % 100 == 0:
                assert await refused(endpoint) == "the body is not a JSON object"
        async with asyncio.timeout(10.0):
            with suppress(ConnectionError):
                assert await ends[0][0].read() == b""  # it had to make way
        assert len(endpoint._places) < 100
        assert await refused(endpoint) == "the body is not a JSON object"
        for _, writer in ends:
            writer.close()


@in_loop
async def test_who_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "_HEAD_S", 0.05)
    async with opened() as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\n")
        async with asyncio.timeout(10.0):
            with suppress(ConnectionError):
                assert await reader.read() == b""
        writer.close()


@in_loop
async def test_what_a_program_has_left_ends_with_its_session() -> None:
    async with opened() as (endpoint, port):
        key, _ = endpoint.begin()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = f"GET /v1/models HTTP/1.1\r\nAuthorization: Bearer {key}\r\n\r\n"
        writer.write(head.encode())
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        endpoint.end(key)
        async with asyncio.timeout(10.0):
            with suppress(ConnectionError):
                await reader.read()
        assert not len(endpoint._places)
        writer.close()


def test_what_fails_in_an_answer_ends_that_request_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> object:
        raise KeyError("ours")

    async def talk() -> None:
        async with opened() as (endpoint, _):
            with monkeypatch.context() as patched:
                patched.setattr(endpoint_module, "_body", broken)
                assert (await refused(endpoint)).startswith("this request could not be answered")
            assert await refused(endpoint) == "the body is not a JSON object"

    asyncio.run(talk())
    assert "KeyError: 'ours'" in caplog.text


REQUEST = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": [{"type": "text", "text": "6 * 7?"}]},
        {"role": "assistant", "content": "", "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        ]},
        {"role": "tool", "tool_call_id": "c", "content": "42"},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    "n": 1, "stream": False, "temperature": 0.5, "stream_options": {"include_usage": True},
}  # fmt: skip


def fuzzed(rng: random.Random, key: str) -> bytes:
    """A request of a program with this key, or what looks like one."""
    body = amiss(REQUEST, rng) if rng.random() < 0.8 else REQUEST
    try:
        text = json.dumps(body, default=lambda each: each.decode("latin-1"))
    except RecursionError:
        text = "[" * 5000
    data = text.encode("utf-8", "surrogatepass")
    data = torn(data, rng) if rng.random() < 0.1 else data
    path = rng.choice(("/v1/chat/completions",) * 8 + ("/v1/models", "/v1/completions", "/%0a"))
    head = f"POST {path} HTTP/1.1\r\nAuthorization: Bearer {key}\r\nConnection: close\r\n".encode()
    if rng.random() < 0.2:
        chunk = f"{len(data):x}\r\n".encode() + data + b"\r\n0\r\n\r\n"
        whole = head + b"Transfer-Encoding: chunked\r\n\r\n" + chunk
    else:
        whole = head + f"Content-Length: {len(data)}\r\n\r\n".encode() + data
    return torn(whole, rng) if rng.random() < 0.2 else whole


@pytest.mark.parametrize(
    ("seed", "count"), [(34, 300), pytest.param(35, 5000, marks=pytest.mark.slow)]
)
def test_requests_of_any_kind(seed: int, count: int, caplog: pytest.LogCaptureFixture) -> None:
    """Each is answered or its connection ends; the session of another program goes on."""
    rng, statuses = random.Random(seed), Counter[bytes]()

    async def talk() -> None:
        async with opened() as (endpoint, port):
            other, quiet = endpoint.begin()
            for _ in range(count):
                key, session = endpoint.begin()
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(fuzzed(rng, key))
                reading = asyncio.create_task(reader.read(65536))
                for _ in range(5):  # a torn one waits for its end
                    await asyncio.wait({reading}, timeout=0.002)
                    if session.take() is not None:
                        session.answer({"role": "assistant", "content": "42"})
                        async with asyncio.timeout(10.0):
                            await reading
                writer.close()
                async with asyncio.timeout(10.0):
                    await asyncio.wait({reading})
                statuses[reading.result()[9:12] if not reading.exception() else b""] += 1
                endpoint.end(key)
                assert not quiet.waiting
            assert await answered(endpoint, other, b"[]") == (400, "the body is not a JSON object")

    asyncio.run(talk())
    print(f"\nseed {seed}: {count} requests of agents' programs: {dict(statuses)}")
    assert not caplog.records, "none failed on our side"
    assert min(statuses[status] for status in (b"200", b"400", b"")) > 10
