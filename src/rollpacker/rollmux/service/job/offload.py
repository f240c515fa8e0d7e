"""What of a job is on its devices, and what waits in host memory while others have them."""

from __future__ import annotations

import time
from collections.abc import Mapping

from rollpacker.core.types import Phase
from rollpacker.runtime.step.phase_nodes import Tenant


class Residence:
    """Of one job; at first all of it is on its devices.

    Args:
        tenant: leaves them and comes back.
        promised_gb: host memory that the job may keep on a node, by the kind of node.
    """

    def __init__(self, tenant: Tenant, promised_gb: Mapping[Phase, float]) -> None:
        self._tenant = tenant
        self._promised_gb = promised_gb
        self._there: set[Phase] = {"rollout", "train"}

    async def begin(self, phase: Phase) -> float:
        """Bring back what the phase needs, and that alone; the seconds that it took.

        Raises as ``leave`` does.
        """
        if self._there == {phase}:
            return 0.0
        begun = time.monotonic()
        for other in sorted(self._there - {phase}):
            await self._offload(other)
        if phase not in self._there:
            await self._tenant.onload(phase)
            self._there.add(phase)
        return time.monotonic() - begun

    async def leave(self) -> float:
        """Leave all devices; the seconds that it took.

        Raises ``ValueError`` where more would stay in host memory than was promised.
        """
        begun = time.monotonic()
        for phase in sorted(self._there):
            await self._offload(phase)
        return time.monotonic() - begun

    async def _offload(self, phase: Phase) -> None:
        kept_gb = await self._tenant.offload(phase) / 2**30
        self._there.discard(phase)
        if kept_gb > self._promised_gb[phase]:
            raise ValueError(
                f"mux.{phase}_memory_gb={self._promised_gb[phase]:g} is less than the "
                f"{kept_gb:.3g} GB of states that the job keeps on a {phase} node between two "
                "phases: raise it"
            )
