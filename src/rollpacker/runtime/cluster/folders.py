"""Commands that name a folder of the driver's, for workers of nodes that may not see its disk."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

from rollpacker.runtime.cluster.nodes import Nodes
from rollpacker.runtime.messages import messages as msg

Kept = msg.Save | msg.Load


async def for_nodes(machines: Nodes, command: Kept, nodes: Collection[int]) -> dict[int, Kept]:
    """The command for each of these nodes, with the folder as it is called there.

    Raises ``OSError`` where a folder cannot be brought to a node.
    """
    folder, way = Path(command.folder), machines.place
    if isinstance(command, msg.Load):
        way = machines.bring
    return {node: replace(command, folder=str(await way(node, folder))) for node in nodes}


async def gather_in(machines: Nodes, command: Kept, given: Mapping[int, Kept]) -> None:
    """What was saved on other nodes' disks comes to the driver's. Raises ``OSError``."""
    if isinstance(command, msg.Save):
        for node, there in given.items():
            if there.folder != command.folder:
                await machines.collect(node, Path(there.folder), Path(command.folder))
