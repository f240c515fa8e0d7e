"""A Ray cluster on this machine."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

MEMORY = 80_000_000
"""Bytes of a node's object store, the least that there may be."""


@contextmanager
def ray_nodes(count: int) -> Iterator[Any]:
    """So many nodes of a core each, and a head without any."""
    utils = pytest.importorskip("ray.cluster_utils")
    head = {"object_store_memory": MEMORY, "num_cpus": 0, "include_dashboard": False}
    made = utils.Cluster(initialize_head=True, head_node_args=head)
    made.members = [made.add_node(num_cpus=1, object_store_memory=MEMORY) for _ in range(count)]
    try:
        yield made
    finally:
        made.shutdown()
