"""The fork server: forks a child for every execution. It passes descriptors on and never reads
them.

Over a SEQPACKET socket it receives ``REQUEST`` with the child's descriptors. It answers twice: the
child's pidfd, then ``EXIT`` when the child has ended.
"""

from __future__ import annotations

import fcntl
import gc
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
from typing import NoReturn

from . import harness, preload
from .child import RESULT, Lockdown, become_program, lockdown_of
from .lockdown import kernel
from .lockdown.isolate import isolate
from .rehearsal import rehearse

REQUEST = struct.Struct("<QQQQ")
"""A child's limits (bytes of memory, CPU seconds, bytes of output), and the bytes of its job."""

EXIT = struct.Struct("<iddQ")
"""Wait status and CPU seconds of the child, CPU seconds of the fork server since it started, and
the child's peak memory in KiB."""

DESCRIPTORS = 5  # job, standard input, output and error, result

_STACK_BYTES = 112 << 20
_LIMITS = ((resource.RLIMIT_NOFILE, 32), (resource.RLIMIT_NPROC, 0))


def main() -> NoReturn:
    """Serve the socket named on the command line until it closes."""
    options = json.loads(sys.argv[1])
    sock = _socket(options["socket"])
    try:
        lockdown = _prepare(options)
    except (OSError, ValueError) as error:
        sock.send(json.dumps({"error": str(error)}).encode())
        os._exit(1)
    sock.send(b"{}")
    try:
        _serve(sock, lockdown)
    finally:
        os._exit(0)


def _socket(given: int) -> socket.socket:
    # Move the socket up, so that the places of a child's own descriptors below it are taken.
    descriptor = fcntl.fcntl(given, fcntl.F_DUPFD_CLOEXEC, RESULT + 1)
    os.dup2(0, RESULT)
    if given != RESULT:
        os.close(given)
    return socket.socket(fileno=descriptor)


def _prepare(options: dict[str, object]) -> Lockdown:
    _expendable()
    os.chdir("/")
    # Room for the recursion of programs. The hard limit stays, because they may raise theirs.
    hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
    if hard == resource.RLIM_INFINITY or hard > _STACK_BYTES:
        resource.setrlimit(resource.RLIMIT_STACK, (_STACK_BYTES, hard))
    level = str(options["level"])
    uid = options["uid"]
    isolate(level, uid if isinstance(uid, int) else None)
    kernel.no_new_privileges()
    lockdown, filter_calls = lockdown_of(level)
    kernel.set_dumpable(False)
    preload.run(level)
    harness.prepare()
    rehearse()
    os.environ.clear()
    sys.argv[:] = [""]
    sys.path[:] = [path for path in sys.path if path != options["folder"]]
    gc.collect()
    gc.freeze()
    filter_calls()
    return lockdown


def _expendable() -> None:
    # Short of memory, the kernel should end a sandbox rather than the trainer.
    try:
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
            file.write("1000")
    except OSError:
        return


def _serve(sock: socket.socket, lockdown: Lockdown) -> None:
    zygote = os.getpid()
    while True:
        request, descriptors, _, _ = socket.recv_fds(sock, REQUEST.size, DESCRIPTORS)
        if not request:
            return
        memory, cpu_s, output, size = REQUEST.unpack(request)
        limits = [
            *((resource.RLIMIT_AS, memory), (resource.RLIMIT_CPU, cpu_s)),
            *((resource.RLIMIT_FSIZE, output), *_LIMITS),
        ]
        pid = kernel.fork()
        if pid == 0:
            become_program(descriptors, limits, size, lockdown, zygote)
        for descriptor in descriptors:
            os.close(descriptor)
        pidfd = os.pidfd_open(pid)
        try:
            socket.send_fds(sock, [b"p"], [pidfd])
            _wait(sock, pidfd)
        finally:
            # The child is not reaped yet, so its pid is still its own.
            os.kill(pid, signal.SIGKILL)
            _, status, usage = os.wait4(pid, 0)
            os.close(pidfd)
        child_s = usage.ru_utime + usage.ru_stime
        sock.send(EXIT.pack(status, child_s, time.process_time(), usage.ru_maxrss))


def _wait(sock: socket.socket, pidfd: int) -> None:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    poll.register(sock, select.POLLRDHUP | select.POLLHUP)
    poll.poll()
