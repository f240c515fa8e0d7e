"""A cluster's agent as a process of this machine."""

from __future__ import annotations

import subprocess
import sys


def start_agent(host: str, port: int, key: str, name: str) -> subprocess.Popen[bytes]:
    """Let an agent come to the gate at ``host`` and ``port``, with its key (hex digits).

    It ends when its standard input closes, so also when whoever has started it is gone.
    """
    command = [sys.executable, "-m", "rollpacker.runtime.cluster.agent", host, str(port), name]
    agent = subprocess.Popen(command, stdin=subprocess.PIPE)
    assert agent.stdin is not None
    agent.stdin.write(f"{key}\n".encode())
    agent.stdin.flush()
    return agent
