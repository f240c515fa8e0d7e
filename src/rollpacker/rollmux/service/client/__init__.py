"""The daemon as jobs, nodes and commands see it.

Nothing here knows the daemon's inside.
"""

from rollpacker.rollmux.service.client.client import MuxClient
from rollpacker.rollmux.service.client.phase import Phases

__all__ = ["MuxClient", "Phases"]
