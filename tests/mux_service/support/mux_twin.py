"""A second core on a copy of a world's database, and what people see of a core."""

import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mux_world import TTL, World

from rollpacker.core.codec import dumps, loads
from rollpacker.rollmux.service.state.transaction_log import TransactionLog
from rollpacker.rollmux.service.store import Store
from rollpacker.rollmux.service.views import views


@contextmanager
def twin(world: World) -> Iterator[TransactionLog]:
    """Started at this moment on what is on disk."""
    folder = Path(tempfile.mkdtemp(prefix="mux-twin-"))
    shutil.copytree(world.folder, folder, dirs_exist_ok=True)
    store = Store(folder / "mux.sqlite")
    try:
        yield TransactionLog(store, None, TTL, lambda: world.time)
    finally:
        store.close()
        shutil.rmtree(folder)


def seen(core: TransactionLog) -> dict[str, Any]:
    """All views."""
    nodes = [*core.leased.slots, *core.leased.scheduler.cluster.nodes, "nobody"]
    return {
        "status": views.status(core),
        "jobs": [views.job(core, name) for name in core.leased.jobs],
        "nodes": [views.node(core, name) for name in nodes],
        "timeline": views.timeline(core, 1e9),
        "queue": core.queue(),
        "look": core.leased.scheduler.next_look(),
    }


def lasting(found: dict[str, Any]) -> Any:
    """Without what begins anew at every start: leases, forecasts, when agents reported."""
    text = dumps(found).decode()
    text = re.sub(r'"starts_between_s":(null|\[[^]]*\])', '"starts_between_s":0', text)
    return loads(re.sub(r'"(ttl_s|starts_in_s|reported_s)":[^,}]+', r'"\1":0', text))
