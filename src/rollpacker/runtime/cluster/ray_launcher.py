"""Agents on the nodes of a Ray cluster. Nothing else of a run goes through Ray, as a call costs its
driver ten times a socket's message."""

# pyright: reportMissingImports=false, reportUntypedFunctionDecorator=false

from __future__ import annotations

import asyncio
import math
import signal
import socket
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rollpacker.config import RunConfig
from rollpacker.processes.children import OUTSIDE
from rollpacker.runtime.ipc.rendezvous import start_agent
from rollpacker.runtime.messages.faults import NoRoomError

_ANSWER_S = 10.0
"""Seconds for the head node to answer."""
_PLACING_S = 60.0
"""Seconds for the cluster to find room."""
_LOOK_S = 1.0
"""Seconds between two checks for a replacement node."""


class RayLauncher:
    """A placement group with a bundle for each node, and an actor in each that runs an agent.
    Raises ``ValueError`` if there is no such cluster, or no Ray."""

    def __init__(self, config: RunConfig) -> None:
        try:
            import ray
        except ImportError:
            raise ValueError(
                f"cluster.address={config.cluster.address} needs Ray: pip install 'rollpacker[ray]'"
            ) from None
        self._config = config
        self._ray: Any = ray
        self._group: Any = None
        self._bundle: dict[str, float] = {}
        self._agents: list[Any] = []
        self._owned = not ray.is_initialized()
        if self._owned:
            _connect(ray, config.cluster.address)

    @property
    def host(self) -> str:
        return self._ray.util.get_node_ip_address()

    async def launch(self, address: tuple[str, int], key: bytes, names: Sequence[str]) -> None:
        """Start an agent on its own node for each name. Raises ``NoRoomError`` after a minute."""
        from ray.util.placement_group import placement_group

        self._bundle = bundle = self._needed()
        self._group = placement_group([bundle] * len(names), strategy="STRICT_SPREAD")
        placed, _ = await asyncio.to_thread(
            self._ray.wait, [self._group.ready()], timeout=_PLACING_S
        )
        if not placed:
            raise NoRoomError(self._no_room(len(names), bundle))
        for number, name in enumerate(names):
            self._agents.append(self._actor(number))
            self._agents[number].run.remote(*address, key.hex(), name)

    def _actor(self, number: int) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy as Within

        place = Within(self._group, placement_group_bundle_index=number)
        options = self._ray.remote(_Agent).options(
            scheduling_strategy=place,
            num_cpus=self._bundle["CPU"],
            num_gpus=self._bundle.get("GPU", 0),
            max_restarts=0,
        )
        return options.remote()

    async def replace(self, address: tuple[str, int], key: bytes, number: int, name: str) -> None:
        """Start an agent again, on the node to which Ray moves the ``number``-th's bundle."""
        while True:
            self._ray.kill(self._agents[number])  # an unreachable one may hold devices
            agent = self._agents[number] = self._actor(number)
            if await self._begun(agent):
                break
        agent.run.remote(*address, key.hex(), name)

    async def _begun(self, actor: Any) -> bool:
        """Wait for its node. False if the node is gone, which Ray learns later than the driver."""
        begun = actor.__ray_ready__.remote()
        while not self._ray.wait([begun], timeout=0)[0]:
            await asyncio.sleep(_LOOK_S)
        try:
            self._ray.get(begun)
        except self._ray.exceptions.RayError:
            await asyncio.sleep(_LOOK_S)
            return False
        return True

    def _needed(self) -> dict[str, float]:
        devices = self._config.devices
        if not devices.per_node:
            raise ValueError(
                "devices.per_node is missing: set the number of devices on each node of the cluster"
            )
        if devices.emulate is not None:
            return {"CPU": 1.0}
        gpus = any("GPU" in node["Resources"] for node in self._nodes())
        if devices.kind == "cuda" or (devices.kind == "auto" and gpus):
            return {"GPU": float(math.ceil(devices.per_node / devices.per_gpu)), "CPU": 1.0}
        return {"CPU": float(devices.per_node * devices.threads)}

    def _nodes(self) -> list[dict[str, Any]]:
        return [node for node in self._ray.nodes() if node["Alive"]]

    def _no_room(self, count: int, bundle: dict[str, float]) -> str:
        wanted = " and ".join(f"{amount:g} {kind}" for kind, amount in bundle.items())
        have = Counter(
            " and ".join(f"{node['Resources'].get(kind, 0):g} {kind}" for kind in bundle)
            for node in self._nodes()
        )
        nodes = ", ".join(f"{n} with {what}" for what, n in sorted(have.items()))
        return (
            f"the Ray cluster has no room within {_PLACING_S:.0f} s for devices.nodes={count}, "
            f"each on its own node with {wanted} free. The cluster has: {nodes}"
        )

    def close(self) -> None:
        for agent in self._agents:
            self._ray.kill(agent)
        self._agents.clear()
        if self._group is not None:
            self._ray.util.remove_placement_group(self._group)
            self._group = None
        if self._owned:
            self._ray.shutdown()


def _connect(ray: Any, address: str) -> None:
    host, _, port = address.rpartition(":")
    try:
        if port.isdecimal():  # else Ray tries for minutes
            socket.create_connection((host, int(port)), _ANSWER_S).close()
        with _keeping_signals():
            ray.init(address=address, log_to_driver=False, logging_level="error")
    except OSError as error:
        first = str(error).partition("\n")[0]
        raise ValueError(
            f"cluster.address={address}: no Ray cluster there ({first}): start one with 'ray start'"
        ) from None


@contextmanager
def _keeping_signals() -> Iterator[None]:
    """Restore our signal handlers: Ray would end the driver at SIGTERM before it keeps its work."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in OUTSIDE}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Agent:
    """Runs an agent's process, which ends with it."""

    def run(self, host: str, port: int, key: str, name: str) -> int:
        # The process ends with this actor, as its standard input closes.
        with start_agent(host, port, key, name) as agent:
            return agent.wait()
