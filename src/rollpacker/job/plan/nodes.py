"""The machines that a job's configuration asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollpacker.config import RunConfig
from rollpacker.runtime.cluster.local import Start, start_processes
from rollpacker.runtime.cluster.nodes import Nodes, ThisMachine

if TYPE_CHECKING:
    from rollpacker.runtime.cluster.cluster import Launcher


def nodes_of(
    config: RunConfig, launcher: Launcher | None = None, start: Start = start_processes
) -> Nodes:
    """This machine, or those of a cluster.

    Args:
        config: the run's.
        launcher: starts agents on its nodes; None where Ray does, or nobody.
        start: starts workers there.

    Raises ``ValueError``.
    """
    if not config.cluster.address:
        if config.devices.nodes > 1:
            raise ValueError(
                f"devices.nodes={config.devices.nodes} needs cluster.address: of the Ray cluster "
                "that has them, or 'mux'"
            )
        return ThisMachine(config, start)
    if launcher is None and config.cluster.address == "mux":
        raise ValueError(
            "cluster.address=mux is for runs that RollMux's agents start: rollpacker mux submit"
        )
    from rollpacker.runtime.cluster.cluster import RunNodes
    from rollpacker.runtime.cluster.ray_launcher import RayLauncher

    return RunNodes(config, launcher or RayLauncher(config), start)
