"""What a child has used and waited for, read from outside."""

from __future__ import annotations

import select
import time
from pathlib import Path

_CPUCLOCK_SCHED = 2


class ChildClock:
    """CPU time and waiting time of the process of a pidfd, all its threads included.

    A pid may be reused once its process was reaped, so what is read counts only if the process
    was alive afterwards.
    """

    def __init__(self, pidfd: int) -> None:
        self._poll = select.poll()
        self._poll.register(pidfd, select.POLLIN)
        self._pid = _pid(pidfd)

    def cpu_s(self) -> float | None:
        """CPU seconds so far; None when the process has ended."""
        if self._pid <= 0:
            return None
        try:
            # The kernel's numbering of the clocks of processes: clock_getcpuclockid(3).
            used = time.clock_gettime((~self._pid << 3) | _CPUCLOCK_SCHED)
        except OSError:
            return None
        return None if self._poll.poll(0) else used

    def waited_s(self) -> float:
        """Seconds spent ready to run, without a core; 0 where the kernel does not tell."""
        try:
            fields = Path(f"/proc/{self._pid}/schedstat").read_text(encoding="ascii").split()
        except OSError:
            return 0.0
        return 0.0 if self._poll.poll(0) or len(fields) < 2 else int(fields[1]) / 1e9


def _pid(pidfd: int) -> int:
    """The process id here, whatever it is in the zygote's namespace; -1 when it has ended."""
    for line in Path(f"/proc/self/fdinfo/{pidfd}").read_text(encoding="ascii").splitlines():
        if line.startswith("Pid:"):
            return int(line.split()[1])
    return -1
