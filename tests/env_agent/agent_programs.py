"""Programs that speak OpenAI's chat API with nothing but the standard library, and their driver."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import textwrap
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from rollpacker.config import EnvironmentConfig
from rollpacker.env.agent.environment import AgentEnvironment
from rollpacker.env.agent.factory import AgentFactory
from rollpacker.env.base import Message

CLIENT = '''
import json, os, socket, sys

ROW = json.loads(sys.stdin.readline())
HOST, PORT = os.environ["OPENAI_BASE_URL"].split("/")[2].split(":")
KEY = os.environ["OPENAI_API_KEY"]


def begin(body, key=KEY, method="POST", path="/v1/chat/completions", more=""):
    """A connection on which a request was sent; text goes as it is."""
    data = (body if isinstance(body, str) else json.dumps(body)).encode()
    sock = socket.create_connection((HOST, int(PORT)))
    head = f"{method} {path} HTTP/1.1\\r\\nHost: x\\r\\nAuthorization: Bearer {key}\\r\\n"
    head += f"{more}Connection: close\\r\\nContent-Length: {len(data)}\\r\\n\\r\\n"
    sock.sendall(head.encode() + data)
    return sock


def end(sock):
    """The status and the body of the response."""
    data = b""
    while part := sock.recv(65536):
        data += part
    sock.close()
    head, _, body = data.partition(b"\\r\\n\\r\\n")
    return int(head.split()[1]), body.decode()


def post(body, **more):
    return end(begin(body, **more))


def ask(messages, **more):
    """The model's message."""
    status, body = post({"model": "m", "messages": messages, **more})
    if status != 200:
        raise SystemExit(f"{status} {json.loads(body)['error']['message']}")
    return json.loads(body)["choices"][0]["message"]


def user(text):
    return {"role": "user", "content": text}


def reward(value=None, **more):
    print(json.dumps({"reward": value, **more}))
'''

TIMEOUT_S = 60.0
"""Of anything that is expected to happen; long, since machines are busy."""


def reply(text: str, *calls: tuple[str, dict[str, Any]], bad: int = 0) -> Message:
    """What the model said, as ``env/messages.py`` makes it."""
    message: Message = {"role": "assistant", "content": text}
    if calls or bad:
        message["text"] = f"{text}{calls}{bad}"
    if calls:
        message["tool_calls"] = [
            {
                "id": "same00000",
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(arguments)},
            }
            for name, arguments in calls
        ]
    if bad:
        message["bad_calls"] = [{"place": i, "error": "no JSON"} for i in range(bad)]
    return message


def write(folder: Path, program: str) -> list[str]:
    """``environment.path`` of a program; it has ``ask`` and the rest of ``CLIENT``."""
    (folder / "client.py").write_text(CLIENT)
    path = folder / "program.py"
    path.write_text("from client import *\n" + textwrap.dedent(program))
    # Without site-packages it starts in a fraction of the time.
    return [sys.executable, "-S", "-E", str(path)]


@asynccontextmanager
async def opened(path: list[str], **more: Any) -> AsyncIterator[AgentFactory]:
    factory = AgentFactory(EnvironmentConfig(kind="agent", path=path, **more))
    await factory.open()
    try:
        yield factory
    finally:
        await factory.close()


def run(path: list[str], talk: Callable[[AgentEnvironment], Awaitable[Any]], **more: Any) -> Any:
    """What ``talk`` returns of an episode, which is closed behind it."""

    async def episode() -> Any:
        async with asyncio.timeout(TIMEOUT_S), opened(path, **more) as factory:
            environment = factory.make()
            try:
                return await talk(environment)
            finally:
                await environment.close()

    return asyncio.run(episode())


def descriptors() -> int:
    gc.collect()  # what others have left would be closed meanwhile
    return len(os.listdir("/proc/self/fd"))
