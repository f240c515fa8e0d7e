"""The machines that a job's configuration asks for."""

from __future__ import annotations

from rollpacker.config import RunConfig
from rollpacker.runtime.local import Start, start_processes
from rollpacker.runtime.nodes import Nodes, ThisMachine


def nodes_of(config: RunConfig, start: Start = start_processes) -> Nodes:
    """This machine, or those of a cluster; ``start`` starts workers there.

    Raises ``ValueError``.
    """
    if not config.cluster.address:
        if config.devices.nodes > 1:
            raise ValueError(
                f"devices.nodes={config.devices.nodes} needs cluster.address, of the Ray cluster "
                "that has them"
            )
        return ThisMachine(config, start)
    from rollpacker.runtime.cluster import Cluster
    from rollpacker.runtime.ray_launcher import RayLauncher

    return Cluster(config, RayLauncher(config), start)
