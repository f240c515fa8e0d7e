"""NVIDIA's Multi-Process Service, with which judge and actor compute on one GPU at a time.

Without it the GPU switches between the processes. The daemon must run before the processes that
share the GPU touch it; with the default folders they find it by themselves.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

_CONTROL = "nvidia-cuda-mps-control"
_TIMEOUT_S = 30.0


class MpsError(RuntimeError):
    """The daemon cannot be started or stopped; the message says why and what to do."""


def environment(folder: Path | None) -> dict[str, str]:
    """Variables of the daemon and its clients; with None the driver's default folders."""
    if folder is None:
        return {}
    return {
        "CUDA_MPS_PIPE_DIRECTORY": str(folder / "pipe"),
        "CUDA_MPS_LOG_DIRECTORY": str(folder / "log"),
    }


def is_running(folder: Path | None = None) -> bool:
    """Whether a daemon answers. Raises ``MpsError`` where MPS is not installed."""
    return _call([_program()], folder, commands="get_server_list\n").returncode == 0


def start(folder: Path | None = None) -> bool:
    """Start the daemon; false when one runs already, which is then used and left alone.

    Raises ``MpsError`` where MPS is not installed or may not be started.
    """
    if is_running(folder):
        return False
    for place in environment(folder).values():
        Path(place).mkdir(parents=True, exist_ok=True)
    done = _call([_program(), "-d"], folder)
    if done.returncode != 0 or not is_running(folder):
        raise MpsError(
            f"CUDA MPS cannot be started ({done.stdout}): it may need root or a GPU in default "
            "compute mode; go on without it, judge and actor then take turns on the GPU"
        )
    return True


def stop(folder: Path | None = None) -> None:
    """Stop the daemon. Raises ``MpsError`` when it does not answer."""
    done = _call([_program()], folder, commands="quit\n")
    if done.returncode != 0:
        raise MpsError(f"CUDA MPS cannot be stopped ({done.stdout}): is it another user's?")


def _program() -> str:
    program = shutil.which(_CONTROL)
    if program is None:
        raise MpsError(f"no {_CONTROL} on PATH: it comes with NVIDIA's driver (Linux only)")
    return program


def _call(
    command: list[str], folder: Path | None, commands: str = ""
) -> subprocess.CompletedProcess[str]:
    # The output goes to a file: the daemon would hold a pipe open, and we would wait for its end.
    with tempfile.TemporaryFile("w+") as output:
        try:
            done = subprocess.run(
                command,
                input=commands,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                env=os.environ | environment(folder),
                timeout=_TIMEOUT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise MpsError(f"{_CONTROL} cannot be run: {error}") from error
        output.seek(0)
        done.stdout = " ".join(output.read().split())[:300] or f"exit code {done.returncode}"
    return done
