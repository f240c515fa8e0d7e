"""The cluster's clock: monotonic, independent of the wall clock, and continued after restarts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path


def boot_id() -> str:
    """Id of this boot of the machine (empty if unknown)."""
    file = Path("/proc/sys/kernel/random/boot_id")
    return file.read_text(encoding="utf-8").strip() if file.exists() else ""


class ClusterClock:
    """Seconds since the store was made, on the monotonic clock.

    Downtime counts while the machine stays up. After a reboot, time continues from the last entry,
    since the wall clock may jump.

    Args:
        saved: the ``clock_*`` values of the store's meta.
        last: time of the last entry.
    """

    def __init__(
        self,
        saved: Mapping[str, str],
        last: float,
        monotonic: Callable[[], float] = time.monotonic,
        boot: str | None = None,
    ) -> None:
        self._monotonic = monotonic
        self._boot = boot_id() if boot is None else boot
        offset = last - monotonic()
        if self._boot and saved.get("clock_boot") == self._boot:
            offset = max(offset, float(saved["clock_offset"]))
        self._offset = offset

    def now(self) -> float:
        return round(self._offset + self._monotonic(), 6)

    def save(self) -> dict[str, str]:
        return {"clock_boot": self._boot, "clock_offset": repr(self._offset)}
