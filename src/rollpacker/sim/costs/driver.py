"""What the driver and the graders take from workers whose cores they share."""

from __future__ import annotations

from pydantic import Field

from rollpacker.config import Config


class DriverCosts(Config):
    """CPU seconds of the driver and the grading processes, on the cores that workers use too.

    Each is one process more that wants to run. While a core is free it costs the workers nothing;
    while none is, all cores give their part.
    """

    cores: int = Field(ge=1)
    """Of the machine."""
    ended_s: float = Field(ge=0.0)
    """For each response that has ended or left its engine."""
    graded_s: float = Field(ge=0.0)
    """For each reward, its computation included."""

    def delay_s(self, busy: int, cpu_s: float) -> float:
        """Seconds by which ``cpu_s`` of such work put off each of ``busy`` workers."""
        return cpu_s / self.cores if busy >= self.cores else 0.0
