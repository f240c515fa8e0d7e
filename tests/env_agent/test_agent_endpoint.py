"""The server of OpenAI's chat API, asked over a connection."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress

import pytest

from rollpacker.env.agent import connection
from rollpacker.env.agent import endpoint as endpoint_module
from rollpacker.env.agent.endpoint import Endpoint
from rollpacker.open_files import allow_files


async def answered(endpoint: Endpoint, key: str, body: bytes) -> tuple[int, str]:
    """The status and the error of a response; the connection stays open for the next request."""
    port = int(endpoint.url.split(":")[2].split("/")[0])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
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
        (b'{"messages": [{"role": "user", "content": "caf\xe9"}]}', "the body is no JSON: 'utf-8'"),
        (b'{"messages": [{"role": "user", "caf\xe9": "x"}]}', "the body is no JSON: 'utf-8'"),
        (b"\xff", "the body is no JSON: "),
        (b'{"messages": [', "the body is no JSON: "),
        (b"[" * 100_000, "the body is nested too deep"),
        (b"[]", "the body is no JSON object"),
    ],
)
def test_a_body_that_cannot_be_read_is_refused_and_the_session_goes_on(
    body: bytes, why: str
) -> None:
    async def talk() -> None:
        endpoint = Endpoint()
        await endpoint.open()
        try:
            key, session = endpoint.begin()
            status, said = await answered(endpoint, key, body)
            assert (status, session.take()) == (400, None)
            assert said.startswith(why)
        finally:
            await endpoint.close()

    asyncio.run(talk())


def test_nothing_is_read_of_who_has_no_key() -> None:
    async def refused() -> bytes:
        endpoint = Endpoint()
        await endpoint.open()
        try:
            port = int(endpoint.url.split(":")[2].split("/")[0])
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            head = "POST /v1/chat/completions HTTP/1.1\r\nAuthorization: Bearer sk-guessed\r\n"
            writer.write(f"{head}Content-Length: 30000000\r\n\r\n".encode())
            async with asyncio.timeout(10.0):
                said = await reader.read()  # to its end: the connection is closed
            writer.close()
            return said
        finally:
            await endpoint.close()

    assert asyncio.run(refused()).startswith(b"HTTP/1.1 401 ")


async def refused(endpoint: Endpoint) -> str:
    """What a session's program is told of a body that is none: that it is served."""
    key, _ = endpoint.begin()
    return (await answered(endpoint, key, b"[]"))[1]


def test_strangers_keep_no_program_out() -> None:
    allow_files(5000)  # both ends are here

    async def talk() -> None:
        endpoint = Endpoint()
        await endpoint.open()
        port = int(endpoint.url.split(":")[2].split("/")[0])
        ends = []
        try:
            for number in range(2000):
                ends.append(await asyncio.open_connection("127.0.0.1", port))
                if number % 100 == 0:
                    assert await refused(endpoint) == "the body is no JSON object"
            async with asyncio.timeout(10.0):
                with suppress(ConnectionError):
                    assert await ends[0][0].read() == b""  # it had to make way
            assert len(endpoint._places) < 100
            assert await refused(endpoint) == "the body is no JSON object"
        finally:
            for _, writer in ends:
                writer.close()
            await endpoint.close()

    asyncio.run(talk())


def test_who_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_HEAD_S", 0.05)

    async def talk() -> None:
        endpoint = Endpoint()
        await endpoint.open()
        port = int(endpoint.url.split(":")[2].split("/")[0])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\n")
        async with asyncio.timeout(10.0):
            with suppress(ConnectionError):
                assert await reader.read() == b""
        writer.close()
        await endpoint.close()

    asyncio.run(talk())


def test_what_a_program_has_left_ends_with_its_session() -> None:
    async def talk() -> None:
        endpoint = Endpoint()
        await endpoint.open()
        key, _ = endpoint.begin()
        port = int(endpoint.url.split(":")[2].split("/")[0])
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
        await endpoint.close()

    asyncio.run(talk())


def test_what_fails_in_an_answer_ends_that_request_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> object:
        raise KeyError("ours")

    async def talk() -> None:
        endpoint = Endpoint()
        await endpoint.open()
        with monkeypatch.context() as patched:
            patched.setattr(endpoint_module, "_body", broken)
            assert (await refused(endpoint)).startswith("this request could not be answered")
        assert await refused(endpoint) == "the body is no JSON object"
        await endpoint.close()

    asyncio.run(talk())
    assert "KeyError: 'ours'" in caplog.text
